"""README and docs do what they say: their blocks are executed and their links lead somewhere.

`CONTRIBUTING.md` describes how a block is fenced. One page is one session: its blocks run in
order, in one namespace and one empty folder.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from lab.cli.app import run as run_lab
from lab.reference_pages import MARK, PARTS, SIGNATURES
from penstock.cli.entry import main
from penstock.config import parse_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN_ELSEWHERE = {"gpu", "llama", "sglang", "vllm"}
"""Blocks with these words need what this machine may lack; the matching suites execute them."""

FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})(?P<words>[^`]*)$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
COMMAND = re.compile(
    r"^\$ (?P<program>penstock|lab) (?P<arguments>[^>\n]*)(?:> *(?P<output>\S+) *)?$", re.MULTILINE
)

PROGRAMS = {"penstock": main, "lab": run_lab}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    language: str
    words: frozenset[str]
    """What follows the language: `gpu`, `llama`, `sglang`, `vllm`, `long`."""
    file: str
    """The `file=` that the block is the content of; empty for none."""
    text: str
    line: int
    """The line of the page on which the text begins, counted from 1."""


def blocks_of(markdown: str) -> list[Block]:
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    start = 0
    lines = markdown.splitlines()
    for index, line in enumerate(lines):
        if opening is None:
            opening = FENCE.match(line)
            start = index + 1
        elif line.startswith(opening["fence"]) and not line.strip("`~ "):
            blocks.append(block(opening["words"].split(), lines[start:index], start + 1))
            opening = None
    assert opening is None, f"the block that begins in line {start} does not end"
    return blocks


def block(words: list[str], lines: list[str], line: int) -> Block:
    files = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    return Block(
        language=words[0] if words else "",
        words=frozenset(words[1:]),
        file=files[0] if files else "",
        text="".join(f"{text}\n" for text in lines),
        line=line,
    )


def prose_of(markdown: str) -> str:
    """The page without its fenced blocks and code spans, in which links are no links."""
    for found in blocks_of(markdown):
        markdown = markdown.replace(found.text, "")
    return re.sub(r"`[^`\n]*`", "", markdown)


class Session:
    """One page, as a reader would follow it from top to bottom."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.module = ModuleType("page")

    def follow(self, block: Block) -> None:
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            self._execute(block)
        elif block.language in {"console", "sh"}:
            self._run_commands(block)
        elif block.language == "toml" and re.search(r"^version *=", block.text, re.MULTILINE):
            parse_config(block.text, source=f"{self.page.name}:{block.line}")

    def _execute(self, block: Block) -> None:
        # Empty lines in front make the line numbers of a traceback those of the page.
        text = "\n" * (block.line - 1) + block.text
        code = compile(text, self.page, "exec", dont_inherit=True)
        exec(code, vars(self.module))

    def _run_commands(self, block: Block) -> None:
        for found in COMMAND.finditer(block.text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                status = PROGRAMS[found["program"]](shlex.split(found["arguments"], comments=True))
            assert status == 0, f"{self.page.name}: {found[0]} ended with status {status}"
            if found["output"]:
                Path(found["output"]).write_text(printed.getvalue(), encoding="utf-8")


def follow_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, skipped: set[str]
) -> None:
    session = Session(page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, session.module.__name__, session.module)
    for found in blocks_of(page.read_text(encoding="utf-8")):
        if not found.words & skipped:
            session.follow(found)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_blocks_of_a_page_run_as_pasted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow_page(page, tmp_path, monkeypatch, skipped=RUN_ELSEWHERE | {"long"})


def takes_minutes(page: Path) -> bool:
    return any("long" in found.words for found in blocks_of(page.read_text(encoding="utf-8")))


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if takes_minutes(page)], ids=name_of)
def test_the_blocks_of_a_page_run_as_pasted_with_those_that_take_minutes(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow_page(page, tmp_path, monkeypatch, skipped=RUN_ELSEWHERE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    prose = prose_of(page.read_text(encoding="utf-8"))
    targets = [found["target"] or found["image"] for found in LINK.finditer(prose)]

    lost = [target for target in targets if not leads_somewhere(target, page)]

    assert not lost


def leads_somewhere(target: str, page: Path) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # Another site: whether it is up is not for this test to say.
    path, _, heading = target.partition("#")
    linked = (page.parent / path) if path else page
    if not linked.exists() or not linked.resolve().is_relative_to(ROOT):
        return False
    return not heading or heading in headings_of(linked.read_text(encoding="utf-8"))


def headings_of(markdown: str) -> set[str]:
    """The anchors that a page's headings get: lower case, dashes for spaces, no punctuation."""
    titles = re.findall(r"^#+ +(.+?) *$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_part_from_the_code_is_on_one_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]

    wanted = [part for text in texts for part in MARK.findall(text)]

    named = [part for part in wanted if not part.startswith(SIGNATURES)]
    assert sorted(named) == sorted(PARTS)


def test_a_block_knows_its_words_and_its_line() -> None:
    page = "# Title\n\n```python gpu long\nx = 1\n```\n\n````toml file=a.toml\n```\n````\n"

    first, second = blocks_of(page)

    assert (first.language, first.text, first.line) == ("python", "x = 1\n", 4)
    assert first.words == {"gpu", "long"}
    assert (second.language, second.file, second.text) == ("toml", "a.toml", "```\n")


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```python\nassert 1 == 2\n```", AssertionError),
        ("```python\nimport no_such_module\n```", ModuleNotFoundError),
        ('```toml\nversion = 1\nmodel.nam = "m"\n```', ValueError),
        ("```console\n$ penstock config check missing.toml\n```", AssertionError),
        ("```console\n$ penstock no-such-command\n```", AssertionError),
    ],
)
def test_a_page_that_is_wrong_is_found(
    block: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{block}\n", encoding="utf-8")

    with pytest.raises(error):
        follow_page(page, tmp_path, monkeypatch, skipped=set())


@pytest.mark.parametrize("target", ["missing.md", "cli.md#no-such-heading", "../../outside.md"])
def test_a_link_that_leads_nowhere_is_found(target: str) -> None:
    assert not leads_somewhere(target, ROOT / "docs" / "config.md")
