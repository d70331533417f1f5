"""From one layout to another: copies of blocks, and which bytes go from which rank to which rank.

Packing is the case in which the target is `layout.packed(...)`. This is the definition that
every faster mover has to agree with, byte for byte.

    source ranks (forms)  ─┐
                           ├─→ plan ─→ routes: source, target, pieces (layers × heads of a group)
    target ranks (forms)  ─┘

Heads and layers are numbered through the whole model, so a plan is a matter of comparing what
each rank holds: any tensor-parallel sizes, also where neither divides the other; heads dealt
out unevenly; heads that several ranks hold (fewer KV heads than ranks) and groups that all of
them hold (latent attention); pipeline stages; blocks of different sizes, where one divides the
other.

A piece goes whole, from one source: the one that has the least to send so far, the lowest rank
among equals. Layers of a piece are not dealt out over sources that hold the same, because
layers become ready one after the other: no layer would arrive any sooner, over more routes.

The rules:

- Bytes that a layout does not name, such as the gaps between its strides, are neither read nor
  written.
- Every cell of every target comes from exactly one source, or the plan is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import counted
from penstock.vocabulary.layout import HeadRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.vocabulary.form import Form
    from penstock.vocabulary.layout import Group, Layer, Layout
    from penstock.vocabulary.planes import Plane


Buffers = Mapping[int, NDArray[np.uint8]]
"""The bytes of each buffer, by its number in the layout."""


_SMALL_BYTES = 16_384
"""Of a plane's block. Copying less than this takes no longer than calling for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Some blocks of a layout, in the order in which they are copied."""

    layout: Layout
    buffers: Buffers
    numbers: Sequence[int]


class BlockCopier:
    """Copies blocks between two layouts with the same cells, prepared once.

    `group` restricts it to one KV group, whose blocks may lie under other numbers than those
    of the other groups.
    """

    def __init__(
        self,
        source: Layout,
        source_buffers: Buffers,
        target: Layout,
        target_buffers: Buffers,
        *,
        group: int | None = None,
    ) -> None:
        source_planes = _named_planes(source, group)
        target_planes = _named_planes(target, group)
        if [name for name, _ in source_planes] != [name for name, _ in target_planes]:
            raise ValueError("source and target have different cells: their forms differ")
        self._views = [
            (read.view(source_buffers[read.buffer]), write.view(target_buffers[write.buffer]))
            for (_, read), (_, write) in zip(source_planes, target_planes, strict=True)
        ]

    def copy(self, numbers: Sequence[int], target_numbers: Sequence[int]) -> None:
        if len(numbers) != len(target_numbers):
            raise ValueError(
                f"source has {counted(len(numbers), 'block')}, target {len(target_numbers)}, "
                "must have as many"
            )
        for readable, writable in self._views:
            shape = writable.shape[1:]
            if len(numbers) > 1 and readable[:1].nbytes < _SMALL_BYTES:
                # Two copies, but two calls for all blocks instead of two for each.
                found = readable[list(numbers)]
                writable[list(target_numbers)] = found.reshape(len(numbers), *shape)
                continue
            for number, target_number in zip(numbers, target_numbers, strict=True):
                writable[target_number] = readable[number].reshape(shape)


def copy_blocks(source: Blocks, target: Blocks) -> None:
    """Copies block after block from one layout into another with the same cells."""
    copier = BlockCopier(source.layout, source.buffers, target.layout, target.buffers)
    copier.copy(source.numbers, target.numbers)


