"""Parts out of and into tensors of a device, through pinned staging on the host.

    TensorReader:  slots ─gather─→ scratch on the device ─DMA─→ pinned ─→ berth, summed on the way
    TensorTaker:   berth, verified ─→ pinned ─DMA─→ scratch ─scatter─→ slots

Copies run in a stream of their own; the CPU looks at their events at step boundaries and waits
for none. On tensors of the CPU the same code runs without streams, which is how it is tested.

| hazard                            | what orders it                                             |
|-----------------------------------|------------------------------------------------------------|
| the part is not computed          | progress is reported after its event has passed            |
| a slot to be filled is still read | the stream waits for what the engine submitted before      |
| a berth, a staging buffer         | used again when the CPU has seen the event                  |

The one rule: bytes go into the window of a write that is still wanted, after the CPU has seen
that they are in the staging; and into slots only after the copy in the staging was verified.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from penstock.handoff.driver.parts import plane_pairs, windows_of
from penstock.vocabulary.narrowing import narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.handoff.driver.progress import DeviceEvent
    from penstock.handoff.protocol.effects import Take
    from penstock.handoff.protocol.identity import WriteId
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane

BUFFERS = 4
"""Parts under way at a time: one is gathered, one travels, one is summed, one waits."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchEvent:
    """An event of torch, as `LayerEvents` and the movers here want it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self, stream: object) -> None:
        """Marks what was submitted to the stream so far."""
        self._event.record(stream)

    @property
    def reached(self) -> bool:
        """Whether the CPU can see that the device has got there."""
        return bool(self._event.query())

    def close(self) -> None:
        """Torch gives it back."""


class Passed:
    """The event of a device that is done with everything at once: the CPU."""

    reached = True

    def record(self, stream: object) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to give back."""


class _Buffer(NamedTuple):
    """Room for one part, on the device and pinned on the host."""

    scratch: Any
    pinned: Any
    host: NDArray[np.uint8]
    event: DeviceEvent


class _Staging:
    """The buffers and the stream of one direction."""

    def __init__(
        self,
        device: Any,  # noqa: ANN401 - torch has no types here
        part_bytes: int,
        event: Callable[[], DeviceEvent] | None,
    ) -> None:
        self.on_cuda = device.type == "cuda"
        self.device = device
        self.stream = torch.cuda.Stream(device) if self.on_cuda else None
        make = event or (TorchEvent if self.on_cuda else Passed)
        self.free = deque(self._buffer(part_bytes, make()) for _ in range(BUFFERS))

    def _buffer(self, part_bytes: int, event: DeviceEvent) -> _Buffer:
        pinned = torch.empty(part_bytes, dtype=torch.uint8, pin_memory=self.on_cuda)
        scratch = torch.empty(part_bytes, dtype=torch.uint8, device=self.device)
        return _Buffer(scratch, pinned, pinned.numpy(), event)

    def stream_context(self) -> Any:  # noqa: ANN401 - torch has no type for it
        """Copies go into our stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def follow_engine(self) -> None:
        """What is submitted from now on comes behind what the engine has submitted."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))


