"""A pair that one command starts and that joins the router of another one, through its changes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import SOON_S, Running, eventually, serve_command
from tests.serve.streams import streams_until_killed
from tests.serve.test_roles import SIZES, STORY, everybody, reported, require_same
from tests.serve.test_roles_alone import Roles, kill_in_mid_load, line_of, require_survived

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {"prefill-2": True, "decode-2": True}


def router_of(roles: Roles, stack: ExitStack) -> Running:
    """A router with the joined pair behind it."""
    process = stack.enter_context(serve_command(*roles.of("router")))
    assert line_of(process).endswith(f"waits for instances at {roles.router}")
    running = Running(process, line_of(process).partition(" at ")[2].split("/v1")[0])
    stack.callback(running.client.close)
    eventually(lambda: running.client.get("/health").json()["instances"], NAMES)
    return running


def state_of(running: Running, key: str) -> dict[str, Any]:
    return {each["instance"]: each[key] for each in everybody(running)}


# One command for each of the pair, and its next router: in `test_roles_alone`.
@pytest.mark.long
def test_a_joined_pair_hands_over_after_new_weights_and_to_the_next_router(
    server: Running, model_folder: Path
) -> None:
    roles = Roles(model_folder)
    other = "What was computed with other weights is nobody's any more. " * 3
    joined = (*roles.model, "--router", roles.router, *SIZES, "--number", "2")
    with ExitStack() as stack:
        pair = stack.enter_context(serve_command(*joined, "--prefill-tp", "2"))
        first = router_of(roles, stack)
        lines = {line_of(pair), line_of(pair)}
        assert lines == {f"penstock: ready: {name} has joined {roles.router}" for name in NAMES}

        found = reported(first, STORY, logprobs=5)
        require_same(found, reported(server, STORY, logprobs=5, cache="off"))
        assert state_of(first, "handoffs")["decode-2"] == {"delivered": 1}

        _weights_change(first)
        again = reported(first, STORY, logprobs=5)
        require_same(again, found)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert state_of(first, "handoffs")["decode-2"] == {"delivered": 2}

        kill_in_mid_load(first)
        second = router_of(roles, stack)
        require_survived(second)
        require_same(reported(second, STORY, logprobs=5), found)
        before = state_of(second, "handoffs")["decode-2"]["delivered"]
        anew = reported(second, other, logprobs=5)
        require_same(anew, reported(server, other, logprobs=5, cache="off"))

        assert state_of(second, "weights_version") == dict.fromkeys(NAMES, "w2")
        assert state_of(second, "handoffs")["decode-2"]["delivered"] == before + 1
        assert sorted(second.client.post("/admin/audit").json()["in_order"]) == sorted(NAMES)
        eventually(lambda: [each["leases"] for each in state_of(second, "cache").values()], [0, 0])
        assert pair.poll() is None


@pytest.mark.long
def test_a_role_that_changes_as_the_router_is_killed_is_known_to_the_next_router(
    server: Running, model_folder: Path
) -> None:
    roles = Roles(model_folder)
    joined = (*roles.model, "--router", roles.router, *SIZES, "--number", "2")
    with ExitStack() as stack:
        stack.enter_context(serve_command(*joined, "--prefill-tp", "1", "--decode-tp", "1"))
        first = router_of(roles, stack)
        with streams_until_killed(first.address, clients=8):
            wish = {"instance": "decode-2", "role": "both", "timeout_s": 0}
            assert first.client.post("/admin/role", json=wish).json()["unfinished"] > 0
            # It has heard of its role by now: a channel keeps its order.
            eventually(lambda: state_of(first, "role").get("decode-2"), "both")
            first.process.kill()
            first.process.wait(timeout=SOON_S)

        second = router_of(roles, stack)
        require_survived(second)
        assert state_of(second, "role") == {"prefill-2": "prefill", "decode-2": "both"}
        before = state_of(second, "handoffs")
        found = reported(second, STORY, logprobs=5)
        require_same(found, reported(server, STORY, logprobs=5, cache="off"))
        assert state_of(second, "handoffs") == before


def _weights_change(running: Running) -> None:
    answer = running.client.post("/admin/weights", json={"version": "w2"})
    assert sorted(answer.json()["reset"]) == sorted(NAMES)
