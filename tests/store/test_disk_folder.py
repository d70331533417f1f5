"""The folder of a disk tier: who may write to it, what else may lie in it, how large it can be."""

from __future__ import annotations

import errno
import os
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.store_tier_suite import LAYOUTS, WAIT_S, StoreRig
from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.disk.format import HEAD, PAGE_BYTES, seal_head
from penstock.store.disk.io import DiskCalls
from penstock.store.disk.tier import DiskTier
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYOUT = LAYOUTS["whole pages"]
SIZE_BYTES = 8 << 20
NOBODY = 65534


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o2775, 0o722, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_and_named(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    folder.chmod(mode)
    before = open_descriptors()

    with pytest.raises(UnavailableError) as refused:
        DiskTier(folder, SIZE_BYTES)

    assert str(refused.value) == (
        f"folder {folder} has mode {mode:04o}, must have 0700: others can write to it and forge "
        f"blocks; `chmod 700 {folder}`, or give a path below it that does not exist yet: that "
        "folder is made right"
    )
    assert list(folder.iterdir()) == []
    assert open_descriptors() <= before  # Others may go: of what tests before this one have left.


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o2700])
def test_a_folder_that_others_can_only_read_is_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    folder.chmod(mode)

    tier = DiskTier(folder, SIZE_BYTES)
    tier.close(deadline=time.monotonic() + WAIT_S)

    assert tier.state().on


