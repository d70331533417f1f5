"""Sentences that hold for every client of a shared store.

    class TestMyStore(BlobStoreSuite):
        def make_client(self) -> BlobStore: ...

pytest then runs every sentence on your client. All clients of one test speak to the same store,
which may keep what earlier tests wrote. `FailingBlobStoreSuite` adds what is to hold while the
store stands still or is gone: say how yours is stopped, continued, killed and started.

The one rule they add up to: a call ends in its time, and then the memory that it was given is the
caller's again.
"""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from penstock.store.clients.blobs import (
    NAME_BYTES_MAX,
    RECORD_BYTES_MAX,
    BlobOutcome,
    BlobRange,
    BlobRead,
    BlobStoreError,
    BlobWrite,
)
from penstock.testing.seeds import failing_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store.clients.blobs import BlobStore

SOON_S = 60.0
"""Longer than anything takes that works, also on a slow machine."""
SHORT_S = 0.1
"""For calls that will not be answered."""
FILL = 0xA5
WRONG_NAMES: tuple[Any, ...] = (
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "a/.b",
    "a b",
    "a\nb",
    "a\r\nDEL b",
    "ä",
    "a\x00",
    "a" * (NAME_BYTES_MAX + 1),
    None,
    7,
    b"a",
)
WRONG_TIMES: tuple[Any, ...] = (0, -1.0, float("nan"), float("inf"), None, "1", True)


