"""Caches and configurations are opened from what makes sense, and refuse the rest in words."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.errors import PenstockError
from tests.runtime.test_hostile_arguments import HOSTILE, IndexFails, RaisingIndex

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = 'version = 1\nmodel.name = "none"\n'
MANAGED = penstock.parse_config(f"{MODEL}cache = {{ block_tokens = 4, blocks = 8 }}\n")
OFFLOAD = penstock.parse_config(
    f"{MODEL}cache = {{ block_tokens = 4 }}\n"
    'tiers = [{ name = "host", kind = "memory", blocks = 16 }]\n'
)
NOTHING = {"layout": None, "keeper": None}
HERE = {**NOTHING, "ranks": None, "wait_for_tiers_s": 0.0}
ELSEWHERE = {**NOTHING, "kv": None, "wait_for_tiers_s": 0.0}


def facts(config: penstock.Config) -> list[penstock.RankFacts]:
    with penstock.open_rank(config, rank=0, kv=np.zeros((8, 4, 3))) as rank:
        return [rank.facts]


CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (penstock.open, {"config": MANAGED, "kv": np.zeros((8, 4, 3)), **HERE}),
    (penstock.open_offload, {"config": OFFLOAD, "kv": np.zeros((8, 4, 3)), **HERE}),
    (
        penstock.open_rank,
        {"config": OFFLOAD, "rank": 0, "kv": np.zeros((8, 4, 3)), "arenas": None, **NOTHING},
    ),
    (penstock.open, {"config": MANAGED, "ranks": facts(MANAGED), **ELSEWHERE}),
    (penstock.open_offload, {"config": OFFLOAD, "ranks": facts(OFFLOAD), **ELSEWHERE}),
    (penstock.load_config, {"path": "nowhere.toml"}),
    (penstock.parse_config, {"text": "no TOML", "source": ""}),
]


@pytest.mark.parametrize(("call", "right"), CASES, ids=[call.__name__ for call, _ in CASES])
def test_every_argument_has_a_case(call: Callable[..., Any], right: dict[str, Any]) -> None:
    assert set(inspect.signature(call).parameters) == set(right)


@pytest.mark.parametrize(
    ("call", "right", "wrong"),
    [
        pytest.param(call, right, wrong, id=f"{call.__name__}-{wrong}")
        for call, right in CASES
        for wrong in right
    ],
)
def test_what_makes_no_sense_is_refused(
    call: Callable[..., Any], right: dict[str, Any], wrong: str
) -> None:
    for value in HOSTILE:
        try:
            opened = call(**{**right, wrong: value})
        except (penstock.InvariantViolation, penstock.AccessError):
            raise
        except (ValueError, PenstockError):
            continue
        except IndexFails:
            if not isinstance(value, RaisingIndex):
                raise
            continue
        # It was no nonsense to this call.
        opened.close()
