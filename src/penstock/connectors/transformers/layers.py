"""The layers of a `DynamicCache` of transformers, and the blocks that are copied out and in.

A layer keeps keys and values of the whole batch, `[row, head, token, channel]`; the two may differ
in heads and channels, as in latent attention (MLA). A `BlockStage` holds a few blocks of one row's
tokens: it is what the tiers take for the device.

A sliding layer keeps the last `window - 1` tokens alone, from which it could be restored at one
length only. So it is told to record what has passed, and all of it is saved. Layers with one window
are a KV group: of a long prompt, the last window is loaded for them.

The one rule: a layer is used only if its class is exactly one of the two. A subclass may keep more
than keys and values (indexer keys, states, scales), without which its answers would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from penstock import GroupKind
from penstock.errors import UnavailableError
from penstock.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.planes import DTYPE_NAMES, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedConfig

NOWHERE = -1
"""A slot that is not loaded into."""
ENCODING = "transformers head token channel"
"""How a block lies: another order of axes would need another name."""
ROLES = (PlaneRole.K, PlaneRole.V)
STAGE_BYTES = 64 << 20
"""As much as the tiers copy in a step; more would be memory that the model could use."""
STAGE_BLOCKS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What a layer keeps for one token."""

    sizes: tuple[tuple[int, int], ...]
    """Heads and channels of its key, and of its value."""
    dtype: torch.dtype
    device: torch.device
    window: int = 0
    """How many tokens a token sees, itself included; 0: all."""

    def parts(self, row_count: int, token_count: int) -> list[torch.Tensor]:
        """Keys and values, `[row, head, token, channel]`, to be filled."""
        # Zeros: nothing sees the keys of padding, but what is not a number spreads all the same.
        return [
            torch.zeros(
                (row_count, heads, token_count, channels), dtype=self.dtype, device=self.device
            )
            for heads, channels in self.sizes
        ]

    def first_needed(self, token_count: int) -> int:
        """The first of so many tokens whose keys the next token sees."""
        return max(0, token_count - self.window + 1) if self.window else 0


def why_not(model: object) -> str:
    """Why prompts of a model cannot be cached, by its configuration; empty if they can."""
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is no PreTrainedModel of transformers"
    config = model.config
    # PEFT also puts its layers into a model that knows nothing of it: `get_peft_model`.
    adapted = any(type(each).__module__.startswith("peft.") for each in model.modules())
    if adapted or model._hf_peft_config_loaded:  # noqa: SLF001 - its only name
        return "the model has adapters, and which are active is in no key: merge them first"
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return (
            f"{type(model).__name__} has an encoder, or takes images or sound: they are in no key"
        )
    said = config.to_dict()  # Each kind of model has keys of its own.
    if said.get("use_bidirectional_attention"):
        return "use_bidirectional_attention is set: the KV of a prefix depends on what follows it"
    rotary = said.get("rope_parameters") or {}
    each = [part for part in (rotary, *rotary.values()) if isinstance(part, dict)]
    if any(part.get("rope_type") == "dynamic" for part in each):
        return "rope_type is 'dynamic': the KV of a prefix depends on the length of its prompt"
    return ""


def rotary_limit(config: PreTrainedConfig) -> int:
    """Beyond how many tokens `longrope` gives all of a prompt other rotary factors; 0: never."""
    said = config.to_dict()
    rotary = said.get("rope_parameters") or {}
    if rotary.get("rope_type") != "longrope":
        return 0
    name = "original_max_position_embeddings"
    return int(rotary.get(name) or said[name])


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that `generate` would make, but that what has left a window is kept."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
    return cache


