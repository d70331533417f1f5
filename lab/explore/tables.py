"""Sets and maps of 64-bit numbers that take a whole array of keys at a time.

Both are open-addressed tables with linear probing, a power of two in size, and the upper bits
of a key say where to look first: keys have to be well mixed, see `mixed`.

What must not break: of equal keys in one array, exactly one is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    Places = NDArray[np.int64]
    Yes = NDArray[np.bool_]

_BITS_MIN = 16
_CLAIM_BITS = 18
_GROW_AT = 0.6
"""A table that is fuller than this is doubled: probes get long beyond it."""

MISSING = -1
"""What a map says of a key it does not have."""


def mixed(values: NDArray[np.uint64]) -> Keys:
    """Small numbers as keys: every bit of a value moves every bit of its key.

    The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    with np.errstate(over="ignore"):
        key = values + np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


class _Table:
    """Where keys lie. 0 marks an empty place, so it is no key."""

    def __init__(self, bits: int = _BITS_MIN) -> None:
        self._bits = bits
        self._count = 0
        self._keys = np.zeros(1 << bits, dtype=np.uint64)
        self._claims = np.zeros(1 << min(bits, _CLAIM_BITS), dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    def _first_places(self, keys: Keys) -> Places:
        return (keys >> np.uint64(64 - self._bits)).astype(np.int64)

    def _enter(self, keys: Keys) -> tuple[Places, Yes]:
        """Where each key lies now, and whether it is new."""
        mask = len(self._keys) - 1
        places = self._first_places(keys)
        fresh = np.zeros(len(keys), dtype=np.bool_)
        here = self._keys[places]
        open_rows = np.flatnonzero(here != keys)
        here, wanted, slots = here[open_rows], keys[open_rows], places[open_rows]
        while len(open_rows):
            empty = np.flatnonzero(here == 0)
            slots = (slots + (here != 0)) & mask
            if len(empty):
                won = self._claim(slots, empty)
                self._keys[slots[won]] = wanted[won]
                fresh[open_rows[won]] = True
            here = self._keys[slots]
            settled = here == wanted
            places[open_rows[settled]] = slots[settled]
            left = np.flatnonzero(~settled)
            open_rows, wanted = open_rows[left], wanted[left]
            here, slots = here[left], slots[left]
        self._count += int(np.count_nonzero(fresh))
        return places, fresh

    def _claim(self, slots: Places, empty: Places) -> Places:
        """Of all that want the same empty slot one wins; the others look again."""
        cells = slots[empty] & len(self._claims) - 1
        self._claims[cells] = empty
        won: Places = empty[self._claims[cells] == empty]
        return won

    def _is_crowded_by(self, more: int) -> bool:
        return self._count + more > _GROW_AT * len(self._keys)

    def _double(self) -> None:
        self._bits += 1
        self._count = 0
        self._keys = np.zeros(1 << self._bits, dtype=np.uint64)
        self._claims = np.zeros(1 << min(self._bits, _CLAIM_BITS), dtype=np.int32)


class Seen(_Table):
    """A set of keys."""

    _MOVED_AT_A_TIME = 1 << 22

    def add(self, keys: Keys) -> Yes:
        """Takes keys in; says of each whether it is new, of equal ones for one only."""
        while self._is_crowded_by(len(keys)):
            self._grow()
        return self._enter(keys)[1]

    def _grow(self) -> None:
        old = self._keys
        self._double()
        for first in range(0, len(old), self._MOVED_AT_A_TIME):
            piece = old[first : first + self._MOVED_AT_A_TIME]
            self._enter(piece[piece != 0])


class Lookup(_Table):
    """A map from keys to numbers that are 0 or more, or as low as the caller likes below -1."""

    def __init__(self) -> None:
        super().__init__()
        self._values = np.full(len(self._keys), MISSING, dtype=np.int64)

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The number of each key, or `MISSING`."""
        mask = len(self._keys) - 1
        slots = self._first_places(keys)
        found = np.full(len(keys), MISSING, dtype=np.int64)
        open_rows, wanted = np.arange(len(keys)), keys
        while len(open_rows):
            here = self._keys[slots]
            same = here == wanted
            found[open_rows[same]] = self._values[slots[same]]
            left = ~same & (here != 0)
            open_rows, wanted = open_rows[left], wanted[left]
            slots = (slots[left] + 1) & mask
        return found

    def put(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        """Takes in new keys, no two of them equal."""
        while self._is_crowded_by(4 * len(keys)):
            old_keys, old_values = self._keys, self._values
            self._double()
            self._values = np.full(len(self._keys), MISSING, dtype=np.int64)
            kept = old_keys != 0
            places, _ = self._enter(old_keys[kept])
            self._values[places] = old_values[kept]
        places, _ = self._enter(keys)
        self._values[places] = numbers
