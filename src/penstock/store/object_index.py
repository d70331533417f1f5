"""Which value lies where in the objects of a store, and the manifests that say so.

An object holds many values, one after the other, and is written once. Who has written one says
what is in it by a manifest, a small object that is written once too; others list the manifests and
read those that are new to them. Nothing here waits or asks a store.

The one rule: what a manifest says is a claim. An object that is not there, or is shorter, is a
missing value, and costs no more than that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OBJECT_BYTES_MIN = 16 << 20
OBJECT_BYTES_MAX = 64 << 20
MANIFEST_BYTES_MAX = 8 << 20
"""A larger one is none of ours."""
VALUES_MAX = 1 << 20
"""Some 300 MB of memory; with blocks of 2 MiB two TiB. Beyond it the objects that were learned of
first are forgotten: their values are missing here, and may be written again."""
MARKS_MAX = 1 << 16
"""Objects that are lost, and values that were removed: a manifest that still names them may come
later."""
OBJECT_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{8}", re.ASCII)

Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class ValuePlace(NamedTuple):
    """Where a value lies."""

    object: str
    offset: int
    length: int


class PackedValues(NamedTuple):
    """Values that lie one after the other, on their way to an object."""

    values: list[tuple[str, int, int]]
    """Name, offset in the body, length."""
    body: bytes


class ObjectContent(msgspec.Struct, array_like=True, frozen=True):
    """What is in one object: name, offset and length of each value."""

    name: str
    values: list[tuple[str, Offset, Offset]]


class ObjectManifest(msgspec.Struct, array_like=True, frozen=True):
    """What a client has written, and which values it found wrong and removed."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    contents: list[ObjectContent]
    removed: list[tuple[str, str]]
    """Object and name of each."""

    @classmethod
    def of(
        cls, contents: Iterable[ObjectContent], removed: Iterable[tuple[str, str]] = ()
    ) -> ObjectManifest:
        return cls(1, list(contents), list(removed))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_manifest(encoded: bytes | memoryview) -> ObjectManifest | None:
    """The manifest, or `None` if it is none."""
    try:
        manifest = msgspec.msgpack.decode(encoded, type=ObjectManifest)
    except msgspec.MsgspecError:
        return None
    named = [content.name for content in manifest.contents]
    named += [each for each, _ in manifest.removed]
    return manifest if all(map(OBJECT_NAME.fullmatch, named)) else None


class ObjectIndex:
    """Values by name, as far as manifests were read. The first place of a name counts."""

    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._values_max = values_max
        self._places: dict[str, ValuePlace] = {}
        self._names: dict[str, list[str]] = {}
        """By object, in the order in which they became known."""
        self._lost: dict[str, None] = {}
        self._removed: dict[tuple[str, str], None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> ValuePlace | None:
        return self._places.get(name)

    def take(self, manifest: ObjectManifest) -> None:
        """Learns what a manifest says; one that was read before changes nothing."""
        for mark in manifest.removed:
            self._remove(*mark)
        for content in manifest.contents:
            if content.name not in self._lost:
                self._add(content)
        while len(self._places) > self._values_max:
            self._forget_object(next(iter(self._names)))

    def lose(self, name: str) -> None:
        """An object is not there any more: none of its values is."""
        _mark(self._lost, name)
        self._forget_object(name)

    def remaining(self, contents: Sequence[ObjectContent]) -> list[ObjectContent]:
        """The same without what is lost or removed."""
        return [
            ObjectContent(
                content.name,
                [each for each in content.values if (content.name, each[0]) not in self._removed],
            )
            for content in contents
            if content.name not in self._lost
        ]

    def _add(self, content: ObjectContent) -> None:
        names = self._names.setdefault(content.name, [])
        for name, offset, length in content.values:
            if name not in self._places and (content.name, name) not in self._removed:
                self._places[name] = ValuePlace(content.name, offset, length)
                names.append(name)
        if not names:
            del self._names[content.name]

    def _remove(self, object_name: str, name: str) -> None:
        _mark(self._removed, (object_name, name))
        place = self._places.get(name)
        if place is not None and place.object == object_name:
            del self._places[name]

    def _forget_object(self, object_name: str) -> None:
        for name in self._names.pop(object_name, ()):
            place = self._places.get(name)
            if place is not None and place.object == object_name:
                del self._places[name]


def _mark(marks: dict[str, None] | dict[tuple[str, str], None], mark: object) -> None:
    marks[mark] = None  # type: ignore[index]
    while len(marks) > MARKS_MAX:
        del marks[next(iter(marks))]  # type: ignore[arg-type]
