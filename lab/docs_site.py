"""What mkdocs does not do by itself for the pages in `docs/`, which are written for GitHub, too.

`mkdocs.yml` names this file as its hook. Pages from outside `docs/` become pages of the site and
links to them lead there; fences lose the words that only the tests read (`gpu`, `file=NAME`);
`reference_pages` adds what is made from the code; anchors are those of GitHub; decision records are
outside the menu and the search, and the first one lists them. A link to something the site does not
have is a warning, which ends a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

from lab.reference_pages import completed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"

ADOPTED = {
    "README.md": "first-example.md",
    "LICENSE": "license.txt",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "src/penstock/handoff/protocol/PROTOCOL.md": "handoff-protocol.md",
}
"""Pages from elsewhere in the repository, and where the site has them."""

EXAMPLES = "examples.md"
SHOWN = {
    "examples/*.py": "python",
    "deploy/Containerfile": "dockerfile",
    "deploy/kubernetes/*.yaml": "yaml",
}
"""Files that are shown there, each as a block in its language."""

SEARCH_BOOSTS = {
    "why-misses.md": 4,
    "changelog.md": 0.1,
}
"""What the search weighs more or less than other pages: who searches for a message wants a remedy
before why something was built as it is."""

DECISIONS = "decisions/"
FIRST_DECISION = "decisions/0001-record-decisions.md"

FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,}) *(?P<words>[^`\n]*)$")
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
ITEM = re.compile(r"(?:[-*]|1\.) ")
ANY_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_slug
    return config


def github_slug(title: str, separator: str) -> str:
    """The anchor that GitHub gives a heading, as `tests/test_docs.py` expects it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, place in ADOPTED.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=content))
    files.append(File.generated(config, EXAMPLES, content=examples_page()))
    return files


def examples_page() -> str:
    how = "after `make demo` has set it up: `.venv/bin/python examples/chat.py`."
    parts = [f"# Examples\n\nPrograms run from a clone, {how}\n"]
    for pattern, language in SHOWN.items():
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            parts.append(f"## {path.name}\n\n```{language}\n{text}```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    place = page.file.src_uri
    for beginning, boost in SEARCH_BOOSTS.items():
        if place.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    if place.startswith(DECISIONS):
        page.meta["search"] = {"exclude": True}
    if place == FIRST_DECISION:
        markdown += list_of_decisions()
    source = {site: path for path, site in ADOPTED.items()}.get(place, f"{DOCS}/{place}")
    return rewritten(completed(markdown), lambda target: site_link(target, source, place))


def list_of_decisions() -> str:
    """A link to every record, under its title."""
    lines = ["", "## All decisions", ""]
    for path in sorted((ROOT / DOCS / DECISIONS).glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def rewritten(markdown: str, link: Callable[[str], str]) -> str:
    """A page with the fences, lists and links that Python-Markdown understands."""
    lines: list[str] = []
    fence = ""
    for line in markdown.splitlines():
        opening = FENCE.match(line)
        if fence:
            if line.startswith(fence) and not line.strip("`~ "):
                fence = ""
            lines.append(line)
        elif opening:
            fence = opening["fence"]
            lines.append(fence_line(fence, opening["words"].split()))
        else:
            if begins_a_list(line, lines[-1] if lines else ""):
                lines.append("")
            lines.append(LINK.sub(lambda found: link(found[0]), line))
    return "\n".join(lines) + "\n"


def fence_line(fence: str, words: list[str]) -> str:
    language = words[0] if words else "text"
    files = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    title = f' title="{files[0]}"' if files else ""
    return f"{fence}{language}{title}"


def begins_a_list(line: str, before: str) -> bool:
    """Whether a list begins right below a paragraph, which only GitHub takes for a list."""
    return bool(ITEM.match(line) and before.strip() and not ANY_ITEM.match(before)) and not (
        before.startswith("  ")
    )


def site_link(target: str, source: str, place: str) -> str:
    """A link of the file `source`, as one of the page that the site has at `place`."""
    if re.match(r"[a-z]+:|#", target):
        return target
    path, hash_, anchor = target.partition("#")
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    found = ADOPTED.get(linked)
    if linked.startswith(("examples/", "deploy/")):
        found, hash_, anchor = EXAMPLES, "#", github_slug(posixpath.basename(linked), "-")
    elif not found and linked.startswith(f"{DOCS}/"):
        found = linked.removeprefix(f"{DOCS}/")
    if not found:
        log.warning("%s: the site has no page for %s", source, target)
        return target
    return posixpath.relpath(found, posixpath.dirname(place) or ".") + hash_ + anchor
