"""`calls.c` and `seeds.c`, compiled at first use by the C compiler that Triton needs as well."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.movers.c_compiler import cache_folder, compiled
from penstock.vocabulary.checksums import seed_prefix

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

SOURCES = ("calls.c", "seeds.c")
DRIVER = "libcuda.so.1"


class CallsLibrary:
    """The compiled functions, bound to a CUDA driver.

    Args:
        path: The shared object.
        driver: The driver's library, by name or path.

    Raises:
        UnavailableError: it cannot be loaded, or the driver lacks a function.
    """

    def __init__(self, path: Path, *, driver: str = DRIVER) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnavailableError(f"compiled calls cannot be loaded: {error}") from error
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
        number = ctypes.c_size_t
        given = (ctypes.c_char_p, number, ctypes.c_char_p, number, number, ctypes.c_void_p)
        self._seeds.argtypes = given

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

    def write_seeds(self, keys: Sequence[bytes], address: int) -> bool:
        """Writes the seeds of keys of equal length; returns False where that is too long."""
        key_bytes = len(keys[0])
        prefix = seed_prefix(key_bytes)
        joined = b"".join(keys)
        if len(joined) != key_bytes * len(keys):
            raise ValueError("keys have different lengths, must have one")
        written = self._seeds(prefix, len(prefix), joined, key_bytes, len(keys), address)
        return bool(written == len(keys))

    def parameter_count(self, function: int) -> int:
        """How many parameters a kernel takes, hidden ones included."""
        return int(self._parameters(function))


@cache
def load_library() -> CallsLibrary:
    """The library of this machine, compiled if it has to be.

    Raises `UnavailableError`: there is no C compiler, it failed, or the driver lacks something.
    """
    folder = cache_folder()
    if folder is not None:
        return CallsLibrary(compiled("calls", source(), folder))
    with tempfile.TemporaryDirectory(prefix="penstock-") as made_here:
        return CallsLibrary(compiled("calls", source(), Path(made_here)))


def source() -> bytes:
    """All that is compiled, in one."""
    return b"\n".join(files(__package__).joinpath(name).read_bytes() for name in SOURCES)
