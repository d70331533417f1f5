"""From a configuration and arrays to a running cache, or to one clear refusal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.errors import ConfigError
from penstock.testing.tier_suite import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.config import Config

MODEL = 'version = 1\n[model]\nname = "none"\n'
HOST = '[[tiers]]\nname = "host"\nkind = "memory"\nblocks = 16\n'
MANAGED = f"{MODEL}[cache]\nblocks = 8\nblock_tokens = 4\n{HOST}"
OFFLOAD = f"{MODEL}[cache]\nblock_tokens = 4\n{HOST}"
OPENERS = [(penstock.open, MANAGED), (penstock.open_offload, OFFLOAD)]


def arrays(layers: int = 1, blocks: int = 8) -> list[NDArray[np.float32]]:
    return [np.zeros((blocks, 4, 3), dtype=np.float32) for _ in range(layers)]


def config(text: str, **replaced: str) -> Config:
    for key, value in replaced.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    return penstock.parse_config(text)


@pytest.mark.parametrize("as_kind", [str, lambda path: path])
def test_a_configuration_may_be_a_file(
    tmp_path: Path, as_kind: Callable[[Path], Path | str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(MANAGED)

    cache = penstock.open(as_kind(path), kv=arrays())

    assert [tier.slots for tier in cache.statistics().tiers] == [8, 16]


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.toml"

    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read")):
        penstock.open(path, kv=arrays())


@pytest.mark.parametrize("kv", [arrays()[0], arrays(), arrays(3), tuple(arrays(2))])
def test_kv_is_one_array_or_one_a_layer(
    kv: NDArray[np.float32] | list[NDArray[np.float32]],
) -> None:
    cache = penstock.open(config(MANAGED), kv=kv)

    with cache.acquire(range(6)) as lease:
        assert len(lease.block_table) == 2


def test_the_device_may_have_more_blocks_than_are_managed() -> None:
    cache = penstock.open(config(MANAGED), kv=arrays(blocks=20))

    assert cache.statistics().tiers[0].slots == 8


@pytest.mark.parametrize("kind", LAYOUTS)
def test_arrays_of_every_layout_can_be_cached(kind: str) -> None:
    layout = LAYOUTS[kind]
    groups = len(layout.groups)
    text = MANAGED.replace("block_tokens = 4", f"block_tokens = 4\ngroups = {groups}")
    kv = [np.zeros(size, dtype=np.uint8) for size in layout.buffer_bytes.values()]

    cache = penstock.open(config(text, blocks="6"), kv=kv, layout=layout)

    with cache.acquire(range(9)) as lease:
        lease.commit(range(9))
    while cache.busy:
        cache.step()
    assert cache.statistics().tiers[1].ready == 2
    cache.audit()


# ---------------------------------------------------------------- refusals


def test_more_blocks_than_the_arrays_have_are_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        penstock.open(config(MANAGED, blocks="9"), kv=arrays(blocks=8))

    assert str(refusal.value) == ("cache.blocks: is 9, must be at most 8, the blocks that kv has")


def test_managing_no_blocks_is_refused_with_the_other_way_in() -> None:
    with pytest.raises(ConfigError, match=r"cache\.blocks: is 0: .* use penstock\.open_offload"):
        penstock.open(config(OFFLOAD), kv=arrays())


def test_offloading_managed_blocks_is_refused_with_the_other_way_in() -> None:
    with pytest.raises(ConfigError, match=r"cache\.blocks: is 8: .* leave it out, or use penstock"):
        penstock.open_offload(config(MANAGED), kv=arrays())


@pytest.mark.parametrize(("opener", "text"), OPENERS)
def test_more_than_one_rank_is_refused(opener: Callable[..., object], text: str) -> None:
    two_ranks = config(text.replace("block_tokens = 4", "block_tokens = 4\nranks = 2"))

    with pytest.raises(ConfigError, match=r"cache\.ranks: is 2, must be 1"):
        opener(two_ranks, kv=arrays())


@pytest.mark.parametrize(("opener", "text"), OPENERS)
def test_a_layout_with_blocks_of_another_size_is_refused(
    opener: Callable[..., object], text: str
) -> None:
    layout = LAYOUTS["latent"]
    kv = [np.zeros(size, dtype=np.uint8) for size in layout.buffer_bytes.values()]

    with pytest.raises(ConfigError, match=r"cache\.block_tokens: is 5, must be 4"):
        opener(config(text.replace("block_tokens = 4", "block_tokens = 5")), kv=kv, layout=layout)


@pytest.mark.parametrize(("opener", "text"), OPENERS)
def test_a_layout_with_other_groups_is_refused(opener: Callable[..., object], text: str) -> None:
    layout = LAYOUTS["two groups"]
    kv = [np.zeros(size, dtype=np.uint8) for size in layout.buffer_bytes.values()]

    with pytest.raises(ConfigError, match=r"cache\.groups: is 1, must be 2"):
        opener(config(text), kv=kv, layout=layout)


@pytest.mark.parametrize(("opener", "text"), OPENERS)
@pytest.mark.parametrize(
    ("kv", "problem"),
    [
        ([], "kv is empty, must have at least one array"),
        ([[0.0] * 8], "kv has list in it, must have NumPy arrays or torch tensors alone"),
        (
            [*arrays(), None],
            "kv has NoneType, ndarray in it, must have NumPy arrays or torch tensors alone",
        ),
        (np.zeros(()), "kv: an array of shape () has no blocks"),
        (np.zeros((0, 4)), "kv: an array of shape (0, 4) has no blocks"),
        ([*arrays(blocks=8), *arrays(blocks=9)], "kv: 2 arrays with blocks of different number"),
        (np.zeros((8, 6))[:, ::2], "kv: an array of shape (8, 3) is not contiguous"),
        (np.broadcast_to(np.zeros(3), (8, 3)), "kv: an array of shape (8, 3) is not contiguous"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(
    opener: Callable[..., object], text: str, kv: NDArray[np.float32], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        opener(config(text), kv=kv)


def test_arrays_that_do_not_fit_the_layout_are_refused() -> None:
    layout = LAYOUTS["latent"]
    size = layout.buffer_bytes[0]

    with pytest.raises(ValueError, match="kv has 1 arrays, the layout needs one for each"):
        penstock.open(
            config(MANAGED, blocks="6"), kv=[np.zeros(size, dtype=np.uint8)], layout=layout
        )
    with pytest.raises(ValueError, match=re.escape(f"kv[1] has 10 bytes, the layout needs {size}")):
        penstock.open(
            config(MANAGED, blocks="6"),
            kv=[np.zeros(size, dtype=np.uint8), np.zeros(10, dtype=np.uint8)],
            layout=layout,
        )


# What is given instead of a configuration or of memory.


@pytest.mark.parametrize("given", [MANAGED, "", 5, None, {"version": 1}])
def test_what_is_no_configuration_is_refused_with_what_would_be(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^config: is .* must be .*path of a TOML file"):
        penstock.open(given, kv=arrays())  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, "kv", b"kv", {}, object()])
def test_what_is_no_memory_is_refused_with_what_would_be(given: object) -> None:
    with pytest.raises(ValueError, match=r"^kv is .* must be .*NumPy arrays or torch tensors"):
        penstock.open(config(MANAGED), kv=given)  # type: ignore[arg-type]


def dtyped(name: str) -> Config:
    return penstock.parse_config(MANAGED.replace('"none"', f'"none"\nkv_dtype = "{name}"'))


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ("float32", np.float32),
        ("fp32", np.float32),
        ("float16", np.float16),
        ("bfloat16", np.uint16),
        ("bfloat16", np.int16),
        ("float8_e4m3", np.uint8),
        ("bfloat16", np.uint8),
        ("int8", np.int8),
    ],
)
def test_kv_may_be_kept_in_numbers_of_its_type_or_in_plain_ones(named: str, kept: type) -> None:
    cache = penstock.open(dtyped(named), kv=np.zeros((8, 4, 3), dtype=kept))

    with cache.acquire([1, 2, 3]) as lease:
        assert lease.cached_tokens == 0


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ("bfloat16", np.float32),
        ("float32", np.float64),
        ("float16", np.uint32),
        ("bfloat16", np.int8),
        ("bfloat16", np.complex64),
    ],
)
def test_a_kv_dtype_that_is_not_that_of_the_arrays_is_refused(named: str, kept: type) -> None:
    name = np.dtype(kept).name
    with pytest.raises(ConfigError, match=f"^model.kv_dtype: is '{named}', .*'{name}'"):
        penstock.open(dtyped(named), kv=np.zeros((8, 4, 3), dtype=kept))


def test_keys_name_the_type_of_the_arrays_where_the_file_does_not() -> None:
    keys = []
    for text in (MANAGED, MANAGED.replace('"none"', '"none"\nkv_dtype = "float32"')):
        cache = penstock.open(penstock.parse_config(text), kv=arrays())
        with cache.acquire(range(9)) as lease:
            lease.commit(list(range(9)))
        keys.append([event.keys for event in cache.take_kv_events() if hasattr(event, "keys")])

    assert keys[0]
    assert keys[0] == keys[1]


def test_a_memory_tier_larger_than_the_machine_is_refused_before_it_is_made() -> None:
    blocks_of_64_kib = [np.zeros((8, 4, 4096), dtype=np.float32)]
    with pytest.raises(
        ConfigError, match=r"^tiers\[0\].blocks: is 2000000000, needs .* must be at"
    ):
        penstock.open(
            config(MANAGED.replace("blocks = 16", "blocks = 2000000000")), kv=blocks_of_64_kib
        )
