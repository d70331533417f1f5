"""Prompts that an engine computes in several steps, and hands over step by step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.connectors.conftest import TOKENS, FakeRequest
from tests.connectors.handoff_pair import (
    NULL,
    PROMPT,
    TWO_GROUPS,
    answered,
    asked,
    kv_of,
    of_layer,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.connectors.handoff_pair import Engine


def computing(prefill: Engine, *tables: Sequence[int], tokens: int = TOKENS) -> FakeRequest:
    """A request of which a step computes the first tokens, into blocks of their own."""
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.fill(PROMPT[:tokens], *tables)
    prefill.step({"asked": tokens}, tables[0], more=tables[1:])
    request.num_computed_tokens = tokens
    return request


def arrived(decode: Engine, block: int, prefill: Engine, source: int) -> bool:
    """Waits until a block was received, whatever it held."""
    return until(lambda: kv_of(decode, [block]) == kv_of(prefill, [source]))


def test_a_part_of_a_prompt_is_sent_before_the_rest_is_computed(
    opened: Callable[..., Engine], decode: Engine
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    request = computing(prefill, [3])
    assert arrived(decode, 7, prefill, 3)
    prefill.fill(PROMPT, [3, 1, 2])
    prefill.step({"asked": TOKENS}, [3, 1])
    request.num_computed_tokens = 2 * TOKENS
    assert arrived(decode, 8, prefill, 1)
    block_bytes = sum(tensor[0].numel() for tensor in prefill.kv[0])
    # The second of them is counted after it has arrived.
    assert until(lambda: prefill.ranks[0].early_bytes == 2 * block_bytes)
    assert prefill.pool.pinned == 0
    prefill.step({"asked": 2}, [3, 1, 2])
    assert prefill.pool.pinned == 3
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert prefill.released()
    assert prefill.ranks[0].early_bytes == 2 * block_bytes


def test_a_prompt_that_is_preempted_after_a_part_was_sent_is_handed_over_from_other_blocks(
    opened: Callable[..., Engine], decode: Engine
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = computing(prefill, [3])
    assert arrived(decode, 7, prefill, 3)

    prefill.step({}, preempted=["asked"])
    prefill.fill([0] * len(PROMPT), [3, 1, 2])
    request.num_computed_tokens = 0
    prefill.fill(PROMPT, [4, 5, 6])
    prefill.step({"asked": TOKENS}, [4])
    request.num_computed_tokens = TOKENS
    prefill.step({"asked": len(PROMPT) - TOKENS}, [4, 5, 6])
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [4, 5, 6])
    assert prefill.released()


def test_a_step_that_is_taken_back_is_computed_again_before_it_is_sent(
    opened: Callable[..., Engine], decode: Engine
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    request = computing(prefill, [3, 1], tokens=2 * TOKENS)

    # Block 1 was damaged: it is computed again, in its place.
    request.num_computed_tokens = TOKENS
    step = prefill.step({"asked": len(PROMPT) - TOKENS}, [3, 1, 2])

    assert step is not None
    assert step.restarted == ("h-1",)
    assert step.added["h-1"].groups == ((3, 1, 2),)
    prefill.fill(PROMPT, [3, 1, 2])
    prefill.answer(request)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_prompt_that_is_aborted_between_two_steps_leaves_nothing(
    opened: Callable[..., Engine], decode: Engine, side: str
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    wanted = answered(prefill, "h-1")
    decode.claim(wanted, [7, 8, 9])
    request = computing(prefill, [3])
    assert arrived(decode, 7, prefill, 3)

    if side == "prefill":
        prefill.requests.finish(request, completed=False)
    else:
        decode.requests.finish(wanted, completed=False)

    assert decode.ended().received == {"answered"}
    assert prefill.released()
    if side == "decode":
        # The engine computes it to its end, and says how it could be had.
        prefill.step({"asked": len(PROMPT) - TOKENS}, [3, 1, 2])
        assert prefill.answer(request)["penstock"]["handoff"] == "h-1"
        assert prefill.pool.pinned == 0


def test_a_reset_drops_a_prompt_that_is_being_computed_and_not_one_that_waits(
    opened: Callable[..., Engine], decode: Engine
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    computing(prefill, [3])
    waiting = asked("waiting", handoff="h-2")
    prefill.requests.expect(waiting)

    prefill.requests.reset()

    assert decode.ended().failed == {"answered"}
    prefill.fill(PROMPT, [4, 5, 6])
    prefill.step({"waiting": len(PROMPT)}, [4, 5, 6])
    prefill.answer(waiting)
    decode.claim(answered(prefill, "h-2"), [7, 8, 9])
    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [4, 5, 6])


def test_an_engine_that_asks_for_a_prompt_whose_handoff_has_failed_is_refused_at_once(
    opened: Callable[..., Engine], decode: Engine
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    computing(prefill, [3])
    assert arrived(decode, 7, prefill, 3)
    decode.close()
    assert prefill.released()
    another = opened("another")

    another.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert another.ended().failed == {"answered"}


def test_a_prompt_with_windows_is_sent_step_by_step_and_holds_nothing_that_has_left_them(
    opened: Callable[..., Engine],
) -> None:
    prefill, decode = (
        opened(name, groups=TWO_GROUPS, step_tokens=TOKENS) for name in ("prefill", "decode")
    )
    decode.claim(answered(prefill, "h-1"), [7, 8, 9], [NULL, 10, 11])

    request = computing(prefill, [3], [4])
    assert until(lambda: of_layer(decode, 0, [7]) == of_layer(prefill, 0, [3]))
    prefill.fill(PROMPT, [3, 1, 2], [NULL, 5, 6])
    prefill.step({"asked": TOKENS}, [3, 1], more=[[4, 5]])
    request.num_computed_tokens = 2 * TOKENS
    assert until(lambda: of_layer(decode, 1, [10]) == of_layer(prefill, 1, [5]))
    prefill.step({"asked": 2}, [3, 1, 2], more=[[NULL, 5, 6]])
    assert prefill.pool.blocks[4].ref_cnt == 0
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert of_layer(decode, 1, [10, 11]) == of_layer(prefill, 1, [5, 6])
    assert of_layer(decode, 2, [7, 8, 9]) == of_layer(prefill, 2, [3, 1, 2])
    assert prefill.released()


@pytest.mark.parametrize("seed", range(3))
def test_handoffs_that_are_aborted_anywhere_end_once_and_leave_nothing(
    opened: Callable[..., Engine], decode: Engine, seed: int
) -> None:
    prefill = opened("prefill", step_tokens=TOKENS)
    draw = random.Random(seed)
    ended: dict[str, bool] = {}
    for number in range(30):
        name, source, target = f"h-{number}", [3, 1, 2], [7, 8, 9]
        wanted, given = answered(prefill, name), asked(name, handoff=name)
        prompt = [draw.randrange(1000) for _ in PROMPT]
        wanted.all_token_ids, given.all_token_ids = [*prompt], [*prompt]
        prefill.fill(prompt, source)
        prefill.requests.expect(given)
        decode.requests.expect(wanted)
        acts = ["claim", "begin", "go on", "compute", draw.choice(["answer", "abort prefill"])]
        if draw.random() < 0.5:
            acts.insert(draw.randrange(len(acts)), "abort decode")
        if acts[-1] == "abort prefill":
            acts = acts[: draw.randrange(1, len(acts))] + acts[-1:]
        if draw.random() < 0.3:
            acts.insert(draw.randrange(len(acts)), "preempt")
        if draw.random() < 0.5:
            acts.remove("claim")
            acts.append("claim")
        done = _carry_out(acts, prefill, decode, wanted, given, source, target)
        if "claim" in done:
            step = decode.ended()
            assert step.received == {"answered"}
            ended[name] = not step.failed
            if ended[name]:
                assert kv_of(decode, target) == kv_of(prefill, source)
        else:
            decode.requests.finish(wanted, completed=False)
        assert prefill.released()

    assert any(ended.values())
    assert not all(ended.values())


STEPS = {"begin": 3, "go on": 9, "compute": len(PROMPT)}
"""How many tokens of a prompt are computed after each of its steps."""


def _carry_out(
    acts: list[str],
    prefill: Engine,
    decode: Engine,
    wanted: FakeRequest,
    given: FakeRequest,
    source: list[int],
    target: list[int],
) -> list[str]:
    """Does these things in their order, as far as an engine would: which ones were done."""
    done: list[str] = []
    for act in acts:
        if act == "claim" and "abort decode" not in done:
            decode.claim(wanted, target)
        elif act in STEPS:
            tokens = STEPS[act]
            blocks = source[: -(-tokens // TOKENS)]
            prefill.step({given.request_id: tokens - given.num_computed_tokens}, blocks)
            given.num_computed_tokens = tokens
        elif act == "preempt":
            prefill.step({}, preempted=[given.request_id])
            given.num_computed_tokens = 0
        elif act == "answer":
            prefill.answer(given)
        elif act == "abort prefill":
            prefill.requests.finish(given, completed=False)
        elif act == "abort decode":
            decode.requests.finish(wanted, completed=False)
        else:
            continue
        done.append(act)
    return done
