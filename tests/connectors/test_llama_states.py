"""The folder of llama.cpp's states, without llama.cpp: files, bounds, damage, other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.connectors.llama_cpp.states import LEFT_OVER_S, StateFolder, common_tokens
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

KEY, OTHER_KEY = bytes(range(16)), bytes(16)
NO_LOGITS = np.empty((0, 8), dtype=np.single)
STATE = bytes(1_000)
FILE_BYTES = 16 + 4 * 20 + 1_000
"""Of a state of 20 tokens without logits."""
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from penstock.connectors.llama_cpp.states import StateFolder
folder, begin = StateFolder(Path(sys.argv[1]), 10_960), int(sys.argv[2])
for number in range(begin, begin + 200):
    tokens = np.full(20, number, dtype=np.intc)
    folder.write(bytes(16), tokens, bytes([number % 256]) * 1_000, np.empty(0, dtype=np.single))
    for seen in range(number - 5, number + 1):
        for reach, name in folder.find(bytes(16), np.full(20, seen, dtype=np.intc)):
            found = folder.read(name)
            assert found is None or found.state == bytes([seen % 256]) * 1_000
assert folder.damaged == 0
print("right")
"""


def tokens_of(*parts: tuple[int, int]) -> NDArray[np.intc]:
    """Tokens as (token, how many)."""
    return np.concatenate([np.full(count, token, dtype=np.intc) for token, count in parts])


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "states", 10 * FILE_BYTES)


def test_a_state_comes_back_as_it_was(folder: StateFolder) -> None:
    logits = np.arange(160, dtype=np.single).reshape(20, 8)
    size = folder.write(KEY, tokens_of((7, 20)), b"what llama.cpp wrote", logits)
    ((reach, name),) = StateFolder(folder.path, 1).find(KEY, tokens_of((7, 5), (8, 5)))

    found = folder.read(name)

    assert reach == 5
    assert found is not None
    assert found.tokens.tolist() == [7] * 20
    assert found.state == b"what llama.cpp wrote"
    assert np.array_equal(found.logits, logits.reshape(-1))
    assert (folder.path / name).stat().st_size == size
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.find(OTHER_KEY, tokens_of((7, 20))) == []
    assert folder.find(KEY, tokens_of((9, 20))) == []


def test_the_longest_common_prefix_comes_first(folder: StateFolder) -> None:
    for end in (8, 9, 10):
        folder.write(KEY, tokens_of((7, end), (end, 20)), STATE, NO_LOGITS)

    found = folder.find(KEY, tokens_of((7, 9), (9, 4), (3, 30)))

    assert [reach for reach, _ in found] == [13, 9, 8]
    assert common_tokens(tokens_of((1, 3)), tokens_of((1, 5))) == 3
    assert common_tokens(tokens_of((1, 3)), tokens_of((1, 0))) == 0


def test_a_longer_state_takes_the_place_of_those_that_it_begins_with(folder: StateFolder) -> None:
    saved = [
        folder.write(KEY, tokens_of((7, count)), STATE, NO_LOGITS) for count in (20, 40, 30, 40)
    ]
    folder.write(OTHER_KEY, tokens_of((7, 20)), STATE, NO_LOGITS)

    ((reach, _),) = folder.find(KEY, tokens_of((7, 50)))

    assert reach == 40
    assert saved == [FILE_BYTES, FILE_BYTES + 80, 0, 0]
    assert len(names_in(folder.path)) == 2


