"""Compiles the C sources of the package at first use, with the machine's own compiler.

The result is kept in the user's cache folder, under a hash of the source, so that it is compiled
once. If no folder can be written, it is compiled for this process alone.

The compiler is the only process that an engine starts itself: once, and waited for.

The one rule: a library is loaded only from a folder that other users cannot write to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path

from penstock.errors import UnavailableError

COMPILE_S = 60.0
"""It takes a quarter of a second."""
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c11", "-D_GNU_SOURCE", "-pthread")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """The folder of compiled code, which only this user can write to; `None` if there is none."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "penstock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    own = found.st_uid == os.getuid() and not found.st_mode & _OTHERS_WRITE
    return folder if own and os.access(folder, os.W_OK) else None


def compiled(name: str, text: bytes, folder: Path) -> Path:
    """The shared object made of a source, from the folder if it is there.

    Raises `UnavailableError`: there is no C compiler, or it failed.
    """
    named_by = hashlib.sha256(b"\0".join((text, " ".join(_FLAGS).encode())))
    made = folder / f"{name}-{platform.machine()}-{named_by.hexdigest()[:32]}.so"
    if made.is_file():
        return made
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError(
            "there is no C compiler (neither CC is set nor gcc, clang, cc found)"
        )
    # Written under another name and renamed, so that no process loads half of it.
    part = folder / f"{made.name}.{os.getpid()}"
    command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(part), "-ldl"]
    try:
        subprocess.run(command, input=text, capture_output=True, check=True, timeout=COMPILE_S)
        part.replace(made)
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip().splitlines()
        raise UnavailableError(f"{compiler} failed: {words[0] if words else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{compiler} failed: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return made


def find_compiler() -> str | None:
    """The compiler in `CC`, or one that is installed; Triton searches in the same way."""
    named = os.environ.get("CC")
    if named:
        return named
    return next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
