"""Machines can be copied and compared: clones share nothing, and time leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.handoff.protocol.conftest import World


def begun(world: World) -> World:
    world.submit_prefill()
    world.submit_decode(wanted=world.everything())
    world.run_messages()
    world.do("p0", lambda p: p.progress("h", layer=0, tokens=4, now=world.now))
    world.land()
    return world


def test_a_clone_goes_its_own_way(make_world: type[World]) -> None:
    world = begun(make_world(2, 2))
    clones = {name: party.clone() for name, party in world.parties.items()}
    before = {name: party.freeze() for name, party in world.parties.items()}

    world.compute()
    world.run()

    assert {name: clone.freeze() for name, clone in clones.items()} == before
    assert all(world.parties[name].freeze() != frozen for name, frozen in before.items())


def test_a_clone_behaves_like_the_original(make_world: type[World]) -> None:
    world = begun(make_world(2, 2))
    copy = begun(make_world(2, 2))
    copy.parties = {name: party.clone() for name, party in copy.parties.items()}

    for each in (world, copy):
        each.compute()
        each.run()

    assert copy.ended == world.ended
    assert {n: p.freeze() for n, p in copy.parties.items()} == {
        n: p.freeze() for n, p in world.parties.items()
    }


def test_time_leaves_no_trace_in_a_frozen_state(make_world: type[World]) -> None:
    early, late = make_world(2, 2), make_world(2, 2)
    late.now = 1e6

    for world in (early, late):
        begun(world)

    for name in early.names:
        assert early.parties[name].freeze() == late.parties[name].freeze()
        assert early.parties[name].next_deadline() != late.parties[name].next_deadline() or (
            early.parties[name].next_deadline() is None
        )


def test_a_resend_brings_a_machine_back_to_the_same_state(make_world: type[World]) -> None:
    world = begun(make_world(2, 2))

    for name, party in world.parties.items():
        for timer in party.armed():
            if timer[0] in ("resend", "notice"):
                before = party.freeze()
                world.do(name, lambda p, t=timer: p.expire(t, world.now))
                assert party.freeze() == before


def test_a_frozen_state_can_be_hashed(make_world: type[World]) -> None:
    world = begun(make_world(2, 2))

    assert len({party.freeze() for party in world.parties.values()}) == len(world.parties)
