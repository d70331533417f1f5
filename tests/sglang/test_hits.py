"""What SGLang has evicted comes back from host memory; damage costs a prompt its hit only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from oracle import HITS, OTHERS, PENSTOCK, SIX, host_hits, same

if TYPE_CHECKING:
    from conftest import Results, Run

pytestmark = pytest.mark.sglang

TOGETHER = {"lengths": [40, 60, 80, 100], "shared": 256}
"""Requests with the same prefix, in one step."""


@pytest.fixture(scope="module")
def plain(run: Run) -> dict[str, dict[str, Any]]:
    """The answers of SGLang without any cache."""
    six, others, together = run([SIX, OTHERS, TOGETHER], options={"disable_radix_cache": True})[0]
    return {"six": six, "others": others, "together": together}


@pytest.fixture(scope="module")
def engine(run: Run) -> tuple[Results, str]:
    """One engine: cold, evicted, damaged, damaged once beside others, damaged on the device."""

    def again(word: str, act: dict[str, Any] = SIX) -> list[dict[str, Any]]:
        # What was lost is saved again, and evicted by the other prompts.
        return [{"do": "tamper", "word": word}, act, {"do": "counts"}, {"do": "tamper", "word": ""}]

    acts = [SIX, OTHERS, *again(""), OTHERS, *again("flip"), OTHERS]
    acts += [TOGETHER, OTHERS, *again("first", TOGETHER), OTHERS, *again("device")]
    acts += [{"do": "flush"}, SIX, {"do": "counts"}]
    return run(acts, **PENSTOCK)


def test_pages_that_were_evicted_come_back_and_answers_are_those_of_sglang_alone(
    engine: tuple[Results, str], plain: dict[str, dict[str, Any]]
) -> None:
    first, others, _, second, counts, *_ = engine[0]

    assert host_hits(first) == [0] * 6
    assert host_hits(second) == HITS
    assert same(first, plain["six"])
    assert same(others, plain["others"])
    assert same(second, plain["six"])
    assert counts["counts"]["tokens_loaded"] == sum(HITS)
    assert "loads_failed" not in counts["counts"]


def test_damage_in_host_memory_is_counted_and_its_prompts_are_computed(
    engine: tuple[Results, str], plain: dict[str, dict[str, Any]]
) -> None:
    damaged, counts = engine[0][8], engine[0][9]["counts"]

    assert host_hits(damaged) == [0] * 6
    assert same(damaged, plain["six"])
    assert counts["loads_failed"] == counts["checksum_failures"] == 6
    assert "reason=its checksum does not match" in engine[1]


def test_a_load_that_fails_once_beside_requests_with_the_same_prefix_ends_for_all(
    engine: tuple[Results, str], plain: dict[str, dict[str, Any]]
) -> None:
    together, counts = engine[0][15], engine[0][16]["counts"]

    assert same(together, plain["together"])
    assert counts["loads_failed"] == 7


def test_a_page_that_is_wrong_on_the_device_would_show_in_the_answers(
    engine: tuple[Results, str], plain: dict[str, dict[str, Any]]
) -> None:
    zeroed = engine[0][20]

    assert host_hits(zeroed) == HITS
    assert not same(zeroed, plain["six"])


def test_nothing_is_found_after_sglang_has_flushed_its_cache(
    engine: tuple[Results, str], plain: dict[str, dict[str, Any]]
) -> None:
    flushed, counts = engine[0][-2], engine[0][-1]["counts"]

    assert host_hits(flushed) == [0] * 6
    assert same(flushed, plain["six"])
    assert counts["resets"] == 1
