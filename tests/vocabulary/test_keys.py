"""Block keys, held against vectors and against a second implementation.

`reference_keys` is written from `docs/keys.md` alone: it takes only the fields of `Item` from the
package, builds the whole input of every key anew, and hashes it in one go.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.vocabulary.keys import Anchor, Item, KeyChain, Namespace

VECTORS: dict[str, Any] = json.loads(
    Path(__file__).with_name("key_vectors.json").read_text(encoding="utf-8")
)
NAMESPACES = {vector["name"]: vector["fields"] for vector in VECTORS["namespaces"]}
NAMESPACE = Namespace(model="m")
RESERVED = 2**32 - 1
ANCHOR = Anchor(token_count=1024, key=bytes(16), algorithm="xxh3_128")
IMAGE_DIGEST = hashlib.sha256(b"image").digest()


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def framed(content: bytes) -> bytes:
    return u32(len(content)) + content


def padded(content: bytes) -> bytes:
    while len(content) % 64:
        content += b"\0"
    return content


def reference_hash(algorithm: str, content: bytes) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(content).digest()[:16]
    return xxhash.xxh3_128(content, seed=0).intdigest().to_bytes(16, "big")


def reference_namespace(fields: dict[str, str]) -> bytes:
    encoded = framed(b"penstock.namespace.v1") + u32(len(fields))
    for name, value in fields.items():
        encoded += framed(name.encode()) + framed(value.encode())
    return encoded


def reference_words(tokens: list[int], items: list[Item], first: int, end: int) -> bytes:
    words = b""
    for position in range(first, end):
        for item in items:
            if item.position == position:
                record = u32(RESERVED) + framed(item.kind.encode()) + framed(item.digest)
                words += padded(record + u64(item.length))
        words += u32(tokens[position])
    return words


def reference_keys(
    fields: dict[str, str],
    tokens: list[int],
    items: list[Item],
    block_tokens: int,
    algorithm: str,
) -> list[bytes]:
    return [
        reference_key(fields, tokens, items, end, algorithm)
        for end in range(block_tokens, len(tokens) + 1, block_tokens)
    ]


def reference_key(
    fields: dict[str, str], tokens: list[int], items: list[Item], end: int, algorithm: str
) -> bytes:
    """The key of the first `end` tokens, whatever the block size."""
    encoded = framed(reference_namespace(fields))
    content = padded(framed(b"penstock.keys.v1.start") + encoded)
    anchor = 0
    while end - anchor > 1024:
        content += reference_words(tokens, items, anchor, anchor + 1024)
        key = reference_hash(algorithm, content)
        anchor += 1024
        content = padded(framed(b"penstock.keys.v1.restart") + encoded)
        content += u64(anchor) + key + bytes(40)
    return reference_hash(algorithm, content + reference_words(tokens, items, anchor, end))


def vector_tokens(vector: dict[str, Any]) -> list[int]:
    rule = vector["tokens"]
    return [(rule["first"] + i * rule["step"]) % rule["modulus"] for i in range(rule["count"])]


def vector_items(vector: dict[str, Any]) -> list[Item]:
    return [
        Item(**{**fields, "digest": bytes.fromhex(fields["digest"])}) for fields in vector["items"]
    ]


each_algorithm = pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])


def image(position: int, *, length: int = 4, digest: bytes = IMAGE_DIGEST) -> Item:
    return Item(position=position, kind="image", digest=digest, length=length)


def keys_of(tokens: Any, *, items: Any = (), block_tokens: int = 4) -> list[bytes]:
    return KeyChain(NAMESPACE, block_tokens=block_tokens).extend(tokens, items)


def state_of(chain: KeyChain) -> tuple[object, ...]:
    """All that can be seen of a chain, and what it will make of the tokens to come."""
    future = chain.fork().extend(range(1024 + chain.block_tokens))
    return list(chain.keys), chain.token_count, chain.block_count, chain.anchor, future


# Vectors and the second implementation


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["name"])
def test_the_vectors_hold_in_both_implementations(vector: dict[str, Any]) -> None:
    fields = NAMESPACES[vector["namespace"]]
    block_tokens, algorithm = vector["block_tokens"], vector["algorithm"]
    tokens, items = vector_tokens(vector), vector_items(vector)

    chain = KeyChain(Namespace(**fields), block_tokens=block_tokens, algorithm=algorithm)
    keys = chain.extend(tokens, items)

    assert len(keys) == vector["block_count"]
    assert {block: keys[int(block) - 1].hex() for block in vector["keys"]} == vector["keys"]
    assert reference_keys(fields, tokens, items, block_tokens, algorithm) == keys


a_token = st.integers(0, RESERVED - 1)
an_item = st.builds(
    Item,
    position=st.integers(0, 150),
    kind=st.sampled_from(["image", "audio", "x" * 64]),
    digest=st.binary(min_size=16, max_size=64),
    length=st.integers(0, 2**32 - 1),
)


@given(
    tokens=st.integers(0, 150).flatmap(
        lambda count: st.lists(a_token, min_size=count, max_size=count)
    ),
    drawn_items=st.lists(an_item, max_size=4),
    cuts=st.lists(st.integers(0, 150), max_size=5),
    block_tokens=st.sampled_from([1, 2, 3, 5]),
    algorithm=st.sampled_from(["sha256", "xxh3_128"]),
)
def test_a_chain_extended_in_any_pieces_agrees_with_the_second_implementation(
    tokens: list[int],
    drawn_items: list[Item],
    cuts: list[int],
    block_tokens: int,
    algorithm: str,
) -> None:
    items = sorted(
        (item for item in drawn_items if item.position < len(tokens)), key=lambda i: i.position
    )
    chain = KeyChain(NAMESPACE, block_tokens=block_tokens, algorithm=algorithm)

    returned: list[bytes] = []
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for first, end in pairwise(bounds):
        within = [item for item in items if first <= item.position < end]
        returned += chain.extend(tokens[first:end], within)

    fields = dataclasses.asdict(NAMESPACE)
    assert returned == reference_keys(fields, tokens, items, block_tokens, algorithm)
    assert chain.keys == returned
    assert chain.token_count == len(tokens)
    assert chain.block_count == len(tokens) // block_tokens


# What is equal


@each_algorithm
def test_sequences_share_the_keys_of_their_common_beginning(algorithm: str) -> None:
    short = KeyChain(NAMESPACE, block_tokens=16, algorithm=algorithm)
    long = KeyChain(NAMESPACE, block_tokens=16, algorithm=algorithm)

    short.extend([*range(100), 7])
    long.extend(range(3000))

    assert short.keys == long.keys[:6]
    assert all(len(key) == 16 for key in long.keys)


def test_no_two_blocks_of_a_sequence_share_a_key_whatever_the_algorithm() -> None:
    fast = KeyChain(NAMESPACE, block_tokens=4, algorithm="xxh3_128")

    keys = keys_of([0] * 4096) + fast.extend([0] * 4096)

    assert len(set(keys)) == 2048


def test_all_ways_to_pass_tokens_give_the_same_keys() -> None:
    tokens = [0, 1, 127_999, 2**31 - 1] * 100
    little = np.array(tokens, dtype="<u4")
    expected = keys_of(tokens)

    ways: list[Any] = [
        tuple(tokens),
        [np.int64(token) for token in tokens],
        *(array(code, tokens) for code in "IiqQ"),
        memoryview(array("i", tokens)),
        *(np.array(tokens, dtype=dtype) for dtype in ("<i4", "<u4", ">i4", "i8", "u8")),
        np.repeat(np.array(tokens, dtype=np.int32), 2)[::2],
        little.tobytes(),
        bytearray(little.tobytes()),
        memoryview(little.tobytes()),
    ]

    for way in ways:
        assert keys_of(way) == expected


@given(
    seed=st.integers(0, 2**32 - 1),
    token_count=st.integers(0, 9000),
    drawn_items=st.lists(
        st.builds(image, st.one_of(st.integers(0, 9000), st.sampled_from([1023, 1024, 2048]))),
        max_size=4,
    ),
    one=st.one_of(st.integers(1, 3000), st.sampled_from([16, 48, 64, 1024, 2048])),
    other=st.one_of(st.integers(1, 3000), st.sampled_from([16, 48, 64, 1024, 2048])),
    cut=st.integers(0, 9000),
)
def test_block_sizes_share_their_keys_wherever_their_boundaries_meet(
    seed: int, token_count: int, drawn_items: list[Item], one: int, other: int, cut: int
) -> None:
    tokens = np.random.default_rng(seed).integers(0, 128_000, token_count, dtype=np.int32)
    items = sorted((i for i in drawn_items if i.position < token_count), key=lambda i: i.position)
    by_other = KeyChain(NAMESPACE, block_tokens=other)

    by_one = keys_of(tokens, items=items, block_tokens=one)
    by_other.extend(tokens[:cut], [item for item in items if item.position < cut])
    by_other.extend(tokens[cut:], [item for item in items if item.position >= cut])

    ends_one = {one * (block + 1): key for block, key in enumerate(by_one)}
    ends_other = {other * (block + 1): key for block, key in enumerate(by_other.keys)}
    assert len(ends_one) == token_count // one
    assert len(ends_other) == token_count // other
    for end in ends_one.keys() & ends_other.keys():
        assert ends_one[end] == ends_other[end]
    assert not {k for e, k in ends_one.items() if e not in ends_other} & set(by_other.keys)


@pytest.mark.parametrize("block_tokens", [7, 48, 300, 1023, 1024, 1025, 2048, 5000])
@each_algorithm
def test_blocks_of_any_size_agree_with_the_second_implementation(
    block_tokens: int, algorithm: str
) -> None:
    tokens = list(range(10_100))
    items = [image(position) for position in (0, 1000, 1023, 1024, 1025, 4095, 4096, 8192)]

    keys = KeyChain(NAMESPACE, block_tokens=block_tokens, algorithm=algorithm).extend(tokens, items)

    fields = dataclasses.asdict(NAMESPACE)
    some = sorted({1, 2, len(keys) // 2, len(keys)})
    assert len(keys) == len(tokens) // block_tokens
    for block in some:
        expected = reference_key(fields, tokens, items, block * block_tokens, algorithm)
        assert keys[block - 1] == expected


def test_absorbing_nothing_changes_nothing() -> None:
    chain = KeyChain(NAMESPACE, block_tokens=4)
    chain.extend(range(6))
    before = state_of(chain)

    nothings: list[Any] = [[], b"", np.array([], dtype=np.int32)]
    for nothing in nothings:
        assert chain.extend(nothing) == []

    assert state_of(chain) == before


# Anchors and forks


@each_algorithm
@pytest.mark.parametrize("block_tokens", [4, 48, 1500])
@pytest.mark.parametrize("token_count", [1024, 1025, 1100, 2048, 2051, 4400])
def test_another_process_goes_on_from_an_anchor_without_the_tokens_before(
    token_count: int, block_tokens: int, algorithm: str
) -> None:
    whole = KeyChain(NAMESPACE, block_tokens=block_tokens, algorithm=algorithm)
    whole.extend(range(token_count))
    anchor = whole.anchor
    assert anchor is not None

    resumed = KeyChain.from_anchor(NAMESPACE, anchor, block_tokens=block_tokens)
    resumed.extend(range(anchor.token_count, token_count))
    whole.extend(range(4000), [image(token_count + 3)])
    resumed.extend(range(4000), [image(token_count + 3)])

    assert resumed.keys == whole.keys[anchor.token_count // block_tokens :]
    assert (resumed.token_count, resumed.block_count) == (whole.token_count, whole.block_count)
    assert resumed.anchor == whole.anchor


def test_an_anchor_of_one_block_size_serves_every_other() -> None:
    by_16 = KeyChain(NAMESPACE, block_tokens=16)
    by_16.extend(range(3000))
    assert by_16.anchor is not None

    by_48 = KeyChain.from_anchor(NAMESPACE, by_16.anchor, block_tokens=48)
    by_48.extend(range(2048, 6000))

    assert by_48.keys == keys_of(range(6000), block_tokens=48)[2048 // 48 :]


def test_there_is_an_anchor_every_1024_tokens_whether_or_not_a_block_ends_there() -> None:
    chain = KeyChain(NAMESPACE, block_tokens=48)
    by_token = keys_of(range(4096), block_tokens=1)

    anchors = []
    for token in range(2050):
        chain.extend([token])
        anchors.append(chain.anchor)

    assert anchors[:1023] == [None] * 1023
    assert anchors[1023:2047] == [Anchor(token_count=1024, key=by_token[1023])] * 1024
    assert anchors[2047:] == [Anchor(token_count=2048, key=by_token[2047])] * 3


def test_an_anchor_with_a_wrong_position_reaches_no_key() -> None:
    chain = KeyChain(NAMESPACE, block_tokens=4)
    chain.extend(range(1024))
    assert chain.anchor is not None
    misplaced = dataclasses.replace(chain.anchor, token_count=2048)

    resumed = KeyChain.from_anchor(NAMESPACE, misplaced, block_tokens=4)
    keys = resumed.extend(range(1024, 1100))

    assert not set(keys) & set(chain.extend(range(1024, 1100)))


def test_tokens_that_spell_an_anchor_are_not_an_anchor() -> None:
    chain = KeyChain(NAMESPACE, block_tokens=4)
    chain.extend(range(1024))
    spelled = (1024).to_bytes(8, "little") + chain.keys[-1] + bytes(40)

    after_anchor = chain.extend(range(4))
    after_spelling = keys_of(spelled + np.arange(4, dtype="<u4").tobytes())

    assert not set(after_anchor) & set(after_spelling)


@pytest.mark.parametrize("token_count", [0, 3, 4, 1023, 1024, 1100])
def test_a_fork_and_its_origin_do_not_touch_each_other(token_count: int) -> None:
    chain = KeyChain(NAMESPACE, block_tokens=4)
    chain.extend(range(token_count))

    twin = chain.fork()
    chain.extend([1] * 300)
    twin.extend([2] * 300)

    assert chain.keys == keys_of([*range(token_count), *[1] * 300])
    assert twin.keys == keys_of([*range(token_count), *[2] * 300])


def test_a_chain_from_an_anchor_and_its_fork_begin_there() -> None:
    chain = KeyChain.from_anchor(NAMESPACE, ANCHOR, block_tokens=4)

    assert (chain.anchor, chain.keys, chain.token_count) == (ANCHOR, [], 1024)
    assert state_of(chain.fork()) == state_of(chain)


# Items


def test_an_item_changes_the_keys_from_the_block_it_starts_in() -> None:
    plain = keys_of(range(20))

    with_image = keys_of(range(20), items=[image(9, length=6)])

    assert with_image[:2] == plain[:2]
    assert not set(with_image[2:]) & set(plain)


@pytest.mark.parametrize(
    "other",
    [
        image(4, digest=hashlib.sha256(b"another").digest()),
        image(4, length=5),
        image(5),
        Item(position=4, kind="audio", digest=IMAGE_DIGEST, length=4),
    ],
    ids=["digest", "length", "position", "kind"],
)
def test_items_that_differ_in_anything_share_no_key(other: Item) -> None:
    one = keys_of(range(8), items=[image(4)])

    assert not set(one[1:]) & set(keys_of(range(8), items=[other]))


def test_items_at_one_position_count_in_their_order() -> None:
    first, second = image(4), image(4, digest=bytes(32))

    in_order = keys_of(range(8), items=[first, second])

    assert in_order == keys_of(range(8), items=iter([first, second]))
    assert in_order[1] != keys_of(range(8), items=[second, first])[1]
    assert in_order[1] != keys_of(range(8), items=[first])[1]


@pytest.mark.parametrize("blocks_before", [1, 255, 256, 257])
def test_an_item_at_the_end_of_a_block_belongs_to_the_next(blocks_before: int) -> None:
    tokens = range(4 * blocks_before + 4)
    plain = keys_of(tokens)

    at_boundary = keys_of(tokens, items=[image(4 * blocks_before)])

    assert at_boundary[:-1] == plain[:-1]
    assert at_boundary[-1] != plain[-1]


def test_bytes_cannot_move_between_the_fields_of_an_item() -> None:
    one = Item(position=0, kind="ab", digest=b"c" * 17, length=1)
    other = Item(position=0, kind="abc", digest=b"c" * 16, length=1)

    assert keys_of(range(4), items=[one]) != keys_of(range(4), items=[other])


def test_no_tokens_can_stand_for_an_item() -> None:
    words = np.frombuffer(image(0).encode(), dtype="<u4")

    assert words[0] == RESERVED
    with pytest.raises(ValueError, match=r"tokens\[0\] is 4294967295"):
        keys_of(words)
    assert keys_of(range(4), items=[image(0)])[0] not in keys_of([*words[1:], *range(4)])


# What is refused, without a trace


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, -1], r"tokens\[2\] is -1; a token is an int from 0 to 4294967294"),
        ([RESERVED], r"tokens\[0\] is 4294967295"),
        ([2**32], r"tokens\[0\] is 4294967296"),
        ([1, 2**80], r"tokens\[1\] is 1208925819614629174706176"),
        ([1, 2.0], r"tokens\[1\] is 2.0"),
        ([1, "2"], r"tokens\[1\] is '2'"),
        ([1, None], r"tokens\[1\] is None"),
        ([[1, 2]], r"tokens\[0\] is \[1, 2\]"),
        ("12", r"tokens\[0\] is '1'"),
        (np.array([3, -1], dtype=np.int32), r"tokens\[1\] is -1"),
        (np.array([3, RESERVED], dtype=np.uint32), r"tokens\[1\] is 4294967295"),
        (np.array([3, 2**32]), r"tokens\[1\] is 4294967296"),
        (np.array([-(2**40)]), r"tokens\[0\] is -1099511627776"),
        (np.array([2**63], dtype=np.uint64), r"tokens\[0\] is 9223372036854775808"),
        (array("i", [-7]), r"tokens\[0\] is -7"),
        *(
            (np.array([1], dtype=dtype), rf"must have .* got 1 dimensions of {dtype}")
            for dtype in ("float64", "bool", "int16", "uint8", "object")
        ),
        (np.array([[1, 2]]), "2 dimensions of int64"),
        (np.array(1), "0 dimensions of int64"),
        (array("d", [1.0]), "1 dimensions of float64"),
        (memoryview(array("h", [1])), "1 dimensions of int16"),
        (b"\1\0\0\0\2", "tokens are 5 bytes; a token takes 4"),
        (b"\xff\xff\xff\xff", r"tokens\[0\] is 4294967295"),
        (iter([1, 2]), "must be a sequence of ints.*got list_iterator"),
        (7, "must be a sequence of ints.*got int"),
        (None, "must be a sequence of ints.*got NoneType"),
    ],
)
def test_unacceptable_tokens_are_refused_and_leave_the_chain_as_it_was(
    tokens: Any, message: str
) -> None:
    chain = KeyChain(NAMESPACE, block_tokens=2)
    chain.extend(range(131))
    before = state_of(chain)

    with pytest.raises(ValueError, match=message):
        chain.extend(tokens)

    assert state_of(chain) == before


@pytest.mark.parametrize(
    "items",
    [[image(4)], [image(16)], [image(12), image(11)], [image(11), image(40)], [image(9)]],
    ids=["long ago", "too late", "out of order", "one too late", "just before"],
)
def test_misplaced_items_are_refused_and_leave_the_chain_as_it_was(items: list[Item]) -> None:
    chain = KeyChain(NAMESPACE, block_tokens=4)
    chain.extend(range(10))
    before = state_of(chain)

    with pytest.raises(ValueError, match=r"items must be ordered by position and start within"):
        chain.extend(range(6), items)

    assert state_of(chain) == before


@pytest.mark.parametrize(
    "items", [5, None, "", b"xy", [None], ["x"], range(9), [image(10), 3], {"a": 1}]
)
def test_what_is_no_item_is_refused_and_leaves_the_chain_as_it_was(items: Any) -> None:
    chain = KeyChain(NAMESPACE, block_tokens=4)
    chain.extend(range(10))
    before = state_of(chain)

    with pytest.raises(ValueError, match=r"items(\[\d\])? is .*; it must be a"):
        chain.extend(range(6), items)

    assert state_of(chain) == before


def test_what_is_no_anchor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"anchor is None; it must be an Anchor"):
        KeyChain.from_anchor(NAMESPACE, None, block_tokens=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("right", "field", "values"),
    [
        (image(0), "position", (-1, True, 1.0)),
        (image(0), "kind", ("", "é", "x" * 65, b"image")),
        (image(0), "digest", (b"x" * 15, b"x" * 65, "x" * 32)),
        (image(0), "length", (-1, 2**32)),
        (ANCHOR, "token_count", (0, 1000, 1025, 2**57, 1024.0, True, None)),
        (ANCHOR, "key", (b"x" * 15, "x" * 16)),
        (ANCHOR, "algorithm", ("md5", None)),
    ],
)
def test_items_and_anchors_cannot_be_built_wrong(
    right: Item | Anchor, field: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{field} is .* it must be"):
            dataclasses.replace(right, **{field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"block_tokens": size}, r"block_tokens is .* it must be an int from 1 to 65536")
            for size in (0, -1, 65_537, 4.0, True, "4")
        ),
        ({"algorithm": "md5"}, "algorithm is 'md5'; it must be one of sha256, xxh3_128"),
        ({"namespace": "tenant"}, "namespace is 'tenant'; it must be a Namespace"),
        ({"namespace": {"model": "m"}}, r"namespace is .* it must be a Namespace"),
    ],
)
def test_a_chain_cannot_be_built_wrong(change: dict[str, Any], message: str) -> None:
    arguments = {"namespace": NAMESPACE, "block_tokens": 4, **change}

    with pytest.raises(ValueError, match=message):
        KeyChain(**arguments)
