"""Who speaks to whom: lives, strangers, misfits (P4, P5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.handoff_machines import freeze, introduce
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Identity, Life, facts_of, misfit
from penstock.handoff.protocol.settings import HandoffSettings
from penstock.handoff.protocol.states import Role
from tests.handoff.protocol.conftest import World


def strangers() -> World:
    """Colleagues know each other, peers do not."""
    world = World(2, 2, acquainted=False)
    for scheduler, ranks in (("P", world.prefill_names), ("D", world.decode_names)):
        for rank in ranks:
            world.introduce(scheduler, rank)
    return world


def hello_of(identity: Identity, target: Life) -> msg.Hello:
    return msg.Hello(
        sender=identity.life, target=target, role=identity.role.value, facts=identity.facts
    )


def test_p5_peers_greet_each_other_before_anything_else() -> None:
    world = strangers()
    world.submit_prefill()
    world.compute()
    kinds: list[type] = []

    world.submit_decode()
    while world.wire:
        message = world.wire[0]
        if world.colleagues(message.sender.name) != world.colleagues(message.target.name):
            kinds.append(type(message))
        world.deliver()
    world.run()

    assert set(kinds[:6]) == {msg.Hello, msg.Welcome}
    assert world.outcome("D") == ["delivered"]
    world.check_over()


@pytest.mark.parametrize("party", ["P", "p1"])
def test_p5_a_misfit_fails_the_handoff_with_both_values(party: str) -> None:
    world = strangers()
    machine = world.parties[party]
    machine.identity = machine.identity._replace(facts=facts_of(model="toy", weights="v2"))

    world.submit_decode()
    world.run()

    assert [e.outcome.value for e in world.ended["D"]] == ["failed_over"]
    assert world.ended["D"][0].why == "refused: weights is 'v1' here and 'v2' there"
    assert machine.counts["refused: misfit"] == 1


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ({"version": 9}, "version is '2' here and '9' there"),
        ({"role": Role.DECODE_RANK}, "role is 'prefill scheduler' here and 'decode rank' there"),
        (
            {"facts": facts_of(model="other", weights="v1")},
            "model is 'toy' here and 'other' there",
        ),
        (
            {"facts": facts_of(model="toy", weights="v1", form=(("dtype", "fp8"),))},
            "dtype is '(absent)' here and 'fp8' there",
        ),
        (
            {"facts": (("weights", "v1"), ("model", "toy"))},
            "facts is \"(('model', 'toy'), ('weights', 'v1'))\" here "
            "and \"(('weights', 'v1'), ('model', 'toy'))\" there",
        ),
    ],
)
def test_p5_a_misfit_names_what_differs(theirs: dict[str, object], difference: str) -> None:
    facts = facts_of(model="toy", weights="v1")
    ours = Identity(Life("P", 1), Role.PREFILL_SCHEDULER, facts)
    other = Identity(Life("D", 2), Role.DECODE_SCHEDULER, facts)._replace(**theirs)

    assert str(misfit(ours, other)) == difference


def test_p5_a_peer_of_another_version_fails_the_handoff_with_both() -> None:
    world = strangers()
    world.submit_decode()

    world.do("D", lambda d: d.refuse_version("P", 0.0, version=9))
    world.wire = [m for m in world.wire if m.target.name != "P"]
    world.run()

    assert world.ended["D"][0].why == "refused: version is '2' here and '9' there"


def test_p5_a_peer_that_answers_with_other_facts_is_refused() -> None:
    world = strangers()
    world.submit_decode()
    while not any(isinstance(m, msg.Hello) and m.target.name == "P" for m in world.wire):
        world.deliver()
    forged = msg.Welcome(
        sender=world.parties["P"].life,
        target=world.parties["D"].life,
        role="prefill scheduler",
        facts=facts_of(model="toy", weights="v9"),
    )

    world.do("D", lambda d: d.receive(forged, 0.0))
    world.wire = [m for m in world.wire if m.target.name != "P"]
    world.run()

    assert world.ended["D"][0].why == "refused: weights is 'v1' here and 'v9' there"


def test_p4_a_message_for_an_earlier_life_is_refused_and_answered_with_hello() -> None:
    world = World()
    world.submit_decode()
    world.start("d0")

    world.deliver()

    assert world.parties["d0"].counts == {"refused: for an earlier life": 1}
    assert isinstance(world.wire[-1], msg.Hello)
    assert world.wire[-1].target == world.parties["D"].life


def test_p4_a_message_from_an_earlier_life_is_refused() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    world.compute()
    while not world.posted:
        world.deliver()
    world.land()
    late = next(m for m in world.wire if isinstance(m, msg.Landed))
    world.start("p0")
    world.acquaint("p0")

    world.do("d0", lambda d: d.receive(late, 0.0))

    assert world.parties["d0"].counts["refused: from another life"] == 1
    assert not world.takes


def test_p4_a_source_that_starts_again_is_another_life() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    while not any(isinstance(m, msg.Claim) for m in world.wire):
        world.deliver()
    world.crash("p0")
    world.start("p0")
    world.introduce("P", "p0")

    world.run()

    assert world.outcome("D") == world.outcome("P") == ["failed_over"]
    assert world.parties["d0"].retired_bytes == 2048
    assert world.parties["d0"].life_of("p0") == world.parties["p0"].life
    world.check_over()


def test_p4_an_earlier_life_does_not_come_back() -> None:
    world = World()
    first = world.parties["p0"].identity
    world.start("p0")
    world.acquaint("p0")

    world.do("d0", lambda d: d.receive(hello_of(first, d.life), 0.0))

    assert world.parties["d0"].life_of("p0") == world.parties["p0"].life
    with pytest.raises(ValueError, match="is an earlier life of"):
        introduce(world.parties["d0"], first, 0.0)


def test_p4_a_late_hello_of_a_life_never_heard_of_does_not_bury_the_present_one() -> None:
    world = World()
    first = world.parties["d0"].identity
    for name in ("d0", "p0"):
        world.start(name)
    world.introduce("d0", "p0")
    present = world.parties["d0"].identity

    world.do("p0", lambda p: p.receive(hello_of(first, p.life), 0.0))
    world.run_messages()

    assert world.parties["p0"].life_of("d0") == present.life
    assert world.parties["p0"].is_open("d0")
    introduce(world.parties["p0"], present, 0.0)


def test_p4_a_next_life_is_met_when_it_has_answered() -> None:
    world = World()
    before = world.parties["d0"].life
    world.start("d0")
    reborn = world.parties["d0"].identity

    world.do("p0", lambda p: p.receive(hello_of(reborn, p.life), 0.0))
    known_at_first = world.parties["p0"].life_of("d0")
    world.run_messages()

    assert known_at_first == before
    assert world.parties["p0"].life_of("d0") == reborn.life
    assert world.parties["d0"].life_of("p0") == world.parties["p0"].life


def test_p4_two_parties_that_both_started_again_find_each_other() -> None:
    world = World()
    for name in ("d0", "p0"):
        world.start(name)
        identity = world.parties[name].identity
        other = "p0" if name == "d0" else "d0"
        world.do(other, lambda p, i=identity: p.receive(hello_of(i, p.life), 0.0))

    world.run_messages()

    assert world.parties["p0"].life_of("d0") == world.parties["d0"].life
    assert world.parties["d0"].life_of("p0") == world.parties["p0"].life


def test_p4_an_answer_from_before_the_present_life_was_met_is_asked_for_again() -> None:
    world = World()
    machine = world.parties["p0"]
    present = machine.life_of("d0")
    late = msg.Welcome(
        sender=Life("d0", 77),
        target=machine.life,
        role="decode rank",
        facts=machine.identity.facts,
        known=0,
    )

    world.do("p0", lambda p: p.receive(late, 0.0))

    assert machine.life_of("d0") == present
    (asked,) = world.said(msg.Hello)
    assert asked.known == present.incarnation
    assert machine.counts == {"refused: answers an earlier question": 1}


def test_p4_a_colleague_that_was_seen_dead_is_not_heard() -> None:
    world = World()
    world.submit_decode()
    world.run()
    report = msg.HandoffReport(
        sender=world.parties["d0"].life,
        target=world.parties["D"].life,
        handoff="h",
        epoch=1,
        report=msg.ReportStatus.COMPLETE,
    )
    world.crash("d0")

    world.do("D", lambda d: d.receive(report, 0.0))

    assert world.parties["D"].counts["refused: from the dead"] == 1
    assert not world.parties["D"].is_open("d0")


def test_p4_a_ping_is_answered() -> None:
    world = World()
    ping = msg.Ping(sender=world.parties["D"].life, target=world.parties["P"].life)

    world.do("P", lambda p: p.receive(ping, 0.0))
    world.run()

    assert world.parties["D"].counts == {}


def test_p4_a_machine_has_the_role_it_says() -> None:
    identity = World().parties["d0"].identity

    with pytest.raises(ValueError, match="role is 'decode rank', must be 'decode scheduler'"):
        DecodeScheduler(identity, HandoffSettings(), ranks=("a",))


NAMES = ("P", "p0", "D", "d0", "d7", "")
lives = st.builds(Life, st.sampled_from(NAMES), st.integers(0, 6))
grids = st.builds(Grid, *[st.integers(0, 3)] * 4, *[st.integers(0, 2)] * 3, st.integers(0, 2000))
fields = {
    "sender": lives,
    "target": lives,
    "handoff": st.sampled_from(["h", "x"]),
    "epoch": st.integers(0, 3),
    "grid": grids,
    "generation": st.integers(0, 3),
    "berth": st.integers(-1, 4),
    "berth_count": st.integers(-1, 1 << 40),
    "berth_bytes": st.integers(0, 4096),
    "part": st.integers(-1, 9),
    "attempt": st.integers(-1, 9),
    "have": st.binary(max_size=2),
    "spoiled": st.lists(st.binary(max_size=1), max_size=3).map(tuple),
    "sources": st.lists(st.tuples(st.sampled_from(NAMES), grids), max_size=3).map(tuple),
    "tokens": st.lists(st.integers(0, 9), max_size=2).map(tuple),
    "outcome": st.sampled_from(list(msg.HandoffOutcome)),
    "report": st.sampled_from(list(msg.ReportStatus)),
    "poisoned": st.booleans(),
    "known": st.integers(0, 6),
    "role": st.sampled_from([role.value for role in Role] + ["cook"]),
    "why": st.just("why"),
    "fact": st.just("fact"),
    "ours": st.just("ours"),
    "theirs": st.just("theirs"),
}


def of_kind(kind: type[msg.Message]) -> st.SearchStrategy[msg.Message]:
    return st.builds(
        kind, **{name: fields[name] for name in kind.__struct_fields__ if name in fields}
    )


@given(said=st.lists(st.one_of([of_kind(kind) for kind in msg.AnyMessage.__args__]), max_size=20))
def test_p4_nothing_that_a_peer_says_raises(said: list[msg.AnyMessage]) -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    world.do("p0", lambda p: p.progress("h", layer=0, tokens=4, now=0.0))

    for message in said:
        for party in world.parties.values():
            party.receive(message, 1.0)

    assert all(isinstance(hash(freeze(party)), int) for party in world.parties.values())


def test_p4_a_stop_of_a_dead_target_is_not_answered_to_its_next_life() -> None:
    world = World().busy()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run_messages()
    assert world.parties["p0"].stops

    world.start("d0")
    world.introduce("p0", "d0")
    assert not world.parties["p0"].stops
    world.wire.clear()
    while world.posted:
        world.end_badly(world.posted.pop())

    assert not world.said(msg.Stopped)


def test_p15_a_stop_of_a_next_life_does_not_wait_for_writes_to_the_earlier_one() -> None:
    world = World().busy()
    world.start("d0")
    world.introduce("p0", "d0")
    world.introduce("D", "d0")
    world.wire.clear()
    assert len(world.posted) == 2

    stop = msg.Stop(
        sender=world.parties["d0"].life,
        target=world.parties["p0"].life,
        handoff="h",
        epoch=1,
    )
    world.do("p0", lambda p: p.receive(stop, world.now))

    assert [stopped.target for stopped in world.said(msg.Stopped)] == [stop.sender]
