"""The pair of an instance that hands KV over, or gets it: both instances compute the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.serving import HandoffTable
from penstock.engine.sharding import share_of
from penstock.handoff import (
    HandoffBounds,
    HandoffEngine,
    HandoffPair,
    HandoffSettings,
    HandoffTimes,
)
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.layers import HeadRange
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from penstock.engine.architecture import Architecture
    from penstock.engine.spec import EngineSpec, InstanceSpec

SETTINGS = HandoffSettings(
    # A step on a CPU may take seconds, in which a scheduler says nothing; that a process has
    # died, the router sees at once.
    times=HandoffTimes(ping_s=2.0, suspect_s=20.0),
    bounds=HandoffBounds(berth_count=8),
)


def pair_of(spec: InstanceSpec, architecture: Architecture) -> HandoffPair:
    """The instance and its partner.

    Raises:
        ValueError: the instance has no partner.
    """
    if spec.pair is None:
        raise ValueError(f"pair of {spec.name!r} is None, must say who hands KV to whom")
    model = spec.config.model
    return HandoffPair(
        prefill=_engine(spec, spec.pair.prefill, architecture),
        decode=_engine(spec, spec.pair.decode, architecture),
        model=model.name,
        weights=f"{model.weights_version} {model.kv_dtype}",
        secret=spec.pair.secret,
        transport=(spec.config.handoff or HandoffTable()).transport,
    )


def _engine(spec: InstanceSpec, engine: EngineSpec, architecture: Architecture) -> HandoffEngine:
    return HandoffEngine(
        name=engine.name,
        address=engine.address,
        rank_addresses=tuple(engine.rank_addresses),
        layouts=tuple(
            _layout(spec, architecture, rank, engine.ranks) for rank in range(engine.ranks)
        ),
    )


def _layout(spec: InstanceSpec, architecture: Architecture, rank: int, ranks: int) -> Layout:
    """How the KV of a rank lies; how many blocks it has makes no difference to the other side."""
    heads = share_of(architecture, rank=rank, ranks=ranks).kv_heads
    return Layout.split(
        layers=range(architecture.layers),
        heads=HeadRange(first=heads.start, count=len(heads), total=architecture.kv_heads),
        channels=architecture.head_dim,
        dtype=DType.parse(spec.dtype),
        block_tokens=spec.config.cache.block_tokens,
        block_count=1,
    )
