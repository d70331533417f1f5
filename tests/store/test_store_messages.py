"""Messages of the store: what is written is read again, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.operations import BlockFault
from penstock.errors import ConfigError, PeerError
from penstock.store.base import TierState
from penstock.store.process.messages import (
    BATCH_BYTES,
    BLOCKS_MAX,
    FRAME_BYTES_MAX,
    PAGE_KEYS_MAX,
    ArenaOffered,
    FindAnswer,
    GoneNotice,
    JobReport,
    LoadRequest,
    OwnerHello,
    OwnerWaiting,
    PageAnswer,
    SaveRequest,
    StoreConfig,
    StorePing,
    StoreState,
    StoreTierConfig,
    VoidRequest,
    VoidSeen,
    answer_bytes,
    answer_frames,
    answers,
    join_parents,
    join_slots,
    requests,
    split_keys,
    split_parents,
    split_slots,
)
from penstock.vocabulary.frames import TEXT_MAX, short
from penstock.vocabulary.keys import KEY_BYTES

U64 = (1 << 64) - 1
LARGEST_STATE = TierState(
    on=True,
    why="🦭" * TEXT_MAX,
    blocks=U64,
    block_bytes=U64,
    capacity_bytes=U64,
    saves_dropped=U64,
    blocks_corrupt=U64,
    blocks_reclaimed=U64,
    generations_lost=U64,
)
KEYS = [bytes([number + 1]) * KEY_BYTES for number in range(5)]
TIER = StoreTierConfig(
    name="disk", kind="disk", size_bytes=1 << 30, options={"path": "/var/cache/x"}
)


def test_requests_are_read_as_they_were_written() -> None:
    batch = [
        ArenaOffered("memfd 1:2", 5, b"form", bytes(16)),
        OwnerHello(U64, bytes(16), ["memfd 1:2"], ["disk"], terms=["0f"]),
        SaveRequest(1, 0, b"".join(KEYS), join_parents([None, *KEYS[:4]], 5), b"", U64, 1.5),
        LoadRequest(2, 15, b"".join(KEYS), b"", 0, 0.0),
        VoidSeen(1, 7),
        VoidRequest(0, bytes(16)),
        StorePing(),
    ]

    assert requests.decode(requests.encode(batch)) == batch


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_as_such(garbage: bytes) -> None:
    for frames in (requests, answers):
        try:
            frames.decode(garbage)
        except PeerError:
            continue
        assert garbage[:2] in {b"PQ", b"PA"}


def test_keys_parents_and_slots_travel_as_bytes() -> None:
    parents = [None, *KEYS[:4]]
    slots = np.array([3, 1, 2, 0, 2**31 - 1], dtype=np.int32)

    assert split_keys(b"".join(KEYS)) == KEYS
    assert split_parents(join_parents(parents, 5), 5) == parents
    assert split_parents(join_parents((), 3), 3) == [None] * 3
    assert split_slots(join_slots(slots), 5) == slots.tolist()


@pytest.mark.parametrize("count", [0, 4, 6])
def test_slots_and_parents_must_be_as_many_as_keys(count: int) -> None:
    with pytest.raises(PeerError, match="must have"):
        split_slots(bytes(20), count)
    with pytest.raises(PeerError, match="must have"):
        split_parents(bytes(5 * KEY_BYTES), count)


def test_answers_are_split_into_frames_that_fit() -> None:
    faults = [(2**32, BlockFault.UNREADABLE)] * BLOCKS_MAX
    largest = [
        JobReport(U64, 2**32, faults, "é" * TEXT_MAX),
        PageAnswer(15, bytes(PAGE_KEYS_MAX * KEY_BYTES), bytes(PAGE_KEYS_MAX * KEY_BYTES), U64),
        GoneNotice(15, bytes(PAGE_KEYS_MAX * KEY_BYTES)),
        FindAnswer(U64, bytes(BLOCKS_MAX)),
        OwnerWaiting("🦭" * TEXT_MAX),
        StoreState(15, LARGEST_STATE),
    ]

    frames = list(answer_frames(largest * 20))

    assert [answer for frame in frames for answer in answers.decode(frame)] == largest * 20
    assert BATCH_BYTES / 2 < max(map(len, frames)) <= FRAME_BYTES_MAX
    for answer in largest:
        assert len(answers.encode([answer])) <= answer_bytes(answer)


def test_the_largest_job_fits_behind_a_batch_that_is_nearly_full() -> None:
    keys, slots = bytes(BLOCKS_MAX * KEY_BYTES), bytes(BLOCKS_MAX * 4)
    largest = SaveRequest(U64, 15, keys, keys, slots, U64, 1e300)

    assert len(requests.encode([largest])) + BATCH_BYTES <= FRAME_BYTES_MAX


def test_texts_are_cut_to_what_may_travel() -> None:
    assert short("x" * 5000) == "x" * TEXT_MAX
    assert short("\ud800") == "?"


def test_a_configuration_is_read_as_it_was_written() -> None:
    config = StoreConfig(socket="/run/x", tiers=(TIER,))

    assert StoreConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "socket"),
        ("no json", "store: cannot be read"),
        ('{"socket": "x", "tiers": []}', "socket: is 'x', must be an absolute path"),
        ('{"socket": "/x", "tiers": []}', "tiers: are 0, must be 1 to 16"),
        ('{"socket": "/x", "tiers": [], "more": 1}', "more"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        StoreConfig.from_json(text)


def test_tiers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="must have different ones"):
        StoreConfig(socket="/x", tiers=(TIER, TIER))
