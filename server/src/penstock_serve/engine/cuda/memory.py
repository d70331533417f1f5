"""GPU memory that is given back while its tensors live, and taken again at the same addresses.

    memory = GpuMemory(device)
    kv = memory.zeros((2, 100, 16, 8, 128), torch.bfloat16)
    memory.give_back()                      # nothing may use `kv` from here …
    memory.take_again()                     # … to here; it is full of zeros then

Each tensor has a range of addresses of its own, and CUDA's virtual memory puts pages behind them.
Graphs, movers and handoffs hold addresses: they need not know that the pages were away.
"""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GIB = 1 << 30
LEAST_BYTES = 1 << 20
"""Smaller weights stay where they are: a page has 2 MiB, and together they are very little."""
MOVED_BYTES = GIB
"""How much of the weights is in memory twice while they are moved."""
_DONE = driver.CUresult.CUDA_SUCCESS


def _checked(answer: tuple[Any, ...], what: str) -> Any:  # noqa: ANN401 - what the call returns
    if answer[0] != _DONE:
        _, text = driver.cuGetErrorString(answer[0])
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise UnavailableError(f"{what}: CUDA: {words}")
    return answer[1] if len(answer) > 1 else None


def has_virtual_memory(device: torch.device) -> bool:
    """Whether pages of this GPU can be taken from their addresses; not so in some containers."""
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(_checked(driver.cuDeviceGetAttribute(kind, device.index), "asking the GPU"))


class GpuMemory:
    """Tensors of one GPU whose memory comes and goes together.

    Args:
        device: The current CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ranges: list[_Range] = []

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory of its own.

        Raises `UnavailableError`: the GPU has no memory for it.
        """
        count = prod(shape)
        taken = _Range(self._device.index, max(1, count * dtype.itemsize))
        self._ranges.append(taken)
        # The tensor's storage holds the range, so its pages go with the last tensor.
        whole = torch.as_tensor(taken, device=self._device)
        return whole[: count * dtype.itemsize].view(dtype).view(*shape)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Moves tensors of this GPU here; each stays the same Python object.

        Raises `UnavailableError`: the GPU has no memory for it.
        """
        moved = 0
        for tensor in tensors:
            if tensor.nbytes >= LEAST_BYTES:
                tensor.data = self.zeros(tensor.shape, tensor.dtype).copy_(tensor)
                moved += tensor.nbytes
            if moved >= MOVED_BYTES:
                self._free_unused()
                moved = 0
        self._free_unused()

    def give_back(self) -> int:
        """Gives all memory back; returns how many bytes. A second call gives nothing.

        Raises `UnavailableError`: the device is lost.
        """
        torch.cuda.synchronize(self._device)
        given = sum(each.unmap() for each in self._ranges)
        self._free_unused()
        return given

    def take_again(self) -> None:
        """Takes all memory again; a second call changes nothing.

        Raises `UnavailableError`: the GPU has not enough left; none is taken.
        """
        missing = [each for each in self._ranges if not each.is_mapped]
        self._free_unused()
        for done, each in enumerate(missing):
            try:
                each.map()
            except UnavailableError as error:
                # They are being cleared, later than this where others use the device.
                torch.cuda.synchronize(self._device)
                for taken in missing[:done]:
                    taken.unmap()
                free, _ = torch.cuda.mem_get_info(self._device)
                wanted = sum(one.size for one in missing)
                raise UnavailableError(
                    f"{wanted / GIB:.6g} GiB of {self._device} are needed, {free / GIB:.6g} GiB "
                    f"are free: {error}"
                ) from error
        torch.cuda.synchronize(self._device)

    def _free_unused(self) -> None:
        """What torch keeps for its next tensors is no memory of anybody else's meanwhile."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class _Range:
    """Addresses, with or without pages behind them."""

    def __init__(self, device: int, nbytes: int) -> None:
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        best = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        page = _checked(driver.cuMemGetAllocationGranularity(self._kind, best), "asking the GPU")
        self.size = -(-nbytes // int(page)) * int(page)
        self._address = _checked(driver.cuMemAddressReserve(self.size, 0, 0, 0), "addresses")
        self._mapped: list[bool] = []
        """Not empty if pages are behind the addresses; shared with what frees them."""
        weakref.finalize(self, _free, self._address, self.size, self._mapped).atexit = False
        self.map()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (int(self._address), False),
            "version": 3,
        }

    @property
    def is_mapped(self) -> bool:
        return bool(self._mapped)

    def map(self) -> None:
        """Puts new pages behind the addresses, full of zeros."""
        pages = _checked(driver.cuMemCreate(self.size, self._kind, 0), "taking memory")
        try:
            _checked(driver.cuMemMap(self._address, self.size, 0, pages, 0), "mapping memory")
        finally:
            # The mapping holds them: they are free when it ends.
            driver.cuMemRelease(pages)
        self._mapped.append(True)
        try:
            opened = driver.cuMemSetAccess(self._address, self.size, [self._access], 1)
            _checked(opened, "opening memory")
            _checked(driver.cuMemsetD8(self._address, 0, self.size), "clearing memory")
        except UnavailableError:
            self.unmap()  # All of it or nothing: who asked may try again.
            raise

    def unmap(self) -> int:
        """Takes the pages away; returns how many bytes."""
        if not self._mapped:
            return 0
        _checked(driver.cuMemUnmap(self._address, self.size), "giving memory back")
        self._mapped.clear()
        return self.size


def _free(address: Any, size: int, mapped: list[bool]) -> None:  # noqa: ANN401 - a device pointer
    """Ends a range that no tensor uses any more; kernels that used it may still run."""
    driver.cuCtxSynchronize()
    if mapped:
        driver.cuMemUnmap(address, size)
    driver.cuMemAddressFree(address, size)
