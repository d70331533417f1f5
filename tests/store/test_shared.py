"""Blocks in a store that engines share: who cuts them in another way finds them all the same."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.lying_blobs import LyingBlobs
from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from lab.fixtures.shards import Shard
from lab.fixtures.store_tier_suite import WAIT_S, wait_for_news
from penstock.cache.operations import BlockFault
from penstock.store.clients.blobs import BlobStoreError
from penstock.store.shared.tier import SharedTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import DType
from tests.store.shared_engines import SLOT_COUNT, SPACE, Engine, draw_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store.base import TierState
    from penstock.store.clients.blobs import BlobOutcome, BlobWrite

    OpenTier = Callable[[], SharedTier]

HEADS = 4


def split(ranks: int, *, block_tokens: int = 16, dtype: DType = DType.BF16) -> list[Layout]:
    """The ranks of an engine that splits heads."""
    return [
        Layout.split(
            layers=range(3),
            heads=Shard(tensor_size=ranks, tensor_rank=rank).heads(HEADS),
            channels=8,
            dtype=dtype,
            block_tokens=block_tokens,
            block_count=SLOT_COUNT,
        )
        for rank in range(ranks)
    ]


def packed(ranks: int) -> list[Layout]:
    """The same heads with K and V of a layer in one array."""
    return [
        Layout.packed_kv(
            layers=range(3),
            heads=Shard(tensor_size=ranks, tensor_rank=rank).heads(HEADS),
            channels=8,
            dtype=DType.BF16,
            block_tokens=16,
            block_count=SLOT_COUNT,
        )
        for rank in range(ranks)
    ]


def latent(ranks: int) -> list[Layout]:
    """Latent attention: all ranks hold the same bytes."""
    layout = Layout.mla(
        layers=range(3),
        channels=24,
        dtype=DType.BF16,
        block_tokens=16,
        block_count=SLOT_COUNT,
    )
    return [layout] * ranks


def hybrid(ranks: int) -> list[Layout]:
    """Three KV groups: heads, fewer heads in packed arrays, and latents that all ranks hold."""
    size = {"block_tokens": 16, "block_count": SLOT_COUNT, "dtype": DType.BF16}
    return [
        Layout.join(
            Layout.split(layers=range(2), heads=shard.heads(HEADS), channels=8, **size),
            Layout.packed_kv(layers=range(2, 4), heads=shard.heads(2), channels=4, **size),
            Layout.mla(layers=range(4, 6), channels=24, **size),
        )
        for shard in (Shard(tensor_size=ranks, tensor_rank=rank) for rank in range(ranks))
    ]


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def open_tier(server: MemoryServer) -> Iterator[OpenTier]:
    made: list[SharedTier] = []

    def make() -> SharedTier:
        made.append(SharedTier(MemoryBlobs(server), ask_s=WAIT_S, poll_s=0.05, absent_s=0))
        return made[-1]

    yield make
    for tier in made:
        tier.close(deadline=time.monotonic() + WAIT_S)


def found_in_time(engine: Engine, keys: list[bytes]) -> int:
    """How much of a chain is found, once the geometries of others were read."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        count = engine.find(keys)
        if count:
            return count
        wait_for_news(engine.tier, 0.05)
    return 0


@pytest.mark.parametrize("reader", [1, 2, 4])
@pytest.mark.parametrize("writer", [1, 2, 4])
def test_engines_with_other_tensor_parallelism_read_each_others_blocks(
    open_tier: OpenTier, writer: int, reader: int
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(), split(writer), salt=1).save(keys)
    engine = Engine(open_tier(), split(reader), salt=2)

    found = found_in_time(engine, keys)
    ended = engine.load(keys)

    assert found == 3
    assert [each.faults for each in ended] == [()] * reader
    engine.require_loaded(keys)


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)
def test_engines_with_other_layouts_and_checksums_read_each_others_blocks(
    open_tier: OpenTier, algorithm: Algorithm
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(), packed(2), algorithm=algorithm, salt=1).save(keys)
    engine = Engine(open_tier(), split(1), algorithm=Algorithm.MIX64, salt=2)

    found = found_in_time(engine, keys)
    engine.load(keys)

    assert found == 3
    engine.require_loaded(keys)


