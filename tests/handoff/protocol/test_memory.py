"""Who may touch which memory when: integrity, slots, berths (P11 to P16)."""

from __future__ import annotations

import msgspec
import pytest

from lab.fixtures.handoff_machines import clone, freeze, sizes
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.settings import HandoffBounds
from tests.handoff.protocol.conftest import World

ONE_BERTH = HandoffBounds(
    berth_bytes=1024, berth_count=1, landing_bytes_max=1 << 20, retired_bytes_max=8192
)


# ------------------------------------------------------------------ integrity


def test_p11_a_notice_alone_does_not_count() -> None:
    world = World().busy()
    for _ in range(2):
        world.land()

    while world.wire:
        world.deliver()

    assert len(world.takes) == 2
    assert sizes(world.parties["d0"])["collecting"] == 1


def test_p9_parts_that_are_taken_together_are_answered_by_one_claim() -> None:
    world = World().busy()
    for _ in range(2):
        world.land()
    while world.wire:
        world.deliver()
    rank, takes = world.parties["d0"], [take for _, take in world.takes]
    one_by_one = clone(rank)

    effects = rank.parts_taken(takes, 0.0)
    last = [one_by_one.parts_taken((take,), 0.0) for take in takes][-1]

    assert freeze(rank) == freeze(one_by_one)
    assert effects == last
    assert [type(each.message) for each in effects].count(msg.Claim) == 1


def test_p2_parts_that_are_not_all_under_way_are_refused_and_none_counts() -> None:
    world = World().busy()
    world.land()
    while world.wire:
        world.deliver()
    rank, (_, take) = world.parties["d0"], world.takes[0]
    before = freeze(rank)

    with pytest.raises(ValueError, match="name a berth twice"):
        rank.parts_taken([take, take], 0.0)
    with pytest.raises(ValueError, match="is not under way"):
        rank.parts_taken([take, msgspec.structs.replace(take, part=take.part + 1)], 0.0)

    assert freeze(rank) == before


def test_p11_a_part_that_is_not_intact_is_written_again() -> None:
    world = World().busy()
    world.land()
    world.observe()
    while world.wire:
        world.deliver()

    world.take(corrupt=True)
    world.run()

    assert world.outcome("D") == ["delivered"]
    assert world.parties["d0"].counts["parts spoiled"] == 1
    world.check_over()


def test_p11_a_part_that_is_never_intact_fails_the_handoff_over() -> None:
    world = World().busy()

    for _ in range(100):
        if world.takes:
            world.take(corrupt=True)
        elif world.wire:
            world.deliver()
        else:
            world.progress_without_messages()

    assert world.outcome("D") == ["failed_over"]
    assert world.ended["D"][0].why == "part 0 of p0 was not intact 3 times"
    assert world.outcome("P") == ["failed_over"]
    world.check_over()


def test_p11_a_late_notice_of_a_spoiled_attempt_is_not_believed() -> None:
    world = World().busy()
    world.land()
    notice = world.said(msg.Landed)[0]
    world.observe()
    world.deliver()
    world.take(corrupt=True)

    world.do("d0", lambda d: d.receive(notice, 0.0))

    assert not world.takes


# ------------------------------------------------------------------ slots


def test_p13_slots_come_back_only_when_no_rank_moves_into_them() -> None:
    world = World(2, 2).busy()
    world.land()
    world.observe()
    while world.wire:
        world.deliver()
    assert len(world.takes) == 1

    world.do("D", lambda d: d.cancel("h", 0.0))
    while world.wire:
        world.deliver()
    before = world.outcome("D")
    world.take()
    while world.wire:
        world.deliver()

    assert before == []
    assert world.outcome("D") == ["cancelled"]


def test_p13_a_dropped_handoff_takes_nothing_more() -> None:
    world = World().busy()
    world.do("D", lambda d: d.cancel("h", 0.0))
    while world.wire:
        world.deliver()

    world.land()
    while world.wire:
        world.deliver()

    assert not world.takes
    assert world.outcome("D") == ["cancelled"]


