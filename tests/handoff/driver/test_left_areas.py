"""A write goes into the very area that it was meant for, or nowhere."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.fixtures.handoff_machines import sizes
from lab.fixtures.handoff_pair import Shape
from penstock.handoff.driver.party_driver import seal
from penstock.handoff.protocol import messages as msg
from tests.handoff.driver.conftest import World

TOKENS = 32


def pair() -> World:
    """One rank on each side."""
    return World(Shape(prefill_ranks=1, decode_ranks=1))


def claim_of(world: World, request: str) -> msg.Claim:
    """The last claim that the decode rank made."""
    found: list[msg.Claim] = []
    rank = world.taking["decode/0"]
    send = rank._send

    def watch(message: Any) -> None:
        if isinstance(message, msg.Claim):
            found.append(message)
        send(message)

    rank._send = watch  # type: ignore[method-assign]
    world.submit(request, TOKENS)
    world.settle()
    rank._send = send  # type: ignore[method-assign]
    return found[-1]


def enter(world: World, claim: msg.Claim, **changes: Any) -> Any:
    """The decode rank claims into another area, which is there; returns that area."""
    area = world.targets["decode/0"].open_area(
        str(world.sending["prefill/0"].life), claim.berth_count * claim.berth_bytes
    )
    changed = msgspec.structs.replace(claim, generation=claim.generation + 1, **changes)
    assert world.parties["decode/0"].lines.send("prefill/0", seal(changed, area.description))
    return area


def test_writes_that_were_queued_for_an_area_do_not_go_into_the_one_that_follows() -> None:
    world = pair()
    claim = claim_of(world, "a")
    rank = world.sending["prefill/0"]
    world.compute("a", [*reversed(range(TOKENS // 4))], range(TOKENS))
    queued = sizes(rank.machine)["writes under way"]
    # Another claim of a later epoch, which wants nothing: so nothing may be written there.
    everything = claim.grid.everything.to_bytes(8, "little")

    area = enter(world, claim, epoch=claim.epoch + 1, have=everything)
    rank.step()

    assert queued > 1
    assert rank.machine.lanes["decode/0"].generation == claim.generation + 1
    assert rank.machine.counts["writes failed"] == queued
    assert not area.memory.any()
    assert not area.arrived


def test_a_write_that_is_asked_for_after_its_area_was_left_fails() -> None:
    world = pair()
    claim = claim_of(world, "a")
    rank = world.sending["prefill/0"]
    # The machine refuses this claim, since its grid is another: it stays with the first area.
    grid = claim.grid._replace(part_blocks=claim.grid.part_blocks - 1)

    area = enter(world, claim, grid=grid)
    rank.step()
    assert rank.machine.lanes["decode/0"].generation == claim.generation
    world.compute("a", [*reversed(range(TOKENS // 4))], range(TOKENS))
    rank.step()

    assert rank.machine.counts["refused: claim of another grid"] == 1
    assert rank.machine.counts["writes failed"] > 0
    assert not area.memory.any()
    assert not area.arrived
