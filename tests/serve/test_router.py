"""Which instance gets a request, and what its client gets when the instance fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lab.fixtures.inproc import InprocChannel, channel_pair
from penstock.config import parse_config
from penstock.machine.kv_events import AllCleared, BlocksStored
from penstock.transport.base import ReceivedFrame
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.server.instance_link import InstanceLink, InstanceLost, RequestRefusal
from penstock_serve.server.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

CONFIG = 'version = 1\nmodel.name = "m"\ncache = { blocks = 8, block_tokens = 4 }\n'
PROMPT = tuple(range(40))


AWAY = "it was away when the others were reset, or died too soon"


class Instance:
    """The other end of a link, played by the test."""

    def __init__(self, router: Router, name: str) -> None:
        self.channel: InprocChannel
        near, self.channel = channel_pair("server", name)
        self.link = InstanceLink(
            near, on_change=lambda link: router.remove(link) if link.lost else None
        )
        router.add(self.link)
        self.say(
            ms.InstanceReady(
                model="m",
                positions=99,
                stop_tokens=[],
                # A router reads the secret at its own place, never at that of another machine.
                config=replace(parse_config(CONFIG), salt="env:OF_ANOTHER_MACHINE"),
                tiers=["device"],
            )
        )

    def say(self, *messages: ms.InstanceMessage) -> None:
        for message in messages:
            self.channel.send(ms.encode(message))

    def end(
        self, request: str, token: int = 1, *, answer: int = 0, reason: Reason = Reason.STOP
    ) -> None:
        """Says the last token of an answer."""
        sampled = Sampled(token, 0.0)
        self.say(Output(request=request, answer=answer, sampled=sampled, reason=reason))

    def keep(self, token_count: int, *, salt: str = "") -> None:
        chain = replace(parse_config(CONFIG), salt=salt).key_chain()
        chain.extend(PROMPT[:token_count])
        keys = [bytes(key) for key in chain.keys]
        self.say(
            ms.CacheChanged(
                events=[BlocksStored(sequence=1, epoch=0, tier="device", keys=keys, parent=None)]
            )
        )

    def received(self) -> list[Any]:
        found = []
        while isinstance(said := self.channel.receive(), ReceivedFrame):
            found.append(ms.read_by_instance(said.frame))
        return found


def submit(name: str, **more: Any) -> Request:
    return Request(id=name, prompt=PROMPT, max_tokens=4, **more)


def played(
    play: Callable[[Router, Instance, Instance], Coroutine[Any, Any, None]], *, salt: str = ""
) -> None:
    async def whole() -> None:
        router = Router(salt=salt)
        pair = [Instance(router, name) for name in ("one", "two")]
        await settled()
        try:
            await play(router, *pair)
        finally:
            for each in pair:
                each.link.close()
                each.channel.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


async def settled() -> None:
    """Lets the loop turn until it has seen what was sent, and done what follows."""
    for _ in range(20):
        await asyncio.sleep(0)


def tokens_of(outputs: list[Output]) -> list[int]:
    return [each.sampled.token for each in outputs if each.sampled is not None]


async def answered(router: Router, request: Request) -> list[Output]:
    return [progress async for progress in router.generate(request)]


async def sent(router: Router, *names: str) -> list[asyncio.Task[list[Output]]]:
    """Requests that have reached their instances, one after the other."""
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(answered(router, submit(name))))
        await settled()
    return tasks


async def given_up(tasks: list[asyncio.Task[list[Output]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_request_goes_where_its_prefix_lies() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        two.keep(16)
        await settled()
        [task] = await sent(router, "r")

        assert [type(said) for said in two.received()] == [Request]
        assert one.received() == []
        two.end("r")
        assert tokens_of(await task) == [1]

    played(play)


def test_a_router_with_the_same_secret_salt_finds_prefixes(tmp_path: Path) -> None:
    places = [tmp_path / "of the router", tmp_path / "of the instance"]
    for place in places:
        place.write_text("a secret of both machines")

    async def play(router: Router, one: Instance, two: Instance) -> None:
        two.keep(16, salt=f"file:{places[1]}")
        await settled()
        [task] = await sent(router, "r")

        assert [type(said) for said in two.received()] == [Request]
        assert one.received() == []
        two.end("r")
        await task

    played(play, salt=f"file:{places[0]}")


def test_requests_that_come_one_at_a_time_are_dealt_out_in_turn() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        # A block of both is what all conversations begin with: it binds them to nobody.
        one.keep(4)
        await settled()
        went: list[str] = []
        for number in range(4):
            name = f"r{number}"
            [task] = await sent(router, name)
            [chosen] = [each for each in (one, two) if each.received()]
            went.append("one" if chosen is one else "two")
            chosen.end(name)
            await task

        assert went == ["one", "two", "one", "two"]

    played(play)


def test_requests_with_one_cache_key_go_to_one_instance() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        went: list[str] = []
        for number, key in enumerate(("k", "k", "other", "k", "")):
            name = f"r{number}"
            task = asyncio.create_task(answered(router, submit(name, cache_key=key)))
            await settled()
            [chosen] = [each for each in (one, two) if each.received()]
            went.append("one" if chosen is one else "two")
            chosen.end(name)
            await task

        assert went == ["one", "one", "two", "one", "one"]

    played(play)


def test_an_instance_that_leaves_ends_what_it_has_and_gets_nothing_new() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        one.keep(40)
        await settled()
        [first] = await sent(router, "first")
        one.say(ms.Leaving())
        await settled()
        [second] = await sent(router, "second")

        assert [said.id for said in one.received()] == ["first"]
        assert [said.id for said in two.received()] == ["second"]
        assert router.answering == [two.link]
        for instance, name in ((one, "first"), (two, "second")):
            instance.end(name)
        assert len(await first) == len(await second) == 1

    played(play)


def test_an_instance_that_sends_kv_events_too_early_is_lost() -> None:
    async def play(_router: Router, _one: Instance, _two: Instance) -> None:
        near, far = channel_pair("server", "early")
        link = InstanceLink(near, on_change=lambda _: None)
        far.send(ms.encode(ms.CacheChanged(events=[])))
        await settled()

        assert "before it was ready" in link.lost
        far.close()

    played(play)


def test_a_long_queue_outweighs_a_prefix_and_a_cleared_cache_attracts_nobody() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        two.keep(16)
        await settled()
        tasks = [asyncio.create_task(answered(router, submit(f"r{n}"))) for n in range(3)]
        await settled()
        assert (len(two.received()), len(one.received())) == (2, 1)

        two.say(ms.CacheChanged(events=[AllCleared(sequence=2, epoch=1)]))
        one.keep(20)
        await settled()
        tasks.append(asyncio.create_task(answered(router, submit("r9"))))
        await settled()

        assert (len(two.received()), len(one.received())) == (0, 1)
        await given_up(tasks)
        assert ms.Abort(id="r9") in one.received()

    played(play)


def test_a_prompt_follows_one_that_is_being_computed_until_that_has_ended() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        other = Request(id="other", prompt=tuple(range(100, 140)), max_tokens=4)
        tasks = [asyncio.create_task(answered(router, each)) for each in (submit("a"), other)]
        await settled()
        assert [said.id for said in one.received()] == ["a"]
        assert [said.id for said in two.received()] == ["other"]

        tasks.append(asyncio.create_task(answered(router, submit("b"))))
        await settled()
        assert [said.id for said in one.received()] == ["b"]

        # It did not say that it kept anything.
        for name in ("a", "b"):
            one.end(name)
        two.end("other")
        await asyncio.gather(*tasks)
        two.keep(8)
        await settled()
        [task] = await sent(router, "c")
        assert [said.id for said in two.received()] == ["c"]
        await given_up([task])

    played(play)


def test_an_instance_with_a_long_prompt_to_compute_goes_after_one_that_decodes() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        long = Request(id="long", prompt=tuple(range(1000, 1400)), max_tokens=4)
        tasks = [asyncio.create_task(answered(router, each)) for each in (long, submit("short"))]
        await settled()
        assert [said.id for said in one.received()] == ["long"]
        assert [said.id for said in two.received()] == ["short"]

        third, fourth = (
            Request(id=name, prompt=tuple(range(2000, 2040)), max_tokens=4, reuse=False)
            for name in ("third", "fourth")
        )
        # It would be the turn of the other one.
        tasks.append(asyncio.create_task(answered(router, third)))
        await settled()
        assert [said.id for said in two.received()] == ["third"]
        one.say(Output(request="long", answer=0, sampled=Sampled(1, 0.0)))
        await settled()
        tasks.append(asyncio.create_task(answered(router, fourth)))
        await settled()
        assert [said.id for said in one.received()] == ["fourth"]
        await given_up(tasks)

    played(play)


def test_a_lost_instance_is_replaced_before_the_first_token_and_not_after_it() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        one.keep(40)
        await settled()
        early = asyncio.create_task(answered(router, submit("early")))
        [late] = await sent(router, "late")
        one.say(Output(request="late", answer=0, sampled=Sampled(1, 0.0)))
        await settled()

        one.channel.fail("killed")
        await settled()
        two.end("early", 2, reason=Reason.LENGTH)

        assert tokens_of(await early) == [2]
        assert router.retries == 1
        with pytest.raises(InstanceLost, match="killed"):
            await late

    played(play)


def test_a_refusal_is_reported_and_not_retried() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        one.keep(40)
        await settled()
        [task] = await sent(router, "r")
        one.received()
        one.say(ms.SubmitRefused(id="r", kind="busy", problem="full"))

        with pytest.raises(RequestRefusal, match="full"):
            await task
        assert one.received() == two.received() == []

    played(play)


def test_an_instance_that_talks_nonsense_is_lost() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        asked = asyncio.create_task(one.link.ask("statistics"))
        await settled()

        one.channel.send(b"nonsense")

        with pytest.raises(InstanceLost, match="a frame has version"):
            await asked
        assert router.ready == [two.link]

    played(play)


def test_what_an_instance_has_no_room_for_waits_in_order() -> None:
    async def play(_: Router, one: Instance, two: Instance) -> None:
        for number in range(1500):
            two.link.send(ms.Abort(id=str(number)))
        first = two.received()
        await settled()
        two.say(ms.AskAnswer(id=0, json=b""))
        await settled()

        names = [said.id for said in [*first, *two.received()]]
        assert len(first) == 1024
        assert names == [str(number) for number in range(1500)]
        assert one.received() == []

    played(play)


def test_new_weights_reach_every_instance_and_the_keys_of_the_router() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        two.keep(16)
        await settled()

        assert router.reset("so", weights_version="w2") == ["one", "two"]

        reset = ms.ResetCache(number=1, why="so", weights_version="w2")
        assert one.received() == two.received() == [reset]
        [task] = await sent(router, "r")
        # What was kept under the old weights attracts nobody: the first one is as good.
        assert [type(said) for said in one.received()] == [Request]
        await given_up([task])

    played(play)


def test_an_instance_that_was_away_gets_a_reset_once_and_before_any_request() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        two.link.close()
        router.reset("so")
        again = Instance(router, "two")
        await settled()
        first = again.received()
        again.say(ms.ResetKept(number=1))
        await settled()
        again.link.close()
        later = Instance(router, "two")
        await settled()

        assert one.received() == [ms.ResetCache(number=1, why="so")]
        assert first == [ms.ResetCache(number=1, why=AWAY)]
        assert later.received() == []
        later.link.close()

    played(play)


def test_an_instance_that_dies_before_a_reset_is_kept_is_reset_again_when_it_is_back() -> None:
    async def play(router: Router, _: Instance, two: Instance) -> None:
        router.reset("first")
        two.say(ms.ResetKept(number=1))
        router.reset("second")
        two.link.close()
        again = Instance(router, "two")
        await settled()

        assert again.received() == [ms.ResetCache(number=2, why=AWAY)]
        again.link.close()

    played(play)


def test_an_instance_that_comes_back_with_old_weights_gets_the_new_version() -> None:
    async def play(router: Router, one: Instance, two: Instance) -> None:
        router.reset("so", weights_version="w2")
        router.reset("and so")
        two.link.close()
        again = Instance(router, "two")
        again.keep(16)
        await settled()

        reported = again.received()
        [task] = await sent(router, "r")

        assert [
            said.weights_version for said in one.received() if isinstance(said, ms.ResetCache)
        ] == [
            "w2",
            "",
        ]
        assert [said.weights_version for said in reported] == ["w2"]
        # What it has kept under the old weights attracts nobody.
        assert again.received() == []
        await given_up([task])
        again.link.close()

    played(play)
