"""Engines on machines of their own read each other's host memory: cut, slow, killed; strangers."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from penstock.relay.agents import is_installed
from penstock.transport.machine_keys import MachineKeys
from tests.machines.machines import Network, why_no_machines
from tests.runtime.stored_engine import all_but_the_last_block, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.machines.machines import Machine

PORT = 5300
ALL = all_but_the_last_block(prompt(1))
BLOCKS = len(prompt(1)) // 4
SOON_S = 300.0


class PeerMachine:
    """A machine with an engine."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.folder = machine, folder
        self.process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"{self.machine.host}:{PORT}"

    def start(self, peers: str, transport: str = "zeromq") -> None:
        with (self.folder / "log").open("w") as log:
            self.process = self.machine.python(
                "tests.machines.peer_program",
                *(str(self.folder), self.address, peers, str(self.folder / "keys"), transport),
                folder=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def close(self) -> None:
        for pipe in () if self.process is None else (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def hears(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "its engine has ended"
        return line.strip()

    def tell(self, *words: object) -> str:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.hears()

    def until(self, wanted: Callable[[str], bool], *words: object) -> None:
        pause, deadline = threading.Event(), time.monotonic() + SOON_S
        while not wanted(answer := self.tell(*words)):
            assert time.monotonic() < deadline, answer
            pause.wait(0.05)

    def knows(self, blocks: int) -> None:
        self.until(lambda answer: answer == str(blocks), "listed")


class PeerSite:
    """Machines that know each other's keys."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack) -> None:
        self._network, self._folder, self._stack = network, folder, stack

    def add(self, name: str, folder: Path) -> PeerMachine:
        machine = PeerMachine(self._network.machine(name), folder)
        self._stack.callback(machine.close)
        return machine

    def machines(self, count: int, transport: str = "zeromq") -> list[PeerMachine]:
        """Each lists all, and so itself, and has started."""
        found, keys = [], [MachineKeys.new() for _ in range(count)]
        for number in range(count):
            folder = self._folder / str(number)
            folder.mkdir()
            found.append(self.add(f"engine-{number}", folder))
        for each, own in zip(found, keys, strict=True):
            listed = own
            for other, theirs in zip(found, keys, strict=True):
                listed = listed.with_peer(other.machine.host, theirs.public)
            listed.write(each.folder / "keys")
        peers = ",".join(each.address for each in found)
        for each in found:
            each.start(peers, transport)
        for each in found:
            assert each.hears() == "ready"
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PeerSite]:
    if why := why_no_machines():
        pytest.skip(why)
    with ExitStack() as stack, Network() as network:
        yield PeerSite(network, tmp_path, stack)


@pytest.mark.long
def test_a_prefix_is_computed_once_and_found_on_seven_other_machines(site: PeerSite) -> None:
    one, *others = site.machines(8)

    assert one.tell("save", 1) == "0"

    for each in others:
        each.until(lambda answer: int(answer) >= BLOCKS, "listed")
        assert each.tell("find", 1) == str(ALL)


def test_machines_that_are_cut_off_slow_or_gone_cost_misses_and_no_more(site: PeerSite) -> None:
    one, other, third = site.machines(3)
    one.tell("save", 1)
    other.knows(BLOCKS)

    one.machine.cut()
    assert other.tell("find", 1) == "0"  # It is still listed, and does not answer.
    other.knows(0)
    assert "ok=True" in other.tell("health")
    # A reset meanwhile, which the one that is cut off does not hear of, is not kept until it does.
    third.tell("reset")
    third.until(lambda answer: "is not kept yet" in answer, "health")
    one.machine.heal()
    third.until(lambda answer: "ok=True" in answer, "health")
    assert other.tell("find", 2) == "0"
    assert third.tell("find", 1) == "0"

    def is_found(number: int) -> bool:
        one.tell("save", number)
        third.until(lambda answer: int(answer) >= BLOCKS, "listed")  # Of whichever peer.
        return third.tell("find", number) == str(ALL)

    assert any(map(is_found, range(3, 13)))
    one.machine.limit(mbit=1)
    assert other.tell("find", 3) in {"0", str(ALL)}  # In time, or computed.
    one.machine.kill()
    other.until(lambda answer: int(answer) <= 2 * BLOCKS, "listed")
    assert third.tell("find", 20) == "0"


@pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
def test_blocks_come_from_another_machine_by_nixl_also_after_it_was_cut_off(site: PeerSite) -> None:
    one, other = site.machines(2, "nixl")
    one.tell("save", 1)
    other.knows(BLOCKS)

    assert other.tell("find", 1) == str(ALL)

    one.tell("save", 2)
    other.knows(2 * BLOCKS)
    one.machine.cut()
    assert other.tell("find", 2) == "0"
    other.knows(0)
    one.machine.heal()
    other.until(lambda answer: int(answer) >= BLOCKS, "listed")

    def is_found(number: int) -> bool:
        one.tell("save", number)
        return other.tell("find", number) == str(ALL)  # Unless it is not listed yet.

    assert any(map(is_found, range(3, 13)))
    for each in (one, other):
        assert "not NIXL" not in (each.folder / "log").read_text()


def test_a_machine_whose_key_nobody_lists_reads_nothing(site: PeerSite, tmp_path: Path) -> None:
    one, other = site.machines(2)
    one.tell("save", 1)
    other.knows(BLOCKS)
    home = tmp_path / "stranger"
    home.mkdir()
    stranger = site.add("stranger", home)
    own = MachineKeys.new()
    known = MachineKeys.read(one.folder / "keys")
    own.with_peer(one.machine.host, known.public).with_peer(
        stranger.machine.host, own.public
    ).write(home / "keys")

    stranger.start(one.address)

    assert stranger.hears() == "ready"
    assert stranger.tell("find", 1) == "0"
    assert stranger.tell("listed") == "0"
