"""A prefill scheduler that starts again beside living ranks (P16), or a prompt from its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.handoff_machines import freeze, introduce
from penstock.handoff.protocol import effects as eff
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.prefill_rank import PrefillRank
from tests.handoff.protocol.conftest import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.handoff.protocol.party import Party


def rank_of(world: World) -> PrefillRank:
    rank = world.parties["p0"]
    assert isinstance(rank, PrefillRank)
    return rank


def abandoned(effects: list[eff.AnyEffect]) -> list[eff.AnyEffect]:
    return [effect.write for effect in effects if isinstance(effect, eff.AbandonWrite)]


def admitted(rank: Party, handoff: str, scheduler: int | None) -> list[eff.AnyEffect]:
    assert isinstance(rank, PrefillRank)
    return rank.admit(handoff, token_count=4, layers=range(2), now=1.0, scheduler=scheduler)


def computed(rank: Party) -> list[eff.AnyEffect]:
    assert isinstance(rank, PrefillRank)
    return rank.chunk_progress("h", tokens=rank.prompts["h"].token_count, now=1.0)


def sees_dead(world: World) -> list[eff.AnyEffect]:
    return rank_of(world).suspect("P", 1.0)


def hears_of_the_next(world: World) -> list[eff.AnyEffect]:
    world.start("P")
    return introduce(rank_of(world), world.parties["P"].identity, 1.0)


def gets_work(world: World) -> list[eff.AnyEffect]:
    world.start("P")
    return admitted(rank_of(world), "next", world.parties["P"].life.incarnation)


@pytest.mark.parametrize("learns", [sees_dead, hears_of_the_next, gets_work])
def test_p16_writes_of_an_earlier_life_of_the_scheduler_are_abandoned(
    learns: Callable[[World], list[eff.AnyEffect]],
) -> None:
    world = World().busy()
    under_way = [write.write for write in world.posted]

    effects = learns(world)

    assert len(under_way) == 2
    assert abandoned(effects) == under_way
    assert "h" not in rank_of(world).prompts


def test_p16_what_is_observed_or_of_the_present_life_is_not_abandoned() -> None:
    world = World().busy()
    world.land()
    world.observe()
    same = world.parties["P"].life.incarnation

    effects = admitted(rank_of(world), "other", same)

    assert abandoned(effects) == []
    assert set(rank_of(world).prompts) == {"h", "other"}


def test_p16_a_write_that_is_dropped_gives_its_berth_back_and_lets_a_stop_be_answered() -> None:
    world = World().busy()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run_messages()
    rank = rank_of(world)
    assert rank.stops
    writes = [world.posted.pop().write for _ in range(2)]

    world.do("p0", lambda p: p.suspect("P", 1.0))
    for write in writes:
        world.do("p0", lambda p, w=write: p.write_dropped(w, 1.0))
    world.run_messages()

    assert not rank.stops
    assert not rank.writes
    assert rank.lanes["d0"].free == 0b11
    assert not rank.lanes["d0"].poisoned
    assert not world.parties["d0"].collections
    with pytest.raises(ValueError, match="not under way"):
        rank.write_dropped(writes[0], 2.0)


def test_p16_work_of_a_next_life_outlives_the_moment_in_which_it_is_heard_of() -> None:
    world = World().busy()
    world.start("P")
    life = world.parties["P"].life.incarnation

    world.do("p0", lambda p: admitted(p, "next", life))
    world.introduce("P", "p0")

    assert set(rank_of(world).prompts) == {"next"}
    assert rank_of(world).is_open("P")


def test_p16_work_of_a_life_that_is_over_is_refused_and_changes_nothing() -> None:
    world = World()
    earlier = world.parties["P"].life.incarnation
    world.start("P")
    world.introduce("P", "p0")
    before = freeze(rank_of(world))

    with pytest.raises(ValueError, match="a life of 'P' that is over"):
        admitted(rank_of(world), "late", earlier)

    assert freeze(rank_of(world)) == before


def test_p16_of_two_lives_that_were_never_heard_of_the_later_one_is_served() -> None:
    world = World().busy()
    world.do("p0", lambda p: admitted(p, "second", 501))

    world.do("p0", lambda p: admitted(p, "third", 502))

    assert set(rank_of(world).prompts) == {"third"}


def test_p16_a_rank_that_knows_no_scheduler_yet_serves_the_one_that_gives_work() -> None:
    world = World(acquainted=False)
    life = world.parties["P"].life.incarnation

    world.do("p0", lambda p: admitted(p, "first", None))
    world.do("p0", lambda p: admitted(p, "second", life))
    world.introduce("P", "p0")
    world.do("p0", lambda p: admitted(p, "third", life))

    assert set(rank_of(world).prompts) == {"first", "second", "third"}


def test_p16_work_of_a_life_that_died_before_it_was_heard_of_is_let_go_with_the_next() -> None:
    world = World()
    world.do("p0", lambda p: admitted(p, "second", 501))
    world.start("P")

    world.introduce("P", "p0")

    assert not rank_of(world).prompts


def test_p16_work_of_a_life_that_was_seen_dead_is_refused() -> None:
    world = World()
    dead = world.parties["P"].life.incarnation
    world.do("p0", lambda p: p.suspect("P", 0.0))

    with pytest.raises(ValueError, match="that is over"):
        admitted(rank_of(world), "late", dead)


def test_p16_a_life_that_gave_work_is_heard_before_it_has_greeted() -> None:
    world = World()
    world.start("P")
    life = world.parties["P"].life
    world.do("p0", lambda p: admitted(p, "next", life.incarnation))

    release = msg.ReleaseBlocks(sender=life, target=world.parties["p0"].life, handoff="next")
    world.do("p0", lambda p: p.receive(release, 1.0))

    assert [released.handoff for released in world.said(msg.Released)] == ["next"]


def test_p8_a_prompt_that_lost_its_blocks_is_written_when_it_is_computed_again() -> None:
    world = World().busy()
    rank = rank_of(world)
    lost = [write.write for write in world.posted]

    effects = rank.restart("h", 1.0)
    world.posted.clear()
    for write in lost:
        assert rank.write_dropped(write, 1.0) == []

    assert abandoned(effects) == lost
    assert len(lost) == 2
    world.do("p0", computed)
    assert {write.write.part for write in world.posted} == {write.part for write in lost}
    world.drive()
    assert world.outcome("D") == ["delivered"]


def test_p8_what_was_written_before_a_prompt_lost_its_blocks_counts() -> None:
    world = World().busy()
    world.land()
    world.observe()
    world.run_messages()
    world.take()
    world.run_messages()
    (rest,) = [write.write for write in world.posted]

    assert abandoned(rank_of(world).restart("h", 1.0)) == [rest]
    world.posted.clear()
    world.do("p0", lambda p: p.write_dropped(rest, 1.0))
    world.do("p0", computed)

    assert [write.write.part for write in world.posted] == [rest.part]


def test_p16_nothing_is_read_of_a_prompt_that_lost_its_blocks_while_it_was_released() -> None:
    world = World().busy()
    lost = [write.write for write in world.posted]
    world.do("P", lambda p: p.cancel("h", 1.0))
    world.run_messages()
    assert not world.said(msg.Released)

    assert abandoned(rank_of(world).restart("h", 2.0)) == lost
    world.posted.clear()
    for write in lost:
        world.do("p0", lambda p, write=write: p.write_dropped(write, 2.0))
    assert [released.handoff for released in world.said(msg.Released)] == ["h"]


def test_p8_a_prompt_that_was_released_or_never_known_is_not_restarted() -> None:
    world = World().busy()
    rank = rank_of(world)
    world.do("P", lambda p: p.cancel("h", 1.0))
    world.drive()

    assert rank.restart("h", 2.0) == []
    with pytest.raises(ValueError, match="handoff is 'x', which was never admitted"):
        rank.restart("x", 2.0)
