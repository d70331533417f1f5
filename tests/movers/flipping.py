"""A process that changes bits of shared memory all the time, as a stray writer would."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import mmap, random, sys
fd, first, end = map(int, sys.argv[1:])
memory = mmap.mmap(fd, 0)
print("ready", flush=True)
while True:
    at = random.randrange(first, end)
    memory[at] ^= 1 << random.randrange(8)
"""


ROUNDS = 40
PATIENCE_S = 120.0


def rounds(damaged: list[int]) -> Iterator[int]:
    """So many rounds, and more until one of them was noted in `damaged`."""
    deadline = time.monotonic() + PATIENCE_S
    for number in count():
        if number >= ROUNDS and damaged:
            return
        assert time.monotonic() < deadline, "the other process has changed nothing in all the time"
        yield number


@contextmanager
def flipped_bits(fd: int, first: int, end: int) -> Iterator[None]:
    """Bits of the bytes from `first` up to `end` behind `fd` change until the `with` ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(fd), str(first), str(end)],
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
