"""An owner and its ranks over the engine's own messages: what is done, lost, late or repeated."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import penstock
from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Outcome
from penstock.errors import ConfigError, PeerError, UnavailableError
from penstock.machine import effects as ef
from penstock.movers.base import Moved
from penstock.runtime import rank_links
from penstock.runtime.messages import RankReport, decode_plan, encode_report
from tests.runtime.conftest import Fleet


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_back_what_it_gave(ranks: int) -> None:
    fleet = Fleet(ranks=ranks)
    keys = fleet.keys(3)
    before = [kv[:3].copy() for kv in fleet.kv]
    fleet.owner.save(keys, [0, 1, 2], cause="save")
    fleet.settle()

    fleet.owner.load(keys, [7, 5, 6], cause="load")
    (ended,) = fleet.settle()

    assert isinstance(ended, ef.Ended)
    assert ended.outcome is Outcome.DONE
    for kv, saved in zip(fleet.kv, before, strict=True):
        assert np.array_equal(kv[[7, 5, 6]], saved)


def test_a_block_is_ready_when_the_last_rank_has_written_it() -> None:
    fleet = Fleet(ranks=3)
    keys = fleet.keys(2)
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.plan()

    ready = []
    for rank in (2, 0, 1):
        report = fleet.ranks[rank].step()
        assert report is not None
        fleet.owner.ranks.receive(report)
        ready.append(fleet.owner.lookup(keys).ready)

    assert ready == [0, 0, 2]


def test_a_slow_rank_holds_up_what_it_has_to_do_and_nothing_else() -> None:
    fleet = Fleet(ranks=2)
    chains = [fleet.keys(2, first=100 * chain) for chain in range(3)]
    for chain, keys in enumerate(chains):
        fleet.owner.save(keys, [2 * chain, 2 * chain + 1], cause=f"chain {chain}")
    fleet.plan()
    quick, slow = fleet.ranks

    report = quick.step()
    assert report is not None
    fleet.owner.ranks.receive(report)
    ready = []
    while slow.busy:
        report = slow.step(budget_bytes=0)
        if report is not None:
            fleet.owner.ranks.receive(report)
        ready.append([fleet.owner.lookup(keys).ready for keys in chains])

    assert not quick.busy
    assert ready == [[0, 0, 0], [2, 0, 0], [2, 0, 0], [2, 2, 0], [2, 2, 0], [2, 2, 2]]


class Post:
    """Carries messages late, out of order and twice; loses none of them."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.chance = Random(seed)
        self.plans: list[bytes] = []
        self.taken = [0] * len(fleet.ranks)
        self.reports: list[bytes] = []

    def deliver_all(self) -> None:
        owner = self.fleet.owner
        for _ in range(400):
            owner.step()
            plan = owner.ranks.take_plan()
            self.plans += [] if plan is None else [plan]
            for rank in range(len(self.taken)):
                self.let_work(rank)
            self.chance.shuffle(self.reports)
            while self.reports and self.chance.random() < 0.6:
                owner.ranks.receive(self.reports.pop())
            if not (owner.busy or self.reports):
                return
        raise AssertionError("copies are still under way after 400 steps")

    def let_work(self, number: int) -> None:
        rank = self.fleet.ranks[number]
        for _ in range(self.chance.randrange(3)):
            # Some plans come again, but they come in order.
            start = max(0, self.taken[number] - self.chance.randrange(3))
            for plan in self.plans[start : self.taken[number] + 1]:
                rank.take(plan)
            self.taken[number] = min(len(self.plans), self.taken[number] + 1)
        report = rank.step(budget_bytes=self.chance.choice([0, 0, 1 << 20]))
        if report is not None:
            self.reports += [report] * self.chance.choice([1, 1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_order_grouping_and_repetition_of_messages_change_nothing(seed: int) -> None:
    fleet = Fleet(ranks=3, blocks=32, settings="operation_blocks_max = 3")
    post = Post(fleet, seed)
    keys = fleet.keys(8)
    before = [kv.copy() for kv in fleet.kv]
    fleet.owner.save(keys, range(8), cause="save")
    post.deliver_all()
    for kv in fleet.kv:
        kv[:] = 0

    fleet.owner.load(keys, range(7, -1, -1), cause="load")
    post.deliver_all()

    outcomes = [each.outcome for each in fleet.owner.poll() if isinstance(each, ef.Ended)]
    assert outcomes == [Outcome.DONE] * 6
    for kv, saved in zip(fleet.kv, before, strict=True):
        assert np.array_equal(kv[::-1], saved)
    fleet.owner.audit()


def test_a_cancelled_operation_settles_when_every_rank_has_stopped() -> None:
    fleet = Fleet(ranks=2)
    (operation,) = fleet.owner.save(fleet.keys(4), [0, 1, 2, 3], cause="save").operations
    fleet.plan()
    for rank in fleet.ranks:
        rank.step(budget_bytes=0)

    fleet.owner.cancel(operation)
    (ended,) = fleet.owner.poll()
    told = []
    fleet.plan()
    for rank in fleet.ranks:
        report = rank.step()
        assert report is not None
        fleet.owner.ranks.receive(report)
        told.append(fleet.owner.poll())

    assert isinstance(ended, ef.Ended)
    assert (ended.outcome, ended.settled) == (Outcome.CANCELLED, False)
    assert told == [[], [ef.Settled(operation=operation)]]


def test_corrupt_bytes_on_one_rank_are_a_miss_on_all() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(3)
    fleet.owner.save(keys, [0, 1, 2], cause="save")
    fleet.settle()
    host = fleet.ranks[1].executor.stores[1]
    assert host is not None
    host.blocks([0]).buffers[0].reshape(16, -1)[1, 0] ^= 1

    fleet.owner.load(keys, [5, 6, 7], cause="load")
    (ended,) = fleet.settle()

    assert isinstance(ended, ef.Ended)
    assert [(position, fault.value) for position, fault in ended.faults] == [(1, "corrupt")]
    found = fleet.owner.lookup(keys)
    assert (found.ready, found.miss.reason) == (1, MissReason.CORRUPT)


def test_a_plan_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(ranks=1, blocks=60_000)
    (rank,) = fleet.ranks
    for number in range(7):
        fleet.owner.save(fleet.keys(8, first=64 * number), range(8), cause="x" * 1000)
    monkeypatch.setattr(rank_links, "PLAN_BYTES", 10_000)

    plans = []
    while (plan := fleet.owner.ranks.take_plan()) is not None:
        plans.append(plan)
        rank.take(plan)

    assert [len(decode_plan(plan).copies) for plan in plans] == [2, 2, 2, 1]
    assert all(len(plan) <= 10_000 for plan in plans)
    while rank.busy:
        report = rank.step()
        assert report is not None
        fleet.owner.ranks.receive(report)
    assert len(fleet.owner.poll()) == 7


# ---------------------------------------------------------------- ranks go and come


def test_a_lost_rank_fails_what_it_had_to_do_and_shows_in_health() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(2)
    healthy = fleet.owner.health()
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.plan()
    report = fleet.ranks[0].step()
    assert report is not None
    fleet.owner.ranks.receive(report)

    fleet.owner.ranks.lose(1, "killed by signal 9")

    assert healthy == penstock.Health(ok=True)
    assert fleet.owner.health() == penstock.Health(
        ok=False, reasons=("rank 1 is lost: killed by signal 9",)
    )
    (ended,) = fleet.owner.poll()
    assert isinstance(ended, ef.Ended)
    assert (ended.outcome, ended.settled) == (Outcome.FAILED, True)
    assert ended.failure == "rank 1 is lost"
    assert fleet.owner.statistics().lost_ranks == (1,)
    with pytest.raises(UnavailableError, match="rank 1"):
        fleet.owner.load(keys, [3, 4], cause="load")


def test_a_rank_that_is_back_works_with_empty_memory() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(2)
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.settle()
    fleet.owner.ranks.lose(1, "killed")

    fleet.ranks[1] = fleet.open_rank(1)
    fleet.owner.ranks.rejoin(fleet.ranks[1].facts)

    # Its half of every block went with it.
    found = fleet.owner.lookup(keys)
    assert (found.ready, found.miss.reason) == (0, MissReason.LOST)
    assert fleet.owner.health().ok
    fleet.owner.save(keys, [0, 1], cause="again")
    fleet.settle()
    assert fleet.owner.lookup(keys).ready == 2


def test_a_tier_whose_memory_was_kept_keeps_its_blocks() -> None:
    fleet = Fleet(ranks=2, tier='kind = "host"')
    keys = fleet.keys(2)
    before = [kv[:2].copy() for kv in fleet.kv]
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.settle()
    old = fleet.ranks[1]
    fleet.owner.ranks.lose(1, "killed")

    fleet.ranks[1] = fleet.open_rank(1, arenas=old.arenas)
    old.close()
    fleet.owner.ranks.rejoin(fleet.ranks[1].facts)
    fleet.owner.load(keys, [6, 7], cause="load")
    (ended,) = fleet.settle()

    assert isinstance(ended, ef.Ended)
    assert ended.outcome is Outcome.DONE
    for kv, saved in zip(fleet.kv, before, strict=True):
        assert np.array_equal(kv[6:8], saved)


def test_what_an_earlier_life_says_is_not_heard() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(2)
    old = fleet.ranks[1]
    fleet.owner.ranks.lose(1, "no answer")
    fleet.ranks[1] = fleet.open_rank(1)
    fleet.owner.ranks.rejoin(fleet.ranks[1].facts)
    fleet.owner.save(keys, [0, 1], cause="save")
    plan = fleet.plan()
    assert plan is not None

    # It is not dead after all, and hears what is meant for its successor.
    old.take(plan)
    ghost, report = old.step(), fleet.ranks[0].step()
    assert ghost is not None
    assert report is not None
    fleet.owner.ranks.receive(ghost)
    fleet.owner.ranks.receive(report)

    assert fleet.owner.lookup(keys).ready == 0
    assert fleet.owner.health().ok
    fleet.settle()
    assert fleet.owner.lookup(keys).ready == 2


def test_a_rank_that_started_anew_without_a_word_is_lost() -> None:
    fleet = Fleet(ranks=2)
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")
    fleet.ranks[1] = fleet.open_rank(1)
    fleet.plan()

    report = fleet.ranks[1].step()
    assert report is not None
    fleet.owner.ranks.receive(report)

    assert fleet.owner.health().reasons == ("rank 1 is lost: it restarted without saying so",)
    (ended,) = fleet.owner.poll()
    assert isinstance(ended, ef.Ended)
    assert ended.outcome is Outcome.FAILED


def test_a_life_that_was_lost_does_not_come_back() -> None:
    fleet = Fleet(ranks=2)
    fleet.owner.ranks.lose(1, "no answer")

    with pytest.raises(PeerError, match="must be another than the one that was lost"):
        fleet.owner.ranks.rejoin(fleet.ranks[1].facts)

    assert not fleet.owner.health().ok


def test_a_rank_is_back_only_with_as_much_as_before() -> None:
    fleet = Fleet(ranks=2)
    fleet.owner.ranks.lose(1, "killed")
    fleet.kv[1] = fleet.kv[1][:6].copy()

    with pytest.raises(ConfigError, match="6 blocks in KV group 0 on rank 1, must have 8"):
        fleet.owner.ranks.rejoin(fleet.open_rank(1).facts)


def test_ranks_that_there_are_not_are_refused() -> None:
    fleet = Fleet(ranks=2)
    third = Fleet(ranks=3).ranks[2]

    with pytest.raises(ValueError, match="rank is 2, must be from 0 to 1"):
        fleet.owner.ranks.lose(2, "killed")
    with pytest.raises(ValueError, match="rank is 2, must be from 0 to 1"):
        fleet.owner.ranks.rejoin(third.facts)


# ---------------------------------------------------------------- strangers


def test_two_engines_on_one_machine_share_nothing() -> None:
    ours = Fleet(ranks=2, tier='kind = "host"', seed=1)
    theirs = Fleet(ranks=2, tier='kind = "host"', seed=2)
    keys = ours.keys(2)
    for fleet in (ours, theirs):
        fleet.owner.save(keys, [0, 1], cause="save")
    plan = ours.plan()
    assert plan is not None
    theirs.plan()

    with pytest.raises(PeerError, match="must be by"):
        theirs.ranks[0].take(plan)
    report = theirs.ranks[0].step()
    assert report is not None
    with pytest.raises(PeerError, match="a report is for owner"):
        ours.owner.ranks.receive(report)

    theirs.owner.ranks.receive(report)
    for fleet in (ours, theirs):
        before = [kv[:2].copy() for kv in fleet.kv]
        fleet.settle()
        fleet.owner.load(keys, [6, 7], cause="load")
        fleet.settle()
        assert fleet.owner.health().ok
        for kv, saved in zip(fleet.kv, before, strict=True):
            assert np.array_equal(kv[6:8], saved)
    assert ours.ranks[0].facts.tiers[0].memory != theirs.ranks[0].facts.tiers[0].memory


@pytest.mark.parametrize("message", [b"", b"R\x01\x90", b"P\x01\x94\x01\x01\x90\x90"])
def test_a_report_that_cannot_be_read_is_refused(message: bytes) -> None:
    fleet = Fleet()

    with pytest.raises(PeerError, match="a report"):
        fleet.owner.ranks.receive(message)

    assert fleet.owner.health().ok


def test_faults_at_blocks_that_there_are_not_are_refused() -> None:
    fleet = Fleet()
    (operation,) = fleet.owner.save(fleet.keys(2), [0, 1], cause="save").operations
    moved = [Moved(operation, ((2, BlockFault.CORRUPT),))]
    message = encode_report(
        RankReport(0, fleet.ranks[0].facts.life, operation.incarnation, 1, moved)
    )

    with pytest.raises(PeerError, match="rank 0 reports a fault at position 2"):
        fleet.owner.ranks.receive(message)

    fleet.settle()
    assert fleet.owner.lookup(fleet.keys(2)).ready == 2


def test_a_cache_with_its_rank_in_this_process_has_no_ranks_elsewhere() -> None:
    config = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
    )
    with penstock.open(config, kv=np.zeros((8, 4))) as cache:
        assert len(cache.ranks) == 0
        assert cache.ranks.take_plan() is None
        with pytest.raises(PeerError, match="the one rank of this cache is this process"):
            cache.ranks.receive(b"")
        with pytest.raises(ValueError, match="the one rank of this cache is this process"):
            cache.ranks.lose(0, "x")


@pytest.mark.parametrize("part", ["kv", "layout", "keeper"])
def test_memory_is_given_to_ranks_and_not_to_their_owner(part: str) -> None:
    fleet = Fleet(ranks=1)
    given = {part: np.zeros((8, 4))}

    with pytest.raises(ValueError, match=f"{part} belongs to a rank: give it to open_rank"):
        penstock.open_offload(fleet.config, ranks=[fleet.ranks[0].facts], **given)
