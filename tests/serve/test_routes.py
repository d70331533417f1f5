"""The routes that are chosen by groups of instances are those that a look at each would choose."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from penstock import AllCleared, BlocksRemoved, BlocksStored
from penstock.config import RoutingTable, parse_config
from penstock_serve.engine.requests import Request
from penstock_serve.server.fleet import FEW, Fleet, PromptKeys
from penstock_serve.server.routes import Routes, able_prefills

BLOCK_TOKENS = 4
CONFIG = parse_config(
    f'version = 1\nmodel.name = "m"\ncache = {{ blocks = 8, block_tokens = {BLOCK_TOKENS} }}\n'
)
PROMPT = Request(id="r", prompt=tuple(range(6 * BLOCK_TOKENS + 1)), max_tokens=4)
KEYS = [bytes(key) for key in PromptKeys(PROMPT).under(CONFIG)]


class Link(SimpleNamespace):
    """What the fleet looks at of a link."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @classmethod
    def made(cls, name: str) -> Link:
        return cls(name=name, load=0, lost="", ready=SimpleNamespace(config=CONFIG))


def stored(keys: list[bytes], tier: str = "device") -> BlocksStored:
    return BlocksStored(sequence=1, epoch=0, tier=tier, keys=keys, parent=None)


def removed(keys: list[bytes], tier: str = "device") -> BlocksRemoved:
    return BlocksRemoved(sequence=1, epoch=0, tier=tier, keys=keys)


def fleet_of(links: list[Link], settings: RoutingTable | None = None) -> Any:
    fleet: Any = Fleet(settings or RoutingTable(), salt="")
    for link in links:
        fleet.add(link)
        fleet.cached_of(link)
        fleet.note_role(link, "both")
    return fleet


@pytest.fixture(autouse=True)
def loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are counted by the loop's clock, which stands here."""
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: 100.0))


def blocks_of(fleet: Any, link: Link) -> int:
    [lead] = [each for each in fleet.leads(PromptKeys(PROMPT)) if fleet.has(each.members, link)]
    return int(lead.blocks)


def test_a_block_counts_until_it_is_gone_from_every_tier() -> None:
    one, two = Link.made("one"), Link.made("two")
    fleet = fleet_of([one, two])
    fleet.cached_of(one).take([stored(KEYS[:3]), stored(KEYS[:2], "host")])
    fleet.cached_of(two).take([stored(KEYS[:1])])
    assert (blocks_of(fleet, one), blocks_of(fleet, two)) == (3, 1)

    fleet.cached_of(one).take([removed(KEYS[:3])])
    assert blocks_of(fleet, one) == 2
    fleet.cached_of(one).take([removed(KEYS[:1], "host"), removed(KEYS[:1], "host")])
    assert blocks_of(fleet, one) == 0

    fleet.cached_of(two).take([AllCleared(sequence=2, epoch=1), stored(KEYS[:2])])
    assert blocks_of(fleet, two) == 2


def test_who_comes_after_an_instance_that_is_gone_has_nothing_of_it() -> None:
    one, two = Link.made("one"), Link.made("two")
    fleet = fleet_of([one, two])
    fleet.cached_of(one).take([stored(KEYS)])
    one.load = 3
    fleet.note_load(one)
    fleet.remove(one)
    assert not fleet.has(fleet.answering, one)

    three = Link.made("three")
    fleet.add(three)
    fleet.note_role(three, "prefill")
    fleet.cached_of(three)
    assert blocks_of(fleet, three) == 0
    [group] = fleet.weigh(fleet.prefilling, fleet.leads(PromptKeys(PROMPT)))
    assert group.worth == 0.0
    assert fleet.answering == fleet.mask([two])


def test_other_weights_have_other_keys() -> None:
    one, two = Link.made("one"), Link.made("two")
    fleet = fleet_of([one, two])
    for link in (one, two):
        fleet.cached_of(link).take([stored(KEYS)])
    fleet.change_weights(one, "2")
    assert (blocks_of(fleet, one), blocks_of(fleet, two)) == (0, len(KEYS))


def test_weights_that_nobody_has_any_more_are_forgotten() -> None:
    one, two = Link.made("one"), Link.made("two")
    fleet = fleet_of([one, two])

    for version in range(100):
        fleet.change_weights(one, str(version))
        fleet.change_weights(two, str(version))
    fleet.remove(two)

    assert len(fleet._configs) == 1


@pytest.mark.parametrize("count", [FEW, 3 * FEW])
def test_all_get_their_turn(count: int) -> None:
    links = [Link.made(str(number)) for number in range(count)]
    fleet = fleet_of(links)
    went = []
    for _ in range(2 * count):
        went.append(next(fleet.in_turn(fleet.answering)))
        fleet.note_chosen(went[-1])
    assert went == 2 * links


