"""Anything in any order: a machine of Hypothesis drives the world, and the world's checks hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lab.fixtures.handoff_machines import clone, freeze
from penstock.handoff.protocol.states import DecodeState, HandoffOutcome, PrefillState
from tests.handoff.protocol.conftest import World

HANDOFFS = ("a", "b")
numbers = st.integers(0, 1 << 16)
handoffs = st.sampled_from(HANDOFFS)


class Orders(RuleBasedStateMachine):
    """Two handoffs between two engines in which everything can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World
        self.stray: list[object] = []
        """Writes that failed, and may land yet."""
        self.epochs = dict.fromkeys(HANDOFFS, 0)
        self.has_token: set[str] = set()
        self.restarted = False

    @initialize(
        source_count=st.integers(1, 2),
        target_count=st.integers(1, 2),
        layers=st.integers(1, 2),
        full=st.booleans(),
    )
    def begin(self, source_count: int, target_count: int, layers: int, *, full: bool) -> None:
        self.world = World(source_count, target_count, layers=layers, tokens=2)
        self.wanted = self.world.everything() if full else self.world.diagonal()

    # The two engines.

    @rule(handoff=handoffs)
    def submit_prefill(self, handoff: str) -> None:
        prefill = self.world.parties["P"]
        known = prefill.prefills.get(handoff)
        fresh = known is None or known.state is PrefillState.AWAITED
        if fresh and (handoff,) not in prefill.remembered and not self.restarted:
            self.world.submit_prefill(handoff)

    @rule(handoff=handoffs, number=numbers)
    def compute_a_layer(self, handoff: str, number: int) -> None:
        world = self.world
        name = world.prefill_names[number % len(world.prefill_names)]
        layer, tokens = number // 2 % world.layers, 1 + number // 4 % 2
        if handoff in world.parties[name].prompts:
            world.do(name, lambda p: p.progress(handoff, layer=layer, tokens=tokens, now=0.0))

    @rule(handoff=handoffs)
    def sample_the_first_token(self, handoff: str) -> None:
        known = self.world.parties["P"].prefills.get(handoff)
        if known is not None and known.state is PrefillState.COMPUTING:
            self.has_token.add(handoff)
            self.world.do("P", lambda p: p.first_token(handoff, 0.0, tokens=(1,)))

    @rule(handoff=handoffs)
    def submit_decode(self, handoff: str) -> None:
        decode = self.world.parties["D"]
        ends = [e.outcome for e in self.world.ended["D"] if e.handoff == handoff]
        again = not ends or ends[-1] is HandoffOutcome.WITHDRAWN
        if handoff not in decode.claimed and again and self.epochs[handoff] < 3:
            self.epochs[handoff] += 1
            self.world.submit_decode(handoff, epoch=self.epochs[handoff], wanted=self.wanted)

    @rule(handoff=handoffs, whole=st.booleans())
    def give_up(self, handoff: str, *, whole: bool) -> None:
        claimed = self.world.parties["D"].claimed.get(handoff)
        if claimed is not None and claimed.state is not DecodeState.CLOSING:
            self.world.do(
                "D", lambda d: d.cancel(handoff, 0.0) if whole else d.withdraw(handoff, 0.0)
            )

    @rule(handoff=handoffs)
    def cancel_prefill(self, handoff: str) -> None:
        known = self.world.parties["P"].prefills.get(handoff)
        if known is not None and known.state is not PrefillState.AWAITED:
            self.world.do("P", lambda p: p.cancel(handoff, 0.0))

    # The world between them. What is usual has more rules than what is not.

    @precondition(lambda self: self.world.wire)
    @rule(number=numbers)
    def deliver(self, number: int) -> None:
        self.world.deliver(number % len(self.world.wire))

    @precondition(lambda self: self.world.wire)
    @rule()
    def deliver_the_oldest(self) -> None:
        self.world.deliver()

    @precondition(lambda self: self.world.wire)
    @rule()
    def deliver_all(self) -> None:
        self.world.run_messages()

    @precondition(lambda self: self.world.posted)
    @rule(number=numbers)
    def land(self, number: int) -> None:
        self.world.land(number % len(self.world.posted))

    @precondition(lambda self: self.world.landed)
    @rule(number=numbers)
    def observe(self, number: int) -> None:
        self.world.observe(number % len(self.world.landed))

    @precondition(lambda self: self.world.takes)
    @rule(number=numbers, spoil=st.integers(0, 9))
    def take(self, number: int, spoil: int) -> None:
        self.world.take(number % len(self.world.takes), corrupt=spoil == 9)

    # What goes wrong.

    @precondition(lambda self: self.world.wire)
    @rule(number=numbers, again=st.booleans())
    def lose_or_repeat(self, number: int, *, again: bool) -> None:
        index = number % len(self.world.wire)
        if again:
            self.world.deliver(index, keep=True)
        else:
            self.world.lose(index)

    @precondition(lambda self: self.world.posted)
    @rule(number=numbers)
    def fail_a_write(self, number: int) -> None:
        self.stray.append(self.world.fail_write(number % len(self.world.posted)))

    @precondition(lambda self: self.stray)
    @rule(number=numbers)
    def land_a_failed_write(self, number: int) -> None:
        self.world.put(self.stray.pop(number % len(self.stray)))

    @precondition(lambda self: self.world.fences)
    @rule(number=numbers)
    def hold_a_fence(self, number: int) -> None:
        world = self.world
        index = number % len(world.fences)
        name, fence = world.fences[index]
        area = (name, fence.peer, fence.generation)
        self.stray = [write for write in self.stray if world.area_of(write) != area]
        world.fence_holds(index)

    @rule(number=numbers)
    def expire_a_timer(self, number: int) -> None:
        timers = [(n, key) for n in self.world.names for key in self.world.parties[n].armed()]
        if timers:
            name, key = timers[number % len(timers)]
            self.world.expire(name, *key)

    @rule(number=numbers)
    def suspect(self, number: int) -> None:
        pairs = [
            (name, peer)
            for name in self.world.names
            for peer in sorted(self.world.parties[name].peers)
            if peer not in self.world.colleagues(name)
        ]
        name, peer = pairs[number % len(pairs)]
        self.world.do(name, lambda p: p.suspect(peer, 0.0))

    @precondition(lambda self: not self.restarted)
    @rule(number=numbers)
    def crash_a_rank(self, number: int) -> None:
        world = self.world
        ranks = (*world.prefill_names, *world.decode_names)
        name = ranks[number % len(ranks)]
        self.restarted = True
        world.crash(name)
        world.start(name)
        world.introduce("P" if name[0] == "p" else "D", name)

    @invariant()
    def machines_can_be_told_apart(self) -> None:
        for party in self.world.parties.values():
            assert freeze(clone(party)) == freeze(party)

    def teardown(self) -> None:
        """When all faults are over, everything ends, once."""
        world = getattr(self, "world", None)
        if world is None:
            return
        for _ in range(300):
            world.run()
            while world.fences:
                world.fence_holds()
            for name in world.prefill_names:
                for handoff in [*world.parties[name].prompts]:
                    world.do(name, lambda p, h=handoff: p.chunk_progress(h, tokens=2, now=0.0))
            world.run()
            world.wait(1.0)
            if not world.wire and not any(party.timers for party in world.parties.values()):
                break
        world.check_over()
        for name in world.decode_names:
            assert world.parties[name].retired_bytes == 0


@pytest.mark.parametrize("lives", [50, pytest.param(300, marks=pytest.mark.long)])
def test_p2_everything_ends_once_in_any_order(lives: int) -> None:
    run_state_machine_as_test(
        Orders,
        settings=settings(
            max_examples=lives,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
