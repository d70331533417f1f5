"""A model that takes images: blocks with one image in them are never served for another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, PENSTOCK, agree, announced, cached, counted, generate
from pictures import IMAGE_LENGTH

if TYPE_CHECKING:
    from conftest import Results, Run

pytestmark = pytest.mark.vllm

# The first image stands in the third block, the second in the seventh.
BEFORE, BETWEEN, AFTER = 2 * BLOCK + 9, 4 * BLOCK - 12, 3 * BLOCK
FIRST_AT = BEFORE
SECOND_AT = BEFORE + IMAGE_LENGTH + BETWEEN
LENGTH = SECOND_AT + IMAGE_LENGTH + AFTER
WHOLE = (LENGTH - 1) // BLOCK * BLOCK
SETUP: dict[str, Any] = {
    "pool": 40,
    "tokenizer": True,
    "options": {"limit_mm_per_prompt": {"image": 2}},
}


def look(*pictures: int, **how: Any) -> dict[str, Any]:
    return generate(lengths=[BEFORE, BETWEEN, AFTER], pictures=[list(pictures)], **how)


def others(seed: int) -> dict[str, Any]:
    """Text alone, never seen before, and enough of it that vLLM evicts all else from the device."""
    return generate(lengths=[9 * BLOCK + 5] * 5, seed=seed, max_tokens=1)


A, B, C = 1, 2, 3


@pytest.fixture(scope="module")
def plain(run: Run) -> Results:
    return run("seeing", [look(A, C), look(B, C), look(A, B), look(A, C)], **SETUP)[0]


@pytest.fixture(scope="module")
def results(run: Run) -> Results:
    acts = [look(A, C), others(21), look(B, C), others(22), look(A, B), others(23), look(A, C)]
    acts += [others(24), look(B, C), {"act": "events"}]
    return run("seeing", acts, connector=PENSTOCK, events=True, **SETUP)[0]


def loaded(results: Results, act: int) -> float:
    return counted(results[act], "tokens_loaded") - counted(results[act - 1], "tokens_loaded")


def test_images_are_computed_as_without_the_connector(plain: Results, results: Results) -> None:
    assert cached(results[0]) == [0]
    assert agree(results[0], plain[0])
    # The control: whichever image it is, the answer shows it.
    assert not agree(plain[0], plain[1])
    assert not agree(plain[0], plain[2])


def test_another_image_finds_only_what_stands_before_it(plain: Results, results: Results) -> None:
    before_first, before_second = (at // BLOCK * BLOCK for at in (FIRST_AT, SECOND_AT))

    assert cached(results[2]) == cached(plain[1]) == [before_first] == [loaded(results, 2)]
    assert agree(results[2], plain[1])
    assert cached(results[4]) == cached(plain[2]) == [before_second] == [loaded(results, 4)]
    assert agree(results[4], plain[2])


def test_the_same_image_is_found_in_host_memory_after_eviction(
    plain: Results, results: Results
) -> None:
    assert cached(results[6]) == cached(plain[3]) == [WHOLE] == [loaded(results, 6)]
    assert agree(results[6], plain[3])
    assert cached(results[8]) == [WHOLE] == [loaded(results, 8)]
    assert agree(results[8], plain[1])
    assert counted(results[8], "loads_failed") == 0


def test_events_tell_which_images_are_in_a_block_as_vllm_does(results: Results) -> None:
    blocks = announced(results[9])

    pictured = [block["extra_keys"][0] for block in blocks.values() if block["extra_keys"][0]]
    assert {len(keys) for keys in pictured} == {1}
    # Three images, of which one stands first and last; each is in every block it touches.
    assert len({identifier for ((identifier, _),) in pictured}) == 3
    assert FIRST_AT % BLOCK in [offset for ((_, offset),) in pictured]
