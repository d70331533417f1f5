"""The pages about the parts and words of the package describe it as it is."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from lab import charts
from lab.architecture import CAPTIONS, PICTURE, Graph, draw, read_imports, rows_of, without_implied
from lab.cli.app import run as run_lab
from penstock.cli.entry import main

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "penstock"
SERVER = ROOT / "server" / "src" / "penstock_serve"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

WORDS_MAX = 2250
TERMS_MAX = 30
PATH = re.compile(r"`([\w/]+(?:\.py|/))`")
NAME = re.compile(r"(?:\bdef |\bclass |\.)([A-Za-z_]+)")
TERM = re.compile(r"^\| ([a-z ]+) \| ", re.MULTILINE)

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})
FILE = re.compile(
    r"(?<![\w/.])((?:src/penstock|server/src/penstock_serve|lab|tests|examples)/[\w/]+\.py)"
)
DOTTED = re.compile(r"(?:`|\bfrom |\bimport )((?:penstock|penstock_serve|lab)(?:\.\w+)+)")
BENCH = re.compile(r"\b(penstock|lab) bench ([\w-]+)([^\n`]*)")
BENCHES: dict[tuple[str, str], set[str]] = defaultdict(set)
for page in PAGES:
    for program, name, options in BENCH.findall(page.read_text(encoding="utf-8")):
        BENCHES[program, name].add(options)
PROGRAMS = {"penstock": main, "lab": run_lab}


def terms() -> list[str]:
    header, *found = TERM.findall(GLOSSARY)
    assert header == "term"
    return found


@cache
def imports() -> Graph:
    return read_imports(PACKAGE)


def words_in_names() -> set[str]:
    """Every word in the names of the package's code: `HopMeter` has `hop` and `meter`."""
    names = {
        name
        for package in (PACKAGE, SERVER)
        for path in package.rglob("*.py")
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    return {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def test_the_files_on_the_architecture_page_exist() -> None:
    named = PATH.findall(ARCHITECTURE)

    folders = (PACKAGE, PACKAGE / "handoff" / "protocol", PACKAGE / "handoff", SERVER, ROOT)
    missing = [path for path in named if not any((folder / path).exists() for folder in folders)]

    assert len(named) > 50
    assert not missing


ELSEWHERE = {
    "movers/cuda/mover.py": "needs a GPU",
    "movers/table.py": "is asked when the cache is opened",
    "runtime/messages.py": "needs a rank in another process",
    "runtime/rank.py": "needs a rank in another process",
}
"""Files of the first walk that a cache with its one rank in the same process does not visit."""


def visited_by_a_block() -> set[str]:
    """The files whose functions run while a block goes down to host memory and comes up again."""
    config = penstock.parse_config("""
        version = 1
        model.name = "toy"
        cache = { block_tokens = 4, blocks = 8 }
        tiers = [{ name = "host", kind = "host", blocks = 64 }]
    """)
    visited: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            visited.add(frame.f_code.co_filename)

    with penstock.open(config, kv=np.zeros((8, 4, 16), dtype=np.float32)) as opened:
        sys.setprofile(note)
        try:
            cached = [answer(opened, tokens) for tokens in (range(21), range(100, 129), range(21))]
        finally:
            sys.setprofile(None)
    assert cached == [0, 0, 20]
    return visited


def answer(opened: penstock.Cache, tokens: range) -> int:
    with opened.acquire(list(tokens)) as lease:
        while lease.state is penstock.LeaseState.LOADING:
            opened.step()
        lease.commit(list(tokens[lease.cached_tokens :]))
    while opened.busy:
        opened.step()
    opened.step()
    return lease.cached_tokens


def test_the_first_walk_is_the_way_that_a_block_goes() -> None:
    walk = ARCHITECTURE.partition("## A block down and up")[2].partition("\n## ")[0]
    named = {path for path in PATH.findall(walk) if path.endswith(".py")}

    files = visited_by_a_block()
    visited = {name for name in named if str(PACKAGE / name) in files}

    assert len(named) > 15
    assert named - visited == ELSEWHERE.keys()


def test_the_files_in_the_table_of_contributing_exist() -> None:
    table = CONTRIBUTING.partition("## Where does X go?")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+/[\w/]*(?:\.py|\.md)?)`", table)

    missing = [
        path for path in named if not any((at / path).exists() for at in (PACKAGE, SERVER, ROOT))
    ]

    assert len(named) > 25
    assert not missing


def test_the_architecture_page_is_short() -> None:
    assert len(ARCHITECTURE.split()) <= WORDS_MAX


def test_the_architecture_page_describes_every_package() -> None:
    packages = set(imports())
    served = {path.parent.name for path in SERVER.glob("*/__init__.py")}

    assert packages | served <= {path.rstrip("/") for path in PATH.findall(ARCHITECTURE)}
    assert packages == CAPTIONS.keys()


def test_the_picture_shows_the_imports_of_today() -> None:
    drawn = draw(imports())

    assert drawn == PICTURE.read_text(encoding="utf-8"), "run `python -m lab.architecture`"


def test_the_charts_have_the_figures_of_the_tables() -> None:
    drawn = {name: charts.draw(panels) for name, panels in charts.CHARTS.items()}

    stored = {name: (charts.FOLDER / name).read_text(encoding="utf-8") for name in drawn}
    assert drawn == stored, "run `python -m lab.charts`"


@pytest.mark.parametrize(("row", "column"), [("no such row", "a"), ("b", "no such column")])
def test_a_chart_of_a_figure_that_no_table_has_is_not_drawn(row: str, column: str) -> None:
    with pytest.raises(ValueError, match="no such"):
        charts.figure("| | a |\n|---|---|\n| b | 1.5 ms |\n", row, column)


def test_an_arrow_that_follows_from_others_is_not_drawn() -> None:
    graph = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set(), "other": set()}

    assert without_implied(graph)["top"] == {"middle"}
    assert rows_of(graph) == {"top": 2, "middle": 1, "bottom": 0, "other": 0}


def test_the_glossary_is_short_and_sorted() -> None:
    found = terms()

    assert 0 < len(found) <= TERMS_MAX
    assert found == sorted(found)


def test_every_term_of_the_glossary_is_used_in_the_package() -> None:
    used = words_in_names()

    assert [term for term in terms() if not used & {term, f"{term}s"}] == []


def is_there(dotted: str) -> bool:
    """Whether a module exists, or the text of its nearest parent has the next name."""
    first, *names = dotted.split(".")
    at = {"penstock": PACKAGE, "penstock_serve": SERVER}.get(first, ROOT / first)
    while names and ((at / names[0]).is_dir() or (at / f"{names[0]}.py").is_file()):
        at /= names.pop(0)
    files = [at.with_suffix(".py"), at / "__init__.py"]
    # Groups of entry points have names like modules; `extensions.py` lists them.
    files += [PACKAGE / "exports.py", PACKAGE / "extensions.py"] if at == PACKAGE else []
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return not names or any(re.search(rf"\b{names[0]}\b", text) for text in texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    lost = [file for file in FILE.findall(text) if not (ROOT / file).is_file()]
    lost += [dotted for dotted in DOTTED.findall(text) if not is_there(dotted)]

    assert not lost


def test_a_module_or_name_that_is_not_there_is_found() -> None:
    assert is_there("penstock.errors.ConfigError")
    assert is_there("penstock.open")
    assert not is_there("penstock.errors.NoSuchError")
    assert not is_there("penstock.no_such_module")


@pytest.mark.parametrize("command", sorted(BENCHES), ids=" ".join)
def test_a_benchmark_that_a_page_names_exists(
    command: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    program, name = command
    options = {option for each in BENCHES[command] for option in re.findall(r"--[\w-]+", each)}

    status = PROGRAMS[program](["bench", name, "--help"])

    printed = capsys.readouterr().out
    assert status == 0
    assert [option for option in options if option not in printed] == []
