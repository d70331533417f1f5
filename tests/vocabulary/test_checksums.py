"""Cell checksums, held against vectors, a second implementation, and all they must find.

The `reference_` functions are written from `docs/checksums.md` alone: plain Python integers,
one word at a time, from the last to the first.
"""

from __future__ import annotations

import json
import struct
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.cell_sums import CellSums, add_sums, cell_seed, cell_sum
from penstock.vocabulary.checksums import (
    Algorithm,
    cell_seeds,
    key_seed,
    key_seeds,
    life_salt,
    place_number,
)
from penstock.vocabulary.planes import PlaneRole

VECTORS: dict[str, Any] = json.loads(
    Path(__file__).with_name("checksum_vectors.json").read_text(encoding="utf-8")
)
KEY = bytes(range(16))
OTHER_KEY = bytes(range(1, 17))
SEED = cell_seed(KEY, layer=3, plane=1, head=5)
BOTH = pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)


def reference_salt(incarnation: int, epoch: int) -> int:
    name = struct.pack("<I", 16) + struct.pack("<QQ", incarnation, epoch)
    return xxhash.xxh3_64(struct.pack("<I", 16) + b"penstock.life.v1" + name, seed=0).intdigest()


def reference_seed(key: bytes, layer: int, plane: int, head: int, salt: int = 0) -> int:
    place = layer * 2**40 + plane * 2**32 + head
    domain = struct.pack("<I", 16) + b"penstock.cell.v1"
    key_part = xxhash.xxh3_64(domain + struct.pack("<I", len(key)) + key, seed=0).intdigest()
    x = ((key_part ^ salt) + place * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x // 2**27) * 0x94D049BB133111EB % 2**64
    return x ^ x // 2**31


def reference_terms(word: int, position: int, seed: int) -> tuple[int, int]:
    x = word ^ (position * 0x9E3779B1 + seed) % 2**32
    x = (x ^ x // 2**11) * 0x7FEB352D % 2**32
    x = (x ^ x // 2**15) * 0x846CA68B % 2**32
    first = x ^ x // 2**15
    y = (first ^ (position * 0x85EBCA77 + seed // 2**32) % 2**32) * 0xC2B2AE3D % 2**32
    return first, y ^ y // 2**16


def reference_sum(data: bytes, seed: int, algorithm: Algorithm) -> int:
    if algorithm is Algorithm.XXH3:
        return xxhash.xxh3_64(data, seed=seed).intdigest()
    words = [word for (word,) in struct.iter_unpack("<I", data + bytes(-len(data) % 4))]
    low, high = reference_terms(len(data), len(words), seed)
    for position in reversed(range(len(words))):
        first, second = reference_terms(words[position], position, seed)
        low, high = (low + first) % 2**32, (high + second) % 2**32
    return low + high * 2**32


@pytest.mark.parametrize("vector", VECTORS["seeds"])
def test_seeds_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    key = bytes.fromhex(vector["key"])
    place = {name: vector[name] for name in ("layer", "plane", "head")}

    assert f"{cell_seed(key, **place):016x}" == vector["seed"]
    assert f"{reference_seed(key, **place):016x}" == vector["seed"]


@pytest.mark.parametrize("vector", VECTORS["lives"])
def test_seeds_of_a_life_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    key, life = bytes.fromhex(vector["key"]), (int(vector["incarnation"], 16), vector["epoch"])
    place = {name: vector[name] for name in ("layer", "plane", "head")}
    salt = life_salt(*life)
    places = np.array([place_number(**place)], dtype=np.uint64)

    assert f"{salt:016x}" == vector["salt"] == f"{reference_salt(*life):016x}"
    assert f"{int(cell_seeds([key], places, salt)[0, 0]):016x}" == vector["seed"]
    assert f"{reference_seed(key, **place, salt=salt):016x}" == vector["seed"]


def test_every_reset_and_every_start_has_a_salt_of_its_own() -> None:
    lives = [(incarnation, epoch) for incarnation in range(1, 9) for epoch in range(8)]

    assert len({0, *(life_salt(*life) for life in lives)}) == len(lives) + 1


@pytest.mark.parametrize("vector", VECTORS["segments"])
def test_sums_of_segments_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"]) * vector["times"]
    seed = int(vector["seed"], 16)

    for algorithm in Algorithm:
        assert f"{cell_sum(data, seed, algorithm):016x}" == vector[algorithm.value]
        assert f"{reference_sum(data, seed, algorithm):016x}" == vector[algorithm.value]


@BOTH
@given(
    data=st.binary(max_size=70),
    seed=st.integers(0, 2**64 - 1),
)
def test_both_implementations_agree(data: bytes, seed: int, algorithm: Algorithm) -> None:
    assert cell_sum(data, seed, algorithm) == reference_sum(data, seed, algorithm)


@pytest.mark.parametrize("length", [262_144, 262_151, 524_289])
def test_a_segment_longer_than_a_chunk_is_summed_like_a_short_one(length: int) -> None:
    data = (np.arange(length) * 31 % 253).astype(np.uint8).tobytes()

    assert cell_sum(data, SEED, Algorithm.MIX64) == reference_sum(data, SEED, Algorithm.MIX64)


@BOTH
def test_every_flipped_bit_is_found(algorithm: Algorithm) -> None:
    data = bytearray(n * 37 % 256 for n in range(67))
    right = cell_sum(data, SEED, algorithm)

    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert cell_sum(data, SEED, algorithm) != right
        data[bit // 8] ^= 1 << bit % 8


@BOTH
@given(
    data=st.binary(min_size=1, max_size=200),
    seed=st.integers(0, 2**64 - 1),
    choice=st.data(),
)
def test_a_flipped_bit_is_found_in_any_data_under_any_seed(
    data: bytes, seed: int, choice: st.DataObject, algorithm: Algorithm
) -> None:
    bit = choice.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8

    assert cell_sum(flipped, seed, algorithm) != cell_sum(data, seed, algorithm)


def linear_sum(data: bytes | bytearray) -> int:
    """What mix64 must not be: words times odd numbers, modulo 2³²."""
    return (
        sum(
            int.from_bytes(data[position : position + 4], "little") * (position // 2 + 1)
            for position in range(0, len(data), 4)
        )
        % 2**32
    )


@BOTH
@pytest.mark.parametrize("filling", [b"\0", b"\x7f", b"\x3f\x80\xbf\x11"])
def test_two_flipped_top_bits_do_not_cancel(filling: bytes, algorithm: Algorithm) -> None:
    data = filling * (128 // len(filling))
    right = cell_sum(data, SEED, algorithm)

    # The top bit of any two bytes: signs of 8-bit numbers, and among them all of wider ones.
    for one, other in combinations(range(len(data)), 2):
        flipped = bytearray(data)
        flipped[one] ^= 0x80
        flipped[other] ^= 0x80

        assert cell_sum(flipped, SEED, algorithm) != right
        if one % 4 == other % 4 == 3:
            assert linear_sum(flipped) == linear_sum(data)


def test_both_halves_of_a_sum_notice_flipped_signs() -> None:
    random = np.random.default_rng(1)
    words = random.integers(0, 2**32, 20_000, dtype=np.uint32)

    for pattern in (0x8000_0000, 0x8000_8000, 0x8080_8080):
        steps = {
            tuple(
                (after - before) % 2**32
                for before, after in zip(
                    reference_terms(word, position, SEED),
                    reference_terms(word ^ pattern, position, SEED),
                    strict=True,
                )
            )
            for position, word in enumerate(words.tolist())
        }

        # If few differences were possible, two of them would cancel often.
        assert len({low for low, _ in steps}) > 19_500
        assert len({high for _, high in steps}) > 19_500


@BOTH
def test_words_and_bytes_that_change_places_are_found(algorithm: Algorithm) -> None:
    data = bytes(range(48))
    right = cell_sum(data, SEED, algorithm)

    for one, other in combinations(range(48), 2):
        moved = bytearray(data)
        moved[one], moved[other] = moved[other], moved[one]
        assert cell_sum(moved, SEED, algorithm) != right
    for words in range(4, 48, 4):
        assert cell_sum(data[words:] + data[:words], SEED, algorithm) != right


@BOTH
@pytest.mark.parametrize("length", [1, 4, 64, 65, 256, 4096])
def test_a_zero_tail_and_a_missing_tail_are_found(length: int, algorithm: Algorithm) -> None:
    data = bytes(1 + n % 255 for n in range(length))
    right = cell_sum(data, SEED, algorithm)

    for lost in {1, 2, 3, 4, 8, length} & set(range(1, length + 1)):
        assert cell_sum(data[:-lost] + bytes(lost), SEED, algorithm) != right
        assert cell_sum(data[:-lost], SEED, algorithm) != right
        assert cell_sum(data + bytes(lost), SEED, algorithm) != right


@BOTH
def test_zeros_have_a_sum_that_depends_on_key_place_and_length(algorithm: Algorithm) -> None:
    seeds = [
        cell_seed(key, layer=layer, plane=plane, head=head)
        for key in (KEY, OTHER_KEY)
        for layer in range(2)
        for plane in range(2)
        for head in range(2)
    ]

    sums = [cell_sum(bytes(length), seed, algorithm) for seed in seeds for length in range(300)]

    assert len(set(sums)) == len(sums)
    assert 0 not in sums


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"layer": 1 << 24, "plane": 0, "head": 0}, "layer is 16777216, must be from 0"),
        ({"layer": 0, "plane": 256, "head": 0}, "plane is 256"),
        ({"layer": 0, "plane": 0, "head": -1}, "head is -1"),
    ],
)
def test_a_place_that_no_seed_can_name_is_refused(place: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cell_seed(KEY, **place)


def test_the_numbers_of_roles_stay_what_they_were() -> None:
    assert {role.label: int(role) for role in PlaneRole} == VECTORS["roles"]


def test_sums_are_added_by_halves_without_a_carry() -> None:
    assert add_sums([0xFFFF_FFFF_FFFF_FFFF, 0x0000_0001_0000_0002]) == 1


def test_a_table_is_read_back_as_it_was_written() -> None:
    table = CellSums.of(np.array([1, 2**64 - 1, 3], dtype=np.uint64))

    raw = table.to_bytes()

    assert raw[:8] == b"\1" + bytes(7)
    assert CellSums.from_bytes(raw, cell_count=3) == table
    assert table.part(1, 2).values.tolist() == [2**64 - 1, 3]


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="raw has 16 bytes, 3 cells need 24"):
        CellSums.from_bytes(bytes(16), cell_count=3)
    with pytest.raises(ValueError, match="raw has 9 bytes, must be a positive multiple of 8"):
        CellSums(bytes(9))
    with pytest.raises(ValueError, match="cells 2 to 3 must be within 3"):
        CellSums(bytes(24)).part(2, 2)


def test_the_seeds_of_many_keys_are_those_of_each() -> None:
    keys = [bytes([number]) * 16 for number in range(20)]

    assert key_seeds(keys) == [key_seed(key) for key in keys]
    assert key_seeds(keys, 5) == [key_seed(key) ^ 5 for key in keys]
    assert key_seeds([]) == []
