"""Prompts that one engine computes and another answers: handed over, or computed by decode."""

from __future__ import annotations

import os
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from penstock.connectors.handoff.requests import engine_cores
from penstock.handoff import HandoffSettings, HandoffTimes
from tests.connectors.conftest import TOKENS, FakeRequest
from tests.connectors.handoff_pair import (
    NULL,
    PROMPT,
    SOON_S,
    TWO_GROUPS,
    answered,
    asked,
    kv_of,
    of_layer,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.connectors.handoff_pair import Engine


def test_a_prompt_is_handed_over_after_it_was_answered(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)

    decode.claim(request, [7, 8, 9])

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert prefill.released()
    assert decode.counters.take()["tokens_received"] == len(PROMPT)
    sent = prefill.counters.take()
    assert (sent.get("prompts_sent", 0), sent.get("prompts_not_sent", 0)) == (1, 0)


def test_a_prompt_is_handed_over_while_it_is_computed(prefill: Engine, decode: Engine) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.fill(PROMPT, [3, 1, 2])

    prefill.step({"asked": 4}, [3])
    request.num_computed_tokens = 4
    prefill.step({"asked": 6}, [3, 1, 2])
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])


def test_only_what_the_decode_engine_lacks_is_handed_over(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)

    decode.claim(request, [7, 8, 9], computed=TOKENS)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [8, 9]) == kv_of(prefill, [1, 2])
    assert not any(int(tensor[7].sum()) for tensor in decode.kv[0])


def test_a_prompt_of_which_a_block_is_missing_is_computed(prefill: Engine, decode: Engine) -> None:
    decode.requests.expect(answered(prefill, "h-1"))
    decode.claim(answered(prefill, "h-2"), [7, 8, 9])
    prefill.prefill(asked(handoff="h-1"), [3, 1, 2])

    found = decode.requests.find_tokens(answered(prefill, "h-1"), 2 * TOKENS)

    assert found == 0


def test_the_blocks_of_a_prompt_that_is_not_needed_are_free(
    prefill: Engine, decode: Engine
) -> None:
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)
    decode.claim(request, [7, 8, 9])
    decode.ended()
    again = prefill.prefill(asked("second"), [4, 5, 6])
    second = FakeRequest("second", PROMPT, kv_transfer_params=again)

    decode.requests.expect(second)
    decode.requests.finish(second, completed=False)

    assert prefill.released()
    sent = prefill.counters.take()
    assert (sent["prompts_sent"], sent["prompts_not_sent"]) == (1, 1)


@pytest.mark.parametrize(("prefilling", "decoding"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_ranks_of_engines_with_other_numbers_of_them_get_their_heads(
    opened: Callable[..., Engine], prefilling: int, decoding: int
) -> None:
    prefill, decode = opened("prefill", ranks=prefilling), opened("decode", ranks=decoding)
    params = prefill.prefill(asked(), [3, 1, 2])
    second = asked("second", handoff="h-2")
    second.all_token_ids = second.all_token_ids[::-1]
    prefill.requests.expect(second)
    prefill.fill(second.all_token_ids, [4, 5, 6])

    decode.claim(FakeRequest("answered", PROMPT, kv_transfer_params=params), [7, 8, 9])
    assert decode.ended().failed == frozenset()
    at_once = answered(prefill, "h-2")
    at_once.all_token_ids = [*second.all_token_ids]
    decode.claim(at_once, [10, 11, 12])
    prefill.step({"second": len(PROMPT)}, [4, 5, 6])
    prefill.answer(second)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert kv_of(decode, [10, 11, 12]) == kv_of(prefill, [4, 5, 6])
    assert prefill.released()


@pytest.mark.parametrize(("prefilling", "decoding"), [(1, 1), (2, 1)])
def test_a_group_with_a_window_is_handed_over_as_far_as_it_is_kept(
    opened: Callable[..., Engine], prefilling: int, decoding: int
) -> None:
    prefill = opened("prefill", ranks=prefilling, groups=TWO_GROUPS)
    decode = opened("decode", ranks=decoding, groups=TWO_GROUPS)
    params = prefill.prefill(asked(), [3, 1, 2], [NULL, 4, 5])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)
    nothing = of_layer(decode, 1, [NULL])

    decode.claim(request, [7, 8, 9], [NULL, NULL, 10])

    assert decode.ended().failed == frozenset()
    for layer in TWO_GROUPS[0]:
        assert of_layer(decode, layer, [7, 8, 9]) == of_layer(prefill, layer, [3, 1, 2])
    assert of_layer(decode, 1, [10]) == of_layer(prefill, 1, [5])
    assert of_layer(decode, 1, [NULL]) == nothing
    assert prefill.released()
    assert decode.counters.take()["tokens_received"] == len(PROMPT) - 1


def test_a_group_of_which_nothing_is_read_is_not_handed_over(
    opened: Callable[..., Engine],
) -> None:
    prefill, decode = (opened(name, groups=TWO_GROUPS) for name in ("prefill", "decode"))
    decode.claim(answered(prefill, "h-1"), [7, 8, 9], [NULL, NULL, NULL])

    prefill.prefill(asked(handoff="h-1"), [3, 1, 2], [NULL, 4, 5])

    assert decode.ended().failed == frozenset()
    assert of_layer(decode, 0, [7, 8, 9]) == of_layer(prefill, 0, [3, 1, 2])


def test_a_prompt_of_which_the_prefill_engine_has_lost_a_window_is_computed(
    opened: Callable[..., Engine],
) -> None:
    prefill, decode = (opened(name, groups=TWO_GROUPS) for name in ("prefill", "decode"))
    params = prefill.prefill(asked(), [3, 1, 2], [NULL, NULL, 5])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)

    decode.claim(request, [7, 8, 9], [NULL, 10, 11])

    assert decode.ended().failed == {"answered"}
    assert prefill.released()


