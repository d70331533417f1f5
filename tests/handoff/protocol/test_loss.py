"""Messages that are lost, repeated, late or never come: P3, P6, P7."""

from __future__ import annotations

from random import Random

import pytest

from lab.fixtures.handoff_machines import sizes
from penstock.handoff.protocol import messages as msg
from tests.handoff.protocol.conftest import World

MESSAGES_OF_A_HANDOFF = 26
"""So many are sent in the world below without faults; a test sees to it."""


def world_with_work() -> World:
    world = World(2, 2, layers=2)
    world.submit_prefill()
    world.submit_decode()
    world.compute()
    return world


def disturb(world: World, number: int, kind: str) -> None:
    """Everything in order, but for one message, which is lost or comes again at the very end."""
    seen = 0
    again: list[msg.AnyMessage] = []
    for _ in range(1000):
        if world.wire:
            if seen == number:
                again.append(world.wire[0])
            if seen == number and kind == "lost":
                world.lose()
            else:
                world.deliver(keep=seen == number and kind == "twice")
            seen += 1
        elif not world.progress_without_messages():
            break
    if kind == "late again":
        for message in again:
            world.do(message.target.name, lambda p, m=message: p.receive(m, world.now))
    world.seen = seen


def test_the_number_of_messages_is_known() -> None:
    world = world_with_work()

    disturb(world, -1, "none")

    assert world.seen == MESSAGES_OF_A_HANDOFF
    assert world.outcome("D") == world.outcome("P") == ["delivered"]


@pytest.mark.parametrize("number", range(MESSAGES_OF_A_HANDOFF))
def test_p3_every_message_may_be_lost(number: int) -> None:
    world = world_with_work()

    disturb(world, number, "lost")
    world.drive(20)

    assert world.outcome("D") == world.outcome("P") == ["delivered"]
    world.check_over()


@pytest.mark.parametrize("kind", ["twice", "late again"])
@pytest.mark.parametrize("number", range(MESSAGES_OF_A_HANDOFF))
def test_p3_every_message_may_come_twice(number: int, kind: str) -> None:
    world = world_with_work()

    disturb(world, number, kind)
    world.drive(20)

    assert world.outcome("D") == world.outcome("P") == ["delivered"]
    world.check_over()


@pytest.mark.parametrize("seed", range(10))
def test_p3_a_handoff_survives_the_loss_of_every_second_message(seed: int) -> None:
    world = world_with_work()
    random = Random(seed)

    for _ in range(59):
        for _ in range(200):
            if world.wire and random.random() < 0.5:
                world.lose(random.randrange(len(world.wire)))
            elif world.wire:
                world.deliver(random.randrange(len(world.wire)))
            elif not world.progress_without_messages():
                break
        world.wait(1.0)

    assert world.outcome("D") == ["delivered"]


def test_p9_one_claim_acknowledges_returns_a_berth_and_asks_for_the_rest() -> None:
    world = World(layers=3)
    world.submit_prefill()
    world.submit_decode()
    world.compute()
    world.run_messages()
    rank = world.parties["p0"]
    assert [w.write.part for w in world.posted] == [0, 1]
    world.land()
    world.observe()
    world.run_messages()

    world.take()
    (claim,) = world.wire
    world.deliver()

    assert isinstance(claim, msg.Claim)
    assert claim.have == b"\x01"
    assert sizes(rank)["berths with target"] == 0
    assert [(w.write.part, w.write.berth) for w in world.posted] == [(1, 1), (2, 0)]


def test_p3_a_resend_waits_longer_each_time_up_to_its_cap() -> None:
    world = World()
    world.submit_decode(patience_s=100.0)
    world.wire.clear()
    decode = world.parties["D"]

    waits = []
    for _ in range(8):
        before = world.now
        world.wait(decode.timers["resend", "h"] - before)
        world.wire.clear()
        waits.append(world.now - before)

    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]


def test_p3_what_comes_halves_the_wait_for_the_next_resend() -> None:
    world = World(1, 2)
    world.submit_prefill()
    world.submit_decode(patience_s=100.0)
    world.run_messages()
    decode, timer = world.parties["D"], ("resend", "h")
    for _ in range(4):
        world.wait(decode.timers[timer] - world.now)
        world.run_messages()
    assert decode.timers[timer] - world.now == 4.0

    world.do("P", lambda p: p.first_token("h", world.now, tokens=(7,)))
    world.run_messages()

    assert decode.timers[timer] - world.now == 2.0
    assert world.parties["D"].tries[timer] == 3


