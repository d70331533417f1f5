"""The index: which blocks are known, by key, and how they follow each other.

A *node* is a small number that stands for a known block. It exists while a copy of the
block lies in some tier, or while a node that follows it exists: a block whose last copy was
lost from the middle of a chain stays as a *hollow* node, so that the blocks below it can be
matched again as soon as it is computed again.

What concerns many blocks at once is kept in arrays, one entry a node, and blocks that were
added together get neighbouring numbers. So a prompt of ten thousand known blocks costs a few
dictionary look-ups, to find the last block that is known, and a few array operations: the
blocks before it are known from the nodes alone, for a key names everything before it.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.keys import Key

ScalarT = TypeVar("ScalarT", bound=np.generic)

NOWHERE = -1
"""No node, no slot."""

_FEW_BLOCKS = 16
"""Up to here, looking every key up is cheaper than searching for the last known one."""


_SORTED_AT_ONCE = 16_384
"""How many unused numbers are sorted together, in less than a millisecond."""
_ONE = np.int32(1)
"""Of the counts' own type: `np.add.at` takes three to twenty times as long with an int."""
_ONE_COPY = np.int16(1)
_TIER_BITS = 31
"""Tiers beyond these share a bit: then fewer blocks are written than might be, never more."""
_ARRAYS = (
    *("parent", "child_count", "copy_count", "tenant", "hits", "pins", "priority", "run"),
    *("weights", "outdated"),
)


