"""The handoff benchmark: what a handoff costs, and how long decode has to wait for it.

| side                    | what is measured                                                    |
|-------------------------|---------------------------------------------------------------------|
| `copy + checksum`       | one process copies the same bytes and reads them once more           |
| `copy + checksum, pieces` | the same, each piece summed while it is in the cache               |
| `pack + sums, alone`, `verify + put away, alone` | what each side does, in one process's memory |
| `handoff, at once`      | all layers are computed: throughput; also "sent after the last layer" |
| `handoff, by layers`    | layers are computed one after the other, and are sent meanwhile      |
| `handoff, slow layers`  | the same with much time between: each layer is sent by itself        |

Two rank processes, each on a core of its own, over ZeroMQ and shared memory; both schedulers are in
this process (`Engines`).

Two rules: sides take turns in every round, and ratios are medians over rounds; and no rank process
outlives the `with`.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lab.bench.handoff_rank import (
    PROGRAM,
    SETTINGS,
    BenchOrders,
    BenchShape,
    directory_of,
    keys_of,
)
from lab.bench.measure import summarize
from penstock.config.values import SHARED_MEMORY
from penstock.errors import UnavailableError
from penstock.handoff.driver.lines import zmq_lines
from penstock.handoff.driver.schedulers import DecodeSchedulerDriver, PrefillSchedulerDriver
from penstock.transport.unix_sockets import private_folder, socket_path
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lab.bench.report import BenchReport

ROUNDS = 9
SHAPES = (
    BenchShape(layers=16, tokens=1024, block_tokens=64, order="head major"),
    BenchShape(layers=16, tokens=1024, block_tokens=64, order="token major"),
    BenchShape(layers=16, tokens=1024, block_tokens=16, order="head major"),
    BenchShape(layers=16, tokens=1024, block_tokens=16, order="token major"),
)
"""64 MiB each: 8 KV heads of 128 numbers of two bytes, slots in random order at the source."""
PACE = 1.3
"""The time of a layer on the simulated device, in times of sending one of several in a row."""
SLOW_PACE = 6.0
"""The same, so slow that each layer is sent by itself."""
THROUGHPUT_MIN = 0.85
BENCH = "handoff"


class Round(NamedTuple):
    """One measurement of each side."""

    copied: Copied
    at_once: Ran
    by_layers: Ran
    slow: Ran


def run_handoff(
    report: BenchReport, *, rounds: int = ROUNDS, shapes: Sequence[BenchShape] = SHAPES
) -> None:
    """Measures every shape, and adds rows and ratios."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        report.add_note("one core: source and target share it, so the ratios say little")
    for shape in shapes:
        report.progress(f"handoff of {shape.tokens} tokens, {shape.layers} layers")
        with engines(shape, CorePair.single(cores)) as both:
            both.run()  # Connects, and touches every page.
            layer_s = statistics.median(both.run().total_s for _ in range(3)) / shape.layers
            found = [_round(both, layer_s, number) for number in range(rounds)]
        _add_rows(report, shape, found)
        _add_ratios(report, shape, found)
    report.add_note("source and target are pinned to the first and the last core")
    report.add_note(f"by layers: a layer takes {PACE} × the time to send one, by the clock")


def _round(both: Engines, layer_s: float, number: int) -> Round:
    # The order of the sides is reversed in every other round.
    sides: list[Callable[[], Copied | Ran]] = [
        both.copy,
        both.run,
        lambda: both.run(layer_s=PACE * layer_s),
        lambda: both.run(layer_s=SLOW_PACE * layer_s),
    ]
    order = range(4) if number % 2 == 0 else range(3, -1, -1)
    found = {at: sides[at]() for at in order}
    copied = found.pop(0)
    runs = [found[at] for at in (1, 2, 3)]
    assert isinstance(copied, Copied)
    return Round(copied, *(run for run in runs if isinstance(run, Ran)))


def _params(shape: BenchShape) -> dict[str, str | int | float | bool]:
    return {
        "layers": shape.layers,
        "tokens": shape.tokens,
        "block_tokens": shape.block_tokens,
        "order": shape.order,
    }


