"""The compiled code of this package: how it is built, where it is, how it is loaded.

    build()           by pip, for a wheel or an editable installation (`hatch_build.py`)
    load_library()    by whoever calls it

All C sources here make one library, which lies beside them. Its name has their hash, so it is
never older than they are. It needs the C library alone: no header of Python or CUDA, whose driver
is found at run time. It is made for any processor of its kind; `parts.c` looks for better
instructions when it runs.

A tree that was not installed (`PYTHONPATH=src`), or whose sources have changed, has no such
library: the first process that needs it builds it in the same place. The compiler is the only
process that an engine starts itself, and waited for.

The one rule: it is loaded from the folder of this file alone. Whoever can put another one there can
change this file, too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from penstock.errors import UnavailableError

FOLDER = Path(__file__).parent
SOURCES = ("parts.c", "put_away_thread.c", "stored_blocks.c", "cuda/calls.c")
"""Compiled as one, in this order."""
FLAGS = ("-O2", "-shared", "-fPIC", "-std=c11", "-D_GNU_SOURCE", "-pthread")
COMPILE_S = 60.0
"""It takes about a second."""


@cache
def load_library() -> ctypes.CDLL:
    """The library, built if it has to be.

    Raises `UnavailableError`: it cannot be built or loaded.
    """
    made = library_path()
    if not made.is_file():
        build()
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise UnavailableError(
            f"Penstock's compiled code cannot be loaded: {error}. Remove {made} to build it anew"
        ) from error


def library_path() -> Path:
    """Where the library of these sources is, or would be."""
    named_by = hashlib.sha256(b"\0".join((_source(), " ".join(FLAGS).encode())))
    return FOLDER / f"compiled-{platform.machine()}-{named_by.hexdigest()[:16]}.so"


def build() -> Path:
    """Builds the library in its place, in that of older ones; returns where that is.

    Raises `UnavailableError`: there is no C compiler, it failed, or the folder cannot be written.
    """
    compiler, made = find_compiler(), library_path()
    if compiler is None:
        raise UnavailableError(
            f"Penstock's compiled code is not in {FOLDER}, and there is no C compiler to build it "
            "(neither CC is set nor gcc, clang or cc found): install one, as by apt-get install "
            "gcc libc6-dev, or install a wheel of Penstock, which has it built"
        )
    try:
        # Made elsewhere and renamed: no process loads half of it, and of two that build at once
        # the later one replaces an equal library.
        with tempfile.TemporaryDirectory(prefix="compiled-", dir=FOLDER) as apart:
            part = Path(apart, made.name)
            command = [compiler, *FLAGS, "-x", "c", "-", "-o", str(part), "-ldl"]
            subprocess.run(
                command, input=_source(), capture_output=True, check=True, timeout=COMPILE_S
            )
            part.replace(made)
        for older in FOLDER.glob(f"compiled-{platform.machine()}-*.so"):
            if older != made:
                older.unlink(missing_ok=True)
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip().splitlines()
        said = next((line for line in words if "error" in line), words[0] if words else str(error))
        raise UnavailableError(f"Penstock's compiled code: {compiler} failed: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(
            f"Penstock's compiled code cannot be built in {FOLDER}: {error}"
        ) from error
    return made


def find_compiler() -> str | None:
    """The compiler in `CC`, or one that is installed."""
    named = os.environ.get("CC")
    if named:
        return named
    return next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)


def _source() -> bytes:
    """All that is compiled, with the names of the files for the compiler's messages."""
    return b"".join(
        f'#line 1 "{name}"\n'.encode() + FOLDER.joinpath(name).read_bytes() for name in SOURCES
    )
