"""Every handoff ends once, whatever happens when (P2), and nothing is beyond its bounds (P23)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lab.fixtures.handoff_machines import freeze, sizes
from penstock.errors import CapacityError, UnavailableError
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Life
from penstock.handoff.protocol.settings import HandoffBounds
from tests.handoff.protocol.conftest import World

STEPS = 60
"""A handoff in the world below is over after fewer."""
SMALL = HandoffBounds(
    berth_bytes=1024, berth_count=2, landing_bytes_max=1 << 20, retired_bytes_max=8192
)


def begun() -> World:
    world = World(2, 2)
    world.submit_prefill()
    world.submit_decode(wanted=world.everything())
    world.compute()
    return world


def steps(world: World, count: int) -> None:
    """So many things happen, in order."""
    for _ in range(count):
        if world.wire:
            world.deliver()
        elif not world.progress_without_messages():
            break


def is_open(world: World, name: str) -> bool:
    machine = world.parties[name]
    known = machine.claimed if name == "D" else machine.prefills
    return "h" in known and not [e for e in world.ended[name] if e.handoff == "h"]


@pytest.mark.parametrize("step", range(0, STEPS, 2))
@pytest.mark.parametrize("sides", ["D", "P", "DP", "PD"])
def test_p2_a_cancel_from_either_side_at_any_time_ends_both(step: int, sides: str) -> None:
    world = begun()
    steps(world, step)

    for side in sides:
        if is_open(world, side):
            world.do(side, lambda p: p.cancel("h", world.now))
    world.drive(20)

    for side in ("D", "P"):
        assert world.outcome(side)[0] in {"cancelled", "delivered", "failed_over"}
    world.check_over()


@pytest.mark.parametrize("step", range(0, STEPS, 2))
@pytest.mark.parametrize("name", ["p0", "d1", "P", "D"])
def test_p2_a_crash_at_any_time_ends_the_handoff_on_the_side_that_lives(
    step: int, name: str
) -> None:
    world = begun()
    steps(world, step)

    world.crash(name)
    del world.parties[name]
    for _ in range(13):
        # Messages that were on their way make it look alive again, for a while.
        for other, party in world.parties.items():
            if other not in world.colleagues(name) and name in party.peers:
                world.do(other, lambda p: p.suspect(name, world.now))
        world.drive(10)

    for side in {"P", "D"} - {name}:
        assert len(world.ended[side]) == 1, side
        machine = world.parties[side]
        assert not (machine.prefills if side == "P" else machine.claimed)
    for other in {"d0", "d1", "p0", "p1"} - {name}:
        machine = world.parties[other]
        assert not (machine.collections if other[0] == "d" else machine.prompts)


def test_p2_a_handoff_that_decode_closed_before_it_came_ends_at_once() -> None:
    world = World()
    world.submit_decode()
    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run()

    world.submit_prefill(admit=False)
    world.run()

    assert world.outcome("P") == world.outcome("D") == ["cancelled"]
    world.check_over()


def test_p2_a_withdrawal_can_still_become_a_cancel() -> None:
    world = begun()
    steps(world, 12)
    world.do("D", lambda d: d.withdraw("h", 0.0))

    world.do("D", lambda d: d.cancel("h", 0.0))
    world.run()

    assert world.outcome("D") == world.outcome("P") == ["cancelled"]
    world.check_over()


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda w: w.parties["D"].cancel("x", 0.0), "'x', which is not known"),
        (lambda w: w.parties["D"].withdraw("x", 0.0), "'x', which is not known"),
        (
            lambda w: w.parties["D"].submit("h", 0.0, prefill="P", wanted={}),
            "'h', which is claiming",
        ),
        (
            lambda w: w.parties["D"].submit("x", 0.0, prefill="P", wanted={"d9": ()}),
            r"wanted is for \['d9'\]",
        ),
        (
            lambda w: w.parties["D"].submit("x", 0.0, prefill="P", wanted={}, patience_s=0),
            "patience_s is 0, must be > 0",
        ),
        (
            lambda w: w.parties["D"].submit(
                "x", 0.0, prefill="P", wanted={"d0": (("p0", Grid(0, 0, 0, 1)),)}
            ),
            "grid of 0 layers and 1 block is empty",
        ),
        (lambda w: w.parties["P"].submit("h", 0.0), "'h', which is empty or known already"),
        (lambda w: w.parties["P"].submit("x", 0.0, lease_s=-1), "lease_s is -1, must be > 0"),
        (lambda w: w.parties["P"].cancel("x", 0.0), "'x', which was not submitted"),
        (
            lambda w: w.parties["P"].first_token("x", 0.0, tokens=(1,)),
            "'x', which was never submitted",
        ),
        (lambda w: w.parties["P"].first_token("h", 0.0, tokens=()), r"tokens is \(\), must be"),
        (lambda w: w.parties["P"].first_token("h", 0.0, tokens=(1,)), "'h', which is ready"),
        (
            lambda w: w.parties["p0"].admit("h", token_count=4, layers=range(2), now=0.0),
            "'h', which was admitted already",
        ),
        (
            lambda w: w.parties["p0"].admit("x", token_count=0, layers=range(2), now=0.0),
            "need tokens and layers, got 0",
        ),
        (
            lambda w: w.parties["p0"].progress("x", layer=0, tokens=1, now=0.0),
            "'x', which was never admitted",
        ),
        (
            lambda w: w.parties["p0"].progress("h", layer=2, tokens=1, now=0.0),
            "layer is 2, must be from 0 to 1",
        ),
        (
            lambda w: w.parties["p0"].progress("h", layer=0, tokens=9, now=0.0),
            "tokens is 9, must be from 0 to 4",
        ),
        (lambda w: w.parties["D"].expire(("lease", "h"), 0.0), "does not run, only"),
        (lambda w: w.parties["D"].suspect("x", 0.0), "name is 'x', must be one of"),
    ],
)
def test_p2_wrong_local_input_raises_and_changes_nothing(act: object, problem: str) -> None:
    world = begun()
    before = {name: freeze(party) for name, party in world.parties.items()}

    with pytest.raises(ValueError, match=problem):
        act(world)

    assert {name: freeze(party) for name, party in world.parties.items()} == before


def test_p2_work_is_refused_while_a_rank_is_lost() -> None:
    world = World(2, 2)
    for name in ("p1", "d1"):
        world.crash(name)

    with pytest.raises(UnavailableError, match=r"ranks \['d1'\] are not there"):
        world.parties["D"].submit("h", 0.0, prefill="P", wanted={})
    with pytest.raises(UnavailableError, match=r"ranks \['p1'\] are not there"):
        world.parties["P"].submit("h", 0.0)


# ------------------------------------------------------------------ bounds


def test_p23_beyond_the_bound_a_submit_is_refused_and_changes_nothing() -> None:
    world = World(bounds=replace(SMALL, handoff_count_max=2))
    for handoff in ("a", "b"):
        world.submit_prefill(handoff)
        world.submit_decode(handoff)
    before = (freeze(world.parties["D"]), freeze(world.parties["P"]))

    with pytest.raises(CapacityError):
        world.parties["D"].submit("c", 0.0, prefill="P", wanted={})
    with pytest.raises(CapacityError):
        world.parties["P"].submit("c", 0.0)

    assert (freeze(world.parties["D"]), freeze(world.parties["P"])) == before


def test_p23_a_rank_collects_no_more_handoffs_than_the_bound() -> None:
    world = World(bounds=replace(SMALL, handoff_count_max=2))
    for handoff in ("a", "b"):
        world.submit_decode(handoff)
    expect = next(m for m in world.wire if isinstance(m, msg.Expect))
    world.run()

    world.do("d0", lambda d: d.receive(msgspec.structs.replace(expect, handoff="c"), 0.0))

    assert sorted(handoff for handoff, _ in world.parties["d0"].collections) == ["a", "b"]
    assert world.parties["d0"].counts["refused: too many handoffs"] == 1


def test_p23_parked_claims_and_questions_are_bounded() -> None:
    world = World(bounds=replace(SMALL, parked_count_max=2))

    for n in range(5):
        world.submit_decode(f"h{n}")
    world.run()

    assert sizes(world.parties["p0"])["wants"] == 2
    assert sizes(world.parties["P"])["awaited"] == 2
    assert world.parties["p0"].counts["refused: no room to park a claim"] == 3


def test_p23_strangers_beyond_the_bound_are_refused() -> None:
    world = World(bounds=replace(SMALL, peer_count_max=2))
    machine = world.parties["d0"]
    before = freeze(machine)

    for n in range(3):
        hello = msg.Hello(
            sender=Life(f"p{n + 7}", 1),
            target=machine.life,
            role="prefill rank",
            facts=machine.identity.facts,
        )
        assert machine.receive(hello, 0.0) == []

    assert machine.counts == {"refused: too many peers": 3}
    assert freeze(machine) == before


def test_p23_a_claim_that_found_no_room_is_made_again() -> None:
    world = World(bounds=replace(SMALL, parked_count_max=1))
    for handoff in ("a", "b"):
        world.submit_decode(handoff)
    world.run()

    for handoff in ("a", "b"):
        world.submit_prefill(handoff)
        world.compute(handoff)
    world.drive(10)

    assert world.outcome("D") == ["delivered"] * 2


def test_p23_a_peer_without_an_area_fails_over_at_once() -> None:
    world = World(2, 1, bounds=replace(SMALL, landing_bytes_max=2048, retired_bytes_max=2048))
    world.submit_decode("a", wanted={"d0": (("p0", world.grid()),)})
    world.submit_decode("b", wanted={"d0": (("p1", world.grid()),)})

    world.run()

    assert [(e.handoff, e.outcome.value) for e in world.ended["D"]] == [("b", "failed_over")]


def test_p23_the_ends_of_handoffs_are_remembered_within_a_bound() -> None:
    world = World(bounds=replace(SMALL, remembered_count=3))

    for n in range(8):
        world.submit_prefill(f"h{n}")
        world.compute(f"h{n}")
        world.submit_decode(f"h{n}")
        world.run()

    assert world.outcome("D") == ["delivered"] * 8
    assert {len(party.remembered) for party in world.parties.values()} == {3}


def test_p23_a_part_that_does_not_fit_a_berth_fails_over() -> None:
    world = World()

    world.submit_decode(wanted={"d0": (("p0", world.grid(part_bytes=4096)),)})
    world.run()

    assert world.ended["D"][0].why == "parts have 4096 bytes, a berth has 1024"


def test_p23_a_claim_beyond_the_prompt_is_refused() -> None:
    world = World()
    world.submit_prefill()

    world.submit_decode(wanted={"d0": (("p0", world.grid(block_count=9)),)})
    world.compute()
    world.run()

    assert not world.posted
    assert world.parties["p0"].counts["refused: claim beyond the prompt"] == 1


def test_p23_a_parked_claim_beyond_the_prompt_is_refused_when_that_comes() -> None:
    world = World()
    world.submit_decode(wanted={"d0": (("p0", world.grid(block_count=9)),)})
    world.run()

    world.submit_prefill()

    assert sizes(world.parties["p0"])["wants"] == 0


def test_p23_a_close_without_an_answer_is_given_up() -> None:
    world = begun()
    world.do("D", lambda d: d.cancel("h", 0.0))

    for _ in range(60):
        world.wire = [m for m in world.wire if not isinstance(m, msg.Close)]
        world.run()
        world.wire = [m for m in world.wire if not isinstance(m, msg.Close)]
        world.wait(1.0)

    assert not world.parties["D"].claimed
    assert world.outcome("D") == ["cancelled"]
