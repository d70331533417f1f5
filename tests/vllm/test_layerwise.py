"""Steps that compute on loads while they arrive: the same output, and nothing unverified in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, DETECTED, HITS, LENGTHS, agree, cached, counted, generate
from references import FEWER, FIRST_BLOCK, LATENT, SHARED, THREE

if TYPE_CHECKING:
    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

LAYERED = ["LayeredConnector", "layered_connector"]
OFFERING = ["OfferingConnector", "layered_connector"]
LAYERWISE = {"extra": {"layerwise": True}}
SMALL_POOL: dict[str, Any] = {"pool": 20, "max_model_len": 416, "max_num_batched_tokens": 416}
# One process for all but the worker: requests that are given together meet in one step. Steps
# are so short that a prompt which is computed again takes several.
TOGETHER: dict[str, Any] = {
    "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "max_num_batched_tokens": 128,
    "options": {"long_prefill_token_threshold": BLOCK},
}


def joined(output: str) -> list[str]:
    """What each step that joined loads has told, in order."""
    lines = output.splitlines()
    return [line.removeprefix("JOINED ") for line in lines if line.startswith("JOINED ")]


@pytest.fixture(scope="module")
def plain(plain_vllm: Plain) -> dict[str, Any]:
    """Plain vLLM: cold, from its own cache, again after one block of each prompt, and others."""
    return plain_vllm("llama")


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "asynchronous"])
def engine(run: Run, request: pytest.FixtureRequest) -> tuple[Results, str]:
    """The connector: cold, from host memory, with each kind of damage, and with what else fails."""
    acts = [generate(), generate(forget=True, tamper="remember"), {"act": "reset"}]
    acts += [generate(forget=True, tamper="", **FIRST_BLOCK), generate(forget=True)]
    acts += [generate(forget=True, tamper=word) for word in DETECTED]
    acts += [generate(forget=True, tamper=word) for word in ("late", "astray", "device", "")]
    how = {**LAYERWISE, "asynchronous": request.param}
    return run("llama", acts, connector=LAYERED, **how)


@pytest.fixture(scope="module")
def results(engine: tuple[Results, str]) -> Results:
    return engine[0]


def test_blocks_from_host_memory_give_what_plain_vllm_gives(
    plain: dict[str, Any], results: Results
) -> None:
    assert cached(results[0]) == [0] * len(LENGTHS)
    assert agree(results[0], plain["cold"])
    assert cached(results[1]) == HITS
    assert counted(results[1], "tokens_loaded") == sum(HITS)
    assert agree(results[1], plain["cached"])


def test_vllm_comes_by_at_every_layer(engine: tuple[Results, str]) -> None:
    steps = joined(engine[1])

    assert steps
    assert all(" by layer " in step for step in steps)


def test_what_is_not_found_is_computed_behind_what_is(
    plain: dict[str, Any], results: Results
) -> None:
    assert cached(results[4]) == [BLOCK] * len(LENGTHS)
    assert agree(results[4], plain["behind it"])


@pytest.mark.parametrize("word", [*DETECTED, "late"])
def test_loads_that_fail_are_taken_back_and_computed(
    plain: dict[str, Any], results: Results, word: str
) -> None:
    """Damaged blocks, and loads whose time was up before a layer came by."""
    position = 5 + [*DETECTED, "late"].index(word)
    before, act = results[position - 1], results[position]

    failed = counted(act, "loads_failed") - counted(before, "loads_failed")

    assert failed == len(LENGTHS)
    # The first block was sound, unless all came too late: vLLM went on from there.
    assert agree(act, plain["cold" if word == "late" else "behind it"])


def test_a_step_whose_layers_did_not_wait_is_taken_back(
    plain: dict[str, Any], results: Results
) -> None:
    assert agree(results[6 + len(DETECTED)], plain["cold"])


def test_the_comparison_notices_one_block_that_was_zeroed_after_the_load(
    plain: dict[str, Any], results: Results
) -> None:
    """The control: nobody can find this, and the output must show it."""
    act = results[7 + len(DETECTED)]

    assert cached(act) == HITS
    assert not agree(act, plain["again"])


def test_after_all_that_host_memory_still_gives_the_same(
    plain: dict[str, Any], results: Results
) -> None:
    assert cached(results[-1]) == HITS
    assert agree(results[-1], plain["again"])


def test_latent_kv_gives_the_same_sound_or_damaged(run: Run) -> None:
    """In the pieces in which vLLM itself computes: its kernels differ in the third digit."""
    alone = {"params": {"penstock": False}}
    acts = [generate(**FIRST_BLOCK), generate(forget=True), generate(), generate(forget=True)]
    acts += [generate(forget=True, tamper="flip")]
    acts += [generate(forget=True, **FIRST_BLOCK, **alone), generate(**alone)]

    results, output = run(
        "latent",
        acts,
        connector=LAYERED,
        **LATENT,
        **LAYERWISE,
    )

    _, first_block, device, host, damaged, _, plain = results
    assert cached(host) == HITS
    assert agree(host, device)
    assert agree(first_block, plain)
    assert counted(damaged, "loads_failed") == len(LENGTHS)
    assert agree(damaged, plain)
    assert joined(output) == ["1 by layer 0 invalid"] * 6 + ["1 by layer 1 invalid"] * 3


def test_a_block_that_one_rank_finds_damaged_is_computed_by_both(
    run: Run, plain: dict[str, Any]
) -> None:
    acts = [generate(), generate(forget=True), generate(forget=True, tamper="flip")]

    how = {**LAYERWISE, "ranks": 2, "asynchronous": True}
    results, output = run("llama", acts, connector=LAYERED, **how)

    assert cached(results[1]) == HITS
    assert agree(results[1], plain["cached"])
    assert counted(results[2], "loads_failed") == len(LENGTHS)
    assert agree(results[2], plain["behind it"])
    invalid = [int(step.split()[-2]) for step in joined(output)]
    assert sum(invalid) == len(LENGTHS)


def test_a_pool_of_twenty_blocks_is_enough(run: Run, plain: dict[str, Any]) -> None:
    """Requests are preempted, and then some of their loads are damaged."""
    acts = [FEWER, FEWER, {**FEWER, "tamper": "flip"}]
    how = {**LAYERWISE, **SMALL_POOL, "asynchronous": True}
    results, output = run("llama", acts, connector=LAYERED, **how)

    assert results[1]["metrics"]["vllm:num_preemptions"] > 0
    assert agree(results[0], plain["fewer"])
    assert agree(results[1], plain["fewer"])
    assert joined(output)
    assert counted(results[1], "loads_failed") == 0
    assert agree(results[2], plain["fewer"])
    assert counted(results[2], "loads_failed") > 0


@pytest.fixture(scope="module")
def together() -> list[dict[str, Any]]:
    """Three requests on one prefix, in one step that loads it damaged; then from the device.

    Then the same, and they are taken back after that step; then they come again.
    """
    return [
        THREE,
        {**THREE, "forget": True, "tamper": "exchange"},
        THREE,
        {**THREE, "act": "abort", "forget": True, "tamper": "tail", "found": SHARED},
        {**THREE, "tamper": ""},
    ]


def test_no_second_request_is_served_from_a_block_that_was_not_verified(
    run: Run, plain: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    results, output = run("llama", together, connector=LAYERED, **LAYERWISE, **TOGETHER)

    # Each of them loaded the prefix for itself, in the same step, and two blocks were exchanged.
    assert joined(output)[0] == "3 by layer 6 invalid"
    assert agree(results[1], plain["three"])
    assert agree(results[2], plain["three"])
    assert joined(output)[1] == "3 by layer 3 invalid"
    assert max(cached(results[4])) < SHARED
    assert agree(results[4], plain["three"])


def test_nor_is_one_in_a_step_that_was_planned_before_that_was_known(
    run: Run, plain: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    how = {**LAYERWISE, **TOGETHER, "asynchronous": True}
    results, output = run("llama", together[:3], connector=LAYERED, **how)

    assert joined(output)[0] == "3 by layer 6 invalid"
    assert agree(results[1], plain["three"])
    assert agree(results[2], plain["three"])


def test_left_to_itself_vllm_would_serve_them(
    run: Run, plain: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    """The control: blocks can be matched from the moment they are allocated."""
    results, output = run("llama", together, connector=OFFERING, **LAYERWISE, **TOGETHER)

    assert joined(output)[0] == "1 by layer 2 invalid"
    assert not agree(results[1], plain["three"])
    assert not agree(results[4], plain["three"])
