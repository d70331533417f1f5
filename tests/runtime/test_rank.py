"""A rank executes what its owner's plans say, once, and reports it, once."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.cache.operations import Purpose
from penstock.errors import PeerError, UnavailableError
from penstock.machine.effects import Copy
from penstock.runtime.messages import Plan, TierFacts, decode_report, encode_plan
from penstock.vocabulary.keys import OperationId
from tests.runtime.conftest import Fleet

OWNER = 77


def copy(number: int = 1, *, slots: object = (0, 1), target: int = 1, **changed: object) -> Copy:
    """A save of two blocks, or a load of them."""
    down = target == 1
    device, host = np.array([slots], dtype=np.int32), np.arange(2, dtype=np.int32)
    facts = {
        "operation": OperationId(OWNER, 0, number),
        "purpose": Purpose.SAVE if down else Purpose.LOAD,
        "source": 0 if down else 1,
        "target": target,
        "keys": [bytes([number, at]) * 8 for at in range(2)],
        "source_slots": device if down else host,
        "target_slots": host if down else device,
        "deadline": 1.0,
        "cause": "test",
    }
    return Copy(**{**facts, **changed})


def plan(sequence: int = 1, *copies: Copy, owner: int = OWNER, abandoned: object = ()) -> bytes:
    names = [OperationId(owner, 0, number) for number in abandoned]
    return encode_plan(Plan(owner, sequence, copies, names))


@pytest.fixture
def rank() -> penstock.Rank:
    fleet = Fleet()
    return fleet.ranks[1]


def test_what_has_ended_is_reported_once(rank: penstock.Rank) -> None:
    rank.take(plan(1, copy()))
    busy = rank.busy

    message = rank.step()

    assert message is not None
    report = decode_report(message)
    assert (report.rank, report.life, report.incarnation) == (1, rank.facts.life, OWNER)
    assert [moved.operation for moved in report.moved] == [OperationId(OWNER, 0, 1)]
    assert (busy, rank.busy, rank.step()) == (True, False, None)


def test_a_plan_that_comes_twice_is_carried_out_once(rank: penstock.Rank) -> None:
    first, second = plan(1, copy(1)), plan(2, copy(2, slots=(2, 3)))

    for message in (first, first, second, first, second):
        rank.take(message)
    message = rank.step()

    assert message is not None
    assert [moved.operation.sequence for moved in decode_report(message).moved] == [1, 2]
    assert not rank.busy


def test_a_rank_may_join_in_the_middle_but_misses_nothing_from_there_on(
    rank: penstock.Rank,
) -> None:
    rank.take(plan(7, copy(1)))

    with pytest.raises(PeerError, match=r"given plan 9 after 7, must be 8: a plan was lost"):
        rank.take(plan(9, copy(2)))

    rank.take(plan(8, copy(3)))
    message = rank.step()
    assert message is not None
    assert [moved.operation.sequence for moved in decode_report(message).moved] == [1, 3]


def test_a_plan_of_another_owner_is_refused(rank: penstock.Rank) -> None:
    rank.take(plan(1, copy()))

    with pytest.raises(PeerError) as refusal:
        rank.take(plan(2, owner=78))

    assert str(refusal.value) == (
        "rank 1 was given a plan by owner 000000000000004e, must be by 000000000000004d: open the "
        "rank anew for another owner"
    )


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (copy(2, target=2), "copies from tier 1 to tier 2: rank 1 has no way between them"),
        (copy(2, slots=(0, 8)), "names slots from 0 to 8 in tier 0, must be from 0 to 7"),
        (copy(2, slots=(-1, 0)), "names slots from -1 to 0 in tier 0, must be from 0 to 7"),
        (copy(2, slots=(-2, 0), target=0), "names slots from -2 to 0 in tier 0, must be from -1"),
        (
            copy(2, target_slots=np.array([0, 16], dtype=np.int32)),
            "names slots from 0 to 16 in tier 1, must be from 0 to 15",
        ),
        (
            copy(2, source_slots=np.zeros((2, 2), dtype=np.int32)),
            "has 2 rows of slots in tier 0, must have 1",
        ),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_refused_as_a_whole(
    rank: penstock.Rank, wrong: Copy, problem: str
) -> None:
    with pytest.raises(PeerError) as refusal:
        rank.take(plan(1, copy(1), wrong))

    assert problem in str(refusal.value)
    assert not rank.busy
    rank.take(plan(1, copy(1)))
    assert rank.busy


def test_a_load_may_leave_blocks_out(rank: penstock.Rank) -> None:
    fleet = Fleet(ranks=1)
    (rank,) = fleet.ranks
    before = fleet.kv[0].copy()
    rank.take(plan(1, copy(1)))
    rank.step()

    rank.take(plan(2, copy(1, slots=(-1, 5), target=0)))
    rank.step()

    assert np.array_equal(fleet.kv[0][5], before[1])
    assert np.array_equal(np.delete(fleet.kv[0], 5, axis=0), np.delete(before, 5, axis=0))


def test_an_abandoned_copy_is_reported_all_the_same(rank: penstock.Rank) -> None:
    rank.take(plan(1, copy(1), copy(2), abandoned=[1]))

    message = rank.step()

    assert message is not None
    assert sorted(moved.operation.sequence for moved in decode_report(message).moved) == [1, 2]


def test_abandoning_what_is_not_known_is_left_alone(rank: penstock.Rank) -> None:
    rank.take(plan(1, abandoned=[5]))

    assert (rank.busy, rank.step()) == (False, None)


def test_a_step_copies_within_its_budget(rank: penstock.Rank) -> None:
    rank.take(plan(1, copy(1), copy(2)))

    steps = 0
    while rank.busy:
        rank.step(budget_bytes=rank.facts.block_bytes)
        steps += 1

    assert steps == 4


def test_closing_lets_copies_end_while_there_is_time(rank: penstock.Rank) -> None:
    rank.take(plan(1, copy(1), copy(2)))

    drained = rank.close(timeout_s=60)

    assert drained == penstock.Drained(finished=2, cancelled=0, unsettled=0)
    assert drained.clean


def test_closing_without_time_cuts_copies_short_and_says_so(rank: penstock.Rank) -> None:
    rank.take(plan(1, copy(1), copy(2)))

    drained = rank.close()

    assert drained == penstock.Drained(finished=0, cancelled=2, unsettled=0)
    assert not drained.clean
    assert rank.close(60) is drained


def test_a_closed_rank_takes_nothing_and_has_given_its_memory_back() -> None:
    fleet = Fleet(tier='kind = "host"')
    (fd,) = fleet.ranks[0].arenas.values()

    with fleet.ranks[0] as rank:
        pass

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for call in (lambda: rank.take(plan(1)), rank.step, lambda: rank.wait(0.0)):
        with pytest.raises(UnavailableError, match="rank 0 is closed"):
            call()


def test_facts_tell_what_a_rank_has(rank: penstock.Rank) -> None:
    facts = penstock.RankFacts.from_bytes(rank.facts.to_bytes())

    assert facts == rank.facts
    assert (facts.rank, facts.block_tokens, facts.block_bytes) == (1, 4, 4 * 3 * 8)
    assert facts.device_slots == (8,)
    assert [(tier.name, tier.slot_count, tier.off) for tier in facts.tiers] == [("host", 16, "")]
    assert (facts.algorithm, facts.shares, facts.cell_count) == ("xxh3", False, 1)


@settings(derandomize=True, deadline=None)
@given(data=st.data())
def test_damaged_facts_are_refused_or_still_make_sense(data: st.DataObject) -> None:
    facts = penstock.RankFacts(
        rank=1,
        life=2,
        block_tokens=4,
        block_bytes=96,
        cell_count=1,
        device_slots=(8,),
        tiers=(TierFacts(name="host", slot_count=16, memory="memfd 1:2"),),
        algorithm="xxh3",
        form=bytes(16),
    )
    message = bytearray(facts.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))

    try:
        read = penstock.RankFacts.from_bytes(bytes(message))
    except PeerError:
        return

    assert read.rank >= 0
    assert min(read.block_tokens, read.block_bytes, *read.device_slots) > 0


@pytest.mark.parametrize(
    "message", [b"", b"F\x01\x80", b"P\x01", b"F\x02\x80", b"F\x01\x81\xa4rank\xff"]
)
def test_facts_that_cannot_be_read_are_refused(message: bytes) -> None:
    with pytest.raises(PeerError, match="a message with facts"):
        penstock.RankFacts.from_bytes(message)