class NodeTable:
    """Known blocks, numbered."""

    def __init__(self, capacity: int = 64) -> None:
        self.ids: dict[Key, int] = {}
        """Key to node: the index proper."""
        self.keys: list[Key | None] = [None] * capacity
        """Node to key; `None` where no node is."""
        self.parent = np.full(capacity, NOWHERE, dtype=np.intp)
        """The node of the block before, if it is known."""
        self.child_count = np.zeros(capacity, dtype=np.int32)
        """How many nodes follow directly, in whatever tier."""
        self.copy_count = np.zeros(capacity, dtype=np.int16)
        """In how many tiers a copy lies, or is being written; see `add_copies`."""
        self._copied = 0
        """How many nodes have a copy."""
        self.tenant = np.zeros(capacity, dtype=np.int32)
        """Who pays for it: a number of `Books.tenants`."""
        self.hits = np.zeros(capacity, dtype=np.int32)
        """How many requests found it."""
        self.pins = np.zeros(capacity, dtype=np.int32)
        """How many pinned prefixes contain it."""
        self.priority = np.zeros(capacity, dtype=np.int16)
        """Lower leaves first."""
        self.hinted = False
        """Whether a node ever had another priority than zero."""
        self.run = np.zeros(capacity, dtype=np.int32)
        """How many nodes before it, numbered downwards one by one, are its ancestors."""
        self.weights = np.zeros(capacity, dtype=np.int32)
        """Which weights it was computed with: a number of `Weights`."""
        self.weights_now = 0
        """Those of new nodes."""
        self.is_mixed = False
        """Whether there may be nodes of several weights."""
        self.outdated = np.zeros(capacity, dtype=np.int32)
        """A bit for each tier that another engine has voided since the block was computed."""
        self._has_outdated = False
        self._unused = _Numbers(capacity)
        self._look_at_arrays()

    def _look_at_arrays(self) -> None:
        # Reading one number through a memoryview takes a third of the time an array takes.
        self.parent_view = self.parent.data
        self.pins_view = self.pins.data
        self.run_view = self.run.data

    @property
    def capacity(self) -> int:
        """How many nodes fit before the arrays grow."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.ids)

    def match(self, keys: Sequence[Key]) -> NDArray[np.intp]:
        """The nodes of the longest prefix of `keys` that is known, hollow ones included."""
        if len(keys) > _FEW_BLOCKS:
            path = self._path_to_last_known(keys)
            if path is not None:
                return path
        found: list[int] = []
        for key in keys:
            node = self.ids.get(key, NOWHERE)
            if node == NOWHERE:
                break
            found.append(node)
        if len(set(found)) != len(found):
            raise ValueError("keys: a key occurs twice")
        return np.array(found, dtype=np.intp)

    def path_to(self, node: int) -> NDArray[np.intp]:
        """The nodes that lead to a node, as far back as they are known, and the node itself."""
        runs: list[NDArray[np.intp]] = []
        while node != NOWHERE:
            first = node - self.run_view[node]
            runs.append(np.arange(first, node + 1, dtype=np.intp))
            node = self.parent_view[first]
        return np.concatenate(runs[::-1]) if runs else np.empty(0, dtype=np.intp)

    def _path_to_last_known(self, keys: Sequence[Key]) -> NDArray[np.intp] | None:
        """Finds a known block whose successor is unknown, and the nodes that lead to it.

        Returns `None` if its chain does not reach back to the first key: then some block
        between is missing, and only looking up one key after the other finds which.
        """
        known, unknown, node = -1, len(keys), NOWHERE
        while unknown - known > 1:
            # The end first: prompts that are known at all are mostly known to the end.
            middle = unknown - 1 if unknown == len(keys) else (known + unknown) // 2
            found = self.ids.get(keys[middle], NOWHERE)
            if found == NOWHERE:
                unknown = middle
            else:
                known, node = middle, found
        path = self.path_to(node)
        return path if len(path) == known + 1 else None

    def get(self, key: Key) -> int:
        """The node of a key, or `NOWHERE`."""
        return self.ids.get(key, NOWHERE)

    def get_all(self, keys: Sequence[Key]) -> list[int]:
        """The node of each key, or `NOWHERE`."""
        return [self.ids.get(key, NOWHERE) for key in keys]

    def key_of(self, node: int) -> Key:
        """The key of a node.

        Raises `InvariantViolation`: there is no such node.
        """
        key = self.keys[node]
        if key is None:
            raise InvariantViolation(f"node {node} is not known")
        return key

    def keys_of(self, nodes: Sequence[int]) -> list[Key]:
        """The keys of nodes.

        Raises `InvariantViolation`: one of them is not known.
        """
        keys = list(map(self.keys.__getitem__, nodes))
        if None in keys:
            raise InvariantViolation(f"node {nodes[keys.index(None)]} is not known")
        return cast("list[Key]", keys)

    def add_chain(self, keys: Sequence[Key], *, parent: int, tenant: int) -> NDArray[np.intp]:
        """Adds unknown keys that follow each other, the first one after `parent`.

        The nodes have no copies yet: the caller places one before anything else happens.
        """
        count = len(keys)
        while self._unused.count < count:
            self._grow()
        nodes = self._unused.take(count)
        numbers = nodes.tolist()
        known = len(self.ids)
        self.ids.update(zip(keys, numbers, strict=True))
        if len(self.ids) != known + count:
            raise InvariantViolation(f"of {count} keys added, some were known already")
        if count == 0:
            return nodes
        # Most often they are numbered one by one, and a slice is written in a fifth of the time.
        breaks = ((nodes[1:] - nodes[:-1] != 1).nonzero()[0] + 1).tolist()
        place: slice | NDArray[np.intp] = nodes
        if breaks:
            for number, key in zip(numbers, keys, strict=True):
                self.keys[number] = key
        else:
            place = slice(numbers[0], numbers[-1] + 1)
            self.keys[place] = keys
        before = np.empty(count, dtype=np.intp)
        before[0], before[1:] = parent, nodes[:-1]
        self.parent[place] = before
        self.child_count[place] = 1
        self.child_count[numbers[-1]] = 0
        if parent != NOWHERE:
            self.child_count[parent] += 1
        self.run[place] = self._runs(numbers, breaks, parent)
        self.copy_count[place] = 0
        self.tenant[place] = tenant
        self.hits[place] = 0
        self.pins[place] = 0
        self.priority[place] = 0
        if self.is_mixed:
            self.weights[place] = self.weights_now
        if self._has_outdated:
            self.outdated[place] = 0
        return nodes

    def add_forest(
        self, keys: Sequence[Key], parents: Sequence[Key | None], *, tenant: int
    ) -> NDArray[np.intp]:
        """Adds unknown keys of many chains at once, those of a chain one after the other.

        A block that comes before one of them is known, or among `keys` itself. The nodes have no
        copies yet, as in `add_chain`.
        """
        count = len(keys)
        while self._unused.count < count:
            self._grow()
        nodes = self._unused.take(count)
        numbers = nodes.tolist()
        known = len(self.ids)
        self.ids.update(zip(keys, numbers, strict=True))
        if len(self.ids) != known + count:
            raise InvariantViolation(f"of {count} keys added, some were known already")
        for number, key in zip(numbers, keys, strict=True):
            self.keys[number] = key
        ids = self.ids
        before = np.array([NOWHERE if key is None else ids[key] for key in parents], np.intp)
        for array in (self.child_count, self.copy_count, self.hits, self.pins, self.priority):
            array[nodes] = 0
        self.parent[nodes] = before
        if self.is_mixed:
            self.weights[nodes] = self.weights_now
        if self._has_outdated:
            self.outdated[nodes] = 0
        np.add.at(self.child_count, before[before != NOWHERE], _ONE)
        self.tenant[nodes] = tenant
        place = np.arange(count, dtype=np.intp)
        follows = np.zeros(count, dtype=bool)
        follows[1:] = (before[1:] == nodes[:-1]) & (nodes[1:] - nodes[:-1] == 1)
        self.run[nodes] = place - np.maximum.accumulate(np.where(follows, 0, place))
        return nodes

    def _runs(self, numbers: list[int], breaks: list[int], parent: int) -> NDArray[np.intp]:
        """For each of some new nodes, how many before it are its ancestors, one by one."""
        run = np.arange(len(numbers), dtype=np.intp)
        for first, end in pairwise([*breaks, len(numbers)]):
            run[first:end] -= first
        if parent != NOWHERE and numbers[0] == parent + 1:
            run[: breaks[0] if breaks else len(numbers)] += self.run_view[parent] + 1
        return run

    def remove_all(self, nodes: NDArray[np.intp], keys: Sequence[Key]) -> list[int]:
        """Removes nodes without copies at once, if nothing but each other follows them.

        Returns the nodes that stay because something else follows one of them: these are
        for the caller to remove one by one, deepest first.
        """
        if not len(nodes):
            return []
        parents = self.parent[nodes]
        inner = parents[parents != NOWHERE]
        np.subtract.at(self.child_count, inner, _ONE)
        numbers: list[int] = nodes.tolist()
        if np.count_nonzero(self.child_count[nodes]):
            np.add.at(self.child_count, inner, _ONE)
            return numbers
        for key, number in zip(keys, numbers, strict=True):
            del self.ids[key]
            self.keys[number] = None
        self.parent[nodes] = NOWHERE
        self._unused.give_back(nodes)
        # Of a chain, deepest first, only the parent of the last node is not removed itself.
        ends = parents[:-1][parents[:-1] != nodes[1:]].tolist()
        return [
            before
            for before in (*ends, int(parents[-1]))
            if before != NOWHERE
            and self.keys[before] is not None
            and not (self.copy_count[before] or self.child_count[before])
        ]

    def remove_if_useless(self, node: int) -> list[Key]:
        """Removes a node without copies and followers, and hollow nodes before it.

        Returns the keys that are unknown from now on, deepest first.
        """
        removed: list[Key] = []
        while node != NOWHERE and self.copy_count[node] == 0 and self.child_count[node] == 0:
            key = self.key_of(node)
            parent = int(self.parent[node])
            del self.ids[key]
            self.keys[node] = None
            self.parent[node] = NOWHERE
            self._unused.give_back(np.array([node], dtype=np.intp))
            removed.append(key)
            if parent != NOWHERE:
                self.child_count[parent] -= 1
            node = parent
        return removed

    def add_copies(self, nodes: NDArray[np.intp]) -> None:
        """One more tier has a copy of each of these nodes."""
        before = self.copy_count[nodes]
        self.copy_count[nodes] = before + _ONE_COPY
        self._copied += len(nodes) - int(np.count_nonzero(before))

    def drop_copies(self, nodes: NDArray[np.intp]) -> None:
        """One tier less has a copy of each of these nodes."""
        left = self.copy_count[nodes] - _ONE_COPY
        self.copy_count[nodes] = left
        self._copied -= len(nodes) - int(np.count_nonzero(left))
        if self._has_outdated:
            self.outdated[nodes[left == 0]] = 0

    def use_weights(self, number: int) -> None:
        """From now on new nodes are of these weights; those that are there keep theirs."""
        self.weights_now = number
        self.is_mixed = True

    def of_weights_now(self, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some nodes that were computed with the weights of now."""
        return nodes[self.weights[nodes] == self.weights_now] if self.is_mixed else nodes

    def outdate_all(self, tier: int) -> None:
        """Every block that has a copy now is older than what may be written into a tier."""
        self.outdate(np.flatnonzero(self.copy_count).astype(np.intp), tier)

    def outdate(self, nodes: NDArray[np.intp], tier: int) -> None:
        """These blocks are older than what may be written into a tier."""
        self.outdated[nodes] |= 1 << tier % _TIER_BITS
        self._has_outdated = True

    def not_outdated(self, nodes: NDArray[np.intp], tier: int) -> NDArray[np.intp]:
        """Those of some nodes that may be written into a tier."""
        if not self._has_outdated:
            return nodes
        may: NDArray[np.intp] = nodes[self.outdated[nodes] & 1 << tier % _TIER_BITS == 0]
        return may

    def hollow_count(self) -> int:
        """How many known blocks have no copy anywhere."""
        # Numbers that no block has count no copies either: blocks leave without any.
        return len(self.ids) - self._copied

    def _grow(self) -> None:
        old = self.capacity
        self.keys += [None] * old
        for name in _ARRAYS:
            setattr(self, name, grown(getattr(self, name), old * 2))
        self._look_at_arrays()
        self._unused.grow(old * 2)


