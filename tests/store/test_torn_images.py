"""Damaged copies of a disk tier's folder: what it delivers from them has the right bytes.

A folder is filled, some of its segments are filled again, and then copies of it are damaged, each
by its own seed: sectors cut, zeroed, exchanged, repeated, overwritten, set back to what they were;
rows, slots and files exchanged, also with those of another folder. A tier opens each copy and loads
every block that was ever saved. What arrives must be right; everything else must be a fault.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.store_tier_suite import (
    LAYOUTS,
    LOAD_SALT,
    SLOT_COUNT,
    WAIT_S,
    StoreRig,
    draw_key,
    wait_until_recovered,
)
from penstock.store.disk.format import PAGE_BYTES, ROW_BYTES, DiskCipher, Geometry, read_head
from penstock.store.disk.inspect import inspect_folder
from penstock.store.disk.io import DiskCalls
from penstock.store.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.vocabulary.keys import Key
    from penstock.vocabulary.layout import Layout

SIZE_BYTES = 1 << 20
"""Eight segments of some ten blocks each."""
SECTORS = (512, PAGE_BYTES)
BATCH = SLOT_COUNT
QUICK_IMAGES, LONG_IMAGES, LONG_STEP = 30, 2000, 250
SOME_IMAGES = 6
CHANGES_MAX = 6
UNSYNCED = DiskCalls(sync=lambda _: None)
"""No power is lost while an image is read."""


@dataclass
class Images:
    """A folder, what it was before, another folder, and all blocks that were ever saved."""

    now: dict[str, bytes]
    before: dict[str, bytes]
    other: dict[str, bytes]
    content: dict[Key, bytes]
    layout: Layout


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def save_blocks(tier: DiskTier, layout: Layout, seeds: range, content: dict[Key, bytes]) -> None:
    rig = StoreRig(tier, layout)
    for seed in seeds:
        saved = rig.fill(24, seed=seed)
        assert rig.save_and_wait(saved).faults == ()
        content.update(zip(saved.keys, (block.tobytes() for block in saved.content), strict=True))
    tier.close(deadline=time.monotonic() + WAIT_S)


def make_images(
    folder: Path, *, kind: str = "whole pages", cipher: DiskCipher | None = None
) -> Images:
    content: dict[Key, bytes] = {}
    layout = LAYOUTS[kind]
    here, elsewhere = folder / "here", folder / "elsewhere"
    save_blocks(DiskTier(here, SIZE_BYTES, cipher=cipher), layout, range(1, 4), content)
    before = files_of(here)
    save_blocks(DiskTier(here, SIZE_BYTES, cipher=cipher), layout, range(4, 6), content)
    save_blocks(DiskTier(elsewhere, SIZE_BYTES, cipher=cipher), layout, range(6, 8), content)
    return Images(files_of(here), before, files_of(elsewhere), content, layout)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return make_images(tmp_path_factory.mktemp("images"))


class Damage:
    """Changes some files, by a seed."""

    def __init__(self, images: Images, seed: int) -> None:
        self._random = random.Random(seed)
        self._images = images
        self.files = {name: bytearray(raw) for name, raw in images.now.items()}
        self._elsewhere = {name: bytearray(raw) for name, raw in images.other.items()}
        self.made: list[str] = []

    def inflict(self) -> None:
        kinds: list[Callable[[], None]] = [
            *(self.cut, self.zero, self.overwrite, self.flip, self.exchange, self.repeat),
            *(self.set_back, self.exchange_rows, self.exchange_slots, self.exchange_files),
            *(self.set_file_back,),
        ]
        for _ in range(self._random.randint(1, CHANGES_MAX)):
            kind = self._random.choice(kinds)
            kind()
            self.made.append(kind.__name__)

    def _file(self) -> bytearray:
        return self.files[self._name()]

    def _name(self) -> str:
        return self._random.choice([name for name in self.files if name.endswith(".segment")])

    def _any_file(self) -> bytearray:
        """Of this folder or, less often, of the other."""
        if self._random.random() < 0.7:
            return self._file()
        names = [name for name in self._elsewhere if name.endswith(".segment")]
        return self._elsewhere[self._random.choice(names)]

    def _place(self, raw: bytearray, unit: int) -> slice:
        """Often in the head or the table: they are small, and all depends on them."""
        end = 3 * PAGE_BYTES if self._random.random() < 0.4 else len(raw)
        at = self._random.randrange(max(1, min(end, len(raw)) // unit)) * unit
        return slice(at, at + unit)

    def cut(self) -> None:
        raw = self._file()
        del raw[self._random.randrange(len(raw) // 512 + 1) * 512 :]

    def zero(self) -> None:
        raw, unit = self._file(), self._random.choice(SECTORS)
        for _ in range(self._random.randint(1, 8)):
            self._put(raw, self._place(raw, unit), bytes(unit))

    def overwrite(self) -> None:
        raw, unit = self._file(), self._random.choice(SECTORS)
        self._put(raw, self._place(raw, unit), self._random.randbytes(unit))

    def flip(self) -> None:
        raw = self._file()
        if raw:
            at = self._place(raw, 512).start + self._random.randrange(512)
            if at < len(raw):
                raw[at] ^= 1 << self._random.randrange(8)

    def exchange(self) -> None:
        unit = self._random.choice(SECTORS)
        self._exchange(self._file(), self._any_file(), unit)

    def repeat(self) -> None:
        one, other, unit = self._file(), self._any_file(), self._random.choice(SECTORS)
        self._put(one, self._place(one, unit), bytes(other[self._place(other, unit)]))

    def set_back(self) -> None:
        """A sector or page is as it was before: a write was acknowledged and lost."""
        name, unit = self._name(), self._random.choice(SECTORS)
        old = self._images.before.get(name, b"")
        for _ in range(self._random.randint(1, 8)):
            place = self._place(self.files[name], unit)
            self._put(self.files[name], place, old[place])

    def set_file_back(self) -> None:
        name = self._name()
        self.files[name] = bytearray(self._images.before.get(name, b""))

    def exchange_rows(self) -> None:
        one, other = self._file(), self._any_file()
        self._exchange(one, other, ROW_BYTES, first=PAGE_BYTES, count=10)

    def exchange_slots(self) -> None:
        one, other = self._file(), self._any_file()
        head = read_head(bytes(one[:PAGE_BYTES]))
        if head is not None:
            count = int(head["slot_count"])
            first, unit = Geometry.slots_offset(count), int(head["slot_bytes"])
            self._exchange(one, other, unit, first=first, count=count)

    def exchange_files(self) -> None:
        mine, theirs = self._name(), self._random.choice(sorted(self._elsewhere))
        if theirs.endswith(".segment"):
            self.files[mine], self._elsewhere[theirs] = self._elsewhere[theirs], self.files[mine]
        two = self._name()
        self.files[mine], self.files[two] = self.files[two], self.files[mine]

    def _exchange(
        self, one: bytearray, other: bytearray, unit: int, first: int = 0, count: int = 0
    ) -> None:
        def place(raw: bytearray) -> slice:
            if not count:
                return self._place(raw, unit)
            at = first + self._random.randrange(count) * unit
            return slice(at, at + unit)

        here, there = place(one), place(other)
        mine, theirs = bytes(one[here]), bytes(other[there])
        self._put(one, here, theirs)
        self._put(other, there, mine)

    @staticmethod
    def _put(raw: bytearray, place: slice, piece: bytes) -> None:
        """Changes bytes without changing the length of a file."""
        piece = piece[: max(0, len(raw) - place.start)]
        raw[place.start : place.start + len(piece)] = piece


class Loader:
    """Opens folders with a tier and loads every block, into one arena."""

    def __init__(self, images: Images, cipher: DiskCipher | None = None) -> None:
        self._images = images
        self._cipher = cipher
        self._rig: StoreRig | None = None

    def load_all(self, folder: Path) -> Iterator[tuple[Key, NDArray[np.uint8] | None]]:
        """Each key, with its bytes if the tier delivered it."""
        tier = DiskTier(folder, SIZE_BYTES, cipher=self._cipher, calls=UNSYNCED)
        try:
            wait_until_recovered(tier)
            if self._rig is None:
                self._rig = StoreRig(tier, self._images.layout)
            self._rig.tier = tier
            keys = list(self._images.content)
            for start in range(0, len(keys), BATCH):
                yield from self._load(self._rig, keys[start : start + BATCH])
            assert tier.state().on, tier.state().why
        finally:
            tier.close(deadline=time.monotonic() + WAIT_S)

    def _load(
        self, rig: StoreRig, keys: list[Key]
    ) -> Iterator[tuple[Key, NDArray[np.uint8] | None]]:
        slots = list(range(len(keys)))
        faults = dict(rig.load_and_wait(keys, slots).faults)
        blocks = rig.blocks()
        good = [slot for slot in slots if slot not in faults]
        stored = rig.host.sums(np.array(good, np.int32))
        made = rig.sums(blocks[good], [keys[slot] for slot in good], LOAD_SALT)
        np.testing.assert_array_equal(stored, made)
        for slot, key in enumerate(keys):
            yield key, None if slot in faults else blocks[slot]


def write_files(folder: Path, files: dict[str, bytearray]) -> Path:
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


def check_images(
    images: Images, seeds: range, folder: Path, cipher: DiskCipher | None = None
) -> Counter[str]:
    """Damages and opens an image for each seed; how many blocks arrived and how many did not."""
    loader = Loader(images, cipher)
    counts: Counter[str] = Counter()
    for seed in seeds:
        damage = Damage(images, seed)
        damage.inflict()
        image = write_files(folder / str(seed), damage.files)
        for key, block in loader.load_all(image):
            if block is None:
                counts["faults"] += 1
                continue
            counts["delivered"] += 1
            right = block.tobytes() == images.content[key]
            assert right, f"seed {seed} ({', '.join(damage.made)}): wrong bytes of {key.hex()}"
        # What the tier forgot or repaired, it left in order for whoever looks next.
        inspect_folder(image).verify(cipher)
        shutil.rmtree(image)
    return counts


def test_an_image_without_damage_has_all_blocks_that_fit(images: Images, tmp_path: Path) -> None:
    image = write_files(tmp_path / "image", {n: bytearray(raw) for n, raw in images.now.items()})
    newest = {draw_key(seed, number) for seed in (4, 5) for number in range(24)}

    delivered = {
        key: block.tobytes() for key, block in Loader(images).load_all(image) if block is not None
    }

    assert newest <= delivered.keys()
    assert len(delivered) > 60
    assert all(block == images.content[key] for key, block in delivered.items())
    found = inspect_folder(image)
    verified = found.verify()
    assert found.report.damages == []
    assert found.report.live == len(delivered)
    assert (verified.whole, verified.trailer_only, verified.damaged) == (len(delivered), 0, 0)


def test_a_damaged_image_delivers_right_bytes_or_none(images: Images, tmp_path: Path) -> None:
    counts = check_images(images, range(QUICK_IMAGES), tmp_path)

    assert counts["delivered"] > 20 * QUICK_IMAGES
    assert counts["faults"] > 20 * QUICK_IMAGES


@pytest.mark.long
@pytest.mark.parametrize("first", range(QUICK_IMAGES, QUICK_IMAGES + LONG_IMAGES, LONG_STEP))
def test_two_thousand_damaged_images_deliver_right_bytes_or_none(
    images: Images, tmp_path: Path, first: int
) -> None:
    counts = check_images(images, range(first, first + LONG_STEP), tmp_path)

    assert counts["delivered"] > 20 * LONG_STEP


@pytest.mark.parametrize("kind", ["less than a page", "not a multiple of a page"])
def test_damaged_images_of_blocks_that_are_not_whole_pages(tmp_path: Path, kind: str) -> None:
    images = make_images(tmp_path, kind=kind)
    (tmp_path / "damaged").mkdir()

    counts = check_images(images, range(SOME_IMAGES), tmp_path / "damaged")

    assert counts["delivered"] > 20 * SOME_IMAGES


def test_a_damaged_encrypted_image_delivers_right_bytes_or_none(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="of the disk-encryption extra")
    cipher = DiskCipher(bytes(range(32)))
    images = make_images(tmp_path, cipher=cipher)
    (tmp_path / "damaged").mkdir()

    counts = check_images(images, range(SOME_IMAGES), tmp_path / "damaged", cipher)

    assert counts["delivered"] > 20 * SOME_IMAGES
