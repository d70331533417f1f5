"""When a cache asks a store for pages of what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.machine.events import Discovered, Prefetch, TierOff, TierOn, TierVoided
from penstock.runtime.stored_tiers import FIND_KEYS_MAX, StoredTiers
from penstock.store.base import OPENING, TierState
from penstock.store.process.link import (
    FoundInStore,
    Paged,
    StoreBack,
    StoreLost,
    StoreState,
    Voided,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.machine.events import Event
    from penstock.store.process.link import StoreResult
    from penstock.vocabulary.keys import Key

TIER = 2
KEY = bytes(16)


class ScriptedLink:
    """A link whose results a test writes down."""

    def __init__(self) -> None:
        self.is_up = True
        self.is_failed = False
        self.ready = True
        self.alarm = None
        self.pages_asked = 0
        self.pages_forgotten = 0
        self.finds: list[Sequence[Key]] = []
        self.results: list[StoreResult] = []

    def request_page(self, tier: int) -> None:
        assert tier == TIER
        self.pages_asked += 1

    def forget_pages(self, tier: int) -> None:
        assert tier == TIER
        self.pages_forgotten += 1

    def find(self, tier: int, keys: Sequence[Key], *, first: int) -> int:
        assert tier == TIER
        assert first >= 0
        self.finds.append(keys)
        return len(self.finds)

    def collect(self) -> list[StoreResult]:
        results, self.results = self.results, []
        return results


class Scene:
    def __init__(self) -> None:
        self.link = ScriptedLink()
        self.tiers = StoredTiers(self.link, [TIER])  # type: ignore[arg-type]

    def after(self, *results: StoreResult) -> list[type[Event]]:
        self.link.results = list(results)
        return [type(event) for event in self.tiers.collect()]

    @property
    def settled(self) -> bool:
        return self.tiers.status("", 0.0).settled

    @property
    def searching(self) -> bool:
        return self.tiers.status("request", 0.0).searching


def state(recovered: float = 1.0, *, on: bool = True, why: str = "full") -> StoreState:
    return StoreState(TIER, TierState(on=on, why="" if on else why, recovered=recovered))


def page(*, last: bool, keys: int = 1) -> Paged:
    return Paged(TIER, [KEY] * keys, [None] * keys, last)


def test_a_tier_is_on_with_its_first_page() -> None:
    scene = Scene()

    assert scene.after(state(), StoreBack()) == []
    assert scene.after(page(last=False)) == [TierOn, Discovered]
    assert scene.link.pages_asked == 2


def test_pages_end_with_the_last_one_however_often_the_state_changes() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))

    assert scene.after(state(), state(), state()) == []
    assert scene.link.pages_asked == 1


def test_a_store_that_still_reads_its_tables_is_asked_again_when_it_has_read_more() -> None:
    scene = Scene()
    scene.after(state(0.5), StoreBack())

    scene.after(page(last=True, keys=0))
    assert scene.link.pages_asked == 1
    scene.after(state(0.9))
    assert scene.link.pages_asked == 2
    scene.after(page(last=True))
    scene.after(state(1.0))
    assert scene.link.pages_asked == 3


def test_after_a_loss_and_after_a_void_it_is_asked_from_the_beginning() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))

    assert scene.after(StoreLost("gone", fenced=True)) == [TierOff]
    scene.after(StoreBack())
    assert scene.link.pages_asked == 2
    scene.after(page(last=True))
    assert scene.after(Voided(TIER, 7)) == [TierVoided]
    scene.after(state())
    assert scene.link.pages_asked == 3


def test_a_tier_that_is_voided_while_it_is_off_keeps_its_reason() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))
    scene.after(state(on=False))
    scene.link.results = [Voided(TIER, 7), Voided(TIER, 8, own=True)]

    assert list(scene.tiers.collect()) == [
        TierVoided(tier=TIER, own=False),
        TierVoided(tier=TIER, own=True),
    ]


def test_a_tier_that_the_store_has_switched_off_is_off_with_its_reason() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))
    scene.link.results = [state(on=False)]

    [off] = scene.tiers.collect()

    assert off == TierOff(tier=TIER, fenced=False, why="full")
    assert scene.after(state()) == []
    assert scene.after(page(last=True)) == [TierOn, Discovered]


def test_a_page_that_comes_after_its_tier_went_off_does_not_switch_it_on() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(state(on=False))

    late = scene.after(page(last=True))
    still_off = not scene.tiers.is_on(TIER)
    scene.after(state())

    assert late == []
    assert still_off
    assert scene.link.pages_forgotten == 1, "the next page is the first"
    assert scene.after(page(last=True)) == [TierOn, Discovered]


def test_the_keys_of_a_long_prefetch_are_asked_for_piece_by_piece() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))
    keys = [number.to_bytes(16, "big") for number in range(2 * FIND_KEYS_MAX + 50)]
    first, second, third = keys[:FIND_KEYS_MAX], keys[FIND_KEYS_MAX:-50], keys[-50:]

    scene.tiers.prefetch(Prefetch(keys=keys, cause="queued"), 0)
    assert scene.link.finds == [first]
    assert scene.after(FoundInStore(1, TIER, [True] * len(first))) == [Discovered, Prefetch]
    assert scene.link.finds == [first, second]
    scene.after(FoundInStore(2, TIER, [True] * len(second)))
    assert scene.link.finds == [first, second, third]
    scene.link.results = [FoundInStore(3, TIER, [True] * len(third))]
    [found, _] = scene.tiers.collect()

    assert isinstance(found, Discovered)
    assert found.keys == third
    assert list(found.parents) == keys[-51:-1]
    assert len(scene.link.finds) == 3


def test_a_prefetch_ends_with_the_first_block_that_is_not_there() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))
    keys = [number.to_bytes(16, "big") for number in range(2 * FIND_KEYS_MAX)]

    scene.tiers.prefetch(Prefetch(keys=keys, cause="queued"), 0)
    scene.after(FoundInStore(1, TIER, [True] * (FIND_KEYS_MAX - 1) + [False]))

    assert len(scene.link.finds) == 1


def test_a_block_in_a_form_that_cannot_be_read_is_known_and_no_more() -> None:
    scene = Scene()
    scene.after(state(), StoreBack())
    scene.after(page(last=True))
    keys = [number.to_bytes(16, "big") for number in range(3)]
    scene.tiers.prefetch(Prefetch(keys=keys, cause="queued"), 0)
    scene.link.results = [FoundInStore(1, TIER, [False] * 3, foreign=True)]

    [found] = scene.tiers.collect()

    assert found == Discovered(tier=TIER, keys=keys[:1], parents=[None], foreign=True)


def test_a_store_has_settled_when_each_tier_is_on_or_has_a_reason_not_to_be() -> None:
    scene = Scene()
    scene.after(StoreBack(), state(on=False, why=OPENING))
    opening = scene.settled
    scene.after(state())
    before_the_first_page = scene.settled
    scene.after(page(last=False))
    on = scene.settled
    scene.after(state(on=False))
    full = scene.settled
    scene.link.is_up = False

    assert (opening, before_the_first_page, on, full) == (False, False, True, True)
    assert not scene.settled


def test_a_store_is_searched_while_it_may_have_more_than_it_has_listed() -> None:
    scene = Scene()
    scene.after(state(0.5), StoreBack(), page(last=True))
    scene.tiers.prefetch(Prefetch(keys=[KEY], cause="request"), 0)
    asked = scene.searching
    scene.after(FoundInStore(1, TIER, [False]))
    answered = scene.searching
    scene.after(state(1.0), page(last=True))
    scene.tiers.prefetch(Prefetch(keys=[KEY], cause="request"), 0)

    assert (asked, answered) == (True, False)
    assert not scene.searching, "all of it is listed"
