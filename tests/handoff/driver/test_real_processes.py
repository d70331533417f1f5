"""Two prefill and three decode rank processes, over ZeroMQ and shared memory, that are stopped
and killed at random.

Every request ends on both sides, every delivered byte is right, no slot leaks, and memory that
was retired is back after its writer's death.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lab.fixtures.handoff_pair import SLOTS, Shape, directory_of, keys_of
from lab.fixtures.handoff_process import PROGRAM, RankOrders, addresses
from penstock.errors import UnavailableError
from penstock.handoff.driver.lines import zmq_lines
from penstock.handoff.driver.schedulers import DecodeSchedulerDriver, PrefillSchedulerDriver
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes
from penstock.transport.unix_sockets import private_folder, socket_path
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = HandoffSettings(
    times=HandoffTimes(
        resend_s=0.1,
        resend_cap_s=1.0,
        handoff_s=10.0,
        lease_s=10.0,
        park_s=5.0,
        ping_s=0.25,
        suspect_s=1.0,
    ),
    bounds=HandoffBounds(
        berth_bytes=2048,
        berth_count=4,
        landing_bytes_max=1 << 20,
        retired_bytes_max=1 << 19,
        retired_count_max=8,
    ),
)
IN_FLIGHT = 8
PATIENCE_S = 600.0


class RankProcess:
    """One rank, in one life after the other."""

    def __init__(self, orders: RankOrders) -> None:
        self.name = orders.name
        self.life = 0
        self.stopped = False
        self._orders = msgspec.json.encode(orders).decode()
        self._start()

    def _start(self) -> None:
        self.life += 1
        self._rest = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self._orders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def command(self, **words: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # Its death is seen elsewhere.
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        try:
            found = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.stopped = number is signal.SIGSTOP

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def bury(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def begin_again(self) -> None:
        self.bury()
        self.stopped = False
        self._start()


class Request:
    """One request, from both ends."""

    def __init__(self, name: str, tokens: int, cached: int) -> None:
        self.name, self.tokens, self.cached = name, tokens, cached
        self.there: list[int] = []
        self.here: list[int] = []
        self.computed: set[str] = set()
        self.unchecked: set[tuple[str, int]] = set()
        self.open = {"prefill", "decode"}
        self.outcome = ""


class Fleet:
    """Two engines; this process is the schedulers and the supervisor of both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape = Shape()
        prefix = str(socket_path(private_folder()))
        self.directory = directory_of(self.shape, addresses(prefix))
        life = {"settings": SETTINGS}
        self.prefill = PrefillSchedulerDriver(
            self.directory,
            zmq_lines(self.directory, "prefill"),
            incarnation=secrets.randbits(63) + 1,
            **life,
        )
        self.decode = DecodeSchedulerDriver(
            self.directory,
            zmq_lines(self.directory, "decode"),
            incarnation=secrets.randbits(63) + 1,
            part_bytes_min=0,
            **life,
        )
        names = (*self.directory.prefill.rank_names, *self.directory.decode.rank_names)
        self.ranks = {
            name: RankProcess(
                RankOrders(name=name, shape=self.shape, prefix=prefix, settings=SETTINGS)
            )
            for name in names
        }
        self.free = {"prefill": list(range(SLOTS)), "decode": list(range(SLOTS))}
        self.requests: dict[str, Request] = {}
        self.outcomes: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.checked = 0
        self.wrong: list[str] = []
        self.told: dict[str, dict[str, Any]] = {}
        self.deaths = 0
        self.stops = 0
        self.wake: list[tuple[float, str]] = []

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.bury()
        self.prefill.close()
        self.decode.close()

    # One turn of the loop.

    def turn(self, *, wait_s: float = 0.05) -> None:
        for side, driver in (("prefill", self.prefill), ("decode", self.decode)):
            for ended in driver.step():
                self._end(side, ended.handoff, ended.outcome.value, ended.why)
        for rank in self.ranks.values():
            for answer in rank.answers():
                self._hear(rank, answer)
            if rank.dead:
                self._see_dead(rank)
        now = time.monotonic()
        for at, name in [each for each in self.wake if each[0] <= now]:
            self.wake.remove((at, name))
            if self.ranks[name].stopped:
                self.ranks[name].signal(signal.SIGCONT)
        if self.prefill.has_work or self.decode.has_work:
            return
        dues = (self.prefill.next_deadline(), self.decode.next_deadline(), now + wait_s)
        outputs = [rank.output for rank in self.ranks.values()]
        wait_any(
            [*self.prefill.lines.waitables, *self.decode.lines.waitables],
            [
                *outputs,
                *(rank.pidfd for rank in self.ranks.values()),
                *self.prefill.lines.descriptors,
                *self.decode.lines.descriptors,
            ],
            deadline=min(due for due in dues if due is not None),
        )

    def until(self, condition: Any, *, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, self.story()
            self.turn()

    def story(self) -> str:
        waiting = [(r.name, sorted(r.open), len(r.unchecked)) for r in self.requests.values()]
        return f"{waiting}, {dict(self.outcomes)}, {dict(self.causes)}, {self.told}"

    @property
    def everybody_is_there(self) -> bool:
        return all(
            driver.machine.is_open(name)
            for driver, engine in (
                (self.prefill, self.directory.prefill),
                (self.decode, self.directory.decode),
            )
            for name in engine.rank_names
        )

    # Requests.

    def submit(self, number: int) -> bool:
        """Sends the next request to both engines, if there is room and everybody is there."""
        plan = self.directory.plan
        tokens = self.rng.randint(1, 40)
        cached = self.rng.choice([0, 0, 0, tokens // 8 * 4])
        request = Request(f"request-{number}", tokens, cached if cached < tokens else 0)
        blocks = -(-tokens // plan.source_tokens)
        if not self.everybody_is_there or min(map(len, self.free.values())) < blocks:
            return False
        keys = keys_of(request.name, tokens, plan.source_tokens)
        missing = blocks - request.cached // plan.target_tokens
        request.there = [self._take("prefill") for _ in range(blocks)]
        request.here = [self._take("decode") for _ in range(missing)]
        self.requests[request.name] = request
        names = self.directory.decode.rank_names
        self.decode.submit(
            request.name,
            token_count=tokens,
            cached_tokens=request.cached,
            slots=dict.fromkeys(names, request.here),
            keys=keys,
        )
        try:
            self.prefill.submit(request.name)
        except UnavailableError:
            self.decode.cancel(request.name)
            self._end("prefill", request.name, "refused", "")
            return True
        for name in self.directory.prefill.rank_names:
            self.ranks[name].command(compute=request.name, tokens=tokens, slots=request.there)
        return True

    def _take(self, side: str) -> int:
        return self.free[side].pop(self.rng.randrange(len(self.free[side])))

    def _end(self, side: str, name: str, outcome: str, why: str) -> None:
        request = self.requests[name]
        assert side in request.open, f"{name} ended twice with {side}"
        request.open.remove(side)
        if side == "prefill":
            self.free["prefill"] += request.there
            self._forget_if_over(request)
            return
        self.outcomes[outcome] += 1
        self.causes[why.rsplit(" ", maxsplit=1)[-1]] += bool(why)
        request.outcome = outcome
        if outcome == "delivered":
            skipped = request.cached // self.directory.plan.target_tokens
            slots = [-1] * skipped + request.here
            for rank in self._decode_ranks():
                request.unchecked.add((rank.name, rank.life))
                rank.command(check=name, first=request.cached, tokens=request.tokens, slots=slots)
        else:
            self.free["decode"] += request.here
        self._forget_if_over(request)

    def _decode_ranks(self) -> list[RankProcess]:
        return [self.ranks[name] for name in self.directory.decode.rank_names]

    def _forget_if_over(self, request: Request) -> None:
        if not request.open and not request.unchecked:
            if request.outcome == "delivered":
                self.free["decode"] += request.here
            del self.requests[request.name]

    # Ranks.

    def _hear(self, rank: RankProcess, answer: dict[str, Any]) -> None:
        match answer:
            case {"computed": name} if name in self.requests:
                request = self.requests[name]
                request.computed.add(rank.name)
                if request.computed == set(self.directory.prefill.rank_names) and (
                    "prefill" in request.open
                ):
                    self.prefill.first_token(name, (1,))
            case {"checked": name, "right": right}:
                self.checked += 1
                if not right:
                    self.wrong.append(f"{name} on {rank.name}")
                request = self.requests[name]
                request.unchecked.discard((rank.name, rank.life))
                self._forget_if_over(request)
            case {"reported": _}:
                self.told[rank.name] = answer
            case _:
                pass

    def _see_dead(self, rank: RankProcess) -> None:
        for driver in (self.prefill, self.decode):
            if driver.machine.life.name == rank.name.split("/")[0]:
                driver.colleague_died(rank.name)
        for request in list(self.requests.values()):
            request.unchecked.discard((rank.name, rank.life))
            self._forget_if_over(request)
        rank.begin_again()

    def trouble(self) -> None:
        """Stops a rank for a while, or kills one, stopped or not."""
        rank = self.rng.choice(list(self.ranks.values()))
        if self.rng.random() < 0.4:
            self.deaths += 1
            rank.process.kill()
        elif not rank.stopped:
            self.stops += 1
            rank.signal(signal.SIGSTOP)
            long = self.rng.random() < 0.25
            for_s = self.rng.uniform(1.2, 2.0) if long else self.rng.uniform(0.02, 0.5)
            self.wake.append((time.monotonic() + for_s, rank.name))

    def ask(self, names: tuple[str, ...], number: int) -> list[dict[str, Any]]:
        for name in names:
            self.ranks[name].command(tell=number)
        self.until(lambda: all(self.told.get(n, {}).get("reported") == number for n in names))
        return [self.told[name] for name in names]


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


def run(fleet: Fleet, count: int, *, trouble_every: int, first: int = 0) -> None:
    """Hands over so many requests, with trouble after every so many."""
    fleet.until(lambda: fleet.everybody_is_there)
    submitted, troubled = 0, 0
    deadline = time.monotonic() + PATIENCE_S
    while submitted < count:
        if len(fleet.requests) < IN_FLIGHT and fleet.submit(first + submitted):
            submitted += 1
            deadline = time.monotonic() + PATIENCE_S
        assert time.monotonic() < deadline, fleet.story()
        if submitted // trouble_every > troubled:
            troubled += 1
            fleet.trouble()
        fleet.turn()
    fleet.until(lambda: not fleet.requests, patience_s=2 * PATIENCE_S)


def deliver_more(fleet: Fleet, count: int, *, first: int) -> None:
    """Hands over requests until so many more are delivered, as they are once trouble is over.

    How many trouble itself may cost is not said: each may hit all that are under way, and on a busy
    machine most are.
    """
    wanted = fleet.outcomes["delivered"] + count
    deadline = time.monotonic() + PATIENCE_S
    while fleet.outcomes["delivered"] < wanted:
        assert time.monotonic() < deadline, fleet.story()
        if len(fleet.requests) < IN_FLIGHT and fleet.submit(first):
            first += 1
        fleet.turn()
    fleet.until(lambda: not fleet.requests)
    assert not fleet.wrong, fleet.wrong


def look(fleet: Fleet, count: int) -> None:
    """What must hold at the end, before and after the last writers die."""
    targets = fleet.directory.decode.rank_names
    assert sum(fleet.outcomes.values()) == count
    assert not fleet.wrong, fleet.wrong
    assert {side: len(set(free)) for side, free in fleet.free.items()} == {
        "prefill": SLOTS,
        "decode": SLOTS,
    }
    fleet.until(lambda: fleet.everybody_is_there and not fleet.wake)
    deliver_more(fleet, 8, first=count)
    assert fleet.checked > fleet.outcomes["delivered"]
    for name in fleet.directory.prefill.rank_names:
        fleet.ranks[name].process.kill()
    fleet.until(lambda: all(not fleet.ranks[n].dead for n in fleet.directory.prefill.rank_names))
    numbers = itertools.count(1)
    fleet.until(
        lambda: all(
            each["retired_bytes"] == each["open_bytes"] == each["collections"] == 0
            for each in fleet.ask(targets, next(numbers))
        )
    )


@pytest.mark.parametrize("fleet", [3], indirect=True)
def test_memory_of_a_silent_writer_comes_back_when_it_is_dead_and_not_before(fleet: Fleet) -> None:
    run(fleet, 4, trouble_every=100)
    source = fleet.ranks["prefill/0"]
    numbers = itertools.count(1)

    def retired() -> int:
        told = fleet.ask(fleet.directory.decode.rank_names, next(numbers))
        return sum(each["retired_bytes"] for each in told)

    source.signal(signal.SIGSTOP)
    assert fleet.submit(100)
    fleet.until(lambda: retired() > 0)
    silent = retired()
    source.signal(signal.SIGCONT)
    fleet.until(lambda: not fleet.requests)
    run(fleet, 8, trouble_every=100, first=200)
    alive = retired()
    # On a busy machine the other one may have been silent for too long as well.
    for name in fleet.directory.prefill.rank_names:
        fleet.ranks[name].process.kill()
    fleet.until(lambda: retired() == 0)

    assert silent > 0
    assert alive >= silent
    assert not fleet.wrong


@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_ranks_that_are_stopped_and_killed_lose_no_request_and_no_memory(fleet: Fleet) -> None:
    count = 30

    run(fleet, count, trouble_every=12)

    assert fleet.deaths + fleet.stops > 0
    look(fleet, count)


@pytest.mark.long
@pytest.mark.parametrize("fleet", [7], indirect=True)
def test_a_thousand_requests_with_ranks_that_are_stopped_and_killed(fleet: Fleet) -> None:
    count = 1000

    run(fleet, count, trouble_every=10)

    assert fleet.deaths > 10
    assert fleet.stops > 10
    look(fleet, count)