def test_the_least_recently_used_leave_when_there_is_no_room(folder: StateFolder) -> None:
    for number in range(10):
        folder.write(KEY, tokens_of((number + 1, 20)), STATE, NO_LOGITS)
    ((_, first),) = folder.find(KEY, tokens_of((1, 20)))
    assert folder.read(first) is not None

    for number in range(10, 13):
        folder.write(OTHER_KEY, tokens_of((number, 20)), STATE, NO_LOGITS)

    assert sum(each.st_size for each in folder.files().values()) == 10 * FILE_BYTES
    assert [bool(folder.find(KEY, tokens_of((n, 20)))) for n in range(1, 6)] == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_a_state_that_never_fits_removes_nothing(folder: StateFolder) -> None:
    folder.write(KEY, tokens_of((1, 20)), STATE, NO_LOGITS)

    with pytest.raises(UnavailableError, match=r"a state is larger than the 0\.0 MB of"):
        folder.write(KEY, tokens_of((2, 20)), bytes(11 * FILE_BYTES), NO_LOGITS)

    assert len(names_in(folder.path)) == 1


@pytest.mark.parametrize("place", [0, 9, 20, 95, 96, 500, -1])
def test_a_flipped_bit_anywhere_is_found_and_the_file_removed(
    folder: StateFolder, place: int
) -> None:
    folder.write(KEY, tokens_of((1, 20)), STATE, NO_LOGITS)
    (name,) = names_in(folder.path)
    raw = bytearray((folder.path / name).read_bytes())
    raw[place] ^= 0x40
    (folder.path / name).write_bytes(raw)

    again = StateFolder(folder.path, folder.capacity_bytes)
    found = [again.read(each) for _, each in again.find(KEY, tokens_of((1, 20)))]

    assert found in ([], [None])
    assert again.damaged == 1
    assert names_in(folder.path) == []


@pytest.mark.parametrize("size", [0, 5, 16, 50, 96, 700])
def test_a_file_that_was_cut_is_found(folder: StateFolder, size: int) -> None:
    folder.write(KEY, tokens_of((1, 20)), STATE, NO_LOGITS)
    (name,) = names_in(folder.path)
    os.truncate(folder.path / name, size)

    again = StateFolder(folder.path, folder.capacity_bytes)
    found = [again.read(each) for _, each in again.find(KEY, tokens_of((1, 20)))]

    assert found in ([], [None])
    assert again.damaged == 1


def test_a_state_that_another_process_removed_is_a_miss(folder: StateFolder) -> None:
    folder.write(KEY, tokens_of((1, 20)), STATE, NO_LOGITS)
    ((_, name),) = folder.find(KEY, tokens_of((1, 20)))
    (folder.path / name).unlink()

    assert folder.read(name) is None
    assert folder.find(KEY, tokens_of((1, 20))) == []
    assert folder.damaged == 0


def test_what_a_killed_process_left_is_removed_later(folder: StateFolder) -> None:
    folder.write(KEY, tokens_of((1, 20)), STATE, NO_LOGITS)
    for name, age in (("old.new", LEFT_OVER_S + 60), ("young.new", 0), ("a letter", 1e6)):
        (folder.path / name).write_bytes(b"1")
        os.utime(folder.path / name, (time.time() - age,) * 2)

    folder.write(KEY, tokens_of((2, 20)), STATE, NO_LOGITS)

    assert [each for each in names_in(folder.path) if not each.endswith(".state")] == [
        "a letter",
        "young.new",
    ]


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name, problem in (
        ("open", "has mode 0777, must have 0700"),
        ("link", "is a symbolic link"),
    ):
        with pytest.raises(UnavailableError, match=problem):
            StateFolder(tmp_path / name, 1_000).find(KEY, tokens_of((1, 20)))


def test_a_file_that_cannot_be_finished_leaves_nothing(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", fail)
    with pytest.raises(OSError, match="No space left"):
        folder.write(KEY, tokens_of((1, 20)), STATE, NO_LOGITS)

    assert names_in(folder.path) == []


def test_processes_that_write_and_read_at_once_find_whole_states_only(tmp_path: Path) -> None:
    path = tmp_path / "states"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, path, str(begin)], stdout=subprocess.PIPE, text=True
        )
        for begin in (0, 100, 5_000)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]

    assert said == ["right\n"] * 3
    # Each of three may have taken the same room.
    assert sum(each.stat().st_size for each in path.iterdir()) <= 12 * FILE_BYTES
