"""A `penstock serve` of its own: started, waited for, and ended with whoever needed it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

READY_S = 300.0
"""Three processes read a model from a cold disk on a busy machine."""
STOP_S = 30.0
TOLD_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where a server is, and how long it took to get ready."""

    address: str
    line: str
    """What it said when it was ready."""
    ready_s: float


@contextmanager
def served(options: Sequence[str]) -> Iterator[Served]:
    """`penstock serve` with these options, on a free port of the loopback interface.

    Raises:
        UnavailableError: it did not get ready.
    """
    command = [sys.executable, "-m", "penstock.cli.entry", "serve", "--port", "0", *options]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
        try:
            line = _ready_line(process, told, deadline=began + READY_S)
            address = line.partition(" at ")[2].split("/v1")[0]
            yield Served(address=address, line=line, ready_s=time.monotonic() - began)
        finally:
            _end(process)


def _ready_line(process: subprocess.Popen[str], told: TextIO, *, deadline: float) -> str:
    assert process.stdout is not None
    while time.monotonic() < deadline:
        found, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        line = process.stdout.readline() if found else ""
        if line.startswith("penstock: ready"):
            return line.strip()
        if not line:
            break
    size = told.seek(0, os.SEEK_END)
    told.seek(max(0, size - TOLD_BYTES))
    raise UnavailableError(f"penstock serve did not get ready; it said: {told.read().strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        # Everything it started ends with it.
        process.kill()
        process.wait(STOP_S)
    process.stdout.close()
