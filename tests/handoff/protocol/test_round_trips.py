"""Resends follow the round trips that were measured: PROTOCOL.md, section 6."""

from __future__ import annotations

import pytest

from lab.fixtures.handoff_machines import clone
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.party import RoundTrip
from penstock.handoff.protocol.settings import HandoffTimes
from tests.handoff.protocol.conftest import World

TIMES = HandoffTimes()


def after(*samples_s: float) -> RoundTrip:
    """A peer whose answers took so long, one after the other."""
    trip, now = RoundTrip(), 0.0
    for number, sample_s in enumerate(samples_s):
        trip = trip.asked(number, now, patience_s=TIMES.resend_limit_s)
        now += sample_s
        trip = trip.answered(number, now, TIMES)
    return trip


def test_the_first_sample_allows_for_a_deviation_of_half_of_it() -> None:
    trip = after(2.0)

    assert (trip.mean_s, trip.deviation_s, trip.wait_s) == (2.0, 1.0, 6.0)


def test_equal_samples_bring_the_wait_close_to_the_round_trip() -> None:
    trip = after(*[2.0] * 40)

    assert 2.0 < trip.wait_s < 2.01


def test_a_sample_that_differs_makes_the_wait_longer_at_once() -> None:
    steady = after(*[2.0] * 40)

    trip = steady.asked("slow", 100.0, patience_s=30.0).answered("slow", 110.0, TIMES)

    assert trip.mean_s == pytest.approx(3.0)
    assert trip.wait_s > 10.0


def test_a_question_that_was_sent_twice_is_not_measured() -> None:
    asked = RoundTrip().asked("twice", 0.0, patience_s=30.0)

    trip = asked.asked_again("twice", 0.25, TIMES).answered("twice", 0.3, TIMES)

    assert trip.mean_s is None
    assert trip.wait_s == 0.5


def test_one_question_is_measured_at_a_time() -> None:
    trip = RoundTrip().asked("first", 0.0, patience_s=30.0).asked("second", 1.0, patience_s=30.0)

    assert trip.answered("second", 1.5, TIMES).mean_s is None
    assert trip.answered("first", 2.0, TIMES).mean_s == 2.0


def test_a_question_without_an_answer_gives_way() -> None:
    trip = RoundTrip().asked("lost", 0.0, patience_s=30.0).asked("next", 30.0, patience_s=30.0)

    assert trip.answered("next", 31.0, TIMES).mean_s == 1.0


def test_several_overdue_questions_double_the_wait_once() -> None:
    trip = RoundTrip()

    for question in range(10):
        trip = trip.asked_again(question, 5.0, TIMES)

    assert trip.wait_s == 2 * TIMES.resend_s


def overdue(trip: RoundTrip, times: int, *, late_answers: bool) -> RoundTrip:
    now = 0.0
    for number in range(times):
        now += 100.0
        trip = trip.asked_again(number, now, TIMES)
        if late_answers:
            trip = trip.answered(number, now + 1.0, TIMES)
    return trip


def test_a_silent_peer_is_asked_as_often_as_the_cap_says() -> None:
    assert overdue(RoundTrip(), 20, late_answers=False).wait_s == TIMES.resend_cap_s


def test_a_peer_whose_answers_come_too_late_is_asked_as_seldom_as_the_limit_says() -> None:
    assert overdue(RoundTrip(), 20, late_answers=True).wait_s == TIMES.resend_limit_s


def lose(trip: RoundTrip, question: object, now: float, times: int) -> tuple[RoundTrip, float]:
    """A question that is sent and sent again, and lost each time but the last."""
    trip = trip.asked(question, now, patience_s=TIMES.resend_limit_s)
    for _ in range(times):
        now += max(trip.wait_s, TIMES.resend_s)
        trip = trip.asked_again(question, now, TIMES)
    return trip, now


def test_an_answer_soon_after_the_last_resend_makes_the_wait_as_measured_again() -> None:
    measured = after(*[0.5] * 40)

    trip, now = lose(measured, "lost", 100.0, 3)

    assert trip.wait_s > 3 * measured.wait_s
    assert trip.answered("lost", now + 0.5, TIMES).wait_s == measured.wait_s


def test_an_answer_that_comes_later_than_measured_leaves_the_wait_long() -> None:
    trip, now = lose(after(*[0.5] * 40), "slow", 100.0, 3)

    assert trip.answered("slow", now + 0.6, TIMES).wait_s == trip.wait_s


def test_the_answer_to_another_question_leaves_the_wait_long() -> None:
    trip, now = lose(after(*[0.5] * 40), "lost", 100.0, 3)

    assert trip.answered("another", now + 0.1, TIMES).wait_s == trip.wait_s


