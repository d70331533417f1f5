"""Prompts that one vLLM computes and another one answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, HITS, LENGTHS, PENSTOCK, agree, counted
from references import LATENT

if TYPE_CHECKING:
    from conftest import Plain, Run

pytestmark = pytest.mark.vllm

Results = dict[str, dict[str, Any]]
COUNT = len(LENGTHS)
ACTS = {
    "in turn": {"act": "in_turn"},
    "again": {"act": "in_turn"},
    "forgotten": {"act": "forget"},
    "at once": {"act": "at_once"},
    "forgotten 2": {"act": "forget"},
    "in pieces": {"act": "in_pieces", "lengths": [30 * BLOCK, 9 * BLOCK + 5]},
    "forgotten 7": {"act": "forget"},
    "in one piece": {"act": "alone", "lengths": [30 * BLOCK, 9 * BLOCK + 5]},
    "forgotten 8": {"act": "forget"},
    "nobody there": {"act": "in_turn", "passes": "wrong address"},
    "forgotten 3": {"act": "forget"},
    "decode aborted": {"act": "abort_decode"},
    "forgotten 4": {"act": "forget"},
    "prefill aborted": {"act": "abort_prefill"},
    "forgotten 5": {"act": "forget"},
    "aborted anywhere": {"act": "abort_anywhere", "draws": 1, "count": 12, "within_s": 0.2},
    "after aborts": {"act": "at_once"},
    "forgotten 6": {"act": "forget"},
    "prefill killed": {"act": "kill_prefill"},
}


@pytest.fixture(scope="module")
def pair(run: Run) -> Results:
    """What a pair answered in each act."""
    acts = [{"lengths": LENGTHS, **act} for act in ACTS.values()]
    # The prefill engine computes the prompts in pieces.
    pieces = {"max_num_batched_tokens": 2 * BLOCK}
    results, _ = run("llama", acts, both={"connector": PENSTOCK}, prefill=pieces, decode={})
    return dict(zip(ACTS, results, strict=True))


def received(pair: Results, act: str) -> tuple[int, int]:
    """How many prompts an act handed over, and how many handoffs of it failed."""
    results = list(pair.values())
    at = list(ACTS).index(act)
    before = results[at - 1] if at else None
    names = ("prompts_received", "prompts_not_received")
    return tuple(
        int(counted(results[at], name) - (counted(before, name) if before else 0)) for name in names
    )


def test_a_prompt_that_one_engine_computes_is_answered_by_another(
    pair: Results, plain_vllm: Plain
) -> None:
    assert received(pair, "in turn") == (COUNT, 0)
    assert agree(pair["in turn"], plain_vllm("llama")["cold"])


def test_the_answer_of_the_prefill_engine_has_the_keys_that_proxies_know(pair: Results) -> None:
    params = pair["in turn"]["params"][0]

    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == LENGTHS[0]
    assert {"remote_engine_id", "remote_host", "remote_port", "tp_size"} <= set(params)


def test_what_the_decode_engine_has_itself_is_not_handed_over(
    pair: Results, plain_vllm: Plain
) -> None:
    assert received(pair, "again") == (0, 0)
    assert agree(pair["again"], plain_vllm("llama")["cold"])


def test_both_engines_can_be_asked_at_once(pair: Results, plain_vllm: Plain) -> None:
    assert received(pair, "at once") == (COUNT, 0)
    assert agree(pair["at once"], plain_vllm("llama")["cold"])


def test_pieces_of_a_prompt_are_sent_before_its_last_one_is_computed(pair: Results) -> None:
    assert received(pair, "in pieces")[0] >= 2
    assert pair["in pieces"]["early"] > 0
    assert agree(pair["in pieces"], pair["in one piece"])


def test_prompts_of_an_engine_that_is_not_there_are_computed(
    pair: Results, plain_vllm: Plain
) -> None:
    assert received(pair, "nobody there") == (0, COUNT)
    assert agree(pair["nobody there"], plain_vllm("llama")["cold"])


def test_aborts_on_either_side_leave_no_block_behind(pair: Results, plain_vllm: Plain) -> None:
    # Between these acts both engines were made to forget, which vLLM refuses while blocks are used.
    assert agree(pair["prefill aborted"], plain_vllm("llama")["cold"])
    assert received(pair, "after aborts") == (COUNT, 0)
    assert agree(pair["after aborts"], plain_vllm("llama")["cold"])


def test_requests_that_are_aborted_at_any_moment_leave_no_block_behind(
    pair: Results, plain_vllm: Plain
) -> None:
    assert_answered_in_spite_of_aborts(pair["aborted anywhere"], plain_vllm)


@pytest.mark.long
def test_a_hundred_requests_that_are_aborted_at_any_moment_leave_no_block_behind(
    run: Run, plain_vllm: Plain
) -> None:
    within = {"act": "abort_anywhere", "lengths": LENGTHS, "within_s": 0.2}
    acts = [
        {"act": "in_turn", "lengths": LENGTHS},
        {"act": "forget"},
        *({**within, "draws": draws, "count": 34} for draws in range(4)),
        {"act": "at_once", "lengths": LENGTHS},
    ]

    results, _ = run("llama", acts, both={"connector": PENSTOCK}, prefill={}, decode={})

    assert sum(result.get("aborted", 0) for result in results) >= 100
    for result in results[2:-1]:
        assert_answered_in_spite_of_aborts(result, plain_vllm)
    assert agree(results[-1], plain_vllm("llama")["cold"])


def assert_answered_in_spite_of_aborts(act: dict[str, Any], plain_vllm: Plain) -> None:
    expected = plain_vllm("llama")["cold"]["rows"]
    assert act["aborted"] > 0
    assert agree(act, {"rows": [expected[number] for number in act["prompts"]]})


def test_prompts_of_an_engine_that_is_killed_are_computed(pair: Results, plain_vllm: Plain) -> None:
    assert agree(pair["prefill killed"], plain_vllm("llama")["cold"])


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.long), True])
def test_each_of_two_ranks_takes_the_heads_of_its_peer(
    run: Run, plain_vllm: Plain, *, asynchronous: bool
) -> None:
    acts = [
        {"act": "in_turn", "lengths": LENGTHS},
        {"act": "forget"},
        {"act": "at_once", "lengths": LENGTHS},
    ]
    both = {"connector": PENSTOCK, "ranks": 2, "asynchronous": asynchronous}

    results, _ = run("llama", acts, both=both, ranks=2, prefill={}, decode={})

    in_turn, _, at_once = results
    # First, so that a prompt that was not handed over is known to be answered rightly.
    assert agree(in_turn, plain_vllm("llama")["cold"])
    assert agree(at_once, plain_vllm("llama")["cold"])
    assert counted(in_turn, "prompts_received") == COUNT
    assert counted(at_once, "prompts_received") == 2 * COUNT


@pytest.mark.parametrize(("prefilling", "decoding"), [(2, 1), (1, 2)])
def test_ranks_take_their_heads_from_an_engine_with_another_number_of_ranks(
    run: Run, plain_vllm: Plain, prefilling: int, decoding: int
) -> None:
    """What was handed over is saved, and joins a step layer by layer when it is needed again."""
    acts = [
        {"act": "in_turn", "lengths": LENGTHS},
        {"act": "forget"},
        {"act": "at_once", "lengths": LENGTHS},
        {"act": "forget", "keeps_host": True},
        {"act": "alone", "lengths": LENGTHS},
    ]
    both = {"connector": PENSTOCK, "extra": {"layerwise": True}}
    prefill, decode = {"ranks": prefilling}, {"ranks": decoding}

    results, _ = run("llama", acts, both=both, ranks=2, prefill=prefill, decode=decode)

    in_turn, _, at_once, _, alone = results
    assert counted(in_turn, "prompts_received") == COUNT
    assert counted(at_once, "prompts_received") == 2 * COUNT
    assert counted(alone, "tokens_loaded") == sum(HITS)
    for answered in (in_turn, at_once, alone):
        assert agree(answered, plain_vllm("llama")["cold"])


def test_latent_kv_is_handed_over(run: Run) -> None:
    # vLLM computes these in bfloat16: in other pieces they differ. Of a prompt that was handed
    # over, and of one that fills blocks but for a token and is cached, the last token is computed.
    lengths = {"lengths": [length // BLOCK * BLOCK + 1 for length in LENGTHS]}
    acts = [
        {"act": "in_turn", **lengths},
        {"act": "forget"},
        {"act": "at_once", **lengths},
        {"act": "forget"},
        {"act": "alone", **lengths},
        {"act": "alone", **lengths},
    ]

    results, _ = run("latent", acts, both={"connector": PENSTOCK, **LATENT}, prefill={}, decode={})

    in_turn, _, at_once, _, _, cached = results
    assert counted(at_once, "prompts_received") == 2 * COUNT
    assert agree(in_turn, cached)
    assert agree(at_once, cached)


def test_prompts_of_a_model_with_windows_are_handed_over(run: Run) -> None:
    """Six KV groups, of which five have a window of three blocks."""
    # Of the second one, the window of the last token begins in the block before that of the next.
    lengths = {"lengths": [9 * BLOCK + 5, 9 * BLOCK - 1, 4 * BLOCK]}
    acts = [
        {"act": "in_turn", **lengths},
        {"act": "in_turn", **lengths},
        {"act": "forget"},
        {"act": "at_once", **lengths},
        {"act": "forget"},
        {"act": "in_turn", **lengths, "passes": "wrong address"},
        {"act": "forget"},
        {"act": "alone", **lengths},
    ]
    # The prefill engine computes the prompts in pieces.
    pieces = {"max_num_batched_tokens": 4 * BLOCK}

    results, _ = run("hybrid", acts, both={"connector": PENSTOCK}, prefill=pieces, decode={})

    in_turn, again, _, at_once, _, nobody, _, alone = results
    assert counted(in_turn, "prompts_received") == COUNT
    # A window that has gone on since is handed over again.
    assert counted(again, "prompts_received") < 2 * COUNT
    assert counted(at_once, "prompts_received") == counted(again, "prompts_received") + COUNT
    assert counted(nobody, "prompts_not_received") == COUNT
    for answered in (in_turn, again, at_once, nobody):
        assert agree(answered, alone)
