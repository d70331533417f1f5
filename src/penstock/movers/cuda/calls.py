"""The CUDA calls of a batch: recorded first, then made all at once by compiled code.

    calls.copy(…); calls.wait(…); calls.launch(…); calls.send(link, …); calls.record(…)
    calls.make()

They are recorded as words, which `calls.c` reads: one foreign call for each batch instead of about
thirty, each of which takes several microseconds from Python.

The one rule: calls are made in the order in which they were recorded.
"""

from __future__ import annotations

import ctypes
from array import array
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import UnavailableError
from penstock.movers.compiled import load_library
from penstock.vocabulary.checksums import seed_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.movers.cuda.buffers import Manifest
    from penstock.movers.cuda.packer import PackingKernel
    from penstock.movers.cuda.streams import CudaLink, Stream, StreamEvent


DRIVER = "libcuda.so.1"
SEED_INPUT_BYTES_MAX = 240
"""A prefix and a key; `SHORT_BYTES` in `parts.c` is the same number."""


class CallsLibrary:
    """The compiled functions, bound to a CUDA driver.

    Args:
        loaded: The library.
        driver: That of CUDA, by name or path.

    Raises:
        UnavailableError: the driver is not there, or lacks a function.
    """

    def __init__(self, loaded: ctypes.CDLL, *, driver: str = DRIVER) -> None:
        missing = loaded.penstock_open(driver.encode())
        if missing:
            raise UnavailableError(
                f"{driver} is not there"
                if missing < 0
                else f"{driver} lacks {missing} of the functions that are called"
            )
        self._make = loaded.penstock_make
        self._make.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._make.restype = ctypes.c_int64
        self._reached = loaded.penstock_reached
        self._reached.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._parameters = loaded.penstock_parameters
        self._parameters.argtypes = (ctypes.c_void_p,)
        self._seeds = loaded.penstock_seeds
        number = ctypes.c_int64
        given = (ctypes.c_char_p, number, ctypes.c_char_p, number, number, ctypes.c_void_p)
        self._seeds.argtypes = given
        self._seeds.restype = None

    def make(self, words: array[int]) -> None:
        """Makes the calls that were written down.

        Raises `UnavailableError`: one failed; those after it were not made.
        """
        failure: int = self._make(*words.buffer_info())
        if failure:
            at, status = failure >> 16, failure & 0xFFFF
            raise UnavailableError(f"CUDA: error {status} of operation {words[at]} at word {at}")

    def reached(self, events: array[int]) -> int:
        """How many of these events, which are reached in order, were.

        Raises `UnavailableError`: the device may be lost.
        """
        found: int = self._reached(*events.buffer_info())
        if found < 0:
            raise UnavailableError(f"CUDA: error {-found} of an event")
        return found

    def write_seeds(self, keys: Sequence[bytes], address: int) -> None:
        """Writes the seeds of keys of equal length. Raises `ValueError`: they are too long."""
        key_bytes = len(keys[0])
        prefix = seed_prefix(key_bytes)
        joined = b"".join(keys)
        if len(joined) != key_bytes * len(keys):
            raise ValueError("keys have different lengths, must have one")
        most = SEED_INPUT_BYTES_MAX - len(prefix)
        if key_bytes > most:
            raise ValueError(f"keys have {key_bytes} bytes, must have at most {most}")
        self._seeds(prefix, len(prefix), joined, key_bytes, len(keys), address)

    def parameter_count(self, function: int) -> int:
        """How many parameters a kernel takes, hidden ones included."""
        return int(self._parameters(function))


@cache
def load_calls_library() -> CallsLibrary:
    """The functions of this machine.

    Raises `UnavailableError`: the driver is not there, or lacks something.
    """
    return CallsLibrary(load_library())


HIDDEN_MAX = 2
"""Triton adds pointers to scratch memory, one or two by version, which our kernels do not use."""


class Word(IntEnum):
    """The numbers of operations in `calls.c`."""

    WAIT = 1
    RECORD = 2
    COPY = 3
    CLEAR = 4
    LAUNCH = 5
    FOLLOW = 6
    MARK = 7
    TURNS = 8
    RING = 9