def test_p13_an_expect_that_was_overtaken_by_its_drop_begins_nothing() -> None:
    world = World()
    world.submit_decode()
    expect = world.said(msg.Expect)[0]
    world.wire.remove(expect)
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run()

    world.do("d0", lambda d: d.receive(expect, 0.0))

    assert sizes(world.parties["d0"])["collecting"] == 0
    assert [m.report.value for m in world.said(msg.HandoffReport)] == ["dropped"]


# ------------------------------------------------------------------ berths


def test_p14_a_berth_is_written_to_again_only_when_observed_and_taken() -> None:
    for observed_first in (True, False):
        world = World(layers=3, bounds=ONE_BERTH).busy()
        world.land()
        steps = [world.observe, lambda w=world: (w.deliver(), w.take(), w.deliver())]

        steps[not observed_first]()
        between = len(world.posted)
        steps[observed_first]()

        assert between == 0
        assert [w.write.part for w in world.posted] == [1]


def test_p14_no_more_is_in_flight_than_the_credit_allows() -> None:
    world = World(layers=8)
    world.submit_prefill()
    world.submit_decode()
    world.compute()
    most = 0

    for _ in range(200):
        written = {write.write.berth for write in world.unended()}
        most = max(most, len(written | {take.berth for _, take in world.takes}))
        if world.wire:
            world.deliver()
        elif not world.progress_without_messages():
            break

    assert most == world.settings.bounds.berth_count
    assert world.outcome("D") == ["delivered"]


def test_p14_a_release_does_not_return_a_berth_that_the_target_reads() -> None:
    world = World(bounds=ONE_BERTH).busy()
    world.submit_prefill("i")
    world.submit_decode("i")
    world.compute("i")
    while world.wire:
        world.deliver()
    world.land()
    world.observe()
    world.deliver()
    assert len(world.takes) == 1

    world.do("P", lambda p: p.cancel("h", 0.0))
    while world.said(msg.ReleaseBlocks):
        world.deliver(world.wire.index(world.said(msg.ReleaseBlocks)[0]))

    assert not world.posted
    world.run()
    assert {e.handoff: e.outcome.value for e in world.ended["D"]} == {
        "h": "failed_over",
        "i": "delivered",
    }


def test_p15_a_stop_is_answered_only_after_the_last_write_was_observed() -> None:
    world = World().busy()
    world.do("D", lambda d: d.cancel("h", 0.0))

    answers = []
    for step in (world.run_messages, world.land, world.land, world.observe, world.observe):
        step()
        answers.append(len(world.said(msg.Stopped)))

    assert answers == [0, 0, 0, 0, 1]
    assert not world.said(msg.Stopped)[0].poisoned


def test_p15_a_stop_after_a_failed_write_is_answered_with_poisoned() -> None:
    world = World(layers=1).busy()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run_messages()

    world.fail_write()
    stopped = world.said(msg.Stopped)[0]
    world.run()

    assert stopped.poisoned
    assert [fence.generation for _, fence in world.fences] == [1]
    assert world.parties["d0"].retired_bytes == 2048


def test_p15_a_poisoned_stop_lets_others_go_on_in_another_area() -> None:
    world = World(layers=1).busy()
    world.submit_prefill("i")
    world.submit_decode("i")
    world.run_messages()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run_messages()

    world.fail_write()
    world.wire = [m for m in world.wire if not isinstance(m, msg.Poisoned)]
    world.run_messages()
    world.compute("i")
    world.run()

    assert {e.handoff: e.outcome.value for e in world.ended["D"]} == {
        "h": "cancelled",
        "i": "delivered",
    }
    assert {key[2] for key in world.areas} == {1, 2}


def test_p16_blocks_are_released_only_after_the_last_write_was_observed() -> None:
    world = World().busy()
    world.do("P", lambda p: p.cancel("h", 0.0))

    ended = []
    for step in (world.run_messages, world.land, world.land, world.observe, world.observe):
        step()
        world.run_messages()
        ended.append(world.outcome("P"))

    assert ended == [[], [], [], [], ["cancelled"]]