@pytest.mark.parametrize(("ranks", "readers"), [(1, 1), (1, 4), (4, 2)])
def test_engines_with_several_kv_groups_read_each_others_blocks(
    open_tier: OpenTier, ranks: int, readers: int
) -> None:
    keys = draw_chain(1, 8)
    Engine(open_tier(), hybrid(ranks), salt=1).save(keys)
    engine = Engine(open_tier(), hybrid(readers), salt=2)

    found = found_in_time(engine, keys)
    ended = engine.load(keys)

    assert found == len(keys)
    assert [each.faults for each in ended] == [()] * len(engine.arenas)
    engine.require_loaded(keys)


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (4, 1), (2, 4)])
def test_blocks_that_all_ranks_hold_alike_are_stored_once_and_found_by_all(
    open_tier: OpenTier, server: MemoryServer, writer: int, reader: int
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(), latent(writer), equal=True).save(keys)
    engine = Engine(open_tier(), latent(reader), equal=True, salt=2)

    found = engine.find(keys)
    engine.load(keys)

    assert found == 3
    assert len([name for name in server.values if name.endswith(keys[0].hex())]) == 1
    engine.require_loaded(keys)


@pytest.mark.parametrize(("ranks", "readers"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("writer", "reader"), [(16, 64), (64, 16), (8, 16), (48, 16)])
def test_engines_with_other_block_sizes_miss_each_others_blocks_and_keep_their_own(
    open_tier: OpenTier, writer: int, reader: int, ranks: int, readers: int
) -> None:
    tokens = 192
    theirs = draw_chain(1, tokens // writer, block_tokens=writer)
    other = Engine(open_tier(), split(ranks, block_tokens=writer), salt=1)
    other.save(theirs)
    engine = Engine(open_tier(), split(readers, block_tokens=reader), salt=2)
    another = draw_chain(2, 1, block_tokens=reader)
    Engine(engine.tier, split(4, block_tokens=reader)).save(another)
    assert found_in_time(engine, another) == 1  # Geometries were read.
    wanted = draw_chain(1, tokens // reader, block_tokens=reader)

    found, foreign = engine.find(wanted), engine.foreign
    missed = engine.load(wanted)

    assert (found, foreign) == (0, True)
    assert [dict(each.faults) for each in missed] == [
        dict.fromkeys(range(len(wanted)), BlockFault.MISSING)
    ] * readers
    # Keys in common are of values with other names: both engines have their own.
    engine.save(wanted)
    assert found_in_time(engine, wanted) == len(wanted)
    for each, keys in ((engine, wanted), (other, theirs)):
        each.load(keys)
        each.require_loaded(keys)


@pytest.mark.parametrize(
    "other",
    [split(2, block_tokens=24), split(2, dtype=DType.FP16), hybrid(2)],
    ids=["block size", "dtype", "groups"],
)
def test_blocks_that_mean_something_else_are_not_found(
    open_tier: OpenTier, other: list[Layout]
) -> None:
    keys = draw_chain(1, 3)
    theirs = draw_chain(1, 3, block_tokens=other[0].block_tokens)
    Engine(open_tier(), other).save(theirs)
    engine = Engine(open_tier(), split(1))
    Engine(engine.tier, split(2)).save(keys[:1])

    # Its own geometry and the foreign one were read when the blocks of a third are found.
    assert found_in_time(engine, keys) == 1
    assert engine.foreign


@pytest.mark.parametrize(("wanted", "foreign"), [(2, False), (3, True), (4, True)])
def test_a_block_in_a_form_that_cannot_be_read_is_told_where_both_engines_end_a_block(
    open_tier: OpenTier, wanted: int, *, foreign: bool
) -> None:
    Engine(open_tier(), split(1, block_tokens=24)).save(draw_chain(1, 2, block_tokens=24))
    engine = Engine(open_tier(), split(1))
    Engine(engine.tier, split(2)).save(draw_chain(2, 1))
    assert found_in_time(engine, draw_chain(2, 1)) == 1  # Geometries were read.

    found = engine.find(draw_chain(1, wanted))

    assert (found, engine.foreign) == (0, foreign)


def test_what_nobody_wrote_is_in_no_form(open_tier: OpenTier) -> None:
    Engine(open_tier(), split(1, block_tokens=24)).save(draw_chain(1, 2, block_tokens=24))
    engine = Engine(open_tier(), split(1))
    Engine(engine.tier, split(2)).save(draw_chain(2, 1))
    assert found_in_time(engine, draw_chain(2, 1)) == 1

    assert engine.find(draw_chain(3, 4)) == 0
    assert not engine.foreign


def test_a_chain_is_found_as_far_as_all_ranks_have_it(open_tier: OpenTier) -> None:
    keys = draw_chain(1, 4)
    engine = Engine(open_tier(), split(2))
    engine.save(keys)
    server = engine.tier._blobs.server  # type: ignore[attr-defined]
    gone = [name for name in server.values if name.endswith(keys[2].hex())]
    del server.values[gone[0]]

    assert engine.find(keys) == 2


def test_what_was_written_by_one_engine_is_not_written_by_another(
    open_tier: OpenTier, server: MemoryServer
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(), split(1)).save(keys)
    before = server.calls.count("write")

    again = Engine(open_tier(), split(1), salt=2)
    ended = again.save(keys)

    assert ended[0].faults == ()
    assert server.calls.count("write") == before
    assert again.tier.state().blocks == 0


def test_a_reset_by_one_engine_is_learned_by_the_others(open_tier: OpenTier) -> None:
    keys = draw_chain(1, 3)
    one, other = Engine(open_tier(), split(1)), Engine(open_tier(), split(1))
    one.save(keys)
    assert other.find(keys) == 3

    while one.tier.void(SPACE) is None:
        wait_for_news(one.tier, WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while other.tier.generation(SPACE) == other.space.generation:
        assert time.monotonic() < deadline
        wait_for_news(other.tier, 0.05)

    assert other.find(keys) == 0
    assert other.load(keys)[0].failure == "its generation does not count any more"
    assert one.tier.generation(SPACE) == other.tier.generation(SPACE)


def test_a_generation_that_was_lost_is_a_reset_and_never_the_undoing_of_one(
    open_tier: OpenTier, server: MemoryServer
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(), split(1)).save(keys)
    del server.values[next(name for name in server.values if name.endswith("/generations"))]

    assert Engine(open_tier(), split(1)).find(keys) == 0


def _flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        (lambda values, name, _: _flipped(values[name]), BlockFault.CORRUPT),
        (lambda values, name, _: values[name][:-1], BlockFault.CORRUPT),
        (lambda values, name, _: values[name][:100], BlockFault.CORRUPT),
        (lambda values, _, other: values[other], BlockFault.CORRUPT),
        (lambda *_: b"", BlockFault.CORRUPT),
        (lambda values, name, _: bytes(len(values[name])), BlockFault.CORRUPT),
        (lambda values, name, _: values[name] + b"more", None),
        (lambda *_: None, BlockFault.MISSING),
    ],
    ids=["flipped", "cut", "cut head", "another block", "empty", "zeros", "longer", "gone"],
)
@pytest.mark.parametrize("reader", [1, 2])
def test_a_store_that_lies_causes_a_miss_and_never_a_wrong_byte(
    open_tier: OpenTier,
    server: MemoryServer,
    reader: int,
    lie: Callable[..., bytes | None],
    fault: BlockFault | None,
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(), split(1)).save(keys)
    engine = Engine(open_tier(), split(reader), salt=2)
    assert found_in_time(engine, keys) == 3
    names = [next(name for name in server.values if name.endswith(key.hex())) for key in keys]
    told = lie(server.values, names[1], names[2])
    if told is None:
        del server.values[names[1]]
    else:
        server.values[names[1]] = told

    ended = engine.load(keys)

    # A rank finds out what is wrong with its own ranges; then the value is removed.
    faults = [found for each in ended for _, found in each.faults]
    assert {position for each in ended for position, _ in each.faults} == ({1} if fault else set())
    assert bool(faults) == bool(fault)
    assert fault is None or fault in faults
    assert engine.tier.state().blocks_corrupt == faults.count(BlockFault.CORRUPT)
    if fault is BlockFault.CORRUPT:
        assert names[1] not in server.values
    if fault is None:
        engine.require_loaded(keys)


def _state_until(tier: SharedTier, *, on: bool) -> TierState:
    deadline = time.monotonic() + WAIT_S
    while (state := tier.state()).on is not on:
        assert time.monotonic() < deadline, state
        wait_for_news(tier, 0.05)
    return state


def test_a_store_that_is_away_switches_the_tier_off_and_costs_nothing_until_it_answers(
    open_tier: OpenTier, server: MemoryServer
) -> None:
    keys = draw_chain(1, 3)
    engine = Engine(open_tier(), split(1))
    engine.save(keys)

    server.away = True
    state = _state_until(engine.tier, on=False)
    before = len(server.calls)
    answers = (engine.find(keys), engine.load(keys)[0].failure, engine.save(keys)[0].failure)
    after = len(server.calls)
    server.away = False
    _state_until(engine.tier, on=True)

    assert state.why == "the store in memory is away"
    assert answers == (0, state.why, state.why)
    assert before == after
    assert engine.load(keys)[0].faults == ()


def test_a_probe_that_fails_after_a_save_has_switched_the_tier_on_does_not_switch_it_off_unsaid(
    server: MemoryServer,
) -> None:
    class Halting(MemoryBlobs):
        """Its writes, and the first read of a record while the tier is off, wait for the test."""

        def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
            writing.set()
            assert answer_write.wait(WAIT_S)
            return super().write(writes, timeout_s=timeout_s)

        def get(self, name: str, *, timeout_s: float) -> bytes | None:
            if tier.off and not answer_probe.is_set():
                probing.set()
                assert answer_probe.wait(WAIT_S)
                raise BlobStoreError("no answer in time")
            on_at_turns.append(not tier.off)
            if answer_probe.is_set():
                asked_again.set()
            return super().get(name, timeout_s=timeout_s)

    writing, answer_write = threading.Event(), threading.Event()
    probing, answer_probe, asked_again = threading.Event(), threading.Event(), threading.Event()
    on_at_turns: list[bool] = []
    tier = SharedTier(Halting(server), ask_s=WAIT_S, poll_s=0.05, retry_s=0.05)
    try:
        engine = Engine(tier, split(1))
        with ThreadPoolExecutor(1) as saving:
            saved = saving.submit(engine.save, draw_chain(1, 1))
            assert writing.wait(WAIT_S)
            server.away = True
            assert probing.wait(WAIT_S)
            server.away = False
            answer_write.set()
            saved.result(WAIT_S)
            _state_until(tier, on=True)
            answer_probe.set()
            assert asked_again.wait(WAIT_S)
    finally:
        answer_write.set()
        answer_probe.set()
        tier.close(deadline=time.monotonic() + WAIT_S)

    assert all(on_at_turns)


def test_a_question_that_takes_too_long_is_answered_with_nothing(server: MemoryServer) -> None:
    class Slow(MemoryBlobs):
        def exists(self, names: list[str], *, timeout_s: float) -> list[bool]:  # type: ignore[override]
            released.wait(WAIT_S)
            return super().exists(names, timeout_s=timeout_s)

    released = threading.Event()
    tier = SharedTier(Slow(server), ask_s=0.01)
    try:
        engine = Engine(tier, split(1))
        assert engine.find(draw_chain(1, 3)) == 0
    finally:
        released.set()
        tier.close(deadline=time.monotonic() + WAIT_S)


def test_what_is_not_there_is_not_asked_for_again_at_once(server: MemoryServer) -> None:
    keys = draw_chain(1, 3)
    tier = SharedTier(MemoryBlobs(server), ask_s=WAIT_S, absent_s=WAIT_S)
    try:
        engine = Engine(tier, split(1))
        found = [engine.find(keys) for _ in range(20)]
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)

    assert found == [0] * 20
    assert server.calls.count("exists") == 1


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_store_does_no_wrong_byte_is_delivered(seed: int, *, compress: bool) -> None:
    server = MemoryServer()
    lying = [LyingBlobs(MemoryBlobs(server), seed=2 * seed + each, lie_rate=0.2) for each in (0, 1)]
    tiers = [
        SharedTier(
            each, ask_s=WAIT_S, poll_s=0.01, absent_s=0, retry_s=0.001, compress=compress and first
        )
        for first, each in zip((True, False), lying, strict=True)
    ]
    try:
        engines = [Engine(tiers[0], split(2), salt=1), Engine(tiers[1], split(1), salt=2)]
        for number in range(12):
            keys = draw_chain(number, 4)
            for engine in engines:
                engine.follow()
                engine.save(keys)
                engine.find(keys)
                engine.require_loaded(keys, engine.load(keys))
    finally:
        for tier in tiers:
            tier.close(deadline=time.monotonic() + WAIT_S)
    assert sum(sum(each.reported.values()) for each in lying) > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_a_client_that_is_no_answer_ends_the_load_and_switches_the_tier_off(
    server: MemoryServer,
) -> None:
    class Broken(MemoryBlobs):
        def read(self, *_: object, **__: object) -> list[BlobOutcome]:  # type: ignore[override]
            raise RuntimeError("a bug of the client")

    tier = SharedTier(Broken(server), ask_s=WAIT_S)
    try:
        engine = Engine(tier, split(1))
        keys = draw_chain(1, 3)
        engine.save(keys)
        [ended] = engine.load(keys)
        state = _state_until(tier, on=False)
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)

    assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 3
    assert "a bug of the client" in state.why
