"""The handoff benchmark over NIXL, beside a plain NIXL write of the same bytes.

| side                   | what is measured                                                     |
|------------------------|----------------------------------------------------------------------|
| `plain NIXL write`     | two processes that do nothing else, in pieces as large as parts      |
| `handoff, at once`     | all layers are computed: from then until decode could begin          |
| `handoff, by layers`   | layers are computed one after the other, and are sent meanwhile      |
| `handoff, slow layers` | the same with much time between: each layer is sent by itself        |
| `handoff, 4 prompts`   | four prompts at once, and the CPU time of decode's engine thread     |

A rank with its relay has half of the cores, and so has its side of the plain write, which never
sleeps. Sides take turns in every round.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.bench.handoff import BENCH, PACE, SLOW_PACE, BenchChild, CorePair, engines
from lab.bench.handoff_rank import BenchShape, print_json
from lab.bench.measure import summarize
from penstock.config.values import NIXL
from penstock.errors import UnavailableError
from penstock.relay.agents import ENVIRONMENT, Nixl, NixlAgent
from penstock.relay.process import require_nixl
from penstock.tiers.arena import Arena
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lab.bench.handoff import Engines, Ran, RanTogether
    from lab.bench.report import BenchReport

PROGRAM = "from lab.bench.handoff_nixl import main; main()"
SHAPES = (
    BenchShape(layers=16, tokens=1024, block_tokens=64, order="head major"),
    BenchShape(layers=16, tokens=1024, block_tokens=16, order="head major"),
)
PIECE_BYTES = 4 << 20
"""As large as a part of these shapes: a layer."""
PROMPTS = 4
THROUGHPUT_MIN = 0.95
EXPOSED_MAX = 1.2
THREAD_MAX = 0.02
PATIENCE_S = 60.0


class NixlRound(NamedTuple):
    """One measurement of each side."""

    plain_s: float
    at_once: Ran
    by_layers: Ran
    slow: Ran
    together: RanTogether
    """Four prompts."""


def run_handoff_over_nixl(
    report: BenchReport, *, rounds: int, shapes: Sequence[BenchShape] = SHAPES
) -> None:
    """Measures every shape, and adds rows and ratios.

    Raises:
        ConfigError: NIXL is not installed.
    """
    require_nixl("--transport")
    cores = sorted(os.sched_getaffinity(0))
    sides = CorePair.halves(cores)
    if len(cores) < 4:
        report.add_note(
            f"{len(cores)} cores: a rank shares one with its relay, so packing and sums take away "
            "from what NIXL gets, and the plain write has both for itself"
        )
    for shape in shapes:
        size = sum(shape.layout().buffer_bytes.values())
        with engines(shape, sides, NIXL) as both, plain_write(size, sides) as plain:
            both.run()  # Connects, and touches every page.
            plain.run()
            layer_s = statistics.median(both.run().total_s for _ in range(3)) / shape.layers
            found = [_round(both, plain, layer_s, number) for number in range(rounds)]
        _add_rows(report, shape, found)
        _add_ratios(report, shape, found)


def _round(both: Engines, plain: PlainWrite, layer_s: float, number: int) -> NixlRound:
    # The order of the sides is reversed in every other round.
    sides: list[Callable[[], Any]] = [
        plain.run,
        both.run,
        lambda: both.run(layer_s=PACE * layer_s),
        lambda: both.run(layer_s=SLOW_PACE * layer_s),
        lambda: both.run_together(PROMPTS),
    ]
    order = range(5) if number % 2 == 0 else range(4, -1, -1)
    found = {at: sides[at]() for at in order}
    return NixlRound(*(found[at] for at in range(5)))


def _add_rows(report: BenchReport, shape: BenchShape, found: Sequence[NixlRound]) -> None:
    def add(side: str, metric: str, seconds: Sequence[float]) -> None:
        report.add_row(
            bench=BENCH,
            side=side,
            params={
                "layers": shape.layers,
                "tokens": shape.tokens,
                "block_tokens": shape.block_tokens,
                "order": shape.order,
                "transport": NIXL,
            },
            metric=metric,
            unit="ns",
            summary=summarize([1e9 * each for each in seconds]),
        )

    add("plain NIXL write", "all bytes", [each.plain_s for each in found])
    add("handoff, at once", "all bytes", [each.at_once.total_s for each in found])
    add("handoff, at once", "source CPU", [each.at_once.source_cpu_s for each in found])
    add("handoff, at once", "target CPU", [each.at_once.target_cpu_s for each in found])
    add("handoff, by layers", "exposed", [each.by_layers.exposed_s for each in found])
    add("handoff, slow layers", "exposed", [each.slow.exposed_s for each in found])
    together = [each.together for each in found]
    side = f"handoff, {PROMPTS} prompts"
    add(side, "all bytes", [each.total_s for each in together])
    add(side, "target CPU", [each.target_cpu_s for each in together])
    add(side, "target's engine thread, CPU", [each.target_thread_s for each in together])


def _add_ratios(report: BenchReport, shape: BenchShape, found: Sequence[NixlRound]) -> None:
    name = f"{shape.order}, blocks of {shape.block_tokens}"
    report.add_ratio(
        f"throughput against a plain NIXL write, {name}",
        statistics.median(each.plain_s / each.at_once.total_s for each in found),
        at_least=THROUGHPUT_MIN,
    )
    report.add_ratio(
        f"throughput of {PROMPTS} prompts against a plain NIXL write, {name}",
        statistics.median(PROMPTS * each.plain_s / each.together.total_s for each in found),
        at_least=THROUGHPUT_MIN,
    )
    report.add_ratio(
        f"exposed, against sending one layer, {name}",
        statistics.median(each.by_layers.exposed_s / each.slow.exposed_s for each in found),
        at_most=EXPOSED_MAX,
    )
    report.add_ratio(
        f"share of decode's thread, {PROMPTS} prompts, {name}",
        statistics.median(each.together.target_thread_s / each.together.total_s for each in found),
        at_most=THREAD_MAX,
    )


class PlainWrite:
    """Two processes that write and receive; see `plain_write`."""

    def __init__(self, size: int, cores: CorePair) -> None:
        self._target, self._source = (
            BenchChild(PROGRAM, [role, str(size), json.dumps(some)], dict(ENVIRONMENT))
            for role, some in (("target", cores.target), ("source", cores.source))
        )
        area = self._answer(self._target, "metadata")
        self._source.command(**area)
        self._answer(self._source, "connected")

    def run(self) -> float:
        """Seconds from the first byte until the target has all notices."""
        self._target.command(run=1)
        self._answer(self._target, "receives")
        self._source.command(run=1)
        began: float = self._answer(self._source, "began")["began"]
        ended: float = self._answer(self._target, "ended")["ended"]
        return ended - began

    def close(self) -> None:
        for child in (self._source, self._target):
            child.close()

    def _answer(self, child: BenchChild, word: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            child.look()
            for message in child.messages:
                if word in message:
                    child.messages.remove(message)
                    return message
            if time.monotonic() > deadline:
                raise UnavailableError(f"the plain write has not answered in {PATIENCE_S} s")
            wait_readable(child.output, deadline)


@contextmanager
def plain_write(size: int, cores: CorePair) -> Iterator[PlainWrite]:
    """A writer and a target that run where the two sides of the handoff do."""
    plain = PlainWrite(size, cores)
    try:
        yield plain
    finally:
        plain.close()


def main() -> None:
    """Runs one side of the plain write until its standard input ends."""
    role, size = sys.argv[1], int(sys.argv[2])
    os.sched_setaffinity(0, json.loads(sys.argv[3]))
    arena = Arena.create(size, name="plain", huge_pages=False)
    agent = NixlAgent(Nixl(), arena.fd, size)
    pieces = [(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
    if role == "target":
        _receive(agent, len(pieces))
    else:
        _send(agent, pieces)
    agent.close()
    os._exit(0)  # The destructors of the wheel's libraries would end with SIGSEGV.


def _receive(agent: NixlAgent, pieces: int) -> None:
    print_json(metadata=agent.metadata.hex(), address=agent.address)
    for _ in sys.stdin:
        print_json(receives=pieces)
        deadline, count = time.monotonic() + PATIENCE_S, 0
        while count < pieces and time.monotonic() < deadline:
            count += len(agent.advance())
        print_json(ended=time.monotonic(), count=count)


def _send(agent: NixlAgent, pieces: list[tuple[int, int]]) -> None:
    area = json.loads(sys.stdin.readline())
    agent.connect(bytes.fromhex(area["metadata"]))
    print_json(connected=True)
    for _ in sys.stdin:
        deadline = time.monotonic() + PATIENCE_S
        print_json(began=time.monotonic())
        writes = [agent.begin_write([piece], area["address"], b"piece") for piece in pieces]
        while writes and time.monotonic() < deadline:
            writes = [write for write in writes if not agent.is_done(write)]
