"""Heartbeats: who is asked, who is suspected, and when (P20)."""

from __future__ import annotations

from penstock.handoff.protocol.party import Liveness, SilentPeers
from penstock.handoff.protocol.settings import HandoffTimes

TIMES = HandoffTimes(ping_s=1.0, suspect_s=3.0)


def test_a_peer_that_is_heard_is_neither_asked_nor_suspected() -> None:
    liveness = Liveness(TIMES)
    liveness.watch(["p0"], 0.0)

    verdicts = []
    for tick in range(1, 10):
        liveness.record_message("p0", tick * 0.9)
        verdicts.append(liveness.handle_timer(tick * 0.9 + 0.5))

    assert set(verdicts) == {SilentPeers((), ())}


def test_p20_a_silent_peer_is_asked_and_then_suspected_once() -> None:
    liveness = Liveness(TIMES)
    liveness.watch(["p0", "p1"], 0.0)

    story = []
    for tick in range(1, 6):
        liveness.record_message("p1", float(tick))
        story.append(liveness.handle_timer(float(tick)))

    assert story == [
        SilentPeers(("p0",), ()),
        SilentPeers(("p0",), ()),
        SilentPeers(("p0",), ("p0",)),
        SilentPeers(("p0",), ()),
        SilentPeers(("p0",), ()),
    ]


def test_a_suspected_peer_that_is_heard_can_be_suspected_again() -> None:
    liveness = Liveness(TIMES)
    liveness.watch(["p0"], 0.0)
    assert liveness.handle_timer(3.0).suspect == ("p0",)

    liveness.record_message("p0", 4.0)

    assert liveness.handle_timer(6.9).suspect == ()
    assert liveness.handle_timer(7.0).suspect == ("p0",)


def test_the_next_deadline_is_the_earliest_question_or_suspicion() -> None:
    liveness = Liveness(TIMES)
    assert liveness.next_deadline() is None

    liveness.watch(["p0", "p1"], 10.0)
    deadlines = [liveness.next_deadline()]
    for now in (11.0, 12.0, 13.0):
        liveness.handle_timer(now)
        deadlines.append(liveness.next_deadline())

    assert deadlines == [11.0, 12.0, 13.0, 14.0]


def test_peers_that_do_not_matter_are_forgotten() -> None:
    liveness = Liveness(TIMES)
    liveness.watch(["p0", "p1"], 0.0)

    liveness.watch(["p1"], 1.0)
    liveness.record_message("p0", 1.0)

    assert liveness.handle_timer(3.0) == SilentPeers(("p1",), ("p1",))
