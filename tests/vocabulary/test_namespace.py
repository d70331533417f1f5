from __future__ import annotations

import dataclasses
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.vocabulary.keys import FIELD_BYTES_MAX, KeyChain, Namespace

VECTORS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("key_vectors.json").read_text(encoding="utf-8")
)["namespaces"]
FIELD_NAMES = (
    "model",
    "weights_version",
    "kv_dtype",
    "kv_scales",
    "rotary",
    "kv_group",
    "adapter",
    "tenant",
)

field_values = st.text(max_size=12)
namespaces = st.builds(
    Namespace,
    model=st.text(min_size=1, max_size=12),
    **dict.fromkeys(FIELD_NAMES[1:], field_values),
)


def decode(encoded: bytes) -> dict[str, str]:
    """Read an encoding back, from the specification alone."""
    rest = encoded

    def take(count: int) -> bytes:
        nonlocal rest
        assert len(rest) >= count
        taken, rest = rest[:count], rest[count:]
        return taken

    def take_frame() -> bytes:
        return take(struct.unpack("<I", take(4))[0])

    assert take_frame() == b"penstock.namespace.v1"
    (field_count,) = struct.unpack("<I", take(4))
    decoded = {take_frame().decode(): take_frame().decode() for _ in range(field_count)}
    assert rest == b""
    return decoded


def keys_in(namespace: Namespace, *, algorithm: str = "sha256") -> set[bytes]:
    """Enough keys to pass two anchors."""
    chain = KeyChain(namespace, block_tokens=16, algorithm=algorithm)
    return set(chain.extend(range(2080)))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_namespaces_encode_as_the_vectors_say(vector: dict[str, Any]) -> None:
    namespace = Namespace(**vector["fields"])

    assert namespace.encode().hex() == vector["encoding"]
    assert decode(bytes.fromhex(vector["encoding"])) == vector["fields"]


@given(namespaces)
def test_an_encoding_reads_back_as_the_namespace_it_came_from(namespace: Namespace) -> None:
    decoded = decode(namespace.encode())

    assert decoded == dataclasses.asdict(namespace)
    assert tuple(decoded) == FIELD_NAMES


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
@pytest.mark.parametrize("name", FIELD_NAMES)
def test_namespaces_that_differ_in_one_field_never_share_a_key(name: str, algorithm: str) -> None:
    namespace = Namespace(model="m")

    changed = dataclasses.replace(namespace, **{name: "another"})

    assert changed.encode() != namespace.encode()
    assert not keys_in(changed, algorithm=algorithm) & keys_in(namespace, algorithm=algorithm)


@pytest.mark.parametrize(("left", "right"), list(pairwise(FIELD_NAMES)))
def test_characters_cannot_move_from_one_field_to_the_next(left: str, right: str) -> None:
    base = Namespace(model="m")

    together = dataclasses.replace(base, **{left: "abc", right: "d"})
    apart = dataclasses.replace(base, **{left: "ab", right: "cd"})

    assert together.encode() != apart.encode()
    assert not keys_in(together) & keys_in(apart)


@given(namespaces, namespaces)
def test_two_namespaces_share_their_keys_only_if_they_are_equal(
    one: Namespace, other: Namespace
) -> None:
    shared = keys_in(one) & keys_in(other)

    assert bool(shared) == (one == other)


def test_an_anchor_brought_into_another_namespace_reaches_no_key_of_either() -> None:
    other = Namespace(model="m", tenant="other")
    mine = KeyChain(Namespace(model="m"), block_tokens=16)
    mine.extend(range(1024))
    assert mine.anchor is not None

    crossed = KeyChain.from_anchor(other, mine.anchor, block_tokens=16).extend(range(1024, 2080))

    assert not set(crossed) & keys_in(other)
    assert not set(crossed) & keys_in(mine.namespace)


def test_a_value_that_looks_like_framing_stays_a_value() -> None:
    inner = Namespace(model="m", adapter="a", tenant="t").encode()[-40:].decode()

    namespace = Namespace(model="m", tenant=inner)

    assert decode(namespace.encode())["tenant"] == inner


def test_letters_that_look_alike_are_different_fields() -> None:
    composed = Namespace(model="m", tenant="caf\u00e9")
    decomposed = Namespace(model="m", tenant="cafe\u0301")

    assert composed.encode() != decomposed.encode()


@pytest.mark.parametrize("name", FIELD_NAMES)
@pytest.mark.parametrize("value", [None, 1, b"bytes", ["list"], True])
def test_a_field_that_is_no_str_is_refused_by_name(name: str, value: object) -> None:
    fields: dict[str, object] = {"model": "m", name: value}

    with pytest.raises(ValueError, match=rf"namespace field {name} is .*must be a str"):
        Namespace(**fields)  # type: ignore[arg-type]


def test_the_length_of_a_field_is_bounded_in_bytes() -> None:
    longest = "é" * (FIELD_BYTES_MAX // 2)

    assert Namespace(model="m", tenant=longest).tenant == longest
    with pytest.raises(ValueError, match=r"tenant is 4097 bytes long; at most 4096"):
        Namespace(model="m", tenant=longest + "x")


def test_text_without_utf8_is_refused() -> None:
    with pytest.raises(ValueError, match="namespace field adapter has no UTF-8 encoding"):
        Namespace(model="m", adapter="\ud800")


def test_a_namespace_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model is empty"):
        Namespace(model="")


def test_a_namespace_cannot_be_changed() -> None:
    namespace = Namespace(model="m")

    with pytest.raises(dataclasses.FrozenInstanceError):
        namespace.tenant = "other"  # type: ignore[misc]