def _add_rows(report: BenchReport, shape: BenchShape, found: Sequence[Round]) -> None:
    def add(side: str, metric: str, seconds: Sequence[float]) -> None:
        report.add_row(
            bench=BENCH,
            side=side,
            params=_params(shape),
            metric=metric,
            unit="ns",
            summary=summarize([1e9 * each for each in seconds]),
        )

    add("copy + checksum", "all bytes", [each.copied.total_s for each in found])
    add("copy + checksum", "CPU", [each.copied.cpu_s for each in found])
    add("copy + checksum, pieces", "all bytes", [each.copied.pieces_s for each in found])
    add("pack + sums, alone", "CPU", [each.copied.packed_cpu_s for each in found])
    add("verify + put away, alone", "CPU", [each.copied.taken_cpu_s for each in found])
    add("handoff, at once", "all bytes", [each.at_once.total_s for each in found])
    add("handoff, at once", "one layer", [each.at_once.total_s / shape.layers for each in found])
    add("handoff, at once", "exposed", [each.at_once.exposed_s for each in found])
    add("handoff, by layers", "exposed", [each.by_layers.exposed_s for each in found])
    add("handoff, slow layers", "exposed", [each.slow.exposed_s for each in found])
    for side, runs in (
        ("handoff, at once", [each.at_once for each in found]),
        ("handoff, by layers", [each.by_layers for each in found]),
    ):
        add(side, "source CPU a part", [run.source_cpu_s / run.parts for run in runs])
        add(side, "target CPU a part", [run.target_cpu_s / run.parts for run in runs])


def _add_ratios(report: BenchReport, shape: BenchShape, found: Sequence[Round]) -> None:
    name = f"{shape.order}, blocks of {shape.block_tokens}"
    report.add_ratio(
        f"throughput against copy + checksum, {name}",
        statistics.median(each.copied.total_s / each.at_once.total_s for each in found),
        at_least=THROUGHPUT_MIN,
    )
    report.add_ratio(
        f"the same by CPU time of the busier side, {name}",
        statistics.median(
            each.copied.cpu_s / max(each.at_once.source_cpu_s, each.at_once.target_cpu_s)
            for each in found
        ),
        at_least=THROUGHPUT_MIN,
    )
    report.add_ratio(
        f"exposed, against sending one layer, {name}",
        statistics.median(each.by_layers.exposed_s / each.slow.exposed_s for each in found),
        at_most=1.5,
    )
    report.add_ratio(
        f"exposed, by layers against after the last, {name}",
        statistics.median(each.by_layers.exposed_s / each.at_once.exposed_s for each in found),
        at_most=0.5,
    )


PATIENCE_S = 60.0


class Copied(NamedTuple):
    """The same bytes, copied and summed by one process."""

    total_s: float
    cpu_s: float
    pieces_s: float
    """In pieces, each summed while it is in the cache."""
    packed_cpu_s: float
    """The source's work on all parts, in one process."""
    taken_cpu_s: float
    """The target's."""


class Ran(NamedTuple):
    """One prompt that was handed over."""

    total_s: float
    """From the start of its computation until decode could begin."""
    exposed_s: float
    """From the end of its last layer until decode could begin."""
    source_cpu_s: float
    target_cpu_s: float
    parts: int


class CorePair(NamedTuple):
    """On which cores the two sides run, with all processes and threads that they start."""

    source: tuple[int, ...]
    target: tuple[int, ...]

    @classmethod
    def single(cls, cores: Sequence[int]) -> CorePair:
        """One core each: the first and the last."""
        return cls((cores[0],), (cores[-1],))

    @classmethod
    def halves(cls, cores: Sequence[int]) -> CorePair:
        """Half of the cores each."""
        half = len(cores) // 2
        return cls(tuple(cores[:half] or cores), tuple(cores[half:]))


class RanTogether(NamedTuple):
    """Several prompts that were handed over at once."""

    total_s: float
    target_cpu_s: float
    """Of the decode rank's process."""
    target_thread_s: float
    """Of its thread that drives the handoff: the engine's."""


class _CpuTimes(NamedTuple):
    process_s: float
    thread_s: float


