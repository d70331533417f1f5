"""An operator's calls, requests and kills in any order, with instances that check what they get."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.server.control import Control, DrainRequest, SleepRequest, WeightsRequest
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.instance_link import InstanceLost, RequestRefusal
from penstock_serve.server.router import RequestGate, Router, ServerState
from tests.serve.test_router import Instance, settled, submit

NAMES = ("one", "two")
MOVES = (
    *("ask", "ask", "answer", "pause", "abort", "resume", "sleep", "wake"),
    *("first", "second", "kill"),
)


class Served:
    """An instance that carries out orders, and answers requests when it is told to."""

    def __init__(self, router: Router, name: str) -> None:
        self.end = Instance(router, name)
        self.name = name
        self.paused = self.asleep = False
        self.version = ""
        self.requests: list[str] = []

    def work(self, *, answers: bool, wanted: str) -> None:
        for message in self.end.received():
            self._take(message, wanted)
        for request in self.requests if answers else ():
            token = Output(request=request, answer=0, sampled=Sampled(1, 0.0), reason=Reason.STOP)
            self.end.say(token)
        if answers:
            self.requests.clear()

    def _take(self, message: Any, wanted: str) -> None:
        match message:
            case Request():
                # What a request must never meet, whatever the order of calls was.
                assert not self.paused
                assert not self.asleep
                assert self.version == wanted
                self.requests.append(message.id)
            case ms.Abort():
                with suppress(ValueError):
                    self.requests.remove(message.id)
            case ms.Pause():
                self.paused = True
            case ms.Resume():
                self.paused = False
            case ms.Sleep():
                assert not self.requests
                self.asleep = True
            case ms.Wake():
                self.asleep = False
            case ms.LoadWeights():
                assert not self.requests
                assert not self.asleep
                self.version = message.version
        if isinstance(message, ms.Order):
            digest = f"digest of {getattr(message, 'path', '')}"
            result = msgspec.json.encode(ms.OrderResult(digest=digest))
            self.end.say(ms.AskAnswer(id=message.id, json=result))


class Play:
    """A router, its control and two instances."""

    def __init__(self, *, waits: bool) -> None:
        self.router = Router(gate=RequestGate(waits=waits, wait_s=5.0))
        self.control = Control(self.router)
        self.instances = {name: Served(self.router, name) for name in NAMES}
        self.requests: list[asyncio.Task[int]] = []
        self.calls: list[asyncio.Task[Any]] = []

    async def do(self, move: str) -> None:
        match move:
            case "ask":
                name = f"r{len(self.requests)}"
                self.requests.append(asyncio.create_task(self._ask(name)))
            case "pause" | "abort":
                mode = "drain" if move == "pause" else "abort"
                self._call(self.control.pause(DrainRequest(mode=mode, timeout_s=5)))
            case "resume":
                self._call(self.control.resume())
            case "sleep":
                self._call(self.control.sleep(SleepRequest(mode="abort", timeout_s=5)))
            case "wake":
                self._call(self.control.wake())
            case "first" | "second":
                self._call(self.control.load_weights(WeightsRequest(path=move, version=move)))
            case "kill":
                name = NAMES[len(self.requests) % 2]
                self.instances[name].end.channel.fail("killed")
                await settled()
                self.instances[name] = Served(self.router, name)
        await self.run(answers=move == "answer")

    def _call(self, call: Any) -> None:
        self.calls.append(asyncio.create_task(call))

    async def _ask(self, name: str) -> int:
        try:
            return len([progress async for progress in self.router.generate(submit(name))])
        except (RequestRefusal, InstanceLost):
            return 0

    async def run(self, *, answers: bool) -> None:
        await settled()
        for instance in self.instances.values():
            instance.work(answers=answers, wanted=self.router.weights_version)
        await settled()

    async def end(self) -> None:
        """Lets everything come to its end, and requires that it does."""
        while not all(task.done() for task in self.calls):
            await self.run(answers=True)
        for call in (self.control.wake, self.control.resume):
            task = asyncio.create_task(call())
            while not task.done():
                await self.run(answers=True)
            assert task.result().failed == {}
        for _ in range(50):
            await self.run(answers=True)
        assert all(task.done() for task in self.requests)
        for task in self.calls:
            assert isinstance(task.exception(), BadRequest | InstanceLost | None)


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(
        st.sampled_from(MOVES),
        max_size=25,
    ),
    waits=st.booleans(),
)
def test_no_request_meets_an_instance_that_may_not_have_it_and_all_end(
    moves: list[str],
    waits: bool,  # noqa: FBT001 - a strategy
) -> None:
    async def whole() -> None:
        play = Play(waits=waits)
        await settled()
        for move in moves:
            await play.do(move)
        await play.end()

        assert play.control.state is ServerState.RUNNING
        last = asyncio.create_task(play._ask("last"))
        while not last.done():
            await play.run(answers=True)
        assert last.result() == 1
        for instance in play.instances.values():
            instance.end.link.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_the_same_moves_can_fail() -> None:
    """An instance that gets a request while it is paused is noticed."""

    async def whole() -> None:
        play = Play(waits=False)
        await settled()
        play.instances["one"].paused = play.instances["two"].paused = True
        with pytest.raises(AssertionError):
            await play.do("ask")

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_an_instance_that_dies_when_it_has_loaded_new_weights_is_reported_as_lost() -> None:
    problems: list[Any] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        played = Play(waits=False)
        await settled()
        dying = played.instances["two"]
        take = dying._take

        def take_and_die(message: Any, wanted: str) -> None:
            take(message, wanted)
            if isinstance(message, ms.LoadWeights):
                dying.end.channel.fail("killed")

        dying._take = take_and_die  # type: ignore[method-assign]
        task = asyncio.create_task(
            played.control.load_weights(WeightsRequest(path="new", version="new"))
        )
        while not task.done():
            await played.run(answers=True)
        result = task.result()
        assert (result.done, list(result.failed)) == (["one"], ["two"])
        assert "killed" in result.failed["two"]
        await played.end()

    asyncio.run(play())
    gc.collect()
    assert problems == []
