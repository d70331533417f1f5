"""The four drivers together, in one process and on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from lab.fixtures.handoff_pair import LAYERS, Shape
from penstock.errors import UnavailableError
from penstock.handoff.driver import party_driver
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings
from tests.handoff.driver.conftest import World

TINY = HandoffSettings(bounds=HandoffBounds(berth_bytes=256, berth_count=4))
"""Room for two blocks of a layer in a berth."""
SHAPES = {
    "2 to 3": Shape(),
    "3 to 2": Shape(prefill_ranks=3, decode_ranks=2),
    "1 to 6": Shape(prefill_ranks=1, decode_ranks=6),
    "coarse to fine": Shape(prefill_tokens=8, decode_tokens=4),
    "fine to coarse": Shape(prefill_tokens=4, decode_tokens=16),
    "latent": Shape(latent=True),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "cached"), [(48, 0), (37, 16), (3, 0)])
def test_every_byte_of_a_prompt_arrives(shape: str, tokens: int, cached: int) -> None:
    world = World(SHAPES[shape])

    there, here = world.submit("a", tokens, cached_tokens=cached)
    world.settle()
    for layer in range(LAYERS):
        world.compute("a", there, range(tokens), range(layer, layer + 1))
        world.settle()
    world.prefill.first_token("a", (7,), (8, 9))
    world.settle()

    assert world.outcomes("decode") == world.outcomes("prefill") == {"a": "delivered"}
    assert world.ended["decode"][0].tokens == (7,)
    assert world.ended["decode"][0].drafts == (8, 9)
    assert world.is_right("a", here, range(cached, tokens))


def test_a_layer_leaves_before_the_next_is_computed(world: World) -> None:
    there, here = world.submit("a", 16)
    world.settle()
    counts = []

    for layer in range(LAYERS):
        world.compute("a", there, range(16), range(layer, layer + 1))
        world.settle()
        counts.append(sum(rank.parts_moved for rank in world.taking.values()))

    assert counts == sorted(set(counts))
    assert world.is_right("a", here, range(16))


def test_chunks_leave_as_they_are_computed() -> None:
    world = World(settings=TINY)
    there, here = world.submit("a", 40)
    world.settle()
    counts = []

    for chunk in (range(13), range(13, 30), range(30, 40)):
        world.compute("a", there, chunk)
        world.settle()
        counts.append(sum(rank.bytes_moved for rank in world.taking.values()))
    world.prefill.first_token("a", (1,))
    world.settle()

    assert 0 < counts[0] < counts[1] < counts[2]
    assert world.outcomes("decode") == {"a": "delivered"}
    assert world.is_right("a", here, range(40))


@pytest.mark.parametrize("seed", range(8))
def test_many_requests_share_the_berths_in_any_order(seed: int) -> None:
    world = World(seed=seed)
    requests = {f"r{n}": 4 + 5 * n % 17 for n in range(6)}
    slots = {}
    for n, (name, tokens) in enumerate(requests.items()):
        slots[name] = world.submit(name, tokens, first=8 * n)
    names = [*requests]

    world.rng.shuffle(names)
    for name in names:
        world.compute(name, slots[name][0], range(requests[name]))
        world.prefill.first_token(name, (1,))
    world.settle()

    assert world.outcomes("decode") == dict.fromkeys(world.outcomes("decode"), "delivered")
    assert world.outcomes("decode").keys() == requests.keys()
    assert all(world.is_right(n, slots[n][1], range(tokens)) for n, tokens in requests.items())


def test_a_part_that_changed_on_its_way_is_written_again(world: World) -> None:
    there, here = world.submit("a", 16)
    world.settle()
    world.compute("a", there, range(16))
    for rank in world.sending.values():
        rank.step()
    for area in world.targets["decode/1"].open_areas:
        area.memory[5] ^= 0xFF

    world.settle()
    world.prefill.first_token("a", (1,))
    world.settle()

    assert world.taking["decode/1"].machine.counts["parts spoiled"] > 0
    assert world.outcomes("decode") == {"a": "delivered"}
    assert world.is_right("a", here, range(16))


def test_other_keys_at_the_other_side_fail_over(world: World) -> None:
    there, _ = world.submit("a", 16)
    for rank in world.sending.values():
        rank.machine.prompts.clear()
        rank.admit("a", token_count=16, slots=there, keys=[b"other"] * 4)
    world.settle()

    world.compute("a", there, range(16))
    world.prefill.first_token("a", (1,))
    world.settle()

    assert world.outcomes("decode") == {"a": "failed_over"}
    assert "not intact" in world.ended["decode"][0].why


def test_a_cancelled_handoff_gives_its_slots_back(world: World) -> None:
    there, _ = world.submit("a", 16)
    world.settle()
    world.compute("a", there, range(16), range(1))

    world.decode.cancel("a")
    world.settle()

    assert world.outcomes("decode") == world.outcomes("prefill") == {"a": "cancelled"}
    for rank in world.taking.values():
        assert not rank.machine.collections
        assert not rank._expected
    for rank in world.sending.values():
        assert not rank._prompts


def test_an_end_between_two_steps_is_told_by_the_next_one_and_once(world: World) -> None:
    world.submit("a", 16)
    world.settle()

    for name in world.taking:
        world.decode.colleague_died(name)
    due, told = world.decode.has_work, world.decode.step()
    due_later, told_later = world.decode.has_work, world.decode.step()

    assert (due, [each.handoff for each in told]) == (True, ["a"])
    assert (due_later, told_later) == (False, [])
    assert not world.decode._contents


def test_a_party_that_has_something_to_do_does_not_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(party_driver, "wait_any", lambda *_, deadline: waits.append(deadline))
    world.submit("a", 16)
    world.settle()
    for name in world.taking:
        world.decode.colleague_died(name)

    world.decode.wait(world.now + 60.0)
    at_once = list(waits)
    world.decode.step()
    world.decode.wait(world.now + 60.0)

    assert at_once == []
    assert len(waits) == 1


def test_a_party_with_nothing_to_do_is_to_be_called_in_time_to_ask_silent_peers(
    world: World,
) -> None:
    latest = world.now + world.settings.times.ping_s

    dues = [party.next_deadline() for party in world.parties.values()]

    assert not any(party.has_work for party in world.parties.values())
    assert all(due is not None and world.now < due <= latest for due in dues)


def test_a_source_that_starts_again_costs_its_handoffs_and_no_memory(world: World) -> None:
    world.hand_over("a", 16, layers=range(1))

    world.sending["prefill/0"].close()
    world.sending["prefill/0"] = world.start_source("prefill/0")
    world.settle()
    here = world.hand_over("b", 16)

    assert world.outcomes("decode") == {"a": "failed_over", "b": "delivered"}
    assert world.is_right("b", here, range(16))
    assert all(target.retired_bytes == 0 for target in world.targets.values())


def test_a_silent_source_retires_its_area_until_its_link_is_closed(world: World) -> None:
    world.hand_over("a", 16, layers=range(1))

    world.pass_time(6.0, without=["prefill/1"])
    retired = [target.retired_bytes for target in world.targets.values()]
    world.pass_time(1.0)
    here = world.hand_over("b", 16)

    assert any(retired)
    assert world.outcomes("decode")["a"] == "failed_over"
    assert world.outcomes("decode")["b"] == "delivered"
    assert world.is_right("b", here, range(16))
    assert all(target.retired_bytes == 0 for target in world.targets.values())


def test_a_decode_rank_that_starts_again_fails_over_and_is_used_again(world: World) -> None:
    world.hand_over("a", 16, layers=range(1))

    world.decode.colleague_died("decode/2")
    world.taking["decode/2"].close()
    with pytest.raises(UnavailableError, match="decode/2"):
        world.submit("b", 16)
    world.taking["decode/2"] = world.start_target("decode/2")
    world.settle()
    here = world.hand_over("c", 16)

    assert world.outcomes("decode") == {"a": "failed_over", "c": "delivered"}
    assert world.is_right("c", here, range(16))


def test_one_step_does_a_bounded_share_of_the_work(world: World) -> None:
    there, _ = world.submit("a", 48)
    world.settle()
    rank = world.sending["prefill/0"]
    rank._budget_bytes = 1
    world.compute("a", there, range(48))

    rank.step()
    first = rank.bytes_moved

    assert rank.has_work
    assert 0 < first <= 3 * 4096


def test_small_parts_that_are_written_in_one_step_share_a_notice(world: World) -> None:
    there, here = world.submit("a", 16)
    world.settle()
    rank = world.sending["prefill/0"]
    area = rank._areas["decode/0"]
    post, windows = area.link.post, []

    def count(spans: Any, notice: bytes, *, packed: Any) -> int:
        windows.append(len(packed))
        return post(spans, notice, packed=packed)

    area.link.post = count  # type: ignore[method-assign]
    world.compute("a", there, range(16))
    world.prefill.first_token("a", (1,))
    world.settle()

    assert windows == [3]  # One for each layer.
    assert world.outcomes("decode") == {"a": "delivered"}
    assert world.is_right("a", here, range(16))


def test_a_landing_area_without_memory_fails_over_at_once_and_the_next_is_tried(
    world: World,
) -> None:
    target = world.targets["decode/0"]
    open_area, refused = target.open_area, []

    def open_later(peer: str, size: int) -> object:
        if not refused:
            refused.append(peer)
            raise UnavailableError("no memory")
        return open_area(peer, size)

    target.open_area = open_later  # type: ignore[method-assign,assignment]
    world.submit("a", 16)
    world.settle()
    there, here = world.submit("b", 16, first=8)
    world.settle()
    world.compute("b", there, range(16))
    world.prefill.first_token("b", (7,))
    world.settle()

    assert world.outcomes("decode") == {"a": "failed_over", "b": "delivered"}
    assert world.ended["decode"][0].why.endswith(f"{refused[0].split('#')[0]}: no memory")
    assert world.taking["decode/0"].refused["no memory"] == 1
    assert world.is_right("b", here, range(16))
    assert target.retired_bytes == 0


def test_berths_are_returned_together_but_soon() -> None:
    wide = HandoffSettings(bounds=HandoffBounds(berth_bytes=1024, berth_count=32))
    world = World(Shape(prefill_ranks=1, decode_ranks=1), settings=wide)
    rank, said = world.taking["decode/0"], []
    send = rank._send

    def watch(message: object) -> None:
        said.append(type(message).__name__)
        send(message)  # type: ignore[arg-type]

    rank._send = watch  # type: ignore[method-assign,assignment]
    there, _ = world.submit("a", 8)
    world.settle()
    before = said.count("Claim")
    world.compute("a", there, range(8), range(1))
    world.settle()
    kept, due = said.count("Claim") - before, rank.next_deadline()
    world.now = due or world.now
    world.settle()
    returned = said.count("Claim") - before
    for layer in range(1, LAYERS):
        world.compute("a", there, range(8), range(layer, layer + 1))
        world.settle()

    assert rank.parts_moved >= LAYERS
    assert (kept, returned) == (0, 1)
    assert said.count("Claim") - before < rank.parts_moved
    assert not world.sending["prefill/0"].machine.writes


@pytest.mark.parametrize("side", ["reader", "taker"])
def test_a_device_that_cannot_move_a_part_fails_the_handoff_over(world: World, side: str) -> None:
    def refuse(*arguments: object) -> bytes:
        raise UnavailableError(f"the device is lost, with {len(arguments)} arguments")

    if side == "reader":
        rank = world.sending["prefill/0"]
        rank._reader.read = refuse  # type: ignore[method-assign]
    else:
        rank = world.taking["decode/0"]
        rank._taker.take = refuse  # type: ignore[method-assign]

    there, _ = world.submit("a", 16)
    world.settle()
    world.compute("a", there, range(16))
    world.settle()

    assert world.outcomes("decode") == {"a": "failed_over"}
    assert rank.refused[side] > 0
