"""Whole handoffs: in any order, over any number of ranks (P1, P2, P8, P10, P12)."""

from __future__ import annotations

from itertools import permutations

import pytest

from lab.fixtures.handoff_machines import sizes
from penstock.handoff.protocol import effects as eff
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.states import HandoffOutcome
from tests.handoff.protocol.conftest import World


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 2), (1, 2), (2, 1), (3, 5), (8, 8)])
def test_p2_a_handoff_is_delivered_once_with_its_first_token(
    sources: int, targets: int, *, decode_first: bool
) -> None:
    world = World(sources, targets)

    if decode_first:
        world.submit_decode(wanted=world.everything())
        world.run()
        world.submit_prefill()
        world.compute()
    else:
        world.submit_prefill()
        world.compute()
        world.submit_decode(wanted=world.everything())
    world.run()

    assert world.outcome("D") == ["delivered"]
    assert world.outcome("P") == ["delivered"]
    assert (world.ended["D"][0].tokens, world.ended["D"][0].drafts) == ((7,), (8, 9))
    world.check_over()


def test_p1_ranks_may_hear_of_two_handoffs_in_different_orders() -> None:
    world = World(2, 2)
    for handoff in ("a", "b"):
        world.submit_prefill(handoff)
        world.submit_decode(handoff)

    # Rank 0 hears of a, then b; rank 1 of b, then a; their layers come the other way round.
    world.wire.sort(key=lambda m: (m.target.name, m.handoff if m.target.name == "d0" else ""))
    world.wire.sort(key=lambda m: m.target.name == "d1" and m.handoff == "a")
    world.run()
    for name, order in (("p0", "ab"), ("p1", "ba")):
        for handoff in order:
            world.do(name, lambda p, h=handoff: p.chunk_progress(h, tokens=4, now=0.0))
    for handoff in ("b", "a"):
        world.do("P", lambda p, h=handoff: p.first_token(h, 0.0, tokens=(1,)))
    world.run()

    assert sorted(ended.handoff for ended in world.ended["D"]) == ["a", "b"]
    assert world.outcome("D") == ["delivered"] * 2
    world.check_over()


def test_p1_a_rank_without_its_claim_does_not_hold_up_the_other() -> None:
    world = World(2, 2)
    world.submit_prefill()
    world.submit_decode()
    lost = [m for m in world.wire if m.target.name == "d1"]
    world.wire = [m for m in world.wire if m not in lost]

    world.compute()
    world.run()

    assert world.slots["d0", "h", 1] == {("p0", 0), ("p0", 1)}
    assert sizes(world.parties["d0"])["complete"] == 1
    assert not world.ended["D"]


def test_p10_a_handoff_is_delivered_only_when_every_rank_is_complete() -> None:
    world = World(1, 3)
    world.submit_prefill()
    world.submit_decode()
    world.compute()

    reports: list[msg.AnyMessage] = []
    for _ in range(200):
        reports += [m for m in world.wire if isinstance(m, msg.HandoffReport)]
        world.wire = [m for m in world.wire if not isinstance(m, msg.HandoffReport)]
        if world.wire:
            world.deliver()
        elif not world.progress_without_messages():
            break
    ended_after = []
    for report in [reports[0], *reports]:
        world.do("D", lambda d, r=report: d.receive(r, 0.0))
        ended_after.append(len(world.ended["D"]))

    assert ended_after == [0, 0, 0, 1]


def test_p12_the_first_token_may_come_before_or_after_the_parts() -> None:
    for token_first in (True, False):
        world = World()
        world.submit_prefill()
        world.submit_decode()
        steps = [
            lambda w: w.do("p0", lambda p: p.chunk_progress("h", tokens=4, now=0.0)),
            lambda w: w.do("P", lambda p: p.first_token("h", 0.0, tokens=(5,), drafts=(6,))),
        ]

        for step in reversed(steps) if token_first else steps:
            assert not world.ended["D"]
            step(world)
            world.run()

        assert world.ended["D"] == [
            eff.HandoffEnded(
                handoff="h", epoch=1, outcome=HandoffOutcome.DELIVERED, tokens=(5,), drafts=(6,)
            )
        ]


