"""Names: ids of operations, namespaces, and block keys, which are running hashes over tokens.

An operation is named by three numbers, because two would not do: the *sequence* tells two
operations of one epoch apart, the *epoch* tells an answer from before a reset, and the
*incarnation*, 64 random bits drawn when the engine starts, tells an answer that belongs to
an earlier life of the same engine.

Every field is content. How and where bytes lie (block size, layout, shards, ranks, storage
format) is the form of a copy and has no place here: the same content in another form must
keep its key.

The one rule that must not break: two namespaces that differ in any field encode to different
bytes. Each field is framed with its name and both lengths, so bytes cannot move from one
field to the next. `docs/keys.md` is the specification.

    namespace → start → 1,024 tokens and their items → restart → 1,024 tokens and … → restart → …

A `KeyChain` absorbs tokens as little-endian uint32 words and takes the digest at each block
boundary, so a key names *all* tokens and items up to the end of its block. Every
`ANCHOR_TOKENS` tokens the hash restarts from the key of all before (an anchor), whether or not a
block ends there: another process can continue from there without the tokens before it, and a
prefix has one key, whatever the block size.

The one rule that must not break: what is hashed can be read back in exactly one way. Different
content is then different input to the hash, and shares a key only if the hash itself fails.
`docs/keys.md` is the specification; a change to any byte here needs new domain strings.
"""

from __future__ import annotations

import hashlib
import operator
import reprlib
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, NoReturn, Protocol, Self, TypeAlias

import numpy as np
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt


LeaseId = NewType("LeaseId", int)
"""A lease within one incarnation; never given twice."""
PinId = NewType("PinId", int)
"""A pinned prefix within one incarnation; never given twice."""
Key = bytes
"""The name of a block's content: 16 bytes, see `penstock.vocabulary.keys`."""


class OperationId(NamedTuple):
    """The name of one operation, never given twice, not even by another life of the engine."""

    incarnation: int
    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.epoch}.{self.sequence}"


NAMESPACE_DOMAIN = b"penstock.namespace.v1"
"""Opens every encoding. A change to the fields or to the framing needs a new version here."""

KEPT = 1024
"""Of how many namespaces the encoding is kept, as every request needs it: tenants, adapters and KV
groups in use at a time."""
FIELD_BYTES_MAX = 4096
"""Long enough for any path, digest or serialised rotary setting; bounds what a key absorbs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a block's content depends on besides the tokens up to its end.

    Fields are compared as UTF-8 bytes, without Unicode normalisation. An empty field means
    "the model's own" or "none", as each field says; it is still part of the encoding.
    """

    model: str
    """Which model, for example `meta-llama/Llama-3.1-8B`. Never empty: it has no default that
    would be safe to share."""
    weights_version: str = "unknown"
    """Which weights, usually a digest of the checkpoint."""
    kv_dtype: str = "bfloat16"
    """The element type in which the KV is kept."""
    kv_scales: str = ""
    """A digest of the scales of quantised KV; empty when it has none."""
    rotary: str = ""
    """The rotary configuration where it is not the model's own, such as a scaling factor."""
    kv_group: str = ""
    """Which KV group of a model that has several; empty when it has one."""
    adapter: str = ""
    """The adapter (LoRA or other) that the KV was computed with; empty for none."""
    tenant: str = ""
    """Who may share this KV; empty when everybody may."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _encode_field(field.name, getattr(self, field.name))
        if not self.model:
            raise ValueError("namespace field model is empty; it must name the model")

    def encode(self) -> bytes:
        """The canonical bytes of this namespace: what the running hash starts from."""
        return _encode(self)


@lru_cache(maxsize=KEPT)
def _encode(namespace: Namespace) -> bytes:
    names = [field.name for field in fields(namespace)]
    parts = [frame(NAMESPACE_DOMAIN), struct.pack("<I", len(names))]
    for name in names:
        parts.append(frame(name.encode("utf-8")))
        parts.append(frame(_encode_field(name, getattr(namespace, name))))
    return b"".join(parts)


def frame(content: bytes) -> bytes:
    """`content` behind its length as a little-endian uint32, so that nothing can shift."""
    return struct.pack("<I", len(content)) + content


def _encode_field(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return _encode_text(name, value)
    raise ValueError(f"namespace field {name} is {reprlib.repr(value)}; it must be a str")


def _encode_text(name: str, text: str) -> bytes:
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise ValueError(f"namespace field {name} has no UTF-8 encoding: {problem}") from None
    if len(encoded) > FIELD_BYTES_MAX:
        raise ValueError(
            f"namespace field {name} is {len(encoded)} bytes long; at most {FIELD_BYTES_MAX} fit"
        )
    return encoded


KEY_BYTES = 16
ANCHOR_TOKENS = 1024
"""A multiple of 16, so that blocks of 16 tokens end there. Shorter would cost more restarts, which
matter for large blocks; longer, more tokens to know for who goes on from an anchor."""
RESERVED_TOKEN = 0xFFFF_FFFF
"""Opens an item in the stream of words, so no token may take this value."""

START_DOMAIN = b"penstock.keys.v1.start"
RESTART_DOMAIN = b"penstock.keys.v1.restart"

BLOCK_TOKENS_MAX = 65_536
ITEM_KIND_BYTES_MAX = 64
ITEM_DIGEST_BYTES_MIN = 16
ITEM_DIGEST_BYTES_MAX = 64

_TOKEN_BYTES = 4
_WORD_TYPES = (np.dtype("<u4"), np.dtype("<i4"))
_ALIGNMENT = 64
"""SHA-256 compresses 64 bytes at a time. All that is not a token is padded to a multiple of
that, so that blocks of 16 tokens stay aligned: each costs one compression, its digest one."""
_ANCHOR_RECORD = struct.Struct("<Q16s40x")
_ANCHOR_BYTES = ANCHOR_TOKENS * _TOKEN_BYTES
_ANCHOR_TOKEN_COUNT_MAX = 2**56
"""Beyond any sequence, and what follows still counts in a uint64."""
_SEEDS_KEPT = 1024
"""How many namespaces keep their prepared hashes at hand: tenants, adapters and KV groups in
use at a time. Another one costs some microseconds."""

_TOKENS_MAX = 2**28
"""Longer than any context, and a GiB of token ids. A `range` can be longer than all memory."""


class HasArray(Protocol):
    """A tensor in host memory, such as torch's: it can be read as a NumPy array."""

    def __array__(self) -> npt.NDArray[Any]:
        """The same elements as a NumPy array."""


