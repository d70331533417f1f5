"""A request that two instances get at once, whatever the other one does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from penstock.config import parse_config
from penstock.engine import messages as ms
from penstock.serve.instance_link import InstanceLost
from penstock.serve.router import Router
from tests.serve.test_router import CONFIG, PROMPT, Instance, answered, settled, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def pair_of(router: Router, number: int) -> tuple[Instance, Instance]:
    """A prefill and a decode instance that say they belong together."""
    names = (f"prefill-{number}", f"decode-{number}")
    prefill, decode = (Instance(router, name) for name in names)
    for each, role, partner in ((prefill, "prefill", names[1]), (decode, "decode", names[0])):
        ready = ms.InstanceReady(
            model="m",
            positions=99,
            stop_tokens=[],
            config=parse_config(CONFIG),
            tiers=["device"],
            role=role,  # type: ignore[arg-type]
            partner=partner,
        )
        each.say(ready)
    return prefill, decode


def played(play: Callable[..., Coroutine[Any, Any, None]], *, pairs: int = 1) -> None:
    """Calls `play` with a router and with the prefill and decode instance of every pair."""

    async def whole() -> None:
        router = Router()
        everybody = [each for number in range(pairs) for each in pair_of(router, number)]
        await settled()
        try:
            await play(router, *everybody)
        finally:
            for each in everybody:
                each.link.close()
                each.channel.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


async def sent(router: Router, *names: str) -> list[asyncio.Task[list[ms.TokenProgress]]]:
    """Requests that have reached their instances, one after the other."""
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(answered(router, submit(name))))
        await settled()
    return tasks


async def given_up(tasks: list[asyncio.Task[list[ms.TokenProgress]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def asked(instance: Instance) -> list[str]:
    """Requests that an instance has been sent since it was last looked at."""
    return [said.id for said in instance.received() if isinstance(said, ms.Submit)]


def test_a_request_goes_to_both_under_one_name_and_its_answer_comes_from_one() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r", answers=2)))
        await settled()

        [there], [here] = prefill.received(), decode.received()
        assert there.handoff == here.handoff == there.id
        assert (there.prompt, there.max_tokens, there.answers) == (PROMPT, 1, 1)
        assert (here.id, here.max_tokens, here.answers) == ("r", 4, 2)
        prefill.say(ms.TokenProgress(id=there.id, answer=0, token=1, reason="length"))
        for answer in (0, 1):
            decode.say(ms.TokenProgress(id="r", answer=answer, token=7, reason="length"))

        assert [progress.token for progress in await task] == [7, 7]
        assert decode.received() == []
        # Whatever it still keeps of it, nobody comes for it.
        assert set(prefill.received()) == {ms.Abort(id=there.id)}

    played(play)


def test_a_prompt_that_was_delivered_is_not_aborted() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()
        [there], _ = prefill.received(), decode.received()

        decode.say(ms.TokenProgress(id="r", answer=0, token=7, handed=True))
        decode.say(ms.TokenProgress(id="r", answer=0, token=8, reason="length"))
        await task
        await settled()
        assert prefill.received() == []
        prefill.say(ms.TokenProgress(id=there.id, answer=0, token=7, reason="length"))
        await settled()

        assert (prefill.received(), decode.received()) == ([], [])
        assert prefill.link.load == 0

    played(play)


@pytest.mark.parametrize("fate", ["refuses", "gives up", "dies"])
def test_the_answering_instance_computes_a_prompt_that_its_partner_cannot(fate: str) -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()
        [there], _ = prefill.received(), decode.received()

        if fate == "refuses":
            prefill.say(ms.SubmitRefused(id=there.id, kind="busy", problem="full"))
        elif fate == "gives up":
            prefill.say(ms.TokenProgress(id=there.id, answer=0, reason="aborted"))
        else:
            prefill.channel.fail("killed")
        await settled()

        assert decode.received() == [ms.ComputeLocally(id="r")]
        decode.say(ms.TokenProgress(id="r", answer=0, token=7, reason="stop"))
        assert [progress.token for progress in await task] == [7]

    played(play)


def test_without_a_prefill_instance_nothing_is_handed_over() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        prefill.channel.fail("killed")
        await settled()
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()

        assert decode.received() == [submit("r")]
        decode.say(ms.TokenProgress(id="r", answer=0, token=7, reason="stop"))
        assert [progress.token for progress in await task] == [7]

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
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()
        [there], _ = prefill.received(), decode.received()

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settled()

        assert ms.Abort(id="r") in decode.received()
        assert ms.Abort(id=there.id) in prefill.received()

    played(play)


def test_a_prefix_that_only_the_prefill_instance_has_chooses_its_pair() -> None:
    async def play(
        router: Router, prefill: Instance, decode: Instance, other: Instance, far: Instance
    ) -> None:
        other.keep(16)
        await settled()

        tasks = await sent(router, "r")

        assert (asked(prefill), asked(decode)) == ([], [])
        assert (asked(other), asked(far)) == (["r/1"], ["r"])
        await given_up(tasks)

    played(play, pairs=2)


def test_prompts_that_wait_before_a_prefill_instance_send_the_next_one_elsewhere() -> None:
    async def play(
        router: Router, prefill: Instance, decode: Instance, _other: Instance, far: Instance
    ) -> None:
        first = await sent(router, "a", "b")
        assert (asked(decode), asked(far)) == (["a"], ["b"])
        prefill.received()
        # One pair has answered, but its prompt is still being computed, delivered and all.
        decode.say(ms.TokenProgress(id="a", answer=0, token=7, reason="length", handed=True))
        far.say(ms.TokenProgress(id="b", answer=0, token=7, reason="length"))
        await asyncio.gather(*first)
        await settled()
        assert (decode.link.load, far.link.load, prefill.link.load) == (0, 0, 1)

        then = await sent(router, "c")

        assert (asked(decode), asked(far)) == ([], ["c"])
        await given_up(then)

    played(play, pairs=2)


def test_a_pair_that_is_whole_goes_before_one_that_has_lost_its_prefill_instance() -> None:
    async def play(
        router: Router, prefill: Instance, decode: Instance, other: Instance, far: Instance
    ) -> None:
        prefill.channel.fail("killed")
        await settled()

        tasks = await sent(router, "a", "b")

        assert (asked(other), asked(far)) == (["a/1", "b/1"], ["a", "b"])
        assert asked(decode) == []
        await given_up(tasks)

    played(play, pairs=2)


def test_a_pair_without_its_prefill_instance_helps_out_when_the_others_are_busy() -> None:
    async def play(
        router: Router, prefill: Instance, decode: Instance, _other: Instance, _far: Instance
    ) -> None:
        prefill.channel.fail("killed")
        await settled()

        tasks = await sent(router, *(f"r{number}" for number in range(6)))

        helped = [said for said in decode.received() if isinstance(said, ms.Submit)]
        assert helped
        assert {said.handoff for said in helped} == {""}
        await given_up(tasks)

    played(play, pairs=2)


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
