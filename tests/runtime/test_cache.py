"""A cache over an engine's own blocks, with real bytes in all tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.explain import MissReason
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError, NeverFitsError
from penstock.machine.kv_events import BlocksRemoved, BlocksStored
from penstock.vocabulary.keys import Item
from tests.runtime.conftest import make_engine

if TYPE_CHECKING:
    from tests.runtime.conftest import Engine


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def chats(count: int, turns: int) -> list[list[tuple[list[int], list[int]]]]:
    """Conversations that begin alike; in each, prompt and output of every turn."""
    conversations = []
    for number in range(count):
        past = tokens(6)
        conversation = []
        for turn in range(turns):
            prompt = past + tokens(5 + number % 3, 1000 * (number + 1) + 100 * turn)
            output = tokens(4, 1000 * (number + 1) + 100 * turn + 50)
            conversation.append((prompt, output))
            past = prompt + output
        conversations.append(conversation)
    return conversations


# ---------------------------------------------------------------- hits


def test_chats_over_a_device_far_too_small_read_every_byte_right() -> None:
    engine = make_engine(blocks=16, tiers={"host": 200})
    conversations = chats(count=6, turns=5)

    # Turn by turn through all conversations, so that each finds its past gone from the device.
    for turn in range(5):
        for conversation in conversations:
            found = engine.turn(*conversation[turn])
            known = sum(map(len, conversation[turn - 1])) if turn else 0
            assert found.cached_tokens >= known // 4 * 4

    device, host = engine.cache.statistics().tiers
    assert host.tokens_cached > device.tokens_cached > 0
    engine.expect_at_rest()


def test_a_second_tier_gives_back_what_the_first_could_not_keep() -> None:
    engine = make_engine(blocks=16, tiers={"host": 16, "far": 300})
    conversations = chats(count=6, turns=4)

    for turn in range(4):
        for conversation in conversations:
            found = engine.turn(*conversation[turn])
            known = sum(map(len, conversation[turn - 1])) if turn else 0
            assert found.cached_tokens >= known // 4 * 4

    assert all(tier.tokens_cached > 0 for tier in engine.cache.statistics().tiers)
    engine.expect_at_rest()


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_block_comes_back_under_every_write_policy(write: str) -> None:
    engine = make_engine(
        write=write, settings="low_watermark = 0.5\nhigh_watermark = 0.9", tiers={"host": 64}
    )
    for first in range(0, 4000, 100):
        engine.turn(tokens(10, first))

    found = engine.turn(tokens(10, 3500))

    assert found.cached_by_tier == (0, 8)


def test_hits_are_told_by_tier(engine: Engine) -> None:
    engine.turn(tokens(20))
    engine.turn(tokens(24, 500))

    # The device kept the beginning of the first prompt: a chain is evicted from its end.
    found = engine.turn(tokens(20))

    device, host = found.cached_by_tier
    assert device + host == found.cached_tokens == 16
    assert device % 4 == 0
    assert 0 < host < 16
    assert [tier.tokens_cached for tier in engine.cache.statistics().tiers] == [device, host]


@pytest.mark.parametrize("count", [8, 9, 11])
def test_a_hit_on_the_whole_prompt_leaves_a_token_to_compute(engine: Engine, count: int) -> None:
    prompt = tokens(count)
    engine.turn(prompt)
    with engine.cache.acquire(tokens(12)) as published:
        shared = published.block_table[: count // 4].tolist()

        with engine.cache.acquire(prompt) as lease:
            engine.wait(lease)
            cached = lease.cached_tokens
            last = lease.block_table[-1]
            engine.run(lease, prompt)

    # The last token is computed in a block of the request's own, not in a shared one.
    assert cached == (count - 1) // 4 * 4
    assert last not in shared
    engine.expect_at_rest()


def test_a_prompt_shorter_than_a_block_is_served_and_not_cached(engine: Engine) -> None:
    engine.turn(tokens(3))

    found = engine.turn(tokens(3))

    assert found.cached_tokens == 0
    assert engine.cache.statistics().blocks_known == 0


def test_a_prefix_is_found_however_the_prompt_goes_on(engine: Engine) -> None:
    engine.turn(tokens(12))

    found = engine.turn([*tokens(8), *tokens(6, 700)])

    assert found.cached_tokens == 8
    assert found.miss.reason is MissReason.NEVER_SEEN
    assert found.miss.block == 2


def test_a_request_without_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="token_count is 0: a request has at least one token"):
        engine.cache.acquire([])


# ---------------------------------------------------------------- no room


def test_a_request_without_room_changes_nothing(engine: Engine) -> None:
    lease = engine.cache.acquire(tokens(24))
    engine.run(lease, tokens(24))
    engine.settle()
    before = engine.cache.kv_snapshot(), engine.cache.statistics().tiers

    with pytest.raises(CapacityError) as refusal:
        engine.cache.acquire(tokens(12, 500))

    assert (engine.cache.kv_snapshot(), engine.cache.statistics().tiers) == before
    assert (refusal.value.tier, refusal.value.wanted, refusal.value.available) == ("device", 3, 2)
    assert engine.cache.statistics().requests_refused == 1
    engine.cache.audit()
    lease.release()
    assert engine.turn(tokens(12, 500)).cached_tokens == 0


def test_a_prompt_larger_than_the_device_is_refused(engine: Engine) -> None:
    with pytest.raises(NeverFitsError, match="'device' can never give 9 slots") as refused:
        engine.cache.acquire(tokens(33))

    assert refused.value.never
    assert (refused.value.wanted, refused.value.available) == (9, 8)
    engine.expect_at_rest()


# ---------------------------------------------------------------- damage


def test_damaged_bytes_are_computed_again_and_not_believed(engine: Engine) -> None:
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    engine.spoil(tier=1)

    lease = engine.cache.acquire(prompt, request="spoiled")
    promised = lease.cached_tokens
    engine.wait(lease)

    assert promised == 12
    assert (lease.cached_tokens, lease.token_count) == (0, 0)
    assert lease.miss.reason is MissReason.CORRUPT
    engine.run(lease, prompt)
    lease.release()
    statistics = engine.cache.statistics()
    assert statistics.blocks_corrupt == 3
    assert statistics.tokens_not_delivered == 12
    assert statistics.operations_ended["failed"] == 1
    assert any("recomputes" in line for line in engine.cache.story("spoiled"))
    assert engine.turn(prompt).cached_tokens == 12
    engine.expect_at_rest()


def test_blocks_before_the_damage_are_used(engine: Engine) -> None:
    prompt = tokens(17)
    engine.turn(prompt)
    engine.forget_device()
    engine.spoil_block(1, prompt, block=2)

    found = engine.turn(prompt)

    assert found.cached_tokens == 8
    assert engine.cache.statistics().blocks_corrupt == 1
    engine.expect_at_rest()


def test_a_later_request_is_told_that_its_blocks_were_damaged(engine: Engine) -> None:
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    engine.spoil(tier=1)
    lease = engine.cache.acquire(prompt)
    engine.wait(lease)
    lease.release()

    found = engine.turn(prompt)

    assert found.miss.reason is MissReason.CORRUPT
    assert found.miss.departure is not None
    assert found.miss.departure.tier == "host"
    assert engine.cache.statistics().misses["corrupt"] == 1


def test_the_request_that_met_the_damage_is_told_so(engine: Engine) -> None:
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    engine.spoil(tier=1)

    lease = engine.cache.acquire(prompt)
    engine.wait(lease)

    assert lease.miss.reason is MissReason.CORRUPT
    assert lease.miss.block == 0
    assert engine.cache.statistics().tokens_not_delivered == 12


def test_damage_in_the_second_tier_is_found_on_the_way_up() -> None:
    engine = make_engine(tiers={"host": 8, "far": 64})
    prompt = tokens(14)
    engine.turn(prompt)
    engine.turn(tokens(32, 500))
    engine.spoil(tier=2)

    found = engine.turn(prompt)

    assert found.cached_by_tier == (0, 0, 12)
    assert found.cached_tokens == 0
    assert engine.cache.statistics().blocks_corrupt == 3
    engine.expect_at_rest()


# ---------------------------------------------------------------- who shares what


def test_tenants_share_nothing(engine: Engine) -> None:
    engine.turn(tokens(14), tenant="red", salt="red")

    other = engine.turn(tokens(14), tenant="blue", salt="blue")
    same = engine.turn(tokens(14), tenant="red", salt="red")

    assert other.cached_tokens == 0
    assert other.miss.reason is MissReason.NAMESPACE
    assert same.cached_tokens == 12


def test_adapters_share_nothing(engine: Engine) -> None:
    engine.turn(tokens(14), adapter="lora", salt="lora")

    other = engine.turn(tokens(14))
    same = engine.turn(tokens(14), adapter="lora", salt="lora")

    assert other.cached_tokens == 0
    assert other.miss.reason is MissReason.NAMESPACE
    assert same.cached_tokens == 12


def test_an_image_counts_from_its_place_on(engine: Engine) -> None:
    def image(number: int) -> list[Item]:
        return [Item(position=9, length=2, kind="image", digest=bytes([number]) * 32)]

    engine.turn(tokens(22), items=image(1))

    same = engine.turn(tokens(22), items=image(1))
    other = engine.cache.acquire(tokens(22), items=image(2))

    assert same.cached_tokens == 20
    assert other.cached_tokens == 8
    other.release()


# ---------------------------------------------------------------- wishes


def test_a_request_may_refuse_what_is_cached(engine: Engine) -> None:
    engine.turn(tokens(14))

    found = engine.turn(tokens(14), reuse=False)

    assert found.cached_tokens == 0
    assert found.miss.reason is MissReason.OPTED_OUT
    assert engine.cache.statistics().blocks_known == 3
    engine.expect_at_rest()


def test_a_request_may_refuse_to_load(engine: Engine) -> None:
    engine.turn(tokens(14))
    engine.forget_device()

    found = engine.turn(tokens(14), load=False)

    assert found.cached_tokens == 0
    assert engine.cache.statistics().tiers[1].tokens_cached == 0
    assert engine.turn(tokens(14), load=False).cached_by_tier == (12, 0)


def test_a_request_may_keep_what_it_computes_to_itself(engine: Engine) -> None:
    engine.turn(tokens(14), store=False)

    found = engine.turn(tokens(14))

    assert found.cached_tokens == 0
    assert found.miss.reason is MissReason.NEVER_SEEN


def test_a_request_may_say_how_long_it_waits_for_its_blocks(engine: Engine) -> None:
    engine.turn(tokens(14))
    engine.forget_device()
    lease = engine.cache.acquire(tokens(14), load_timeout_s=0.5)

    engine.now += 0.5
    engine.cache.step()

    assert lease.state is LeaseState.READY
    assert (lease.cached_tokens, lease.miss.reason) == (0, MissReason.FAILED)
    engine.run(lease, tokens(14))
    lease.release()
    engine.expect_at_rest()


def test_a_request_that_would_not_wait_at_all_is_refused(engine: Engine) -> None:
    with pytest.raises(
        ValueError, match="load_timeout_s is 0, must be a number of seconds above 0"
    ):
        engine.cache.acquire(tokens(14), load_timeout_s=0)


def test_blocks_of_lower_priority_leave_first() -> None:
    engine = make_engine(tiers={})
    engine.turn(tokens(16), priority=3)
    engine.turn(tokens(16, 500))

    # Least recently used would take the first prompt; its priority keeps it.
    engine.turn(tokens(16, 900))

    assert engine.turn(tokens(17)).cached_tokens == 16
    assert engine.turn(tokens(17, 500)).miss.reason is MissReason.EVICTED


def test_blocks_leave_first_when_their_time_has_passed() -> None:
    engine = make_engine(tiers={})
    engine.turn(tokens(16))
    engine.turn(tokens(16, 500), ttl_s=60.0)
    engine.now = 61.0
    engine.cache.step()

    engine.turn(tokens(16, 900))

    assert engine.turn(tokens(17)).cached_tokens == 16


def test_a_pinned_prefix_stays() -> None:
    engine = make_engine(tiers={})
    engine.turn(tokens(12))
    pin = engine.cache.pin(tokens(12))
    for first in range(500, 900, 100):
        engine.turn(tokens(20, first))

    kept = engine.turn(tokens(13))
    pin.unpin()
    engine.turn(tokens(32, 900))

    assert (pin.block_count, pin.present) == (3, 3)
    assert kept.cached_by_tier == (12,)
    assert engine.turn(tokens(13)).cached_tokens == 0
    with pytest.raises(ValueError, match=f"pin is {pin.id}: it was unpinned"):
        pin.unpin()


def test_a_pin_ends_with_its_block_of_code(engine: Engine) -> None:
    with engine.cache.pin(tokens(12)):
        pinned = engine.cache.statistics().pins

    assert pinned == 1
    assert engine.cache.statistics().pins == 0


def test_a_prefix_can_be_pinned_before_it_is_computed() -> None:
    engine = make_engine(tiers={})
    pin = engine.cache.pin(tokens(12))
    engine.turn(tokens(13))
    for first in range(500, 900, 100):
        engine.turn(tokens(20, first))

    assert pin.present == 0
    assert engine.turn(tokens(13)).cached_tokens == 12


def test_more_than_the_share_for_pins_is_refused() -> None:
    engine = make_engine(tiers={}, settings="pin_share = 0.25")

    with pytest.raises(NeverFitsError, match=r"'device' can never give 3 slots.* at most 2"):
        engine.cache.pin(tokens(12))
    engine.cache.pin(tokens(4))
    with pytest.raises(CapacityError, match="'device' can give 1 slot, wanted: 2") as refused:
        engine.cache.pin(tokens(8, 500))

    assert not refused.value.never
    assert engine.cache.statistics().pins == 1


# ---------------------------------------------------------------- reset


def test_a_reset_voids_everything_cached(engine: Engine) -> None:
    engine.turn(tokens(14))

    engine.cache.reset("new weights")

    found = engine.turn(tokens(14))
    assert found.cached_tokens == 0
    assert found.miss.reason is MissReason.RESET
    assert engine.cache.statistics().epoch == 1
    engine.expect_at_rest()


def test_a_running_request_outlives_a_reset_and_publishes_nothing(engine: Engine) -> None:
    lease = engine.cache.acquire(tokens(14))
    engine.compute(lease, tokens(8))
    lease.commit(tokens(8))

    engine.cache.reset("new weights")
    engine.run(lease, tokens(14))
    lease.release()

    assert engine.turn(tokens(14)).cached_tokens == 0
    engine.expect_at_rest()


def test_a_loading_request_is_lost_by_a_reset(engine: Engine) -> None:
    engine.turn(tokens(14))
    engine.forget_device()
    lease = engine.cache.acquire(tokens(14))

    engine.cache.reset("new weights")

    assert lease.state is LeaseState.LOST
    lease.release()
    engine.expect_at_rest()


# ---------------------------------------------------------------- telling


def test_who_follows_the_kv_events_knows_what_the_snapshot_says(engine: Engine) -> None:
    engine.turn(tokens(14))
    engine.turn(tokens(32, 500))
    engine.cache.reset("new weights")
    engine.turn(tokens(14))
    engine.turn(tokens(32, 500))

    events = engine.cache.take_kv_events()
    snapshot = engine.cache.kv_snapshot()

    known: dict[str, set[bytes]] = {"device": set(), "host": set()}
    for event in events:
        match event:
            case BlocksStored():
                known[event.tier] |= set(event.keys)
            case BlocksRemoved():
                known[event.tier] -= set(event.keys)
            case _:
                known = {"device": set(), "host": set()}
    listed = {tier: {key for key, _ in rows} for tier, rows in snapshot.blocks.items()}
    assert known == listed
    assert [event.sequence for event in events] == list(range(1, snapshot.sequence + 1))
    assert engine.cache.take_kv_events() == []


def test_requests_without_a_name_get_one_each(engine: Engine) -> None:
    with engine.cache.acquire(tokens(5)) as one, engine.cache.acquire(tokens(5, 50)) as other:
        names = {one.request, other.request}

    assert len(names) == 2
    assert all(engine.cache.story(name) for name in names)
