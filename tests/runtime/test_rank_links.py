"""Plans and reports over channels: every end of a channel is told, and no wait outlives it."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from lab.fixtures import rank_channels
from lab.fixtures.inproc import WINDOW_FRAMES, InprocChannel, channel_pair
from lab.fixtures.rank_channels import meet, over_channels, rejoin, send_all, serve, take_plans
from penstock.cache.operations import BlockFault, Outcome
from penstock.errors import PeerError, UnavailableError
from penstock.machine import effects as ef
from penstock.movers.base import Moved
from penstock.runtime.messages import RankReport, decode_plan, encode_report
from penstock.runtime.rank_links import ASK_S, GRACE_S
from penstock.transport.base import ChannelClosed, Empty, ReceivedFrame

if TYPE_CHECKING:
    from tests.runtime.conftest import Fleet, MakeFleet


class LinkedFleet:
    """An owner that reaches its ranks over channels; all of them in this process."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        pairs = [channel_pair("owner", f"rank {rank.facts.rank}") for rank in fleet.ranks]
        self.near: list[InprocChannel] = [near for near, _ in pairs]
        self.far: list[InprocChannel] = [far for _, far in pairs]
        facts = [rank.facts for rank in fleet.ranks]
        self.owner = penstock.open_offload(fleet.config, ranks=facts)
        over_channels(self.owner, facts, self.near)

    def work(self, *ranks: int) -> None:
        """Lets ranks do what has arrived, as `serve` does in a process of its own."""
        for number in ranks or range(len(self.fleet.ranks)):
            rank, channel = self.fleet.ranks[number], self.far[number]
            take_plans(channel, rank)
            report = rank.step()
            if report is not None:
                send_all(channel, deque([report]))

    def settle(self) -> list[ef.Ended | ef.Settled]:
        for _ in range(100):
            self.owner.step()
            self.work()
            if not self.owner.busy:
                return self.owner.poll()
        raise AssertionError("copies are still under way after 100 steps")


@pytest.fixture
def linked(make_fleet: MakeFleet) -> LinkedFleet:
    return LinkedFleet(make_fleet(ranks=2, blocks=4096))


def test_blocks_are_saved_and_loaded_over_channels(linked: LinkedFleet) -> None:
    fleet = linked.fleet
    keys = fleet.keys(3)
    before = [kv[:3].copy() for kv in fleet.kv]
    linked.owner.save(keys, [0, 1, 2], cause="save")
    linked.settle()

    linked.owner.load(keys, [5, 6, 7], cause="load")
    (ended,) = linked.settle()

    assert isinstance(ended, ef.Ended)
    assert ended.outcome is Outcome.DONE
    for kv, saved in zip(fleet.kv, before, strict=True):
        assert np.array_equal(kv[5:8], saved)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda channel: channel.close(), "it closed its channel"),
        (lambda channel: channel.fail("connection reset"), "connection reset"),
        (
            lambda channel: channel.send(b"what?"),
            "a report begins with b'w', must begin with b'R'",
        ),
    ],
    ids=["closed", "failed", "garbage"],
)
def test_the_end_of_a_channel_is_the_end_of_a_rank(
    linked: LinkedFleet, end: object, why: str
) -> None:
    linked.owner.save(linked.fleet.keys(2), [0, 1], cause="save")
    linked.owner.step()
    linked.work(0)

    end(linked.far[1])  # type: ignore[operator]
    woken = linked.owner.wait(time.monotonic() + 60)
    linked.owner.step()

    assert woken
    assert linked.owner.health().reasons == (f"rank 1 is lost: {why}",)
    (ended,) = linked.owner.poll()
    assert isinstance(ended, ef.Ended)
    assert (ended.outcome, ended.settled) == (Outcome.FAILED, True)
    # The dead channel wakes nobody any more.
    assert not linked.owner.wait(time.monotonic() + 0.02)


def test_a_report_of_blocks_that_an_operation_does_not_have_is_the_end_of_a_rank(
    linked: LinkedFleet,
) -> None:
    linked.owner.save(linked.fleet.keys(2), [0, 1], cause="save")
    linked.owner.step()
    linked.work(0)
    arrived = linked.far[1].receive()
    assert isinstance(arrived, ReceivedFrame)
    plan = decode_plan(arrived.frame)
    moved = Moved(plan.copies[0].operation, ((2, BlockFault.CORRUPT),))
    life = linked.fleet.ranks[1].facts.life

    linked.far[1].send(encode_report(RankReport(1, life, plan.incarnation, 1, [moved])))
    linked.owner.step()

    (reason,) = linked.owner.health().reasons
    assert reason.startswith("rank 1 is lost: rank 1 reports a fault at position 2 of operation")
    (ended,) = linked.owner.poll()
    assert isinstance(ended, ef.Ended)
    assert (ended.outcome, ended.settled) == (Outcome.FAILED, True)
    linked.owner.audit()
    assert not linked.owner.wait(time.monotonic() + 0.02)


def test_channels_in_another_order_than_their_ranks_are_noticed(linked: LinkedFleet) -> None:
    fleet = linked.fleet
    pairs = [channel_pair("owner", f"rank {rank.facts.rank}") for rank in fleet.ranks]
    linked.far = [far for _, far in pairs]
    facts = [rank.facts for rank in fleet.ranks]
    owner = linked.owner = penstock.open_offload(fleet.config, ranks=facts)
    over_channels(owner, facts, [near for near, _ in reversed(pairs)])
    owner.save(fleet.keys(2), [0, 1], cause="save")

    linked.settle()

    assert owner.health().reasons == (
        "rank 0 is lost: its channel brings a report of rank 1, must bring those of rank 0",
        "rank 1 is lost: its channel brings a report of rank 0, must bring those of rank 1",
    )