def read_layers(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer of a model keeps, seen after one token was computed.

    Raises `UnavailableError`: a layer cannot be restored; the message has its class.
    """
    try:
        cache = new_cache(model)
        with torch.no_grad():
            token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
            model(input_ids=token, past_key_values=cache, use_cache=True)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnavailableError(
            f"{type(model).__name__} does not run on one token and a DynamicCache: {error}"
        ) from error
    shapes = tuple(_shape_of(number, layer) for number, layer in enumerate(cache.layers))
    kinds = sorted({str(shape.dtype) for shape in shapes})
    if len(kinds) != 1 or kinds[0].removeprefix("torch.") not in DTYPE_NAMES:
        raise UnavailableError(f"KV is of {' and '.join(kinds)}, must be of one known type")
    return shapes


def _shape_of(number: int, layer: DynamicLayer) -> LayerShape:
    if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer}:
        raise UnavailableError(
            f"layer {number} is a {type(layer).__name__}: only DynamicLayer and "
            "DynamicSlidingWindowLayer can be restored"
        )
    parts = (layer.keys, layer.values)
    if not layer.is_initialized or any(part.ndim != 4 or part.shape[2] != 1 for part in parts):
        raise UnavailableError(f"layer {number} keeps no key and value for each token")
    return LayerShape(
        sizes=tuple((part.shape[1], part.shape[3]) for part in parts),
        dtype=layer.keys.dtype,
        device=layer.keys.device,
        window=int(layer.sliding_window) if layer.is_sliding else 0,
    )


class Restored:
    """Keys and values for a batch, to be filled row by row and then given to a cache."""

    def __init__(self, layers: Sequence[LayerShape], *, row_count: int, token_count: int) -> None:
        self.token_count = token_count
        """Columns of the batch, padding included."""
        self.firsts = [layer.first_needed(token_count) for layer in layers]
        """The first column that each layer keeps."""
        self.parts = [
            layer.parts(row_count, token_count - first)
            for layer, first in zip(layers, self.firsts, strict=True)
        ]

    def give_to(self, cache: DynamicCache, *, copies: int) -> None:
        """Makes it the content of an empty cache, each row so many times."""
        for layer, (keys, values) in zip(cache.layers, self.parts, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                # It would count the window's tokens only, and place what follows wrongly.
                layer.cumulative_length = self.token_count
        if copies > 1:
            cache.batch_repeat_interleave(copies)


class BlockStage:
    """Blocks on their way between caches of transformers and the tiers."""

    def __init__(
        self, layers: Sequence[LayerShape], *, block_tokens: int, device: torch.device
    ) -> None:
        self.device = device
        self._tokens = block_tokens
        numbers = [block_tokens * heads * count for each in layers for heads, count in each.sizes]
        self.block_bytes = sum(numbers) * layers[0].dtype.itemsize
        self.block_count = max(1, min(STAGE_BLOCKS_MAX, STAGE_BYTES // self.block_bytes))
        here = [replace(layer, device=device) for layer in layers]
        self._parts = [layer.parts(self.block_count, block_tokens) for layer in here]
        self.windows = sorted({layer.window for layer in layers})
        """One for each KV group."""
        groups = [
            [
                TensorLayer(
                    number=number,
                    planes=[
                        Held.opaque(part, ENCODING, role=role)
                        for role, part in zip(ROLES, self._parts[number], strict=True)
                    ],
                )
                for number, layer in enumerate(layers)
                if layer.window == window
            ]
            for window in self.windows
        ]
        self.tier = TensorTier.of(
            [TensorGroup(kind=GroupKind.OPAQUE, layers=group) for group in groups],
            block_tokens=block_tokens,
        )

    def slots_of(self, token_count: int, *, pad: int, block: int, count: int) -> NDArray[np.int32]:
        """Where `count` blocks of a row are loaded to, from `block` on: one row a KV group.

        What a window of the first `token_count` columns does not reach is not loaded.
        """
        slots = np.tile(np.arange(count, dtype=np.int32), (len(self.windows), 1))
        ends = pad + (block + 1 + slots[0]) * self._tokens
        for group, window in enumerate(self.windows):
            if window:
                slots[group, ends <= token_count - window + 1] = NOWHERE
        return slots

    def bytes_in(self, slots: NDArray[np.int32]) -> int:
        """Bytes of the blocks that these slots name."""
        counts = (slots != NOWHERE).sum(axis=1)
        groups = self.tier.layout.groups
        return sum(
            int(count) * group.block_bytes for count, group in zip(counts, groups, strict=True)
        )

    def put(self, restored: Restored, *, row: int, pad: int, block: int, count: int) -> None:
        """Copies what was loaded, from `block` of a row on, to where its tokens belong."""
        begin = pad + block * self._tokens
        for parts, targets, first in zip(self._parts, restored.parts, restored.firsts, strict=True):
            start = max(begin, first)
            end = min(begin + count * self._tokens, restored.token_count)
            if start >= end:
                continue
            for part, target in zip(parts, targets, strict=True):
                tokens = part[:count].transpose(0, 1).flatten(1, 2)
                target[row, :, start - first : end - first] = tokens[:, start - begin : end - begin]

    def take(self, cache: DynamicCache, *, row: int, pad: int, block: int, count: int) -> None:
        """Copies `count` blocks of a row out of a cache, from `block` on."""
        begin = pad + block * self._tokens
        for parts, layer in zip(self._parts, cache.layers, strict=True):
            at = begin - first_kept(layer)
            for part, kept in zip(parts, (layer.keys, layer.values), strict=True):
                tokens = kept[row, :, at : at + count * self._tokens]
                part[:count] = tokens.unflatten(1, (count, self._tokens)).transpose(0, 1)


def first_kept(layer: DynamicLayer) -> int:
    """The first column whose keys a layer still has."""
    if not layer.is_sliding:
        return 0
    first: int = layer.cumulative_length - layer.keys.shape[-2]
    return first
