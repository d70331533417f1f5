"""SGLang's host pools as memory of pages: each layout, against what SGLang says a page is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

# SGLang warns where it is imported, and warnings are errors here.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

PAGE, PAGES, LAYERS, HEADS, WIDTH = 4, 6, 3, 2, 8
CONFIG = """
version = 1
model.name = "m"
model.weights_version = "v1"
cache.block_tokens = 4
[[tiers]]
name = "host"
kind = "host"
blocks = 8
"""
SERVER = SimpleNamespace(
    lora_paths=None,
    kv_cache_dtype="auto",
    dtype="float32",
    quantization=None,
    json_model_override_args="{}",
)


def mha_pool(layout: str) -> Any:
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache.device_pool_info import (  # noqa: PLC0415
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
    )
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: PLC0415

    def layers() -> tuple[Any, ...]:
        return tuple(torch.zeros(PAGES * PAGE, HEADS, WIDTH) for _ in range(LAYERS))

    k, v = layers(), layers()
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * PAGE,
        start_layer=0,
        end_layer=LAYERS,
    )


def storage(**more: Any) -> SimpleNamespace:
    known = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0}
    return SimpleNamespace(
        **{**known, "attn_cp_size": 1, "is_mla_model": False, "model_name": "m", **more}
    )


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_a_page_comes_back_as_sglang_had_it(layout: str) -> None:
    import torch  # noqa: PLC0415

    from penstock.connectors.sglang.host_pool import fit_config, tier_of_pool  # noqa: PLC0415
    from penstock.connectors.sglang.pool_pages import PoolPages  # noqa: PLC0415

    pool = mha_pool(layout)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    before = [pool.get_data_page(page * PAGE).clone() for page in range(PAGES)]
    config = fit_config(penstock.parse_config(CONFIG), pool)
    pages = PoolPages(penstock.open_offload(config, kv=tier_of_pool(pool)))
    keys = [bytes([number]) * 16 for number in range(2)]

    assert pages.save(keys, [1, 4]) == [True, True]
    pool.kv_buffer.zero_()
    assert pages.load(keys, [2, 3]) == [True, True]
    pages.close(1.0)

    assert torch.equal(pool.get_data_page(2 * PAGE), before[1])
    assert torch.equal(pool.get_data_page(3 * PAGE), before[4])
    assert not pool.get_data_page(1 * PAGE).any()


def test_keys_depend_on_all_that_makes_a_page_another_one(tmp_path: Path) -> None:
    from penstock.connectors.sglang.host_pool import part_of  # noqa: PLC0415

    pool, other = mha_pool("layer_first"), mha_pool("page_first")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_text("1")
    named = SimpleNamespace(lora_name="a", lora_path=str(adapter))
    adapted = SimpleNamespace(**{**vars(SERVER), "lora_paths": [named]})
    parts = [
        part_of(pool, storage(), SERVER),
        part_of(other, storage(), SERVER),
        part_of(pool, storage(tp_rank=0, tp_size=2), SERVER),
        part_of(pool, storage(tp_rank=1, tp_size=2), SERVER),
        part_of(pool, storage(model_name="n"), SERVER),
        part_of(pool, storage(), SimpleNamespace(**{**vars(SERVER), "kv_cache_dtype": "fp8"})),
        part_of(pool, storage(), adapted),
    ]
    (adapter / "weights").write_text("12")
    parts.append(part_of(pool, storage(), adapted))

    assert len(set(parts)) == len(parts)
    equal = [part_of(pool, storage(is_mla_model=True, tp_rank=rank), SERVER) for rank in (0, 1)]
    assert equal[0] == equal[1]


def test_a_pool_of_another_kind_is_refused_with_its_name() -> None:
    from penstock.connectors.sglang.host_pool import tier_of_pool  # noqa: PLC0415

    with pytest.raises(UnavailableError, match="the host pool is a ndarray, must be one of"):
        tier_of_pool(np.zeros(3))
