"""The calls of a batch by compiled code: made in the order of their recording, on a logging driver.

What they do on a device is tested in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.errors import UnavailableError
from penstock.movers.compiled import find_compiler, library_path, load_library
from penstock.movers.cuda.calls import Calls, CallsLibrary
from penstock.testing import failing_seed
from penstock.vocabulary.checksums import key_seeds

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILER = find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

MIB = 1 << 20
DOUBLE = Path(__file__).with_name("recording_driver.c")


def another_library(folder: Path) -> ctypes.CDLL:
    """Loaded from another place, since each knows one driver."""
    load_library()
    return ctypes.CDLL(shutil.copy(library_path(), folder))


class Recorder:
    """Compiled calls on a driver that logs its calls."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.path = folder / "libcuda.so"
        assert COMPILER is not None
        command = [COMPILER, "-shared", "-fPIC", *flags, str(DOUBLE), "-o", str(self.path)]
        subprocess.run(command, check=True, timeout=300)
        self.driver = ctypes.CDLL(str(self.path))
        self.driver.recorded.restype = ctypes.c_char_p
        self.library = CallsLibrary(another_library(folder), driver=str(self.path))

    @property
    def reported(self) -> list[str]:
        found: bytes = self.driver.recorded()
        return found.decode().splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("calls"))


@pytest.fixture
def recorder(made: Recorder) -> Iterator[Recorder]:
    made.driver.forget()
    yield made
    made.driver.forget()


def numbered(number: int) -> Any:
    """A stream or an event, as calls know it."""
    return SimpleNamespace(number=number)


def kernel(function: int, *, argument_count: int, scratch_bytes: int = 0) -> Any:
    return SimpleNamespace(
        function=function,
        argument_count=argument_count,
        threads=128,
        shared_bytes=512,
        scratch_bytes=scratch_bytes,
    )


class Streams:
    """A link: streams 1 and 2, whose turns end with events 11 and 12."""

    def __init__(self) -> None:
        self._words = array("q", [1, 2, 11, 12])
        self.address = self._words.buffer_info()[0]


def test_nothing_is_called_before_all_is_recorded(recorder: Recorder) -> None:
    calls = Calls(recorder.library, [])
    calls.wait(numbered(5), numbered(6))

    before = recorder.reported
    calls.make()

    assert before == []
    assert recorder.reported == ["wait 5 6 0"]


def test_calls_are_made_in_the_order_in_which_they_were_recorded_and_once(
    recorder: Recorder,
) -> None:
    pack = kernel(5, argument_count=3)
    calls = Calls(recorder.library, [pack])
    link: Any = Streams()

    calls.copy(numbered(5), 1 << 40, 70, 80)
    calls.wait(numbered(5), numbered(6))
    calls.clear(numbered(5), 90, 4)
    calls.launch(pack, 1000, 64, (1 << 40, -1, 7), numbered(5))
    calls.record(numbered(8), numbered(5))
    calls.follow(link, numbered(8))
    calls.send(link, (100, 200, 50), 100)
    calls.mark(numbered(9), link)
    calls.make()
    calls.make()

    assert recorder.reported == [
        f"copy {1 << 40} 70 80 5",
        "wait 5 6 0",
        "clear 90 0 4 5",
        f"launch 5 1000,64,1 128,1,1 512 5 0: {1 << 40} -1 7 0 0",
        "record 8 5",
        # The next turn is that of the stream which did not have the last one.
        *("wait 2 8 0", "wait 2 11 0", "copy 100 200 50 2", "record 12 2"),
        "record 9 2",
    ]


def test_a_ring_makes_a_descriptor_readable_also_when_it_is_full(recorder: Recorder) -> None:
    calls = Calls(recorder.library, [])
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(fd, (1 << 64) - 2)

    calls.ring(numbered(5), fd)
    calls.make()
    full = os.eventfd_read(fd)
    calls.ring(numbered(5), fd)
    calls.make()
    after = os.eventfd_read(fd)

    assert recorder.reported == [f"host 5 {fd}"] * 2
    assert (full, after) == ((1 << 64) - 2, 1)
    os.close(fd)