def test_below_a_folder_of_others_a_new_one_is_made_right(tmp_path: Path) -> None:
    """As on a volume of Kubernetes with `fsGroup`: it belongs to root, and its group can write."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2775)

    DiskTier(volume / "tier", SIZE_BYTES).close(deadline=time.monotonic() + WAIT_S)

    assert (volume / "tier").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_another_user_is_refused_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)

    with pytest.raises(UnavailableError) as refused:
        DiskTier(folder, SIZE_BYTES)

    assert str(refused.value) == (
        f"folder {folder} belongs to user {NOBODY}, must belong to user 0, who runs this process: "
        f"`chown 0 {folder}`, or give a path below it that does not exist yet: that folder is made "
        "right"
    )
    assert list(folder.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_refused_and_named(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "tier"
    target.mkdir(mode=0o700)
    link.symlink_to(target)

    with pytest.raises(UnavailableError) as refused:
        DiskTier(link, SIZE_BYTES)

    assert str(refused.value) == (
        f"folder {link} is a symbolic link to {target}, must be a folder: others may turn the "
        "link; give the path that it leads to"
    )
    assert list(target.iterdir()) == []


def test_a_folder_behind_a_link_is_used(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")

    DiskTier(tmp_path / "link" / "tier", SIZE_BYTES).close(deadline=time.monotonic() + WAIT_S)

    assert (tmp_path / "target" / "tier" / "generations").is_file()


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    path.symlink_to(elsewhere)


def make_folder(path: Path) -> None:
    path.mkdir()


ODD = pytest.mark.parametrize("odd", [make_fifo, make_link, make_folder])


@ODD
def test_what_is_named_like_a_segment_and_is_none_is_ignored(
    make: Callable[..., DiskTier],
    tmp_path: Path,
    odd: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = StoreRig(make(), LAYOUT).fill(4)
    StoreRig(make(), LAYOUT).tier.close(deadline=time.monotonic() + WAIT_S)
    path = tmp_path / "tier" / "00000000.segment"
    odd(path)

    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(4)
    ended = rig.save_and_wait(saved)
    again = StoreRig(make(), LAYOUT)

    assert ended.faults == ()
    assert again.load_and_wait(saved.keys, range(10, 14)).faults == ()
    again.require(saved, range(10, 14))
    assert f"{path} is ignored: it is no regular file" in caplog.messages
    assert not path.is_file() or path.is_symlink()
    assert odd is not make_link or (tmp_path / "elsewhere").read_bytes() == b"not ours"


@ODD
@pytest.mark.parametrize("name", ["probe", "generations.new", "generations.copy.new"])
def test_what_is_in_the_way_of_small_files_does_not_hang_the_tier(
    make: Callable[..., DiskTier], tmp_path: Path, odd: Callable[[Path], None], name: str
) -> None:
    make().close(deadline=time.monotonic() + WAIT_S)
    odd(tmp_path / "tier" / name)

    if odd is make_folder:
        with pytest.raises(UnavailableError, match="tier cannot be used: Is a directory"):
            make()
    else:
        rig = StoreRig(make(), LAYOUT)
        assert rig.save_and_wait(rig.fill(2)).faults == ()


@ODD
@pytest.mark.parametrize("name", ["generations", "generations.copy"])
def test_generations_that_are_no_file_are_damaged(
    make: Callable[..., DiskTier], tmp_path: Path, odd: Callable[[Path], None], name: str
) -> None:
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(2)
    rig.save_and_wait(saved)
    rig.tier.close(deadline=time.monotonic() + WAIT_S)
    path = tmp_path / "tier" / name
    path.unlink()
    odd(path)

    if odd is make_folder:  # Nothing can take its place.
        with pytest.raises(UnavailableError, match="tier cannot be used: Is a directory"):
            make()
    else:
        again = StoreRig(make(), LAYOUT)
        assert again.find(saved.keys) == [name != "generations"] * 2
        assert odd is not make_link or (tmp_path / "elsewhere").read_bytes() == b"not ours"


@pytest.mark.parametrize("odd", [make_fifo, make_link])
def test_a_lock_that_is_no_file_is_refused(
    make: Callable[..., DiskTier], tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    make().close(deadline=time.monotonic() + WAIT_S)
    path = tmp_path / "tier" / "lock"
    path.unlink()
    odd(path)

    with pytest.raises(UnavailableError, match=r"lock is no regular file|cannot be used: Too many"):
        make()


@ODD
def test_a_form_that_cannot_be_written_keeps_no_block_from_being_saved(
    make: Callable[..., DiskTier], tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    rig = StoreRig(make(), LAYOUT)
    odd(tmp_path / "tier" / f"{rig.arena.form.fingerprint.hex()}.form")

    ended = rig.save_and_wait(rig.fill(2))

    assert ended.faults == ()
    assert rig.tier.state().on


@pytest.mark.parametrize("replace", [None, make_fifo, make_link, make_folder])
def test_a_segment_that_is_removed_is_missed_and_nothing_else_is(
    make: Callable[..., DiskTier],
    tmp_path: Path,
    replace: Callable[[Path], None] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = StoreRig(make(), LAYOUT)
    other = StoreRig(rig.tier, LAYOUTS["less than a page"])
    lost, kept = rig.fill(4), other.fill(4)
    rig.save_and_wait(lost)
    other.save_and_wait(kept)
    (tmp_path / "tier" / "00000000.segment").unlink()
    if replace is not None:
        replace(tmp_path / "tier" / "00000000.segment")

    ended = rig.load_and_wait(lost.keys, range(10, 14))
    written = rig.save_and_wait(rig.fill(4, seed=2))
    again = rig.save_and_wait(rig.fill(4))

    assert [fault for _, fault in ended.faults] == [BlockFault.MISSING] * 4
    assert rig.tier.state().on
    assert written.faults == again.faults == ()
    assert rig.load_and_wait(lost.keys, range(10, 14)).faults == ()
    rig.require(lost, range(10, 14))
    assert other.load_and_wait(kept.keys, range(10, 14)).faults == ()
    assert "is off" not in caplog.text


def test_a_save_into_a_segment_that_is_removed_fails_and_the_next_does_not(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    rig = StoreRig(make(), LAYOUT)
    rig.save_and_wait(rig.fill(4))
    (tmp_path / "tier" / "00000000.segment").unlink()

    ended = rig.save_and_wait(rig.fill(4, seed=2))
    again = rig.save_and_wait(rig.fill(4, seed=2))

    assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 4
    assert again.faults == ()
    assert rig.tier.state().on


@pytest.mark.parametrize(
    ("field", "value"), [("slot_count", 0), ("slot_bytes", 4096), ("block_bytes", 1 << 40)]
)
def test_a_head_whose_numbers_cannot_be_is_a_file_without_a_head(
    make: Callable[..., DiskTier], tmp_path: Path, field: str, value: int
) -> None:
    rig = StoreRig(make(), LAYOUT)
    rig.save_and_wait(rig.fill(4))
    rig.tier.close(deadline=time.monotonic() + WAIT_S)
    path = tmp_path / "tier" / "00000000.segment"
    raw = path.read_bytes()
    head = np.frombuffer(raw[: HEAD.itemsize], dtype=HEAD).copy()
    head[field] = value
    path.write_bytes(seal_head(head) + raw[PAGE_BYTES:])

    again = StoreRig(make(), LAYOUT)

    assert again.tier.state().blocks == 0
    assert again.save_and_wait(again.fill(4)).faults == ()


def test_files_are_opened_in_the_folder_that_was_locked(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    """Somebody turns the path elsewhere: nothing is read from there or written there."""
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    (tmp_path / "tier").rename(tmp_path / "moved")
    forged = tmp_path / "forged"
    shutil.copytree(tmp_path / "moved", forged)
    (forged / "00000000.segment").write_bytes(b"forged")
    (tmp_path / "tier").symlink_to(forged)

    ended = rig.load_and_wait(saved.keys, range(10, 14))
    rig.save_and_wait(rig.fill(2, seed=2))

    assert ended.faults == ()
    rig.require(saved, range(10, 14))
    assert (forged / "00000000.segment").read_bytes() == b"forged"
    assert not rig.tier.state().on


class SmallFileSystem:
    """A file system of so many bytes, of which others take some."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self._folder = folder
        self.calls = DiskCalls(statvfs=self._statvfs, fallocate=self._fallocate)

    @property
    def free_bytes(self) -> int:
        used = sum(each.stat().st_size for each in self._folder.glob("*.segment"))
        return max(0, self.total_bytes - self.others_bytes - used)

    def _statvfs(self, _folder: int) -> os.statvfs_result:
        blocks = self.free_bytes // 4096
        return os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        if length > self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, length)


