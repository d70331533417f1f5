"""Two prefill and two decode instances: the same answers as one, whatever dies or changes."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import (
    SOON_S,
    Running,
    eventually,
    kill_all,
    pids_of,
    serve_command,
    serving,
)
from tests.serve.test_overload import require_nothing_left
from tests.serve.test_roles import SIZES, everybody, handoffs, reported, require_same
from tests.serve.test_roles_alone import Roles, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
CLIENTS = 4


def prompts_of(topic: str, count: int) -> list[str]:
    rest = "who has it sends it on, part by part. " * 3
    return [f"{topic}, number {number}: {rest}" for number in range(count)]


def answers(running: Running, prompts: list[str], **more: Any) -> list[Any]:
    """What the server says to several clients at once."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(reported, running, each, logprobs=3, **more) for each in prompts]
        return [each.result(timeout=SOON_S) for each in asked]


def require_all_same(server: Running, prompts: list[str], found: list[Any]) -> None:
    for expected, each in zip(answers(server, prompts, cache="off"), found, strict=True):
        require_same(each, expected)


def delivered(running: Running) -> dict[str, int]:
    return {name: ends.get("delivered", 0) for name, ends in handoffs(running).items()}


def roles(running: Running) -> dict[str, str]:
    return {each["instance"]: each["role"] for each in everybody(running)}


@pytest.fixture(scope="module")
def fleet(model_folder: Path) -> Iterator[Running]:
    with serving(model_folder, "--prefill", "2", "--decode", "2", *SIZES) as running:
        yield running


def test_any_prefill_instance_hands_over_to_any_decode_instance(
    server: Running, fleet: Running
) -> None:
    prompts = prompts_of("Anybody may compute it", 12)

    found = answers(fleet, prompts)

    require_all_same(server, prompts, found)
    counts = delivered(fleet)
    assert sorted(counts) == NAMES
    assert all(counts.values()), counts
    assert counts["decode-0"] + counts["decode-1"] == len(prompts)


# A pair's prefill instance is killed in `test_roles`.
@pytest.mark.long
def test_a_prefill_instance_that_is_killed_is_replaced_by_the_other_one(
    server: Running, fleet: Running
) -> None:
    prompts = prompts_of("One of them dies", 12)
    victims = pids_of("prefill-0", fleet)
    with ThreadPoolExecutor(1) as client:
        # Stopped, it computes nothing and does not say so: some requests wait for it.
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        asked = client.submit(answers, fleet, prompts)
        # Whoever stands still for long is given up: then they may have ended before we looked.
        eventually(lambda: claiming(fleet) > 0 or asked.done(), wanted=True)
        kill_all(victims)
        found = asked.result(timeout=SOON_S)

    require_all_same(server, prompts, found)
    everybody_is_back(fleet)


def test_a_decode_instance_that_is_killed_comes_back_to_both_prefill_instances(
    server: Running, fleet: Running
) -> None:
    [victim] = pids_of("decode-1", fleet)

    os.kill(victim, signal.SIGKILL)
    # Its next life has been handed nothing yet.
    eventually(lambda: [each["handoffs"] for each in found_as(fleet, "decode-1")], [{}])
    everybody_is_back(fleet)
    prompts = prompts_of("It has come back", 8)
    found = answers(fleet, prompts)

    require_all_same(server, prompts, found)
    assert delivered(fleet)["decode-1"] > 0


def test_an_instance_changes_its_role_under_load(server: Running, fleet: Running) -> None:
    everybody_is_back(fleet)
    prompts = prompts_of("Roles change meanwhile", 24)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(answers, fleet, prompts)
        there = change_role(fleet, "decode-1", "prefill")
        meanwhile = roles(fleet)
        back = change_role(fleet, "decode-1", "decode")
        found = asked.result(timeout=SOON_S)

    require_all_same(server, prompts, found)
    assert meanwhile["decode-1"] == "prefill"
    assert (there["before"], there["unfinished"]) == ("decode", 0)
    assert (back["before"], back["unfinished"]) == ("prefill", 0)
    assert roles(fleet)["decode-1"] == "decode"
    assert sorted(fleet.client.post("/admin/audit").json()["in_order"]) == NAMES
    require_nothing_left(fleet)


def change_role(running: Running, name: str, role: str) -> Any:
    # A busy machine takes its time for the requests of the old role.
    wish = {"instance": name, "role": role, "timeout_s": SOON_S / 2}
    answer = running.client.post("/admin/role", json=wish)
    assert answer.status_code == 200, answer.text
    return answer.json()


def claiming(running: Running) -> int:
    """Prompts that the decode instances wait for; a stopped prefill instance would not answer."""
    decodes = [each for name in ("decode-0", "decode-1") for each in found_as(running, name)]
    return sum(each["claiming"] for each in decodes)


def found_as(running: Running, name: str) -> list[Any]:
    """The statistics of an instance, if it is there."""
    answer = running.client.get("/cache", params={"instance": name}).json()
    found: list[Any] = answer.get("instances", [])
    return found


def everybody_is_back(running: Running) -> None:
    there = dict.fromkeys(NAMES, True)
    eventually(lambda: running.client.get("/health").json()["instances"], there)


# Joining is in `test_roles_alone`, and so is an instance that leaves.
@pytest.mark.long
def test_instances_join_a_router_and_leave_it_while_it_answers(
    server: Running, model_folder: Path
) -> None:
    fleet = Roles(model_folder)
    with ExitStack() as stack:
        router = stack.enter_context(serve_command(*fleet.of("router")))
        stack.enter_context(serve_command(*fleet.of("decode")))
        first = stack.enter_context(serve_command(*fleet.of("prefill")))
        line_of(router)
        running = Running(router, line_of(router).partition(" at ")[2].split("/v1")[0])
        stack.callback(running.client.close)
        for name, command in (("prefill-0", first),):
            assert line_of(command).startswith(f"penstock: ready: {name} has joined")
        stack.enter_context(serve_command(*fleet.of("prefill"), "--number", "1"))
        three = {"decode-0": True, "prefill-0": True, "prefill-1": True}
        eventually(lambda: running.client.get("/health").json()["instances"], three)
        prompts = prompts_of("All three are here", 4)
        found = answers(running, prompts)
        # A prefill instance hears later than the decode instance that a prompt was delivered.
        eventually(lambda: sum(delivered(running).values()), 2 * len(prompts))
        counts = delivered(running)

        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=SOON_S) == 0
        two = {"decode-0": True, "prefill-1": True}
        eventually(lambda: running.client.get("/health").json()["instances"], two)
        more = prompts_of("One has left", 3)
        found += answers(running, more)

        require_all_same(server, [*prompts, *more], found)
        assert min(counts.values()) > 0
        both = {"decode-0": counts["decode-0"] + 3, "prefill-1": counts["prefill-1"] + 3}
        eventually(lambda: delivered(running), both)