def test_a_rank_that_is_back_is_reached_over_its_new_channel(linked: LinkedFleet) -> None:
    fleet = linked.fleet
    linked.far[1].close()
    linked.owner.step()

    fleet.ranks[1] = fleet.open_rank(1)
    near, linked.far[1] = channel_pair("owner", "rank 1")
    rejoin(linked.owner, fleet.ranks[1].facts, near)
    linked.owner.save(fleet.keys(2), [0, 1], cause="save")
    linked.settle()

    assert linked.owner.health().ok
    assert linked.owner.lookup(fleet.keys(2)).ready == 2


def test_plans_wait_for_a_rank_that_does_not_listen(linked: LinkedFleet) -> None:
    fleet = linked.fleet
    count = WINDOW_FRAMES + 10
    for number in range(count):
        linked.owner.save(fleet.keys(1, first=4 * number), [0], cause="save")
        linked.owner.step()
        linked.work(0)
    held = linked.owner.busy

    linked.settle()

    assert held
    assert linked.owner.health().ok


def test_a_rank_that_never_listens_is_lost_at_last(
    linked: LinkedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_channels, "BACKLOG_PLANS_MAX", 5)
    for number in range(WINDOW_FRAMES + 10):
        linked.owner.save(linked.fleet.keys(1, first=4 * number), [0], cause="save")
        linked.owner.step()
        linked.work(0)
        if not linked.owner.health().ok:
            break

    assert linked.owner.health().reasons == ("rank 1 is lost: 6 plans wait for it",)


def test_closing_tells_the_ranks(linked: LinkedFleet) -> None:
    linked.owner.close()

    for rank, channel in zip(linked.fleet.ranks, linked.far, strict=True):
        assert serve(channel, rank, until=time.monotonic() + 60) == "the owner closed the channel"


# ---------------------------------------------------------------- the rank's end


def test_a_rank_tells_its_facts_first(make_fleet: MakeFleet) -> None:
    (rank,) = make_fleet(ranks=1).ranks
    near, far = channel_pair()

    ended = serve(far, rank, until=time.monotonic())

    assert ended == "its time was over"
    assert meet(near, deadline=time.monotonic()) == rank.facts


def test_a_rank_serves_until_a_descriptor_says_stop(make_fleet: MakeFleet) -> None:
    (rank,) = make_fleet(ranks=1).ranks
    _, far = channel_pair()
    stop = os.eventfd(1)

    ended = serve(far, rank, until=time.monotonic() + 60, descriptors=[stop])

    os.close(stop)
    assert ended == "it was asked to stop"


def test_a_rank_hears_that_its_owner_is_lost(make_fleet: MakeFleet) -> None:
    (rank,) = make_fleet(ranks=1).ranks
    near, far = channel_pair()
    near.fail("no heartbeat")

    assert serve(far, rank, until=time.monotonic() + 60) == "the owner is lost: no heartbeat"


def test_nonsense_from_the_owner_ends_a_rank_with_an_error(make_fleet: MakeFleet) -> None:
    (rank,) = make_fleet(ranks=1).ranks
    near, far = channel_pair()
    near.send(b"what?")

    with pytest.raises(PeerError, match="a plan begins with b'w'"):
        serve(far, rank, until=time.monotonic() + 60)

    # Or the owner would wait for as long as the process lives, and call it healthy.
    assert isinstance(near.receive(), ChannelClosed)


def test_a_rank_is_served_once(make_fleet: MakeFleet) -> None:
    (rank,) = make_fleet(ranks=1).ranks
    near, far = channel_pair()
    serve(far, rank, until=time.monotonic())

    with pytest.raises(ValueError, match="rank 0 was served before, must be opened anew"):
        serve(far, rank, until=time.monotonic())

    # Its facts came once: the owner would take them for a report that makes no sense.
    meet(near, deadline=time.monotonic())
    assert isinstance(near.receive(), Empty)


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (lambda _: None, "sent no facts in time"),
        (lambda channel: channel.close(), "closed it"),
        (lambda channel: channel.fail("reset"), "is lost: reset"),
    ],
)
def test_an_owner_that_meets_nobody_says_why(end: object, problem: str) -> None:
    near, far = channel_pair("owner", "rank 0")
    end(far)  # type: ignore[operator]

    with pytest.raises(UnavailableError, match=f"the rank behind channel 'rank 0' {problem}"):
        meet(near, deadline=time.monotonic())


def test_the_engine_does_not_carry_what_channels_carry(linked: LinkedFleet) -> None:
    linked.owner.save(linked.fleet.keys(1), [0], cause="save")

    assert linked.owner.ranks.take_plan() is None


def test_a_rank_is_asked_over_its_channel_for_a_report_that_never_came(
    make_fleet: MakeFleet,
) -> None:
    linked = LinkedFleet(make_fleet(ranks=2, settings="operation_timeout_s = 10.0"))
    now = 1000.0
    linked.owner._driver._clock = lambda: now
    linked.owner.save(linked.fleet.keys(2), [0, 1], cause="lost")
    linked.owner.step()
    take_plans(linked.far[0], linked.fleet.ranks[0])
    assert linked.fleet.ranks[0].step() is not None  # Its report is lost.
    linked.work(1)
    now += 10.0
    linked.owner.step()
    (expired,) = linked.owner.poll()
    assert isinstance(expired, ef.Ended)
    assert not expired.settled

    now += max(GRACE_S, ASK_S)
    settled = linked.settle()

    assert [type(each) for each in settled] == [ef.Settled]
    linked.owner.audit()
