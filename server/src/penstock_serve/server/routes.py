"""Which instances may answer a request and compute its prompt, and what each route is worth.

| who answers                              | who computes      | worth                           |
|------------------------------------------|-------------------|---------------------------------|
| one that computes prompts itself         | it                | twice its own                   |
| one that has enough of the prompt        | it                | twice its own                   |
| one to which others can hand it over     | the best of these | its own, and that one's         |
| any other one                            | it                | that, less `computing_weight`   |

Instances that are worth the same are one *way*. Who can hand over to whom is asked only where the
best routes depend on it: of two hundred equal decode instances, of the one whose turn it is.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.config import RoutingTable
    from penstock_serve.server.fleet import EqualInstances, Fleet, Lead, Members, PromptKeys
    from penstock_serve.server.instance_link import InstanceLink


class RequestRoute(NamedTuple):
    """The instance that answers a request, and the one that computes its prompt."""

    decode: InstanceLink
    prefill: InstanceLink | None
    """None: the first one computes it."""
    computing: int
    """Blocks that have to be computed."""


class _Way(NamedTuple):
    """Instances that may answer."""

    most: float
    """What its routes are worth, at most."""
    own: float
    members: Members
    needs: bool
    """Whether somebody should hand over to them: then they may be worth less."""


class Routes:
    """All routes of one request."""

    def __init__(
        self,
        fleet: Fleet,
        prompt: PromptKeys,
        settings: RoutingTable,
        *,
        able: Members,
        can_pair: Callable[[InstanceLink, InstanceLink], bool],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._can_pair = can_pair
        self._prompt = prompt
        self._leads = leads = fleet.leads(prompt)
        self._prefills = fleet.weigh(fleet.prefilling, leads) if able & ~fleet.whole else []
        self._ways = self._ways_worth_a_look(able)
        self._ways.sort(key=_most, reverse=True)
        self._worths: dict[InstanceLink, float] = {}
        """Of those that were looked at one by one."""

    def _ways_worth_a_look(self, able: Members) -> list[_Way]:
        """All but those that are worth too little, whoever could hand over to them."""
        handed = self._prefills[0].worth if self._prefills else -math.inf
        least, ways = -math.inf, []
        for group in self._fleet.weigh(able, self._leads):
            if group.worth + max(group.worth, handed) < least:
                break  # The others are worth less.
            for way in self._ways_of(group, self._prompt):
                ways.append(way)
                if not way.needs:
                    least = max(least, way.most - 2 * self._settings.equal_blocks)
        return ways

    def _ways_of(self, group: EqualInstances, prompt: PromptKeys) -> list[_Way]:
        fleet, own = self._fleet, group.worth
        if prompt.scored or self._is_enough(group.lead, prompt):
            return [_Way(2 * own, own, group.members, needs=False)]
        whole, others = group.members & fleet.whole, group.members & ~fleet.whole
        ways = [_Way(2 * own, own, whole, needs=False)] if whole else []
        if others:
            alone = 2 * own - self._settings.computing_weight
            handed = own + self._prefills[0].worth if self._prefills else -math.inf
            ways.append(_Way(max(alone, handed), own, others, needs=True))
        return ways

    def _is_enough(self, lead: Lead, prompt: PromptKeys) -> bool:
        """Whether so little of a prompt is missing that no other instance computes it."""
        least = self._settings.handoff_tokens_min or lead.block_tokens
        return prompt.token_count - lead.blocks * lead.block_tokens <= least

    def choose(self, preferred: InstanceLink | None) -> RequestRoute:
        """The best; of those that are nearly as good the preferred one, or the next in turn."""
        # Twice: what is handed over and what is computed are counted separately.
        least = self._best() - 2 * self._settings.equal_blocks
        ways = [way for way in self._ways if way.most >= least]
        among = 0
        for way in ways:
            among |= way.members
        first = [preferred] if preferred and self._fleet.has(among, preferred) else []
        for link in chain(first, self._fleet.in_turn(among)):
            way = next(each for each in ways if self._fleet.has(each.members, link))
            if self._worth(way, link) >= least:
                prefill = self._prefill_of(link) if way.needs else None
                computing = self._fleet.missing(prefill or link, self._leads, self._prompt)
                return RequestRoute(link, prefill, computing)
        raise AssertionError("the best route is among them")

    def _best(self) -> float:
        """What the best route is worth."""
        best = -math.inf
        for way in self._ways:
            if way.most <= best:
                break
            for link in self._fleet.in_turn(way.members):
                best = max(best, self._worth(way, link))
                if best >= way.most:
                    break
        return best

    def _worth(self, way: _Way, link: InstanceLink) -> float:
        """What it is worth to let this instance answer."""
        if not way.needs:
            return way.most
        if link not in self._worths:
            able = next(able_prefills(self._fleet, self._prefills, link, self._can_pair), None)
            self._worths[link] = (
                2 * way.own - self._settings.computing_weight
                if able is None
                else way.own + able[0].worth
            )
        return self._worths[link]

    def _prefill_of(self, decode: InstanceLink) -> InstanceLink | None:
        """Who computes a prompt for this instance: of nearly equal ones the next in turn."""
        able = able_prefills(self._fleet, self._prefills, decode, self._can_pair)
        best = next(able, None)
        if best is None:
            return None
        least = best[0].worth - self._settings.equal_blocks
        among = 0
        for group in self._prefills:
            among |= group.members if group.worth >= least else 0
        return next(link for link in self._fleet.in_turn(among) if self._can_pair(link, decode))


def able_prefills(
    fleet: Fleet,
    groups: Iterable[EqualInstances],
    decode: InstanceLink,
    can_pair: Callable[[InstanceLink, InstanceLink], bool],
) -> Iterator[tuple[EqualInstances, InstanceLink]]:
    """The instances that can hand over to this one, the best first."""
    for group in groups:
        for link in fleet.in_turn(group.members):
            if can_pair(link, decode):
                yield group, link


def _most(way: _Way) -> float:
    return way.most
