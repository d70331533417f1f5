"""A router, a prefill and a decode instance on three machines: each is killed and stopped, and so
are the processes that they started. Every answer is compared, or says that it is not there."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from penstock.relay.agents import is_installed
from tests.machines.conftest import HTTP_PORT, ROUTER_PORT, SIZES, Client, line_of
from tests.serve.conftest import READY_S, command, descendants, eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.machines.conftest import Reference, Site
    from tests.machines.machines import Machine

ROLES = ("router", "prefill", "decode")
PARTS = {"instance": "penstock_serve.engine.instance", "relay": "penstock.relay"}
"""Processes of an instance, by the module that they run."""
VICTIMS = (*ROLES, *(f"{role} {part}" for role in ROLES[1:] for part in PARTS))
STORY = "What was computed on one machine is answered on the other, or it is computed again. " * 3
AT_ONCE = 4
STOPS_S = (0.5, 8.0)
"""A machine that says nothing for 6.2 s is given up."""


class Answer(NamedTuple):
    """What became of a prompt."""

    prompt: str
    status: int
    """0: the connection was lost."""
    text: str = ""


class Servers:
    """The three commands, which are started again when they were killed."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._machines: dict[str, Machine] = {role: site.add(role) for role in ROLES}
        host = self._machines["router"].host
        self._address = f"tcp://{host}:{ROUTER_PORT}"
        self._web = ("--host", host, "--port", str(HTTP_PORT))
        self.client = Client(self._machines["router"], f"http://{host}:{HTTP_PORT}")
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for role in ROLES:
            self.start(role)

    def start(self, role: str) -> None:
        options = ("--role", role, "--router", self._address, "--drain-s", "1")
        machine = self._machines[role]
        if role == "router":
            self._processes[role] = self._site.serve(machine, *options, *self._web)
            line_of(self._processes[role], "penstock: router at ")
            return
        own = ("--handoff-host", machine.host, *SIZES)
        self._processes[role] = self._site.serve(machine, *options, *own)
        line_of(self._processes[role], f"penstock: ready: {role}-0 has joined {self._address}")

    def pid_of(self, victim: str) -> int:
        """Of a command, or of a process that it has started."""
        role, _, part = victim.partition(" ")
        pid = self._processes[role].pid
        if not part:
            return pid
        deadline = time.monotonic() + READY_S
        while True:
            found = [each for each in descendants(pid) if PARTS[part] in command(each)]
            if found:
                return found[-1]
            assert time.monotonic() < deadline, f"{victim} does not run"
            select.select([], [], [], 0.05)

    def kill(self, victim: str) -> None:
        os.kill(self.pid_of(victim), signal.SIGKILL)

    def restart(self, victim: str) -> None:
        """Starts a command again that was killed; what a command has started, it starts again."""
        if victim in ROLES:
            assert self._processes[victim].wait(READY_S) == -signal.SIGKILL
            self.start(victim)

    def stop(self, victim: str, seconds: float) -> None:
        pid = self.pid_of(victim)
        os.kill(pid, signal.SIGSTOP)
        select.select([], [], [], seconds)
        os.kill(pid, signal.SIGCONT)

    def require_no_crash(self) -> None:
        """A relay that was not killed ends orderly, not in the destructors of NIXL's libraries."""
        for machine in self._machines.values():
            assert "signal 11" not in self._site.log(machine)

    def ask(self, prompt: str) -> Answer:
        try:
            answer = self.client.complete(prompt)
        except httpx.TransportError:
            return Answer(prompt, 0)
        if answer.status_code != 200:
            return Answer(prompt, answer.status_code)
        return Answer(prompt, 200, answer.json()["choices"][0]["text"])

    def decode(self) -> Any:
        """What the decode instance reports; nothing while it is away."""
        instances = self.client.get("/cache").json()["instances"]
        return next((each for each in instances if each["instance"] == "decode-0"), {})

    def delivered(self) -> int:
        found: int = self.decode().get("handoffs", {}).get("delivered", 0)
        return found


@pytest.fixture(scope="module")
def servers(site: Site) -> Iterator[Servers]:
    if not is_installed():
        pytest.skip("KV between machines needs NIXL, which is not installed")
    found = Servers(site)
    yield found
    found.client.close()


def require_handed_over(servers: Servers, right: Reference, about: str) -> None:
    """Waits until a prompt was handed over; every answer on the way is right."""
    servers.client.wait_for("prefill-0", "decode-0")
    turns = itertools.count()

    def is_delivered() -> bool:
        before = servers.delivered()
        answer = servers.ask(f"{about} {next(turns)}. {STORY}")
        require_right([answer], right, {200, 503})
        return servers.delivered() > before

    eventually(is_delivered, wanted=True)


def require_right(found: list[Answer], right: Reference, statuses: set[int]) -> None:
    assert {answer.status for answer in found} <= statuses
    for answer in found:
        assert answer.status != 200 or answer.text == right.text(answer.prompt)


@pytest.mark.long
@pytest.mark.parametrize("stop_s", STOPS_S)
def test_a_role_that_is_killed_or_stopped_costs_no_wrong_answer(
    servers: Servers, right: Reference, stop_s: float
) -> None:
    chance = random.Random(f"roles that are stopped for {stop_s} s")
    acts = [*((0.0, victim) for victim in VICTIMS), *((stop_s, victim) for victim in ROLES)]
    chance.shuffle(acts)
    require_handed_over(servers, right, f"Before {stop_s}")
    area_bytes = servers.decode()["landing_bytes"]
    assert area_bytes > 0
    for number, (seconds, victim) in enumerate(acts):
        prompts = [f"Act {number} of {stop_s}, prompt {each}. {STORY}" for each in range(AT_ONCE)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            asked = [threads.submit(servers.ask, prompt) for prompt in prompts]
            select.select([], [], [], chance.uniform(0.0, 0.2))
            if seconds:
                servers.stop(victim, seconds)
            else:
                servers.kill(victim)
                servers.restart(victim)
            found = [each.result(READY_S) for each in asked]

        # Only with the router itself, a connection to it is lost.
        is_cut = victim == "router" and not seconds
        require_right(found, right, {200, 503, 0} if is_cut else {200, 503})
        require_handed_over(servers, right, f"After act {number} of {stop_s}")
        eventually(lambda: servers.decode().get("landing_bytes", 0) <= area_bytes, wanted=True)
    servers.require_no_crash()
