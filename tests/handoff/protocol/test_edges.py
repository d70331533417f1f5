"""What happens at the edges: late ends of moves and writes, lost reports, smallest and largest."""

from __future__ import annotations

import msgspec
import pytest

from lab.fixtures.handoff_machines import sizes
from lab.fixtures.shards import Shard
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Identity, Life, form_facts, misfit
from penstock.handoff.protocol.states import Role
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import DType
from tests.handoff.protocol.conftest import World

TEXT_MAX = 512
"""Of a text in a message; a peer refuses the whole message beyond it."""


def taking() -> World:
    """One part has landed, and its target moves it."""
    world = World().busy()
    world.land()
    world.deliver()
    assert len(world.takes) == 1
    return world


def fail_take(world: World) -> None:
    name, take = world.takes.pop()
    world.do(name, lambda d: d.take_failed(take, world.now, why="no slot"))


# ------------------------------------------------------------------ moves of a decode rank


def test_p13_a_move_that_fails_after_the_drop_ends_the_handoff_too() -> None:
    world = taking()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run_messages()
    before = world.outcome("D")

    fail_take(world)
    world.run()

    assert before == []
    assert world.outcome("D") == ["cancelled"]
    world.check_over()


def test_p3_a_lost_report_of_a_failure_is_said_again_with_its_cause() -> None:
    world = taking()
    fail_take(world)
    (report,) = world.said(msg.HandoffReport)
    world.wire.remove(report)

    world.drive(20)

    assert [e.outcome.value for e in world.ended["D"]] == ["failed_over"]
    assert world.ended["D"][0].why == "part 0 of p0 could not be taken: no slot"


def test_p19_the_end_of_a_move_is_no_fence() -> None:
    """The writer of a retired area may write to it yet, whether we read it or not."""
    world = taking()
    world.do("d0", lambda d: d.suspect("p0", 0.0))

    world.take()
    before = set(world.given_back)
    world.fence_holds()

    assert not before
    assert len(world.given_back) == 1


# ------------------------------------------------------------------ writes of a prefill rank


def test_p17_a_failed_write_of_an_area_that_was_left_does_not_poison_the_next() -> None:
    world = World().busy()
    world.fail_write()
    world.run_messages()
    assert [write.write.generation for write in world.posted] == [1, 2, 2]

    world.fail_write()

    assert not world.said(msg.Poisoned)
    assert sizes(world.parties["p0"])["areas poisoned"] == 0
    world.run()
    assert world.outcome("D") == ["delivered"]
    assert {key[2] for key in world.areas} == {1, 2}


def test_p17_a_failed_write_to_a_target_that_is_gone_poisons_nothing() -> None:
    world = World().busy()
    world.crash("d0")
    world.start("d0")
    world.acquaint("d0")

    world.fail_write()

    assert sizes(world.parties["p0"])["areas poisoned"] == 0
    assert world.parties["p0"].counts["writes failed"] == 1


def test_p17_poison_is_said_again_when_more_of_the_prompt_is_computed() -> None:
    """The writer asks by itself; it need not wait until its target claims again."""
    world = World(layers=1, tokens=4)
    world.submit_prefill()
    world.submit_decode(wanted={"d0": (("p0", world.grid(part_blocks=2)),)})
    world.run_messages()
    world.do("p0", lambda p: p.chunk_progress("h", tokens=2, now=0.0))
    world.fail_write()
    world.wire.clear()
    world.do("p0", lambda p: p.chunk_progress("h", tokens=4, now=0.0))

    world.expire("p0", "notice", "d0")

    assert [poisoned.generation for poisoned in world.said(msg.Poisoned)] == [1]


# ------------------------------------------------------------------ smallest and largest


def test_p8_a_prompt_of_one_token_is_handed_over() -> None:
    world = World(layers=1, tokens=1).busy()

    world.run()

    assert world.outcome("D") == ["delivered"]
    world.check_over()


def test_p12_as_many_drafts_as_a_message_may_have_are_handed_over() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    for name in world.prefill_names:
        world.do(name, lambda p: p.chunk_progress("h", tokens=world.tokens, now=0.0))

    drafts = tuple(range(msg.TOKEN_COUNT_MAX))
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(7,), drafts=drafts))
    world.run()

    assert world.ended["D"][0].drafts == drafts


