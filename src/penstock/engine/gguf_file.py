"""A GGUF file, as far as the default model needs it: its tensors under Hugging Face's names.

Quantised tensors are expanded to float32 when they are read. llama.cpp stores the rows of the
query and key matrices with the two halves of each rotary pair side by side; here they are put
back into Hugging Face's order, in which the first half of a head comes before the second.

One rule: what a file holds or asks for and this engine does not use is refused, never ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from penstock.engine.architecture import (
    HEAD_DIM_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    POSITIONS_MAX,
    VOCABULARY_MAX,
    WIDTH_MAX,
    Architecture,
)
from penstock.engine.fields import Fields
from penstock.engine.gguf_header import GgufHeader
from penstock.errors import ConfigError, shown

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from penstock.engine.gguf_header import GgufTensor

_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class GgufFile:
    """A checkpoint in one GGUF file of the Llama family.

    Raises:
        ConfigError: the file is of another family, or needs what this engine does not do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = _header_of(path)
        self._tensors = self._header.tensors
        family = self.field("general.architecture")
        if family != "llama":
            raise ConfigError(
                "model", f"is a GGUF file of family {shown(family)}, must be 'llama': {path}"
            )
        self.architecture = self._architecture()
        self._refuse_what_is_not_done()

    def _refuse_what_is_not_done(self) -> None:
        """Biases, experts, stretched rotary embeddings: each shows in a tensor or a field."""
        wanted = set(_OUTSIDE_LAYERS.values())
        for number in range(self.architecture.layers):
            wanted.update(f"blk.{number}.{name}.weight" for name in _IN_LAYERS.values())
        more = sorted(set(self._tensors) - wanted)
        if more:
            raise ConfigError(
                "model", f"is a GGUF file with a tensor {more[0]!r}, which this engine does not use"
            )
        channels = self.architecture.head_dim
        for name, right in (("scaling.type", "none"), ("dimension_count", channels)):
            found = self.field(f"llama.rope.{name}", right)
            if found != right:
                raise ConfigError(
                    "model",
                    f"is a GGUF file whose llama.rope.{name} is {shown(found)}, must be {right!r}",
                )

    def field(self, name: str, default: str | float | None = None) -> object:
        """A value of the file's metadata."""
        if name in self._header:
            return _value(self._header, name, self.path)
        if default is None:
            raise ConfigError("model", f"is a GGUF file without {name!r}: {self.path}")
        return default

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; refused where there is none, or none that can be expanded."""
        stored = self._stored(name)
        if stored.tensor_type.name in _INTEGERS:
            raise ConfigError(
                f"tensor {stored.name}", f"has elements of {stored.tensor_type.name}, not of floats"
            )
        return tuple(int(size) for size in reversed(stored.shape))

    def rows(self, name: str, held: range | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        whole = self._whole(name)
        return whole if held is None else whole[held.start : held.stop]

    def columns(self, name: str, held: range) -> torch.Tensor:
        """A range of a matrix's columns."""
        return self._whole(name)[:, held.start : held.stop]

    def close(self) -> None:
        """The file is mapped: it goes with the reader."""

    def _whole(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise ConfigError(
                f"tensor {stored.name}",
                f"is stored as {stored.tensor_type.name}, which cannot be expanded: {error}",
            ) from error
        if ".q_proj." in name:
            values = _rotary_halves_apart(values, self.architecture.heads)
        elif ".k_proj." in name:
            values = _rotary_halves_apart(values, self.architecture.kv_heads)
        import torch  # noqa: PLC0415  (not for those who only look into the file)

        return torch.from_numpy(np.ascontiguousarray(values))

    def _stored(self, name: str) -> GgufTensor:
        stored = self._tensors.get(self._stored_name(name))
        if stored is None:
            raise ConfigError("model", f"is a GGUF file without a tensor for {name!r}: {self.path}")
        return stored

    def _stored_name(self, name: str) -> str:
        if name in _OUTSIDE_LAYERS:
            return _OUTSIDE_LAYERS[name]
        _, _, number, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        return f"blk.{number}.{_IN_LAYERS[part]}.{kind}"

    def _architecture(self) -> Architecture:
        names = (*_WHOLES, *_NUMBERS)
        read = {name: self.field(name) for name in names if name in self._header}
        fields = Fields(self.path.name, read)
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ConfigError(
                "model", f"is a GGUF file without a tensor 'token_embd.weight': {self.path}"
            )
        heads = fields.whole("llama.attention.head_count", maximum=HEADS_MAX)
        hidden = fields.whole("llama.embedding_length", maximum=WIDTH_MAX)
        vocabulary = Fields(self.path.name, {"token_embd.weight": int(embedding.shape[1])})
        stop = fields.whole("tokenizer.ggml.eos_token_id", minimum=0, maximum=VOCABULARY_MAX)
        return Architecture(
            family="llama",
            layers=fields.whole("llama.block_count", maximum=LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.whole(
                "llama.attention.head_count_kv", maximum=HEADS_MAX, default=heads
            ),
            head_dim=fields.whole(
                "llama.attention.key_length", maximum=HEAD_DIM_MAX, default=max(1, hidden // heads)
            ),
            intermediate=fields.whole("llama.feed_forward_length", maximum=WIDTH_MAX),
            vocabulary=vocabulary.whole("token_embd.weight", maximum=VOCABULARY_MAX),
            norm_epsilon=fields.number("llama.attention.layer_norm_rms_epsilon", maximum=1.0),
            rope_theta=fields.number("llama.rope.freq_base", maximum=1e15, default=10000.0),
            rope_scaling=None,
            positions=fields.whole("llama.context_length", maximum=POSITIONS_MAX),
            qk_norm=False,
            qkv_bias=False,
            tied="output.weight" not in self._tensors,
            stop_tokens=(stop,),
        )


_WHOLES = (
    *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.embedding_length"),
    *("llama.attention.key_length", "llama.feed_forward_length", "llama.block_count"),
    *("llama.context_length", "tokenizer.ggml.eos_token_id"),
)
_NUMBERS = ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base")
_INTEGERS = frozenset({"I8", "I16", "I32", "I64"})


def read_fields(path: Path, prefix: str) -> dict[str, Any]:
    """The metadata of a file whose names begin so, without that beginning.

    Raises:
        ConfigError: the file cannot be read.
    """
    header = _header_of(path)
    return {
        name.removeprefix(prefix): _value(header, name, path)
        for name in header.names
        if name.startswith(prefix)
    }


def _header_of(path: Path) -> GgufHeader:
    try:
        return GgufHeader(path)
    except OSError as error:
        raise ConfigError(path.name, f"cannot be read: {error.strerror}: {path}") from error
    except ValueError as error:
        raise ConfigError(
            path.name, f"is no whole GGUF file (a download that was cut off?): {error}: {path}"
        ) from error


def _value(header: GgufHeader, name: str, path: Path) -> Any:  # noqa: ANN401 - of any kind
    try:
        return header.value(name)
    except ValueError as error:
        raise ConfigError(f"{path.name}: {name}", f"cannot be read: {error}") from error


def _rotary_halves_apart(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