def test_a_size_beyond_the_file_system_uses_what_there_is(
    make: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallFileSystem(tmp_path / "tier", 4 << 20)
    rig = StoreRig(make(2000 << 30, calls=disk.calls), LAYOUT)

    groups = [rig.fill(8, seed=seed) for seed in range(1, 60)]
    for seed in range(1, 60):
        assert rig.save_and_wait(rig.fill(8, seed=seed)).faults == ()

    state = rig.tier.state()
    files = list((tmp_path / "tier").glob("*.segment"))
    assert state.on
    assert (4 << 20) * 0.9 < state.capacity_bytes <= 4 << 20
    assert len(files) >= 7
    assert sum(each.stat().st_size for each in files) <= 4 << 20
    assert rig.load_and_wait(groups[-1].keys, range(10, 18)).faults == ()
    rig.require(groups[-1], range(10, 18))
    told = [each for each in caplog.messages if "the file system of" in each]
    assert told == [
        f"the file system of {tmp_path / 'tier'} has room for {state.capacity_bytes} bytes: the "
        f"tier uses so much, not {2000 << 30}"
    ]


def test_room_that_others_free_is_used_again(make: Callable[..., DiskTier], tmp_path: Path) -> None:
    disk = SmallFileSystem(tmp_path / "tier", 16 << 20)
    disk.others_bytes = 14 << 20
    rig = StoreRig(make(SIZE_BYTES, calls=disk.calls), LAYOUT)
    for seed in range(1, 30):
        assert rig.save_and_wait(rig.fill(8, seed=seed)).faults == ()
    before = rig.tier.state().capacity_bytes

    disk.others_bytes = 0
    for seed in range(30, 60):
        assert rig.save_and_wait(rig.fill(8, seed=seed)).faults == ()

    assert before <= 2 << 20
    assert rig.tier.state().capacity_bytes == SIZE_BYTES


def test_a_file_system_without_room_for_two_blocks_switches_the_tier_off(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    disk = SmallFileSystem(tmp_path / "tier", 16 << 10)
    rig = StoreRig(make(SIZE_BYTES, calls=disk.calls), LAYOUT)

    ended = rig.save_and_wait(rig.fill(2))

    assert ended.failure == "no segment can be begun: No space left on device"
    assert not rig.tier.state().on
