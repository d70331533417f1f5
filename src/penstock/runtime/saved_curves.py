"""The files in which a cache keeps what its eviction policies have learned.

Where a disk tier has a folder, there is one file for each tier with such a policy, and another for
its tenants if they have quotas: `TRAFFIC.TIER.curves`, `TRAFFIC.TIER.quotas.curves`. A cache reads
them when it is opened and writes them when it is closed, never in a step; a process that is killed
leaves those of the one before it. A few KiB each, replaced as a whole; of engines that share a
folder, the last one to close counts.

The one rule that must not break: whatever is in these files, and however long the disk takes, a
cache can be opened and closed.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.eviction import SAVED_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from penstock.config import Config
    from penstock.machine.machine import CacheMachine

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""A disk has that long to read or write all files: milliseconds, if nothing is wrong with it."""
_FILE_MODE = 0o600
_TRAFFIC_DOMAIN = b"penstock.traffic.v1"
_TRAFFIC_BYTES = 16


def traffic_name(config: Config) -> bytes:
    """A name for traffic that is alike: requests to one model, in blocks of one size.

    Not the name of its blocks. New weights void every block, but clients come back as before, so
    what was learned of them goes on: in this process, and for one with the new weights.
    """
    said = f"{config.cache.block_tokens} {config.model.name}".encode()
    return sha256(_TRAFFIC_DOMAIN + said).digest()[:_TRAFFIC_BYTES]


class SavedCurves:
    """Reads and writes the curves of one machine."""

    def __init__(
        self, folder: Path, traffic: bytes, machine: CacheMachine, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._folder = folder
        self._traffic = traffic
        self._machine = machine
        self._patience_s = patience_s

    @classmethod
    def of(cls, config: Config, machine: CacheMachine) -> Self | None:
        """Those in the folder of the first disk tier; `None` without one, or nothing to save."""
        folders = [str(kind.options["path"]) for kind in config.tier_kinds if kind.name == "disk"]
        if not folders or not machine.learned():
            return None
        return cls(Path(folders[0]), traffic_name(config), machine)

    def restore(self) -> None:
        """Gives every policy what was saved for it; what cannot be used is logged."""
        found: dict[str, bytes] = {}
        names = list(self._machine.learned())
        if not self._in_time(lambda: self._read(names, found)):
            logger.warning(
                "curves not used: folder=%s cause=not read within %g s",
                self._folder,
                self._patience_s,
            )
            return
        for name, data in found.items():
            try:
                self._machine.recall(name, data)
            except ValueError as error:
                logger.warning("curves not used: file=%s cause=%s", self._path(name), error)

    def save(self) -> None:
        """Replaces the files. Not synced: one that a crash leaves damaged is not used."""
        learned = self._machine.learned()
        if not self._in_time(lambda: self._write(learned)):
            logger.warning(
                "curves not saved: folder=%s cause=not written within %g s",
                self._folder,
                self._patience_s,
            )

    def _in_time(self, work: Callable[[], None]) -> bool:
        """Whether it ended in time. A call into a disk that does not answer cannot be ended.

        So it is left behind, in a thread that keeps no process from ending. It touches nothing of
        the machine, which may be in another call by then.
        """
        thread = threading.Thread(target=work, name="penstock-curves", daemon=True)
        thread.start()
        thread.join(self._patience_s)
        return not thread.is_alive()

    def _read(self, names: list[str], found: dict[str, bytes]) -> None:
        for name in names:
            path = self._path(name)
            try:
                # A pipe in its place would have nothing to read, and nobody waits for it.
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(fd, "rb") as file:
                    found[name] = file.read(SAVED_BYTES_MAX + 1)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("curves not used: file=%s cause=%s", path, error)

    def _write(self, learned: dict[str, bytes]) -> None:
        for name, data in learned.items():
            path = self._path(name)
            new = path.with_name(f"{path.name}.{os.getpid()}.new")
            try:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                new.replace(path)
            except OSError as error:
                logger.warning("curves not saved: file=%s cause=%s", path, error)
                with suppress(OSError):
                    new.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._traffic.hex()}.{name}.curves"