class _TensorPlane(NamedTuple):
    """One plane in its packed block, and in the slots of a tier."""

    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    slots: Any

    def packed(self, scratch: Any, count: int, block_bytes: int) -> Any:  # noqa: ANN401
        """The plane in `count` packed blocks, with the axes that it has in the slots."""
        numbers = scratch.view(self.dtype)
        size = self.dtype.itemsize
        view = torch.as_strided(
            numbers,
            (count, *self.shape),
            (block_bytes // size, *self.strides),
            self.offset // size,
        )
        return view.view(count, *self.slots.shape[1:])


class _Reading(NamedTuple):
    write: WriteId
    form: PartForm
    keys: Sequence[bytes]
    memory: NDArray[np.uint8]
    buffer: _Buffer


class TensorReader:
    """Packs parts out of the tensors of a device; see `PartReader`.

    Args:
        tier: the KV of the rank.
        algorithm: of the sums; they are computed on the CPU.
        part_bytes: the largest part: the bytes of a berth.
        event: makes events; those of torch by default.
    """

    def __init__(
        self,
        tier: TensorTier,
        algorithm: Algorithm,
        *,
        part_bytes: int,
        event: Callable[[], DeviceEvent] | None = None,
    ) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._algorithm = algorithm
        self._staging = _Staging(tier.device, part_bytes, event)
        self._pairs: dict[PartForm, list[_TensorPlane]] = {}
        self._reading: deque[_Reading] = deque()
        self._forgotten: set[WriteId] = set()

    def read(
        self,
        write: WriteId,
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: NDArray[np.uint8],
    ) -> bytes | None:
        if form.packed is None:
            return b""
        pairs = self._pairs.get(form)
        if pairs is None:
            narrowed = narrow(self._tier.layout, form.source_cuts)
            pairs = self._pairs[form] = _planes(form.packed, narrowed, self._tier, form.block_bytes)
        staging = self._staging
        buffer = staging.free.popleft()
        with staging.stream_context():
            numbers = torch.tensor(list(slots), device=staging.device)
            for pair in pairs:
                packed = pair.packed(buffer.scratch, len(slots), form.block_bytes)
                packed.copy_(pair.slots.index_select(0, numbers))
            size = len(memory)
            buffer.pinned[:size].copy_(buffer.scratch[:size], non_blocking=True)
            buffer.event.record(staging.stream)
        self._reading.append(_Reading(write, form, keys, memory, buffer))
        return None

    @property
    def has_room(self) -> bool:
        return bool(self._staging.free)

    def ended(self) -> list[tuple[WriteId, bytes]]:
        found = []
        while self._reading and self._reading[0].buffer.event.reached:
            write, form, keys, memory, buffer = self._reading.popleft()
            if write in self._forgotten:
                self._forgotten.remove(write)
            else:
                packed = buffer.host[: len(memory)]
                # Not of `memory`: others can write there.
                found.append((write, _sums(form, packed, keys, self._algorithm)))
                np.copyto(memory, packed)
            self._staging.free.append(buffer)
        return found

    def forget(self, write: WriteId) -> None:
        """Its bytes stay in the staging."""
        if any(each.write == write for each in self._reading):
            self._forgotten.add(write)

    @property
    def busy(self) -> bool:
        return bool(self._reading)


class TensorTaker:
    """Puts parts into the tensors of a device; see `PartTaker`. Arguments as of `TensorReader`."""

    def __init__(
        self,
        tier: TensorTier,
        algorithm: Algorithm,
        *,
        part_bytes: int,
        event: Callable[[], DeviceEvent] | None = None,
    ) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._algorithm = algorithm
        self._staging = _Staging(tier.device, part_bytes, event)
        self._scatters: dict[PartForm, WindowScatter] = {}
        self._taking: deque[tuple[Take, _Buffer]] = deque()

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        if form.packed is None:
            return not take.sums
        staging = self._staging
        landed = staging.free[0].host[: len(memory)]
        # Others can write `memory`: what is put away is the copy that was verified.
        np.copyto(landed, memory)
        if _sums(form, landed, keys, self._algorithm) != take.sums:
            return False
        buffer = staging.free.popleft()
        scatter = self._scatters.get(form)
        if scatter is None:
            scatter = self._scatters[form] = WindowScatter(route, form, self._tier)
        staging.follow_engine()
        with staging.stream_context():
            buffer.scratch[: len(memory)].copy_(buffer.pinned[: len(memory)], non_blocking=True)
            scatter.scatter(buffer.scratch, len(keys), slots)
            buffer.event.record(staging.stream)
        self._taking.append((take, buffer))
        return None

    @property
    def has_room(self) -> bool:
        return bool(self._staging.free)

    def ended(self) -> list[tuple[Take, bool]]:
        found = []
        while self._taking and self._taking[0][1].event.reached:
            take, buffer = self._taking.popleft()
            self._staging.free.append(buffer)
            found.append((take, True))
        return found

    @property
    def busy(self) -> bool:
        return bool(self._taking)


class WindowScatter:
    """Puts packed blocks of one form into the slots of a tier, whatever size its blocks have."""

    def __init__(self, route: RouteParts, form: PartForm, tier: TensorTier) -> None:
        assert form.packed is not None
        self._route = route
        self._block_bytes = form.block_bytes
        self._device = tier.device
        target = narrow(tier.layout, form.target_cuts)
        self._windows = [
            _planes(packed, narrowed, tier, form.block_bytes)
            for packed, narrowed in windows_of(form.packed, target)
        ]

    def scatter(self, scratch: Any, count: int, slots: Sequence[int]) -> None:  # noqa: ANN401
        """Copies `count` packed blocks in memory of the tier's device, in torch's stream."""
        numbers = torch.tensor(list(slots), device=self._device)
        for window, pairs in enumerate(self._windows):
            for pair in pairs:
                packed = pair.packed(scratch, count, self._block_bytes)
                some = numbers
                if self._route.source_ratio > 1:
                    packed = packed[window :: len(self._windows)]
                    some = numbers[: len(packed)]
                elif self._route.target_ratio > 1:
                    # The prompt may end inside the last block of the source.
                    some = numbers[window :: len(self._windows)]
                    packed = packed[: len(some)]
                pair.slots.index_copy_(0, some, packed)


def _sums(
    form: PartForm, memory: NDArray[np.uint8], keys: Sequence[bytes], algorithm: Algorithm
) -> bytes:
    assert form.span is not None
    sums = form.span.sum_blocks(memory.reshape(len(keys), form.block_bytes), keys, algorithm)
    return sums.astype("<u8", copy=False).tobytes()


def _planes(
    packed: Layout, narrowed: Layout, tier: TensorTier, block_bytes: int
) -> list[_TensorPlane]:
    return [_plane(read, write, tier, block_bytes) for read, write in plane_pairs(packed, narrowed)]


def _plane(packed: Plane, plane: Plane, tier: TensorTier, block_bytes: int) -> _TensorPlane:
    size = plane.dtype.itemsize
    # The axes of `Plane.view`: block, head (of size 1 without heads), tokens, channels.
    here, there = _axes(packed), _axes(plane)
    # Behind planes of smaller numbers a plane may begin anywhere: then its numbers are cut.
    strides = [stride for axes in (here, there) for length, stride in axes if length > 1]
    unit = gcd(size, packed.offset, plane.offset, block_bytes, *strides)
    here, there = ([*axes, (size // unit, unit)] for axes in (here, there))
    dtype = _INTEGERS[unit]
    slots = torch.as_strided(
        tier.numbers(plane.buffer, dtype),
        [length for length, _ in there],
        [stride // unit for _, stride in there],
        plane.offset // unit,
    )
    inner = here[1:]
    return _TensorPlane(
        dtype,
        packed.offset,
        tuple(length for length, _ in inner),
        tuple(stride // unit for _, stride in inner),
        slots,
    )


def _axes(plane: Plane) -> list[tuple[int, int]]:
    axes = [(dim.size, dim.stride) for dim in plane.dims]
    return axes if plane.has_heads else [axes[0], (1, plane.dtype.itemsize), *axes[1:]]
