"""What a reset of a disk tier voids stays void, whichever of its files are put back."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
from xxhash import xxh3_64_hexdigest

from lab.fixtures.store_tier_suite import (
    LAYOUTS,
    SPACE,
    WAIT_S,
    StoreRig,
    wait_for_news,
    wait_until_recovered,
)
from penstock.errors import UnavailableError
from penstock.store.base import NewGeneration, Space
from penstock.store.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab.fixtures.store_tier_suite import Saved

LAYOUT = LAYOUTS["whole pages"]
SIZE_BYTES = 8 << 20
OTHER = b"another one here"


class Lives:
    """The lives of one tier, each in a process of its own as far as the folder is concerned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tier: DiskTier | None = None

    def begin(self) -> StoreRig:
        self.end()
        self.tier = DiskTier(self.folder, SIZE_BYTES, retry_s=0.02)
        wait_until_recovered(self.tier)
        return StoreRig(self.tier, LAYOUT)

    def end(self) -> None:
        if self.tier is not None:
            self.tier.close(deadline=time.monotonic() + WAIT_S)
            self.tier = None


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    made = Lives(tmp_path / "tier")
    yield made
    made.end()


class History(NamedTuple):
    """A folder with blocks that a reset has voided."""

    old: Saved
    before: int
    """The generation that was voided."""
    after: int
    kept: Path
    """The folder as it was before the reset."""


def void_and_keep(lives: Lives, *, rows_since: bool) -> History:
    """Blocks are saved, a reset voids them, and, if so, others are saved after it."""
    rig = lives.begin()
    before = rig.generation(SPACE.name)
    old = rig.fill(6)
    assert rig.save_and_wait(old).faults == ()
    lives.end()
    kept = lives.folder.with_name("kept")
    shutil.copytree(lives.folder, kept)
    rig = lives.begin()
    after = rig.void(SPACE.name)
    if rows_since:
        assert rig.save_and_wait(rig.fill(2, seed=2)).faults == ()
    lives.end()
    return History(old, before, after, kept)


def served(rig: StoreRig, history: History) -> int:
    """How many of the voided blocks are delivered under the generation that counts now."""
    ended = rig.load_and_wait(history.old.keys, range(20, 26))
    return len(history.old.keys) - len(ended.faults)


