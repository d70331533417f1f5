"""What an engine remembers of resets of its stored tiers, for as long as it lives.

A reset that was not confirmed is asked for again in the next session. The last generation of each
space is told to every store process: one that was restarted knows nothing, and a shared store may
have gone back to an earlier one meanwhile.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.messages import VoidNotice

GENERATIONS_MAX = 1024
"""Tiers and spaces of which the generation is remembered: versions of weights that were in use."""


class KnownResets:
    """Resets and generations, by the index of their tier and the name of their space."""

    def __init__(self) -> None:
        self._asked: Counter[tuple[int, bytes]] = Counter()
        """Those that were not confirmed."""
        self._unkept: dict[tuple[int, bytes], str] = {}
        """Those of them that count, with why the store may still lose them."""
        self._generations: dict[tuple[int, bytes], int] = {}

    def ask(self, tier: int, space: bytes) -> None:
        """A reset is asked for."""
        self._asked[tier, space] += 1

    def ask_again(self) -> list[tuple[int, bytes]]:
        """What a new session is to be asked for; each counts once from now on."""
        self._asked = Counter(dict.fromkeys(self._asked, 1))
        return list(self._asked)

    @property
    def unconfirmed(self) -> set[int]:
        """Tiers with a reset that was not confirmed."""
        return {tier for tier, _ in self._asked}

    @property
    def unkept(self) -> dict[int, str]:
        """Tiers with a reset that counts and may be lost, with why."""
        return {tier: why for (tier, _), why in self._unkept.items()}

    def take(self, tier: int, notice: VoidNotice) -> bool:
        """Takes what a store says of a reset; whether its generation is news."""
        at = (tier, notice.space)
        self._asked.subtract({at: notice.asked})
        self._asked += Counter()  # Drops what is at 0.
        if notice.unkept and at in self._asked:
            self._unkept[at] = notice.unkept
        elif at not in self._asked:
            self._unkept.pop(at, None)
        return self.know(tier, notice.space, notice.generation)

    def know(self, tier: int, space: bytes, generation: int) -> bool:
        """Remembers which generation of a space counts; whether it is news."""
        before = self._generations.pop((tier, space), None)
        self._generations[tier, space] = generation
        if len(self._generations) > GENERATIONS_MAX:
            del self._generations[next(iter(self._generations))]
        return before != generation

    def generations(self, tiers: Sequence[int], space: bytes) -> list[int | None]:
        """The last ones of a space that are known."""
        return [self._generations.get((tier, space)) for tier in tiers]
