"""What all commands have in common."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import typer

from lab.cli.options import chosen_seeds
from penstock.cli.conventions import ExitStatus, write_json
from penstock.cli.entry import CANNOT_RUN_HERE


def test_the_entry_knows_the_same_status_for_what_cannot_run_here() -> None:
    assert CANNOT_RUN_HERE == ExitStatus.CANNOT_RUN_HERE


@pytest.mark.parametrize(
    ("seed", "seeds", "start", "chosen"),
    [
        (None, None, None, range(100)),
        (None, 5, None, range(5)),
        (None, None, 7, range(7, 107)),
        (None, 5, 7, range(7, 12)),
        (3, None, None, range(3, 4)),
        (0, None, None, range(1)),
    ],
)
def test_seeds_are_one_or_a_number_of_them_from_a_start(
    seed: int | None, seeds: int | None, start: int | None, chosen: range
) -> None:
    assert chosen_seeds(seed=seed, seeds=seeds, start=start, default_count=100) == chosen


@pytest.mark.parametrize(("seeds", "start"), [(5, None), (None, 0), (5, 7)])
def test_one_seed_goes_with_no_number_of_them(seeds: int | None, start: int | None) -> None:
    with pytest.raises(typer.BadParameter, match="goes with neither --seeds nor --start"):
        chosen_seeds(seed=3, seeds=seeds, start=start, default_count=100)


def test_json_goes_into_a_file_whose_folder_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "build" / "result.json"

    write_json(path, {"rows": [1]})

    assert json.loads(path.read_text(encoding="utf-8")) == {"rows": [1]}


def test_json_goes_to_standard_output_for_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("-"), {"rows": [1]})

    assert json.loads(capsys.readouterr().out) == {"rows": [1]}


def test_json_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(typer.BadParameter, match="cannot be written"):
        write_json(tmp_path / "file" / "result.json", {})


def test_a_file_that_is_there_stays_as_it_was_if_there_is_no_room_for_the_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"rows": [1]})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(typer.BadParameter, match=r"result.json cannot be written: File too"):
            write_json(path, {"rows": [1] * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {path.name: before}


def test_what_is_no_file_is_written_in_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    write_json(Path("/dev/stdout"), {"rows": [1]})

    assert json.loads(capfd.readouterr().out) == {"rows": [1]}