def put_back(history: History, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copy2(history.kept / name, folder / name)


@pytest.mark.parametrize("rows_since", [True, False], ids=["rows since", "no rows since"])
def test_an_older_copy_of_the_generations_brings_nothing_back(
    lives: Lives, caplog: pytest.LogCaptureFixture, *, rows_since: bool
) -> None:
    history = void_and_keep(lives, rows_since=rows_since)
    put_back(history, lives.folder, "generations")

    rig = lives.begin()

    assert served(rig, history) == 0
    assert rig.generation(SPACE.name) not in {history.before, history.after}
    assert rig.tier.state().blocks == 0
    assert "no block that was saved before is used again" in caplog.text
    assert rig.tier.state().generations_lost == 1


def test_a_reset_never_counts_to_a_generation_of_before(lives: Lives) -> None:
    history = void_and_keep(lives, rows_since=True)
    put_back(history, lives.folder, "generations", "generations.copy")

    drawn = []
    for _ in range(3):
        rig = lives.begin()
        drawn.append(rig.void(SPACE.name))
        assert served(rig, history) == 0
        assert rig.find(rig.fill(2, seed=2).keys) == [False, False]

    assert not {*drawn} & {history.before, history.after}
    assert len({*drawn}) == 3
    assert [*drawn] == sorted(drawn)


def test_rows_prove_that_both_records_were_put_back(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    history = void_and_keep(lives, rows_since=True)
    put_back(history, lives.folder, "generations", "generations.copy", "lock")

    rig = lives.begin()

    assert served(rig, history) == 0
    assert "no block that was saved before is used again" in caplog.text


def test_a_segment_that_was_not_put_back_proves_that_the_others_were(lives: Lives) -> None:
    rig = lives.begin()
    old = rig.fill(6)
    rig.save_and_wait(old)
    lives.end()
    kept = lives.folder.with_name("kept")
    shutil.copytree(lives.folder, kept)
    rig = lives.begin()
    before, after = rig.generation(SPACE.name), rig.void(SPACE.name)
    # Blocks of another form lie in a segment of their own.
    other = StoreRig(rig.tier, LAYOUTS["less than a page"])
    other.save_and_wait(other.fill(2))
    lives.end()
    for path in kept.iterdir():
        shutil.copy2(path, lives.folder)

    rig = lives.begin()

    assert served(rig, History(old, before, after, kept)) == 0


@pytest.mark.parametrize("name", ["generations.copy", "lock"])
@pytest.mark.parametrize("damage", ["put back", "removed", "cut"])
def test_a_file_beside_the_generations_may_be_lost_and_nothing_else_is(
    lives: Lives, name: str, damage: str
) -> None:
    history = void_and_keep(lives, rows_since=True)
    path = lives.folder / name
    match damage:
        case "put back":
            put_back(history, lives.folder, name)
        case "removed":
            path.unlink()
        case "cut":
            path.write_bytes(b"")

    rig = lives.begin()

    assert served(rig, history) == 0
    assert rig.generation(SPACE.name) == history.after
    assert rig.find(rig.fill(2, seed=2).keys) == [True, True]


def test_a_space_that_was_never_reset_is_kept_beside_one_that_was(lives: Lives) -> None:
    rig = lives.begin()
    kept = rig.fill(2)
    rig.save_and_wait(kept, space=Space(OTHER, 0))
    rig.void(SPACE.name)

    again = lives.begin()

    assert again.find(kept.keys, space=Space(OTHER, 0)) == [True, True]


def test_segments_that_are_put_into_a_new_folder_are_not_used(lives: Lives) -> None:
    history = void_and_keep(lives, rows_since=False)
    shutil.rmtree(lives.folder)
    lives.begin().generation(SPACE.name)
    lives.end()
    for path in history.kept.glob("*.segment"):
        shutil.copy2(path, lives.folder)

    rig = lives.begin()

    assert served(rig, history) == 0


@pytest.mark.parametrize("whole", [True, False], ids=["folder", "files in place"])
def test_a_process_that_lives_on_remembers_what_it_has_voided(lives: Lives, *, whole: bool) -> None:
    """The folder of a backup takes the place of the folder, or its files that of the files."""
    history = void_and_keep(lives, rows_since=False)
    rig = lives.begin()
    generation = rig.void(SPACE.name)
    if whole:
        lives.folder.rename(lives.folder.with_name("moved"))
        shutil.copytree(history.kept, lives.folder)
        assert rig.save_and_wait(rig.fill(1, seed=3)).faults  # It is noticed.
        wait_until_on(rig)
        wait_until_recovered(rig.tier)
    else:
        put_back(history, lives.folder, *(each.name for each in history.kept.iterdir()))

    living = served(rig, history)
    saved = rig.fill(2, seed=4)
    if whole:
        assert rig.save_and_wait(saved).faults == ()
    again = lives.begin()

    assert living == 0
    assert again.generation(SPACE.name) == generation
    assert served(again, history) == 0
    assert not whole or again.find(saved.keys) == [True, True]


def wait_until_on(rig: StoreRig) -> None:
    deadline = time.monotonic() + WAIT_S
    while not rig.tier.state().on:
        assert time.monotonic() < deadline, rig.tier.state()
        wait_for_news(rig.tier, 1.0)


def write_counted(folder: Path, generations: dict[bytes, int]) -> None:
    """As versions before this one did: counted generations, and no second record."""
    spaces = {name.hex(): number for name, number in generations.items()}
    inner = json.dumps(spaces, sort_keys=True, separators=(",", ":"))
    content = {"generations": spaces, "sum": xxh3_64_hexdigest(inner.encode()), "version": 1}
    (folder / "generations").write_text(json.dumps(content))
    (folder / "generations.copy").unlink(missing_ok=True)


@pytest.mark.parametrize("listed", [{}, {SPACE.name: 0}, {SPACE.name: 3}])
def test_a_folder_with_counted_generations_keeps_its_blocks(
    lives: Lives, listed: dict[bytes, int]
) -> None:
    counted = Space(SPACE.name, listed.get(SPACE.name, 0))
    rig = lives.begin()
    lives.end()
    write_counted(lives.folder, {SPACE.name: counted.generation})
    rig = lives.begin()
    kept = rig.fill(4)
    assert rig.generation(SPACE.name) == counted.generation
    assert rig.save_and_wait(kept).faults == ()
    lives.end()
    write_counted(lives.folder, listed)

    again = lives.begin()
    found = again.find(kept.keys)
    generation = again.void(SPACE.name)
    last = lives.begin()

    assert found == [True] * 4
    assert generation > counted.generation
    assert last.generation(SPACE.name) == generation
    assert last.find(kept.keys) == [False] * 4


def test_counted_generations_that_were_put_back_are_noticed(lives: Lives) -> None:
    lives.begin()
    lives.end()
    write_counted(lives.folder, {SPACE.name: 5})
    rig = lives.begin()
    rig.save_and_wait(rig.fill(2))
    lives.end()
    write_counted(lives.folder, {SPACE.name: 4})

    again = lives.begin()

    assert again.generation(SPACE.name) > 5
    assert again.tier.state().blocks == 0


def test_generations_are_drawn_not_counted(tmp_path: Path) -> None:
    def draw(folder: Path) -> list[int]:
        tier = DiskTier(folder, SIZE_BYTES)
        try:
            return [tier.generation(SPACE.name), tier.void(SPACE.name), tier.void(SPACE.name)]
        finally:
            tier.close(deadline=time.monotonic() + WAIT_S)

    drawn = [draw(tmp_path / f"tier-{number}") for number in range(8)]

    assert len({each for column in drawn for each in column}) == 24
    assert all(column == sorted(column) for column in drawn)


def test_a_new_generation_that_cannot_be_kept_twice_is_not_confirmed(lives: Lives) -> None:
    rig = lives.begin()
    rig.generation(SPACE.name)
    copy = lives.folder / "generations.copy"
    copy.unlink()
    copy.mkdir()

    with pytest.raises(UnavailableError, match="generations cannot be written"):
        rig.tier.void(SPACE.name)
    copy.rmdir()
    wait_until_on(rig)

    assert rig.void(SPACE.name) == lives.begin().generation(SPACE.name)


def test_an_engine_that_knows_a_later_generation_is_believed(lives: Lives) -> None:
    """The whole folder was put back, so that nothing in it shows that it was."""
    history = void_and_keep(lives, rows_since=True)
    shutil.rmtree(lives.folder)
    shutil.copytree(history.kept, lives.folder)
    rig = lives.begin()
    assert rig.generation(SPACE.name) == history.before

    rig.tier.expect(SPACE.name, history.after)
    begun = rig.generation(SPACE.name)
    told = rig.tier.take_generations()

    assert begun > history.after
    assert told == [NewGeneration(SPACE.name, begun)]
    assert served(rig, history) == 0
    again = lives.begin()
    again.tier.expect(SPACE.name, history.after)
    again.tier.expect(SPACE.name, history.before)
    assert again.generation(SPACE.name) == begun
    assert again.tier.take_generations() == []