def test_p16_a_prompt_that_was_released_before_it_was_admitted_is_left_alone() -> None:
    world = World()
    world.submit_prefill(admit=False)
    world.do("P", lambda p: p.cancel("h", 0.0))
    world.run()

    world.admit()
    world.do("p0", lambda p: p.chunk_progress("h", tokens=4, now=0.0))

    assert sizes(world.parties["p0"])["prompts"] == 0


def moving_for_a_dead_scheduler() -> World:
    """d0 moves a part for D, which has started again and wants something else."""
    world = World(layers=1)
    for handoff in ("old", "new"):
        world.submit_prefill(handoff)
        world.compute(handoff)
    world.submit_decode("old")
    while not world.takes:
        world.run_messages()
        world.land()
        world.run_messages()
    world.crash("D")
    world.start("D")
    world.acquaint("D")
    world.submit_decode("new")
    return world


def test_p13_nothing_is_taken_for_a_scheduler_while_its_earlier_life_is_served() -> None:
    world = moving_for_a_dead_scheduler()
    (under_way,) = world.takes

    world.run_messages()
    while world.posted:
        world.land()
        world.run_messages()
    taken_meanwhile = [take for take in world.takes if take != under_way]
    world.drive(5)

    assert taken_meanwhile == []
    assert world.parties["d0"].counts["refused: moves for an earlier life"] == 1
    assert world.outcome("D") == ["delivered"]


def test_p13_slots_are_not_given_back_while_an_earlier_life_of_the_scheduler_is_served() -> None:
    world = moving_for_a_dead_scheduler()

    world.do("D", lambda d: d.cancel("new", world.now))
    world.run_messages()
    ended_meanwhile = world.outcome("D")
    world.drive(5)

    assert ended_meanwhile == []
    assert world.outcome("D") == ["cancelled"]


def test_p15_stopped_waits_for_the_writes_of_earlier_epochs() -> None:
    world = World().busy()
    earlier = [write.write for write in world.posted]
    world.do("D", lambda d: d.withdraw("h", 0.0))
    while world.wire:
        # The first stop is lost, so that nobody has asked for the end of the first claim.
        if isinstance(world.wire[0], msg.Stop):
            world.lose()
        else:
            world.deliver()
    world.submit_decode(epoch=2)
    world.run_messages()
    world.do("D", lambda d: d.cancel("h", 0.0))
    while world.wire:
        if isinstance(world.wire[0], msg.Stop) and world.wire[0].epoch == 1:
            world.lose()
        else:
            world.deliver()

    assert [write.epoch for write in earlier] == [1, 1]
    assert world.parties["p0"].stops == {("d0", "h"): 2}
    for _ in range(2):
        assert not world.said(msg.Stopped)
        world.land()
        world.observe()
    assert [stopped.epoch for stopped in world.said(msg.Stopped)] == [2]


def test_p11_a_part_that_cannot_be_taken_fails_its_handoff_and_gives_its_slots_back() -> None:
    world = World().busy()
    world.land()
    world.run_messages()
    name, take = world.takes.pop()

    world.do(name, lambda d: d.take_failed(take, world.now, why="no memory"))
    world.run_messages()

    assert world.outcome("D") == ["failed_over"]
    assert "could not be taken: no memory" in world.ended["D"][0].why
    with pytest.raises(ValueError, match="is not under way"):
        world.parties[name].take_failed(take, world.now, why="again")
    world.run()
    world.check_over()


def test_p13_a_take_that_fails_while_its_handoff_is_dropped_lets_the_drop_be_answered() -> None:
    world = World().busy()
    world.land()
    world.run_messages()
    name, take = world.takes.pop()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run_messages()
    assert world.outcome("D") == []

    world.do(name, lambda d: d.take_failed(take, world.now, why="no memory"))
    world.run_messages()

    assert world.outcome("D") == ["cancelled"]
