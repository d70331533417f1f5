"""The memory that copies pass through: pinned host memory, and the device's staging ring.

`PinnedArea` is what a mover needs of the host tier: packed blocks in slots at equal distances, and
a table of their sums. `register` registers memory of any origin, `RegisteredHost` that of a host
arena.

    berth      device memory for one batch: packed blocks, their sums and verdicts
    manifest   what one batch carries: slots and seeds, in pinned host memory and on the device

An engine that polls once a step submits many batches at a time. Berths are few, since device
memory is scarce, and are reused in the order of the device's work: the next batch waits on the
device, not on the CPU, until a berth is empty. Manifests are many and small.

The rules:

- Memory stays registered as long as a copy may use it, so it is unregistered only by `close`, after
  the movers are closed, or by `release`, while there are no copies.
- A manifest is free again only when the CPU has seen its batch end; their number bounds what is in
  flight.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from cuda.bindings import runtime

from penstock.errors import UnavailableError
from penstock.movers.cuda.streams import StreamEvent, checked
from penstock.vocabulary.checksums import SUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from numpy.typing import NDArray

    from penstock.movers.cuda.calls import Calls
    from penstock.movers.cuda.streams import Stream
    from penstock.tiers.host import HostTier
    from penstock.vocabulary.layout import Layout


EXTENT_BYTES_MAX = 1 << 30
"""Registered in one call; a failure then costs no more than this."""


@runtime_checkable
class PinnedArea(Protocol):
    """Packed blocks in registered host memory, slot after slot."""

    @property
    def address(self) -> int:
        """Where slot 0 starts."""
        ...

    @property
    def slot_stride(self) -> int:
        """Bytes from one slot to the next."""
        ...

    @property
    def run_slots(self) -> int:
        """No DMA may cross a multiple of this number of slots: another extent starts there."""
        ...

    @property
    def sums_address(self) -> int:
        """Where the cell sums of slot 0 start, registered too: 64 bits a cell, slot after slot."""
        ...


def register(extents: Iterable[tuple[int, int]], *, writable: bool = True) -> list[int]:
    """Registers host memory, given as (address, length), for DMA; returns the addresses.

    Raises `UnavailableError`: the memory cannot be pinned; what was registered is undone.
    """
    done: list[int] = []
    flags = runtime.cudaHostRegisterPortable
    if not writable:
        flags |= runtime.cudaHostRegisterReadOnly
    try:
        for address, length in extents:
            checked(runtime.cudaHostRegister(address, length, flags))
            done.append(address)
    except UnavailableError:
        unregister(done)
        raise
    return done


def unregister(addresses: Iterable[int]) -> None:
    for address in addresses:
        checked(runtime.cudaHostUnregister(address))


class RegisteredHost:
    """The slots of a host arena and their sums, registered in extents of whole slots.

    Raises:
        UnavailableError: the memory cannot be pinned.
    """

    def __init__(self, tier: HostTier, *, extent_bytes: int = EXTENT_BYTES_MAX) -> None:
        extents = tier.extents(extent_bytes)
        self.layout = tier.layout
        self.address = extents[0][0]
        self.slot_stride = tier.slot_bytes
        self.slot_count = tier.slot_count
        self.run_slots = max(1, extents[0][1] // tier.slot_bytes)
        self.sums_address = tier.arena.address
        sums = _in_extents(self.sums_address, tier.blocks_offset)
        # A rank that shares the arena without writing has it mapped for reading alone.
        self._writable = bool(tier.arena.bytes.flags.writeable)
        self._extents = [*extents, *sums]
        self._registered = register(self._extents, writable=self._writable)

    def release(self) -> None:
        """Ends the registration, until `register_again`; no copy may use it meanwhile."""
        unregister(self._registered)
        self._registered = []

    def register_again(self) -> None:
        """Registers the memory that was released.

        Raises `UnavailableError`: it cannot be pinned; it is released as before.
        """
        if not self._registered:
            self._registered = register(self._extents, writable=self._writable)

    def close(self) -> None:
        """Ends the registration; the tier stays."""
        self.release()


def _in_extents(address: int, length: int) -> list[tuple[int, int]]:
    step = EXTENT_BYTES_MAX
    return [(address + at, min(step, length - at)) for at in range(0, length, step)]


class PinnedMemory:
    """Anonymous memory of this process, registered."""

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, max(length, mmap.PAGESIZE))
        holder = (ctypes.c_uint8 * len(self._map)).from_buffer(self._map)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(holder)[:length]
        self.address = ctypes.addressof(holder)
        # Touched first: registering untouched pages takes them one by one.
        self.bytes[:: mmap.PAGESIZE] = 0
        self._registered = register([(self.address, len(self._map))])

    def close(self) -> None:
        """Ends the registration; the memory goes with the last array that shows it."""
        unregister(self._registered)
        self._registered = []


BLOCKS_MAX = 1024
"""Blocks in one batch; small blocks would otherwise need large tables."""
VECTOR_BYTES = 16
VERDICT_BYTES = 4
_ALIGNMENT = 256
IDLE_QUEUES = 4
"""How many queues may be in flight while the engine has nothing to compute: what a long prefix
takes is then submitted at once. One queue at a time, the link stood still for 1.3 ms after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSize:
    """How much device memory a mover takes, and in what portions it uses the link."""

    batch_bytes: int = 128 << 20
    """Blocks that are packed by one launch; a single block may be larger. A batch costs the
    engine's thread about 50 µs, whatever its size."""
    batch_count: int = 2
    """Batches that lie in staging: one is packed while another is on the link."""
    turn_bytes: int = 14 << 20
    """What goes over the link before another stream may have it. A small copy of the engine
    waits for one turn: 14 MiB take 0.27 ms on PCIe 5. A change of turns costs the link about
    5 µs, and the engine's thread as much."""
    queue_batches: int = 8
    """Batches submitted to the device and not seen to have ended, at most: 1 GiB is what PCIe 5
    moves in 20 ms, so an engine with steps of that length keeps it busy by one poll a step."""

    @classmethod
    def for_device(cls, total_bytes: int) -> Self:
        """What suits a device with so much memory: batches of a thousandth of it, up to 128 MiB.

        Both directions together then take 0.4 % of the memory, and have 1 GiB each in flight.
        """
        batch_bytes = min(128 << 20, max(16 << 20, total_bytes >> 10))
        return cls(batch_bytes=batch_bytes, queue_batches=-(-(1 << 30) // batch_bytes))

    def __post_init__(self) -> None:
        for name in ("batch_bytes", "batch_count", "turn_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.queue_batches < self.batch_count:
            raise ValueError(
                f"queue_batches is {self.queue_batches}, must be at least batch_count, "
                f"{self.batch_count}"
            )


class StagingBuffer:
    """Device memory for one batch."""

    __slots__ = ("last", "staged", "sums", "verdicts")

    def __init__(self, address: int, sizes: Sizes) -> None:
        self.staged = address
        self.sums = address + sizes.sums_start
        """All zero whenever a batch begins: the kernel that reads them last clears them."""
        self.verdicts = address + sizes.verdicts_start
        self.last: Manifest | None = None
        """Of the batch that was in it before: it has left when that has ended."""


class Manifest:
    """What one batch carries.

    The CPU writes arrays in pinned memory; `send` brings them to the device, where kernels read
    them. Kernels that read them over the link, an entry for each of their programs, took three
    times as long (151 µs for 64 MiB on an H200).
    """

    __slots__ = (
        *("_device", "_host", "_length", "count", "ended", "ready"),
        *(
            "seeds",
            "seeds_address",
            "seeds_host_address",
            "slots",
            "slots_address",
            "targets",
            "targets_address",
            "bad_cells",
            "bad_cells_address",
        ),
    )

    def __init__(self, host: PinnedMemory, start: int, device: int, sizes: Sizes) -> None:
        self.count = 0
        self.ready = StreamEvent()
        """The batch is packed (saves) or has arrived (loads) in staging."""
        self.ended = StreamEvent()
        at = start

        def portion(kind: str, shape: tuple[int, ...]) -> tuple[NDArray[Any], int]:
            nonlocal at
            length = int(np.prod(shape)) * np.dtype(kind).itemsize
            array = host.bytes[at : at + length].view(kind).reshape(shape)
            first, at = at, at + aligned(length)
            return array, first - start

        self.slots, slots_at = portion("<i4", (sizes.groups, sizes.blocks))
        self.targets, targets_at = portion("<i4", (sizes.groups, sizes.blocks))
        self.seeds, seeds_at = portion("<u8", (sizes.blocks,))
        self._host, self._device, self._length = host.address + start, device, at - start
        self.slots_address = device + slots_at
        self.targets_address = device + targets_at
        self.seeds_address = device + seeds_at
        self.seeds_host_address = self._host + seeds_at
        self.bad_cells, bad_cells_at = portion("<i4", (sizes.blocks,))
        """How many cells of each block were found wrong: written by the device."""
        self.bad_cells_address = host.address + start + bad_cells_at

    def send(self, calls: Calls, stream: Stream) -> None:
        """Brings slots and seeds to the device."""
        calls.copy(stream, self._device, self._host, self._length)

    def close(self) -> None:
        """Gives the events back."""
        self.ready.close()
        self.ended.close()


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the tables of a batch come to."""

    blocks: int
    pitch: int
    cells: int
    groups: int

    @property
    def sums_start(self) -> int:
        """Where the sums lie in a berth."""
        return aligned(self.blocks * self.pitch)

    @property
    def verdicts_start(self) -> int:
        """Where the verdicts lie in a berth."""
        return self.sums_start + aligned(self.blocks * self.cells * SUM_BYTES)

    @property
    def device_bytes(self) -> int:
        """Of a berth."""
        return self.verdicts_start + aligned(self.blocks * VERDICT_BYTES)

    @property
    def host_bytes(self) -> int:
        """Of a manifest."""
        tables = 2 * aligned(self.groups * self.blocks * 4)
        return tables + aligned(self.blocks * 8) + aligned(self.blocks * VERDICT_BYTES)


class StagingRing:
    """All berths and manifests of a mover: taken here, given back by `close`.

    Args:
        layout: The blocks that pass through.
        size: How many of them at a time.
        pitch: Bytes from one packed block to the next. Where it is the distance of the host's
            slots too, blocks that follow each other on both sides go over the link in one run.
        queues: How many times `queue_batches` manifests there are.
    """

    def __init__(self, layout: Layout, size: StagingSize, *, pitch: int, queues: int = 1) -> None:
        self.size = size
        self.pitch = pitch
        self.blocks = min(BLOCKS_MAX, max(1, size.batch_bytes // pitch))
        sizes = Sizes(self.blocks, pitch, len(layout.cells), len(layout.groups))
        berth_bytes, manifest_bytes = sizes.device_bytes, sizes.host_bytes
        manifests_start = size.batch_count * berth_bytes
        manifests_bytes = queues * size.queue_batches * manifest_bytes
        self.device_bytes = manifests_start + manifests_bytes
        self._device = take_device_memory(self.device_bytes)
        address = self._device.data_ptr()
        self._berths = deque(
            StagingBuffer(address + number * berth_bytes, sizes)
            for number in range(size.batch_count)
        )
        self._host = PinnedMemory(manifests_bytes)
        mirrors = address + manifests_start
        self._manifests = [
            Manifest(self._host, start, mirrors + start, sizes)
            for start in range(0, manifests_bytes, manifest_bytes)
        ]
        self.free = deque(self._manifests)
        """First in, first out, so that a manifest comes again after all the others: no event of
        a batch is recorded anew while a berth remembers it."""

    def next_berth(self, manifest: Manifest) -> tuple[StagingBuffer, StreamEvent | None]:
        """The berth that was used longest ago, for another batch, and when it will be empty."""
        self._berths.rotate(-1)
        berth = self._berths[-1]
        last, berth.last = berth.last, manifest
        return berth, None if last is None else last.ended

    def close(self) -> None:
        """Gives everything back; nothing may be in flight."""
        for manifest in self._manifests:
            manifest.close()
        self._berths.clear()
        self._manifests = []
        self.free.clear()
        self._host.close()


def take_device_memory(length: int) -> torch.Tensor:
    """Allocates zeroed bytes on the current device.

    Raises `UnavailableError`: the device has not so much left.
    """
    here = torch.device("cuda", torch.cuda.current_device())
    try:
        memory = torch.zeros(length, dtype=torch.uint8, device=here)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise UnavailableError(
            f"staging needs {length >> 20} MiB of device memory, {free >> 20} of {total >> 20} MiB "
            "are free"
        ) from error
    torch.cuda.current_stream().synchronize()
    return memory


def aligned(length: int) -> int:
    """The length, so that what follows starts where any access is allowed to."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def pitch_of(block_bytes: int, slot_stride: int | None = None) -> int:
    """Bytes from one packed block to the next in staging.

    That of the host's slots where kernels can write four words at a time there, else the next
    multiple of four words.
    """
    if slot_stride is not None and slot_stride % VECTOR_BYTES == 0:
        return slot_stride
    return -(-block_bytes // VECTOR_BYTES) * VECTOR_BYTES
