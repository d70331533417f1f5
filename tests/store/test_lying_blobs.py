"""The lying store tells every lie that it knows, and none unless it is asked to."""

from __future__ import annotations

import pytest

from lab.fixtures.lying_blobs import Lie, LyingBlobs
from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from penstock.store.clients.blobs import (
    BlobOutcome,
    BlobRange,
    BlobRead,
    BlobStore,
    BlobStoreError,
    BlobWrite,
)
from penstock.testing.blob_store_suite import BlobStoreSuite
from penstock.testing.seeds import failing_seed

VALUE = bytes(range(1, 129))
OTHER = bytes(range(128, 256))


class TestLyingBlobsThatDoNotLie(BlobStoreSuite):
    @pytest.fixture(autouse=True)
    def serve(self) -> None:
        self.server = MemoryServer()

    def make_client(self) -> LyingBlobs:
        return LyingBlobs(MemoryBlobs(self.server), seed=1, lie_rate=0)


def all_answers(blobs: BlobStore) -> tuple[object, ...]:
    """What a store says, and the bytes that it gives."""
    writes = [BlobWrite("a", [memoryview(VALUE)]), BlobWrite("b", [memoryview(OTHER)])]
    problems = blobs.write(writes, timeout_s=1)
    blobs.replace("record", b"record", timeout_s=1)
    there = blobs.exists(["a", "b", "c"], timeout_s=1)
    memory = bytearray(b"\xff" * len(VALUE))
    (outcome,) = blobs.read([BlobRead("a", [BlobRange(0, memoryview(memory))])], timeout_s=1)
    found = bytes(memory) if outcome is BlobOutcome.READ else outcome
    return problems, there, found, blobs.get("record", timeout_s=1)


@pytest.mark.parametrize("lie", list(Lie))
def test_each_lie_shows_in_an_answer(lie: Lie) -> None:
    honest = all_answers(MemoryBlobs(MemoryServer()))
    shown = 0
    for seed in range(40):
        with failing_seed(seed):
            lying = LyingBlobs(MemoryBlobs(MemoryServer()), seed=seed, lie_rate=0.5, lies=[lie])
            try:
                answers: object = all_answers(lying)
            except BlobStoreError as problem:
                answers = str(problem)
            assert set(lying.reported) <= {lie}
            shown += answers != honest

    assert shown


def test_equal_seeds_tell_equal_lies() -> None:
    told = []
    for _ in range(2):
        lying = LyingBlobs(MemoryBlobs(MemoryServer()), seed=3, lie_rate=0.3)
        for _ in range(30):
            try:
                all_answers(lying)
            except BlobStoreError:
                continue
        told.append(lying.reported)

    assert told[0] == told[1]
    assert len(told[0]) > 5


def test_a_late_answer_takes_its_time_first() -> None:
    waited: list[float] = []
    lying = LyingBlobs(
        MemoryBlobs(MemoryServer()), seed=1, lie_rate=1, lies=[Lie.LATE], wait=waited.append
    )

    with pytest.raises(BlobStoreError):
        lying.exists(["a"], timeout_s=7)

    assert waited == [7]
