"""What Penstock must know about the vLLM engine it serves, as values.

`adapter` reads them from vLLM's own configuration. The one rule: what is not certainly
understood has a reason not to run, and then nothing is claimed, loaded or saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.vocabulary.layers import GroupKind

if TYPE_CHECKING:
    from penstock.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of vLLM that share a block table."""

    kind: GroupKind
    layer_names: tuple[str, ...]
    block_tokens: int
    channels: int = 0
    """Channels of K, where K and V lie dense side by side; 0 where only vLLM can read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One vLLM engine: a scheduler and its ranks."""

    name: str
    """Names the engine among those of the machine, the same on all its ranks."""
    groups: tuple[LayerGroup, ...]
    block_count: int
    rank_count: int
    rank: int = 0
    """Which one this is, where a rank is asked."""
    equal_ranks: bool = False
    """Whether every rank holds the same bytes."""
    kv_dtype: str = "bfloat16"
    kv_heads: int = 1
    """KV heads of the whole model, for those layers that have heads."""
    unsupported: tuple[str, ...] = ()
    """What vLLM was told to do that this connector cannot follow."""
    asynchronous: tuple[str, ...] = ()
    """What vLLM was told to do that lets a step's results be used before they can be taken back."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, the same in every group that can be served."""
        return self.groups[0].block_tokens

    @property
    def leaving(self) -> tuple[int, ...]:
        """The KV groups in which a request loses blocks while it runs."""
        whole = {GroupKind.ATTENTION, GroupKind.LATENT}
        return tuple(at for at, group in enumerate(self.groups) if group.kind not in whole)

    @property
    def blocks_stay(self) -> bool:
        """Whether a request keeps every block it was given, in the one group there is."""
        return len(self.groups) == 1 and not self.leaving

    def why_not(self) -> str:
        """Why nothing can be offered to this engine; empty if something can."""
        if self.unsupported:
            return "; ".join(self.unsupported)
        if not self.groups:
            return "the model has no KV cache"
        sizes = sorted({group.block_tokens for group in self.groups})
        if len(sizes) > 1:
            return f"KV groups have blocks of {' and '.join(map(str, sizes))} tokens, must be equal"
        return ""

    def why_not_layerwise(self) -> str:
        """Why no step may compute on loads that are not verified yet; empty if one may.

        vLLM takes such a step back where it knows from a block's number whose block it was, and
        where whatever came before the block is still there.
        """
        if not self.blocks_stay:
            kinds = ", ".join(group.kind.name.lower() for group in self.groups)
            return (
                f"is true with {len(self.groups)} KV groups ({kinds}), must be false: vLLM takes "
                "a step on damaged blocks back in models with one group, of attention or latent KV"
            )
        if self.asynchronous:
            return f"is true, must be false, or: {'; '.join(self.asynchronous)}"
        return ""

    def fitted(self, config: Config, *, layerwise: bool = False) -> Config:
        """The configuration with everything that vLLM decides as vLLM decided it.

        Device blocks, tokens a block, ranks and KV groups are vLLM's own; a file that was
        written for another engine keeps what it says about tiers and policies.
        """
        cache = replace(
            config.cache,
            device=None,
            block_tokens=self.block_tokens,
            rank_count=self.rank_count,
            group_count=len(self.groups),
        )
        shared = self.equal_ranks and self.rank_count > 1 and _has_host_hub(config)
        model = replace(config.model, kv_dtype=self.kv_dtype)
        layer_wise = "auto" if layerwise else config.layer_wise
        return replace(config, cache=cache, equal_ranks=shared, model=model, layer_wise=layer_wise)


def _has_host_hub(config: Config) -> bool:
    return bool(config.tier_kinds) and config.tier_kinds[0].name == "host"