class BlobStoreSuite(ABC):
    """What a client does while its store works."""

    large_bytes = 16 << 20
    """Of the largest value that is tried."""
    keeps_empty_values = True
    """A store that cannot have them must say so when one is written."""
    prefix = ""

    @abstractmethod
    def make_client(self) -> BlobStore:
        """A client of the store."""

    @pytest.fixture(name="blobs")
    def open_client(self) -> Iterator[BlobStore]:
        """A client, and names that no other test has; it is closed after the test."""
        self.prefix = os.urandom(8).hex()
        blobs = self.make_client()
        yield blobs
        blobs.close()

    def name(self, text: str | int) -> str:
        """A name that is new in this test."""
        return f"{self.prefix}/{text}"

    def put(self, blobs: BlobStore, values: dict[str, bytes]) -> None:
        """Writes values, which must succeed."""
        writes = [BlobWrite(name, [memoryview(value)]) for name, value in values.items()]
        assert blobs.write(writes, timeout_s=SOON_S) == [""] * len(writes)

    def take(self, blobs: BlobStore, name: str, size: int, offset: int = 0) -> bytes | BlobOutcome:
        """The bytes of a value, or why they could not be read."""
        memory = bytearray(size)
        reads = [BlobRead(name, [BlobRange(offset, memoryview(memory))])]
        (outcome,) = blobs.read(reads, timeout_s=SOON_S)
        return bytes(memory) if outcome is BlobOutcome.READ else outcome

    def test_a_value_reads_back_as_it_was_written(self, blobs: BlobStore) -> None:
        parts = [b"ab", b"", os.urandom(100_000), b"c"]
        writes = [
            BlobWrite(self.name("parts"), [memoryview(part) for part in parts]),
            BlobWrite(self.name("one"), [memoryview(b"x")]),
        ]

        problems = blobs.write(writes, timeout_s=SOON_S)

        assert problems == ["", ""]
        whole = b"".join(parts)
        assert self.take(blobs, self.name("parts"), len(whole)) == whole
        assert self.take(blobs, self.name("one"), 1) == b"x"

    def test_another_client_reads_what_one_wrote(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"shared"})

        other = self.make_client()
        try:
            assert self.take(other, self.name("a"), 6) == b"shared"
        finally:
            other.close()

    def test_ranges_land_where_they_belong_and_nowhere_else(self, blobs: BlobStore) -> None:
        value = os.urandom(1 << 20)
        self.put(blobs, {self.name("a"): value})
        for seed in range(30):
            with failing_seed(seed):
                rng = random.Random(seed)
                cuts = sorted(rng.sample(range(len(value)), 2 * rng.randint(1, 40)))
                bounds = list(zip(cuts[::2], cuts[1::2], strict=True))
                memory = bytearray([FILL]) * (len(value) + 64)
                expected = bytearray(memory)
                ranges, place = [], 0
                for start, end in bounds:
                    place += rng.randint(0, 1)
                    target = memoryview(memory)[place : place + end - start]
                    ranges.append(BlobRange(start, target))
                    expected[place : place + end - start] = value[start:end]
                    place += end - start

                outcomes = blobs.read([BlobRead(self.name("a"), ranges)], timeout_s=SOON_S)

                assert outcomes == [BlobOutcome.READ]
                assert memory == expected

    def test_what_is_not_there_is_missing_and_the_others_are_read(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"aaaa", self.name("c"): b"cc"})
        memory = bytearray(12)
        targets = [memoryview(memory)[start : start + 4] for start in (0, 4, 8)]
        reads = [
            BlobRead(self.name(name), [BlobRange(0, target)])
            for name, target in zip("abc", targets, strict=True)
        ]

        outcomes = blobs.read(reads, timeout_s=SOON_S)

        assert outcomes == [BlobOutcome.READ, BlobOutcome.MISSING, BlobOutcome.SHORT]
        assert memory[:4] == b"aaaa"

    def test_a_whole_value_may_be_shorter_than_the_memory_for_it(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"four", self.name("c"): b"longer"})
        memory = bytearray([FILL]) * 18
        reads = [
            BlobRead(self.name(name), [BlobRange(0, memoryview(memory)[at : at + 6])], whole=True)
            for name, at in (("a", 0), ("none", 6), ("c", 12))
        ]

        outcomes = blobs.read(reads, timeout_s=SOON_S)

        assert outcomes == [BlobOutcome.READ, BlobOutcome.MISSING, BlobOutcome.READ]
        assert memory[:6] == b"four" + bytes([FILL] * 2)
        assert memory[12:] == b"longer"
        with pytest.raises(ValueError, match="is read whole, must have one range, from 0 on"):
            blobs.read([BlobRead(self.name("a"), [], whole=True)], timeout_s=SOON_S)

    def test_ranges_without_bytes_are_answered_for_the_value(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"four"})
        nothing = memoryview(bytearray())

        assert self.outcome(blobs, "a") is BlobOutcome.READ
        assert self.outcome(blobs, "a", BlobRange(4, nothing)) is BlobOutcome.READ
        assert self.outcome(blobs, "a", BlobRange(5, nothing)) is BlobOutcome.SHORT
        assert self.outcome(blobs, "none") is BlobOutcome.MISSING
        assert self.outcome(blobs, "none", BlobRange(0, nothing)) is BlobOutcome.MISSING

    def test_an_empty_value_is_kept_or_refused(self, blobs: BlobStore) -> None:
        writes = [BlobWrite(self.name("empty"), []), BlobWrite(self.name("a"), [memoryview(b"1")])]

        problem, fine = blobs.write(writes, timeout_s=SOON_S)

        assert bool(problem) != self.keeps_empty_values
        assert fine == ""
        names = [self.name("empty"), self.name("a")]
        assert blobs.exists(names, timeout_s=SOON_S) == [self.keeps_empty_values, True]
        if self.keeps_empty_values:
            one = BlobRange(0, memoryview(bytearray(1)))
            assert self.outcome(blobs, "empty") is BlobOutcome.READ
            assert self.outcome(blobs, "empty", one) is BlobOutcome.SHORT

    def outcome(self, blobs: BlobStore, name: str, *ranges: BlobRange) -> BlobOutcome:
        """What comes of reading some ranges."""
        return blobs.read([BlobRead(self.name(name), ranges)], timeout_s=SOON_S)[0]

    def test_calls_about_nothing_do_nothing(self, blobs: BlobStore) -> None:
        assert blobs.exists([], timeout_s=SOON_S) == []
        assert blobs.read([], timeout_s=SOON_S) == []
        assert blobs.write([], timeout_s=SOON_S) == []
        blobs.forget([], timeout_s=SOON_S)

    def test_a_value_is_written_once(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"first"})

        self.put(blobs, {self.name("a"): b"other"})

        assert self.take(blobs, self.name("a"), 5) == b"first"

    def test_existence_is_told_in_order(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"1", self.name("d"): b"2"})
        names = [self.name(text) for text in ("a", "b", "d", "a", "c")]

        assert blobs.exists(names, timeout_s=SOON_S) == [True, False, True, True, False]

    def test_a_value_that_vanishes_after_it_was_found_is_missing(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"1234", self.name("b"): b"5678"})
        assert all(blobs.exists([self.name("a"), self.name("b")], timeout_s=SOON_S))

        blobs.forget([self.name("a"), self.name("none")], timeout_s=SOON_S)

        assert self.take(blobs, self.name("a"), 4) is BlobOutcome.MISSING
        assert self.take(blobs, self.name("b"), 4) == b"5678"
        assert blobs.exists([self.name("a")], timeout_s=SOON_S) == [False]
        self.put(blobs, {self.name("a"): b"anew"})
        assert self.take(blobs, self.name("a"), 4) == b"anew"

    def test_more_values_than_a_client_asks_for_at_once(self, blobs: BlobStore) -> None:
        values = {self.name(each): b"%05d" % each for each in range(500)}
        self.put(blobs, values)

        assert all(blobs.exists(list(values), timeout_s=SOON_S))
        memory = bytearray(5 * len(values))
        reads = [
            BlobRead(name, [BlobRange(0, memoryview(memory)[5 * each : 5 * each + 5])])
            for each, name in enumerate(values)
        ]
        assert set(blobs.read(reads, timeout_s=SOON_S)) == {BlobOutcome.READ}
        assert memory == b"".join(values.values())

    def test_a_large_value_travels_whole(self, blobs: BlobStore) -> None:
        value = random.Random(1).randbytes(self.large_bytes)
        self.put(blobs, {self.name("large"): value})

        assert self.take(blobs, self.name("large"), len(value)) == value
        assert self.take(blobs, self.name("large"), 3, offset=len(value) - 3) == value[-3:]
        assert self.take(blobs, self.name("large"), 4, len(value) - 3) is BlobOutcome.SHORT

    def test_a_name_may_have_every_character_that_is_allowed(self, blobs: BlobStore) -> None:
        name = self.name("A-Z_0.9/-/_/a.b-c")
        name += "x" * (NAME_BYTES_MAX - len(name))

        self.put(blobs, {name: b"value"})

        assert self.take(blobs, name, 5) == b"value"
        assert blobs.exists([name, name[:-1]], timeout_s=SOON_S) == [True, False]

    def test_wrong_names_are_refused_by_every_call(self, blobs: BlobStore) -> None:
        for name in WRONG_NAMES:
            for call in self.calls(blobs, name):
                with pytest.raises(ValueError, match="name"):
                    call(SOON_S)

    def test_wrong_times_are_refused_by_every_call(self, blobs: BlobStore) -> None:
        for timeout_s in WRONG_TIMES:
            for call in self.calls(blobs, self.name("a")):
                with pytest.raises(ValueError, match="timeout_s"):
                    call(timeout_s)

    def calls(self, blobs: BlobStore, name: str) -> list[Callable[[float], object]]:
        """Every call about one name, with its time left open."""
        read = BlobRead(name, [BlobRange(0, memoryview(bytearray(1)))])
        write = BlobWrite(name, [memoryview(b"1")])
        return [
            lambda timeout_s: blobs.exists([name], timeout_s=timeout_s),
            lambda timeout_s: blobs.read([read], timeout_s=timeout_s),
            lambda timeout_s: blobs.write([write], timeout_s=timeout_s),
            lambda timeout_s: blobs.forget([name], timeout_s=timeout_s),
            lambda timeout_s: blobs.get(name, timeout_s=timeout_s),
            lambda timeout_s: blobs.create(name, b"1", timeout_s=timeout_s),
            lambda timeout_s: blobs.replace(name, b"1", timeout_s=timeout_s),
        ]

    def test_ranges_that_do_not_ascend_are_refused(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"12345678"})
        two = memoryview(bytearray(2))
        for offsets in ((-1,), (2, 0), (0, 1), (0.5,), (None,), (1 << 70,)):
            ranges: Any = [BlobRange(offset, two) for offset in offsets]  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"offset|begins"):
                blobs.read([BlobRead(self.name("a"), ranges)], timeout_s=SOON_S)

    def test_a_record_is_what_was_created_or_replaced_last(self, blobs: BlobStore) -> None:
        name = self.name("record")
        assert blobs.get(name, timeout_s=SOON_S) is None

        assert blobs.create(name, b"first", timeout_s=SOON_S)
        assert not blobs.create(name, b"second", timeout_s=SOON_S)
        assert blobs.get(name, timeout_s=SOON_S) == b"first"

        largest = os.urandom(RECORD_BYTES_MAX)
        for record in (b"third", largest, b"\r\n", b"short"):
            blobs.replace(name, record, timeout_s=SOON_S)
            assert blobs.get(name, timeout_s=SOON_S) == record
        with pytest.raises(ValueError, match="record"):
            blobs.replace(name, largest + b"1", timeout_s=SOON_S)
        with pytest.raises(ValueError, match="record"):
            blobs.create(self.name("other"), largest + b"1", timeout_s=SOON_S)

        blobs.forget([name], timeout_s=SOON_S)
        assert blobs.get(name, timeout_s=SOON_S) is None
        blobs.replace(name, b"replaced nothing", timeout_s=SOON_S)
        assert blobs.get(name, timeout_s=SOON_S) == b"replaced nothing"

    def test_of_several_who_create_a_record_one_does(self, blobs: BlobStore) -> None:
        with ThreadPoolExecutor(blobs.threads) as pool:
            for attempt in range(20):
                name = self.name(attempt)
                records = [b"%d" % each for each in range(blobs.threads)]
                did = list(
                    pool.map(lambda record: blobs.create(name, record, timeout_s=SOON_S), records)  # noqa: B023 - All of them end in this turn.
                )

                assert sum(did) == 1
                assert blobs.get(name, timeout_s=SOON_S) == records[did.index(True)]

    def test_threads_do_not_get_in_each_other_s_way(self, blobs: BlobStore) -> None:
        def work(seed: int) -> None:
            with failing_seed(seed):
                rng = random.Random(seed)
                values = {
                    self.name(f"{seed}-{each}"): rng.randbytes(rng.choice((10, 70_000, 300_000)))
                    for each in range(8)
                }
                self.put(blobs, values)
                for name, value in values.items():
                    assert self.take(blobs, name, len(value)) == value
                assert all(blobs.exists(list(values), timeout_s=SOON_S))

        with ThreadPoolExecutor(blobs.threads) as pool:
            list(pool.map(work, range(2 * blobs.threads)))

    def test_memory_is_registered_and_given_back(self, blobs: BlobStore) -> None:
        memory = memoryview(bytearray(1 << 20))
        memory[:8] = b"registed"

        blobs.register(memory)
        writes = [BlobWrite(self.name("a"), [memory[:8]])]
        assert blobs.write(writes, timeout_s=SOON_S) == [""]
        reads = [BlobRead(self.name("a"), [BlobRange(0, memory[8:16])])]
        assert blobs.read(reads, timeout_s=SOON_S) == [BlobOutcome.READ]
        blobs.unregister(memory)

        assert bytes(memory[8:16]) == b"registed"
        assert self.take(blobs, self.name("a"), 8) == b"registed"


