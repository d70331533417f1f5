"""What computes latent attention on which machine, and that torch computes what it should."""

from __future__ import annotations

import pytest
import torch
from latent_kernels import (
    AMX,
    BY_TORCH,
    NOT_HERE,
    concat_and_cache_mla_cpu,
    decode_attention_cpu,
    extend_attention_cpu,
    how,
    how_here,
)

# What vLLM's own imports warn of is not ours.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

HEADS, CHANNELS, RANK, LENGTH, SCALE = 3, 12, 8, 10, 0.25


def test_the_machine_decides_before_an_engine_is_started() -> None:
    assert how(machine="x86_64", has_amx=True) == AMX
    assert how(machine="x86_64", has_amx=False) == BY_TORCH
    assert how(machine="aarch64", has_amx=False) == NOT_HERE + "aarch64"


def test_a_build_of_vllm_that_lacks_the_kernels_is_known_before_an_engine_is_started() -> None:
    """vLLM's AMX backend is used as it is only where vLLM itself would choose it, and has it."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM is not everywhere

    current_platform.import_kernels()
    there = hasattr(torch.ops._C, "extend_attention_cpu")

    assert there or how_here() != AMX


def test_tokens_attend_to_those_before_them_wherever_they_lie_in_the_cache() -> None:
    draw = torch.Generator().manual_seed(1)
    known = torch.randn(LENGTH, CHANNELS, generator=draw)
    query = torch.randn(LENGTH, HEADS, CHANNELS, generator=draw)
    cache = torch.full((4, 8, CHANNELS), torch.nan)
    places = torch.randperm(32, generator=draw)[:LENGTH]
    concat_and_cache_mla_cpu(
        torch.cat([known[:, :RANK], torch.ones(1, RANK)]),
        torch.cat([known[:, RANK:], torch.ones(1, CHANNELS - RANK)]),
        cache,
        torch.cat([places, torch.tensor([-1])]),
    )
    keys, row = cache.view(-1, 1, CHANNELS), torch.zeros(1, dtype=torch.int64)
    lengths, values = torch.tensor([LENGTH]), keys[..., :RANK]

    last = torch.empty(4, HEADS, RANK)
    extend_attention_cpu(
        query[-4:], None, None, last, keys, values, places[None], row, lengths,
        torch.tensor([4]), torch.tensor([0]), 4, SCALE,
    )  # fmt: skip
    one = torch.empty(1, HEADS, RANK)
    decode_attention_cpu(
        query[-1:], keys, values, one, None, None, None, torch.empty(0), places[None], row,
        lengths, SCALE,
    )  # fmt: skip

    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        known.expand(HEADS, -1, -1),
        known[:, :RANK].expand(HEADS, -1, -1),
        is_causal=True,
        scale=SCALE,
    ).transpose(0, 1)
    torch.testing.assert_close(last, expected[-4:])
    torch.testing.assert_close(one, expected[-1:])
