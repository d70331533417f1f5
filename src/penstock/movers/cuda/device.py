"""The engine's KV memory on a GPU as a tier, and the movers of it.

    device = CudaTier(TensorTier.of(…))
    save = device.saves_to(host)            # HostTier; registered for DMA once, for both ways
    load = device.loads_from(host)
    twin = device.duplicates()

The one rule: all movers of a tier share its `Steps`, so a step is reported once for all.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from penstock.movers.cuda.layers import LayerLoadMover
from penstock.movers.cuda.mover import DuplicateMover, LoadMover, SaveMover
from penstock.movers.cuda.pinned import RegisteredHost
from penstock.movers.cuda.queue import slots_of_any
from penstock.movers.cuda.streams import Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.tiers.host import HostTier
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.packing import Blocks

logger = logging.getLogger(__name__)


class CudaTier:
    """KV tensors on the current CUDA device.

    Args:
        tier: The tensors.
        layerwise: Whether loads fill layer by layer, to be joined before they have ended.

    Raises:
        ValueError: the tensors lie elsewhere.
    """

    medium = "cuda"

    def __init__(self, tier: TensorTier, *, layerwise: bool = False) -> None:
        here = torch.device("cuda", torch.cuda.current_device())
        if tier.device != here:
            raise ValueError(f"kv lies on {tier.device}, must be on the current device, {here}")
        self.layerwise = layerwise
        self.layout: Layout = tier.layout
        self.slot_count: int = tier.slot_count
        self.steps = Steps(slots_of_any(tier.layout))
        self._tier = tier
        self._areas: dict[int, RegisteredHost] = {}

    @property
    def tensors(self) -> TensorTier:
        """The tensors themselves."""
        return self._tier

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where each buffer of the layout starts."""
        return self._tier.addresses

    def blocks(self, slots: Sequence[int]) -> Blocks:
        """Raises: the CPU cannot access the device's memory."""
        return self._tier.blocks(slots)

    def saves_to(self, host: HostTier, algorithm: Algorithm) -> SaveMover:
        """The mover down to a host tier.

        Raises `UnavailableError`: the host's memory cannot be pinned, or the device has no memory
        left for staging.
        """
        mover = SaveMover(self, self._area(host), algorithm, steps=self.steps)
        _log_staging("saves", mover.staging_bytes)
        return mover

    def loads_from(self, host: HostTier, algorithm: Algorithm) -> LoadMover | LayerLoadMover:
        """The mover up from a host tier.

        Raises `UnavailableError`: as for `saves_to`.
        """
        make = LayerLoadMover if self.layerwise else LoadMover
        mover = make(self._area(host), self, algorithm, steps=self.steps)
        _log_staging("layer-wise loads" if self.layerwise else "loads", mover.staging_bytes)
        return mover

    def duplicates(self, algorithm: Algorithm) -> DuplicateMover:
        """The mover from slot to slot."""
        mover = DuplicateMover(self, self, algorithm, steps=self.steps)
        _log_staging("duplicates", mover.staging_bytes)
        return mover

    @property
    def can_give_back(self) -> bool:
        """Whether the engine has its memory where it can be given back for a while."""
        return self._tier.memory is not None

    def give_back(self) -> int:
        """Gives the memory of all blocks back, until `take_again`; returns how many bytes."""
        memory = self._tier.memory
        if memory is None:
            raise ValueError("only all blocks are given back, of an engine whose memory can be")
        return memory.give_back()

    def release(self, host: object) -> None:
        """Ends the registration of one host tier until `take_again`; no copy may use it."""
        area = self._areas.get(id(host))
        if area is not None:
            area.release()

    def take_again(self) -> None:
        """Takes the memory of the blocks again, and registers host tiers that were released.

        Raises `UnavailableError`: there is no memory, or it cannot be pinned; may be called again.
        """
        if self._tier.memory is not None:
            self._tier.memory.take_again()
        for area in self._areas.values():
            area.register_again()

    def forget(self, host: object) -> None:
        """Ends the registration of one host tier, if it has any; its movers are closed before."""
        area = self._areas.pop(id(host), None)
        if area is not None:
            area.close()

    def close(self) -> None:
        """Ends the registration of host memory; the movers must be closed before."""
        for area in self._areas.values():
            area.close()
        self._areas.clear()
        self.steps.close()

    def _area(self, host: HostTier) -> RegisteredHost:
        if id(host) not in self._areas:
            started = time.monotonic()
            self._areas[id(host)] = RegisteredHost(host)
            logger.info(
                "host memory registered: bytes=%d seconds=%.1f",
                host.arena.size,
                time.monotonic() - started,
            )
        return self._areas[id(host)]


def _log_staging(what: str, taken: int) -> None:
    logger.info("staging taken on the device: for=%s bytes=%d", what, taken)
