"""The ranks of a cache that are other processes: their plans, reports, losses and returns.

    cache = penstock.open(config, ranks=facts)
    plan = cache.ranks.take_plan()               # once a step, for every rank
    cache.ranks.receive(report)                  # each report of a rank
    cache.ranks.lose(1, "its process exited")
    cache.ranks.rejoin(facts)                    # the rank was opened anew

The one rule: a rank that is back has nothing of what its earlier life had. Its device memory is
empty; a tier keeps its blocks only if it lies in the same memory as before.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PeerError
from penstock.runtime.rank_facts import RankFacts, require_fit, slowest_ready_s
from penstock.runtime.rank_links import ChannelLinks
from penstock.vocabulary.arguments import as_bytes, as_int, as_text, require_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.config import Config
    from penstock.machine.effects import Effect
    from penstock.runtime.driver import Driver
    from penstock.runtime.rank_facts import Agreement
    from penstock.transport.base import Channel


class RankRegistry:
    """The ranks of a cache in other processes; none where its one rank is in this process."""

    def __init__(
        self,
        config: Config,
        agreement: Agreement,
        driver: Driver,
        ranks: Sequence[RankFacts],
        deliver: Callable[[list[Effect]], None],
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._driver = driver
        self._facts = {facts.rank: facts for facts in ranks}
        self._deliver = deliver

    def __len__(self) -> int:
        return len(self._facts)

    def take_plan(self) -> bytes | None:
        """The next plan that the engine's messages have to carry to every rank.

        `None` if there is nothing to do, and always where the ranks are reached over channels or
        in this process.
        """
        with self._driver.access:
            return self._driver.links.take_plan()

    def receive(self, report: bytes) -> None:
        """Takes the report of a rank; reports may come late, repeatedly and in any order.

        Raises:
            PeerError: it is not a report of one of these ranks; nothing was changed.
            ValueError: it is not bytes.
        """
        report = as_bytes("report", report)
        with self._driver.access:
            acknowledgements = self._driver.links.acknowledgements
            if acknowledgements is None:
                raise PeerError("a report came, but the one rank of this cache is this process")
            self._deliver(self._driver.take_reports(acknowledgements.read(report)))

    def lose(self, rank: int, why: str) -> None:
        """A rank's process is seen dead: what it had to do has failed.

        Raises:
            ValueError: there is no such rank in another process.
        """
        rank, why = as_int("rank", rank), as_text("why", why)
        with self._driver.access:
            self._require_known(rank)
            self._driver.links.drop(rank)
            self._deliver(self._driver.lose_rank(rank, why))

    def rejoin(self, facts: RankFacts, *, channel: Channel | None = None) -> None:
        """A rank was opened anew, with empty device memory.

        Args:
            facts: What it has now.
            channel: The way to it, where ranks are reached over channels.

        Raises:
            ConfigError: it does not fit the cache as it was opened.
            PeerError: it is the life that was lost, and not a new one.
            ValueError: there is no such rank in another process, or a channel is missing or too
                much.
        """
        if not isinstance(facts, RankFacts):
            raise ValueError(f"facts is {reprlib.repr(facts)}, must be the RankFacts of the rank")  # noqa: TRY004
        if channel is not None:
            require_methods("channel", channel, "Channel", "send", "receive")
        with self._driver.access:
            self._deliver(self._rejoin(facts, channel))

    def _rejoin(self, facts: RankFacts, channel: Channel | None) -> list[Effect]:
        self._require_known(facts.rank)
        require_fit(self._config, facts, self._present(facts))
        self._require_room(facts)
        links = self._driver.links
        if (channel is not None) != isinstance(links, ChannelLinks):
            way = "over channels: give channel=" if channel is None else "without channels"
            raise ValueError(f"rejoin: the ranks of this cache are reached {way}")
        assert links.acknowledgements is not None
        links.acknowledgements.begin_life(facts)
        # It may be back before anybody noticed that it was gone.
        effects = self._driver.lose_rank(facts.rank, "it started anew")
        if channel is not None and isinstance(links, ChannelLinks):
            links.join(facts.rank, channel)
        before, self._facts[facts.rank] = self._facts[facts.rank], facts
        self._driver.ready_s = slowest_ready_s(self._facts.values())
        effects += self._driver.regain_rank(facts.rank)
        for index, (old, new) in enumerate(zip(before.tiers, facts.tiers, strict=True)):
            effects += self._switch_tier(index, kept=old.memory == new.memory)
        return effects

    def _switch_tier(self, index: int, *, kept: bool) -> list[Effect]:
        """Switches a tier on or off, now that one of its ranks is another."""
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
        if not self._facts:
            raise ValueError(f"rank is {rank}, but the one rank of this cache is this process")
        if rank not in self._facts:
            raise ValueError(f"rank is {rank}, must be from 0 to {len(self._facts) - 1}")

    def _require_room(self, facts: RankFacts) -> None:
        """Refuses a rank with fewer slots than the cache was opened with."""
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
