"""For each kind of KV: the same tokens and log-probabilities, whatever they come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, DETECTED, HITS, LENGTHS, TAMPERED, agree, cached, counted, generate
from references import FIRST_BLOCK, LATENT, SHORTER_CROWD
from where import ON_GPU

if TYPE_CHECKING:
    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

SETUPS: dict[str, dict[str, Any]] = {
    "llama": {"pool": 64},
    # Where one request at a time is compared, and then many at once are not.
    "latent": {"pool": 64, "dtype": LATENT["dtype"]},
    "hybrid": {"pool": 2048},
}
# Fills a pool of 64 with others, so that vLLM evicts all that it has. That of the hybrid is larger;
# what it evicts is loaded in `test_crowds.py`.
OTHERS = generate(lengths=[9 * BLOCK + 5] * 8, seed=9, max_tokens=1)
EVICTING = {"llama", "latent"}
LAST = 7 + len(DETECTED)
"""The act that is left undisturbed after all the others were."""


@dataclass(frozen=True)
class EngineRun:
    kind: str
    plain: dict[str, Any]
    results: Results
    output: str


@pytest.fixture(scope="module", params=list(SETUPS))
def engine(request: pytest.FixtureRequest, run: Run, plain_vllm: Plain) -> EngineRun:
    """What plain vLLM was asked, but for host memory in place of the device's, where it can be.

    Then with each kind of damage, with damage on the device, undisturbed, and after eviction.
    Latent attention also with 32 requests at once, twice, and again undisturbed.
    """
    kind = request.param
    acts = [generate(), generate(), generate(forget=True, tamper="remember"), {"act": "reset"}]
    acts += [generate(forget=True, tamper="", **FIRST_BLOCK), generate(forget=True)]
    acts += [generate(forget=True, tamper=word) for word in DETECTED]
    acts += [generate(forget=True, tamper="device"), generate(forget=True, tamper="")]
    acts += [OTHERS, generate()] if kind in EVICTING else []
    if kind == "latent":
        acts = [{**act, "alone": True} for act in acts]
        acts += [SHORTER_CROWD, SHORTER_CROWD, generate(forget=True, alone=True)]
    results, output = run(kind, acts, connector=TAMPERED, **SETUPS[kind])
    return EngineRun(kind, plain_vllm(kind), results, output)


def test_the_form_of_a_block_says_for_which_instruction_set_it_is_packed(
    engine: EngineRun,
) -> None:
    if ON_GPU:
        # Blocks lie as every GPU reads them.
        assert set(re.findall(r"ENCODING ?(.*)", engine.output)) == {""}
        return
    ((kernels, packed_for),) = set(re.findall(r"ENCODING vllm (\S+) (\S+) ", engine.output))

    if engine.kind == "latent":
        # Its blocks are not packed.
        assert (kernels.endswith("_MLA"), packed_for) == (True, "cpu")
    else:
        assert kernels == "CPU_ATTN"
        assert packed_for != "cpu"


def test_computed_blocks_give_what_plain_vllm_gives(engine: EngineRun) -> None:
    assert cached(engine.results[0]) == [0] * len(LENGTHS)
    assert agree(engine.results[0], engine.plain["cold"])


def test_the_device_cache_gives_what_it_gives_without_the_connector(engine: EngineRun) -> None:
    assert cached(engine.results[1]) == cached(engine.plain["cached"]) == HITS
    assert agree(engine.results[1], engine.plain["cached"])
    assert counted(engine.results[1], "tokens_loaded") == 0


def test_blocks_from_host_memory_give_the_same(engine: EngineRun) -> None:
    assert cached(engine.results[2]) == HITS
    assert counted(engine.results[2], "tokens_loaded") == sum(HITS)
    assert agree(engine.results[2], engine.plain["cached"])


def test_nothing_is_found_after_a_weight_update(engine: EngineRun) -> None:
    assert engine.results[3]["reset"]
    assert cached(engine.results[4]) == [0] * len(LENGTHS)
    assert agree(engine.results[4], engine.plain["first block"])


def test_what_is_not_found_is_computed_behind_what_is(engine: EngineRun) -> None:
    assert cached(engine.results[5]) == [BLOCK] * len(LENGTHS)
    assert agree(engine.results[5], engine.plain["behind it"])


@pytest.mark.parametrize("word", DETECTED)
def test_a_load_failure_by_damage_is_found_and_computed_again(engine: EngineRun, word: str) -> None:
    position = 6 + DETECTED.index(word)
    before, act = engine.results[position - 1], engine.results[position]

    failed = counted(act, "loads_failed") - counted(before, "loads_failed")

    assert failed == len(LENGTHS)
    # The first block was sound, so vLLM went on from there.
    assert agree(act, engine.plain["behind it"])
    assert counted(act, "checksum_failures") - counted(before, "checksum_failures") >= failed
    kept = counted(act, "tokens_loaded") - counted(before, "tokens_loaded")
    if engine.kind == "hybrid":
        # vLLM drops the whole load of a request with several KV groups, and asks anew.
        assert 0 <= kept <= BLOCK * len(LENGTHS)
    else:
        assert kept == BLOCK * len(LENGTHS)


def test_damage_is_in_the_log_of_vllm_with_block_and_reason(engine: EngineRun) -> None:
    """Once, and not for each of the loads that failed within a minute of the first."""
    results = re.findall(
        r"Penstock: a load failed: request=\S+ block=[0-9a-f]{32}, .*", engine.output
    )

    assert 1 <= len(results) < len(DETECTED) * len(LENGTHS)
    assert "reason=its checksum does not match" in results[0]


def test_the_comparison_notices_one_block_that_was_zeroed_after_the_load(
    engine: EngineRun,
) -> None:
    """The control: nobody can find this, and the output must show it."""
    act = engine.results[6 + len(DETECTED)]

    assert cached(act) == HITS
    assert not agree(act, engine.plain["again"])


def test_after_all_that_host_memory_still_gives_the_same(engine: EngineRun) -> None:
    act = engine.results[LAST]

    assert cached(act) == HITS
    assert agree(act, engine.plain["again"])


def test_blocks_that_vllm_evicted_from_the_device_come_from_host_memory(
    engine: EngineRun,
) -> None:
    if engine.kind not in EVICTING:
        pytest.skip("its pool is larger than what this fills")
    before, act = engine.results[LAST + 1 : LAST + 3]

    assert cached(act) == HITS
    assert counted(act, "tokens_loaded") - counted(before, "tokens_loaded") == sum(HITS)
    assert agree(act, engine.plain["again"])


def test_a_crowd_whose_answers_cannot_be_compared_loads_and_spoils_nothing(
    engine: EngineRun,
) -> None:
    """What kernels for latent attention compute for many at once is not the same twice."""
    if engine.kind != "latent":
        pytest.skip("others are compared under pressure in `test_pressure.py` and `test_crowds.py`")
    before, first, second, after = engine.results[LAST + 2 :]

    assert second["metrics"]["vllm:num_preemptions"] > 0
    assert counted(second, "tokens_loaded") > counted(first, "tokens_loaded")
    assert counted(second, "loads_failed") == counted(before, "loads_failed")
    for act in (first, second):
        assert [len(row["tokens"]) for row in act["rows"]] == [24] * 32
    # Of requests that were computed alone, host memory gives what it gave before.
    assert cached(after) == HITS
    assert agree(after, engine.plain["again"])
