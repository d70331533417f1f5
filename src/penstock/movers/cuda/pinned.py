"""Host memory that is registered for DMA with a GPU.

`PinnedArea` is what a mover needs of the host tier: packed blocks in slots at equal distances, and
a table of their sums. `register` registers memory of any origin, `RegisteredHost` that of a host
arena.

The one rule: memory stays registered as long as a copy may use it, so it is unregistered only by
`close`, after the movers are closed, or by `release`, while there are no copies.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from cuda.bindings import runtime

from penstock.errors import UnavailableError
from penstock.movers.cuda.streams import checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.tiers.host import HostTier

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
