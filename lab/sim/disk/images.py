"""Images of a disk tier's folder, and a folder that travels back to one of them.

    images.keep(truth)                        the folder as it is now
    images.travel()                           files are put back, as from a backup
    images.settle(truth, tier, …)             a process begins with them

What a reset has voided must stay void afterwards, where docs/disk-tier.md promises it:

| what is put back                           | promised                                        |
|--------------------------------------------|-------------------------------------------------|
| one file, whichever                        | always                                          |
| all small files                            | if a block was saved since in a space that was  |
|                                            | voided since, and its row can be read           |
| all of the folder, its process alive       | while that process lives                        |
| all of the folder, without a process       | no                                              |

The one rule that must not break: what is promised follows from the kind of travel, from resets and
from what was reported as saved, and not from what the tier made of it.
"""

from __future__ import annotations

import shutil
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from lab.explore.world import Violation
from lab.sim.disk.device import changed_sectors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from random import Random

    from lab.sim.disk.device import SimDisk
    from lab.sim.disk.process import DiskTruth
    from penstock.store.disk.tier import DiskTier

IMAGES_MAX = 3
RECORDS = ("generations", "generations.copy")


class Travel(Enum):
    """What is put back."""

    FILE = "one file travels back"
    RECORDS = "small files travel back"
    FOLDER = "folder travels back"


class Image(NamedTuple):
    """A folder at some time."""

    number: int
    """Counts images: that of a later time has a higher one."""
    folder: Path
    voided: dict[bytes, set[int]]
    spoilt: dict[str, set[int]]
    """By file, sectors that were not what was last written there: they are put back as they were.
    """


class Resets:
    """Which generations of each space were told, and which of them confirmed resets have voided."""

    def __init__(self) -> None:
        self.voided: dict[bytes, set[int]] = {}
        self._reported: dict[bytes, set[int]] = {}

    def note(self, name: bytes, generation: int) -> None:
        """A tier says which generation counts.

        Raises:
            Violation: a reset was undone.
        """
        self._reported.setdefault(name, set()).add(generation)
        if generation in self.voided.get(name, ()):
            raise Violation("store", f"a reset was undone: {name!r} has {generation} again")

    def confirm(self, name: bytes, generation: int) -> None:
        """A reset is confirmed: nothing of before counts again."""
        self.note(name, generation)
        self.voided[name] = self._reported[name] - {generation}

    def since(self, image: Image) -> set[bytes]:
        """Spaces that were voided since an image was made."""
        return {name for name, each in self.voided.items() if each - image.voided.get(name, set())}


class FolderImages:
    """Images of one folder, and what it travelled back to last."""

    def __init__(self, rng: Random, folder: Path, disk: SimDisk) -> None:
        self._rng = rng
        self._folder = folder
        self._disk = disk
        self._images: list[Image] = []
        self._count = 0
        self._records: dict[str, Image] = {}
        """Which records were put back, and to what, since a process has read or written them."""

    def keep(self, truth: DiskTruth) -> None:
        """Keeps the folder as it is, unless it is an earlier one at the moment."""
        if not self._folder.exists() or self._records:
            return
        if len(self._images) == IMAGES_MAX:
            shutil.rmtree(self._images.pop(self._rng.randrange(IMAGES_MAX)).folder)
        self._count += 1
        kept = self._folder.with_name(f"image-{self._count}")
        shutil.copytree(self._folder, kept)
        voided = {name: set(each) for name, each in truth.resets.voided.items()}
        names = [each.name for each in kept.iterdir()]
        spoilt = {name: set(self._disk.spoilt[str(self._folder / name)]) for name in names}
        self._images.append(Image(self._count, kept, voided, spoilt))

    def travel(self, *, lives: bool) -> tuple[Travel, set[str]] | None:
        """Puts files of an image back; what kind of travel it was, and which files changed.

        A process that `lives` goes on in them: it may write the row of a block whose bytes it wrote
        before, and which are gone. So what differs counts as spoilt then.
        """
        if not self._images or not self._folder.exists():
            return None
        image = self._rng.choice(self._images)
        travel = self._rng.choice((Travel.FILE, Travel.FILE, Travel.RECORDS, Travel.FOLDER))
        names = {each.name for folder in (image.folder, self._folder) for each in folder.iterdir()}
        names.discard("lock")  # Whoever holds it would not be seen any more.
        chosen = sorted(self._choose(travel, names))
        for name in chosen:
            file, kept = self._folder / name, image.folder / name
            before = file.read_bytes() if file.exists() else b""
            now = kept.read_bytes() if kept.exists() else b""
            lost = changed_sectors(before, now) if lives else set()
            self._disk.put_back(str(file), image.spoilt.get(name, set()) | lost)
            file.unlink(missing_ok=True)
            if kept.exists():
                shutil.copy2(kept, file)
        self._records |= {name: image for name in chosen if name in RECORDS}
        return travel, set(chosen)

    def _forget_after(self, number: int) -> None:
        for each in [each for each in self._images if each.number > number]:
            self._images.remove(each)
            shutil.rmtree(each.folder)

    def forget(self) -> None:
        """The folder was removed: the next one has nothing to do with it."""
        self._forget_after(0)
        self.overwrite()

    def _choose(self, travel: Travel, names: set[str]) -> Iterable[str]:
        match travel:
            case Travel.FILE:
                one = self._rng.choice(sorted(names))
                return {self._rng.choice(("generations", one))}
            case Travel.RECORDS:
                return {name for name in names if not name.endswith(".segment")}
            case Travel.FOLDER:
                return names

    def overwrite(self) -> None:
        """A process has written down again what counts: what was put back is no more."""
        self._records.clear()

    def settle(
        self, truth: DiskTruth, tier: DiskTier, names: Iterable[bytes], *, read: bool
    ) -> None:
        """A process has begun with what is there; `read` says that it could read all rows.

        Raises:
            Violation: a reset was undone that must not be.
        """
        if len(self._records) == len(RECORDS):
            image = self._records[RECORDS[0]]
            later = {
                identity.space.name
                for identity in truth.acknowledged.values()
                if identity.space.generation == truth.generations.get(identity.space.name)
            }
            if not read or not later & truth.resets.since(image):
                truth.resets.voided = {name: set(each) for name, each in image.voided.items()}
                # What was kept later is of a time that never was; nobody puts that back.
                self._forget_after(image.number)
            truth.generations = {name: tier.generation(name) for name in truth.generations}
        self.overwrite()
        for name in names:
            truth.resets.note(name, tier.generation(name))