def test_p6_the_first_epoch_of_a_handoff_is_one() -> None:
    world = World()

    world.do("D", lambda d: d.submit("h", 0.0, prefill="P", wanted=world.diagonal()))

    assert {message.epoch for message in world.said(msg.Expect)} == {1}


def test_p23_a_close_is_said_as_often_as_the_bound_says() -> None:
    world = World().busy()
    world.do("D", lambda d: d.cancel("h", 0.0))

    closes = 0
    for _ in range(200):
        closes += len(world.said(msg.Close))
        world.wire = [m for m in world.wire if not isinstance(m, msg.Close)]
        if world.wire:
            world.run()
        else:
            world.wait(1.0)

    assert closes == world.settings.bounds.close_count_max


@pytest.mark.parametrize("layer", range(3, 9))
def test_p8_of_a_rank_whose_first_layer_is_not_the_first_every_layer_makes_its_part_ready(
    layer: int,
) -> None:
    grid = Grid(3, 6, 0, 2, 2, 2)
    watermarks = tuple(grid.block_count if n // 2 == (layer - 3) // 2 else 0 for n in range(6))

    ready = grid.ready(watermarks, 3, grid.block_count, range(layer, layer + 1))

    assert ready == 1 << (layer - 3) // 2
    assert layer in grid.layers_of((layer - 3) // 2)


def test_p5_facts_are_never_longer_than_a_text_may_be() -> None:
    forms = [
        Form(
            layout=Layout.split(
                layers=range(1),
                heads=Shard().heads(count),
                channels=32,
                dtype=DType.BF16,
                block_tokens=16,
                block_count=1,
            )
        )
        for count in range(1, 41)
    ]

    assert max(len(value) for _, value in form_facts(forms)) == TEXT_MAX


def test_p5_a_misfit_of_long_facts_is_never_longer_than_a_text_may_be() -> None:
    facts = tuple((f"fact {number}", "x" * 100) for number in range(10))
    ours = Identity(Life("P", 1), Role.PREFILL_SCHEDULER, facts)
    theirs = Identity(Life("D", 2), Role.DECODE_SCHEDULER, facts[::-1])

    found = misfit(ours, theirs)

    assert found is not None
    assert (len(found.ours), len(found.theirs)) == (TEXT_MAX, TEXT_MAX)


# ------------------------------------------------------------------ what is refused is counted


def refusals(world: World, name: str) -> dict[str, int]:
    counts: dict[str, int] = world.parties[name].counts
    return {what: count for what, count in counts.items() if what.startswith("refused")}


@pytest.mark.parametrize(
    ("berth", "why"),
    [(0, "into a berth that is in use"), (99, "into a berth that is not in the area")],
)
def test_p23_a_notice_of_a_wrong_berth_is_refused_and_counted(berth: int, why: str) -> None:
    world = taking()
    world.land()
    notice = world.wire.pop()
    parts = tuple(part._replace(berth=berth) for part in notice.parts)
    notice = msgspec.structs.replace(notice, parts=parts)

    world.do("d0", lambda d: d.receive(notice, 0.0))

    assert refusals(world, "d0") == {f"refused: {why}": 1}
    assert len(world.takes) == 1


def test_p2_an_answer_to_a_close_that_nobody_sent_is_refused_and_counted() -> None:
    world = World().busy()
    lives = {"sender": world.parties["P"].life, "target": world.parties["D"].life}
    closed = msg.CloseConfirmed(**lives, handoff="h", epoch=1)

    world.do("D", lambda d: d.receive(closed, 0.0))

    assert refusals(world, "D") == {"refused: closed, but nobody said so": 1}
    world.run()
    assert world.outcome("D") == ["delivered"]


def test_p4_a_refusal_for_an_earlier_life_is_refused_and_counted() -> None:
    world = World().busy()
    refused = msg.Refused(
        sender=world.parties["p0"].life,
        target=Life("d0", 99),
        fact="weights",
        ours="v1",
        theirs="v2",
    )

    world.do("d0", lambda d: d.receive(refused, 0.0))

    assert refusals(world, "d0") == {"refused: for an earlier life": 1}
    world.run()
    assert world.outcome("D") == ["delivered"]


def test_p20_a_suspected_peer_is_counted_once() -> None:
    world = World()

    for _ in range(2):
        world.do("d0", lambda d: d.suspect("p0", 0.0))

    assert world.parties["d0"].counts["suspected"] == 1
