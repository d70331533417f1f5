"""From a spec to a rank that can compute: weights, device blocks, and the rank's tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.checkpoints import find_model
from penstock.engine.collectives import Alone, Ranks, Together
from penstock.engine.devices import attention_on, device_of, lane_on
from penstock.engine.model import Decoder
from penstock.engine.sharding import share_of
from penstock.engine.weights import RankWeights
from penstock.engine.worker import Worker, allocate_kv, kv_tier
from penstock.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import Config
    from penstock.engine.architecture import Architecture
    from penstock.engine.checkpoints import ModelFiles
    from penstock.engine.sharding import Share
    from penstock.engine.spec import InstanceSpec
    from penstock.tiers.tensors import TensorTier


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """A rank's model, and its blocks as the cache sees them."""

    worker: Worker
    tier: TensorTier
    config: Config
    architecture: Architecture


def _nobody(_layers: int, _of: int) -> None:
    """Nobody wants to know how far it is."""


def load_rank(
    spec: InstanceSpec, *, rank: int = 0, progress: Callable[[int, int], None] = _nobody
) -> LoadedRank:
    """Reads the weights of one rank and takes its device blocks.

    Args:
        spec: The instance.
        rank: Which of its ranks.
        progress: Told after each layer how many are read, and how many there are.

    Raises:
        ConfigError: the model or the configuration is wrong, or they do not fit each other.
        UnavailableError: the default model is not installed, there is no such device, or the
            model's files are no longer those that were named.
    """
    config = spec.config
    if config.cache.device is None:
        raise ConfigError("cache.blocks", "is 0, must be the blocks that the device has room for")
    model = find_model(spec.model)
    architecture, checkpoint = model.open()
    share = share_of(architecture, rank=rank, ranks=spec.ranks)
    device = device_of(spec.device, rank)
    weights = RankWeights(
        checkpoint,
        share,
        head_dim=architecture.head_dim,
        dtype=spec.torch_dtype,
        device=device,
    )
    decoder = Decoder(
        architecture,
        weights,
        _ranks(architecture, share),
        attention=attention_on(device),
        progress=lambda layers: progress(layers, architecture.layers),
    )
    checkpoint.close()
    _require_same_files(spec, model)
    block_tokens = config.cache.block_tokens
    kv = allocate_kv(
        architecture,
        share,
        block_count=config.cache.device.slot_count,
        block_tokens=block_tokens,
        dtype=spec.torch_dtype,
        device=device,
    )
    return LoadedRank(
        worker=Worker(
            decoder,
            kv,
            block_tokens=block_tokens,
            lane=lane_on(device, graphs=spec.graphs and spec.ranks == 1),
        ),
        tier=kv_tier(architecture, share, kv, block_tokens=block_tokens),
        config=config,
        architecture=architecture,
    )


def _require_same_files(spec: InstanceSpec, model: ModelFiles) -> None:
    """Keys say which weights made the KV, and others may have KV under the same keys."""
    if spec.digest and model.weights_version() != spec.digest:
        raise UnavailableError(
            f"the files of {model.path} have changed since the server started: it would call "
            "other weights by the same name, and has to be started anew"
        )


def _ranks(architecture: Architecture, share: Share) -> Ranks:
    if share.ranks == 1:
        return Alone(share)
    shares = [share_of(architecture, rank=rank, ranks=share.ranks) for rank in range(share.ranks)]
    return Together(share, [len(each.vocabulary) for each in shares])
