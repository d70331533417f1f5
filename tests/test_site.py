"""`make docs`: the pages become a site that has everything it needs, and works from a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.tiers.host import slots_in
from tests.serve.browser import PROGRAM, browsing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.browser import BrowserPage

pytest.importorskip("mkdocs", reason="mkdocs-material is not installed: make docs")
from lab.docs_site import rewritten, site_link

ROOT = Path(__file__).resolve().parent.parent
BUILD_S = 300.0
Loaded = dict[Path, set[str]]
LOADED = re.compile(
    r"<(?:link|script|img|iframe|source)\b[^>]*?\s(?:href|src|srcset)=[\"']?([^\"'\s>]+)"
)
"""What tags make a browser load."""
SHOWN_ON_A_PHONE = ("index", "serving", "performance", "comparison", "contributing", "metrics")
"""One page of each section, among them wide tables; the long tests take all pages."""


def is_remote(address: str) -> bool:
    return re.match(r"(https?:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_search_weighs_remedies_more_and_leaves_decisions_out(site: Path) -> None:
    text = next((site / "search").glob("search_index.js*")).read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])

    boosts: dict[str, set[float]] = {}
    for entry in index["docs"]:
        kind = entry["location"].partition("/")[0].partition(".")[0]
        boosts.setdefault(kind, set()).add(entry.get("boost", 1))

    assert max(boosts["changelog"]) < 1 < min(boosts["why-misses"])
    assert "decisions" not in boosts


def test_records_of_decisions_are_listed_on_the_first_one_alone(site: Path) -> None:
    records = sorted(path.stem for path in ROOT.glob("docs/decisions/*.md"))

    first = (site / "decisions" / f"{records[0]}.html").read_text(encoding="utf-8")

    assert [name for name in records if f'href="{name}.html"' not in first] == []
    assert "decisions/0002" not in (site / "contributing.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def loaded(site: Path) -> Loaded:
    pages = site.rglob("*.html")
    return {path: set(LOADED.findall(path.read_text(encoding="utf-8"))) for path in pages}


@pytest.fixture(scope="module")
def page(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    if not PROGRAM:
        pytest.skip("there is no chromium here")
    with browsing(tmp_path_factory.mktemp("profile")) as opened:
        opened.show(width=1400)
        opened.open((site / "planning.html").as_uri())
        yield opened


def test_every_page_of_the_project_is_a_page_of_the_site(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md")]
    wanted = [*pages, Path("first-example.md"), Path("handoff-protocol.md"), Path("examples.md")]

    assert not [path for path in wanted if not (site / path.with_suffix(".html")).is_file()]


def test_no_page_loads_anything_from_another_site(site: Path, loaded: Loaded) -> None:
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]

    assert len(loaded) > 50
    assert all(loaded.values())
    assert not {path: found for path, found in loaded.items() if any(map(is_remote, found))}
    assert not [style for style in styles if re.search(r"url\(['\"]?(https?:)?//", style)]


def test_what_a_page_loads_is_there(loaded: Loaded) -> None:
    missing = [
        (path.name, address)
        for path, found in loaded.items()
        if path.name != "404.html"  # Its addresses begin at the root of a server.
        for address in found
        if not address.startswith("data:") and not (path.parent / address).is_file()
    ]

    assert not missing


def test_the_search_works_in_a_page_that_was_opened_from_a_file(page: BrowserPage) -> None:
    page.run("""(() => {
        document.querySelector("[data-md-toggle=search]").click();
        const query = document.querySelector("[data-md-component=search-query]");
        query.focus();
        query.value = "landing area";
        query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    })()""")

    page.wait("document.querySelectorAll('.md-search-result__item').length > 3")

    assert not page.errors


def test_the_calculator_counts_as_the_host_tier_does(page: BrowserPage) -> None:
    shapes = product((1, 32), (1, 8), (3, 128), (2,), (False, True), (1, 16), (0.01, 7))
    for layers, heads, channels, number, latent, block_tokens, gib in shapes:
        own = 1 if latent else heads
        block = layers * own * channels * number * block_tokens * (1 if latent else 2)
        given = (
            f"{{layers: {layers}, heads: {heads}, channels: {channels}, bytes: {number}, ranks: 1, "
            f"latent: {str(latent).lower()}, blockTokens: {block_tokens}, gib: {gib}}}"
        )

        counted = page.run(f"penstockSize({given}).blocks")

        assert counted == slots_in(int(gib * (1 << 30)), block, layers * own), given


def test_the_calculator_answers_what_is_put_in_and_refuses_what_is_not_possible(
    page: BrowserPage,
) -> None:
    def answer(name: str, value: str) -> str:
        page.run(f"""(() => {{
            const field = document.querySelector("#calculator [name={name}]");
            field.value = {value!r};
            field.dispatchEvent(new Event("input", {{ bubbles: true }}));
        }})()""")
        text: str = page.run("document.querySelector('#calculator output').textContent")
        return text

    assert "64 GiB hold 32,736 blocks: 523,776 tokens" in answer("gib", "64")
    assert "All ranks together take 256 GiB" in answer("ranks", "4")
    assert answer("ranks", "3") == "8 KV heads cannot be split over 3 ranks."
    assert answer("layers", "") == "One of the numbers is missing or not possible."


@pytest.mark.parametrize("pages", [*SHOWN_ON_A_PHONE, pytest.param("**/*", marks=pytest.mark.long)])
def test_a_page_fits_a_phone_and_asks_nobody_for_anything(
    pages: str, site: Path, page: BrowserPage
) -> None:
    page.show(width=400)
    found = sorted(site.glob(f"{pages}.html"))
    assert found
    for path in found:
        if path.name == "404.html":  # Its addresses begin at the root of a server.
            continue
        page.open(path.as_uri())

        width = page.run("document.documentElement.scrollWidth")
        asked = page.run("performance.getEntriesByType('resource').map((each) => each.name)")

        assert width <= 400, path
        assert not [address for address in asked if not address.startswith(("file:", "data:"))]
    assert not page.errors


def test_fences_and_lists_are_written_as_the_site_reads_them() -> None:
    page = "Text:\n- one\n- two\n\n```toml file=a.toml long\n- [x](y.md)\n```\n\n[x](y.md)\n"

    assert rewritten(page, str.upper) == (
        'Text:\n\n- one\n- two\n\n```toml title="a.toml"\n- [x](y.md)\n```\n\n[x](Y.MD)\n'
    )


@pytest.mark.parametrize(
    ("target", "source", "place", "expected"),
    [
        ("../CONTRIBUTING.md#pages", "docs/a.md", "a.md", "contributing.md#pages"),
        ("../README.md", "docs/a.md", "a.md", "first-example.md"),
        ("../../CHANGELOG.md", "docs/start/a.md", "start/a.md", "../changelog.md"),
        ("../examples/chat.py", "docs/a.md", "a.md", "examples.md#chatpy"),
        ("docs/cli.md#doctor", "CONTRIBUTING.md", "contributing.md", "cli.md#doctor"),
        ("#here", "docs/a.md", "a.md", "#here"),
    ],
)
def test_links_lead_to_pages_of_the_site(
    target: str, source: str, place: str, expected: str
) -> None:
    assert site_link(target, source, place) == expected


def test_a_link_that_the_site_cannot_follow_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    site_link("../Makefile", "docs/a.md", "a.md")

    assert "the site has no page for ../Makefile" in caplog.text
