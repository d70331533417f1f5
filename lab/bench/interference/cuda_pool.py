"""The pool on a GPU, its host slots, and the movers between them.

Needs torch, Triton and cuda-bindings. Both the engine's process and the second one use it: the
first takes the memory, the second opens it through its IPC handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from cuda.bindings import runtime

from lab.bench.interference.bare import Extents
from lab.bench.interference.pool import (
    COPY_BLOCKS,
    MOVED_BLOCKS,
    PoolSlots,
    block_keys,
    packed_blocks,
    pool_layout,
    sums_hold,
)
from lab.bench.interference.traffic import UNLIMITED, Freight, Traffic
from penstock.cache.operations import Purpose
from penstock.errors import InvariantViolation
from penstock.movers.cuda.mover import LoadMover, SaveMover
from penstock.movers.cuda.pinned import PinnedTier
from penstock.movers.cuda.streams import Steps, checked
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.movers.cuda.mover import CudaMover

AHEAD_BYTES = 1 << 30
"""Waits for a mover without a budget: as much as one has in flight at most, as it comes."""
SAMPLE = 2
"""Blocks that are compared after each window and way."""


class DevicePool:
    """Device memory with the layout of the pool; satisfies what a mover asks of a device tier."""

    def __init__(self, address: int, *, opened: bool) -> None:
        self.slots = PoolSlots()
        self.layout = pool_layout(self.slots.count)
        self.slot_count = self.slots.count
        self.address = address
        self._opened = opened

    @classmethod
    def take(cls) -> DevicePool:
        """Takes the memory and fills it with random bytes."""
        length = pool_layout(PoolSlots().count).buffer_bytes[0]
        pool = cls(int(checked(runtime.cudaMalloc(length))), opened=False)
        words = pool.bytes.view(torch.int32)
        words.random_(-(1 << 31), (1 << 31) - 1)
        torch.cuda.synchronize()
        return pool

    @classmethod
    def open(cls, handle: bytes) -> DevicePool:
        """Opens the memory of another process."""
        shared = runtime.cudaIpcMemHandle_t()
        shared.reserved = handle
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        return cls(int(checked(runtime.cudaIpcOpenMemHandle(shared, flags))), opened=True)

    @property
    def handle(self) -> bytes:
        """What another process needs to open the memory."""
        return bytes(checked(runtime.cudaIpcGetMemHandle(self.address)).reserved)

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where the one buffer starts."""
        return {0: self.address}

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, as a tensor that owns nothing."""
        return torch.as_tensor(_Exposed(self.address, self.layout.buffer_bytes[0]), device="cuda")

    def planes(self) -> torch.Tensor:
        """As [layers, K and V, blocks, bytes of a block in a plane]."""
        layers = len(self.layout.groups[0].layers)
        return self.bytes.view(layers, 2, self.slot_count, -1)

    def close(self) -> None:
        """Gives the memory back."""
        if self._opened:
            checked(runtime.cudaIpcCloseMemHandle(self.address))
        else:
            checked(runtime.cudaFree(self.address))


class _Exposed:
    """Memory that torch did not take, shown to it by the CUDA array interface."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """A few blocks on one way, to be compared when they have arrived."""

    purpose: Purpose
    keys: list[bytes]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]


class Rig:
    """A pool, host slots for what is saved and loaded, and a mover each way."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self.steps = Steps(pool.slot_count)
        self.saved = PinnedTier(pool.layout, MOVED_BLOCKS)
        self.loaded = PinnedTier(pool.layout, MOVED_BLOCKS)
        algorithm = Algorithm.MIX64
        self.save = SaveMover(pool, self.saved, algorithm, steps=self.steps)
        self.load = LoadMover(self.loaded, pool, algorithm, steps=self.steps)
        self._keys = block_keys(MOVED_BLOCKS)
        self._scratch: torch.Tensor | None = None
        self._fill()
        self._traffic = {
            "save": self._traffic_of(self.save, Purpose.SAVE, pool.slots.saved, pool.slots.host),
            "load": self._traffic_of(self.load, Purpose.LOAD, pool.slots.host, pool.slots.loaded),
        }

    def traffic(self, work: str) -> list[Traffic]:
        """The copies of one kind of work, one a direction."""
        ways = ("save", "load") if work == "both" else (work,)
        return [self._traffic[way] for way in ways]

    def movers(self, work: str) -> list[CudaMover]:
        """The movers of one kind of work."""
        found: dict[str, list[CudaMover]] = {
            "save": [self.save],
            "load": [self.load],
            "both": [self.save, self.load],
        }
        return found[work]

    def bare_ways(self, work: str) -> list[Extents]:
        """Extents for copies without blocks, which leave alone what is compared afterwards.

        What was saved before is written over; a sample of it is wiped before each window anyway.
        """
        if self._scratch is None:
            self._scratch = torch.zeros(AHEAD_BYTES, dtype=torch.uint8, device="cuda")
        scratch, length = self._scratch.data_ptr(), AHEAD_BYTES
        found = {
            "save": Extents(target=self.saved.address, source=self.pool.address, length=length),
            "load": Extents(target=scratch, source=self.loaded.address, length=length),
        }
        return [found[way] for way in (("save", "load") if work == "both" else (work,))]

    def wipe(self, work: str) -> list[Sample]:
        """Writes zeros where some of the blocks that come next will arrive."""
        samples = []
        for traffic in self.traffic(work):
            copy = traffic.upcoming
            picked = np.linspace(0, len(copy.keys) - 1, SAMPLE).astype(np.int64)
            sample = Sample(
                purpose=copy.purpose,
                keys=[copy.keys[number] for number in picked],
                sources=copy.source_slots[picked],
                targets=copy.target_slots[picked],
            )
            if sample.purpose is Purpose.SAVE:
                self.saved.packed[sample.targets] = 0
                none = np.zeros((SAMPLE, len(self.pool.layout.cells)), dtype=np.uint64)
                self.saved.keep_sums(sample.targets, none)
            else:
                self.pool.planes()[:, :, _on_device(sample.targets)] = 0
                torch.cuda.synchronize()
            samples.append(sample)
        return samples

    def require_moved(self, samples: Sequence[Sample]) -> None:
        """Compares a sample with where it came from, and its sums with their bytes.

        Raises:
            InvariantViolation: what arrived is not what was sent.
        """
        for sample in samples:
            saved = sample.purpose is Purpose.SAVE
            host = self.saved if saved else self.loaded
            host_slots = sample.targets if saved else sample.sources
            device_slots = sample.sources if saved else sample.targets
            packed = host.packed[host_slots]
            if not np.array_equal(self._packed_on_device(device_slots), packed):
                raise InvariantViolation(f"bench: a {sample.purpose.value} moved other bytes")
            if not sums_hold(self.pool.layout, packed, sample.keys, host.sums(host_slots)):
                raise InvariantViolation(f"bench: a {sample.purpose.value} kept other sums")

    def close(self) -> None:
        """Gives everything back but the pool."""
        self.save.close()
        self.load.close()
        self.saved.close()
        self.loaded.close()

    def _packed_on_device(self, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Some blocks, read back and packed by the CPU."""
        found = self.pool.planes()[:, :, _on_device(slots)].cpu().numpy()
        return packed_blocks(pool_layout(len(slots)), found)

    def _fill(self) -> None:
        """Puts the blocks that will be loaded into their host slots, with sums."""
        fill = SaveMover(self.pool, self.loaded, Algorithm.MIX64)
        for copy in self._copies(Purpose.SAVE, self.pool.slots.loaded, self.pool.slots.host):
            fill.submit(copy)
        while fill.busy:
            fill.poll(budget_bytes=UNLIMITED)
            fill.wait()
        fill.close()

    def _traffic_of(
        self,
        mover: CudaMover,
        purpose: Purpose,
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> Traffic:
        return Traffic(
            mover,
            self._copies(purpose, sources, targets),
            block_bytes=self.block_bytes,
            ahead_bytes=AHEAD_BYTES,
        )

    def _copies(
        self, purpose: Purpose, sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> Sequence[Copy]:
        freight = Freight(
            purpose=purpose, keys=self._keys, source_slots=sources, target_slots=targets
        )
        return freight.copies(COPY_BLOCKS)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.pool.layout.block_bytes


def _on_device(slots: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64)).cuda()
