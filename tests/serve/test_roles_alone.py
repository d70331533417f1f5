"""One command for each role: a router, a prefill and a decode instance that find each other."""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from tests.ports import free_ports
from tests.serve.conftest import (
    ENDLESS,
    ENDLESS_TOKENS,
    READY_S,
    SOON_S,
    Running,
    eventually,
    serve_command,
    serving,
)
from tests.serve.streams import streams_until_killed
from tests.serve.test_overload import require_nothing_left
from tests.serve.test_roles import SIZES, STORY, everybody, of_decode, reported, require_same
from tests.serve.test_stopping import stream

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a command says; there is none before it is time."""
    assert process.stdout is not None
    found = bytearray()
    # Byte by byte: what a reader holds back, `select` does not see.
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], READY_S)
        assert ready, f"the command said no more than {found!r}"
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, f"the command ended after {found!r}"
        found += byte
    return found.decode().strip()


class Roles:
    """Addresses on the loopback interface, and the options that go with them."""

    def __init__(self, folder: Path) -> None:
        self.model = ("--model", str(folder))
        [router] = free_ports(1)
        self.router = f"tcp://127.0.0.1:{router}"

    def of(self, role: str) -> tuple[str, ...]:
        own = () if role == "router" else SIZES
        port = ("--port", "0") if role == "router" else ()
        return (*self.model, "--role", role, "--router", self.router, *own, *port)


def test_one_command_for_each_role_does_what_one_for_all_does(
    server: Running, model_folder: Path
) -> None:
    roles = Roles(model_folder)
    with ExitStack() as stack:
        # Whoever comes first waits for the others.
        prefill = stack.enter_context(serve_command(*roles.of("prefill")))
        decode = stack.enter_context(serve_command(*roles.of("decode")))
        router = stack.enter_context(serve_command(*roles.of("router")))
        waits, ready = line_of(router), line_of(router)
        assert line_of(prefill) == f"penstock: ready: prefill-0 has joined {roles.router}"
        assert line_of(decode) == f"penstock: ready: decode-0 has joined {roles.router}"
        address = ready.partition(" at ")[2].split("/v1")[0]
        running = Running(router, address)
        stack.callback(running.client.close)
        both = {"prefill-0": True, "decode-0": True}
        eventually(lambda: running.client.get("/health").json()["instances"], both)

        found = reported(running, STORY, logprobs=5)

        assert waits.endswith(f"waits for instances at {roles.router}")
        require_same(found, reported(server, STORY, logprobs=5, cache="off"))
        assert of_decode(running)["handoffs"] == {"delivered": 1}
        again = _router_comes_back(roles, stack, running)
        require_same(again, reported(server, STORY, logprobs=5, cache="off"))
        assert prefill.poll() is None
        assert decode.poll() is None


def _router_comes_back(roles: Roles, stack: ExitStack, running: Running) -> object:
    """Kills the router in mid-load; who joined it joins the next one, with what was cached."""
    kill_in_mid_load(running)
    router = stack.enter_context(serve_command(*roles.of("router")))
    line_of(router)
    address = line_of(router).partition(" at ")[2].split("/v1")[0]
    anew = Running(router, address)
    stack.callback(anew.client.close)
    both = {"prefill-0": True, "decode-0": True}
    eventually(lambda: anew.client.get("/health").json()["instances"], both)

    require_survived(anew)
    found = reported(anew, STORY, logprobs=5)

    assert sorted(anew.client.post("/admin/audit").json()["in_order"]) == sorted(both)
    return found


def kill_in_mid_load(router: Running) -> None:
    """No client hangs: a stream that breaks off ends with an error."""
    with streams_until_killed(router.address, clients=8) as streams:
        router.process.kill()
        router.process.wait(timeout=SOON_S)

    assert sum(stream.received > 0 for stream in streams) > 0


def require_survived(next_router: Running) -> None:
    """Of what was under way nothing is left but what is cached; nobody has asked anew yet."""
    require_nothing_left(next_router)
    for each in everybody(next_router):
        assert each["cache"]["tiers"][0]["ready"] > 0
        # A prompt that nobody comes for is let go, not kept until its time is up.
        assert "expired" not in each["handoffs"]


@pytest.mark.long
def test_instances_that_do_everything_can_join_a_router_too(model_folder: Path) -> None:
    roles = Roles(model_folder)
    joined = (*roles.model, "--router", roles.router, *SIZES)
    with (
        serving(model_folder, "--role", "router", "--router", roles.router, wait=False) as router,
        serve_command(*joined, "--number", "4") as instance,
    ):
        waits, ready = line_of(router.process), line_of(router.process)

        assert waits.startswith("penstock: router at ")
        assert ready.startswith("penstock: ready: small-model at http://127.0.0.1:")
        assert line_of(instance) == f"penstock: ready: instance-4 has joined {roles.router}"


@pytest.mark.long  # What a stop lets end is in test_stopping; who joins and leaves, above.
@pytest.mark.parametrize("drain_s", ["600", "0"])
def test_a_joined_command_that_is_stopped_lets_its_answers_end(
    endless_model_folder: Path, drain_s: str
) -> None:
    folder = endless_model_folder
    roles = Roles(folder)
    joined = (*roles.model, "--router", roles.router, *ENDLESS, "--drain-s", drain_s)
    tokens = 200 if drain_s == "600" else ENDLESS_TOKENS
    with (
        serving(
            endless_model_folder, "--role", "router", "--router", roles.router, wait=False
        ) as router,
        serve_command(*joined) as instance,
    ):
        waits, _ = line_of(router.process), line_of(router.process)
        router.client.base_url = waits.partition(" at ")[2].split("/v1")[0]
        with stream(router, max_tokens=tokens) as lines:
            instance.send_signal(signal.SIGTERM)
            said = list(lines)

        ended = said[-1] == "data: [DONE]"
        assert ended is (drain_s == "600")
        assert ended or "in the middle of the answer" in said[-1]
        assert instance.wait(timeout=SOON_S) == 0
        eventually(lambda: router.client.get("/health").status_code, 503)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--role", "prefill"), "serve.router: is '', must be where"),
        (("--role", "router"), "serve.router: is '', must be where"),
        (("--handoff-host", "192.0.2.1"), "must be '' without serve.router"),
        (
            ("--router", "tcp://127.0.0.1:7000", "--handoff-host", "192.0.2.1"),
            "keys of the machines for engine.handoff_host",
        ),
        (("--handoff-host", "0.0.0.0"), "must be a host that other machines can dial"),
        (
            ("--role", "decode", "--router", "tcp://127.0.0.1:7000", "--prefill", "2"),
            "serve.prefill: is 2, must be 0 where engine.role is 'decode'",
        ),
        (("--role", "router", "--router", "tcp://0.0.0.0:7000"), "a host that the others can dial"),
        (("--role", "router", "--router", "127.0.0.1:7000"), "must be tcp://HOST:PORT"),
        (("--role", "router", "--router", "tcp://a:65536"), "a port from 1 to 65535"),
    ],
)
def test_a_role_that_could_not_find_the_others_is_refused(
    model_folder: Path,
    options: tuple[str, ...],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["serve", "--model", str(model_folder), *options]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_a_role_is_printed_as_a_file_that_does_the_same(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Roles(model_folder).of("decode")
    assert run(["serve", *options, "--number", "3", "--print-config"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "decode.toml"
    file.write_text(printed, encoding="utf-8")

    assert run(["serve", "--config", str(file), "--print-config"]) == 0

    assert capsys.readouterr().out == printed
    assert 'role = "decode"' in printed
    assert "number = 3" in printed