def test_the_wait_is_made_as_measured_once_until_a_question_sent_once_is_answered() -> None:
    measured = after(*[0.5] * 40)
    trip, now = lose(measured, "first", 100.0, 2)
    trip, now = lose(trip.answered("first", now + 0.3, TIMES), "second", now + 0.3, 2)

    again = trip.answered("second", now + 0.3, TIMES)
    trip = again.asked("third", now + 2.0, patience_s=30.0).answered("third", now + 2.5, TIMES)
    trip, now = lose(trip, "fourth", now + 5.0, 2)

    assert again.wait_s > 3 * measured.wait_s
    assert trip.wait_s > 3 * measured.wait_s
    assert trip.answered("fourth", now + 0.3, TIMES).wait_s < 1.1 * measured.wait_s


@pytest.mark.parametrize("slower", [1.1, 1.5, 1.9, 2.5, 3.5, 6.5, 7.5, 12.0])
def test_a_link_that_becomes_slow_is_measured_anew_after_a_few_questions(slower: float) -> None:
    trip = after(*[2.0] * 40)
    answer_s, now, sent = slower * trip.wait_s, 100.0, []

    for question in range(8):
        trip = trip.asked(question, now, patience_s=TIMES.resend_limit_s)
        due, count = now + trip.wait_s, 1
        while due < now + answer_s:
            trip = trip.asked_again(question, due, TIMES)
            # Answers to other questions come late meanwhile, as they do when a link is busy.
            trip = trip.answered("other", due, TIMES)
            due, count = due + trip.wait_s, count + 1
        now += answer_s
        trip = trip.answered(question, now, TIMES)
        sent.append(count)

    assert sent[-3:] == [1, 1, 1]


# ------------------------------------------------------------------ the parties


def answer_after(world: World, handoff: str, delay_s: float) -> int:
    """One part whose notice is answered after a while; how often the notice was sent again."""
    world.submit_prefill(handoff)
    world.submit_decode(handoff, patience_s=1000.0)
    world.run_messages()
    world.compute(handoff)
    world.land()
    world.observe()
    rank, timer, again = world.parties["p0"], ("notice", "d0"), 0
    answer_at = world.now + delay_s
    held = list(world.wire)
    world.wire.clear()
    while (due := rank.timers.get(timer, answer_at)) < answer_at:
        world.now = max(world.now, due)
        world.do("p0", lambda p: p.handle_timer(world.now))
        again += sum(message.sender.name == "p0" for message in world.wire)
        world.wire.clear()
    world.now = answer_at
    world.wire += held
    world.run()
    return again


def test_a_notice_waits_as_long_as_its_target_took_to_answer() -> None:
    world = World(layers=1, times=HandoffTimes(lease_s=1000.0))

    again = [answer_after(world, f"h{number}", 6.0) for number in range(12)]

    # Later than `resend_cap_s`: the first ones are sent again, the last ones are not.
    assert again[0] > 2
    assert again[-6:] == [0] * 6


def test_a_notice_waits_no_less_than_before_when_answers_are_quick() -> None:
    world = World(layers=1, times=HandoffTimes(lease_s=1000.0))
    for number in range(6):
        assert answer_after(world, f"h{number}", 0.001) == 0

    world.submit_prefill("last")
    world.submit_decode("last", patience_s=1000.0)
    world.run_messages()
    world.compute("last")
    world.land()
    world.observe()

    due = world.parties["p0"].timers["notice", "d0"]
    assert due - world.now == pytest.approx(world.settings.times.resend_s)


def test_closing_is_measured_and_a_clone_measures_for_itself() -> None:
    world = World().busy()
    decode = world.parties["D"]
    world.run()
    twin = clone(decode)

    assert decode.round_trips["P"].mean_s == 0.0
    assert decode.round_trips["d0"].mean_s == 0.0
    twin.round_trips.clear()
    assert decode.round_trips


def stops_in_two_minutes(world: World, *, talks: bool) -> int:
    """How often a target sends a `Stop` that nobody answers to a source that talks, or does not."""
    world.submit_prefill()
    world.submit_decode()
    world.run()
    world.do("D", lambda d: d.cancel("h", world.now))
    world.deliver(world.wire.index(world.said(msg.DropHandoff)[0]))
    source, target = world.parties["p0"], world.parties["d0"]
    count = 0
    for _ in range(120):
        count += len(world.said(msg.Stop))
        world.wire.clear()
        world.wait(1.0)
        if talks:
            pong = msg.Pong(sender=source.life, target=target.life)
            world.do("d0", lambda d, pong=pong: d.receive(pong, world.now))
    return count


def test_a_source_that_talks_but_answers_late_is_asked_as_seldom_as_the_limit_says() -> None:
    # Seeds 64368 and 61318 of the simulator: over a link of 20 messages a second, no answer came
    # before all of those in front of it, and meanwhile every resend made the queue longer.
    times = HandoffTimes(lease_s=1000.0)

    silent = stops_in_two_minutes(World(times=times), talks=False)
    talking = stops_in_two_minutes(World(times=times), talks=True)

    assert silent >= 120.0 / times.resend_cap_s
    assert talking <= 8 + 120.0 / times.resend_limit_s  # 0.25 s doubles to 30 s in seven resends.
