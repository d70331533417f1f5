"""A store process, and engines with one or several ranks that use it, for tests."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from contextlib import ExitStack, contextmanager
from hashlib import shake_128
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import Purpose
from penstock.machine.effects import Abandon, Copy
from penstock.machine.events import CopyReport
from penstock.store.base import part_name
from penstock.store.process import link
from penstock.store.process.client import ArenaOffer
from penstock.store.process.link import StoreBack, StoreLink, StoreLost, StoreState
from penstock.store.process.messages import StoreConfig, StoreTierConfig
from penstock.tiers.host import HostTier
from penstock.transport.waiting import wait_any
from penstock.vocabulary.checksums import life_salt
from penstock.vocabulary.keys import KEY_BYTES, OperationId
from tests.forked import Forked
from tests.stopped import stop_process
from tests.store.segments import BLOCK_BYTES, FORM, SPAN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store.process.link import StoreResult

    MakeEngine = Callable[..., "StoreEngine"]

MEMORY_STORE = "tests.store.memory_tier"
PATIENCE_S = 120.0
"""How long a test waits for what has to happen; a busy machine starts processes slowly."""
HUB, DISK = 1, 2
SLOTS = 64
SPACE = bytes(range(16))


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big") if number else b"first".ljust(KEY_BYTES)


def part_of_block(number: int, rank: int) -> bytes:
    return shake_128(bytes([rank]) + key_of(number)).digest(BLOCK_BYTES)


class StoreProcess:
    """A store process with one tier, "disk", that keeps its blocks in memory or on disk."""

    def __init__(
        self,
        folder: Path,
        *,
        kind: str = "memory",
        size_bytes: int = 1 << 20,
        socket: Path | None = None,
        key_file: str = "",
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True, parents=True)
        tier = StoreTierConfig(
            name="disk",
            kind=kind,
            size_bytes=size_bytes,
            options={"path": str(folder), "key_file": key_file},
        )
        self.config = StoreConfig(socket=str(socket or folder / "socket"), tiers=(tier,))
        self.process: Forked | None = None
        self._module = MEMORY_STORE if kind == "memory" else "penstock.store.__main__"

    def start(self) -> None:
        self.process = Forked(self._module, [self.config.to_json()])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            stop_process(self.pid)
        else:
            os.kill(self.pid, number)

    def is_dead(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def file(self, name: str) -> Path:
        return self.folder / name

    def mapped_arenas(self) -> int:
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return sum("memfd:penstock-" in line for line in maps.splitlines())

    def close(self) -> None:
        if self.process is not None and not self.is_dead():
            self.signal(signal.SIGCONT)
            self.kill()


class StoreEngine:
    """An engine: a link, and a hub for each rank that is offered to the store."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        ranks: int = 1,
        life: int = 7,
        space: bytes = SPACE,
        offer: bool = True,
        shared: bool = False,
        **wishes: object,
    ) -> None:
        self._stack = ExitStack()
        self.config = config
        self.life = life
        self.results: list[StoreResult] = []
        self.is_on = False
        """Whether the tier is on, as the store last said."""
        self.why = ""
        made = [
            self._stack.enter_context(HostTier.create(FORM.layout, SLOTS, huge_pages=False))
            for _ in range(1 if shared else ranks)
        ]
        self.hosts = made * ranks if shared else made
        """One for each rank; ranks that hold equal bytes share one."""
        self.shared = shared
        self.parts = [
            part_name(FORM, rank=rank, rank_count=ranks, equal=shared) for rank in range(ranks)
        ]
        self.offers: list[ArenaOffer] = []
        if offer:
            for rank in range(len(made)):
                self.offer(rank)
        names = [_name(host) for host in self.hosts]
        self.link = StoreLink(
            config,
            life=life,
            space=space,
            arenas=names,
            tiers={DISK: "disk"},
            **wishes,  # type: ignore[arg-type]
        )
        self._numbers = itertools.count(1)

    def offer(self, rank: int) -> ArenaOffer:
        part = self.parts[rank]
        offer = ArenaOffer(self.config.socket, self.hosts[rank], form=FORM, part=part)
        self.offers.append(offer)
        return offer

    def step(self, timeout_s: float = 0.0) -> None:
        """Polls everything once, after waiting at most `timeout_s` for something to happen."""
        self.link.dispatch()
        deadline = time.monotonic() + timeout_s
        for each in (self.link, *self.offers):
            if each.alarm is not None:
                deadline = min(deadline, each.alarm)
        if not self.link.ready:
            descriptors = [each.descriptor for each in (self.link, *self.offers)]
            wait_any((), descriptors, deadline=deadline)
        for offer in self.offers:
            offer.poll()
        for result in self.link.collect():
            self.results.append(result)
            if isinstance(result, StoreState):
                self.is_on, self.why = result.state.on, result.state.why
            elif isinstance(result, StoreLost) and result.why.endswith("has ended"):
                # The next one says so itself, perhaps before it has the arenas.
                self.is_on = False
        self.link.dispatch()

    def until(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.results
            self.step(0.5)

    def take(self, kind: type, timeout_s: float = PATIENCE_S) -> StoreResult:
        """The next result of a kind; those before it stay."""
        self.until(lambda: any(isinstance(each, kind) for each in self.results), timeout_s)
        found = next(each for each in self.results if isinstance(each, kind))
        self.results.remove(found)
        return found

    def up(self, *, on: bool = True) -> StoreEngine:
        """Waits until the store is there, and its tier is on."""
        self.until(lambda: self.link.is_up and (self.is_on or not on))
        gone = StoreBack | StoreLost
        self.results = [each for each in self.results if not isinstance(each, gone)]
        return self

    # Blocks.

    def fill(self, slot: int, number: int, epoch: int = 0) -> None:
        """Puts block `number` into a slot of every hub, with sums as a mover writes them."""
        for rank, host in enumerate(self.hosts):
            block = np.frombuffer(part_of_block(number, 0 if self.shared else rank), dtype=np.uint8)
            _bytes_of(host, slot)[:] = block
            salt = life_salt(self.life, epoch)
            sums = SPAN.sum_blocks(block.reshape(1, -1), [key_of(number)], FORM.checksum, salt=salt)
            host.keep_sums(np.array([slot], dtype=np.int32), sums)

    def holds(self, slot: int, number: int) -> bool:
        return all(
            _bytes_of(host, slot).tobytes() == part_of_block(number, 0 if self.shared else rank)
            for rank, host in enumerate(self.hosts)
        )

    def order_save(
        self, numbers: Sequence[int], slots: Sequence[int], timeout_s: float = 60.0
    ) -> OperationId:
        parents = [None if number == 0 else key_of(number - 1) for number in numbers]
        return self._order(HUB, DISK, numbers, slots, timeout_s, parents)

    def order_load(
        self, numbers: Sequence[int], slots: Sequence[int], timeout_s: float = 60.0
    ) -> OperationId:
        return self._order(DISK, HUB, numbers, slots, timeout_s, ())

    def abandon(self, operation: OperationId) -> None:
        self.link.order(Abandon(operation=operation))

    def _order(
        self,
        source: int,
        target: int,
        numbers: Sequence[int],
        slots: Sequence[int],
        timeout_s: float,
        parents: Sequence[bytes | None],
    ) -> OperationId:
        operation = OperationId(self.life, 0, next(self._numbers))
        places = np.array(slots, dtype=np.int32)
        self.link.order(
            Copy(
                operation=operation,
                purpose=Purpose.SAVE if target == DISK else Purpose.STAGE,
                source=source,
                target=target,
                keys=[key_of(number) for number in numbers],
                source_slots=places,
                target_slots=places,
                deadline=time.monotonic() + timeout_s,
                cause="a test",
                parents=parents,
            )
        )
        return operation

    def reports(self, operation: OperationId) -> list[CopyReport]:
        return [
            each
            for each in self.results
            if isinstance(each, CopyReport) and each.operation == operation
        ]

    def finish(self, operation: OperationId, timeout_s: float = PATIENCE_S) -> list[CopyReport]:
        """The reports of an operation, one of each rank."""
        self.until(lambda: len(self.reports(operation)) >= len(self.hosts), timeout_s)
        found = sorted(self.reports(operation), key=lambda report: report.rank)
        assert [report.rank for report in found] == list(range(len(self.hosts)))
        return found

    def save(self, numbers: Sequence[int]) -> list[CopyReport]:
        """Fills slots 0, 1, … with these blocks and saves them."""
        for slot, number in enumerate(numbers):
            self.fill(slot, number)
        return self.finish(self.order_save(numbers, range(len(numbers))))

    def load(self, numbers: Sequence[int], first_slot: int = SLOTS // 2) -> list[CopyReport]:
        slots = range(first_slot, first_slot + len(numbers))
        return self.finish(self.order_load(numbers, slots))

    def close(self) -> None:
        for offer in self.offers:
            offer.close()
        self.link.close(time.monotonic() + PATIENCE_S)
        self._stack.close()


@contextmanager
def impatience() -> Iterator[None]:
    """Engines count a process as silent after 0.3 s; before and after, they wait for a slow one."""
    before = link.PING_S, link.SILENT_S
    link.PING_S, link.SILENT_S = 0.1, 0.2
    try:
        yield
    finally:
        link.PING_S, link.SILENT_S = before


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _name(host: HostTier) -> str:
    status = os.fstat(host.arena.fd)
    return f"memfd {status.st_dev}:{status.st_ino}"


def _bytes_of(host: HostTier, slot: int) -> np.ndarray:
    start = host.blocks_offset + slot * host.slot_bytes
    return host.arena.bytes[start : start + BLOCK_BYTES]
