"""For each kind of KV: the same tokens and log-probabilities, whatever they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, DETECTED, HITS, LENGTHS, TAMPERED, agree, cached, counted, generate
from references import FIRST_BLOCK, LATENT

if TYPE_CHECKING:
    from conftest import Plain, Run, Told

pytestmark = pytest.mark.vllm

SETUPS: dict[str, dict[str, Any]] = {
    "llama": {"pool": 64},
    "latent": {"pool": 64, **LATENT},
    "hybrid": {"pool": 2048},
}
# Fills a pool of 64 with others, so that vLLM evicts all that it has. That of the hybrid is larger;
# what it evicts is loaded in `test_crowds.py`.
OTHERS = generate(lengths=[9 * BLOCK + 5] * 8, seed=9, max_tokens=1)
EVICTING = {"llama", "latent"}


@dataclass(frozen=True)
class Heard:
    kind: str
    plain: dict[str, Any]
    told: Told
    output: str


@pytest.fixture(scope="module", params=list(SETUPS))
def heard(request: pytest.FixtureRequest, run: Run, plain_vllm: Plain) -> Heard:
    """What plain vLLM was asked, but for host memory in place of the device's, where it can be.

    Then with each kind of damage, with damage on the device, undisturbed, and after eviction.
    """
    kind = request.param
    acts = [generate(), generate(), generate(forget=True, tamper="remember"), {"act": "reset"}]
    acts += [generate(forget=True, tamper="", **FIRST_BLOCK), generate(forget=True)]
    acts += [generate(forget=True, tamper=word) for word in DETECTED]
    acts += [generate(forget=True, tamper="device"), generate(forget=True, tamper="")]
    acts += [OTHERS, generate()] if kind in EVICTING else []
    told, output = run(kind, acts, connector=TAMPERED, **SETUPS[kind])
    return Heard(kind, plain_vllm(kind), told, output)


def test_computed_blocks_give_what_plain_vllm_gives(heard: Heard) -> None:
    assert cached(heard.told[0]) == [0] * len(LENGTHS)
    assert agree(heard.told[0], heard.plain["cold"])


def test_the_device_cache_gives_what_it_gives_without_the_connector(heard: Heard) -> None:
    assert cached(heard.told[1]) == cached(heard.plain["cached"]) == HITS
    assert agree(heard.told[1], heard.plain["cached"])
    assert counted(heard.told[1], "tokens_loaded") == 0


def test_blocks_from_host_memory_give_the_same(heard: Heard) -> None:
    assert cached(heard.told[2]) == HITS
    assert counted(heard.told[2], "tokens_loaded") == sum(HITS)
    assert agree(heard.told[2], heard.plain["cached"])


def test_nothing_is_found_after_a_weight_update(heard: Heard) -> None:
    assert heard.told[3]["reset"]
    assert cached(heard.told[4]) == [0] * len(LENGTHS)
    assert agree(heard.told[4], heard.plain["first block"])


def test_what_is_not_found_is_computed_behind_what_is(heard: Heard) -> None:
    assert cached(heard.told[5]) == [BLOCK] * len(LENGTHS)
    assert agree(heard.told[5], heard.plain["behind it"])


@pytest.mark.parametrize("word", DETECTED)
def test_a_load_failure_by_damage_is_found_and_computed_again(heard: Heard, word: str) -> None:
    position = 6 + DETECTED.index(word)
    before, act = heard.told[position - 1], heard.told[position]

    failed = counted(act, "loads_failed") - counted(before, "loads_failed")

    assert failed == len(LENGTHS)
    # The first block was sound, so vLLM went on from there.
    assert agree(act, heard.plain["behind it"])


def test_the_comparison_notices_one_block_that_was_zeroed_after_the_load(heard: Heard) -> None:
    """The control: nobody can find this, and the output must show it."""
    act = heard.told[6 + len(DETECTED)]

    assert cached(act) == HITS
    assert not agree(act, heard.plain["again"])


def test_after_all_that_host_memory_still_gives_the_same(heard: Heard) -> None:
    act = heard.told[7 + len(DETECTED)]

    assert cached(act) == HITS
    assert agree(act, heard.plain["again"])


def test_blocks_that_vllm_evicted_from_the_device_come_from_host_memory(heard: Heard) -> None:
    if heard.kind not in EVICTING:
        pytest.skip("its pool is larger than what this fills")
    before, act = heard.told[-2:]

    assert cached(act) == HITS
    assert counted(act, "tokens_loaded") - counted(before, "tokens_loaded") == sum(HITS)
    assert agree(act, heard.plain["again"])
