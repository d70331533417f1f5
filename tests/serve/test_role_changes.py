"""An instance that gets another role while it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Reason
from penstock_serve.server.control import (
    Control,
    DrainRequest,
    RoleRequest,
    SleepRequest,
    WeightsRequest,
    read_order,
)
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.instance_link import InstanceLost
from tests.serve.test_router import given_up, sent, settled
from tests.serve.test_router_pairs import asked, instance_of, played

if TYPE_CHECKING:
    from penstock_serve.server.router import Router
    from tests.serve.test_router import Instance


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


async def change_role(router: Router, wish: bytes) -> dict[str, Any]:
    return await Control(router).change_role(read_order(RoleRequest, wish))


def test_new_requests_follow_the_new_role_and_old_ones_end() -> None:
    async def play(router: Router, prefill: Instance, one: Instance, two: Instance) -> None:
        [task, *_] = tasks = await sent(router, "a", "b")
        assert (asked(one), asked(two)) == (["a"], ["b"])

        change = asyncio.create_task(change_role(router, body(instance="decode-0", role="prefill")))
        await settled()
        tasks += await sent(router, "c", "d")

        assert ms.SetRole(role="prefill") in one.received()
        assert asked(two) == ["c", "d"]
        assert {each.split("/")[0] for each in asked(prefill)} <= {"a", "b", "c", "d"}
        assert not change.done()
        one.end("a", 7, reason=Reason.LENGTH)
        await task
        for said in ("c/1", "d/1"):
            one.end(said, 7, reason=Reason.LENGTH)
        assert await change == {
            "instance": "decode-0",
            "role": "prefill",
            "before": "decode",
            "unfinished": 0,
        }
        await given_up(tasks)

    played(play, decodes=2)


def test_a_change_does_not_wait_for_requests_longer_than_asked_for() -> None:
    async def play(router: Router, _prefill: Instance, one: Instance, _two: Instance) -> None:
        tasks = await sent(router, "a")
        wish = body(instance="decode-0", role="both", timeout_s=0)

        assert (await change_role(router, wish))["unfinished"] == 1

        assert router.role_of(one.link) == "both"
        await given_up(tasks)

    played(play, decodes=2)


def test_a_role_outlives_a_restart_of_the_instance() -> None:
    async def play(router: Router, _prefill: Instance, one: Instance, two: Instance) -> None:
        await change_role(router, body(instance="decode-0", role="prefill"))
        one.channel.fail("killed")
        await settled()

        anew = instance_of(router, "decode-0")
        await settled()

        assert ms.SetRole(role="prefill") in anew.received()
        assert router.answering == [two.link]
        anew.link.close()
        anew.channel.close()

    played(play, decodes=2)


@pytest.mark.parametrize(
    ("wish", "problem", "status"),
    [
        ({"role": "both"}, "instance is missing", 400),
        ({"instance": "decode-0"}, "role is missing, must be both or prefill or decode", 400),
        ({"instance": "decode-0", "role": "cook"}, "role is 'cook'", 400),
        ({"instance": "decode-7", "role": "both"}, "must be one that is ready: prefill-0", 404),
        ({"instance": "decode-0", "role": "prefill"}, "no instance but 'decode-0' answers", 400),
        ({"instance": "alone", "role": "decode"}, "'alone' hands nothing over", 400),
        ({"instance": "decode-0", "role": "both", "timeout_s": -1}, "timeout_s is -1", 400),
        ({"instance": "decode-0", "role": "both", "now": True}, "now", 400),
    ],
)
def test_a_role_that_cannot_be_is_refused_with_what_is_wrong(
    wish: dict[str, Any], problem: str, status: int
) -> None:
    async def play(router: Router, _prefill: Instance, decode: Instance) -> None:
        alone = instance_of(router, "alone", role="prefill", engine=None)
        await settled()
        decode.received()

        with pytest.raises(BadRequest) as refused:
            await change_role(router, body(**wish))

        assert problem in str(refused.value)
        assert refused.value.status == status
        assert decode.received() == []
        alone.link.close()
        alone.channel.close()

    played(play)


def carry_out_orders(*instances: Instance) -> list[type]:
    """Has instances carry out their orders; returns what all of them were told."""
    told: list[type] = []
    for instance in instances:
        for message in instance.received():
            told.append(type(message))
            if isinstance(message, ms.Order):
                result = msgspec.json.encode(ms.OrderResult(digest="d1"))
                instance.say(ms.AskAnswer(id=message.id, json=result))
    return told


def test_a_role_changes_only_after_a_load_of_weights() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        control = Control(router)
        loading = asyncio.create_task(control.load_weights(WeightsRequest(path="w", version="v2")))
        await settled()
        change = asyncio.create_task(
            control.change_role(RoleRequest(instance="decode-0", role="prefill"))
        )
        told: list[type] = []

        while not change.done():
            await settled()
            told += carry_out_orders(*instances)

        assert loading.done()
        assert change.result()["role"] == "prefill"
        assert ms.SetRole not in told[: told.index(ms.Resume)]

    played(play, decodes=2)


def test_a_role_is_refused_where_a_load_of_weights_does_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock_serve.server.control.TURN_S_MIN", 0.01)

    async def play(router: Router, *instances: Instance) -> None:
        control = Control(router)
        loading = asyncio.create_task(control.load_weights(WeightsRequest(path="w", version="v2")))
        await settled()

        with pytest.raises(BadRequest, match=r"did not end within 0.01 s") as refused:
            await control.change_role(
                RoleRequest(instance="decode-0", role="prefill", timeout_s=0.0)
            )

        assert refused.value.status == 409
        while not loading.done():
            await settled()
            assert ms.SetRole not in carry_out_orders(*instances)

    played(play, decodes=2)


def test_a_role_does_not_change_while_the_server_is_asleep() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        control = Control(router)
        sleeping = asyncio.create_task(control.sleep(SleepRequest(mode="abort")))
        while not sleeping.done():
            await settled()
            carry_out_orders(*instances)

        with pytest.raises(BadRequest, match="the server is asleep") as refused:
            await control.change_role(RoleRequest(instance="decode-0", role="prefill"))

        assert refused.value.status == 409
        assert router.role_of(instances[1].link) == "decode"

    played(play, decodes=2)


def test_a_pause_does_not_wait_for_the_requests_of_an_old_role() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        control = Control(router)
        tasks = await sent(router, "a")
        change = asyncio.create_task(
            control.change_role(RoleRequest(instance="decode-0", role="both"))
        )
        await settled()
        pausing = asyncio.create_task(control.pause(DrainRequest(mode="abort", timeout_s=0)))

        while not pausing.done():
            await settled()
            carry_out_orders(*instances)

        assert pausing.result().failed == {}
        assert (await change)["unfinished"] == 0
        await given_up(tasks)

    played(play, decodes=2)


def test_a_change_that_is_repeated_waits_for_what_began_in_the_old_role_alone() -> None:
    async def play(router: Router, _prefill: Instance, one: Instance, _two: Instance) -> None:
        control, wish = Control(router), RoleRequest(instance="decode-0", role="both", timeout_s=0)
        tasks = await sent(router, "a")
        assert (await control.change_role(wish))["unfinished"] == 1
        tasks += await sent(router, "b", "c", "d")
        assert {"a"} < set(one.link.requests)

        assert (await control.change_role(wish))["unfinished"] == 1

        one.end("a", 7, reason=Reason.LENGTH)
        await settled()
        assert (await control.change_role(wish))["unfinished"] == 0
        assert one.link.requests
        await given_up(tasks)

    played(play, decodes=2)


def test_a_change_in_which_the_instance_is_lost_says_so() -> None:
    async def play(router: Router, _prefill: Instance, one: Instance, _two: Instance) -> None:
        tasks = await sent(router, "a")
        change = asyncio.create_task(change_role(router, body(instance="decode-0", role="both")))
        await settled()

        one.channel.fail("killed")

        with pytest.raises(InstanceLost, match="killed; its role is 'both' when it is back"):
            await change
        await given_up(tasks)

    played(play, decodes=2)