Tokens: TypeAlias = (
    "Sequence[int] | npt.NDArray[np.integer[Any]] | bytearray | memoryview | HasArray"
)
"""Token ids, in one of four shapes: a sequence of ints; an array, NumPy array or memoryview
whose elements are integers of 4 or 8 bytes; a tensor of such integers in host memory; or plain
bytes (`bytes`, `bytearray`, a memoryview of bytes) that hold little-endian uint32."""


class RunningHash(Protocol):
    """The part of a hash object that a chain uses; `digest` does not end the hash."""

    def update(self, content: bytes | memoryview, /) -> None:
        """Absorb more bytes."""

    def digest(self) -> bytes:
        """The digest of all bytes absorbed so far."""

    def copy(self) -> Self:
        """An independent hash in the same state."""


ALGORITHMS: dict[str, Callable[[], RunningHash]] = {
    "sha256": hashlib.sha256,
    # Collisions can be built on purpose: only where all who send requests trust each other.
    "xxh3_128": xxhash.xxh3_128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An image or other medium in a sequence: content that its tokens do not name."""

    position: int
    """Index, in the whole sequence, of the token that the item comes before."""
    kind: str
    """What it is, for example `image`; items of different kinds never share a key."""
    digest: bytes
    """A collision-resistant digest of the item's content as the model sees it."""
    length: int
    """How many tokens stand for it; 0 for an item that the model takes in by another way."""

    def __post_init__(self) -> None:
        _require_int("item position", self.position, 0, 2**63 - 1)
        _require_int("item length", self.length, 0, 2**32 - 1)
        _require_ascii("item kind", self.kind, ITEM_KIND_BYTES_MAX)
        _require_bytes("item digest", self.digest, ITEM_DIGEST_BYTES_MIN, ITEM_DIGEST_BYTES_MAX)

    def encode(self) -> bytes:
        """The record that enters the hash. The position is not in it: it is its place there."""
        opening = struct.pack("<I", RESERVED_TOKEN)
        length = struct.pack("<Q", self.length)
        return _padded(opening + frame(self.kind.encode("ascii")) + frame(self.digest) + length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A point where the running hash restarts: all that is needed, beside the namespace, to go on.

    It serves chains of any block size.
    """

    token_count: int
    """How many tokens lie before it: a multiple of `ANCHOR_TOKENS`."""
    key: bytes
    """The key of all tokens and items before it."""
    algorithm: str = "sha256"

    def __post_init__(self) -> None:
        _require_int("anchor token_count", self.token_count, ANCHOR_TOKENS, _ANCHOR_TOKEN_COUNT_MAX)
        if self.token_count % ANCHOR_TOKENS:
            raise ValueError(
                f"anchor token_count is {self.token_count}; "
                f"it must be a multiple of {ANCHOR_TOKENS}"
            )
        _require_bytes("anchor key", self.key, KEY_BYTES, KEY_BYTES)
        _require_algorithm(self.algorithm)


class KeyChain:
    """The keys of one sequence, extended as it grows: each token is hashed once."""

    __slots__ = (
        "_algorithm",
        "_anchor_key",
        "_block_tokens",
        "_hash",
        "_keys",
        "_namespace",
        "_seeds",
        "_token_count",
    )

    def __init__(
        self, namespace: Namespace, *, block_tokens: int, algorithm: str = "sha256"
    ) -> None:
        if type(namespace) is not Namespace:
            raise ValueError(f"namespace is {namespace!r}; it must be a Namespace")
        _require_int("block_tokens", block_tokens, 1, BLOCK_TOKENS_MAX)
        _require_algorithm(algorithm)
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._algorithm = algorithm
        self._anchor_key: bytes | None = None
        """The key of the last anchor passed; None before the first."""
        self._seeds = _prepare_seeds(namespace, algorithm)
        self._hash = self._seeds.start.copy()
        self._token_count = 0
        self._keys: list[bytes] = []

    @classmethod
    def from_anchor(cls, namespace: Namespace, anchor: Anchor, *, block_tokens: int) -> KeyChain:
        """A chain that goes on after `anchor`; its `keys` are of the blocks that end after it.

        Blocks count from the beginning of the sequence, so the first of them begins before the
        anchor where no block ends there. The namespace is hashed again: an anchor brought into
        another namespace yields keys that no sequence of either namespace has.
        """
        if type(anchor) is not Anchor:
            raise ValueError(f"anchor is {reprlib.repr(anchor)}; it must be an Anchor")
        chain = cls(namespace, block_tokens=block_tokens, algorithm=anchor.algorithm)
        chain._token_count = anchor.token_count
        chain._restart(anchor.key)
        return chain

    @property
    def namespace(self) -> Namespace:
        """What all keys of this chain depend on besides tokens and items."""
        return self._namespace

    @property
    def block_tokens(self) -> int:
        """How many tokens a block has."""
        return self._block_tokens

    @property
    def algorithm(self) -> str:
        """Which hash makes the keys."""
        return self._algorithm

    @property
    def keys(self) -> list[bytes]:
        """The keys of all full blocks since the chain began.

        This is the chain's own list, which grows with it, because a copy for each look would
        cost a term in its length: read it, do not change it.
        """
        return self._keys

    @property
    def token_count(self) -> int:
        """How many tokens the sequence has so far, those before an anchor included."""
        return self._token_count

    @property
    def block_count(self) -> int:
        """How many full blocks the sequence has so far, those before an anchor included."""
        return self._token_count // self._block_tokens

    @property
    def anchor(self) -> Anchor | None:
        """The last anchor passed, or None before the first."""
        if self._anchor_key is None:
            return None
        return Anchor(
            token_count=self._token_count - self._token_count % ANCHOR_TOKENS,
            key=self._anchor_key,
            algorithm=self._algorithm,
        )

    def fork(self) -> KeyChain:
        """An independent chain with the same past; what extends one does not touch the other."""
        # Not through `__init__`: all of it was checked when this chain was made.
        twin: KeyChain = KeyChain.__new__(KeyChain)
        twin._namespace = self._namespace
        twin._block_tokens = self._block_tokens
        twin._algorithm = self._algorithm
        twin._seeds = self._seeds
        twin._anchor_key = self._anchor_key
        twin._hash = self._hash.copy()
        twin._token_count = self._token_count
        twin._keys = self._keys.copy()
        return twin

    def extend(self, tokens: Tokens, items: Iterable[Item] = ()) -> list[bytes]:
        """Absorb more of the sequence; return the keys of the blocks this completed.

        Args:
            tokens: What follows the tokens absorbed so far.
            items: Those that start within `tokens`, ordered by position. Positions count from
                the beginning of the sequence. Items at one position are taken in this order.

        Raises:
            ValueError: A token or an item is not acceptable; the chain is as it was.
        """
        words = _to_words(tokens)
        items = _as_items(items)
        self._require_items_within(len(words) // _TOKEN_BYTES, items)
        keys_before = len(self._keys)
        absorbed = 0
        for item in items:
            item_offset = absorbed + (item.position - self._token_count) * _TOKEN_BYTES
            self._absorb(words[absorbed:item_offset])
            self._hash.update(item.encode())
            absorbed = item_offset
        self._absorb(words[absorbed:])
        return self._keys[keys_before:]

    def _require_items_within(self, token_count: int, items: tuple[Item, ...]) -> None:
        earliest = self._token_count
        end = self._token_count + token_count
        for item in items:
            if not earliest <= item.position < end:
                raise ValueError(
                    f"item {item.kind!r} is at position {item.position}; items must be ordered by "
                    f"position and start within the tokens, here from {earliest} to {end - 1}"
                )
            earliest = item.position

    def _absorb(self, words: memoryview) -> None:
        """Absorb words that no item interrupts, and take the key of every block they complete."""
        block_bytes = self._block_tokens * _TOKEN_BYTES
        missing_bytes = block_bytes - self._token_count % self._block_tokens * _TOKEN_BYTES
        if len(words) < missing_bytes:
            self._absorb_within_block(words)
            return
        whole_blocks, tail_bytes = divmod(len(words) - missing_bytes, block_bytes)
        pieces: list[bytes | memoryview] = [words[:missing_bytes]]
        if whole_blocks:
            # NumPy cuts bytes into one object per block faster than slicing does.
            block_type = f"V{block_bytes}"
            pieces += np.frombuffer(words, block_type, whole_blocks, missing_bytes).tolist()
        self._complete_blocks(pieces)
        if tail_bytes:
            self._absorb_within_block(words[-tail_bytes:])

    def _complete_blocks(self, pieces: list[bytes | memoryview]) -> None:
        """Absorb pieces each of which ends a block; restart at every anchor."""
        block_bytes = self._block_tokens * _TOKEN_BYTES
        first = 0
        while first < len(pieces):
            bytes_to_anchor = self._bytes_to_anchor()
            spare_bytes = bytes_to_anchor - len(pieces[first])
            if spare_bytes < 0:
                # Anchors lie within this block: pass them, and end it with what is left.
                left = (-spare_bytes - 1) % _ANCHOR_BYTES + 1
                self._absorb_within_block(pieces[first][:-left])
                pieces[first] = pieces[first][-left:]
                continue
            # All that end at the next anchor or before it. Only the first piece may be short.
            group = pieces[first : first + 1 + spare_bytes // block_bytes]
            # The innermost loop of all: map() feeds the hash, the body only takes the keys.
            digest = self._hash.digest
            self._keys += [digest()[:KEY_BYTES] for _ in map(self._hash.update, group)]
            group_bytes = len(group[0]) + (len(group) - 1) * block_bytes
            self._token_count += group_bytes // _TOKEN_BYTES
            if group_bytes == bytes_to_anchor:
                self._restart(self._keys[-1])
            first += len(group)

    def _absorb_within_block(self, words: bytes | memoryview) -> None:
        """Absorb words that complete no block; restart at every anchor."""
        while len(words) >= (bytes_to_anchor := self._bytes_to_anchor()):
            self._hash.update(words[:bytes_to_anchor])
            self._token_count += bytes_to_anchor // _TOKEN_BYTES
            self._restart(self._hash.digest()[:KEY_BYTES])
            words = words[bytes_to_anchor:]
        self._hash.update(words)
        self._token_count += len(words) // _TOKEN_BYTES

    def _bytes_to_anchor(self) -> int:
        return _ANCHOR_BYTES - self._token_count % ANCHOR_TOKENS * _TOKEN_BYTES

    def _restart(self, key: bytes) -> None:
        """Go on from the anchor here, after `token_count` tokens that `key` names."""
        self._anchor_key = key
        self._hash = self._seeds.restart.copy()
        self._hash.update(_ANCHOR_RECORD.pack(self._token_count, key))


def _as_items(items: object) -> tuple[Item, ...]:
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | range):
        raise ValueError(f"items is {reprlib.repr(items)}; it must be a sequence of Item")  # noqa: TRY004
    found = tuple(items)
    for index, item in enumerate(found):
        if type(item) is not Item:
            raise ValueError(f"items[{index}] is {reprlib.repr(item)}; it must be an Item")
    return found


class _Seeds(NamedTuple):
    """Hashes that have absorbed all that comes before the first word; only ever copied."""

    start: RunningHash
    restart: RunningHash


@lru_cache(maxsize=_SEEDS_KEPT)
def _prepare_seeds(namespace: Namespace, algorithm: str) -> _Seeds:
    seeds = _Seeds(start=ALGORITHMS[algorithm](), restart=ALGORITHMS[algorithm]())
    encoded = frame(namespace.encode())
    seeds.start.update(_padded(frame(START_DOMAIN) + encoded))
    seeds.restart.update(_padded(frame(RESTART_DOMAIN) + encoded))
    return seeds


def _padded(record: bytes) -> bytes:
    return record + bytes(-len(record) % _ALIGNMENT)


def as_token_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """The tokens as an array of uint32, each of them checked; copied only where it must be.

    Raises:
        ValueError: something among them is no token.
    """
    return np.frombuffer(_to_words(tokens), dtype="<u4")


def _to_words(tokens: Tokens) -> memoryview:
    """The bytes of the tokens as little-endian uint32, each of them checked."""
    if isinstance(tokens, memoryview) and tokens.format == "B":
        tokens = tokens.tobytes()
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % _TOKEN_BYTES:
            raise ValueError(f"tokens are {len(tokens)} bytes; a token takes {_TOKEN_BYTES}")
        return _array_to_words(np.frombuffer(tokens, dtype="<u4"))
    if isinstance(tokens, (np.ndarray, array, memoryview)):
        return _array_to_words(np.asarray(tokens))
    if isinstance(tokens, Sequence):
        return _sequence_to_words(tokens)
    if hasattr(tokens, "__array__"):
        return _array_to_words(_tensor_to_array(tokens))
    raise ValueError(
        "tokens must be a sequence of ints, an integer array or bytes of little-endian uint32; "
        f"got {type(tokens).__name__}"
    )


def _tensor_to_array(tokens: HasArray) -> npt.NDArray[Any]:
    try:
        return np.asarray(tokens)
    except (TypeError, RuntimeError) as problem:
        # Torch says so of tensors on a device, and of types that NumPy does not have.
        raise ValueError(
            f"tokens are a {type(tokens).__name__} that cannot be read as an array ({problem}); "
            "they must lie in host memory, as integers of 4 or 8 bytes"
        ) from None


def _sequence_to_words(tokens: Sequence[int]) -> memoryview:
    try:
        too_many = len(tokens) > _TOKENS_MAX
    except OverflowError:  # A range may be longer than a length can say.
        too_many = True
    if too_many:
        raise ValueError(f"tokens are more than {_TOKENS_MAX}, which is the most that can be taken")
    try:
        # Three times as fast as NumPy's conversion, and refuses all that is no uint32.
        words = array("I", tokens)
    except (TypeError, OverflowError, RuntimeError):
        _refuse_first_bad(tokens)
    return _array_to_words(np.asarray(words))


def _array_to_words(tokens: npt.NDArray[Any]) -> memoryview:
    kind = tokens.dtype.kind
    if kind not in "iu" or tokens.itemsize not in (4, 8) or tokens.ndim != 1:
        raise ValueError(
            "an array of tokens must have one dimension and integers of 4 or 8 bytes; "
            f"got {tokens.ndim} dimensions of {tokens.dtype}"
        )
    if tokens.size and (tokens.max() >= RESERVED_TOKEN or (kind == "i" and tokens.min() < 0)):
        _refuse_first_bad(tokens.tolist())
    # All are known to fit, so int32 and uint32 hold the same bits and need no copy.
    words = tokens if tokens.dtype in _WORD_TYPES else tokens.astype("<u4")
    return np.ascontiguousarray(words).view(np.uint8).data


def _refuse_first_bad(tokens: Sequence[int]) -> NoReturn:
    """Say which token is wrong: the fast checks only find that there is one."""
    for index, token in enumerate(tokens):
        if not _is_token(token):
            raise ValueError(
                f"tokens[{index}] is {reprlib.repr(token)}; a token is an int from 0 to "
                f"{RESERVED_TOKEN - 1}"
            )
    raise ValueError(f"tokens must be a sequence of ints; got {type(tokens).__name__}")


def _is_token(token: object) -> bool:
    try:
        return 0 <= operator.index(token) < RESERVED_TOKEN  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return False


def _require_algorithm(algorithm: object) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; it must be one of {', '.join(ALGORITHMS)}")


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be an int from {low} to {high}")


def _require_ascii(name: str, value: object, high: int) -> None:
    if not isinstance(value, str) or not value.isascii() or not 1 <= len(value) <= high:
        raise ValueError(f"{name} is {value!r}; it must be 1 to {high} ASCII characters")


def _require_bytes(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, bytes) or not low <= len(value) <= high:
        allowed = f"{low}" if low == high else f"{low} to {high}"
        raise ValueError(f"{name} is {value!r}; it must be {allowed} bytes")
