"""How fast one process writes into the memory of another, against a plain copy.

    python -m lab.bench.write_speed [PARTS]

A writer process copies parts of 1 MiB, first within its own memory, then through a shared-memory
link into the landing area of this process, each with a notice that is taken here. The times are
the writer's, each the best of five rounds. On a machine that is busy with other things, its CPU
time says more than the clock.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.testing.writer_process import PATIENCE_S, peer_process
from penstock.transport.remote import Span
from penstock.transport.shared_memory import SharedTarget, connect_shared
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.writer_process import PeerProcess

PART_BYTES = 1 << 20
BERTHS = 64
NOTICE = bytes(600)
"""As long as the name of a part and the sums of some seventy cells."""
ROUNDS = 5
WRITER = "import sys; from lab.bench.write_speed import write; write(sys.argv[1], sys.argv[2])"


class Times(NamedTuple):
    """How long a writer took for all its parts."""

    wall_s: float
    cpu_s: float


def write(description: str, parts: str) -> None:
    """What the writer process does: it prints a line of times for each round and way."""
    source = np.random.default_rng(0).integers(0, 256, BERTHS * PART_BYTES, dtype=np.uint8)
    own = np.zeros_like(source)
    offsets = [number % BERTHS * PART_BYTES for number in range(int(parts))]
    link = connect_shared(bytes.fromhex(description))
    while not link.connected:
        assert link.descriptor is not None
        wait_readable(link.descriptor, time.monotonic() + PATIENCE_S)
        link.observe(budget_bytes=0)

    def copy() -> None:
        for at in offsets:
            own[at : at + PART_BYTES] = source[at : at + PART_BYTES]

    def send() -> None:
        for at in offsets:
            link.post([Span(source[at : at + PART_BYTES], at)], NOTICE)
            link.observe(budget_bytes=2 * PART_BYTES)
        while link.busy:
            link.observe(budget_bytes=2 * PART_BYTES)

    for _ in range(ROUNDS):
        for way in (copy, send):
            times = _timed(way)
            sys.stdout.write(f"{times.wall_s} {times.cpu_s}\n")
            sys.stdout.flush()
        sys.stdin.readline()


def _timed(way: Callable[[], None]) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def measure(parts: int) -> tuple[Times, Times]:
    """The plain copy, and the writes, each the best of its rounds."""
    target = SharedTarget()
    area = target.open_area("speed", BERTHS * PART_BYTES)
    copies: list[Times] = []
    writes: list[Times] = []
    with peer_process(WRITER, area.description.hex(), str(parts)) as peer:
        while area.connection is None:
            wait_readable(target.descriptor, time.monotonic() + PATIENCE_S)
            target.notices()
        for _ in range(ROUNDS):
            copies.append(_heard(peer))
            arrived = 0
            while arrived < parts:
                wait_readable(target.descriptor, time.monotonic() + PATIENCE_S)
                arrived += len(target.notices())
            writes.append(_heard(peer))
            peer.tell("")
    target.close()
    return _best(copies), _best(writes)


def _heard(peer: PeerProcess) -> Times:
    wall_s, cpu_s = peer.hear().split()
    return Times(float(wall_s), float(cpu_s))


def _best(rounds: list[Times]) -> Times:
    return Times(min(each.wall_s for each in rounds), min(each.cpu_s for each in rounds))


def main() -> None:
    """Prints the speeds and their ratio."""
    parts = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    copy, sent = measure(parts)
    gigabytes = parts * PART_BYTES / 1e9
    for clock, plain_s, sent_s in (
        ("wall", copy.wall_s, sent.wall_s),
        ("CPU of the writer", copy.cpu_s, sent.cpu_s),
    ):
        sys.stdout.write(
            f"{parts} parts of 1 MiB, {clock}: plain copy {gigabytes / plain_s:.2f} GB/s, to "
            f"another process {gigabytes / sent_s:.2f} GB/s, ratio {plain_s / sent_s:.2f}\n"
        )


if __name__ == "__main__":
    main()
