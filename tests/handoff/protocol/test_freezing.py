"""Machines can be copied and compared: clones share nothing, and time leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.handoff_machines import books_of, clone, freeze, introduce
from penstock.handoff.protocol.identity import Identity, Life
from penstock.handoff.protocol.messages import Ping, Refused
from tests.handoff.protocol.conftest import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.messages import AnyMessage
    from penstock.handoff.protocol.party import Party


def begun(world: World) -> World:
    world.submit_prefill()
    world.submit_decode(wanted=world.everything())
    world.run_messages()
    world.do("p0", lambda p: p.progress("h", layer=0, tokens=4, now=world.now))
    world.land()
    return world


def test_a_clone_goes_its_own_way() -> None:
    world = begun(World(2, 2))
    clones = {name: clone(party) for name, party in world.parties.items()}
    before = {name: freeze(party) for name, party in world.parties.items()}

    world.compute()
    world.run()

    assert {name: freeze(twin) for name, twin in clones.items()} == before
    assert all(freeze(world.parties[name]) != frozen for name, frozen in before.items())


def test_a_clone_behaves_like_the_original() -> None:
    world = begun(World(2, 2))
    copy = begun(World(2, 2))
    copy.parties = {name: clone(party) for name, party in copy.parties.items()}

    for each in (world, copy):
        each.compute()
        each.run()

    assert copy.ended == world.ended
    assert {n: freeze(p) for n, p in copy.parties.items()} == {
        n: freeze(p) for n, p in world.parties.items()
    }


def test_time_leaves_no_trace_in_a_frozen_state() -> None:
    early, late = World(2, 2), World(2, 2)
    late.now = 1e6

    for world in (early, late):
        begun(world)

    for name in early.names:
        assert freeze(early.parties[name]) == freeze(late.parties[name])
        assert early.parties[name].next_deadline() != late.parties[name].next_deadline() or (
            early.parties[name].next_deadline() is None
        )


def test_a_resend_brings_a_machine_back_to_the_same_state() -> None:
    world = begun(World(2, 2))

    for name, party in world.parties.items():
        for timer in party.armed():
            if timer[0] in ("resend", "notice"):
                before = freeze(party)
                world.do(name, lambda p, t=timer: p.expire(t, world.now))
                assert freeze(party) == before


def test_a_frozen_state_can_be_hashed() -> None:
    world = begun(World(2, 2))

    assert len({freeze(party) for party in world.parties.values()}) == len(world.parties)


def turned(party: Party) -> Party:
    """A machine with the same state, to which everything happened in another order."""
    twin = clone(party)
    for book in books_of(party):
        setattr(twin, book, dict(reversed(getattr(party, book).items())))
    return twin


def answers(party: Party, world: World, heard: list[AnyMessage]) -> dict[str, object]:
    """What a machine does on each input that it may get, and the state after it."""
    inputs: dict[str, Callable[[Party], list[AnyEffect]]] = {}
    for peer in party.peers:
        other = world.parties[peer].identity
        later = Identity(Life(peer, 1000), other.role, other.facts)
        inputs[f"suspect {peer}"] = lambda p, n=peer: p.suspect(n, world.now)
        inputs[f"meet {peer}"] = lambda p, i=later: introduce(p, i, world.now)
        inputs[f"hear {peer} again"] = lambda p, n=peer, i=other: [
            *p.suspect(n, world.now),
            *p.receive(Ping(sender=i.life, target=p.life), world.now),
        ]
        inputs[f"refuse {peer}"] = lambda p, i=other: p.receive(
            Refused(sender=i.life, target=p.life, fact="model", ours="a", theirs="b"), world.now
        )
    for timer in party.armed():
        inputs[f"timer {timer}"] = lambda p, t=timer: p.expire(t, world.now)
    for number, message in enumerate(heard):
        inputs[f"message {number}"] = lambda p, m=message: p.receive(m, world.now)
    done: dict[str, object] = {}
    for name, act in inputs.items():
        twin = clone(party)
        done[name] = (list(act(twin)), freeze(twin))
    return done


@pytest.mark.parametrize("step_count", [0, 10, 25, 45, 70, 100])
def test_machines_that_freeze_alike_do_the_same_in_the_same_order(step_count: int) -> None:
    world = World(2, 2)
    for handoff in ("b", "c", "a"):
        world.submit_prefill(handoff)
        world.submit_decode(handoff, wanted=world.everything())
        world.run_messages()
        world.compute(handoff)
    for step in range(step_count):
        if world.wire and step % 3:
            world.deliver()
        else:
            world.progress_without_messages()

    for name, party in world.parties.items():
        heard = [message for message in world.wire if message.target.name == name]
        twin = turned(party)
        assert freeze(twin) == freeze(party)
        assert answers(twin, world, heard) == answers(party, world, heard)
