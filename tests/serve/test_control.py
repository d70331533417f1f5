"""Pausing, resuming and other weights, with instances that the test plays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Request
from penstock_serve.server.control import (
    Control,
    DrainRequest,
    EmptyRequest,
    WeightsRequest,
    read_order,
)
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.instance_link import InstanceLost, RequestRefusal
from penstock_serve.server.router import RequestGate, Router, ServerState
from tests.serve.test_router import Instance, answered, settled, submit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NOW = DrainRequest(mode="abort", timeout_s=0)
WEIGHTS = WeightsRequest(path="w", version="v2")
LATER = DrainRequest(mode="drain", timeout_s=50)


class Scene:
    """A router with two instances, and its control."""

    def __init__(self, gate: RequestGate) -> None:
        self.router = Router(gate=gate)
        self.control = Control(self.router)
        self.instances = [Instance(self.router, name) for name in ("one", "two")]

    def begin(self, name: str) -> asyncio.Task[list[Output]]:
        return asyncio.create_task(answered(self.router, submit(name)))

    async def orders(self, *, problem: str = "", digest: str = "d1") -> list[type]:
        """What the instances were told; orders among it are answered."""
        await settled()
        told: list[type] = []
        for instance in self.instances:
            for message in instance.received():
                told.append(type(message))
                if isinstance(message, ms.Order):
                    result = msgspec.json.encode(ms.OrderResult(problem=problem, digest=digest))
                    instance.say(ms.AskAnswer(id=message.id, json=result))
        await settled()
        return told

    async def all_orders(self, task: asyncio.Task[Any]) -> list[type]:
        """Answers orders until an operation has ended; returns all of them."""
        told: list[type] = []
        while not task.done():
            told += await self.orders()
        return told


def played(play: Callable[[Scene], Awaitable[None]], gate: RequestGate | None = None) -> None:
    async def whole() -> None:
        scene = Scene(gate or RequestGate())
        await settled()
        try:
            await play(scene)
        finally:
            for each in scene.instances:
                each.link.close()
                each.channel.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_drained_pause_lets_requests_finish_and_refuses_new_ones() -> None:
    async def play(scene: Scene) -> None:
        first = scene.begin("first")
        await settled()
        pausing = asyncio.create_task(scene.control.pause(LATER))
        await settled()
        with pytest.raises(RequestRefusal, match="paused") as refused:
            await scene.begin("second")
        assert refused.value.kind == "paused"
        assert ms.Pause not in await scene.orders()
        for instance in scene.instances:
            instance.end("first")

        assert await scene.orders() == [ms.Pause, ms.Pause]
        result = await pausing

        assert len(await first) == 1
        assert result.content() == {
            "state": "paused",
            "instances": ["one", "two"],
            "failed": {},
            "aborted": 0,
        }

    played(play)


def test_an_abort_ends_requests_with_a_refusal_and_at_their_instance() -> None:
    async def play(scene: Scene) -> None:
        first = scene.begin("first")
        await settled()
        pausing = asyncio.create_task(scene.control.pause(NOW))

        told = await scene.orders()

        assert told.index(ms.Abort) > told.index(Request)
        assert (await pausing).content()["aborted"] == 1
        with pytest.raises(RequestRefusal, match="the server is paused"):
            await first

    played(play)


def test_a_drain_aborts_what_is_left_after_its_timeout() -> None:
    async def play(scene: Scene) -> None:
        first = scene.begin("first")
        await settled()
        pausing = asyncio.create_task(
            scene.control.pause(DrainRequest(mode="drain", timeout_s=0.01))
        )
        with pytest.raises(RequestRefusal):
            await first

        await scene.orders()

        assert (await pausing).content()["aborted"] == 1

    played(play)


def test_a_request_of_a_lost_instance_is_not_retried_once_requests_are_aborted() -> None:
    async def play(scene: Scene) -> None:
        first = scene.begin("first")
        await settled()
        [busy] = [each for each in scene.instances if each.link.load]
        [other] = [each for each in scene.instances if each is not busy]
        scene.router.gate.hold(ServerState.PAUSED)
        scene.router.gate.abort()

        busy.channel.fail("killed")
        await settled()

        assert other.received() == []
        with pytest.raises(RequestRefusal, match="paused"):
            await first

    played(play)


def test_a_request_of_a_lost_instance_is_retried_while_others_drain() -> None:
    async def play(scene: Scene) -> None:
        first = scene.begin("first")
        await settled()
        pausing = asyncio.create_task(scene.control.pause(LATER))
        await settled()
        [busy] = [each for each in scene.instances if each.link.load]
        [other] = [each for each in scene.instances if each is not busy]
        busy.channel.fail("killed")
        await settled()

        other.end("first")

        assert len(await first) == 1
        await scene.orders()
        assert (await pausing).done == [other.link.name]

    played(play)


def test_requests_wait_for_the_end_of_a_pause_where_that_is_configured() -> None:
    async def play(scene: Scene) -> None:
        await paused(scene)
        waiting = scene.begin("waiting")
        assert await scene.orders() == []

        resumed = await scene.control.resume()

        assert resumed.state == "running"
        told = await scene.orders()
        assert sorted(each.__name__ for each in told) == ["Request", "Resume", "Resume"]
        for instance in scene.instances:
            instance.end("waiting")
        assert len(await waiting) == 1

    played(play, RequestGate(waits=True))


def test_requests_do_not_wait_for_ever() -> None:
    async def play(scene: Scene) -> None:
        await paused(scene)
        with pytest.raises(RequestRefusal, match=r"not resumed within 0\.01 s"):
            await scene.begin("waiting")

    played(play, RequestGate(waits=True, wait_s=0.01))


def test_pause_and_resume_may_be_repeated() -> None:
    async def play(scene: Scene) -> None:
        await paused(scene)
        await paused(scene)
        await scene.control.resume()
        result = await scene.control.resume()

        assert result.state == scene.control.state.value == ServerState.RUNNING.value

    played(play)


def test_an_instance_that_comes_back_is_paused_before_its_first_request() -> None:
    async def play(scene: Scene) -> None:
        await paused(scene)
        scene.instances.append(Instance(scene.router, "three"))

        assert await scene.orders() == [ms.Pause]

    played(play)


def test_instances_that_do_not_pause_are_named() -> None:
    async def play(scene: Scene) -> None:
        pausing = asyncio.create_task(scene.control.pause(NOW))
        await settled()
        scene.instances.pop().channel.fail("killed")
        await scene.orders(problem="its device is stuck")

        result = await pausing

        assert result.done == []
        assert result.failed["one"] == "its device is stuck"
        assert "killed" in result.failed["two"]

    played(play)


def test_weights_are_checked_by_all_and_then_loaded_by_all_between_requests() -> None:
    async def play(scene: Scene) -> None:
        first = scene.begin("first")
        await settled()
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        assert (await scene.orders()).count(ms.CheckWeights) == 2
        with pytest.raises(RequestRefusal, match="the server is loading weights"):
            await scene.begin("second")
        for instance in scene.instances:
            instance.end("first")

        told = await scene.all_orders(loading)

        assert told == [ms.Pause, ms.Pause, ms.LoadWeights, ms.LoadWeights]
        assert len(await first) == 1
        assert loading.result().content() == {
            "state": "running",
            "instances": ["one", "two"],
            "failed": {},
            "aborted": 0,
            "weights_version": "v2@d1",
        }
        assert await scene.orders() == [ms.Resume, ms.Resume]
        assert scene.control.state is ServerState.RUNNING

    played(play)


def test_the_same_weights_again_change_nothing() -> None:
    async def play(scene: Scene) -> None:
        await scene.all_orders(asyncio.create_task(scene.control.load_weights(WEIGHTS)))
        await scene.orders()

        again = asyncio.create_task(scene.control.load_weights(WEIGHTS))

        assert await scene.all_orders(again) == [ms.CheckWeights, ms.CheckWeights]
        assert again.result().done == ["one", "two"]

    played(play)


def test_weights_that_an_instance_cannot_load_are_refused_and_nothing_is_touched() -> None:
    async def play(scene: Scene) -> None:
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))

        await scene.orders(problem="path is 'w', must be right")

        with pytest.raises(BadRequest, match=r"path is 'w', must be right \(instance 'one'\)"):
            await loading
        assert scene.control.state is ServerState.RUNNING
        assert await scene.orders() == []

    played(play)


def test_instances_that_see_other_files_under_the_same_path_are_refused() -> None:
    async def play(scene: Scene) -> None:
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        await settled()
        for instance, digest in zip(scene.instances, ("d1", "d2"), strict=True):
            [order] = instance.received()
            result = msgspec.json.encode(ms.OrderResult(digest=digest))
            instance.say(ms.AskAnswer(id=order.id, json=result))

        with pytest.raises(BadRequest, match="digests: one: d1, two: d2"):
            await loading

    played(play)


def test_an_instance_that_failed_to_load_is_named_and_gets_no_requests_until_it_has() -> None:
    async def play(scene: Scene) -> None:
        one, two = scene.instances
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        while not loading.done():
            await settled()
            for instance in scene.instances:
                for order in instance.received():
                    if isinstance(order, ms.Resume):
                        continue
                    fails = instance is two and isinstance(order, ms.LoadWeights)
                    result = ms.OrderResult(problem="a bad disk" if fails else "", digest="d1")
                    instance.say(ms.AskAnswer(id=order.id, json=msgspec.json.encode(result)))
        assert loading.result().failed == {"two": "a bad disk"}
        assert loading.result().done == ["one"]
        assert scene.router.answering == [one.link]

        again = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        told = await scene.all_orders(again)

        assert told.count(ms.LoadWeights) == 1
        assert again.result().failed == {}
        assert scene.router.answering == [one.link, two.link]

    played(play)


def test_an_instance_that_was_away_loads_the_weights_before_it_gets_requests() -> None:
    async def play(scene: Scene) -> None:
        await scene.all_orders(asyncio.create_task(scene.control.load_weights(WEIGHTS)))
        await scene.orders()

        late = Instance(scene.router, "late")
        await settled()

        assert late.link not in scene.router.answering
        [order] = late.received()
        assert (order.path, order.digest, order.version) == ("w", "d1", "v2@d1")
        late.say(ms.AskAnswer(id=order.id, json=msgspec.json.encode(ms.OrderResult())))
        await settled()
        assert late.link in scene.router.answering
        late.link.close()

    played(play)


def test_weights_that_load_while_the_server_is_paused_leave_it_paused() -> None:
    async def play(scene: Scene) -> None:
        await paused(scene)

        await scene.all_orders(asyncio.create_task(scene.control.load_weights(WEIGHTS)))

        assert scene.control.state is ServerState.PAUSED
        assert await scene.orders() == []

    played(play)


def test_an_instance_that_is_lost_before_it_loads_is_named_and_loads_when_it_is_back() -> None:
    async def play(scene: Scene) -> None:
        request = scene.begin("r")
        await settled()
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        await scene.orders()
        scene.instances[1].channel.fail("killed")
        await settled()
        for instance in scene.instances[:1]:
            instance.end("r")
        await scene.all_orders(loading)
        await asyncio.gather(request, return_exceptions=True)

        result = loading.result()

        assert result.done == ["one"]
        assert result.failed == {"two": "it was lost; it loads the weights before its next request"}
        back = Instance(scene.router, "two")
        scene.instances.append(back)
        await settled()
        assert back.link.held_back
        assert ms.LoadWeights in await scene.orders()
        assert not back.link.held_back

    played(play)


def test_an_instance_that_is_lost_while_it_loads_is_named() -> None:
    async def play(scene: Scene) -> None:
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        told: list[type] = []
        while ms.Pause not in told:
            told += await scene.orders()
        await settled()
        assert [type(each) for each in scene.instances[1].received()] == [ms.LoadWeights]
        scene.instances[1].channel.fail("killed")

        await scene.all_orders(loading)

        assert loading.result().done == ["one"]
        [cause] = loading.result().failed.values()
        assert cause.endswith("killed; it loads the weights before its next request")

    played(play)


def test_an_instance_that_is_lost_while_it_checks_weights_changes_nothing() -> None:
    async def play(scene: Scene) -> None:
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        await settled()
        lost = scene.instances.pop()
        lost.received()
        lost.channel.fail("killed")

        await scene.orders()
        with pytest.raises(InstanceLost, match=r"'w' was not loaded, nothing was changed: .*'two'"):
            await loading

        assert scene.router.weights_version == ""
        assert scene.control.state is ServerState.RUNNING

    played(play)


def test_a_version_alone_waits_for_the_end_of_a_load() -> None:
    async def play(scene: Scene) -> None:
        loading = asyncio.create_task(scene.control.load_weights(WEIGHTS))
        await settled()
        renaming = asyncio.create_task(scene.control.rename_weights("v3"))

        told = await scene.all_orders(renaming)
        told += await scene.orders()

        assert loading.done()
        assert told.index(ms.LoadWeights) < told.index(ms.ResetCache)
        assert renaming.result() == ["one", "two"]
        assert scene.router.weights_version == "v3"
        assert all(not each.link.held_back for each in scene.instances)

    played(play)


async def paused(scene: Scene) -> None:
    pausing = asyncio.create_task(scene.control.pause(NOW))
    await scene.orders()
    await pausing
    assert scene.control.state is ServerState.PAUSED


@pytest.mark.parametrize(
    ("shape", "body", "message"),
    [
        (DrainRequest, '{"mode": "stop"}', "mode is 'stop', must be one of 'drain', 'abort'"),
        (DrainRequest, '{"timeout_s": -1}', "timeout_s is -1, must be a number from 0 to 86400"),
        (DrainRequest, '{"timeout": 1}', "timeout is no field that this server knows; did you "),
        (DrainRequest, "[]", r"the body is \[\], must be a JSON object"),
        (EmptyRequest, '{"mode": "drain"}', "mode is no field that this server knows"),
        (WeightsRequest, "", "version is missing, must be a string"),
        (WeightsRequest, '{"path": ""}', "path is '', must be a folder with a checkpoint"),
        (WeightsRequest, '{"path": 1}', "path is 1, must be a string"),
        (WeightsRequest, '{"version": ""}', "version has 0 bytes, must have from 1 to 128"),
    ],
)
def test_a_wrong_body_is_refused_with_the_field(shape: Any, body: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_order(shape, body.encode())


def test_an_empty_body_means_the_defaults() -> None:
    assert read_order(DrainRequest, b"") == DrainRequest(mode="drain", timeout_s=60.0)
