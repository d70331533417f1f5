"""Collectives over channels: the same bits on every rank, in chunks, and never a wrong frame."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.errors import PeerError, UnavailableError
from penstock.testing.channel_suite import soon
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.zeromq import LOOPBACK
from penstock.transport.zmq_link import ChannelSettings
from penstock_serve.engine import rank_exchange
from penstock_serve.engine.rank_exchange import ExchangedRanks, RankExchange
from penstock_serve.engine.sharding import Share
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

SIZES = [5, 4, 4]
SOON_S = 600.0
"""Longer than anything takes that works."""


@contextmanager
def exchanges(count: int) -> Iterator[list[RankExchange]]:
    keys = MachineKeys.new()
    keys = keys.with_peer("127.0.0.1", keys.public)
    found = [
        RankExchange.listen("instance-0", LOOPBACK, rank=rank, secret=keys) for rank in range(count)
    ]
    addresses = [each.address for each in found]
    try:
        together([lambda each=each: each.meet(addresses, deadline=soon()) for each in found])
        yield found
    finally:
        for each in found:
            each.close()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the ranks return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(SOON_S) for future in [threads.submit(call) for call in calls]]


def ranks_of(found: list[RankExchange]) -> list[ExchangedRanks]:
    count = len(found)
    return [
        ExchangedRanks(
            Share(
                rank=rank,
                ranks=count,
                heads=range(1),
                kv_heads=range(1),
                intermediate=range(1),
                vocabulary=range(1),
            ),
            SIZES[:count],
            exchange,
        )
        for rank, exchange in enumerate(found)
    ]


def test_ranks_listen_at_ports_of_their_range_and_say_which_it_is_when_all_are_in_use() -> None:
    [first] = free_ports(1)
    keys = MachineKeys.new()
    ports = ChannelSettings(ports=range(first, first + 1))
    exchange = RankExchange.listen("instance-0", LOOPBACK, rank=0, secret=keys, settings=ports)
    try:
        assert exchange.address == f"tcp://127.0.0.1:{first}"
        with pytest.raises(UnavailableError, match=f"all of the ports {first}-{first} are in use"):
            RankExchange.listen("instance-0", LOOPBACK, rank=1, secret=keys, settings=ports)
    finally:
        exchange.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_sum_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    parts = [torch.randn(7, 33, generator=torch.manual_seed(seed)).to(dtype) for seed in range(3)]
    with exchanges(3) as found:
        sums = together(
            [
                lambda rank=rank, part=part: rank.summed(part.clone())
                for rank, part in zip(ranks_of(found), parts, strict=True)
            ]
        )

    expected = (parts[0] + parts[1]) + parts[2]
    for each in sums:
        assert torch.equal(each, expected)


def test_what_is_longer_than_a_frame_travels_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exchange, "CHUNK_BYTES", 100)
    parts = [torch.arange(1000, dtype=torch.float32) * factor for factor in (1, 10)]
    logits = [torch.full((9, size), float(size)) for size in SIZES[:2]]

    def run(rank: ExchangedRanks, part: torch.Tensor, own: torch.Tensor) -> Any:
        return rank.summed(part), rank.gathered(own), rank.summed(part)

    with exchanges(2) as found:
        calls = zip(ranks_of(found), parts, logits, strict=True)
        (first, gathered, again), (second, nothing, _) = together(
            [lambda call=call: run(*call) for call in calls]
        )

    assert torch.equal(first, second)
    assert torch.equal(first, torch.arange(1000) * 11.0)
    assert torch.equal(again, first)
    assert torch.equal(gathered, torch.cat(logits, dim=1))
    assert nothing is None


def test_logits_beyond_the_window_of_a_channel_wait_for_room() -> None:
    """A rank that gives is ahead of the first one by more than a channel takes."""
    wide = 100 << 20
    with exchanges(2) as (first, second), ThreadPoolExecutor(1) as threads:
        given = threads.submit(second.give, memoryview(bytes(wide)))
        with pytest.raises(TimeoutError):
            given.result(0.5)
        [taken] = first.take([wide])
        given.result(SOON_S)

    assert len(taken) == wide


def test_a_rank_in_another_collective_is_an_error() -> None:
    with exchanges(2) as (first, second):
        second.give(memoryview(b"logits"))
        first.take([6])
        second.give(memoryview(b"of the next step"))

        with pytest.raises(PeerError, match="rank 1 brought 16 bytes for collective 2, must be 6"):
            first.take([6])


def test_a_lost_rank_ends_the_collective_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exchange, "COLLECTIVE_S", 2 * SOON_S)
    with exchanges(2) as (first, second):
        second.close()
        began = time.monotonic()

        with pytest.raises(UnavailableError, match="rank 1 is lost in a collective"):
            first.take([6])

    assert time.monotonic() - began < SOON_S, "it waited for the rank"


def test_a_rank_that_does_not_come_is_named() -> None:
    keys = MachineKeys.new()
    alone = RankExchange.listen("instance-0", LOOPBACK, rank=0, secret=keys)

    with pytest.raises(UnavailableError, match="instance-0-rank-1 did not connect in time"):
        alone.meet([alone.address, "tcp://127.0.0.1:1"], deadline=time.monotonic() + 0.05)
    alone.close()
