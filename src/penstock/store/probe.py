"""What a stored tier can do, measured from this machine: `penstock store probe`.

Blocks of random bytes go through the tier as those of an engine do, sums included, in a space that
nobody else uses, and are removed afterwards. Where a tier compresses they are random numbers in
bfloat16, which become smaller about as KV does. A disk tier is measured in a folder of its own
beside the real one.
"""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Self

import numpy as np
from msgspec import structs

from penstock.config.values import PEERS
from penstock.errors import UnavailableError
from penstock.store.base import (
    DIGEST_BYTES,
    FindJob,
    LoadJob,
    MappedArena,
    SaveJob,
    Space,
    part_name,
)
from penstock.store.clients.blobs import BlobStoreError
from penstock.store.process.tier_slots import CLIENTS, TIER_KINDS, compresses, open_client
from penstock.store.shared.tier import SharedTier
from penstock.store.shared.values import generation_name, geometry_name, piece_of, value_name
from penstock.tiers.host import HostTier
from penstock.transport.waiting import wait_any
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import EndedJob, StoreTier
    from penstock.store.process.messages import StoreTierConfig
    from penstock.vocabulary.keys import Key

BLOCK_BYTES = (256 << 10, 1 << 20, 4 << 20)
ROUND_BYTES = 32 << 20
"""Of one save or load of many blocks."""
ROUNDS = 3
SINGLE_BLOCKS = 8
WAIT_S = 60.0
DISK_BYTES = 1 << 30
SALT = 1


@dataclass(frozen=True, slots=True)
class ProbedSize:
    """What was measured with blocks of one size."""

    block_bytes: int
    save_bytes_s: float
    load_bytes_s: float
    single_load_s: float
    """One block by itself."""


@dataclass(frozen=True, slots=True)
class ProbedTier:
    """What was measured of one tier."""

    name: str
    kind: str
    problem: str = ""
    """Why it could not be measured, if so."""
    ask_s: float | None = None
    """Until it is known that a block is not there; only tiers that are asked."""
    sizes: tuple[ProbedSize, ...] = ()
    faults: int = 0
    """Blocks that did not come back."""


