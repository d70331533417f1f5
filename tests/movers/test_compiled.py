"""The library of compiled code: built once for its sources, beside them, and by pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.errors import UnavailableError
from penstock.movers import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(compiled.__file__).parents[1]
LIMIT_S = 300.0
needs_compiler = pytest.mark.skipif(
    compiled.find_compiler() is None, reason="there is no C compiler"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The sources of a tree that was not installed."""
    made = tmp_path / "movers"
    kept = shutil.ignore_patterns("compiled-*", "__pycache__")
    shutil.copytree(compiled.FOLDER, made, ignore=kept)
    monkeypatch.setattr(compiled, "FOLDER", made)
    compiled.load_library.cache_clear()
    yield made
    compiled.load_library.cache_clear()


def made_in(folder: Path) -> list[Path]:
    """Libraries, and what a build leaves behind."""
    return sorted(folder.glob("compiled-*"))


@needs_compiler
def test_it_is_built_once_for_its_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.load_library()
    monkeypatch.setenv("CC", "/no/compiler")
    compiled.load_library.cache_clear()

    again = compiled.load_library()

    assert made_in(folder) == [compiled.library_path()] == [Path(again._name)]


@needs_compiler
def test_other_sources_get_a_library_in_the_place_of_the_older_one(folder: Path) -> None:
    older = compiled.build()
    source = folder / "parts.c"
    source.write_bytes(source.read_bytes() + b"int penstock_newer(void) { return 7; }\n")

    found = compiled.load_library()

    assert found.penstock_newer() == 7
    assert made_in(folder) == [compiled.library_path()] != [older]


@needs_compiler
def test_a_source_that_cannot_be_compiled_is_named_and_leaves_nothing_behind(
    folder: Path,
) -> None:
    source = folder / "stored_blocks.c"
    source.write_bytes(b"\nthis is not C\n" + source.read_bytes())

    with pytest.raises(UnavailableError, match=r"failed: stored_blocks\.c:2:.* error: "):
        compiled.load_library()

    assert made_in(folder) == []


def test_without_library_and_compiler_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.fspath(folder))
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(UnavailableError) as raised:
        compiled.load_library()

    assert str(raised.value).startswith(f"Penstock's compiled code is not in {folder}, and there")
    assert "apt-get install gcc" in str(raised.value)


def test_a_compiler_that_does_not_run_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/no/compiler")

    with pytest.raises(UnavailableError, match=f"cannot be built in {folder}: .*/no/compiler"):
        compiled.load_library()

    assert made_in(folder) == []


def test_a_library_that_cannot_be_loaded_is_named(folder: Path) -> None:
    compiled.library_path().write_bytes(b"not a library")

    with pytest.raises(UnavailableError, match=f"cannot be loaded: .*Remove {folder}/compiled-"):
        compiled.load_library()


def test_what_needs_it_cannot_be_imported_without_it(tmp_path: Path) -> None:
    kept = shutil.ignore_patterns("compiled-*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "penstock", ignore=kept)
    alone = {**os.environ, "PYTHONPATH": os.fspath(tmp_path), "PATH": os.fspath(tmp_path)}
    alone.pop("CC", None)

    ended = subprocess.run(
        [sys.executable, "-c", "import penstock; print(penstock.__version__); penstock.Cache"],
        env=alone,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (1, f"{penstock.__version__}\n")
    error = ended.stderr.splitlines()[-1]
    assert error.startswith("penstock.errors.UnavailableError: Penstock's compiled code is not in")


@needs_compiler
def test_processes_that_need_it_at_once_all_get_it(tmp_path: Path) -> None:
    kept = shutil.ignore_patterns("compiled-*", "__pycache__")
    tree = tmp_path / "penstock"
    shutil.copytree(PACKAGE / "movers", tree / "movers", ignore=kept)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, tree)
    loads = "from penstock.movers.compiled import load_library; print(load_library()._name)"
    alone = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}

    started = [
        subprocess.Popen(
            [sys.executable, "-c", loads], env=alone, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [each.communicate(timeout=LIMIT_S)[0].strip() for each in started]

    [library] = made_in(tree / "movers")
    assert said == [str(library)] * 3