class OneByOne:
    """The same choice, by a look at every instance and every pair."""

    def __init__(
        self, links: list[Link], settings: RoutingTable, can_pair: Any, *, scored: bool
    ) -> None:
        self.settings = settings
        self.can_pair = can_pair
        self.scored = scored
        self.answering = [link for link in links if link.role != "prefill"]
        self.prefilling = [link for link in links if link.role == "prefill"]

    def own(self, link: Link) -> float:
        weights = self.settings
        return (
            weights.cached_weight * (0 if self.scored else link.blocks)
            - weights.load_weight * link.load
            - weights.failed_weight * link.failures
        )

    def hands_over(self, decode: Link) -> bool:
        return decode.role == "decode" and not self.scored and decode.blocks < len(KEYS)

    def able(self, decode: Link) -> list[Link]:
        if not self.hands_over(decode):
            return []
        return [each for each in self.prefilling if self.can_pair(each, decode)]

    def worth(self, decode: Link) -> float:
        able = [self.own(each) for each in self.able(decode)]
        if able:
            return self.own(decode) + max(able)
        less = self.settings.computing_weight if self.hands_over(decode) else 0.0
        return 2 * self.own(decode) - less

    def good(self) -> list[Link]:
        """Those that may answer."""
        least = max(map(self.worth, self.answering)) - 2 * self.settings.equal_blocks
        return [link for link in self.answering if self.worth(link) >= least]

    def good_prefills(self, decode: Link) -> list[Link]:
        able = self.able(decode)
        least = max(map(self.own, able), default=0.0) - self.settings.equal_blocks
        return [each for each in able if self.own(each) >= least]


LINKS = st.lists(
    st.builds(
        Link,
        role=st.sampled_from(("both", "decode", "prefill")),
        blocks=st.sampled_from((0, 3, len(KEYS))),
        load=st.integers(0, 1),
        failures=st.integers(0, 1),
        lost=st.just(""),
        ready=st.just(SimpleNamespace(config=CONFIG)),
    ),
    min_size=1,
    max_size=7,
)
WEIGHT = st.sampled_from((0.0, 1.0, 4.0, 8.0))
SETTINGS = st.builds(
    RoutingTable,
    cached_weight=WEIGHT,
    load_weight=WEIGHT,
    computing_weight=WEIGHT,
    failed_weight=WEIGHT,
    equal_blocks=WEIGHT,
)
PLACES = st.integers(0, 6)


@drawn(max_examples=400)
@given(
    links=LINKS,
    settings=SETTINGS,
    pairable=st.lists(st.booleans(), min_size=49, max_size=49),
    scored=st.booleans(),
    turns=st.lists(PLACES, max_size=7),
    preferred=st.none() | PLACES,
)
def test_a_route_is_as_good_as_a_look_at_each_pair_would_find(
    links: list[Link],
    settings: RoutingTable,
    pairable: list[bool],
    scored: bool,  # noqa: FBT001 - drawn
    turns: list[int],
    preferred: int | None,
) -> None:
    def can_pair(prefill: Link, decode: Link) -> bool:
        return pairable[7 * links.index(prefill) + links.index(decode)]

    looked = OneByOne(links, settings, can_pair, scored=scored)
    fleet = drawn_fleet(links, turns, settings)
    assert fleet.answering == fleet.mask(looked.answering)
    if not looked.answering:
        return
    submit = Request(id="r", prompt=PROMPT.prompt, max_tokens=4, scores_prompt=scored)
    routes: Any = Routes(
        fleet,
        PromptKeys(submit),
        settings,
        able=fleet.answering,
        can_pair=can_pair,  # type: ignore[arg-type]
    )
    wanted = links[preferred] if preferred is not None and preferred < len(links) else None
    route = routes.choose(wanted)

    good, first = looked.good(), lambda those: next(fleet.in_turn(fleet.mask(those)), None)
    assert route.decode is (wanted if wanted in good else first(good))
    assert route.prefill is first(looked.good_prefills(route.decode))


def drawn_fleet(links: list[Link], turns: list[int], settings: RoutingTable) -> Any:
    fleet = fleet_of(links, settings)
    for link in links:
        fleet.cached_of(link).take([stored(KEYS[: link.blocks])])
        fleet.note_role(link, link.role)
        fleet.note_load(link)
        for _ in range(link.failures):
            fleet.note_failure(link)
    for place in turns:
        if place < len(links):
            fleet.note_chosen(links[place])
    return fleet


def test_prefill_instances_come_best_first() -> None:
    links = [Link.made(str(number)) for number in range(4)]
    fleet = fleet_of(links)
    for link, blocks in zip(links, (1, 3, 0, 3), strict=True):
        fleet.note_role(link, "prefill")
        fleet.cached_of(link).take([stored(KEYS[:blocks])])
    groups = fleet.weigh(fleet.prefilling, fleet.leads(PromptKeys(PROMPT)))
    assert all(first.worth > second.worth for first, second in pairwise(groups))
    found: Any = able_prefills(fleet, groups, links[0], lambda each, _: each is not links[1])  # type: ignore[arg-type]
    assert [link.name for _, link in found] == ["3", "0", "2"]


def test_of_equals_those_answer_to_whom_somebody_can_hand_over() -> None:
    prefill, apart, near = (Link.made(name) for name in ("prefill", "apart", "near"))
    fleet = fleet_of([prefill, apart, near])
    fleet.note_role(prefill, "prefill")
    for link in (apart, near):
        fleet.note_role(link, "decode")
    prompt: Any = PromptKeys(PROMPT)
    routes: Any = Routes(
        fleet,
        prompt,
        RoutingTable(),
        able=fleet.answering,
        can_pair=lambda _, decode: decode is near,  # type: ignore[arg-type]
    )
    assert routes.choose(None)[:2] == (near, prefill)
    assert routes.choose(apart)[:2] == (near, prefill)
