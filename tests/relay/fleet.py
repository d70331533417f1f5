"""Two engines over NIXL whose parties are killed and stopped, each in a process of its own.

    fleet = Fleet(place, Shape())                a prefill and a decode engine
    disturb(fleet, draw_acts(fleet, seed=3, kills=11, stops=4))
    fleet.finish()

This process is what drives both engines: it sends prompts to their schedulers and offers to their
ranks, starts a party again that has died, and compares every byte that was delivered. The parties
are schedulers, ranks, the relay of each rank and the supervisor of each relay.

The one rule: nothing here waits for a single party, which may be stopped or dead.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lab.fixtures.handoff_pair import LAYERS, SLOTS, Shape
from penstock.testing.writer_process import children_of
from tests.relay.party_process import SETTINGS

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

ENGINES = ("prefill", "decode")
BACK_S = 600.0
"""Within this time prompts end, and travel again, after anything; on a busy machine, too."""
AT_ONCE = 3
TOKENS = range(40, 81)
"""Of a prompt: three of them fit into the 64 blocks of 4 tokens that a rank has."""
LINES_MAX = 20
"""So many lines the parties say, about, while they hand `AT_ONCE` prompts over."""
STOPS_S = (0.1, 0.5, 3.0)
"""A party that says nothing for two seconds is suspected."""
RELAY = b"penstock.relay"


class Place(Protocol):
    """Where the parties are."""

    def start(self, name: str, shape: Shape, log: Any) -> subprocess.Popen[Any]:
        """Starts the process of a party, with pipes in and out."""


class Act(NamedTuple):
    """What is done to a party while prompts are on their way."""

    stop_s: float
    """For so long it is stopped; it is killed if this is 0."""
    victim: str
    """A party, or the relay of a rank, or its supervisor: `decode/0 relay`."""
    lines: int
    """After so many lines of the parties …"""
    pause_s: float
    """… and so many seconds."""
    is_told: bool
    """Whether the others of its engine are told that it has died, or find out."""


class PartyProcess:
    """One party, in one life after the other."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[Any]]) -> None:
        self.name = name
        self.life = 0
        self._start = start
        self.begin_life()

    def begin_life(self) -> None:
        self.life += 1
        self.is_ready = False
        self.was_killed = False
        self.told: dict[str, Any] = {}
        self.process = self._start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self.descriptor = self._output.fileno()
        os.set_blocking(self.descriptor, False)
        self._rest = b""

    def tell(self, **words: object) -> None:
        with suppress(BrokenPipeError):  # Its death is seen elsewhere.
            os.write(self._input.fileno(), json.dumps(words).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]] | None:
        """What it has said; `None` once it has ended."""
        try:
            found = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if not found:
            return None
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def pid_of(self, part: str) -> int | None:
        """Of its process, or of one that it has started; `None` if that does not run now."""
        if not part:
            return self.process.pid
        for pid in children_of(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                is_relay = RELAY in Path(f"/proc/{pid}/cmdline").read_bytes()
                if is_relay == (part == "relay"):
                    return pid
        return None

    def end_input(self) -> None:
        self._input.close()

    def bury(self) -> int:
        """Its exit status; it is killed if it still runs."""
        if self._input.closed:
            status = self.process.wait(BACK_S)
        else:
            self.process.kill()
            status = self.process.wait()
            self._input.close()
        self._output.close()
        return status


class Prompt:
    """One prompt, as both engines have it."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens = name, tokens
        self.slots: dict[str, list[int]] = {}
        """In each engine, until it gave them back."""
        self.open = {*ENGINES}
        """Engines that have to say how it ended."""
        self.computing: set[tuple[str, int]] = set()
        """Ranks that compute it, and in which life."""
        self.computed: set[str] = set()
        self.unchecked: set[tuple[str, int]] = set()
        """Ranks that compare what was delivered."""
        self.delivered = False
        self.whys: list[str] = []


class Fleet:
    """A prefill and a decode engine, and what drives them."""

    def __init__(self, place: Place, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.log = folder / "fleet.log"
        self._log = self.log.open("a")
        self._rng = random.Random(0)
        self._free = {engine: [*range(SLOTS)] for engine in ENGINES}
        self._wake: list[tuple[float, int]] = []
        self._number = 0
        self.lines_heard = 0
        self.prompts: dict[str, Prompt] = {}
        self.outcomes: Counter[str] = Counter()
        self.checked = 0
        self.ranks = {
            "prefill": [f"prefill/{n}" for n in range(shape.prefill_ranks)],
            "decode": [f"decode/{n}" for n in range(shape.decode_ranks)],
        }

        def starter(name: str) -> Callable[[], subprocess.Popen[Any]]:
            return lambda: place.start(name, shape, self._log)

        names = (*self.ranks["prefill"], *self.ranks["decode"], *ENGINES)
        self.parties = {name: PartyProcess(name, starter(name)) for name in names}

    @property
    def victims(self) -> list[str]:
        """Everybody who can be killed or stopped."""
        ranks = [*self.ranks["prefill"], *self.ranks["decode"]]
        parts = [f"{rank} {part}" for rank in ranks for part in ("relay", "supervisor")]
        return [*ENGINES, *ranks, *parts]

    # One turn of the loop.

    def turn(self, wait_s: float = 0.5) -> None:
        now = time.monotonic()
        for at, pid in [each for each in self._wake if each[0] <= now]:
            self._wake.remove((at, pid))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until = min([now + wait_s, *(at for at, _ in self._wake)])
        poll = select.poll()
        for party in self.parties.values():
            poll.register(party.descriptor, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, until - now) * 1000)}
        for party in list(self.parties.values()):
            if party.descriptor not in ready:
                continue
            lines = party.lines()
            for line in lines or ():
                self._hear(party, line)
            if lines is None:
                self._see_dead(party)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + BACK_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} within {BACK_S:g} s: {self.story()}"
            self.turn()

    def pause(self, seconds: float) -> None:
        """Goes on for so long."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.turn(left_s)

    def story(self) -> str:
        """How things stand, for messages of failures."""
        waiting = [
            (each.name, sorted(each.open), sorted(each.computing), sorted(each.unchecked))
            for each in self.prompts.values()
        ]
        told = {name: party.told for name, party in self.parties.items()}
        self._log.flush()
        tail = self.log.read_text()[-2000:]
        return f"{waiting}, {dict(self.outcomes)}, {told}, and the log ends: {tail}"

    @property
    def is_ready(self) -> bool:
        """Whether every party has started."""
        return all(party.is_ready for party in self.parties.values())

    # Prompts.

    def begin(self) -> Prompt:
        """Sends a prompt to both schedulers."""
        self._number += 1
        prompt = Prompt(f"prompt-{self._number}", self._rng.choice(TOKENS))
        self.prompts[prompt.name] = prompt
        for engine, order in (("decode", "claim"), ("prefill", "offer")):
            free = self._free[engine]
            # Blocks that were given back last are used first, in any order.
            slots = [free.pop() for _ in range(-(-prompt.tokens // self.shape.prefill_tokens))]
            self._rng.shuffle(slots)
            prompt.slots[engine] = slots
            order_words = {order: prompt.name, "tokens": prompt.tokens, "slots": slots}
            self.parties[engine].tell(**order_words)
        return prompt

    def deliver(self) -> None:
        """Hands prompts over until one arrives; they may fail while a relay starts again."""
        deadline = time.monotonic() + BACK_S
        while True:
            self.until(lambda: self.is_ready, "all parties start")
            prompt = self.begin()
            self.until(lambda: not self.prompts, "a prompt ends")
            if prompt.delivered:
                return
            assert time.monotonic() < deadline, f"no prompt arrives: {prompt.whys}, {self.story()}"
            self.pause(0.05)

    def _hear(self, party: PartyProcess, line: dict[str, Any]) -> None:
        self.lines_heard += 1
        match line:
            case {"ready": _}:
                party.is_ready = True
            case {"told": _}:
                party.told = line
            case {"offered": name, "offer": offer}:
                for rank in self.ranks["prefill"]:
                    self.prompts[name].computing.add((rank, self.parties[rank].life))
                    self.parties[rank].tell(compute=offer)
            case {"computed": name, "layer": layer} if layer == LAYERS - 1:
                self._end_computing(party, name)
            case {"dropped": name}:
                self._end_computing(party, name)
            case {"refused": name, "why": why}:
                [other] = {*ENGINES} - {party.name}
                self.parties[other].tell(cancel=name)
                self._end(party.name, name, delivered=False, why=why)
            case {"ended": name, "delivered": delivered, "right": right, "why": why}:
                assert right or not delivered, f"{name} came with another first token"
                self._end(party.name, name, delivered=delivered, why=why)
            case {"checked": name, "right": right}:
                assert right, f"{name} has wrong bytes on {party.name}: {self.story()}"
                self.checked += 1
                self.prompts[name].unchecked.discard((party.name, party.life))
                self._settle(self.prompts[name])
            case _:
                pass

    def _end_computing(self, party: PartyProcess, name: str) -> None:
        prompt = self.prompts[name]
        prompt.computing.discard((party.name, party.life))
        prompt.computed.add(party.name)
        if "prefill" in prompt.open and prompt.computed == {*self.ranks["prefill"]}:
            self.parties["prefill"].tell(first_token=name)
        self._settle(prompt)

    def _end(self, engine: str, name: str, *, delivered: bool, why: str) -> None:
        prompt = self.prompts[name]
        assert engine in prompt.open, f"{name} ended twice in {engine}"
        assert delivered or why, f"{name} failed in {engine} without a reason"
        prompt.open.remove(engine)
        prompt.whys += [f"{engine}: {why}"] if why else []
        if engine == "decode":
            self.outcomes["delivered" if delivered else "failed"] += 1
            prompt.delivered = delivered
            if not delivered and "prefill" in prompt.open:
                # A prefill engine that has started again keeps a prompt until its lease is over if
                # decode knew only its earlier life; who drives both knows better.
                self.parties["prefill"].tell(cancel=name)
            for rank in self.ranks["decode"] if delivered else ():
                prompt.unchecked.add((rank, self.parties[rank].life))
                self.parties[rank].tell(
                    check=name, tokens=prompt.tokens, slots=prompt.slots["decode"]
                )
        self._settle(prompt)

    def _settle(self, prompt: Prompt) -> None:
        """Gives blocks back that nobody needs for it; forgets a prompt that is over."""
        needed = {
            "prefill": "prefill" in prompt.open or prompt.computing,
            "decode": "decode" in prompt.open or prompt.unchecked,
        }
        for engine in ENGINES:
            if not needed[engine]:
                self._free[engine] += prompt.slots.pop(engine, [])
        if not prompt.slots:
            self.prompts.pop(prompt.name, None)

    # Trouble.

    def suffer(self, act: Act) -> None:
        """Does something to a party while prompts are on their way; waits until they have ended."""
        self.until(lambda: self.is_ready, "all parties start")
        lines = self.lines_heard + act.lines
        for _ in range(AT_ONCE):
            self.begin()
        self.until(lambda: self.lines_heard >= lines or not self.prompts, "prompts go on")
        self.pause(act.pause_s)
        name, _, part = act.victim.partition(" ")
        party = self.parties[name]
        self.until(lambda: party.pid_of(part), f"{act.victim} runs")
        pid = party.pid_of(part)
        assert pid is not None
        if act.stop_s:
            os.kill(pid, signal.SIGSTOP)
            self._wake.append((time.monotonic() + act.stop_s, pid))
        else:
            party.was_killed = not part
            os.kill(pid, signal.SIGKILL)
            if party.was_killed:
                self.until(lambda: not party.was_killed, f"{name} dies")
                self._tell_of_death(name, act)
        self.until(lambda: not self.prompts and not self._wake, f"prompts end after {act}")

    def _see_dead(self, party: PartyProcess) -> None:
        """Takes what a dead process can no longer do off the prompts; starts another one."""
        assert party.was_killed, f"{party.name} ended by itself: {party.bury()}, {self.story()}"
        party.bury()
        dead = (party.name, party.life)
        for prompt in list(self.prompts.values()):
            prompt.open.discard(party.name)
            prompt.computing.discard(dead)
            prompt.unchecked.discard(dead)
            self._settle(prompt)
        party.begin_life()

    def _tell_of_death(self, name: str, act: Act) -> None:
        engine, _, number = name.partition("/")
        told = [engine] if number else self.ranks[engine]
        for each in told if act.is_told else ():
            self.parties[each].tell(died=int(number or 0))

    # What must hold in the end.

    def ask(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """What parties hold now."""
        self._number += 1
        for name in names:
            self.parties[name].tell(tell=self._number)
        parties = [self.parties[name] for name in names]
        self.until(lambda: all(p.told.get("told") == self._number for p in parties), "an answer")
        return [party.told for party in parties]

    def require_landing_bytes(self, most: int) -> None:
        """Waits until each decode rank has no more memory that others can write to."""

        def is_back() -> bool:
            return all(told["landing_bytes"] <= most for told in self.ask(self.ranks["decode"]))

        self.until(is_back, f"landing areas shrink to {most} bytes")

    def finish(self) -> None:
        """Ends all parties, prefill ranks first; nothing may be left with the others."""
        self.deliver()
        assert [told["under_way"] for told in self.ask(ENGINES)] == [0, 0]
        assert [sorted(self._free[engine]) for engine in ENGINES] == [[*range(SLOTS)]] * 2
        for name in self.ranks["prefill"]:
            party = self.parties.pop(name)
            party.end_input()
            assert party.bury() == 0, self.story()
        self.require_landing_bytes(0)
        for party in self.parties.values():
            party.end_input()
        statuses = {name: party.bury() for name, party in self.parties.items()}
        self.parties.clear()
        assert set(statuses.values()) == {0}, f"{statuses}, {self.story()}"
        # The wheel's libraries crash when a process ends that had an agent: a relay does not.
        assert "signal 11" not in self.log.read_text()

    def close(self) -> None:
        for party in self.parties.values():
            party.bury()
        self._log.close()


def draw_acts(fleet: Fleet, *, seed: int, kills: int, stops: int) -> list[Act]:
    """Kills and stops in any order; each kind goes around all parties."""
    chance = random.Random(seed)
    chosen = []
    for count, lengths in ((kills, (0.0,)), (stops, STOPS_S)):
        victims = fleet.victims
        chance.shuffle(victims)
        chosen += [
            (victims[number % len(victims)], lengths[number % len(lengths)])
            for number in range(count)
        ]
    chance.shuffle(chosen)
    return [
        Act(
            stop_s=stop_s,
            victim=victim,
            lines=chance.randint(0, LINES_MAX),
            pause_s=chance.uniform(0.0, 0.01),
            is_told=chance.random() < 0.5,
        )
        for victim, stop_s in chosen
    ]


def disturb(fleet: Fleet, acts: Sequence[Act]) -> None:
    """Kills and stops parties in mid-handoff.

    Every prompt ends in both engines, with a reason or with the right bytes; afterwards prompts
    travel again, and each decode rank has one landing area for each prefill rank that lives.
    """
    fleet.deliver()
    for act in acts:
        fleet.suffer(act)
        fleet.deliver()
        fleet.require_landing_bytes(fleet.shape.prefill_ranks * SETTINGS.bounds.area_bytes)
    fleet.finish()
