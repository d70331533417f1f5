"""The memory of a rank outlives the rank: somebody keeps the descriptors of its host tiers.

    penstock.open_rank(config, rank=1, kv=tensors, keeper=keeping.keeper())

In its first life a rank makes its arenas and has them kept. In the next it maps them again: their
pages are there already, and an owner that lived on finds every block that it knew to be whole.
An owner that ended with the rank knows of none, and fills them anew.

The one rule: a kept arena is used only where it fits to the byte. Another one is made instead, and
takes its place with the keeper.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from penstock.supervisor.keeper import Keeper

logger = logging.getLogger(__name__)


class KeptArenas(NamedTuple):
    """What is kept for one rank."""

    keeper: Keeper
    rank: int

    def descriptor(self, tier: int) -> int | None:
        """The arena of a tier, if an earlier life had one kept."""
        return self.keeper.kept(self._name(tier))

    def keep(self, tier: int, fd: int) -> None:
        """Has a new arena kept. Where that fails the rank goes on: its next life starts empty."""
        try:
            self.keeper.keep(self._name(tier), fd)
        except UnavailableError as error:
            logger.warning(
                "arena not kept: rank=%d tier=%d cause=%s; a restart will find it empty",
                self.rank,
                tier,
                error,
            )

    def _name(self, tier: int) -> str:
        # By number: a tier may have a name that is none for a keeper.
        return f"arena.{self.rank}.{tier}"