class FailingBlobStoreSuite(BlobStoreSuite):
    """What a client does while its store stands still, and after it was started anew."""

    @abstractmethod
    def stop_store(self) -> None:
        """The store's process stands still: it neither answers nor closes connections."""

    @abstractmethod
    def continue_store(self) -> None:
        """It goes on."""

    @abstractmethod
    def kill_store(self) -> None:
        """The store's process ends at once."""

    @abstractmethod
    def start_store(self) -> None:
        """It is started again at the same address, and may have lost everything."""

    def fails(self, calls: Sequence[Callable[[float], object]], timeout_s: float) -> None:
        """Every call ends, with the error that says that the store does not work."""
        for call in calls:
            with pytest.raises(BlobStoreError):
                call(timeout_s)

    def recover(self, blobs: BlobStore) -> None:
        """The client works again, by itself."""
        deadline = time.monotonic() + SOON_S
        while True:
            try:
                self.put(blobs, {self.name("recovered"): b"again"})
                assert self.take(blobs, self.name("recovered"), 5) == b"again"
            except (BlobStoreError, AssertionError):
                assert time.monotonic() < deadline
            else:
                return

    def test_a_store_that_stands_still_costs_a_call_its_time_and_no_memory(
        self, blobs: BlobStore
    ) -> None:
        value = os.urandom(3 << 20)
        self.put(blobs, {self.name("a"): value})
        memory = bytearray(len(value))
        read = BlobRead(self.name("a"), [BlobRange(0, memoryview(memory))])
        write = BlobWrite(self.name("b"), [memoryview(os.urandom(3 << 20))])

        self.stop_store()
        try:
            self.fails([lambda timeout_s: blobs.read([read], timeout_s=timeout_s)], SHORT_S)
            memory[:] = bytes([FILL]) * len(memory)
            self.fails([lambda timeout_s: blobs.write([write], timeout_s=timeout_s)], SHORT_S)
            self.fails(self.calls(blobs, self.name("a")), SHORT_S)
        finally:
            self.continue_store()

        self.recover(blobs)
        assert set(memory) == {FILL}

    def test_a_store_that_was_started_again_is_found(self, blobs: BlobStore) -> None:
        self.put(blobs, {self.name("a"): b"before"})

        self.kill_store()
        # About another name: a write whose time ran out may still land in the new store.
        self.fails(self.calls(blobs, self.name("b")), SHORT_S)
        self.start_store()

        self.recover(blobs)
        assert self.take(blobs, self.name("a"), 6) in (BlobOutcome.MISSING, b"before")
