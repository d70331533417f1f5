"""A prefill and a decode engine over NIXL, in processes of their own, that tests kill and stop."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from penstock.testing.writer_process import children_of
from tests.relay.relays import pause

if TYPE_CHECKING:
    from penstock.testing.peer_process import PeerProcess

ROLES = ("prefill", "decode")
PARTIES = ("prefill engine", "decode engine", "prefill relay", "decode relay")
BACK_S = 90.0
"""After a party was killed, prompts travel again within this time, on a busy machine, too."""


class Engines(ABC):
    """A prefill and a decode engine, each a process with a relay."""

    def __init__(self) -> None:
        self._number = 0
        self._processes = {role: self.start(role) for role in ROLES}
        for role in ROLES:
            assert self._processes[role].hear() == "ready"

    @abstractmethod
    def start(self, role: str) -> PeerProcess:
        """Starts an engine, which says `ready` when it is."""

    def begin(self) -> str:
        """Hands a prompt to both engines; returns its name."""
        self._number += 1
        name = f"prompt-{self._number}"
        for process in self._processes.values():
            process.tell(json.dumps({"prompt": name, "seed": self._number}))
        return name

    def result(self, role: str, name: str) -> dict[str, Any]:
        """How a prompt ended on one side."""
        while True:
            found: dict[str, Any] = json.loads(self._processes[role].hear())
            assert found["right"] or not found["delivered"], found
            if found["name"] == name:
                return found

    def deliver(self) -> None:
        """Hands prompts over until one arrives; they fail over while a relay starts again."""
        deadline = time.monotonic() + BACK_S
        while not (found := self.result("decode", self.begin()))["delivered"]:
            assert time.monotonic() < deadline, found["why"]
            pause(0.1)

    def pid(self, party: str) -> int:
        role, kind = party.split()
        pid = self._processes[role].pid
        return pid if kind == "engine" else children_of(pid)[-1]

    def kill(self, party: str) -> None:
        """Kills a party; an engine is started again, and a relay is by its engine."""
        role, kind = party.split()
        os.kill(self.pid(party), signal.SIGKILL)
        if kind == "engine":
            self._processes[role].close()
            self._processes[role] = self.start(role)
            assert self._processes[role].hear() == "ready"

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def disturb(engines: Engines, *, kills: int, stops: int, seed: int) -> None:
    """Kills and stops parties in mid-handoff; whatever was delivered is right (`result`)."""
    chance = random.Random(seed)
    acts = ["kill"] * kills + ["stop"] * stops
    chance.shuffle(acts)
    engines.deliver()
    for number, act in enumerate(acts):
        party = PARTIES[(number + seed) % len(PARTIES)]
        name = engines.begin()
        pause(chance.uniform(0.0, 0.03))
        if act == "kill":
            engines.kill(party)
        else:
            pid = engines.pid(party)
            os.kill(pid, signal.SIGSTOP)
            pause(chance.choice((0.1, 0.5, 3.0)))
            os.kill(pid, signal.SIGCONT)
        if (act, party) != ("kill", "decode engine"):
            engines.result("decode", name)
        engines.deliver()
