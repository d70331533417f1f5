"""SGLang's own device pools: what is saved of them comes back, and what is refused, and why."""

from __future__ import annotations

import hashlib
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock
from penstock.connectors.base.pages import PageTiers
from penstock.connectors.base.statistics import TransferCounts

if TYPE_CHECKING:
    from collections.abc import Callable

# What SGLang imports warns of much that is not ours.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]

PAGE, PAGES, LAYERS = 16, 31, 2
TEXT = """
version = 1
model.name = "toy"
cache.load_tokens_min = 1
[[tiers]]
name = "host"
kind = "host"
blocks = 32
"""
HASHES = [hashlib.sha256(bytes([at])).hexdigest() for at in range(4)]


def heads(dtype: torch.dtype = torch.float32) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415 - takes seconds

    return MHATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=dtype,
        head_num=3,
        head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def latent() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: PLC0415 - takes seconds

    return MLATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def buffers_of(pool: Any) -> list[torch.Tensor]:
    latents = type(pool).__name__ == "MLATokenToKVPool"
    return [*pool.kv_buffer] if latents else [*pool.k_buffer, *pool.v_buffer]


@pytest.mark.parametrize("make", [heads, latent])
def test_pages_of_a_pool_come_back_in_every_layer(make: Callable[[], Any]) -> None:
    from penstock.connectors.sglang import pools  # noqa: PLC0415 - in the environment of SGLang

    pool = make()
    for buffer in buffers_of(pool):
        buffer.copy_(torch.randn(buffer.shape))
    before = [buffer.clone() for buffer in buffers_of(pool)]
    config = pools.engine_of(pool, PAGE).fit_config(penstock.parse_config(TEXT))
    tier = pools.tier_of(pool, PAGE)
    offload = penstock.open_offload(config, kv=tier)
    size = tier.layout.block_bytes
    tiers = PageTiers(config, offload, TransferCounts(), page_bytes=size)

    with closing(tiers):
        tiers.save(HASHES, [3, 5, 7, 9])
        while not tiers.saves_ended():
            tiers.step()
        assert tiers.take_saved()
        assert tiers.load("again", HASHES, [20, 22, 24, 26])

    for buffer, old in zip(buffers_of(pool), before, strict=True):
        pages, kept = buffer.unflatten(0, (-1, PAGE)), old.unflatten(0, (-1, PAGE))
        assert torch.equal(pages[[20, 22, 24, 26]], kept[[3, 5, 7, 9]])
        assert torch.equal(pages[:20], kept[:20])
    assert size == sum(buffer[:PAGE].nbytes for buffer in before)


def why_not(pool: Any, kinds: tuple[str, ...] = ("FULL",), page: int = PAGE, **options: Any) -> str:
    from penstock.connectors.sglang import pools  # noqa: PLC0415 - in the environment of SGLang

    given = {
        "enable_dp_attention": False,
        "speculative_algorithm": None,
        "enable_unified_memory": False,
        "disaggregation_mode": "null",
        **options,
    }
    params = SimpleNamespace(page_size=page, pp_size=options.get("pp_size", 1), attn_cp_size=1)
    components = [SimpleNamespace(name=kind) for kind in kinds]
    return pools.why_not(SimpleNamespace(**given), params, components, pool)


def test_pools_and_options_that_are_not_supported_are_refused_by_name() -> None:
    pool = heads()

    assert why_not(pool) == why_not(latent()) == ""
    assert why_not(pool, page=1) == "--page-size is 1, must be at least 16: --page-size 64"
    assert "FULL and SWA states" in why_not(pool, kinds=("SWA", "FULL"))
    assert "float8_e4m3fn" in why_not(heads(torch.float8_e4m3fn))
    assert "drafts" in why_not(pool, speculative_algorithm="EAGLE")
    assert "pipeline" in why_not(pool, pp_size=2)
    assert "handing prompts over" in why_not(pool, disaggregation_mode="prefill")
    assert "unified memory" in why_not(pool, enable_unified_memory=True)
    several = why_not(pool, page=1, enable_dp_attention=True)
    assert several.count(";") == 1, "all reasons at once"


def test_another_pool_is_refused_although_it_is_a_subclass() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415 - takes seconds

    class PackedPool(MHATokenToKVPool):  # type: ignore[misc]
        pass

    pool = heads()
    pool.__class__ = PackedPool

    assert "PackedPool" in why_not(pool)


def test_an_untested_sglang_runs_without_penstock_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.connectors.sglang import versions  # noqa: PLC0415 - in the environment of SGLang

    monkeypatch.setattr(versions, "TESTED", ((0, 5, 99),))
    found = versions.linker_class()
    linker = found(None, None, components=(), extra_config={"config": "penstock.toml"})

    assert not found.__abstractmethods__
    assert linker.lookup("request", []) == []
    assert not linker.load("request", [])
    assert not linker.offload([])
    assert linker.num_completed_offloads() == 0
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    linker.reset()
    linker.close()
    assert "the linker is tested with 0.5.99" in caplog.text