def test_turns_change_streams_and_each_follows_the_one_before(recorder: Recorder) -> None:
    calls = Calls(recorder.library, [])
    link: Any = Streams()

    calls.send(link, (0, 1000, 300), 100)
    calls.make()
    calls.send(link, (0, 1000, 10), 100)
    calls.make()

    assert recorder.reported == [
        *("wait 2 11 0", "copy 0 1000 100 2", "record 12 2"),
        *("wait 1 12 0", "copy 100 1100 100 1", "record 11 1"),
        *("wait 2 11 0", "copy 200 1200 100 2", "record 12 2"),
        *("wait 1 12 0", "copy 0 1000 10 1", "record 11 1"),
    ]


def turns_of(reported: list[str]) -> list[list[tuple[int, int, int]]]:
    """What was copied between each wait and the record after it."""
    turns: list[list[tuple[int, int, int]]] = []
    for line in reported:
        word, _, rest = line.partition(" ")
        if word == "wait":
            turns.append([])
        elif word == "copy":
            target, source, length, _ = map(int, rest.split())
            turns[-1].append((target, source, length))
        elif word == "batch":
            for extent in rest.partition(": ")[2].split():
                target, _, more = extent.partition("<")
                source, _, length = more.partition(":")
                turns[-1].append((int(target), int(source), int(length)))
    return turns


def sent(
    recorder: Recorder, extents: list[tuple[int, int, int]], turn_bytes: int
) -> list[list[tuple[int, int, int]]]:
    """The turns in which extents were sent."""
    calls = Calls(recorder.library, [])
    link: Any = Streams()
    calls.send(link, [word for extent in extents for word in extent], turn_bytes)
    calls.make()
    return turns_of(recorder.reported)


def test_short_extents_share_a_turn_as_long_as_they_fit(recorder: Recorder) -> None:
    extents = [(at, 1000 + at, 40) for at in range(0, 500, 100)]

    turns = sent(recorder, extents, 100)

    assert turns == [extents[:2], extents[2:4], extents[4:]]


def test_a_long_extent_is_cut_into_about_equal_turns_of_whole_pages(recorder: Recorder) -> None:
    turns = sent(recorder, [(0, 0, 64 * MIB)], 12 * MIB)

    lengths = [length for [(_, _, length)] in turns]
    assert len(lengths) == 6
    assert max(lengths) - min(lengths) < 64 << 10
    assert max(lengths) <= 12 * MIB
    assert not any(length % 4096 for length in lengths[:-1])


def test_turns_of_less_than_a_page_are_full_though_no_part_is_a_page(recorder: Recorder) -> None:
    turns = sent(recorder, [(0, 9000, 250)], 100)

    assert turns == [[(0, 9000, 84)], [(84, 9084, 84)], [(168, 9168, 82)]]


def test_every_byte_is_copied_once_and_in_order_whatever_the_turns(recorder: Recorder) -> None:
    for seed in range(50):
        with failing_seed(seed):
            recorder.driver.forget()
            random = np.random.default_rng(seed)
            count = int(random.integers(1, 6))
            lengths = random.integers(1, 40_000, size=count).tolist()
            staged = np.cumsum(random.integers(50_000, 90_000, size=count)).tolist()
            extents = [(at, 7 * at, length) for at, length in zip(staged, lengths, strict=True)]
            turn_bytes = int(random.integers(2_000, 20_000))

            turns = sent(recorder, extents, turn_bytes)

            assert all(0 < sum(part[2] for part in turn) <= turn_bytes for turn in turns)
            parts = [part for turn in turns for part in turn]
            found, wanted = (
                np.hstack(
                    [
                        np.stack([np.arange(at, at + length), np.arange(host, host + length)])
                        for at, host, length in each
                    ]
                )
                for each in (parts, extents)
            )
            np.testing.assert_array_equal(found, wanted)


def test_the_extents_of_a_turn_go_in_one_call_in_the_order_of_the_stream(
    recorder: Recorder,
) -> None:
    calls = Calls(recorder.library, [])
    link: Any = Streams()

    calls.send(link, (100, 1000, 40, 200, 3000, 60), 100)
    calls.make()

    assert recorder.reported[1] == "batch 2 in order 1 from 0 of 1: 100<1000:40 200<3000:60"


