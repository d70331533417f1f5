"""The files in which a cache keeps what its eviction policies have learned.

Where a disk tier has a folder, there is one file for each tier with such a policy, named after the
model's blocks and the tier: `SPACE.TIER.curves`. A cache reads them when it is opened and writes
them when it is closed, never in a step; a process that is killed leaves those of the one before it.
A few KiB each, replaced as a whole; of engines that share a folder, the last one to close counts.

The one rule that must not break: whatever is in these files, a cache can be opened.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.eviction import SAVED_BYTES_MAX
from penstock.runtime.stored_tiers import space_name

if TYPE_CHECKING:
    from typing import Self

    from penstock.config import Config
    from penstock.machine.machine import CacheMachine

logger = logging.getLogger(__name__)

_FILE_MODE = 0o600


class SavedCurves:
    """Reads and writes the curves of one machine."""

    def __init__(self, folder: Path, space: bytes, machine: CacheMachine) -> None:
        self._folder = folder
        self._space = space
        self._machine = machine

    @classmethod
    def of(cls, config: Config, machine: CacheMachine) -> Self | None:
        """Those in the folder of the first disk tier; `None` without one, or nothing to save."""
        folders = [str(kind.options["path"]) for kind in config.tier_kinds if kind.name == "disk"]
        if not folders or not machine.learned():
            return None
        return cls(Path(folders[0]), space_name(config), machine)

    def restore(self) -> None:
        """Gives every policy what was saved for it; what cannot be used is logged."""
        for tier in self._machine.learned():
            path = self._path(tier)
            try:
                # A pipe in its place would have nothing to read, and nobody waits for it.
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(fd, "rb") as file:
                    data = file.read(SAVED_BYTES_MAX + 1)
                self._machine.recall(tier, data)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                logger.warning("curves not used: file=%s cause=%s", path, error)

    def save(self) -> None:
        """Replaces the files. Not synced: one that a crash leaves damaged is not used."""
        for tier, data in self._machine.learned().items():
            path = self._path(tier)
            new = path.with_name(f"{path.name}.{os.getpid()}.new")
            try:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                new.replace(path)
            except OSError as error:
                logger.warning("curves not saved: file=%s cause=%s", path, error)

    def _path(self, tier: str) -> Path:
        return self._folder / f"{self._space.hex()}.{tier}.curves"
