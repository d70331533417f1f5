"""What the adaptive order makes of traffic, and that what it keeps is bounded."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.eviction import AdaptivePolicy
from penstock.cache.eviction.adaptive import _GHOSTS_MAX, _LRU, _RATES
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.replay.simulation import Replay
from penstock.replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROUNDS = 20
LFU = len(_RATES) + 1


def prompt(name: str, at_s: float = 0.0, blocks: int = 4) -> TraceRequest:
    return TraceRequest(at_s, [f"{name} {block}".encode() for block in range(blocks)], blocks)


def mixed_traffic() -> Iterator[TraceRequest]:
    """Ten prompts that come back after 100 s each, among many that are seen once."""
    for number in range(10 * ROUNDS):
        yield prompt(f"again {number % 10}", 10.0 * number)
        for other in range(4):
            yield prompt(f"once {number} {other}", 10.0 * number + 1 + other)


def round_and_round() -> Iterator[TraceRequest]:
    """Thirty prompts in the same order, again and again."""
    for number in range(30 * ROUNDS):
        yield prompt(f"loop {number % 30}", number)


def played(traffic: Iterable[TraceRequest], eviction: str, blocks: int = 60) -> Replay:
    device = TierSettings(name="device", slot_count=blocks, eviction=eviction)
    replay = Replay(CacheSettings(device=device, block_tokens=1))
    replay.run(traffic)
    return replay


def found(replay: Replay) -> int:
    return sum(replay.tally.tokens_by_tier)


def test_blocks_that_come_back_are_kept_where_lru_loses_them() -> None:
    assert found(played(mixed_traffic(), "lru")) == 0
    # Not in the first rounds; the last block of a prompt is never taken from the cache.
    assert found(played(mixed_traffic(), "adaptive")) > 0.8 * 3 * 10 * ROUNDS


def test_of_prompts_that_come_round_and_round_some_stay() -> None:
    assert found(played(round_and_round(), "lru")) == 0
    # Half of them have room.
    assert found(played(round_and_round(), "adaptive")) > 0.7 * 0.5 * 3 * 30 * ROUNDS


def test_without_a_lead_blocks_leave_as_with_lru() -> None:
    traffic = [prompt(f"{number * 7 % 10}", number) for number in range(300)]
    traffic += [prompt(f"once {number}", 300 + number) for number in range(300)]

    adaptive, lru = played(traffic, "adaptive", 45), played(traffic, "lru", 45)

    assert list(adaptive.tally.misses.items()) == list(lru.tally.misses.items())
    assert found(adaptive) == found(lru) > 0


def test_the_shadow_of_lru_finds_what_lru_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.eviction.adaptive._DECAY", 1.0)
    finds = played(mixed_traffic(), "adaptive", 200)
    policy = finds.machine._books.device.policy
    assert isinstance(policy, AdaptivePolicy)

    # Every block counts, also the last one of a prompt, which is computed again all the same.
    lru = policy._learner.shadows[_LRU]
    assert 0.8 < lru.found / (found(played(mixed_traffic(), "lru", 200)) * 4 / 3) <= 1


class Shelves:
    """A policy and blocks that may leave at any time."""

    def __init__(self, *, rate: int = _LRU, slot_count: int = 20) -> None:
        self.priority: dict[int, int] = {}
        self.policy = AdaptivePolicy(slot_count, self.priority.get)
        self.policy.resize(64)
        self.follow(rate)

    def follow(self, rate: int) -> None:
        """Its shadow leads so far that no other rate is chosen again."""
        shadow = self.policy._learner.shadows[rate]
        shadow.found = shadow.found_lately = 1e9
        self.policy._learner.follow(rate)

    def enter(self, *nodes: int) -> None:
        keys = [b"%d" % node for node in nodes]
        self.policy.add(np.array(nodes, dtype=np.int32), keys, tick=0)
        self.priority.update(dict.fromkeys(nodes, 0))
        self.policy.offer(nodes)

    def touch(self, *nodes: int) -> None:
        self.policy.touch(np.array(nodes, dtype=np.int32), tick=0)
        self.policy.offer(nodes)

    def release(self, *nodes: int) -> None:
        self.policy.release(np.array(nodes, dtype=np.int32), tick=0)
        self.policy.offer(nodes)

    def evict(self) -> int:
        node = self.policy.pop()
        assert node is not None
        self.remove(node, evicted=True)
        return node

    def remove(self, node: int, *, evicted: bool) -> None:
        del self.priority[node]
        self.policy.forget([node], [b"%d" % node], evicted=evicted)

    def order(self, count: int) -> list[int]:
        return [self.evict() for _ in range(count)]


def test_lru_goes_by_the_last_use_alone() -> None:
    shelves = Shelves()
    shelves.enter(1)
    for _ in range(5):
        shelves.touch(1)
    shelves.enter(2)
    shelves.enter(3)
    shelves.touch(2)

    assert shelves.order(3) == [1, 3, 2]


def test_the_end_of_a_request_is_its_last_use() -> None:
    shelves = Shelves()
    shelves.enter(1)
    shelves.enter(2)
    shelves.enter(3)

    shelves.release(1)

    assert shelves.order(3) == [2, 1, 3]


def test_the_end_of_a_request_is_no_second_use() -> None:
    shelves = Shelves(rate=LFU)
    shelves.enter(1)
    shelves.enter(2)
    shelves.enter(3)
    shelves.touch(1)

    shelves.release(2)

    assert shelves.order(3) == [2, 3, 1]


def test_where_uses_never_fade_the_least_used_leaves_and_of_them_the_newest() -> None:
    shelves = Shelves(rate=LFU)
    for node in (1, 2, 3, 4):
        shelves.enter(node)
    shelves.touch(1)
    shelves.touch(3)
    shelves.touch(3)

    assert shelves.order(4) == [4, 2, 1, 3]


@pytest.mark.parametrize("rate", range(1, LFU))
def test_where_uses_fade_two_early_ones_count_less_than_a_late_one(rate: int) -> None:
    shelves = Shelves(rate=rate, slot_count=4)
    shelves.enter(1)
    shelves.touch(1)
    shelves.enter(2)
    early = shelves.order(1)
    for _ in range(200):
        shelves.enter(3)
        shelves.remove(3, evicted=False)
    shelves.enter(4)

    assert early == [2]
    assert shelves.order(2) == [1, 4]


def test_another_rate_orders_blocks_anew() -> None:
    shelves = Shelves()
    shelves.enter(1)
    shelves.touch(1)
    shelves.enter(2)
    assert shelves.policy.pop() == 1
    shelves.policy.offer([1])

    shelves.follow(LFU)

    assert shelves.order(2) == [2, 1]


def test_a_block_that_was_evicted_and_returns_is_worth_its_earlier_uses() -> None:
    shelves = Shelves(rate=LFU)
    shelves.enter(1)
    shelves.touch(1)
    assert shelves.evict() == 1
    shelves.enter(2)
    shelves.touch(2)

    shelves.enter(1)

    assert shelves.order(2) == [2, 1]


def test_of_a_block_that_was_dropped_nothing_is_remembered() -> None:
    shelves = Shelves(rate=LFU)
    shelves.enter(1)
    shelves.touch(1)
    shelves.remove(1, evicted=False)
    assert not shelves.policy._learner.runs

    shelves.enter(2)
    shelves.enter(1)

    assert shelves.order(2) == [1, 2]


def test_neighbours_whose_pasts_differ_little_become_one_run() -> None:
    shelves = Shelves()
    nodes = list(range(60))
    for turn in range(1, 60):
        shelves.touch(*nodes[: turn - 1])
        shelves.enter(nodes[turn - 1])

    assert len(shelves.policy._learner.runs) < 15


def test_evicted_blocks_are_remembered_up_to_a_bound_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.cache.eviction.adaptive._GHOSTS_MIN", 32)
    policy = AdaptivePolicy(8, lambda _: 0)
    policy.resize(8)
    nodes = np.arange(8, dtype=np.int32)

    for turn in range(100):
        keys = [f"{turn} {block}".encode() for block in range(8)]
        policy.add(nodes, keys, tick=turn)
        policy.forget(nodes.tolist(), keys, evicted=True)

    learner = policy._learner
    assert list(learner.ghosts) == [
        f"{turn} {block}".encode() for turn in range(96, 100) for block in range(8)
    ]
    assert len(learner.runs) == 4
    assert all(len(shadow._queue) < 100 for shadow in learner.shadows)
    assert all(shadow.count <= 8 for shadow in learner.shadows)
    assert AdaptivePolicy(2 * _GHOSTS_MAX, lambda _: 0)._learner._ghost_limit == _GHOSTS_MAX


def test_orders_that_share_learn_together_and_keep_their_own_blocks() -> None:
    shelves = Shelves()
    other = shelves.policy.sharing(lambda node: 0 if node == 40 else None)
    shelves.enter(1)
    shelves.enter(2)
    shelves.touch(1)
    other.add(np.array([40], dtype=np.int32), [b"40"], tick=0)
    other.offer([40])

    shelves.follow(LFU)

    assert other.candidates() == {40}
    assert [shelves.policy.pop(), shelves.policy.pop()] == [2, 1]


# -------------------------------------------------------------------- who may enter


def test_a_tier_below_refuses_what_never_comes_back_and_keeps_the_rest() -> None:
    device = TierSettings(name="device", slot_count=8)
    host = TierSettings(name="host", slot_count=60, eviction="adaptive")
    replay = Replay(CacheSettings(device=device, tiers=(host,), block_tokens=1))
    replay.run(mixed_traffic())

    # As a device of that size finds; LRU finds nothing, and writes every block.
    assert found(replay) > 0.8 * 3 * 10 * ROUNDS
    assert replay.machine.statistics().blocks_refused > replay.tally.blocks / 3
    assert replay.links[0, 1].blocks < replay.tally.blocks / 2


def test_all_blocks_enter_while_blocks_leave_by_last_use() -> None:
    assert Shelves().policy.admit([b"new"], priority=0) is None
    assert Shelves(rate=LFU).policy.admit([], priority=0) is None


def test_a_new_block_does_not_take_the_place_of_one_that_was_used_twice() -> None:
    shelves = Shelves(rate=LFU)
    shelves.enter(1)
    shelves.touch(1)
    judge = shelves.policy.admit([b"new", b"newer"], priority=0)

    assert judge is not None
    assert judge(1) == 0


def test_a_block_that_was_refused_and_is_asked_for_again_is_worth_more() -> None:
    shelves = Shelves(rate=LFU)
    shelves.enter(1)
    shelves.enter(7)
    shelves.remove(7, evicted=True)

    judge = shelves.policy.admit([b"7", b"new"], priority=0)

    assert judge is not None
    assert judge(1) == 1


def test_the_same_events_give_the_same_order() -> None:
    def last() -> tuple[int, list[bytes]]:
        replay = played(islice(mixed_traffic(), 600), "adaptive")
        books = replay.machine._books
        return found(replay), books.nodes.keys_of(books.device.ready_nodes().tolist())

    assert last() == last()