def test_a_driver_without_batches_is_given_one_extent_after_the_other(tmp_path: Path) -> None:
    older = Recorder(tmp_path, "-DWITHOUT_BATCHES")
    calls = Calls(older.library, [])
    link: Any = Streams()

    calls.send(link, (100, 1000, 40, 200, 3000, 60), 100)
    calls.make()

    assert older.reported[1:3] == ["copy 100 1000 40 2", "copy 200 3000 60 2"]


def test_nothing_is_called_after_a_call_that_failed(recorder: Recorder) -> None:
    calls = Calls(recorder.library, [])
    calls.wait(numbered(5), numbered(6))
    calls.record(numbered(7), numbered(5))
    calls.wait(numbered(5), numbered(8))
    recorder.driver.fail_after(1)

    with pytest.raises(UnavailableError, match="CUDA: error 700 of operation 2 at word 3"):
        calls.make()

    assert recorder.reported == ["wait 5 6 0", "record 7 5"]
    calls.make()
    assert len(recorder.reported) == 2


def test_words_that_make_no_sense_are_refused(recorder: Recorder) -> None:
    with pytest.raises(UnavailableError, match="error 65535 of operation 99 at word 0"):
        recorder.library.make(array("q", [99, 1, 2]))


@pytest.mark.parametrize(
    ("events", "reached"),
    [([], 0), ([1, 2, 3], 3), ([1, 200, 3], 1), ([200], 0), ([1, 200, 900], 1)],
)
def test_events_are_asked_for_until_one_is_not_reached(
    recorder: Recorder, events: list[int], reached: int
) -> None:
    calls = Calls(recorder.library, [])

    assert calls.reached([numbered(event) for event in events]) == reached


def test_an_event_of_a_lost_device_is_an_error(recorder: Recorder) -> None:
    calls = Calls(recorder.library, [])

    with pytest.raises(UnavailableError, match="CUDA: error 719 of an event"):
        calls.reached([numbered(1), numbered(900)])


@pytest.mark.parametrize(
    ("function", "argument_count", "scratch_bytes"), [(2, 3, 0), (6, 3, 0), (4, 3, 128)]
)
def test_kernels_with_parameters_that_we_do_not_know_are_refused(
    recorder: Recorder, function: int, argument_count: int, scratch_bytes: int
) -> None:
    unknown = kernel(function, argument_count=argument_count, scratch_bytes=scratch_bytes)

    with pytest.raises(UnavailableError, match=f"a kernel takes {function} parameters"):
        Calls(recorder.library, [unknown])


@pytest.mark.parametrize("key_bytes", [0, 1, 8, 16, 20, 32, 64, 104, 105, 200])
def test_seeds_are_those_of_the_definition_whatever_the_keys(
    recorder: Recorder, key_bytes: int
) -> None:
    calls = Calls(recorder.library, [])
    random = np.random.default_rng(key_bytes)
    keys = [random.bytes(key_bytes) for _ in range(70)]
    seeds = np.zeros(100, dtype=np.uint64)
    manifest: Any = SimpleNamespace(seeds=seeds, seeds_host_address=seeds.ctypes.data)

    calls.write_seeds(keys, manifest, 0x123456789ABCDEF0)

    assert seeds.tolist() == key_seeds(keys, 0x123456789ABCDEF0) + [0] * 30


def test_keys_of_different_lengths_and_long_ones_are_refused(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="keys have different lengths"):
        recorder.library.write_seeds([b"one", b"another"], 0)
    with pytest.raises(ValueError, match="keys have 300 bytes, must have at most 216"):
        recorder.library.write_seeds([bytes(300)], 0)


def test_a_driver_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    made = another_library(tmp_path)

    with pytest.raises(UnavailableError, match=r"libm\.so\.6 lacks 8 of the functions"):
        CallsLibrary(made, driver="libm.so.6")
    with pytest.raises(UnavailableError, match=r"libnothing\.so is not there"):
        CallsLibrary(made, driver="libnothing.so")
