"""What a rank holds: layers, gathered into groups, and which KV heads of them.

The one rule: layers and heads are numbered through the whole model, never through a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.vocabulary.arguments import INT_MAX, require_type, set_ints

if TYPE_CHECKING:
    from penstock.vocabulary.planes import Plane

ALL_HEADS = 0xFFFF_FFFF
"""The head number of a cell whose bytes are the same on every tensor-parallel rank."""
LAYER_NUMBER_MAX = (1 << 24) - 1
"""A checksum seed has 24 bits for the layer."""
HEAD_NUMBER_MAX = ALL_HEADS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRange:
    """The KV heads that a rank holds: `count` of the model's `total`, from `first` on."""

    first: int
    count: int
    total: int

    def __post_init__(self) -> None:
        set_ints(
            self,
            ("first", "first of heads", -INT_MAX, INT_MAX),
            ("count", "count of heads", 1, INT_MAX),
            ("total", "total of heads", 1, HEAD_NUMBER_MAX),
        )
        if self.first < 0 or self.first + self.count > self.total:
            raise ValueError(
                f"heads {self.first} to {self.first + self.count - 1} must be within the "
                f"model's {self.total}"
            )

    @classmethod
    def all_of(cls, total: int) -> HeadRange:
        """Every head of a model that has `total`."""
        return cls(first=0, count=total, total=total)

    def __str__(self) -> str:
        return f"{self.first}-{self.first + self.count - 1} of {self.total}"


class GroupKind(Enum):
    """What the layers of a group compute, as far as it decides which blocks they need."""

    ATTENTION = "attention"
    SLIDING = "sliding"
    LATENT = "latent"
    STATE = "state"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The planes of one layer; `number` counts through the whole model.

    Draft layers (of a speculative decoder) are numbered behind the model's own.
    """

    number: int
    planes: tuple[Plane, ...]
    draft: bool = False

    def __post_init__(self) -> None:
        set_ints(self, ("number", "number of the layer", 0, LAYER_NUMBER_MAX))
        if not self.planes:
            raise ValueError(f"layer {self.number} has no planes, must have at least 1")
        roles = [plane.role for plane in self.planes]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"layer {self.number} has more than one plane {role.label}")
        object.__setattr__(self, "planes", tuple(sorted(self.planes, key=lambda each: each.role)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return sum(plane.block_bytes for plane in self.planes)

    @property
    def headed(self) -> tuple[Plane, ...]:
        """The planes that have KV heads."""
        return tuple(plane for plane in self.planes if plane.has_heads)

    @property
    def headless(self) -> tuple[Plane, ...]:
        """The planes that do not."""
        return tuple(plane for plane in self.planes if not plane.has_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share block ids: a block of the group has bytes in each of them."""

    kind: GroupKind
    layers: tuple[Layer, ...]
    heads: HeadRange | None = None
    """The KV heads this rank holds. `None` says that every rank holds the same bytes."""

    def __post_init__(self) -> None:
        require_type("kind of the group", self.kind, GroupKind)
        if self.heads is not None:
            require_type("heads of the group", self.heads, HeadRange)
        if not self.layers:
            raise ValueError(f"group of kind {self.kind.value} has no layers, must have at least 1")
        layers = sorted(self.layers, key=lambda layer: layer.number)
        for earlier, later in pairwise(layers):
            if earlier.number == later.number:
                raise ValueError(f"layer {later.number} is twice in one group")
        object.__setattr__(self, "layers", tuple(layers))
        if self.kind in {GroupKind.ATTENTION, GroupKind.SLIDING} and self.heads is None:
            raise ValueError(f"heads of a group of kind {self.kind.value} must be given")
        if self.kind is GroupKind.LATENT and self.heads is not None:
            raise ValueError(f"heads of a latent group are {self.heads}, must be None")
        for layer in self.layers:
            for plane in layer.planes:
                self._require_fitting(layer, plane)

    def _require_fitting(self, layer: Layer, plane: Plane) -> None:
        place = f"plane {plane.role.label} of layer {layer.number}"
        if plane.block_count != self.block_count:
            raise ValueError(
                f"{place} has {plane.block_count} blocks, others of its group {self.block_count}"
            )
        if not plane.has_heads:
            return
        held = 0 if self.heads is None else self.heads.count
        if plane.heads != held:
            raise ValueError(f"{place} has {plane.heads} heads, its group has {held}")

    @property
    def block_count(self) -> int:
        """How many blocks it has room for."""
        return self.layers[0].planes[0].block_count

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this group."""
        return sum(layer.block_bytes for layer in self.layers)
