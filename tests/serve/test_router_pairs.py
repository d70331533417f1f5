"""A request that two instances get at once, whatever the other one does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from penstock.config import parse_config
from penstock.config.values import RoutingTable
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.engine.spec import EngineSpec
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.router import Router
from tests.serve.test_router import (
    CONFIG,
    PROMPT,
    Instance,
    answered,
    given_up,
    sent,
    settled,
    submit,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def instance_of(
    router: Router, name: str, *, machine: str = "here", config: str = CONFIG, **more: Any
) -> Instance:
    """An instance that takes part in handoffs, of the role that its name begins with."""
    place = EngineSpec(name=name, ranks=1, address=f"ipc:///{name}", machine=machine)
    facts = {"model": "m", "engine": place, "role": name.partition("-")[0], **more}
    instance = Instance(router, name)
    instance.say(
        ms.InstanceReady(
            positions=99, stop_tokens=[], config=parse_config(config), tiers=["device"], **facts
        )
    )
    return instance


def played(
    play: Callable[..., Coroutine[Any, Any, None]],
    *,
    prefills: int = 1,
    decodes: int = 1,
    **more: Any,
) -> None:
    """Calls `play` with a router, its prefill instances and its decode instances."""

    async def whole() -> None:
        router = Router()
        names = [f"prefill-{n}" for n in range(prefills)] + [f"decode-{n}" for n in range(decodes)]
        everybody = [instance_of(router, name, **more) for name in names]
        await settled()
        try:
            await play(router, *everybody)
        finally:
            for each in everybody:
                each.link.close()
                each.channel.close()
            router.pairs.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def asked(instance: Instance) -> list[str]:
    """Requests that an instance has been sent since it was last looked at."""
    return [said.id for said in instance.received() if isinstance(said, Request)]


def test_a_request_goes_to_both_under_one_name_and_its_answer_comes_from_one() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r", answers=2)))
        await settled()

        [opened, there], [opened_too, here] = prefill.received(), decode.received()
        assert opened == opened_too
        assert isinstance(opened, ms.OpenPair)
        assert there.handoff == here.handoff == there.id
        assert (there.prefill, there.decode) == (here.prefill, here.decode)
        assert (here.prefill, here.decode) == ("prefill-0", "decode-0")
        assert (there.prompt, there.max_tokens, there.answers) == (PROMPT, 1, 1)
        assert (here.id, here.max_tokens, here.answers) == ("r", 4, 2)
        prefill.end(there.id, reason=Reason.LENGTH)
        for answer in (0, 1):
            decode.end("r", 7, answer=answer, reason=Reason.LENGTH)

        assert tokens_of(await task) == [7, 7]
        assert decode.received() == []
        # Whatever it still keeps of it, nobody comes for it.
        assert set(prefill.received()) == {ms.Abort(id=there.id)}

    played(play)


def test_a_prompt_that_was_delivered_is_not_aborted() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        [task] = await sent(router, "r")
        [_, there], _ = prefill.received(), decode.received()

        decode.say(Output(request="r", answer=0, sampled=Sampled(7, 0.0), handed=True))
        decode.end("r", 8, reason=Reason.LENGTH)
        await task
        await settled()
        assert prefill.received() == []
        prefill.end(there.id, 7, reason=Reason.LENGTH)
        await settled()

        assert (prefill.received(), decode.received()) == ([], [])
        assert prefill.link.load == 0

    played(play)


@pytest.mark.parametrize("fate", ["refuses", "gives up", "dies"])
def test_the_answering_instance_computes_a_prompt_that_its_partner_cannot(fate: str) -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        [task] = await sent(router, "r")
        [_, there], _ = prefill.received(), decode.received()

        if fate == "refuses":
            prefill.say(ms.SubmitRefused(id=there.id, kind="busy", problem="full"))
        elif fate == "gives up":
            prefill.say(Output(request=there.id, answer=0, reason=Reason.ABORTED))
        else:
            prefill.channel.fail("killed")
        await settled()

        died = fate == "dies"
        closed = ms.ClosePair(prefill="prefill-0", decode="decode-0", lost=True)
        gone = [closed] if died else []
        assert decode.received() == [ms.ComputeLocally(id="r", lost=died), *gone]
        decode.end("r", 7)
        assert tokens_of(await task) == [7]

    played(play)


def test_without_a_prefill_instance_nothing_is_handed_over() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        prefill.channel.fail("killed")
        await settled()
        [task] = await sent(router, "r")

        assert decode.received() == [submit("r")]
        decode.end("r", 7)
        assert tokens_of(await task) == [7]

    played(play)


def test_without_a_decode_instance_nobody_answers() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        decode.channel.fail("killed")
        await settled()

        with pytest.raises(InstanceLost, match="no instance is ready"):
            await answered(router, submit("r"))
        assert prefill.received() == []

    played(play)


def test_a_client_that_goes_away_takes_its_request_along_on_both() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        [task] = await sent(router, "r")
        [_, there], _ = prefill.received(), decode.received()

        await given_up([task])
        await settled()

        assert ms.Abort(id="r") in decode.received()
        assert ms.Abort(id=there.id) in prefill.received()

    played(play)


def test_every_request_may_use_any_prefill_instance_with_any_decode_instance() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        one, two, near, far = instances
        tasks = await sent(router, *(f"r{number}" for number in range(8)))

        used = {
            (said.prefill, said.decode)
            for each in (near, far)
            for said in each.received()
            if isinstance(said, Request)
        }
        assert [len(asked(each)) for each in (one, two)] == [4, 4]
        assert used <= {(p.link.name, d.link.name) for p in (one, two) for d in (near, far)}
        assert {each[0] for each in used} == {"prefill-0", "prefill-1"}
        assert {each[1] for each in used} == {"decode-0", "decode-1"}
        await given_up(tasks)

    played(play, prefills=2, decodes=2)


def test_a_prefix_that_one_prefill_instance_has_chooses_it() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        two.keep(16)
        await settled()

        tasks = await sent(router, "r")

        assert (asked(one), asked(two), asked(decode)) == ([], ["r/1"], ["r"])
        await given_up(tasks)

    played(play, prefills=2)


def test_prompts_that_wait_before_a_prefill_instance_send_the_next_one_elsewhere() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        [first] = await sent(router, "a")
        assert (asked(one), asked(two)) == (["a/1"], [])
        # It is answered, but its prompt is still being computed, delivered and all.
        decode.say(
            Output(
                request="a", answer=0, sampled=Sampled(7, 0.0), reason=Reason.LENGTH, handed=True
            )
        )
        await first
        await settled()
        assert (decode.link.load, one.link.load) == (0, 1)

        then = await sent(router, "b", "c")

        # The same prompt again follows the one that is being computed.
        assert (asked(one), asked(two)) == ([], ["b/1", "c/1"])
        await given_up(then)

    played(play, prefills=2)


@pytest.mark.parametrize("fate", ["refuses", "dies"])
def test_a_prompt_that_one_prefill_instance_cannot_compute_another_one_does(fate: str) -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        [task] = await sent(router, "a")
        [_, there], _ = one.received(), decode.received()

        if fate == "dies":
            one.channel.fail("killed")
        else:
            one.say(ms.SubmitRefused(id=there.id, kind="busy", problem="full"))
        await settled()

        opened, changed, *closed = decode.received()
        assert isinstance(opened, ms.OpenPair)
        died = fate == "dies"
        assert changed == ms.ChangePrefill(id="a", handoff="a/2", prefill="prefill-1", lost=died)
        # After the new one is known: what the old one had is not computed by decode meanwhile.
        pair = ms.ClosePair(prefill="prefill-0", decode="decode-0", lost=True)
        assert closed == ([pair] if died else [])
        [_, again] = two.received()
        assert (again.id, again.handoff, again.prefill) == ("a/2", "a/2", "prefill-1")
        decode.say(
            Output(
                request="a", answer=0, sampled=Sampled(7, 0.0), reason=Reason.LENGTH, handed=True
            )
        )
        assert tokens_of(await task) == [7]

    played(play, prefills=2)


def test_a_prompt_that_two_prefill_instances_cannot_compute_is_computed_by_decode() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        *prefills, decode = instances
        tasks = await sent(router, "a")
        for number, each in enumerate(prefills[:2], start=1):
            each.say(ms.SubmitRefused(id=f"a/{number}", kind="busy", problem="full"))
            await settled()

        assert decode.received()[-1] == ms.ComputeLocally(id="a")
        assert prefills[2].received() == []
        await given_up(tasks)

    played(play, prefills=3)


def test_a_prefill_instance_that_died_gets_no_more_requests() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        tasks = await sent(router, "a")
        assert asked(one) == ["a/1"]

        one.channel.fail("killed")
        await settled()
        tasks += await sent(router, "b", "c")

        assert asked(two) == ["a/2", "b/1", "c/1"]
        assert asked(decode) == ["a", "b", "c"]
        assert router.pairs.names == [("prefill-1", "decode-0")]
        await given_up(tasks)

    played(play, prefills=2)


def test_a_decode_instance_without_any_prefill_instance_goes_after_one_that_computes() -> None:
    async def play(router: Router, decode: Instance) -> None:
        alone = instance_of(router, "both-0", role="both")
        await settled()

        tasks = await sent(router, "a", "b")
        assert (asked(alone), asked(decode)) == (["a", "b"], [])
        tasks += await sent(router, *(f"r{number}" for number in range(6)))

        # It helps out when the other one is busy.
        helped = [said for said in decode.received() if isinstance(said, Request)]
        assert {said.handoff for said in helped} == {""}
        await given_up(tasks)
        alone.link.close()
        alone.channel.close()

    played(play, prefills=0)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"machine": "elsewhere"}, ""),
        ({"model": "another"}, "model is 'another' at prefill and 'm' at decode"),
        ({"engine": None}, ""),
        (
            {"config": CONFIG.replace("block_tokens = 4", "block_tokens = 8")},
            "cache.block_tokens is 8 at prefill and 4 at decode",
        ),
    ],
)
def test_instances_that_cannot_hand_over_to_each_other_are_not_paired_and_it_is_said_once(
    other: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(router: Router, decode: Instance) -> None:
        far = instance_of(router, "prefill-9", **other)
        await settled()

        tasks = await sent(router, "r", "s")

        assert (asked(far), asked(decode)) == ([], ["r", "s"])
        told = [each for each in caplog.messages if "hand nothing over" in each]
        assert len(told) == (1 if problem else 0)
        assert all(problem in each for each in told)
        await given_up(tasks)
        far.link.close()
        far.channel.close()

    played(play, prefills=0)


def test_an_instance_that_computes_its_prompts_itself_is_weighed_for_both_jobs() -> None:
    async def play(router: Router, _prefill: Instance, decode: Instance) -> None:
        alone = Instance(router, "alone")
        alone.keep(16)
        decode.keep(20)
        await settled()

        tasks = await sent(router, "r")

        # Four blocks that are neither computed nor handed over, against five that are computed.
        assert (asked(alone), asked(decode)) == (["r"], [])
        await given_up(tasks)
        alone.link.close()
        alone.channel.close()

    played(play)


@pytest.mark.parametrize(
    ("kept", "threshold", "handed"), [(36, 0, False), (32, 0, True), (32, 8, False), (36, 3, True)]
)
def test_a_prompt_that_decode_has_already_is_not_started_on_prefill(
    kept: int, threshold: int, *, handed: bool
) -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        router.settings = RoutingTable(handoff_tokens_min=threshold)
        decode.keep(kept)
        await settled()

        tasks = await sent(router, "r")

        assert (asked(prefill), asked(decode)) == (["r/1"] if handed else [], ["r"])
        await given_up(tasks)

    played(play)


def test_a_request_that_may_not_use_the_cache_is_computed_by_prefill() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        decode.keep(40)
        await settled()

        task = asyncio.create_task(answered(router, submit("r", reuse=False)))
        await settled()

        assert (asked(prefill), asked(decode)) == (["r/1"], ["r"])
        await given_up([task])

    played(play)


def test_a_prefill_instance_that_fails_gets_less_to_do_for_a_while() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        [task] = await sent(router, "r")
        one.say(ms.SubmitRefused(id="r/1", kind="busy", problem="full"))
        await settled()
        decode.end("r", 7)
        await task
        assert (asked(one), asked(two), asked(decode)) == (["r/1"], ["r/2"], ["r"])

        tasks = await sent(router, "a", "b")
        change_settings(router, RoutingTable(failed_s=0))
        tasks += await sent(router, "c")

        assert (asked(one), asked(two)) == (["c/1"], ["a/1", "b/1"])
        await given_up(tasks)

    played(play, prefills=2)


def test_weights_of_the_choice_are_settings() -> None:
    async def play(router: Router, _prefill: Instance, near: Instance, far: Instance) -> None:
        near.keep(20)
        await settled()
        change_settings(router, RoutingTable(cached_weight=0, equal_blocks=0))

        tasks = await sent(router, "a", "b")

        assert (asked(near), asked(far)) == (["a"], ["b"])
        await given_up(tasks)

    played(play, decodes=2)


def change_settings(router: Router, settings: RoutingTable) -> None:
    router.settings = router._fleet.weights = settings


async def finished(router: Router, decode: Instance, name: str) -> None:
    """A request that a decode instance answers at once."""
    [task] = await sent(router, name)
    decode.end(name, 7, reason=Reason.LENGTH)
    await task
    await settled()


def pairs_in(instance: Instance) -> list[str]:
    """What an instance was told about pairs since it was last looked at."""
    found = []
    for said in instance.received():
        if isinstance(said, ms.OpenPair):
            found.append(f"open {said.pair.prefill.name} {said.pair.decode.name}")
        elif isinstance(said, ms.ClosePair):
            found.append(f"close {said.prefill} {said.decode}")
    return found


def test_a_pair_is_opened_once_and_closed_when_it_was_idle_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        monkeypatch.setattr(loop, "time", lambda: began)
        for name in ("a", "b"):
            await finished(router, decode, name)
        opened = ["open prefill-0 decode-0"]
        assert (pairs_in(prefill), pairs_in(decode)) == (opened, opened)

        monkeypatch.setattr(loop, "time", lambda: began + 1.0)
        while router.pairs.names:
            await asyncio.sleep(0)

        closed = ["close prefill-0 decode-0"]
        assert (pairs_in(prefill), pairs_in(decode)) == (closed, closed)
        assert router.pairs.names == []

    played(play, config=CONFIG + "[handoff]\nidle_s = 0.1\n")


def test_the_least_recently_used_pair_makes_room_for_another_one() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        await finished(router, decode, "a")
        await finished(router, decode, "b")

        assert pairs_in(one) == ["open prefill-0 decode-0", "close prefill-0 decode-0"]
        assert pairs_in(two) == ["open prefill-1 decode-0"]
        assert router.pairs.names == [("prefill-1", "decode-0")]

    played(play, prefills=2, config=CONFIG + "[handoff]\npeers_max = 1\n")


def test_a_pair_is_in_use_until_the_kv_has_arrived() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        first = await sent(router, "a")
        one.end("a/1", 7, reason=Reason.LENGTH)
        await settled()

        then = await sent(router, "b")
        decode.say(
            Output(
                request="a", answer=0, sampled=Sampled(7, 0.0), reason=Reason.LENGTH, handed=True
            )
        )
        await asyncio.gather(*first)
        await given_up(then)
        await settled()
        last = await sent(router, "c")

        assert asked(one) == ["a/1", "b/1"]
        assert (asked(two), asked(decode)) == (["c/1"], ["a", "b", "c"])
        await given_up(last)

    played(play, prefills=2, config=CONFIG + "[handoff]\npeers_max = 1\n")


def test_a_pair_in_use_is_not_closed_for_another_one() -> None:
    async def play(router: Router, one: Instance, two: Instance, decode: Instance) -> None:
        tasks = await sent(router, "a", "b", "c")

        assert asked(one) == ["a/1", "b/1", "c/1"]
        assert (asked(two), asked(decode)) == ([], ["a", "b", "c"])
        await given_up(tasks)

    played(play, prefills=2, config=CONFIG + "[handoff]\npeers_max = 1\n")


def test_a_pair_that_cannot_be_opened_is_closed_and_not_tried_at_once() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        first = await sent(router, "a")
        pairs_in(prefill)
        names = {"prefill": "prefill-0", "decode": "decode-0"}
        decode.say(ms.PairFailed(**names, problem="no memory"))
        await settled()
        await given_up(first)

        assert pairs_in(prefill) == ["close prefill-0 decode-0"]
        then = await sent(router, "b")
        assert (asked(prefill), asked(decode)[-1:]) == ([], ["b"])
        await given_up(then)

    played(play)


def test_other_weights_close_the_pairs_that_were_opened_for_the_old_ones() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        await finished(router, decode, "a")
        pairs_in(prefill)

        router.reset("weights are now w2", weights_version="w2")
        await finished(router, decode, "b")

        told = ["close prefill-0 decode-0", "open prefill-0 decode-0"]
        assert [each for each in pairs_in(prefill) if each in told] == told

    played(play)


def test_a_pair_that_was_opened_again_is_in_use_when_a_request_of_before_ends() -> None:
    config = CONFIG + "[handoff]\npeers_max = 1\n"

    async def play(router: Router, _: Instance, decode: Instance) -> None:
        before = await sent(router, "a")
        router.reset("weights are now w2", weights_version="w2")
        now = await sent(router, "b")
        other = instance_of(router, "prefill-1", config=config)
        await settled()

        await given_up(before)
        await settled()

        assert not router.pairs.can_use(other.link, decode.link)
        await given_up(now)
        await settled()
        assert router.pairs.can_use(other.link, decode.link)
        other.link.close()

    played(play, config=config)


def test_an_instance_never_has_more_pairs_open_than_it_may_have_when_a_peer_dies() -> None:
    async def play(router: Router, *instances: Instance) -> None:
        *prefills, decode = instances
        # Of another tenant: the same prompt would follow the first one.
        tasks = await sent(router, "a")
        other = submit("b", tenant="another")
        tasks.append(asyncio.create_task(answered(router, other)))
        await settled()
        pairs_in(decode)

        prefills[0].channel.fail("killed")
        await settled()

        assert pairs_in(decode) == ["close prefill-0 decode-0", "open prefill-2 decode-0"]
        assert asked(prefills[2]) == ["a/2"]
        await given_up(tasks)

    played(play, prefills=3, config=CONFIG + "[handoff]\npeers_max = 2\n")