# A rank admits a prompt before it computes it; the claim may come at any time.
ORDERS = [
    order
    for order in permutations(["expect", "admit", "layer 0", "layer 1"])
    if order.index("admit") < min(order.index("layer 0"), order.index("layer 1"))
]


@pytest.mark.parametrize("order", ORDERS)
def test_p8_claim_and_progress_may_come_in_any_order(order: tuple[str, ...]) -> None:
    world = World()
    world.submit_prefill(admit=False)
    world.submit_decode()

    for event in order:
        match event:
            case "expect":
                world.run()
            case "admit":
                world.admit()
            case _:
                layer = int(event[-1])
                world.do("p0", lambda p, n=layer: p.progress("h", layer=n, tokens=4, now=0.0))
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(1,)))
    world.run()

    assert world.outcome("D") == ["delivered"]
    world.check_over()


def test_p8_progress_that_comes_late_does_not_lower_a_watermark() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    world.run()

    for tokens in (4, 1, 0, 4):
        world.do("p0", lambda p, n=tokens: p.progress("h", layer=0, tokens=n, now=0.0))

    assert world.parties["p0"].prompts["h"].watermarks == (4, 0)
    assert [write.write.part for write in world.posted] == [0]


def test_p8_chunks_travel_while_later_chunks_are_computed() -> None:
    world = World(tokens=4, layers=1)
    world.submit_prefill()
    world.submit_decode(wanted={"d0": (("p0", world.grid(part_blocks=1)),)})
    world.run()

    travelled = []
    for tokens in (1, 3, 4):
        world.do("p0", lambda p, n=tokens: p.chunk_progress("h", tokens=n, now=0.0))
        world.run()
        travelled.append(len(world.slots["d0", "h", 1]))

    assert travelled == [1, 3, 4]


def test_p8_a_partly_filled_last_block_travels_when_the_prompt_is_computed() -> None:
    world = World(tokens=5, layers=1)
    grid = Grid(0, 1, 0, 2, part_blocks=1, block_tokens=4)
    world.submit_prefill()
    world.submit_decode(wanted={"d0": (("p0", grid),)})
    world.run()

    world.do("p0", lambda p: p.chunk_progress("h", tokens=4, now=0.0))
    world.run()
    first = set(world.slots["d0", "h", 1])
    world.do("p0", lambda p: p.chunk_progress("h", tokens=5, now=0.0))
    world.run()

    assert first == {("p0", 0)}
    assert world.slots["d0", "h", 1] == {("p0", 0), ("p0", 1)}


def test_p8_only_the_missing_suffix_travels() -> None:
    world = World(tokens=8, layers=1)
    world.submit_prefill()
    suffix = Grid(0, 1, 6, 2, part_blocks=1)

    world.submit_decode(wanted={"d0": (("p0", suffix),)})
    world.compute()
    world.run()

    assert world.outcome("D") == ["delivered"]
    assert [suffix.blocks_of(part) for _, part in sorted(world.slots["d0", "h", 1])] == [
        range(6, 7),
        range(7, 8),
    ]


def test_p8_a_prompt_that_is_there_already_needs_the_token_alone() -> None:
    world = World(1, 2)
    world.submit_prefill()

    world.submit_decode(wanted={})
    world.compute()
    world.run()

    assert world.outcome("D") == ["delivered"]
    assert not world.areas
    world.check_over()


def test_p8_pipeline_stages_owe_different_layers() -> None:
    world = World(2, 1, layers=4)
    world.do("P", lambda p: p.submit("h", 0.0))
    world.submitted["P"] += 1
    for stage, name in enumerate(world.prefill_names):
        layers = range(2 * stage, 2 * stage + 2)
        world.do(name, lambda p, r=layers: p.admit("h", token_count=4, layers=r, now=0.0))
    wanted = {
        "d0": tuple(
            (name, world.grid(layer_first=2 * stage, layer_count=2))
            for stage, name in enumerate(world.prefill_names)
        )
    }

    world.submit_decode(wanted=wanted)
    world.compute()
    world.run()

    assert world.outcome("D") == ["delivered"]
    world.check_over()
