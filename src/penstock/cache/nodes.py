"""The index: which blocks are known, by key, and how they follow each other.

A *node* is a small number that stands for a known block. It exists while a copy of the
block lies in some tier, or while a node that follows it exists: a block whose last copy was
lost from the middle of a chain stays as a *hollow* node, so that the blocks below it can be
matched again as soon as somebody computes it anew.

What concerns many blocks at once is kept in arrays, one entry a node, so that a prompt of
ten thousand blocks costs a few array operations and one dictionary look-up a block.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.ids import Key

ScalarT = TypeVar("ScalarT", bound=np.generic)

NOWHERE = -1
"""No node, no slot."""

_MATCH_CHUNK = 64
"""A walk that misses early should not have looked up the whole prompt; chunks double."""


class NodeTable:
    """Known blocks, numbered."""

    def __init__(self, capacity: int = 1024) -> None:
        self.ids: dict[Key, int] = {}
        """Key to node: the index proper."""
        self.keys: list[Key | None] = [None] * capacity
        """Node to key; `None` where no node is."""
        self.parent = np.full(capacity, NOWHERE, dtype=np.int32)
        """The node of the block before, if it is known."""
        self.child_count = np.zeros(capacity, dtype=np.int32)
        """How many nodes follow directly, in whatever tier."""
        self.copy_count = np.zeros(capacity, dtype=np.int16)
        """In how many tiers a copy lies, or is being written."""
        self.tenant = np.zeros(capacity, dtype=np.int32)
        """Who pays for it: a number of `Books.tenants`."""
        self.hits = np.zeros(capacity, dtype=np.int32)
        """How many requests found it."""
        self.pins = np.zeros(capacity, dtype=np.int32)
        """How many pinned prefixes contain it."""
        self.priority = np.zeros(capacity, dtype=np.int16)
        """Lower leaves first."""
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._free_count = capacity

    @property
    def capacity(self) -> int:
        """How many nodes fit before the arrays grow."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.ids)

    def match(self, keys: Sequence[Key]) -> NDArray[np.int32]:
        """The nodes of the longest prefix of `keys` that is known, hollow ones included."""
        get = self.ids.get
        found: list[int] = []
        start, size = 0, _MATCH_CHUNK
        while start < len(keys):
            chunk = list(map(get, keys[start : start + size], repeat(NOWHERE)))
            if NOWHERE in chunk:
                found += chunk[: chunk.index(NOWHERE)]
                break
            found += chunk
            start += size
            size *= 2
        return np.array(found, dtype=np.int32)

    def get(self, key: Key) -> int:
        """The node of a key, or `NOWHERE`."""
        return self.ids.get(key, NOWHERE)

    def key_of(self, node: int) -> Key:
        """The key of a node.

        Raises:
            InvariantViolation: there is no such node.
        """
        key = self.keys[node]
        if key is None:
            raise InvariantViolation(f"node {node} is not known")
        return key

    def keys_of(self, nodes: Sequence[int]) -> list[Key]:
        """The keys of nodes.

        Raises:
            InvariantViolation: one of them is not known.
        """
        keys = list(map(self.keys.__getitem__, nodes))
        if None in keys:
            raise InvariantViolation(f"node {nodes[keys.index(None)]} is not known")
        return cast("list[Key]", keys)

    def add_chain(self, keys: Sequence[Key], *, parent: int, tenant: int) -> NDArray[np.int32]:
        """Adds unknown keys that follow each other, the first one after `parent`.

        The nodes have no copies yet: the caller places one before anything else happens.
        """
        count = len(keys)
        while self._free_count < count:
            self._grow()
        self._free_count -= count
        nodes = self._free[self._free_count : self._free_count + count][::-1].copy()
        numbers = nodes.tolist()
        known = len(self.ids)
        self.ids.update(zip(keys, numbers, strict=True))
        if len(self.ids) != known + count:
            raise InvariantViolation(f"of {count} keys added, some were known already")
        if count > 1 and (np.diff(nodes) == 1).all():
            self.keys[numbers[0] : numbers[-1] + 1] = keys
        else:
            for number, key in zip(numbers, keys, strict=True):
                self.keys[number] = key
        if count:
            self.parent[nodes[0]] = parent
            self.parent[nodes[1:]] = nodes[:-1]
            self.child_count[nodes[:-1]] = 1
            self.child_count[nodes[-1]] = 0
            if parent != NOWHERE:
                self.child_count[parent] += 1
        self.copy_count[nodes] = 0
        self.tenant[nodes] = tenant
        self.hits[nodes] = 0
        self.pins[nodes] = 0
        self.priority[nodes] = 0
        return nodes

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
            self._free[self._free_count] = node
            self._free_count += 1
            removed.append(key)
            if parent != NOWHERE:
                self.child_count[parent] -= 1
            node = parent
        return removed

    def hollow_count(self) -> int:
        """How many known blocks have no copy anywhere."""
        nodes = np.fromiter(self.ids.values(), dtype=np.int32, count=len(self.ids))
        return int(np.count_nonzero(self.copy_count[nodes] == 0))

    def _grow(self) -> None:
        old = self.capacity
        self.keys += [None] * old
        for name in ("parent", "child_count", "copy_count", "tenant", "hits", "pins", "priority"):
            setattr(self, name, grown(getattr(self, name), old * 2))
        free = np.empty(old * 2, dtype=np.int32)
        # The new numbers lie under the old ones, so that low numbers are given out first.
        free[:old] = np.arange(old * 2 - 1, old - 1, -1, dtype=np.int32)
        free[old : old + self._free_count] = self._free[: self._free_count]
        self._free = free
        self._free_count += old


def grown(array: NDArray[ScalarT], size: int, fill: int = 0) -> NDArray[ScalarT]:
    """A larger copy of an array, filled up with `fill`."""
    larger: NDArray[ScalarT] = np.full(size, fill, dtype=array.dtype)
    larger[: len(array)] = array
    return larger