def probe_tier(config: StoreTierConfig) -> ProbedTier:
    """Measures a tier; what keeps it from being measured is in the result."""
    sizes: list[ProbedSize] = []
    asks: list[float] = []
    faults = 0
    try:
        for block_bytes in BLOCK_BYTES:
            count = max(SINGLE_BLOCKS, ROUND_BYTES // block_bytes)
            with TierProbe(config, block_bytes, count) as probe:
                found, missing = probe.measure()
                sizes.append(found)
                faults += missing
                asks += probe.asks
    except (UnavailableError, OSError) as error:
        return ProbedTier(config.name, config.kind, problem=str(error))
    ask_s = median(asks) if asks else None
    return ProbedTier(config.name, config.kind, "", ask_s, tuple(sizes), faults)


class TierProbe:
    """An arena of `count` blocks of one size over a tier; what it writes is removed at its end.

    With `content`, of shape [any, `block_bytes`], its blocks are saved in turn instead of random
    ones.

    Raises:
        UnavailableError: the tier cannot be used.
    """

    def __init__(
        self,
        config: StoreTierConfig,
        block_bytes: int,
        count: int,
        *,
        content: NDArray[np.uint8] | None = None,
    ) -> None:
        self._count = count
        self._content = content
        self._undo = ExitStack()
        with self._undo:
            self._begin(config, block_bytes, self._undo)
            self._undo = self._undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _begin(self, config: StoreTierConfig, block_bytes: int, undo: ExitStack) -> None:
        layout = Layout.opaque(
            layers=range(1),
            block_bytes=block_bytes,
            block_stride=block_bytes,
            encoding="probe",
            block_tokens=16,
            block_count=self._count,
        )
        host = HostTier.create(layout, self._count, huge_pages=False)
        undo.callback(host.close)
        form = Form(layout=layout, checksum=Algorithm.XXH3)
        self._arena = MappedArena(host, form, part_name(form, rank=0, rank_count=1, equal=True))
        self._block_bytes = block_bytes
        self._ticket = self._faults = 0
        self._used: list[Key] = []
        self.asks: list[float] = []
        self._name = secrets.token_bytes(DIGEST_BYTES)
        self._space: Space | None = None
        self._compress = compresses(config.options)
        self._tier = self._open(config, undo)
        self._space = Space(self._name, self._generation())

    def _open(self, config: StoreTierConfig, undo: ExitStack) -> StoreTier:
        if config.kind in CLIENTS:
            blobs = open_client(config.kind, config.options)
            timeout_s = float(config.options["timeout_s"])
            tier = SharedTier(
                blobs, ask_s=timeout_s, timeout_s=timeout_s, absent_s=0, compress=self._compress
            )
            # Once the tier is closed, or its keeper would write its records again.
            undo.callback(self._forget, config)
            undo.callback(lambda: tier.close(deadline=time.monotonic() + timeout_s))
            return tier
        if config.kind == PEERS:
            raise UnavailableError("nothing can be written there: it is the memory of engines")
        folder = Path(config.folder) / f"probe-{secrets.token_hex(4)}"
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        disk = TIER_KINDS[config.kind](
            structs.replace(
                config, options={**config.options, "path": str(folder)}, size_bytes=DISK_BYTES
            )
        )
        undo.callback(lambda: disk.close(deadline=time.monotonic() + WAIT_S))
        return disk

    def _forget(self, config: StoreTierConfig) -> None:
        """Removes what was written, as far as the store answers."""
        if self._space is None:
            return
        piece = piece_of(self._arena)
        names = [value_name(self._space, piece, key) for key in self._used]
        names += [geometry_name(self._space, 0), generation_name(self._name)]
        blobs = open_client(config.kind, config.options)
        try:
            blobs.forget(names, timeout_s=float(config.options["timeout_s"]))
        except BlobStoreError:
            return  # The store's own eviction takes them.
        finally:
            blobs.close()

    def _generation(self) -> int:
        self._tier.attach(self._name, [self._arena])
        for _ in self._until("its generation"):
            found = self._tier.generation(self._name)
            if found is not None:
                return found
        raise AssertionError

    def _until(self, what: str) -> Iterator[None]:
        """Again and again when there may be news.

        Raises `UnavailableError`: the tier is off, or time is over.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            yield
            state = self._tier.state()
            if not state.on:
                raise UnavailableError(state.why)
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{what} was not there within {WAIT_S:g} s")
            self._tier.take_gone()
            self._tier.take_generations()
            wait_any((), (self._tier.descriptor,), deadline=deadline)

    def measure(self) -> tuple[ProbedSize, int]:
        """What it can do, and how many blocks did not come back."""
        rates: list[tuple[float, float]] = []
        singles: list[float] = []
        self._faults = 0
        for _ in range(ROUNDS):
            rates.append(self.round())
            keys = self._used[-self._count :][:SINGLE_BLOCKS]
            singles += [self._time(self._load([key])) for key in keys]
        found = ProbedSize(
            self._block_bytes,
            median(each[0] for each in rates),
            median(each[1] for each in rates),
            median(singles),
        )
        return found, self._faults

    def round(self) -> tuple[float, float]:
        """Saves new blocks and loads them again: bytes a second of both.

        Raises `UnavailableError`: the tier cannot be used.
        """
        total = self._count * self._block_bytes
        return total / self.save_new(), total / self.load_saved()

    def save_new(self) -> float:
        """Saves new blocks; how long it took.

        Raises `UnavailableError`: the tier cannot be used.
        """
        keys = self._fill()
        self._ask(keys)
        return self._time(self._save(keys))

    def load_saved(self) -> float:
        """Loads the blocks that were saved last; how long it took.

        Raises `UnavailableError`: the tier cannot be used.
        """
        return self._time(self._load(self._used[-self._count :]))

    def _fill(self) -> list[Key]:
        keys = [secrets.token_bytes(KEY_BYTES) for _ in range(self._count)]
        self._used += keys
        host = self._arena.host
        memory = host.arena.bytes[host.blocks_offset :][: self._count * host.slot_bytes]
        blocks = memory.reshape(self._count, -1)[:, : self._block_bytes]
        chance = np.random.default_rng()
        if self._content is not None:
            blocks[:] = self._content[np.arange(self._count) % len(self._content)]
        elif self._compress:
            numbers = chance.standard_normal((self._count, self._block_bytes // 2), np.float32)
            blocks[:] = numbers.view("<u2")[:, 1::2].copy().view(np.uint8)
        else:
            blocks[:] = chance.integers(0, 256, blocks.shape, np.uint8)
        sums = self._arena.span.sum_blocks(blocks, keys, Algorithm.XXH3, salt=SALT)
        host.keep_sums(np.arange(self._count, dtype=np.int32), sums)
        return keys

    def _ask(self, keys: Sequence[Key]) -> None:
        began = time.perf_counter()
        self._ticket += 1
        assert self._space is not None
        job = FindJob(self._ticket, [self._arena], self._space, keys[:1])
        if self._tier.find(job) is not None:
            return
        for _ in self._until("the answer"):
            if self._tier.take_found():
                self.asks.append(time.perf_counter() - began)
                return

    def _save(self, keys: Sequence[Key]) -> SaveJob:
        self._ticket += 1
        assert self._space is not None
        parents = [None, *keys[:-1]]
        slots = range(len(keys))
        return SaveJob(self._ticket, self._arena, self._space, keys, parents, slots, SALT)

    def _load(self, keys: Sequence[Key]) -> LoadJob:
        self._ticket += 1
        assert self._space is not None
        slots = range(len(keys))
        return LoadJob(self._ticket, self._arena, self._space, keys, slots, SALT)

    def _time(self, job: SaveJob | LoadJob) -> float:
        """How long a job took; blocks that failed are counted."""
        began = time.perf_counter()
        if isinstance(job, SaveJob):
            self._tier.save(job)
        else:
            self._tier.load(job)
        ended: dict[int, EndedJob] = {}
        for _ in self._until("the end of a copy"):
            ended |= {each.ticket: each for each in self._tier.collect()}
            if job.ticket in ended:
                break
        took_s = time.perf_counter() - began
        found = ended[job.ticket]
        if found.failure:
            raise UnavailableError(found.failure)
        self._faults += len(found.faults)
        return took_s
