"""Ranks that go and come back, and what that means for the tiers.

The one rule: a rank that is back counts for nothing that its earlier life had. Its device memory
is empty; a tier is kept only if it lies in the same memory as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.runtime.agreement import require_fit
from penstock.runtime.facts import slowest_ready_s
from penstock.runtime.links import LinkedCrew

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config
    from penstock.machine.effects import Effect
    from penstock.runtime.agreement import Agreement
    from penstock.runtime.crew import RemoteCrew
    from penstock.runtime.driver import Driver
    from penstock.runtime.facts import RankFacts
    from penstock.transport.base import Channel


class Muster:
    """The ranks elsewhere, as they told of themselves last."""

    def __init__(
        self,
        config: Config,
        agreement: Agreement,
        driver: Driver,
        crew: RemoteCrew | LinkedCrew,
        ranks: Sequence[RankFacts],
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._driver = driver
        self._crew = crew
        self._facts = {facts.rank: facts for facts in ranks}

    def lose(self, rank: int, why: str) -> list[Effect]:
        """A rank is seen dead."""
        self._require_known(rank)
        self._crew.drop(rank)
        return self._driver.lose_rank(rank, why)

    def welcome(self, facts: RankFacts, channel: Channel | None) -> list[Effect]:
        """A rank is there again."""
        self._require_known(facts.rank)
        require_fit(self._config, facts, self._present(facts))
        self._require_room(facts)
        if (channel is not None) != isinstance(self._crew, LinkedCrew):
            way = "over channels: give channel=" if channel is None else "without channels"
            raise ValueError(f"rank_back: the ranks of this cache are reached {way}")
        self._crew.roll.welcome(facts)
        # It may be back before anybody noticed that it was gone.
        told = self._driver.lose_rank(facts.rank, "it started anew")
        if channel is not None and isinstance(self._crew, LinkedCrew):
            self._crew.join(facts.rank, channel)
        before, self._facts[facts.rank] = self._facts[facts.rank], facts
        self._driver.ready_s = slowest_ready_s(self._facts.values())
        told += self._driver.regain_rank(facts.rank)
        for index, (old, new) in enumerate(zip(before.tiers, facts.tiers, strict=True)):
            told += self._take_over(index, kept=old.memory == new.memory)
        return told

    def _take_over(self, index: int, *, kept: bool) -> list[Effect]:
        """Goes on with a tier as it is now that one of its ranks is another."""
        tier = index + 1
        reasons = [
            f"rank {facts.rank}: {facts.tiers[index].off}"
            for facts in self._facts.values()
            if facts.tiers[index].off
        ]
        if reasons:
            return self._driver.switch_tier_off(tier, reasons[0])
        was_on = self._driver.machine.is_tier_on(tier)
        return [] if kept and was_on else self._driver.switch_tier_on(tier, kept=kept)

    def _present(self, facts: RankFacts) -> RankFacts:
        """Another rank that is there, to compare with; the rank itself if there is none."""
        lost = self._driver.machine.lost_ranks
        others = (each for each in self._facts.values() if each.rank not in {facts.rank, *lost})
        return next(others, facts)

    def _require_known(self, rank: int) -> None:
        if rank not in self._facts:
            raise ValueError(f"rank is {rank}, must be from 0 to {len(self._facts) - 1}")

    def _require_room(self, facts: RankFacts) -> None:
        """The cache was opened for so many slots, and goes on with as many."""
        for index, tier in enumerate(self._agreement.settings.tiers):
            found = facts.tiers[index].slot_count
            if found < tier.slot_count:
                raise ConfigError(
                    f"tiers[{index}]",
                    f"has {found} slots on rank {facts.rank}, must have {tier.slot_count}, as "
                    "when the cache was opened",
                )
        for group, wanted in enumerate(self._agreement.device_slots):
            if facts.device_slots[group] < wanted:
                raise ConfigError(
                    "kv",
                    f"has {facts.device_slots[group]} blocks in KV group {group} on rank "
                    f"{facts.rank}, must have {wanted}, as when the cache was opened",
                )
