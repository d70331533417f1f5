"""A prefill scheduler that starts again beside living ranks: its blocks are its own at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lab.fixtures.handoff_machines import sizes
from lab.fixtures.handoff_pair import LAYERS, Shape, keys_of
from penstock.handoff.driver.prefill_rank import LayerEvents
from penstock.handoff.driver.schedulers import PrefillSchedulerDriver
from tests.handoff.driver.conftest import World

if TYPE_CHECKING:
    from penstock.handoff.protocol.identity import WriteId

TOKENS = 32


def start_again(world: World) -> None:
    """The prefill scheduler dies, and begins again; decode does not hear of it for a while."""
    world.prefill.close()
    lines = world.board.join("prefill", world.directory.prefill.rank_names)
    world.prefill = PrefillSchedulerDriver(world.directory, lines, **world._life())


def step_until_ranks_are_there(world: World) -> None:
    for _ in range(50):
        if all(world.prefill.machine.is_open(name) for name in world.sending):
            return
        world.prefill.step()
        for rank in world.sending.values():
            rank.step()
    raise AssertionError("the ranks do not come")


@pytest.fixture
def world() -> World:
    """One rank on each side. In a step the prefill rank packs one part."""
    world = World(Shape(prefill_ranks=1, decode_ranks=1))
    for rank in world.sending.values():
        rank._budget_bytes = 1
    return world


def begin(world: World, request: str) -> list[int]:
    """Both engines know of a prompt, which is computed; nothing of it was packed."""
    there, here = world.submit(request, TOKENS)
    world.settle()
    world.compute(request, there, range(TOKENS))
    world.prefill.first_token(request, tokens=(1,))
    world.settle(without=["prefill/0"])
    return here


def reuse(world: World, request: str, *, named: bool) -> None:
    """The new life computes another prompt in the same slots."""
    there = [*range(TOKENS // world.directory.plan.source_tokens)]
    world.prefill.submit(request)
    for rank in world.sending.values():
        rank.admit(
            request,
            token_count=TOKENS,
            slots=there,
            keys=keys_of(request, TOKENS, world.directory.plan.source_tokens),
            scheduler=world.prefill.life.incarnation if named else None,
        )
    world.compute(request, there, range(TOKENS))


@pytest.mark.parametrize("seen", [False, True])
def test_what_was_queued_for_an_earlier_life_is_not_read_from_reused_blocks(
    world: World,
    seen: bool,  # noqa: FBT001 - a case
) -> None:
    here = begin(world, "old")
    rank = world.sending["prefill/0"]
    under_way = sizes(rank.machine)["writes under way"]

    start_again(world)
    if seen:
        rank.colleague_died("prefill")
    step_until_ranks_are_there(world)
    reuse(world, "new", named=not seen)
    world.settle(without=["prefill", "decode"])
    world.settle()

    assert under_way > 1
    right = world.is_right("old", here, range(TOKENS))
    assert right or world.outcomes("decode").get("old") != "delivered"
    assert sizes(rank.machine)["writes under way"] == 0
    assert "new" in rank.machine.prompts


class LateReader:
    """A reader like that of a device: it begins at once, and reads when the test lets it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._begun: dict[WriteId, tuple[Any, ...]] = {}
        self.slot_count = inner.slot_count
        self.has_room = True
        self.reads = False

    def read(self, write: WriteId, *more: Any) -> None:
        self._begun[write] = more

    def ended(self) -> list[tuple[WriteId, bytes]]:
        begun, self._begun = (self._begun, {}) if self.reads else ({}, self._begun)
        return [(write, self._inner.read(write, *more)) for write, more in begun.items()]

    def forget(self, write: WriteId) -> None:
        self._begun.pop(write, None)

    @property
    def busy(self) -> bool:
        return bool(self._begun)


def test_what_a_device_was_reading_for_an_earlier_life_is_forgotten(world: World) -> None:
    rank = world.sending["prefill/0"]
    reader = rank._reader = LateReader(rank._reader)
    here = begin(world, "old")
    for _ in range(10):
        rank.step()
    assert reader.busy

    start_again(world)
    step_until_ranks_are_there(world)
    reuse(world, "new", named=True)
    reader.reads = True
    world.settle(without=["prefill", "decode"])
    world.settle()

    assert rank.machine.counts["writes dropped"] > 0
    assert world.outcomes("decode").get("old") != "delivered"
    assert not world.is_right("old", here, range(TOKENS))
    assert not sizes(rank.machine)["areas poisoned"]
    assert "new" in rank.machine.prompts


def test_what_was_queued_is_not_read_from_blocks_that_a_prompt_has_lost(world: World) -> None:
    here = begin(world, "r")
    rank = world.sending["prefill/0"]
    blocks = TOKENS // world.directory.plan.source_tokens
    under_way = sizes(rank.machine)["writes under way"]

    rank.restart("r")
    world.pools["prefill/0"].compute("other", [*range(blocks)], range(TOKENS), range(LAYERS))
    world.settle()
    assert "r" not in world.outcomes("decode")
    rank.extend("r", [*range(blocks, 2 * blocks)])
    world.compute("r", [*range(blocks, 2 * blocks)], range(TOKENS))
    world.settle()

    assert under_way > 1
    assert world.outcomes("decode") == {"r": "delivered"}
    assert world.is_right("r", here, range(TOKENS))


def test_what_a_device_was_computing_into_blocks_that_are_lost_is_not_reported() -> None:
    passed: list[bool] = []

    class Event:
        def record(self, stream: object) -> None:
            """Nothing to do."""

        @property
        def reached(self) -> bool:
            return bool(passed)

        def close(self) -> None:
            """Nothing to do."""

    events = LayerEvents(Event)
    events.record({"lost": 4, "kept": 8}, 1, 0)

    events.forget("lost")
    passed.append(True)

    assert [(each.handoff, each.tokens) for each in events.poll()] == [("kept", 8)]


def test_the_blocks_of_a_prompt_may_be_named_step_by_step(world: World) -> None:
    rank, size = world.sending["prefill/0"], world.directory.plan.source_tokens
    keys = keys_of("r", TOKENS, size)
    blocks = [*range(len(keys))]
    world.decode.submit("r", token_count=TOKENS, slots={"decode/0": blocks}, keys=keys)
    world.prefill.submit("r")
    rank.admit("r", token_count=TOKENS, slots=[], keys=keys)

    for step in blocks[:-1]:
        with pytest.raises(ValueError, match="slots of later blocks of 'r' are not known yet"):
            rank.chunk_progress("r", tokens=(step + 1) * size)
        rank.extend("r", [step])
        world.compute("r", blocks, range((step + 1) * size))
        world.settle()
    early, moved = rank.early_bytes, rank.bytes_moved
    rank.extend("r", blocks[-1:])
    world.compute("r", blocks, range(TOKENS))
    world.prefill.first_token("r", tokens=(1,))
    world.settle()

    assert early == moved == rank.early_bytes
    assert world.is_right("r", blocks, range(TOKENS))


def test_more_blocks_than_a_prompt_has_are_refused(world: World) -> None:
    there, _ = world.submit("r", TOKENS)
    rank = world.sending["prefill/0"]

    with pytest.raises(ValueError, match="slots are 1, must be at most 0: one a block"):
        rank.extend("r", there[:1])
    with pytest.raises(ValueError, match="handoff is 'x', which was never admitted"):
        rank.extend("x", there[:1])
