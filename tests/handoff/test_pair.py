"""The pair that both engines are given: checked when it is made, and without its secret in logs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock
from penstock.handoff.pair import directory_of, keys_of
from tests.handoff.conftest import a_pair

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name is '', must have 1 to 120 characters"),
    ({"name": 5}, "name is 5, must be a str"),
    ({"address": "/tmp/x"}, "address is '/tmp/x', must begin with ipc:// or tcp://"),
    ({"rank_addresses": ("x",)}, r"rank_addresses\[0\] is 'x', must begin with ipc:// or tcp://"),
    ({"layouts": ("x",)}, r"layouts\[0\] is 'x', must be a Layout"),
]


@pytest.mark.parametrize(("given", "problem"), WRONG)
def test_a_wrong_engine_is_refused_with_its_field(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        penstock.HandoffEngine(**{"name": "prefill", "address": "ipc:///x", **given})


def test_two_engines_of_one_name_are_refused() -> None:
    one = penstock.HandoffEngine(name="one", address="ipc:///x")

    with pytest.raises(ValueError, match="both engines are named 'one', names must differ"):
        a_pair(prefill=one, decode=one)


def test_prefill_ranks_on_tcp_need_addresses() -> None:
    engine = penstock.HandoffEngine(name="p", address="tcp://127.0.0.1:5000")

    with pytest.raises(ValueError, match="rank_addresses of 'p' are 0, must be 1, one for each"):
        a_pair(prefill=engine)


def test_a_secret_is_not_shown() -> None:
    assert "sesame" not in repr(a_pair(secret=b"open sesame, open"))


def test_a_key_depends_on_all_that_its_kv_depends_on() -> None:
    tokens = np.arange(10, dtype=np.uint32)
    other = tokens.copy()
    other[5] = 99
    pair = a_pair()
    keys = keys_of(pair, tokens, block_tokens=4, origin="")

    assert len(keys) == 3
    assert keys == keys_of(pair, tokens, block_tokens=4, origin="")
    changed = keys_of(pair, other, block_tokens=4, origin="")
    assert [ours == theirs for ours, theirs in zip(keys, changed, strict=True)] == [
        True,
        False,
        False,
    ]
    assert not set(keys) & set(keys_of(pair, tokens, block_tokens=4, origin="tenant"))
    assert not set(keys) & set(keys_of(a_pair(weights="v2"), tokens, block_tokens=4, origin=""))
    assert len(set(keys_of(pair, tokens[:9], block_tokens=4, origin="")) & set(keys)) == 2


def test_a_pair_without_layouts_needs_those_of_the_caller() -> None:
    layout = penstock.Layout.opaque(
        layers=[0], block_bytes=8, encoding="x", block_tokens=4, block_count=2
    )

    assert directory_of(a_pair(), layout).names == ("prefill", "prefill/0", "decode", "decode/0")
    with pytest.raises(ValueError, match="layouts of the prefill engine 'prefill' are left out"):
        directory_of(a_pair())


def test_a_pair_on_several_machines_needs_their_keys() -> None:
    engine = penstock.HandoffEngine(name="d", address="tcp://10.0.0.2:5000")

    with pytest.raises(ValueError, match=r"10\.0\.0\.2:5000', which other machines can reach"):
        a_pair(decode=engine, secret=b"sixteen bytes or more")

    pair = a_pair(decode=engine, secret=penstock.MachineKeys.new())
    assert "private" not in repr(pair)
