"""From a configuration and the engine's arrays to a running cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.config import Config, load_config
from penstock.errors import ConfigError
from penstock.runtime.driver import Driver
from penstock.runtime.lower_tiers import build_lower_tiers
from penstock.runtime.managed import Cache
from penstock.runtime.offload import Offload
from penstock.tiers.arrays import ArrayTier, opaque_layout
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout


def open(  # noqa: A001 - read as penstock.open, which is what it does
    config: Config | Path | str,
    *,
    kv: NDArray[np.generic] | Sequence[NDArray[np.generic]],
    layout: Layout | None = None,
) -> Cache:
    """Opens a cache that manages the device blocks in `kv`.

    Args:
        config: A configuration, or the path of a TOML file with one.
        kv: The engine's KV arrays, one or one a layer, blocks along the first axis.
        layout: How the blocks lie in `kv`; without it a block is opaque bytes.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the arrays or the machine.
        UnavailableError: the machine does not give a tier the memory it needs.
        ValueError: the arrays cannot be used, or do not fit the layout.
    """
    config = _read(config)
    device = _device(config, kv, layout)
    if config.cache.device is None:
        raise ConfigError(
            "cache.blocks", "is 0: the engine manages its own blocks; use penstock.open_offload"
        )
    if device.slot_count < config.cache.device.slot_count:
        raise ConfigError(
            "cache.blocks",
            f"is {config.cache.device.slot_count}, must be at most {device.slot_count}, "
            "the blocks that kv has",
        )
    return Cache(config, _drive(config, device))


def open_offload(
    config: Config | Path | str,
    *,
    kv: NDArray[np.generic] | Sequence[NDArray[np.generic]],
    layout: Layout | None = None,
) -> Offload:
    """Opens the tiers below the device blocks in `kv`, which the engine manages itself.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the arrays or the machine.
        UnavailableError: the machine does not give a tier the memory it needs.
        ValueError: the arrays cannot be used, or do not fit the layout.
    """
    config = _read(config)
    if config.cache.device is not None:
        raise ConfigError(
            "cache.blocks",
            f"is {config.cache.device.slot_count}: these blocks would be managed; leave it out, "
            "or use penstock.open",
        )
    device = _device(config, kv, layout)
    return Offload(_drive(config, device), [group.block_count for group in device.layout.groups])


def _read(config: Config | Path | str) -> Config:
    return config if isinstance(config, Config) else load_config(Path(config))


def _device(
    config: Config,
    kv: NDArray[np.generic] | Sequence[NDArray[np.generic]],
    layout: Layout | None,
) -> ArrayTier:
    arrays = _arrays(kv)
    if config.cache.rank_count != 1:
        raise ConfigError(
            "cache.ranks",
            f"is {config.cache.rank_count}, must be 1: an embedded cache drives one rank, "
            "this process",
        )
    if layout is None:
        layout = opaque_layout(arrays, block_tokens=config.cache.block_tokens)
    if layout.block_tokens != config.cache.block_tokens:
        raise ConfigError(
            "cache.block_tokens",
            f"is {config.cache.block_tokens}, must be {layout.block_tokens}, the tokens of a "
            "block of the layout",
        )
    if len(layout.groups) != config.cache.group_count:
        raise ConfigError(
            "cache.groups",
            f"is {config.cache.group_count}, must be {len(layout.groups)}, the groups of the "
            "layout",
        )
    return ArrayTier(layout, arrays)


def _arrays(kv: NDArray[np.generic] | Sequence[NDArray[np.generic]]) -> list[NDArray[np.generic]]:
    given: list[object] = [kv] if isinstance(kv, np.ndarray) else [*kv]
    if not given:
        raise ValueError("kv is empty, must have at least one array")
    arrays = [array for array in given if isinstance(array, np.ndarray)]
    if len(arrays) < len(given):
        kinds = sorted({type(array).__name__ for array in given})
        raise ValueError(f"kv has {', '.join(kinds)} in it, must have NumPy arrays alone")
    return arrays


def _drive(config: Config, device: ArrayTier) -> Driver:
    settings, lower = build_lower_tiers(config, device.layout)
    return Driver(settings, [device, *lower], Algorithm.XXH3)
