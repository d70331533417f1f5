"""The header of a GGUF file: metadata and where tensors lie, read without a view of every token.

The reader of the `gguf` package makes several NumPy views of each string; for the vocabulary of
the default model that takes more than a second in every process. Here a value is decoded when it
is asked for, and an array of strings is only stepped over.

The one rule: a file is read within its bounds. Whatever is wrong with it raises `ValueError`,
also when a count or a length in it is damaged.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

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
_PLAIN_TYPES = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


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
        """The names of all metadata."""
        return list(self._fields)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def value(self, name: str) -> Any:  # noqa: ANN401 - a number, a text, or a list of one kind
        """The value of a name that is there.

        Raises:
            ValueError: it is no text, or longer than the file.
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
        plain = _PLAIN_TYPES.get(stored.name)
        if plain is not None:
            data = data.view(plain).reshape(*rows, last) if shape else data.view(plain)
        else:
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
