"""A GGUF file, as far as the default model needs it: its tensors under Hugging Face's names.

`GgufHeader` reads the metadata. The reader of the `gguf` package makes several NumPy views of each
string, which takes more than a second for the vocabulary of the default model, in every process;
here a value is decoded when it is asked for, and an array of strings is only skipped.

`GgufFile` reads tensors. Quantised ones are expanded to float32. llama.cpp stores the rows of the
query and key matrices with the two halves of each rotary pair side by side; they are put back into
Hugging Face's order, in which the first half of a head comes before the second.

Two rules. A damaged file raises `ValueError` and is never read beyond its end, also when a count or
a length in it is wrong. What a file needs and this engine does not support is refused, never
ignored.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np

from penstock.errors import ConfigError, shown
from penstock_serve.engine.architecture import (
    HEAD_DIM_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    POSITIONS_MAX,
    VOCABULARY_MAX,
    WIDTH_MAX,
    Architecture,
    Fields,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

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

    Raises `ConfigError`: the file cannot be read.
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


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
DIMENSIONS_MAX = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Kinds of values by their number in the file. Big-endian files are refused by their version."""
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_ARRAY_HEAD = struct.Struct("<IQ")


class _Field(NamedTuple):
    kind: int
    at: int
    """Where its value begins."""


class GgufTensor(NamedTuple):
    """One tensor as it is stored."""

    name: str
    tensor_type: Any
    """A `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    """The innermost size first, as the file has it."""
    data: np.ndarray[Any, Any]
    """Its bytes, a row of them for each row of the tensor."""


class GgufHeader:
    """Metadata and tensors of one file, which stays mapped.

    Raises:
        ValueError: it is no GGUF file, or not all of one.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # An empty file cannot be mapped, which `mmap` reports as a ValueError.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._fields: dict[str, _Field] = {}
        if self._data[:4] != MAGIC:
            raise ValueError(f"it begins with {self._data[:4]!r}, must begin with {MAGIC!r}")
        version = self._scalar(_U32, 4)
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, must be 2 or 3, little-endian")
        tensor_count, field_count = self._scalar(_U64, 8), self._scalar(_U64, 16)
        at = self._read_fields(24, field_count)
        self.tensors = self._read_tensors(at, tensor_count)

    @property
    def names(self) -> list[str]:
        return list(self._fields)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def value(self, name: str) -> Any:  # noqa: ANN401 - a number, a text, or a list of one kind
        """The value of a name that is there.

        Raises `ValueError`: it is no text, or longer than the file.
        """
        found = self._fields[name]
        if found.kind == _STRING:
            return self._string(found.at)[0]
        if found.kind == _ARRAY:
            return self._array(found.at)
        return self._scalar(_SCALARS[found.kind], found.at)

    def _read_fields(self, at: int, count: int) -> int:
        for _ in range(count):
            name, at = self._string(at)
            kind = self._scalar(_U32, at)
            at += 4
            if name in self._fields:
                raise ValueError(f"it has {name!r} twice")
            self._fields[name] = _Field(kind, at)
            at = self._end_of(kind, at)
        return at

    def _end_of(self, kind: int, at: int) -> int:
        """Where a value ends that begins here."""
        if kind == _STRING:
            return self._within(at + 8 + self._scalar(_U64, at))
        if kind != _ARRAY:
            return self._within(at + self._size_of(kind))
        each, count = self._array_head(at)
        at += _ARRAY_HEAD.size
        if each != _STRING:
            return self._within(at + self._size_of(each) * count)
        data, read = self._data, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + read(data, at)[0]
        except (struct.error, OverflowError):
            pass  # The file ends before its strings do, as `_within` says.
        else:
            return self._within(at)
        return self._within(len(data) + 1)

    def _read_tensors(self, at: int, count: int) -> dict[str, GgufTensor]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, at = self._string(at)
            dimensions = self._scalar(_U32, at)
            if dimensions > DIMENSIONS_MAX:
                raise ValueError(f"its tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self._scalar(_U64, at + 4 + 8 * each) for each in range(dimensions))
            at += 4 + 8 * dimensions
            found.append((name, shape, self._scalar(_U32, at), self._scalar(_U64, at + 4)))
            at += 12
        alignment = self._alignment()
        start = -(-at // alignment) * alignment
        tensors = [
            self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in found
        ]
        if len({each.name for each in tensors}) < len(tensors):
            raise ValueError("it has two tensors of one name")
        return {each.name: each for each in tensors}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        stored = gguf.GGMLQuantizationType(kind)
        if stored not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"its tensor {name!r} is stored as {stored.name}, which has no size")
        block, size = gguf.GGML_QUANT_SIZES[stored]
        rows, last = tuple(reversed(shape))[:-1], shape[0] if shape else 1
        if last % block:
            raise ValueError(f"its tensor {name!r} has rows of {last}, no multiple of {block}")
        length = prod(rows) * (last // block) * size
        self._within(begin + length)
        data = np.frombuffer(self._data, np.uint8, length, begin)
        data = data.reshape(*rows, last // block * size)
        return GgufTensor(name, stored, shape, data)

    def _alignment(self) -> int:
        if "general.alignment" not in self._fields:
            return ALIGNMENT
        found = self.value("general.alignment")
        if type(found) is not int or found < 1 or found & (found - 1):
            raise ValueError(f"its alignment is {found!r}, must be a power of two")
        return found

    def _array_head(self, at: int) -> tuple[int, int]:
        self._within(at + _ARRAY_HEAD.size)
        each, count = _ARRAY_HEAD.unpack_from(self._data, at)
        return each, count

    def _array(self, at: int) -> list[Any]:
        each, count = self._array_head(at)
        at += _ARRAY_HEAD.size
        if each != _STRING:
            size = self._size_of(each)
            self._within(at + size * count)
            return [
                one for (one,) in _SCALARS[each].iter_unpack(self._data[at : at + size * count])
            ]
        found = []
        for _ in range(count):
            text, at = self._string(at)
            found.append(text)
        return found

    def _string(self, at: int) -> tuple[str, int]:
        """A text, and where it ends."""
        length = self._scalar(_U64, at)
        end = self._within(at + 8 + length)
        return self._data[at + 8 : end].decode("utf-8"), end

    def _scalar(self, kind: struct.Struct, at: int) -> Any:  # noqa: ANN401 - as the kind says
        self._within(at + kind.size)
        return kind.unpack_from(self._data, at)[0]

    def _size_of(self, kind: int) -> int:
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of kind {kind}, which GGUF does not have here")
        return _SCALARS[kind].size

    def _within(self, end: int) -> int:
        if end > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes and should have more")
        return end