class _Numbers:
    """Numbers that no node has, given out in long runs.

    They come back in pieces of chains. Given out again at once, they would soon be in no order at
    all, and what takes one slice of an array would take a list of places, in several times the
    time. So those that came back wait until the others are used up, and are then sorted, longest
    runs first: short ones get time to be joined by their neighbours.
    """

    def __init__(self, capacity: int) -> None:
        self._next = np.arange(capacity, dtype=np.intp)
        """Numbers in the order in which they are given out."""
        self._back: deque[NDArray[np.intp]] = deque()
        self.count = capacity

    def take(self, count: int) -> NDArray[np.intp]:
        """Numbers for new nodes; the caller made sure that there are enough."""
        while len(self._next) < count:
            self._sort(count)
        numbers, self._next = self._next[:count].copy(), self._next[count:]
        self.count -= count
        return numbers

    def give_back(self, numbers: NDArray[np.intp]) -> None:
        self._back.append(numbers)
        self.count += len(numbers)

    def grow(self, capacity: int) -> None:
        """Adds the numbers up to `capacity`; there were half as many."""
        self._next = np.concatenate((self._next, np.arange(capacity // 2, capacity, dtype=np.intp)))
        self.count += capacity // 2

    def _sort(self, wanted: int) -> None:
        """Makes numbers that came back the next ones: so many that it takes a moment only."""
        parts = [self._next]
        size = len(self._next)
        while self._back and size < max(_SORTED_AT_ONCE, 2 * wanted):
            parts.append(self._back.popleft())
            size += len(parts[-1])
        self._next = numbers = np.sort(np.concatenate(parts))
        breaks = (numbers[1:] - numbers[:-1] != 1).nonzero()[0] + 1
        if not len(breaks):
            return
        ends = np.concatenate((breaks, (len(numbers),)))
        lengths = ends.copy()
        lengths[1:] -= breaks
        order = np.argsort(-lengths, kind="stable")
        # Where each run began and begins now, and so where each number comes from.
        moved = (ends - lengths)[order]
        lengths = lengths[order]
        moved -= np.cumsum(lengths) - lengths
        place = np.repeat(moved, lengths) + np.arange(len(numbers))
        self._next = numbers[place]


def grown(array: NDArray[ScalarT], size: int, fill: int = 0) -> NDArray[ScalarT]:
    """A larger copy of an array, filled up with `fill`."""
    larger: NDArray[ScalarT] = np.full(size, fill, dtype=array.dtype)
    larger[: len(array)] = array
    return larger