def test_engines_that_group_their_layers_otherwise_refuse_each_other(
    opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = opened("prefill", groups=TWO_GROUPS), opened("decode", groups=[[0], [1, 2]])

    decode.claim(answered(prefill, "h-1"), [7, 8, 9], [NULL, 10, 11])

    assert decode.ended().failed == {"answered"}
    assert "layers of KV groups is [[0, 2], [1]] here and [[0], [1, 2]] there" in caplog.text


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_engines_whose_blocks_cannot_be_cut_into_heads_refuse_each_other(
    opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture, ranks: tuple[int, int]
) -> None:
    prefill, decode = (
        opened(name, ranks=count, by_head=False)
        for name, count in zip(("prefill", "decode"), ranks, strict=True)
    )

    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == {"answered"}
    assert "plane opaque of layer 0 has no heads to cut" in caplog.text


@pytest.mark.parametrize("aborted", ["", "first", "second"])
def test_of_two_requests_that_name_one_handoff_the_first_has_it(
    prefill: Engine, decode: Engine, aborted: str
) -> None:
    """As after a retry of a router: the second one is computed."""
    params = prefill.prefill(asked(), [3, 1, 2])
    first, second = (
        FakeRequest(name, PROMPT, kv_transfer_params=params) for name in ("first", "second")
    )
    decode.claim(first, [7, 8, 9])

    decode.requests.expect(second)
    assert decode.requests.find_tokens(second, 0) == 0
    assert not decode.requests.is_claimed(second)
    if aborted:
        request = first if aborted == "first" else second
        decode.requests.finish(request, completed=False)

    step = decode.ended()
    assert step.received == {"first"}
    if aborted != "first":
        assert step.failed == frozenset()
        assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert prefill.released()


def test_a_name_that_cannot_be_sent_is_none(prefill: Engine, decode: Engine) -> None:
    decode.requests.expect(answered(prefill, "\ud800"))

    assert decode.requests.find_tokens(answered(prefill, "\ud800"), 0) == 0


def test_engines_with_other_weights_refuse_each_other(
    prefill: Engine, opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    other = opened("decode", weights="v2")

    other.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert other.ended().failed == {"answered"}
    assert "weights is 'v1' here and 'v2' there" in caplog.text
    assert other.counters.take() == {"prompts_not_received": 1}


def test_engines_whose_kv_would_travel_in_different_ways_refuse_each_other(
    prefill: Engine, opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    other = opened("decode", transport="shared_memory")

    other.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert other.ended().failed == {"answered"}
    assert "transport is 'auto' here and 'shared_memory' there" in caplog.text
    assert other.counters.take() == {"prompts_not_received": 1}


def test_a_prompt_that_is_aborted_is_computed_by_the_decode_engine(
    prefill: Engine, decode: Engine
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.step({"asked": 4}, [3])

    prefill.requests.finish(request, completed=False)

    assert decode.ended().failed == {"answered"}


def test_a_prompt_that_was_aborted_before_anybody_wanted_it_is_refused_at_once(
    prefill: Engine, decode: Engine
) -> None:
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.requests.finish(request, completed=False)

    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == {"answered"}


def test_a_prompt_whose_request_was_preempted_is_computed_anew_and_handed_over(
    prefill: Engine, decode: Engine
) -> None:
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.step({"asked": 8}, [3, 1])

    prefill.step({}, preempted=["asked"])
    prefill.fill(PROMPT, [4, 5, 6])
    prefill.step({"asked": len(PROMPT)}, [4, 5, 6])
    prefill.answer(request)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [4, 5, 6])


def test_a_claim_that_ends_before_engines_have_met_gives_the_prompt_back(
    opened: Callable[..., Engine], decode: Engine
) -> None:
    # It is not released because nobody asked for it.
    times = HandoffTimes(lease_s=100 * SOON_S)
    prefill = opened("prefill", settings=HandoffSettings(times=times))
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)
    assert prefill.pool.pinned == 3

    decode.claim(request, [7, 8, 9])
    decode.requests.finish(request, completed=False)

    assert decode.ended().failed == {"answered"}
    assert prefill.released()


def test_a_prompt_that_nobody_asks_for_is_kept_as_long_as_configured(
    opened: Callable[..., Engine],
) -> None:
    prefill = opened("prefill", settings=HandoffSettings(times=HandoffTimes(lease_s=0.1)))

    prefill.prefill(asked(), [3, 1, 2])

    assert prefill.released()


def test_a_prompt_is_offered_to_one_engine_only(
    prefill: Engine, decode: Engine, opened: Callable[..., Engine]
) -> None:
    second = opened("second")
    request = asked(handoff="h-1")
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    prefill.requests.expect(request)
    until(lambda: any(each.handoffs for each in prefill._handoffs._peers))

    second.claim(answered(prefill, "h-1"), [4, 5, 6])

    assert second.ended().failed == {"answered"}
    # The first one gets it all the same, and nothing that the second one says takes it away.
    prefill.fill(PROMPT, [3, 1, 2])
    prefill.step({"asked": len(PROMPT)}, [3, 1, 2])
    prefill.answer(request)
    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert not any(int(tensor[[4, 5, 6]].sum()) for tensor in second.kv[0])
    assert prefill.released()


def test_a_claim_of_an_aborted_request_ends_once(prefill: Engine, decode: Engine) -> None:
    request = answered(prefill, "h-1")
    decode.claim(request, [7, 8, 9])

    decode.requests.finish(request, completed=False)

    assert decode.ended().received == {"answered"}
    assert decode.step() is None


def test_the_claims_of_an_engine_that_is_gone_count_as_lost(
    prefill: Engine, decode: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    until(lambda: prefill._handoffs._wants)

    prefill.close()

    assert decode.ended().failed == {"answered"}
    assert decode.counters.take() == {"prompts_not_received": 1, "prompts_lost": 1}
    assert "its handoff was lost with the prefill engine: request=answered" in caplog.text


def test_an_engine_that_is_gone_already_is_not_waited_for(
    prefill: Engine, opened: Callable[..., Engine]
) -> None:
    decode = opened("decode", settings=HandoffSettings(times=HandoffTimes(suspect_s=SOON_S)))
    request = answered(prefill, "h-1")
    prefill.close()

    decode.claim(request, [7, 8, 9])

    assert decode.ended().failed == {"answered"}


def test_a_pair_may_take_as_long_to_open_as_a_prompt_may_take(
    prefill: Engine, opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose first step takes long opens its side after it."""
    decode = opened("decode", settings=HandoffSettings(times=HandoffTimes(handoff_s=0.4)))
    step = Event()
    prefill._rank_threads[0].post(step.wait, SOON_S)

    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == {"answered"}
    assert "it did not open within 0.4 s" in caplog.text
    step.set()


def test_the_prompts_for_an_engine_that_is_gone_are_released(
    prefill: Engine, decode: Engine
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.step({"asked": len(PROMPT)}, [3, 1, 2])
    until(lambda: any(each.handoffs for each in prefill._handoffs._peers))
    assert prefill.pool.pinned == 3

    decode.close()

    assert prefill.released()


def test_a_reset_drops_prompts_and_claims(prefill: Engine, decode: Engine) -> None:
    prefill.prefill(asked(), [3, 1, 2])
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    prefill.requests.reset()
    decode.requests.reset()

    assert prefill.released()
    assert decode.ended().failed == {"answered"}


def test_the_kv_of_another_prompt_is_never_taken(prefill: Engine, decode: Engine) -> None:
    prefill.prefill(asked(handoff="h-1"), [3, 1, 2])
    other = answered(prefill, "h-1")
    other.all_token_ids[1] += 1

    decode.claim(other, [7, 8, 9])

    assert decode.ended().failed == {"answered"}
    assert prefill.released()


def test_a_thread_that_a_bound_worker_starts_has_the_cores_of_the_engine() -> None:
    cores: list[set[int]] = []
    before = os.sched_getaffinity(0)
    bound = {min(before)}
    os.sched_setaffinity(0, bound)
    try:
        with engine_cores():
            thread = Thread(target=lambda: cores.append(os.sched_getaffinity(0)))
            thread.start()
        cores.append(os.sched_getaffinity(0))
        thread.join(SOON_S)
    finally:
        os.sched_setaffinity(0, before)

    assert sorted(cores, key=len) == [bound, bound | os.sched_getaffinity(os.getppid())]
