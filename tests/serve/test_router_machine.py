"""A router beside instances that join, leave, die and change roles: every request ends.

Instances answer what they are sent, in any order, or fail. After each step: a request is at one
instance that answers, at most two prefill instances were tried for each attempt, pairs stay within
their bounds, and only instances that were told about each other are named in one request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.router import PREFILLS_MAX, Router
from tests.serve.test_router import CONFIG, answered, settled, submit
from tests.serve.test_router_pairs import instance_of

if TYPE_CHECKING:
    from tests.serve.test_router import Instance

PEERS_MAX = 2
BOUNDED = CONFIG + f"[handoff]\npeers_max = {PEERS_MAX}\n"
INSTANCES_MAX = 6
ROLES = st.sampled_from(["prefill", "decode", "both"])
PICKS = st.integers(0, 1 << 16)


class Fake:
    """An instance that knows what it was sent, and checks that it makes sense."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.name = instance.link.name
        self.requests: dict[str, Request] = {}
        self.pairs: set[tuple[str, str]] = set()

    def listen(self) -> None:
        for said in self.instance.received():
            match said:
                case ms.OpenPair(pair=pair):
                    self.pairs.add((pair.prefill.name, pair.decode.name))
                    assert len(self.pairs) <= PEERS_MAX
                case ms.ClosePair(prefill=prefill, decode=decode):
                    self.pairs.discard((prefill, decode))
                case Request(id=name):
                    assert name not in self.requests
                    assert not said.handoff or (said.prefill, said.decode) in self.pairs
                    self.requests[name] = said
                case ms.ChangePrefill(id=name, prefill=prefill):
                    assert name not in self.requests or (prefill, self.name) in self.pairs
                case ms.Abort(id=name):
                    self.requests.pop(name, None)
                case _:
                    pass

    def answer(self, name: str, *, handed: bool) -> None:
        said = self.requests.pop(name)
        handed = handed and bool(said.handoff) and said.decode == self.name
        self.instance.say(
            Output(
                request=name, answer=0, sampled=Sampled(7, 0.0), reason=Reason.LENGTH, handed=handed
            )
        )


class RoutedFleet(RuleBasedStateMachine):
    """Rules are what instances and clients do."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.router: Router
        self.fakes: dict[str, Fake] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.requests = 0
        self.joined = 0

    @initialize(requests=st.integers(0, 4))
    def begin(self, requests: int) -> None:
        self.router = Router()
        for role in ("prefill", "decode", "prefill", "decode", "prefill"):
            self.join(role)
        self.ask(requests)

    def play(self, action: Any = None) -> None:
        """Lets the loop turn until everybody has heard everything."""

        async def turn() -> None:
            if action is not None:
                action()
            for _ in range(3):
                await settled()
                for fake in self.fakes.values():
                    fake.listen()

        self.loop.run_until_complete(turn())

    def pick(self, number: int) -> Fake | None:
        names = sorted(self.fakes)
        return self.fakes[names[number % len(names)]] if names else None

    @rule(role=ROLES)
    def join(self, role: str) -> None:
        if len(self.fakes) >= INSTANCES_MAX:
            return
        self.joined += 1

        def come() -> None:
            name = f"{role}-{self.joined}"
            instance = instance_of(self.router, name, config=BOUNDED, role=role)
            self.fakes[name] = Fake(instance)

        self.play(come)

    @rule(number=PICKS)
    def die(self, number: int) -> None:
        fake = self.pick(number)
        if fake is not None:
            del self.fakes[fake.name]
            self.play(lambda: fake.instance.channel.fail("killed"))

    @rule(number=PICKS)
    def leave(self, number: int) -> None:
        fake = self.pick(number)
        if fake is not None:
            self.play(lambda: fake.instance.say(ms.Leaving()))

    @rule(number=PICKS, role=ROLES)
    def change_role(self, number: int, role: Any) -> None:
        fake = self.pick(number)
        if fake is None:
            return

        def change() -> None:
            try:
                self.router.set_role(fake.instance.link, role)
            except ValueError:
                assert role == "prefill"

        self.play(change)

    @rule(count=st.integers(1, 3))
    def ask(self, count: int) -> None:
        for _ in range(count):
            self.requests += 1
            name = f"r{self.requests}"

            def send(name: str = name) -> None:
                self.tasks[name] = self.loop.create_task(answered(self.router, submit(name)))

            self.play(send)

    @rule(number=PICKS, which=PICKS, handed=st.booleans())
    def answer(self, number: int, which: int, handed: bool) -> None:  # noqa: FBT001 - drawn
        fake = self.pick(number)
        if fake is not None and fake.requests:
            names = sorted(fake.requests)
            self.play(lambda: fake.answer(names[which % len(names)], handed=handed))

    @rule(number=PICKS, which=PICKS)
    def refuse(self, number: int, which: int) -> None:
        fake = self.pick(number)
        if fake is None or not fake.requests:
            return
        name = sorted(fake.requests)[which % len(fake.requests)]
        if not fake.requests.pop(name).handoff.endswith(name):
            return  # Only prompts: a refused request ends with its client's error.
        refused = ms.SubmitRefused(id=name, kind="busy", problem="full")
        self.play(lambda: fake.instance.say(refused))

    @rule(number=PICKS)
    def go_away(self, number: int) -> None:
        running = sorted(name for name, task in self.tasks.items() if not task.done())
        if running:
            self.play(self.tasks[running[number % len(running)]].cancel)

    @rule(number=PICKS, other=PICKS)
    def fail_to_open(self, number: int, other: int) -> None:
        fake = self.pick(number)
        if fake is None or not fake.pairs:
            return
        prefill, decode = sorted(fake.pairs)[other % len(fake.pairs)]
        failed = ms.PairFailed(prefill=prefill, decode=decode, problem="no memory")
        self.play(lambda: fake.instance.say(failed))

    @invariant()
    def pairs_are_known_to_both(self) -> None:
        if not hasattr(self, "router"):
            return
        for prefill, decode in self.router.pairs.names:
            for name in (prefill, decode):
                assert (prefill, decode) in self.fakes[name].pairs
        for fake in self.fakes.values():
            assert fake.pairs <= set(self.router.pairs.names)

    @invariant()
    def load_is_bounded(self) -> None:
        """Prompts that are computed belong to requests that are under way, or were delivered."""
        running = sum(not task.done() for task in self.tasks.values())
        answering = sum(
            name in self.tasks for fake in self.fakes.values() for name in fake.requests
        )
        assert answering <= running
        for fake in self.fakes.values():
            for name in fake.requests:
                if name not in self.tasks:
                    assert int(name.rpartition("/")[2]) <= 3 * PREFILLS_MAX

    def teardown(self) -> None:
        """Everybody answers or dies: no request is left."""
        for fake in list(self.fakes.values()):
            for name in [name for name in fake.requests if name in self.tasks]:
                self.play(lambda fake=fake, name=name: fake.answer(name, handed=False))  # type: ignore[misc]
        for fake in list(self.fakes.values()):
            del self.fakes[fake.name]
            self.play(lambda fake=fake: fake.instance.channel.fail("killed"))  # type: ignore[misc]
        for task in self.tasks.values():
            assert task.done()
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), InstanceLost)
        if hasattr(self, "router"):
            assert self.router.pairs.names == []
            assert self.router.links == []
        self.loop.close()


TestRoutedFleet = RoutedFleet.TestCase
TestRoutedFleet.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
