"""Which mover connects two media: a table, so that a new medium adds rows, not branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.movers.memcpy import MemcpyMover
from penstock.tiers.host import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.movers.base import Mover
    from penstock.movers.cuda.mover import CudaTier
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm


def _cuda_to_host(source: SlotStore, target: SlotStore, algorithm: Algorithm) -> Mover:
    device, host = _device_of(source), _host_of(target)
    return device.saves_to(host, algorithm)


def _host_to_cuda(source: SlotStore, target: SlotStore, algorithm: Algorithm) -> Mover:
    device, host = _device_of(target), _host_of(source)
    return device.loads_from(host, algorithm)


def _cuda_to_cuda(source: SlotStore, target: SlotStore, algorithm: Algorithm) -> Mover:
    assert source is target
    return _device_of(source).duplicates(algorithm)


def _device_of(store: SlotStore) -> CudaTier:
    from penstock.movers.cuda.mover import CudaTier  # noqa: PLC0415 - needs CUDA

    assert isinstance(store, CudaTier)
    return store


def _host_of(store: SlotStore) -> HostTier:
    assert isinstance(store, HostTier)
    return store


MOVERS: dict[tuple[str, str], Callable[[SlotStore, SlotStore, Algorithm], Mover]] = {
    ("arrays", "arrays"): MemcpyMover,
    ("arrays", "memory"): MemcpyMover,
    ("memory", "arrays"): MemcpyMover,
    ("memory", "memory"): MemcpyMover,
    ("arrays", "host"): MemcpyMover,
    ("host", "arrays"): MemcpyMover,
    ("memory", "host"): MemcpyMover,
    ("host", "memory"): MemcpyMover,
    ("host", "host"): MemcpyMover,
    ("cuda", "host"): _cuda_to_host,
    ("host", "cuda"): _host_to_cuda,
    ("cuda", "cuda"): _cuda_to_cuda,
}


def mover_between(source: SlotStore, target: SlotStore, algorithm: Algorithm) -> Mover:
    """The mover from one tier to another.

    Raises `ConfigError`: nothing connects the two.
    """
    make = MOVERS.get((source.medium, target.medium))
    if make is None:
        raise ConfigError(
            "tiers", f"nothing moves blocks from {source.medium!r} to {target.medium!r}"
        )
    return make(source, target, algorithm)
