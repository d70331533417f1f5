"""Memory of a GPU that two processes map: landing areas that pack kernels of a peer write to.

    memory = LandingMemory(device)
    made = memory.create(size)              # here; `made.fd` goes over a Unix socket
    mapped = memory.map(fd, size)           # there: the same bytes, on the same GPU or a peer of it
    mapped.close(); made.close()

CUDA's virtual memory makes it (`cuMemCreate`), and a file descriptor names it. The driver counts
who has it mapped, so it is free when the last process has unmapped it or is dead: whoever made it
can let go at any time, and a writer that goes on hurts nobody.

The rule: memory is unmapped only when no copy or kernel of this process uses it any more. Such a
fault of the device would end all work of the process there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver, runtime

from penstock.errors import UnavailableError
from penstock.movers.cuda.streams import checked

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DONE = driver.CUresult.CUDA_SUCCESS
_AS_FILE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PAGE = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
SPARE_SHARE = 128
"""This part of the GPU's memory stays free: areas are opened while the engine runs, which may need
some more for a larger step. Areas can lie on the host."""


class DeviceBytes:
    """Bytes of a GPU by their address; slices of them are such, too."""

    __slots__ = ("_length", "address")

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: slice) -> DeviceBytes:
        start, end, _ = at.indices(self._length)
        return DeviceBytes(self.address + start, max(0, end - start))

    def __setitem__(self, at: slice, value: NDArray[np.uint8] | int) -> None:
        """Writes bytes of the host, or one value everywhere; waits until they are there."""
        there = self[at]
        if isinstance(value, int):
            checked(runtime.cudaMemset(there.address, value, len(there)))
        else:
            given = np.ascontiguousarray(value)
            kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            checked(runtime.cudaMemcpy(there.address, given.ctypes.data, len(there), kind))
        checked(runtime.cudaStreamSynchronize(0))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self._length,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class LandingMemory:
    """Makes and maps such memory on one GPU; see `DeviceMemory` of the transports.

    Args:
        device: The number of the current CUDA device.
    """

    def __init__(self, device: int) -> None:
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.requestedHandleTypes = _AS_FILE
        self._kind.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = _READ_WRITE

    def create(self, size: int) -> MadeRange:
        """New memory, which another process can map by its descriptor.

        Raises `UnavailableError`: the GPU has not so much, or does not share memory.
        """
        size = self._in_pages(size)
        status, free, total = runtime.cudaMemGetInfo()
        checked((status,))
        if free - size < total // SPARE_SHARE:
            raise UnavailableError(
                f"{size >> 20} MiB of GPU memory: {free >> 20} MiB are free, of which "
                f"{total // SPARE_SHARE >> 20} MiB are the engine's"
            )
        pages = _checked(driver.cuMemCreate(size, self._kind, 0), f"{size >> 20} MiB of GPU memory")
        try:
            fd = int(
                _checked(driver.cuMemExportToShareableHandle(pages, _AS_FILE, 0), "sharing it")
            )
            os.set_inheritable(fd, False)  # noqa: FBT003 - takes no keyword
            try:
                return MadeRange(pages, size, self._access, fd)
            except UnavailableError:
                os.close(fd)
                raise
        finally:
            # Mapping and descriptor hold the memory.
            driver.cuMemRelease(pages)

    def map(self, fd: int, size: int) -> MappedRange:
        """What another process has made.

        Raises `UnavailableError`: it lies on a GPU that this one cannot write to.
        """
        size = self._in_pages(size)
        pages = _checked(
            driver.cuMemImportFromShareableHandle(fd, _AS_FILE), "GPU memory of a peer"
        )
        try:
            return MappedRange(pages, size, self._access)
        finally:
            driver.cuMemRelease(pages)

    def _in_pages(self, size: int) -> int:
        page = int(
            _checked(driver.cuMemGetAllocationGranularity(self._kind, _PAGE), "asking the GPU")
        )
        return -(-size // page) * page


class MappedRange:
    """Addresses of this process with shared memory of a GPU behind them."""

    def __init__(self, pages: Any, size: int, access: Any) -> None:  # noqa: ANN401 - of CUDA
        self._size = size
        self._address = _checked(driver.cuMemAddressReserve(size, 0, 0, 0), "addresses")
        try:
            _checked(driver.cuMemMap(self._address, size, 0, pages, 0), "mapping memory")
            try:
                opened = driver.cuMemSetAccess(self._address, size, [access], 1)
                _checked(opened, "opening memory")
            except UnavailableError:
                driver.cuMemUnmap(self._address, size)
                raise
        except UnavailableError:
            driver.cuMemAddressFree(self._address, size)
            raise
        self.bytes = DeviceBytes(int(self._address), size)

    def close(self) -> None:
        """Unmaps it; a second call changes nothing. Of a device that is lost, nothing is left."""
        if len(self.bytes):
            self.bytes = DeviceBytes(0, 0)
            driver.cuMemUnmap(self._address, self._size)
            driver.cuMemAddressFree(self._address, self._size)


class MadeRange(MappedRange):
    """The same for memory that was made here, with the descriptor that names it."""

    def __init__(self, pages: Any, size: int, access: Any, fd: int) -> None:  # noqa: ANN401 - of CUDA
        super().__init__(pages, size, access)
        self.fd = fd

    def close(self) -> None:
        """Closes the descriptor, too: it holds the memory as a mapping does."""
        if len(self.bytes):
            os.close(self.fd)
        super().close()


def _checked(answer: tuple[Any, ...], what: str) -> Any:  # noqa: ANN401 - what the call returns
    if answer[0] != _DONE:
        _, text = driver.cuGetErrorString(answer[0])
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise UnavailableError(f"{what}: CUDA: {words}")
    return answer[1] if len(answer) > 1 else None