def test_p3_an_answer_never_puts_a_resend_off() -> None:
    world = World(2, 1)
    world.submit_prefill()
    world.submit_decode(wanted=world.everything(), patience_s=100.0)
    world.run_messages()
    rank = world.parties["d0"]
    timer = ("resend", "h", "1")
    due = rank.timers[timer]
    world.now = due - 0.01

    world.do("p0", lambda p: p.chunk_progress("h", tokens=4, now=world.now))
    world.run()

    assert rank.counts["parts taken"] == 2
    assert rank.timers[timer] == due


def test_p3_a_notice_waits_as_long_as_its_target_took_to_answer_before() -> None:
    world = World().busy()
    rank, timer = world.parties["p0"], ("notice", "d0")
    world.land()
    world.observe()
    waits = []
    for _ in range(3):
        before = world.now
        world.wait(rank.timers[timer] - before)
        waits.append(world.now - before)
    world.run()
    assert timer not in rank.timers

    world.submit_prefill("next")
    world.submit_decode("next")
    world.run_messages()
    world.compute("next")
    world.land()
    world.observe()

    assert waits == [0.25, 0.5, 1.0]
    assert rank.timers[timer] - world.now > 0.25


# ------------------------------------------------------------------ epochs


def withdrawn(world: World) -> list[msg.AnyMessage]:
    """A claim that was complete on one rank of two and then given up; what its ranks said."""
    world.submit_prefill()
    world.submit_decode()
    for _ in range(4):
        world.deliver()
    world.do("p0", lambda p: p.chunk_progress("h", tokens=4, now=0.0))
    said: list[msg.AnyMessage] = []
    for _ in range(30):
        said += world.wire
        if world.wire:
            world.deliver()
        else:
            world.progress_without_messages()
    assert world.parties["D"].claimed["h"].complete == 1
    world.do("D", lambda d: d.withdraw("h", 0.0))
    world.run()
    assert world.outcome("D") == ["withdrawn"]
    return said


def test_p6_a_withdrawn_handoff_may_be_claimed_again() -> None:
    world = World(2, 2)
    withdrawn(world)

    world.submit_decode(epoch=2)
    world.do("p1", lambda p: p.chunk_progress("h", tokens=4, now=0.0))
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(1,)))
    world.run()

    assert world.outcome("D") == ["withdrawn", "delivered"]
    assert world.outcome("P") == ["delivered"]
    world.check_over()


def test_p6_a_report_of_an_earlier_epoch_does_not_count() -> None:
    world = World(2, 2)
    said = withdrawn(world)
    world.submit_decode(epoch=2)
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(1,)))
    world.run()

    for message in said:
        world.do(message.target.name, lambda p, m=message: p.receive(m, 0.0))
    world.run()

    assert world.outcome("D") == ["withdrawn"]
    assert world.parties["D"].claimed["h"].complete == 1
    assert world.parties["D"].counts["refused: from another epoch"] > 0
    world.do("p1", lambda p: p.chunk_progress("h", tokens=4, now=0.0))
    world.run()
    assert world.outcome("D") == ["withdrawn", "delivered"]


def test_p6_a_close_of_an_earlier_epoch_does_not_end_a_later_one() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode(epoch=2)
    world.run()
    early = msg.Close(
        sender=world.parties["D"].life,
        target=world.parties["P"].life,
        handoff="h",
        epoch=1,
        outcome=msg.HandoffOutcome.CANCELLED,
    )

    world.do("P", lambda p: p.receive(early, 0.0))

    assert [type(m) for m in world.wire] == [msg.CloseConfirmed]
    world.compute()
    world.run()
    assert world.outcome("D") == ["delivered"]


def test_p6_a_claim_that_comes_after_its_stop_does_nothing() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    claim = None
    while claim is None:
        claim = next((m for m in world.wire if isinstance(m, msg.Claim)), None)
        if claim is None:
            world.deliver()
    world.wire.remove(claim)
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run()

    world.do("p0", lambda p: p.receive(claim, 0.0))
    world.run()

    assert sizes(world.parties["p0"])["wants"] == 0
    assert world.outcome("P") == world.outcome("D") == ["cancelled"]
    world.check_over()


