"""Forms: how a copy of a block lies, as opposed to what it says.

A key names content. The form stands beside each copy and says how its bytes are to be read:
which layers and heads, in which number format and order, under which checksum. Two copies
of one key with equal forms are interchangeable byte for byte; with different forms, one has
to be resharded into the other, or counts as a miss for the reason `form`.

A form knows no addresses: no buffers, offsets, block counts or distances between blocks.
And it does not know who holds the copy, only what is held: ranks with the same heads and
layers have equal forms, however many ranks there are. docs/forms.md lists every field.

The one rule: equality, fingerprint, encoding and `difference` all come from one list of
facts. Forms with the same facts are the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import Group, GroupKind, HeadRange, Layer, Layout
from penstock.vocabulary.planes import Axis, Dim, DType, Plane, PlaneRole, dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator

FORM_DOMAIN = "penstock.form.v1"
FINGERPRINT_BYTES = 16

_ONE_BLOCK = Dim(axis=Axis.BLOCK, size=1, stride=0)


class StorageFormat(Enum):
    """In which order a copy holds the bytes of a block."""

    PACKED = "packed"
    """In canonical order without gaps: what every tier below the device holds."""


class Fact(NamedTuple):
    """One thing by which forms differ."""

    name: str
    value: str


class Difference(NamedTuple):
    """The first fact in which two forms differ."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} is {self.ours!r} here and {self.theirs!r} there"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """How a copy of a block lies."""

    layout: Layout
    """What a block consists of. Addresses are taken out: it has one block, from 0 on."""
    checksum: Algorithm = Algorithm.XXH3
    facts: tuple[Fact, ...] = field(init=False, repr=False)
    """All by which it differs from other forms."""
    fingerprint: bytes = field(init=False)
    """Sixteen bytes that are equal for equal forms and for no others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self.layout.packed(block_count=1))
        object.__setattr__(self, "facts", tuple(_facts(self)))
        digest = sha256(_framed(FORM_DOMAIN) + self.to_bytes()).digest()
        object.__setattr__(self, "fingerprint", digest[:FINGERPRINT_BYTES])

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    def to_bytes(self) -> bytes:
        """The facts, each name and value led by its length in four little-endian bytes."""
        return b"".join(_framed(text) for fact in self.facts for text in fact)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Form:
        """The form that `to_bytes` wrote, as seen from no rank in particular."""
        try:
            form = _read_form(_FactReader(encoded))
        except ValueError as problem:
            raise ValueError(f"encoded form cannot be read: {problem}") from problem
        if form.to_bytes() != encoded:
            raise ValueError("encoded form cannot be read: it has fields of another version")
        return form

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Form):
            return NotImplemented
        return self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def difference(self, other: Form) -> Difference | None:
        """The first field in which the two differ, or `None` if they are equal."""
        # Counts come before what they count, so the first facts that differ have one name.
        for ours, theirs in zip(self.facts, other.facts, strict=False):
            if ours != theirs:
                return Difference(ours.name, ours.value, theirs.value)
        return None


def _facts(form: Form) -> Iterator[Fact]:
    yield Fact("storage", StorageFormat.PACKED.value)
    yield Fact("checksum", form.checksum.value)
    yield Fact("block_tokens", str(form.block_tokens))
    yield Fact("groups", str(len(form.layout.groups)))
    for position, group in enumerate(form.layout.groups):
        at = f"group.{position}"
        yield Fact(f"{at}.kind", group.kind.value)
        yield Fact(f"{at}.heads", "none" if group.heads is None else str(group.heads))
        yield Fact(f"{at}.layers", str(len(group.layers)))
        for index, layer in enumerate(group.layers):
            yield from _layer_facts(f"{at}.layer.{index}", layer)


def _layer_facts(at: str, layer: Layer) -> Iterator[Fact]:
    yield Fact(f"{at}.number", str(layer.number))
    yield Fact(f"{at}.draft", "yes" if layer.draft else "no")
    yield Fact(f"{at}.planes", " ".join(plane.role.label for plane in layer.planes))
    for plane in layer.planes:
        name = f"{at}.{plane.role.label}"
        yield Fact(f"{name}.dtype", plane.dtype.value)
        yield Fact(f"{name}.axes", " ".join(f"{dim.axis}:{dim.size}" for dim in plane.dims[1:]))
        yield Fact(f"{name}.encoding", plane.encoding)


def _framed(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(4, "little") + raw


class _FactReader:
    """The facts of an encoded form, by name."""

    def __init__(self, encoded: bytes) -> None:
        texts = []
        position = 0
        while position < len(encoded):
            start = position + 4
            position = start + int.from_bytes(encoded[position:start], "little")
            if position > len(encoded):
                raise ValueError(f"encoded form ends at byte {len(encoded)}, within a field")
            texts.append(encoded[start:position].decode())
        self._texts = dict(zip(texts[::2], texts[1::2], strict=True))

    def text(self, name: str) -> str:
        if name not in self._texts:
            raise ValueError(f"the field {name} is missing")
        return self._texts[name]

    def number(self, name: str) -> int:
        text = self.text(name)
        if not text.isdecimal():
            raise ValueError(f"{name} is {text!r}, must be a number")
        return int(text)

    def heads(self, name: str) -> HeadRange | None:
        text = self.text(name)
        if text == "none":
            return None
        matched = re.fullmatch(r"(\d+)-(\d+) of (\d+)", text)
        if matched is None:
            raise ValueError(f"{name} is {text!r}, must be 'none' or 'first-last of total'")
        first, last, total = (int(each) for each in matched.groups())
        return HeadRange(first=first, count=last - first + 1, total=total)

    def dims(self, name: str, itemsize: int) -> Iterator[Dim]:
        """The axes of a plane inside a block."""
        text = self.text(name)
        if re.fullmatch(r"([a-z]+:\d+( |$))*", text) is None:
            raise ValueError(f"{name} is {text!r}, must be 'axis:size' …")
        axes = [axis.split(":") for axis in text.split()]
        dense = dense_strides([int(size) for _, size in axes], itemsize)
        for (axis, size), stride in zip(axes, dense, strict=True):
            yield Dim(axis=Axis(axis), size=int(size), stride=stride)


def _read_form(reader: _FactReader) -> Form:
    buffers = count()
    groups = []
    for position in range(reader.number("groups")):
        at = f"group.{position}"
        layers = tuple(
            _read_layer(reader, f"{at}.layer.{index}", buffers)
            for index in range(reader.number(f"{at}.layers"))
        )
        kind = GroupKind(reader.text(f"{at}.kind"))
        groups.append(Group(kind=kind, layers=layers, heads=reader.heads(f"{at}.heads")))
    StorageFormat(reader.text("storage"))  # Refuses every other order.
    return Form(
        layout=Layout(groups=tuple(groups), block_tokens=reader.number("block_tokens")),
        checksum=Algorithm(reader.text("checksum")),
    )


def _read_layer(reader: _FactReader, at: str, buffers: Iterator[int]) -> Layer:
    planes = []
    for label in reader.text(f"{at}.planes").split():
        name = f"{at}.{label}"
        dtype = DType(reader.text(f"{name}.dtype"))
        planes.append(
            Plane(
                role=PlaneRole.of(label),
                dtype=dtype,
                dims=(_ONE_BLOCK, *reader.dims(f"{name}.axes", dtype.itemsize)),
                buffer=next(buffers),
                encoding=reader.text(f"{name}.encoding"),
            )
        )
    draft = reader.text(f"{at}.draft") == "yes"
    return Layer(number=reader.number(f"{at}.number"), planes=tuple(planes), draft=draft)
