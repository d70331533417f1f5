"""Roles that the router changes by itself, of instances that the test plays."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.observe.live import InstanceStatistics
from penstock_serve.observe.metrics import ServerMetrics
from penstock_serve.server.control import Control, DrainRequest, RoleRequest
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.role_balancer import RoleBalancer
from penstock_serve.server.router import ServerState
from tests.serve.test_router import CONFIG, given_up, sent, settled
from tests.serve.test_router_pairs import instance_of, played

if TYPE_CHECKING:
    from penstock_serve.server.router import Router
    from tests.serve.test_router import Instance

PACE_S = 8.0


@dataclass
class Balanced:
    """A balancer, the instances that it looks at, and what they say that they did."""

    router: Router
    instances: list[Instance]
    now: float = 0.0
    silent: set[str] = field(default_factory=set)
    told: list[Any] = field(default_factory=list)
    """What instances were sent, but for questions."""

    def __post_init__(self) -> None:
        self.control = Control(self.router, balances=True)
        self.metrics = ServerMetrics()
        self.balancer = RoleBalancer(
            self.router, self.control, self.metrics, pace_s=PACE_S, clock=lambda: self.now
        )
        self.work: dict[str, list[float]] = {}
        cache = penstock.open(penstock.parse_config(CONFIG), kv=np.zeros((8, 4, 16)))
        self.statistics = cache.statistics(), cache.health()
        cache.close(0)

    async def look(self, count: int = 1) -> None:
        """Looks so often, a second apart; prefill instances have too much to do."""
        for _ in range(count):
            self.now += 1.0
            self._work_a_second()
            looking = asyncio.create_task(self.balancer.look())
            while not looking.done():
                await settled()
                self._answer()
            await looking
            await settled()

    def _work_a_second(self) -> None:
        for link in self.router.ready:
            work, counts = self.work.setdefault(link.name, [0.0, 0.0]), self.router.counts[link]
            if self.router.role_of(link) == "prefill":
                work[0] += 1.0
                counts.computed += 2
                counts.waited_s += 2.0
            else:
                work[1] += 0.1
                counts.begun += 2
                counts.handed += 2

    def _answer(self) -> None:
        for instance in self.instances:
            for message in instance.received():
                if not isinstance(message, ms.Ask | ms.Order):
                    self.told.append((instance.link.name, message))
                elif instance.link.name in self.silent:
                    continue
                elif isinstance(message, ms.Ask):
                    answer = msgspec.json.encode(self._told(instance))
                    instance.say(ms.AskAnswer(id=message.id, json=answer))
                else:
                    answer = msgspec.json.encode(ms.OrderResult())
                    instance.say(ms.AskAnswer(id=message.id, json=answer))

    def _told(self, instance: Instance) -> InstanceStatistics:
        cache, health = self.statistics
        step_s, place_s = self.work[instance.link.name]
        return InstanceStatistics(
            instance=instance.link.name,
            role="both",
            state="running",
            weights_version="1",
            cache=cache,
            health=health,
            **dict.fromkeys(("waiting", "loading", "running", "claiming", "preemptions"), 0),
            handoffs={},
            handed_bytes=0,
            handed_seconds=0.0,
            landing_bytes=0,
            handed_parts_verified=0,
            token_bytes=9,
            step_seconds=step_s,
            place_seconds=place_s,
        )

    @property
    def roles(self) -> list[str]:
        return [self.router.role_of(link) for link in self.router.ready]

    def counted(self, outcome: str) -> float:
        line = f'penstock_role_changes_total{{outcome="{outcome}",role="prefill"}} '
        text = self.metrics.text([], retries=0).decode()
        return sum(float(each.split()[-1]) for each in text.splitlines() if each.startswith(line))


SPLIT = {"prefills": 2, "decodes": 3}


def test_an_instance_gets_the_role_that_lacks_one_and_it_is_said_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(router: Router, *instances: Instance) -> None:
        world = Balanced(router, [*instances])

        with caplog.at_level(logging.INFO, "penstock.serve.balance"):
            await world.look(14)

        assert world.roles == ["prefill", "prefill", "prefill", "decode", "decode"]
        assert ("decode-0", ms.SetRole(role="prefill")) in world.told
        assert world.counted("done") == 1
        [line] = [each.message for each in caplog.records]
        assert line.startswith("role changes: instance=decode-0 role=prefill why=prefill instances")
        last = world.balancer.report()["last_change"]
        assert (last["instance"], last["role"], last["outcome"]) == ("decode-0", "prefill", "done")

    played(play, **SPLIT)


def test_no_role_changes_while_requests_of_an_old_role_are_under_way() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        world = Balanced(router, [*instances])
        tasks = await sent(router, "a", "b", "c")

        await world.look(60)
        assert world.roles.count("prefill") == 3
        assert world.balancer.report()["last_change"]["outcome"] == "under way"

        for name in ("a", "b", "c"):
            for each in world.instances:
                if name in each.link.requests:
                    each.end(name, 7)
        await asyncio.gather(*tasks)
        await world.look(60)
        assert world.balancer.report()["last_change"]["outcome"] == "done"
        assert world.roles.count("prefill") == 4

    played(play, **SPLIT)


@pytest.mark.parametrize(
    "obstacle", ["paused", "leaving", "held back", "loading", "silent", "down", "old role"]
)
def test_no_role_changes_while(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(router: Router, *instances: Instance) -> None:
        world = Balanced(router, [*instances])
        last = instances[-1]
        tasks: list[asyncio.Task[list[Output]]] = []
        await world.look(1)
        match obstacle:
            case "paused":
                pausing = asyncio.create_task(world.control.pause(DrainRequest(mode="abort")))
                while not pausing.done():
                    await settled()
                    world._answer()
            case "leaving":
                last.say(ms.Leaving())
            case "held back":
                last.link.held_back = "it has not the weights of the others"
            case "loading":
                world.instances.append(instance_of(router, "decode-9"))
                await settled()
                world.instances[-1].link.ready = None
            case "silent":
                monkeypatch.setattr("penstock_serve.server.instance_link.ASK_S", 0.01)
                world.silent.add("decode-1")
            case "down":
                world.instances.append(instance_of(router, "decode-9"))
                await settled()
                await world.look(1)
                world.instances.pop().channel.fail("killed")
                await settled()
            case _:
                tasks = await sent(router, "a", "b", "c")
                changing = world.control.change_role(
                    RoleRequest(instance="decode-1", role="both", timeout_s=0)
                )
                assert (await changing)["unfinished"] == 1
        await settled()
        before = world.roles

        await world.look(20 if obstacle == "silent" else 60)

        assert world.roles == before
        assert world.balancer.report()["last_change"] is None
        await given_up(tasks)
        for each in world.instances[5:]:
            each.link.close()
            each.channel.close()

    played(play, **SPLIT)


def test_a_role_that_an_operator_chose_stays_until_it_is_auto() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        world = Balanced(router, [*instances])
        for name in ("decode-0", "decode-1", "decode-2"):
            await world.control.change_role(RoleRequest(instance=name, role="decode"))

        await world.look(60)
        assert world.roles == ["prefill", "prefill", "decode", "decode", "decode"]
        assert world.balancer.report()["by_hand"] == ["decode-0", "decode-1", "decode-2"]

        await world.control.change_role(RoleRequest(instance="decode-1", role="auto"))
        await world.look(60)
        assert world.roles == ["prefill", "prefill", "decode", "prefill", "decode"]
        assert world.balancer.report()["by_hand"] == ["decode-0", "decode-2"]

    played(play, **SPLIT)


def test_auto_is_refused_where_roles_are_not_balanced() -> None:
    async def play(router: Router, *_: Instance) -> None:
        control = Control(router)

        with pytest.raises(BadRequest, match=r"while serve.balance_s is 0"):
            await control.change_role(RoleRequest(instance="decode-1", role="auto"))
        assert control.by_hand == set()

    played(play, **SPLIT)


def test_an_instance_that_is_lost_while_its_role_changes_is_counted_and_not_tried_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(router: Router, *instances: Instance) -> None:
        world = Balanced(router, [*instances])
        tasks = await sent(router, "a", "b", "c")
        await world.look(30)
        assert world.balancer.report()["last_change"]["outcome"] == "under way"
        [chosen] = [each for each in instances if each.link.name == "decode-0"]

        chosen.channel.fail("killed")
        await settled()
        await world.look(1)

        last = world.balancer.report()["last_change"]
        assert last["outcome"] == "failed"
        assert "killed; its role is 'prefill' when it is back" in last["problem"]
        assert world.counted("failed") == 1
        assert any("role not changed: instance=decode-0" in each.message for each in caplog.records)
        # What it had is answered by another one.
        assert {"a", "b", "c"} <= {name for each in instances[3:] for name in each.link.requests}
        anew = instance_of(router, "decode-0")
        world.instances = [each for each in world.instances if each is not chosen] + [anew]
        world.work.clear()
        failed_at = world.now
        await settled()
        assert ms.SetRole(role="prefill") in anew.received()
        await world.look(int(3 * PACE_S))
        assert world.balancer.report()["last_change"] == last
        assert world.now < failed_at + 4 * PACE_S
        await given_up(tasks)
        await world.look(int(2 * PACE_S))
        assert world.balancer.report()["last_change"]["instance"] == "decode-1"
        anew.link.close()
        anew.channel.close()

    played(play, **SPLIT)


def test_a_change_that_waits_for_another_operation_is_made_once() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        world = Balanced(router, [*instances])
        async with world.control._alone(1):
            await world.look(40)
            assert world.roles.count("prefill") == 2
        await settled()

        assert world.roles.count("prefill") == 3
        assert world.counted("done") == 1

    played(play, **SPLIT)


def test_what_instances_do_is_counted_with_how_long_prompts_waited() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        tasks = await sent(router, "a")
        [handoff] = [each.id for each in prefill.received() if isinstance(each, Request)]
        spent = (0.25, 0.0, 0.0, 1.0)
        prefill.say(
            Output(
                request=handoff,
                answer=0,
                sampled=Sampled(7, 0.0),
                reason=Reason.LENGTH,
                spent_s=spent,
            )
        )
        for _ in range(2):
            decode.say(Output(request="a", answer=0, sampled=Sampled(7, 0.0), spent_s=spent))
        await settled()

        counts = router.counts
        assert (counts[prefill.link].computed, counts[prefill.link].waited_s) == (1, 0.25)
        found = counts[decode.link]
        assert (found.begun, found.handed, found.waited_s) == (1, 1, 0.25)
        await given_up(tasks)

    played(play)


@pytest.mark.parametrize("meanwhile", ["paused", "an operator chose", "the only one of its role"])
def test_a_change_is_refused_if_by_its_turn_it_must_not_be(meanwhile: str) -> None:
    async def play(router: Router, *instances: Instance) -> None:
        control = Control(router, balances=True)
        async with control._alone(1):
            change = asyncio.create_task(control.rebalance("decode-0", "prefill", timeout_s=9))
            await settled()
            match meanwhile:
                case "paused":
                    router.gate.hold(ServerState.PAUSED)
                case "an operator chose":
                    control.by_hand.add("decode-0")
                case _:
                    instances[-1].say(ms.Leaving())
                    await settled()

        with pytest.raises(BadRequest, match=meanwhile) as refused:
            await change

        assert refused.value.status == 409
        assert router.role_of(instances[2].link) == "decode"

    played(play, prefills=2, decodes=2)