def test_p6_a_claim_that_its_stop_overtook_begins_nothing_while_the_prompt_is_on_offer() -> None:
    world = World(2, 2)
    said = withdrawn(world)
    claims = [m for m in said if isinstance(m, msg.Claim) and m.target.name == "p1"]
    assert not world.outcome("P"), "the prompt may be claimed again"

    world.do("p1", lambda p: p.receive(claims[0], 0.0))
    world.do("p1", lambda p: p.chunk_progress("h", tokens=4, now=0.0))

    assert sizes(world.parties["p1"])["wants"] == 0
    assert not world.posted, "nobody waits for what would be written"
    world.submit_decode(epoch=2)
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(1,)))
    world.run()
    assert world.outcome("D") == ["withdrawn", "delivered"]
    world.check_over()


def test_p6_a_stop_of_an_earlier_epoch_does_not_end_a_later_claim() -> None:
    world = World(2, 2)
    said = withdrawn(world)
    claim = next(m for m in said if isinstance(m, msg.Claim) and m.target.name == "p1")
    late = msg.Stop(sender=claim.sender, target=claim.target, handoff="h", epoch=1)
    world.submit_decode(epoch=2)
    world.run()
    wanted = sizes(world.parties["p1"])["wants"]
    assert wanted > 0

    world.do("p1", lambda p: p.receive(late, 0.0))

    assert sizes(world.parties["p1"])["wants"] == wanted
    world.do("p1", lambda p: p.chunk_progress("h", tokens=4, now=0.0))
    assert world.posted, "what was computed is written without being claimed again"
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(1,)))
    world.run()
    assert world.outcome("D") == ["withdrawn", "delivered"]
    world.check_over()


def test_p6_an_epoch_is_not_used_twice() -> None:
    world = World(2, 2)
    withdrawn(world)

    with pytest.raises(ValueError, match="epoch is 1 for 'h', must be more than 1"):
        world.parties["D"].submit("h", 0.0, prefill="P", wanted={}, epoch=1)


# ------------------------------------------------------------------ deadlines


def test_p7_a_handoff_that_is_not_delivered_in_time_expires() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode(patience_s=5.0)

    world.drive(6)

    assert world.outcome("D") == ["expired"]
    assert world.outcome("P") == ["expired"]
    world.check_over()


def test_p7_a_prompt_that_nobody_claims_is_released_after_its_lease() -> None:
    world = World()
    world.submit_prefill()
    world.compute()

    world.drive(121)

    assert world.outcome("P") == ["expired"]
    world.check_over()


def test_p7_a_lease_lasts_as_long_as_decode_asks() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode(patience_s=1000.0)

    world.drive(400)
    world.compute()
    world.run()

    assert world.outcome("P") == world.outcome("D") == ["delivered"]


def test_p7_a_lease_lasts_as_long_as_decode_asks_after_the_first_token_too() -> None:
    world = World()
    lease_s = world.settings.times.lease_s
    world.submit_prefill()
    world.submit_decode(patience_s=10 * lease_s)
    world.compute()
    world.run_messages()
    prefill = world.parties["P"]
    assert sizes(prefill)["ready"] == 1

    # No part gets through, but decode goes on asking.
    dues = []
    for _ in range(4):
        world.wait(lease_s / 2)
        world.run_messages()
        dues.append(prefill.timers["lease", "h"] - world.now)

    assert sizes(prefill)["ready"] == 1
    assert min(dues) > lease_s - world.settings.times.resend_cap_s - 0.01


def test_p7_a_claim_whose_prompt_never_comes_is_forgotten() -> None:
    world = World()
    world.submit_decode()
    world.run()
    assert sizes(world.parties["p0"])["wants"] == 1
    assert sizes(world.parties["P"])["awaited"] == 1

    world.drive(130)

    assert world.outcome("D") == ["expired"]
    assert sizes(world.parties["p0"])["wants"] == 0
    assert sizes(world.parties["P"])["awaited"] == 0


def test_p7_a_question_that_comes_after_the_end_is_answered() -> None:
    world = World()
    world.submit_prefill()
    world.do("P", lambda p: p.cancel("h", 0.0, why="out of memory"))
    world.run()

    world.submit_decode()
    world.run()

    assert [(e.outcome.value, e.why) for e in world.ended["D"]] == [
        ("failed_over", "out of memory")
    ]