class BenchChild:
    """A process of the benchmark: takes commands and prints answers, each a line of JSON."""

    def __init__(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.messages: list[dict[str, Any]] = []
        self._rest = b""

    def command(self, **words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def look(self) -> None:
        try:
            found = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        if not found:
            raise UnavailableError("a rank of the benchmark ended early")
        *lines, self._rest = (self._rest + found).split(b"\n")
        self.messages += [json.loads(line) for line in lines]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Engines:
    """Two engines with one rank each; see `engines`."""

    def __init__(self, shape: BenchShape, cores: CorePair, transport: str) -> None:
        prefix = str(socket_path(private_folder()))
        directory = directory_of(shape, prefix)
        self._shape = shape
        self._number = 0
        self._prefill = PrefillSchedulerDriver(
            directory,
            zmq_lines(directory, "prefill"),
            incarnation=secrets.randbits(63) + 1,
            settings=SETTINGS,
        )
        self._decode = DecodeSchedulerDriver(
            directory,
            zmq_lines(directory, "decode"),
            incarnation=secrets.randbits(63) + 1,
            settings=SETTINGS,
        )
        self._source, self._target = (
            BenchChild(
                PROGRAM,
                [
                    msgspec.json.encode(
                        BenchOrders(
                            name=name,
                            shape=shape,
                            prefix=prefix,
                            cores=some,
                            transport=transport,
                        )
                    ).decode()
                ],
            )
            for name, some in (("prefill/0", cores.source), ("decode/0", cores.target))
        )
        self._until(
            lambda: (
                self._prefill.machine.is_open("prefill/0")
                and self._decode.machine.is_open("decode/0")
            )
        )

    def close(self) -> None:
        self._source.close()
        self._target.close()
        self._prefill.close()
        self._decode.close()

    def copy(self) -> Copied:
        """A plain copy and a checksum pass, on the source's core."""
        self._source.command(copy=1)
        answer = self._answer(self._source, "copied")
        return Copied(
            answer["copied"],
            answer["cpu_s"],
            answer["pieces"],
            answer["packed"],
            answer["taken"],
        )

    def run(self, *, layer_s: float = 0.0) -> Ran:
        """Hands a prompt over; with `layer_s` 0, all its layers are computed at once."""
        self._number += 1
        name = f"prompt-{self._number}"
        before = self._target_cpu()
        blocks = self._shape.block_count
        self._decode.submit(
            name,
            token_count=self._shape.tokens,
            slots={"decode/0": list(range(blocks))},
            keys=keys_of(name, blocks),
        )
        self._prefill.submit(name)
        self._prefill.first_token(name, (1,))
        self._source.command(run=name, layer_s=layer_s)
        ready: list[tuple[float, str]] = []
        self._until(lambda: bool(ready), ready)
        answer = self._answer(self._source, "ran")
        if ready[0][1] != "delivered":
            raise UnavailableError(f"a prompt of the benchmark was {ready[0][1]}")
        return Ran(
            total_s=ready[0][0] - answer["began"],
            exposed_s=ready[0][0] - answer["ended"],
            source_cpu_s=answer["cpu_s"],
            target_cpu_s=self._target_cpu().process_s - before.process_s,
            parts=answer["parts"],
        )

    def run_together(self, count: int) -> RanTogether:
        """Hands several prompts over at once."""
        self._number += 1
        names = [f"prompt-{self._number}-{each}" for each in range(count)]
        before = self._target_cpu()
        blocks = self._shape.block_count
        for name in names:
            self._decode.submit(
                name,
                token_count=self._shape.tokens,
                slots={"decode/0": list(range(blocks))},
                keys=keys_of(name, blocks),
            )
            self._prefill.submit(name)
            self._prefill.first_token(name, (1,))
        self._source.command(together=names)
        ready: list[tuple[float, str]] = []
        self._until(lambda: len(ready) == count, ready)
        answer = self._answer(self._source, "ran")
        if any(outcome != "delivered" for _, outcome in ready):
            raise UnavailableError(f"prompts of the benchmark were {ready}")
        after = self._target_cpu()
        return RanTogether(
            total_s=ready[-1][0] - answer["began"],
            target_cpu_s=after.process_s - before.process_s,
            target_thread_s=after.thread_s - before.thread_s,
        )

    def _target_cpu(self) -> _CpuTimes:
        self._number += 1
        self._target.command(cpu=self._number)
        answer = self._answer(self._target, "cpu")
        return _CpuTimes(answer["cpu_s"], answer["thread_s"])

    def _answer(self, child: BenchChild, word: str) -> dict[str, Any]:
        self._until(lambda: any(word in each for each in child.messages))
        answer = next(each for each in child.messages if word in each)
        child.messages.clear()
        return answer

    def _until(
        self, condition: Callable[[], bool], ready: list[tuple[float, str]] | None = None
    ) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(f"the benchmark has waited for {PATIENCE_S} s")
            self._prefill.step()
            for ended in self._decode.step():
                if ready is not None:
                    ready.append((time.monotonic(), ended.outcome.value))
            for child in (self._source, self._target):
                child.look()
            if not condition():
                self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        dues = (self._prefill.next_deadline(), self._decode.next_deadline(), deadline)
        wait_any(
            [*self._prefill.lines.waitables, *self._decode.lines.waitables],
            [
                self._source.output,
                self._target.output,
                *self._prefill.lines.descriptors,
                *self._decode.lines.descriptors,
            ],
            deadline=min(due for due in dues if due is not None),
        )


@contextmanager
def engines(
    shape: BenchShape, cores: CorePair, transport: str = SHARED_MEMORY
) -> Iterator[Engines]:
    """Two engines, each on cores of its own."""
    both = Engines(shape, cores, transport)
    try:
        yield both
    finally:
        both.close()
