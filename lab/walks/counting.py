"""Counts calls of Penstock's functions in this process and all that it starts, while it is told to.

    with Counting() as counting:
        …                               # open what is looked at
        with counting.on():
            …                           # one walk
        print(counting.found())

Processes find their counter by `sitecustomize`, in a folder that is the first on their path; a byte
of a shared file says whether to count, so that starts and ends are left out. Each process adds to a
file of its own.

The one rule: only files of the two packages count, and only calls of Python functions.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

FOLDER = "PENSTOCK_WALK_FOLDER"
"""Names the folder of the counters in the environment of a process."""
PACKAGES = ("/penstock/", "/penstock_serve/")
OFF, ON = 0, 1
CUSTOM = (
    "import sys\nsys.path.append({root!r})\nfrom lab.walks import counting\ncounting.install()\n"
)


class Walked(NamedTuple):
    """What a walk has passed."""

    files: int
    calls: int
    processes: int


class Counting:
    """Counts from inside, and asks the processes that were started since it was opened."""

    def __enter__(self) -> Counting:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-walk-")
        folder = Path(self._folder.name)
        root = Path(__file__).resolve().parents[2]
        (folder / "sitecustomize.py").write_text(CUSTOM.format(root=str(root)), encoding="utf-8")
        (folder / "state").write_bytes(bytes(mmap.PAGESIZE))
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._before = {name: os.environ.get(name) for name in ("PYTHONPATH", FOLDER)}
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        os.environ[FOLDER] = str(folder)
        _calls.clear()
        install()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._folder.cleanup()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Counts for so long."""
        state = _shared(Path(self._folder.name))
        state[0] = ON
        try:
            yield
        finally:
            state[0] = OFF

    def found(self) -> Walked:
        """What was passed while it counted. Processes tell it when they have ended."""
        folder = Path(self._folder.name)
        _write(folder)
        calls: Counter[str] = Counter()
        reported = [json.loads(each.read_text()) for each in folder.glob("*.json")]
        for each in reported:
            calls.update(each)
        return Walked(len(calls), calls.total(), sum(1 for each in reported if each))


_calls: Counter[str] = Counter()


def install() -> None:
    """Begins to count in this process, in all threads that are started from now on."""
    import atexit  # noqa: PLC0415 - in every process, so as little as can be is imported

    folder = Path(os.environ[FOLDER])
    state = _shared(folder)

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and state[0] == ON:
            name = frame.f_code.co_filename
            if any(package in name for package in PACKAGES):
                _calls[name] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    atexit.register(_write, folder)


def _shared(folder: Path) -> mmap.mmap:
    descriptor = os.open(folder / "state", os.O_RDWR)
    try:
        return mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def _write(folder: Path) -> None:
    if folder.is_dir():
        (folder / f"{os.getpid()}.json").write_text(json.dumps(_calls), encoding="utf-8")
