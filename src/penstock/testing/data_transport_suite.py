"""Sentences that hold for every way of remote writing.

    class TestMyTransport(DataTransportSuite):
        def make_target(self) -> Target: ...
        def make_writer(self) -> SuiteWriter: ...

pytest then runs every sentence on your transport. The one rule they add up to: bytes are where
they belong when their notice is there, and memory is given again only when nobody can write to
it any more.

| flag             | set it for a transport                                                     |
|------------------|----------------------------------------------------------------------------|
| `moves_itself`   | whose bytes move while nobody observes, so that their arrival takes a while |
| `fences_at_once` | whose fence holds soon after an area was retired, while its writer lives    |
"""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.testing.writer_process import OBSERVATIONS_MAX, UNLIMITED, SuiteWriter, drawn_bytes
from penstock.transport.remote import NOTICE_BYTES_MAX, Fenced, NotYet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.transport.remote import Area, Notice, Target

AREA_BYTES = 3 << 20
READABLE_MS = 60_000
"""A busy machine may be late; a poll that finds something ends at once."""
WAIT_MS = 50
"""A fence that no descriptor shows is asked for again after this."""


class DataTransportSuite(ABC):
    """What a target and its writers do."""

    moves_itself = False
    fences_at_once = False

    @abstractmethod
    def make_target(self) -> Target:
        """A target of this process."""

    @abstractmethod
    def make_writer(self) -> SuiteWriter:
        """A writer that can end for good without this process ending."""

    @pytest.fixture(name="target")
    def open_target(self) -> Iterator[Target]:
        """A target, closed after the test."""
        target = self.make_target()
        yield target
        target.close()

    @pytest.fixture(name="writer")
    def open_writer(self) -> Iterator[SuiteWriter]:
        """A writer, ended after the test."""
        writer = self.make_writer()
        yield writer
        writer.end()

    def seen(self, area: Area) -> NDArray[np.uint8]:
        """The bytes of an area; override it where they lie on a device."""
        return np.asarray(area.memory)

    def join(self, target: Target, writer: SuiteWriter, size: int = AREA_BYTES) -> Area:
        """An area that a writer is connected to, full of zeros."""
        area = self.open_area(target, "rank 0", size)
        area.memory[:] = 0
        writer.connect(area.description)
        assert target.notices() == []
        writer.observe(0)
        return area

    def finish(self, writer: SuiteWriter) -> list[tuple[int, str]]:
        """Has a writer go on until it has nothing to do."""
        return writer.settle(READABLE_MS / 1000 if self.moves_itself else 0.0)

    def open_area(self, target: Target, peer: str, size: int) -> Area:
        """An area that is ready; it must be empty of notices."""
        area = target.open_area(peer, size)
        deadline = time.monotonic() + READABLE_MS / 1000
        while not area.ready:
            self.wait(target, deadline)
            assert target.notices() == []
            assert not area.failure
        return area

    def take(self, target: Target, count: int) -> list[Notice]:
        """The notices of writes that have ended: `count` of them."""
        found = target.notices()
        deadline = time.monotonic() + READABLE_MS / 1000
        while self.moves_itself and len(found) < count:
            self.wait(target, deadline)
            found += target.notices()
        return found

    def await_fence(self, target: Target, area: Area) -> None:
        """Waits for the fence of an area, where that takes a while and nobody's end."""
        deadline = time.monotonic() + READABLE_MS / 1000
        while self.fences_at_once and target.fence(area) != Fenced():
            self.wait(target, deadline)
            assert target.notices() == []

    def wait(self, target: Target, deadline: float) -> None:
        """Waits for something of a target, which must come before the deadline."""
        assert time.monotonic() < deadline
        poller = select.poll()
        if target.descriptor is not None:
            poller.register(target.descriptor, select.POLLIN)
        poller.poll(WAIT_MS)

    def test_bytes_land_where_they_belong_and_nowhere_else(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)
        where = [(2_000_001, 1_000_003, 1), (0, 1, 2), (17, 70_000, 3)]
        expected = np.zeros(AREA_BYTES, dtype=np.uint8)
        for offset, length, seed in where:
            expected[offset : offset + length] = drawn_bytes(length, seed)

        number = writer.post(where, b"part 1")
        ended = self.finish(writer)

        assert ended == [(number, "")]
        notices = [(notice.area, notice.payload) for notice in self.take(target, 1)]
        assert notices == [(area, b"part 1")]
        np.testing.assert_array_equal(self.seen(area), expected)

    def test_a_notice_comes_once_and_after_its_bytes(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)
        writer.post([(100, 200_000, 1)], b"first")
        writer.post([(300_000, 200_000, 2)], b"second")
        offsets = {b"first": (100, 1), b"second": (300_000, 2)}
        seen = []
        deadline = time.monotonic() + READABLE_MS / 1000

        ended: list[tuple[int, str]] = []
        for _ in range(OBSERVATIONS_MAX):
            ends, spent = writer.observe(30_000)
            ended += ends
            for notice in target.notices():
                offset, seed = offsets[notice.payload]
                here = self.seen(area)[offset : offset + 200_000]
                np.testing.assert_array_equal(here, drawn_bytes(200_000, seed))
                seen.append(notice.payload)
            if not spent and not ends:
                if not self.moves_itself or len(seen) == len(ended) == 2:
                    break
                self.wait(target, deadline)

        assert sorted(seen) == [b"first", b"second"]
        assert sorted(ended) == [(0, ""), (1, "")]

    def test_a_descriptor_is_readable_while_a_notice_waits(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        self.join(target, writer)
        if target.descriptor is None:
            return
        poller = select.poll()
        poller.register(target.descriptor, select.POLLIN)
        quiet = poller.poll(0)

        writer.post([(0, 10, 1)], b"part")
        self.finish(writer)
        waits = poller.poll(READABLE_MS)
        target.notices()

        assert quiet == []
        assert waits
        assert poller.poll(0) == []

    def test_a_fence_that_is_watched_shows_the_end_of_its_writer(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)
        target.retire(area)
        fd = target.fence_descriptor(area)

        writer.end()

        if not target.watches_fences:
            assert fd is None
            return
        assert fd is not None
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(READABLE_MS)
        assert target.fence(area) == Fenced()

    def test_an_observation_moves_about_its_budget(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        self.join(target, writer)
        writer.post([(0, AREA_BYTES, 1)], b"")

        spent = [writer.observe(budget)[1] for budget in (100_000, 1, 0)]
        rest = self.finish(writer)

        assert spent[:2] == [100_000, 1]
        assert 0 < spent[2] <= 1 << 20
        assert rest == [(0, "")]

    def test_many_writes_end_once_each(self, target: Target, writer: SuiteWriter) -> None:
        self.join(target, writer)
        notices: list[bytes] = []
        ended: list[int] = []
        posted = [writer.post([(at, 1, at)], b"%d" % at + bytes(500)) for at in range(3000)]
        deadline = time.monotonic() + READABLE_MS / 1000

        for _ in range(OBSERVATIONS_MAX):
            ends, _ = writer.observe(UNLIMITED)
            ended += [number for number, cause in ends if not cause]
            arrived = target.notices()
            notices += [notice.payload for notice in arrived]
            if len(notices) == len(posted) == len(ended):
                break
            if self.moves_itself and not ends and not arrived:
                self.wait(target, deadline)

        assert sorted(ended) == posted
        assert sorted(notices) == sorted(b"%d" % at + bytes(500) for at in range(3000))

    def test_a_write_without_bytes_is_a_notice(self, target: Target, writer: SuiteWriter) -> None:
        self.join(target, writer)
        longest = bytes(NOTICE_BYTES_MAX)

        writer.post([], b"")
        writer.post([], longest)
        self.finish(writer)

        assert sorted(notice.payload for notice in self.take(target, 2)) == [b"", longest]

    def test_a_write_that_cannot_be_is_refused_before_a_byte_is_moved(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)

        for where, notice_bytes, message in (
            ((AREA_BYTES - 9, 10, 1), 0, f"10 bytes from {AREA_BYTES - 9} on"),
            ((-1, 10, 1), 0, "10 bytes from -1 on"),
            ((0, 10, 1), NOTICE_BYTES_MAX + 1, f"notice has {NOTICE_BYTES_MAX + 1} bytes"),
        ):
            with pytest.raises(ValueError, match=message):
                writer.post([(0, 10, 2), where], bytes(notice_bytes))

            assert self.finish(writer) == []
        assert not self.seen(area).any()

    def test_writers_have_areas_of_their_own(self, target: Target, writer: SuiteWriter) -> None:
        other_pen = self.make_writer()
        areas = [self.join(target, each, 1000) for each in (writer, other_pen)]

        for seed, each in enumerate((writer, other_pen)):
            each.post([(0, 1000, seed)], b"%d" % seed)
            self.finish(each)
        found = {notice.payload: notice.area for notice in self.take(target, 2)}
        other_pen.end()

        assert found == {b"0": areas[0], b"1": areas[1]}
        for seed, area in enumerate(areas):
            np.testing.assert_array_equal(self.seen(area), drawn_bytes(1000, seed))

    def test_no_notice_of_a_retired_area_is_taken_and_its_writer_learns_that(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)
        writer.post([(0, 1000, 1)], b"before")
        self.finish(writer)

        self.take(target, 1)

        target.retire(area)
        target.retire(area)
        self.await_fence(target, area)
        writer.post([(0, 1000, 2)], b"after")
        ended = self.finish(writer)

        assert target.notices() == []
        assert [number for number, _ in ended] == [1]
        assert all(cause for _, cause in ended)

    def test_a_fence_does_not_hold_as_long_as_the_writer_can_write(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        if self.fences_at_once:
            pytest.skip("this transport's fence does not depend on its writer")
        area = self.join(target, writer)
        writer.post([(0, AREA_BYTES, 1)], b"")
        writer.observe(100_000)
        writer.stop()

        target.retire(area)
        stopped = target.fence(area)
        with pytest.raises(ValueError, match="cannot be freed"):
            target.free(area)
        writer.resume()
        self.finish(writer)
        idle = target.fence(area)
        writer.end()

        assert isinstance(stopped, NotYet)
        assert isinstance(idle, NotYet)
        assert stopped.cause
        assert target.fence(area) == Fenced()

    def test_memory_is_counted_until_it_is_given_back(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)
        before = (target.open_bytes, target.retired_bytes)

        target.retire(area)
        retired = (target.open_bytes, target.retired_bytes)
        writer.end()
        self.await_fence(target, area)
        target.free(area)

        assert before == (AREA_BYTES, 0)
        assert retired == (0, AREA_BYTES)
        assert (target.open_bytes, target.retired_bytes) == (0, 0)
        with pytest.raises(ValueError, match="not retired"):
            target.free(area)

    def test_reused_memory_does_not_change(self, target: Target, writer: SuiteWriter) -> None:
        old = self.join(target, writer)
        writer.post([(0, AREA_BYTES, 1)], b"")
        writer.observe(1_000_000)
        writer.stop()
        target.retire(old)
        self.await_fence(target, old)
        freed = target.fence(old) == Fenced()  # Who asks, believes it.
        if freed:
            target.free(old)
        fresh = target.open_area("rank 1", AREA_BYTES)
        fresh.memory[:] = 77

        writer.resume()
        self.finish(writer)
        while_it_lived = bool((self.seen(fresh) == 77).all())
        writer.end()
        if not freed:
            target.free(old)
        again = target.open_area("rank 2", AREA_BYTES)
        again.memory[:] = 88

        assert while_it_lived
        assert (self.seen(fresh) == 77).all()
        assert (self.seen(again) == 88).all()

    def test_an_area_that_nobody_connected_to_is_fenced_at_once(self, target: Target) -> None:
        area = target.open_area("rank 0", 100)

        target.retire(area)
        self.await_fence(target, area)

        assert target.fence(area) == Fenced()
        target.free(area)

    def test_who_connects_to_a_retired_area_gets_nothing(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.open_area(target, "rank 0", 1000)
        area.memory[:] = 5
        target.retire(area)
        self.await_fence(target, area)

        try:
            writer.connect(area.description)
        except (ValueError, OSError):
            assert target.fence(area) == Fenced()
            return
        writer.post([(0, 1000, 1)], b"")
        target.notices()
        ended = self.finish(writer)

        assert [number for number, cause in ended if cause] == [0]
        assert target.fence(area) == Fenced()
        assert (self.seen(area) == 5).all()

    def test_a_fence_of_an_area_in_use_is_a_mistake(
        self, target: Target, writer: SuiteWriter
    ) -> None:
        area = self.join(target, writer)

        with pytest.raises(ValueError, match="not retired"):
            target.fence(area)

    def test_a_description_of_nothing_is_refused(self, writer: SuiteWriter) -> None:
        for description in (b"", b"PENSTOCK", b"PENSTOCK\x01\x80", b"x" * 1000):
            with pytest.raises(ValueError, match="description"):
                writer.connect(description)