def _named_planes(
    layout: Layout, only: int | None = None
) -> list[tuple[tuple[object, ...], Plane]]:
    """Every plane in canonical order, under all that must be the same in a copy of it."""
    return [
        (
            (
                *(position, group.heads, layer.number, plane.role, plane.dtype, plane.encoding),
                *(plane.has_heads, plane.heads, plane.tokens, plane.channels),
            ),
            plane,
        )
        for position, group in enumerate(layout.groups)
        if only is None or position == only
        for layer in group.layers
        for plane in layer.planes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Layers and heads that go from one rank to another."""

    source_group: int
    """Position of their group in the layout of the source."""
    target_group: int
    """Position of their group in the layout of the target."""
    layers: tuple[int, ...]
    heads: HeadRange | None
    """`None` in a group without heads."""
    block_bytes: int
    """Bytes of one block of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """All that one source rank sends to one target rank."""

    source: int
    target: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """How blocks of the source ranks become blocks of the target ranks."""

    routes: tuple[Route, ...]
    """By source, then by target."""
    source_tokens: int
    """Tokens of a block of the sources."""
    target_tokens: int
    """Tokens of a block of the targets."""
    same_sums: bool
    """Whether a cell has the same sum at both ends: blocks are of one size, and so of one key,
    and the algorithm is the same. Otherwise cells are verified by the sums of the source, and
    those of the target are computed anew."""

    @property
    def unit_tokens(self) -> int:
        """Tokens of the larger of the two blocks: what can be resharded by itself."""
        return max(self.source_tokens, self.target_tokens)


def plan_reshard(sources: Sequence[Form], targets: Sequence[Form]) -> ReshardPlan:
    """Who sends what to whom, for ranks in the order of their forms.

    Raises `ValueError`: the blocks of the sources cannot become those of the targets. The message
    names the first thing in which they differ, with both values.
    """
    source_tokens = _block_tokens(sources, "source")
    target_tokens = _block_tokens(targets, "target")
    if source_tokens % target_tokens and target_tokens % source_tokens:
        raise ValueError(
            f"block_tokens is {source_tokens} at the sources and {target_tokens} at the targets, "
            "one must be a multiple of the other"
        )
    holders = _holders(sources)
    needs = [
        need
        for target, form in enumerate(targets)
        for position, group in enumerate(form.layout.groups)
        for need in _needs(_Wanted(target, position, group), holders, target_tokens, source_tokens)
    ]
    algorithms = {form.checksum for form in (*sources, *targets)}
    return ReshardPlan(
        routes=_routes(needs, len(sources)),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        same_sums=source_tokens == target_tokens and len(algorithms) == 1,
    )


class _Holding(NamedTuple):
    """A layer, or some planes of it, on a source rank."""

    source: int
    group_position: int
    group: Group
    layer: Layer


class _Wanted(NamedTuple):
    """A group of a target rank."""

    target: int
    group_position: int
    group: Group

    def __str__(self) -> str:
        return f"target rank {self.target}"


class _Candidate(NamedTuple):
    source: int
    source_group: int


_Run = tuple[HeadRange | None, tuple[_Candidate, ...]]
"""Heads in a row, and who has all of them."""


@dataclass(slots=True)
class _Need:
    """Layers and heads that a target needs, and that the same sources have."""

    wanted: _Wanted
    layers: list[int]
    heads: HeadRange | None
    candidates: tuple[_Candidate, ...]
    block_bytes: int = field(default=0)


_Holders = dict[tuple[int, tuple[int, ...]], list[_Holding]]
"""By layer and roles of the planes: a layer may have planes in more than one group."""


def _block_tokens(forms: Sequence[Form], side: str) -> int:
    if not forms:
        raise ValueError(f"{side}s is empty, must have at least 1 rank")
    for rank, form in enumerate(forms):
        if form.block_tokens != forms[0].block_tokens:
            raise ValueError(
                f"block_tokens is {forms[0].block_tokens} on {side} rank 0 and "
                f"{form.block_tokens} on {side} rank {rank}, must be the same"
            )
    return forms[0].block_tokens


def _holders(sources: Sequence[Form]) -> _Holders:
    holders: _Holders = {}
    for source, form in enumerate(sources):
        for position, group in enumerate(form.layout.groups):
            for layer in group.layers:
                holding = _Holding(source, position, group, layer)
                holders.setdefault(_name(layer), []).append(holding)
    return holders


def _name(layer: Layer) -> tuple[int, tuple[int, ...]]:
    return layer.number, tuple(plane.role for plane in layer.planes)


def _needs(
    wanted: _Wanted, holders: _Holders, target_tokens: int, source_tokens: int
) -> Iterator[_Need]:
    """What a group of a target needs, layers with the same holders taken together."""
    found: list[_Need] = []
    runs_before: list[_Run] = []
    for layer in wanted.group.layers:
        holdings = holders.get(_name(layer), [])
        if not holdings:
            raise ValueError(_nowhere(wanted, layer, holders))
        for holding in holdings:
            _require_same_group(wanted, layer, holding)
        if layer.headless and wanted.group.heads is not None:
            # Before bytes are compared, which differ because the heads do.
            _whole_candidates(wanted, layer, holdings)
        for holding in holdings:
            _require_same_planes(wanted, layer, holding, target_tokens, source_tokens)
        runs = list(_runs(wanted, layer, holdings))
        if runs != runs_before:
            yield from found
            found = [_Need(wanted, [], heads, candidates) for heads, candidates in runs]
            runs_before = runs
        for need in found:
            need.layers.append(layer.number)
            need.block_bytes += _layer_bytes(layer, wanted.group, need.heads)
    yield from found


def _nowhere(wanted: _Wanted, layer: Layer, holders: _Holders) -> str:
    roles = {
        " ".join(plane.role.label for plane in holding.layer.planes)
        for holdings in holders.values()
        for holding in holdings
        if holding.layer.number == layer.number
    }
    ours = " ".join(plane.role.label for plane in layer.planes)
    if roles:
        there = "; ".join(sorted(roles))
        return f"planes of layer {layer.number} are {there} at the sources and {ours} on {wanted}"
    numbers = sorted({number for number, _ in holders})
    return (
        f"layer {layer.number} of {wanted} is on no source rank: they have layers "
        f"{numbers[0]} to {numbers[-1]}, {len(numbers)} in all"
    )


def _require_same_group(wanted: _Wanted, layer: Layer, holding: _Holding) -> None:
    """Refuses a layer that would mean something else at the target."""
    where = f"layer {layer.number}"
    _require_equal(
        f"kind of the group of {where}", holding.group.kind.value, wanted.group.kind.value, wanted
    )
    _require_equal(f"draft of {where}", holding.layer.draft, layer.draft, wanted)
    theirs, ours = holding.group.heads, wanted.group.heads
    _require_equal(
        f"KV heads of the model in {where}",
        None if theirs is None else theirs.total,
        None if ours is None else ours.total,
        wanted,
    )


def _require_same_planes(
    wanted: _Wanted, layer: Layer, holding: _Holding, target_tokens: int, source_tokens: int
) -> None:
    """Refuses bytes that would mean something else at the target."""
    where = f"layer {layer.number}"
    for there, here in zip(holding.layer.planes, layer.planes, strict=True):
        plane = f"plane {here.role.label} of {where}"
        for fact, value, other in (
            ("dtype", there.dtype.value, here.dtype.value),
            ("encoding", there.encoding, here.encoding),
            ("channels", there.channels, here.channels),
            ("heads", there.has_heads, here.has_heads),
            # So blocks of different sizes differ in their number of positions; a plane that
            # has one for the whole block (opaque, state, a scale) allows no other size.
            ("tokens per position", source_tokens // there.tokens, target_tokens // here.tokens),
        ):
            _require_equal(f"{fact} of {plane}", value, other, wanted)


def _require_equal(fact: str, there: object, here: object, wanted: _Wanted) -> None:
    if there != here:
        raise ValueError(f"{fact} is {there!r} at the sources and {here!r} on {wanted}")


def _runs(wanted: _Wanted, layer: Layer, holdings: Sequence[_Holding]) -> Iterator[_Run]:
    """The heads that a target needs of a layer, in as few rows as their holders allow."""
    need = wanted.group.heads
    if need is None:
        yield None, tuple(_Candidate(each.source, each.group_position) for each in holdings)
        return
    if layer.headless:
        yield need, _whole_candidates(wanted, layer, holdings)
        return
    ends = {need.first, need.first + need.count}
    for holding in holdings:
        assert holding.group.heads is not None
        held = holding.group.heads
        ends |= {held.first, held.first + held.count}
    inside = sorted(end for end in ends if need.first <= end <= need.first + need.count)
    for first, end in pairwise(inside):
        # Nobody's heads begin or end between the two: who has the first of them has all.
        candidates = tuple(
            _Candidate(each.source, each.group_position)
            for each in holdings
            if each.group.heads is not None
            and each.group.heads.first <= first < each.group.heads.first + each.group.heads.count
        )
        if not candidates:
            raise ValueError(
                f"head {first} of layer {layer.number} of {wanted} is on no source rank: they "
                f"have {', '.join(sorted({str(each.group.heads) for each in holdings}))}"
            )
        yield HeadRange(first=first, count=end - first, total=need.total), candidates


def _whole_candidates(
    wanted: _Wanted, layer: Layer, holdings: Sequence[_Holding]
) -> tuple[_Candidate, ...]:
    """Who has the very heads of a target, where a plane has no heads."""
    same = [each for each in holdings if each.group.heads == wanted.group.heads]
    if not same:
        theirs = ", ".join(sorted({str(each.group.heads) for each in holdings}))
        raise ValueError(
            f"plane {layer.headless[0].role.label} of layer {layer.number} has no heads to cut: it "
            f"is of heads {theirs} at the sources and of {wanted.group.heads} on {wanted}"
        )
    return tuple(_Candidate(each.source, each.group_position) for each in same)


def _layer_bytes(layer: Layer, group: Group, heads: HeadRange | None) -> int:
    if heads is None or group.heads is None:
        return layer.block_bytes
    headed = sum(plane.segment_bytes for plane in layer.headed) * heads.count
    return headed + sum(plane.block_bytes for plane in layer.headless)


def _routes(needs: Sequence[_Need], source_count: int) -> tuple[Route, ...]:
    """Gives each need to one of its candidates, the largest first."""
    load = [0] * source_count
    pieces: dict[tuple[int, int], list[Piece]] = {}
    order = sorted(enumerate(needs), key=lambda item: (-item[1].block_bytes, item[0]))
    for _, need in order:
        target = need.wanted.target
        chosen = min(
            need.candidates,
            key=lambda each: (load[each.source], (each.source, target) not in pieces, each.source),
        )
        load[chosen.source] += need.block_bytes
        pieces.setdefault((chosen.source, target), []).append(
            Piece(
                source_group=chosen.source_group,
                target_group=need.wanted.group_position,
                layers=tuple(need.layers),
                heads=need.heads,
                block_bytes=need.block_bytes,
            )
        )
    return tuple(
        Route(source=source, target=target, pieces=tuple(_joined(found)))
        for (source, target), found in sorted(pieces.items())
    )


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of a route in canonical order, neighbouring heads taken together."""
    ordered = sorted(pieces, key=_place)
    last = ordered[0]
    for piece in ordered[1:]:
        if _place(last)[:3] == _place(piece)[:3] and last.heads and piece.heads:
            end = last.heads.first + last.heads.count
            if end == piece.heads.first:
                heads = HeadRange(
                    first=last.heads.first,
                    count=last.heads.count + piece.heads.count,
                    total=piece.heads.total,
                )
                last = Piece(
                    source_group=piece.source_group,
                    target_group=piece.target_group,
                    layers=piece.layers,
                    heads=heads,
                    block_bytes=last.block_bytes + piece.block_bytes,
                )
                continue
        yield last
        last = piece
    yield last


def _place(piece: Piece) -> tuple[int, tuple[int, ...], int, int]:
    first = -1 if piece.heads is None else piece.heads.first
    return piece.target_group, piece.layers, piece.source_group, first
