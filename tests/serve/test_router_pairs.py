"""A request that two instances get at once: who is told what, whatever the other one does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.serve.test_router import CONFIG, PROMPT, Instance, answered, settled, submit

from penstock.engine import messages as ms
from penstock.serve.link import Lost
from penstock.serve.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def played(play: Callable[[Router, Instance, Instance], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        router = Router()
        pair = [Instance(router, name) for name in ("prefill-0", "decode-0")]
        for each, role, partner in zip(
            pair, ("prefill", "decode"), ("decode-0", "prefill-0"), strict=True
        ):
            ready = ms.Ready(
                model="m",
                positions=99,
                stop_tokens=[],
                config=CONFIG,
                tiers=["device"],
                role=role,  # type: ignore[arg-type]
                partner=partner,
            )
            each.say(ready)
        await settled()
        try:
            await play(router, *pair)
        finally:
            for each in pair:
                each.link.close()
                each.channel.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_request_goes_to_both_under_one_name_and_its_answer_comes_from_one() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r", answers=2)))
        await settled()

        [there], [here] = prefill.heard(), decode.heard()
        assert there.handoff == here.handoff == there.id
        assert (there.prompt, there.max_tokens, there.answers) == (PROMPT, 1, 1)
        assert (here.id, here.max_tokens, here.answers) == ("r", 4, 2)
        prefill.say(ms.Progress(id=there.id, answer=0, token=1, reason="length"))
        for answer in (0, 1):
            decode.say(ms.Progress(id="r", answer=answer, token=7, reason="length"))

        assert [progress.token for progress in await task] == [7, 7]
        assert decode.heard() == []
        # Whatever it still keeps of it, nobody comes for it.
        assert set(prefill.heard()) == {ms.Abort(id=there.id)}

    played(play)


def test_a_prompt_that_was_delivered_is_not_aborted() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()
        [there], _ = prefill.heard(), decode.heard()

        decode.say(ms.Progress(id="r", answer=0, token=7, handed=True))
        decode.say(ms.Progress(id="r", answer=0, token=8, reason="length"))
        await task
        await settled()
        assert prefill.heard() == []
        prefill.say(ms.Progress(id=there.id, answer=0, token=7, reason="length"))
        await settled()

        assert (prefill.heard(), decode.heard()) == ([], [])
        assert prefill.link.load == 0

    played(play)


@pytest.mark.parametrize("fate", ["refuses", "gives up", "dies"])
def test_who_answers_is_told_when_nobody_computes_its_prompt(fate: str) -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()
        [there], _ = prefill.heard(), decode.heard()

        if fate == "refuses":
            prefill.say(ms.Refused(id=there.id, kind="busy", problem="full"))
        elif fate == "gives up":
            prefill.say(ms.Progress(id=there.id, answer=0, reason="aborted"))
        else:
            prefill.channel.fail("killed")
        await settled()

        assert decode.heard() == [ms.Local(id="r")]
        decode.say(ms.Progress(id="r", answer=0, token=7, reason="stop"))
        assert [progress.token for progress in await task] == [7]

    played(play)


def test_without_a_prefill_instance_nothing_is_handed_over() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        prefill.channel.fail("killed")
        await settled()
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()

        assert decode.heard() == [submit("r")]
        decode.say(ms.Progress(id="r", answer=0, token=7, reason="stop"))
        assert [progress.token for progress in await task] == [7]

    played(play)


def test_without_a_decode_instance_nobody_answers() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        decode.channel.fail("killed")
        await settled()

        with pytest.raises(Lost, match="no instance is ready"):
            await answered(router, submit("r"))
        assert prefill.heard() == []

    played(play)


def test_a_client_that_goes_away_takes_its_request_along_on_both() -> None:
    async def play(router: Router, prefill: Instance, decode: Instance) -> None:
        task = asyncio.create_task(answered(router, submit("r")))
        await settled()
        [there], _ = prefill.heard(), decode.heard()

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settled()

        assert ms.Abort(id="r") in decode.heard()
        assert ms.Abort(id=there.id) in prefill.heard()

    played(play)
