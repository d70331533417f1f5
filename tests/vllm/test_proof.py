"""The offload layer inside a real vLLM: scheduler and worker are separate processes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from comparing import HITS, agree, cached, generate

if TYPE_CHECKING:
    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

SABOTAGED = ["SabotagedConnector", "sabotaged_connector"]
SETUP: dict[str, Any] = {"pool": 64, "extra": {"host_blocks": 256}}
NONE = [0] * len(HITS)


@pytest.fixture(scope="module")
def plain(plain_vllm: Plain) -> dict[str, Any]:
    return plain_vllm("llama")


@pytest.fixture(scope="module")
def engine(run: Run) -> tuple[Results, str]:
    """Computed, loaded, and loaded with a hand in the works: in host memory, then on the device."""
    acts = [generate(), generate(forget=True)]
    acts += [generate(forget=True, tamper=word) for word in ("flip", "zero")]
    return run("llama", acts, connector=SABOTAGED, **SETUP)


def test_loaded_blocks_give_the_same_tokens_and_log_probabilities(
    engine: tuple[Results, str], plain: dict[str, Any]
) -> None:
    first, second = engine[0][:2]

    assert cached(first) == NONE
    assert agree(first, plain["cold"])
    assert cached(second) == HITS
    assert agree(second, plain["cached"])


def test_a_block_that_changed_in_host_memory_is_computed_again(
    engine: tuple[Results, str], plain: dict[str, Any]
) -> None:
    results, printed = engine

    assert agree(results[2], plain["behind it"])
    recovered = re.findall(r"KV load failure: (\d+) request\(s\) rescheduled", printed)
    assert sum(map(int, recovered)) == len(HITS)


def test_a_block_that_changed_on_the_device_spoils_the_output(
    engine: tuple[Results, str], plain: dict[str, Any]
) -> None:
    """The control: the comparison is able to fail."""
    assert cached(engine[0][3]) == HITS
    assert not agree(engine[0][3], plain["cached"])
