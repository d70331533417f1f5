"""The facts of the machine that runs the tests: found, or said not to be."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from penstock.doctor.checks import examine
from penstock.doctor.facts import (
    DiskRate,
    MachineFacts,
    measure_disk,
    measure_gpus,
    package_version,
    packages_of,
    port_problem,
    reach_problem,
    room_of,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_this_machine_can_be_examined() -> None:
    findings = examine(MachineFacts())

    assert {"memory", "open files", "clock"} <= {each.check for each in findings}
    assert all(each.seen for each in findings)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rate = measure_disk(str(tmp_path))

    assert isinstance(rate, DiskRate)
    assert min(rate[:2]) > 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_yet_is_measured_where_it_would_be(tmp_path: Path) -> None:
    assert isinstance(measure_disk(str(tmp_path / "a" / "b")), DiskRate)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_refuses_files_says_why() -> None:
    assert "/proc: " in str(measure_disk("/proc"))


def test_a_file_in_the_place_of_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert measure_disk(str(tmp_path / "file" / "kv")) == f"{tmp_path}/file: it is no folder"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_somebody_is_reached_where_somebody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reach_problem("127.0.0.1", port) == ""
    assert reach_problem("127.0.0.1", port) == "Connection refused"
    assert reach_problem("no.such.host.invalid", 1) != ""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(1)
        assert reach_problem(str(tmp_path / "socket"), 0) == ""
    assert reach_problem(str(tmp_path / "none"), 0) == "No such file or directory"


def test_the_packages_of_an_extra_are_known() -> None:
    assert set(packages_of("cli")) == {"typer", "rich"}
    assert {"torch", "tokenizers"} <= set(packages_of("engine")), "of the other wheel"
    assert packages_of("no-such-extra") == []


def test_a_port_is_free_until_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port_problem("127.0.0.1", port) == "Address already in use"

    assert port_problem("127.0.0.1", 0) == ""
    assert port_problem("no.such.host.invalid", port) != ""


def test_room_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    room = room_of(str(tmp_path / "not" / "there"))

    assert room is not None
    assert 0 < room.free_bytes <= room.total_bytes


def test_packages_that_are_not_there_have_no_version() -> None:
    assert package_version("pytest") == pytest.__version__
    assert package_version("no-such-package") is None


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    assert measure_gpus() == "torch finds no CUDA device"
