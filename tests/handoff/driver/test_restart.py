"""A prefill scheduler that starts again beside living ranks: its blocks are its own at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lab.fixtures.handoff_pair import Shape, keys_of
from penstock.handoff.driver.schedulers import PrefillSchedulerDriver

if TYPE_CHECKING:
    from penstock.handoff.protocol.identity import WriteId
    from tests.handoff.driver.conftest import MakeWorld, World

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
def world(make_world: MakeWorld) -> World:
    """One rank on each side. In a step the prefill rank packs one part."""
    world = make_world(Shape(prefill_ranks=1, decode_ranks=1))
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
    under_way = rank.machine.statistics().writes_under_way

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
    assert rank.machine.statistics().writes_under_way == 0
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
    assert not rank.machine.statistics().areas_poisoned
    assert "new" in rank.machine.prompts
