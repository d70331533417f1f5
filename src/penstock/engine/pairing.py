"""A pair of instances, of which one hands KV to the other: who takes part, and what is checked.

Both sides compute this from the same spec, and compare it when they meet. The one rule: what a
sum is bound to depends on everything that the KV depends on, so that blocks of another prompt,
tenant or version of the weights are never taken for the right ones.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.engine.sharding import share_of
from penstock.engine.worker import allocate_kv, kv_tier
from penstock.handoff.driver.directory import Directory, EnginePlace, RankPlace
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.architecture import Architecture
    from penstock.engine.spec import EngineSpec, InstanceSpec

KEY_BYTES = 16
SETTINGS = HandoffSettings(
    # A step on a CPU may take seconds, in which a scheduler says nothing; that a process has
    # died, the router sees at once.
    times=HandoffTimes(ping_s=2.0, suspect_s=20.0),
    bounds=HandoffBounds(berth_count=8),
)


def directory_of(spec: InstanceSpec, architecture: Architecture) -> Directory:
    """Who takes part in the handoffs of an instance.

    Raises:
        ValueError: the instance has no partner.
    """
    if spec.pair is None:
        raise ValueError(f"pair of {spec.name!r} is None, must say who hands KV to whom")
    model = spec.config.model
    return Directory(
        prefill=_place(spec, spec.pair.prefill, architecture),
        decode=_place(spec, spec.pair.decode, architecture),
        model=model.name,
        weights=f"{model.weights_version} {model.kv_dtype}",
    )


def rank_name(engine: str, rank: int) -> str:
    """What a rank is called among the parties of a handoff."""
    return f"{engine}/{rank}"


def _place(spec: InstanceSpec, engine: EngineSpec, architecture: Architecture) -> EnginePlace:
    addresses = engine.rank_addresses or [""] * engine.ranks
    return EnginePlace(
        scheduler=engine.name,
        address=engine.address,
        ranks=tuple(
            RankPlace(
                name=rank_name(engine.name, rank),
                form=_form(spec, architecture, rank, engine.ranks),
                address=addresses[rank],
            )
            for rank in range(engine.ranks)
        ),
    )


def _form(spec: InstanceSpec, architecture: Architecture, rank: int, ranks: int) -> Form:
    """How the KV of a rank lies; one block tells it as well as all of them."""
    share = share_of(architecture, rank=rank, ranks=ranks)
    block_tokens = spec.config.cache.block_tokens
    kv = allocate_kv(
        architecture,
        share,
        block_count=1,
        block_tokens=block_tokens,
        dtype=spec.torch_dtype,
        device=torch.device("cpu"),
    )
    return Form(layout=kv_tier(architecture, share, kv, block_tokens=block_tokens).layout)


def block_keys(tokens: Sequence[int], *, block_tokens: int, origin: str) -> list[bytes]:
    """What the sums of a prompt's blocks are bound to, the last of them maybe unfinished.

    Args:
        tokens: the prompt.
        block_tokens: tokens in a block.
        origin: what the KV depends on besides: weights, tenant.
    """
    keys: list[bytes] = []
    earlier = blake2b(origin.encode(), digest_size=KEY_BYTES).digest()
    for first in range(0, len(tokens), block_tokens):
        numbers = np.asarray(tokens[first : first + block_tokens], dtype="<u4")
        earlier = blake2b(numbers.tobytes(), key=earlier, digest_size=KEY_BYTES).digest()
        keys.append(earlier)
    return keys