# Plain integers: access to an attribute of an enum would take most of the time.
_WAIT, _RECORD, _COPY, _CLEAR, _LAUNCH, _FOLLOW, _MARK, _TURNS, _RING = map(int, Word)


class Calls:
    """Words for `calls.c`.

    Args:
        library: Makes the calls.
        kernels: All that will be launched.

    Raises:
        UnavailableError: a kernel takes other parameters than we know of.
    """

    def __init__(self, library: CallsLibrary, kernels: Iterable[PackingKernel]) -> None:
        self._library = library
        self._words: list[int] = []
        self._launches = {kernel.function: self._launch_of(kernel) for kernel in kernels}

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Has a stream wait on the device for an event."""
        self._words += (_WAIT, stream.number, event.number)

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """Marks what the stream was given so far."""
        self._words += (_RECORD, stream.number, event.number)

    def copy(self, stream: Stream, target: int, source: int, length: int) -> None:
        """Copies one extent."""
        self._words += (_COPY, stream.number, target, source, length)

    def clear(self, stream: Stream, address: int, length: int) -> None:
        """Writes zeros."""
        self._words += (_CLEAR, stream.number, address, length)

    def launch(
        self,
        kernel: PackingKernel,
        rows: int,
        blocks: int,
        arguments: tuple[int, ...],
        stream: Stream,
    ) -> None:
        """Launches a grid of `rows × blocks` programs."""
        shape, hidden = self._launches[kernel.function]
        self._words += (_LAUNCH, stream.number, kernel.function, rows, blocks)
        self._words += shape
        self._words += arguments
        self._words += hidden

    def follow(self, link: CudaLink, event: StreamEvent) -> None:
        """What is sent over the link from now on waits for an event."""
        self._words += (_FOLLOW, link.address, event.number)

    def mark(self, event: StreamEvent, link: CudaLink) -> None:
        """Marks what was sent over the link so far."""
        self._words += (_MARK, link.address, event.number)

    def send(self, link: CudaLink, extents: Sequence[int], turn_bytes: int) -> None:
        """Copies extents in turns: target, source and length of each, one after the other."""
        self._words += (_TURNS, link.address, turn_bytes, len(extents) // 3)
        self._words += extents

    def ring(self, stream: Stream, descriptor: int) -> None:
        """Makes an eventfd readable when the stream gets there."""
        self._words += (_RING, stream.number, descriptor)

    def make(self) -> None:
        """Makes the calls that were recorded.

        Raises `UnavailableError`: one failed; the device may be lost.
        """
        words = array("q", self._words)
        self._words.clear()
        self._library.make(words)

    def reached(self, events: Sequence[StreamEvent]) -> int:
        """How many of these events, which are reached in order, were reached."""
        return self._library.reached(array("q", [event.number for event in events]))

    def write_seeds(self, keys: Sequence[bytes], manifest: Manifest, salt: int) -> None:
        """Puts the seeds of a batch's keys into its manifest, with the salt of their life."""
        self._library.write_seeds(keys, manifest.seeds_host_address)
        manifest.seeds[: len(keys)] ^= np.uint64(salt)

    def _launch_of(self, kernel: PackingKernel) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """Threads, shared memory and parameters of a kernel, and values of the hidden ones."""
        count = self._library.parameter_count(kernel.function)
        hidden = count - kernel.argument_count
        if not 0 <= hidden <= HIDDEN_MAX or kernel.scratch_bytes:
            least = kernel.argument_count
            raise UnavailableError(
                f"a kernel takes {count} parameters and {kernel.scratch_bytes} bytes of scratch, "
                f"must take {least} to {least + HIDDEN_MAX} and none"
            )
        return (kernel.threads, kernel.shared_bytes, count), (0,) * hidden


def calls_for(kernels: Iterable[PackingKernel]) -> Calls:
    """Calls on this machine's device.

    Raises `UnavailableError`: the driver is not there or lacks something, or a kernel takes other
    parameters than we know of.
    """
    return Calls(load_calls_library(), kernels)
