"""docs/architecture.md names a test for everything it claims, and those tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:lab/)?tests/[\w/]+\.py)::(\w+)`", PAGE)

ENCODES = "server/text_endpoint.py"
"""The server's process, which is no engine's, encodes texts in threads: its event loop goes on."""
MAY_START_PROCESSES = (
    *("supervisor/", "movers/compiled.py", "testing/", "demo/", "replay/plan.py"),
    ENCODES,  # It imports `concurrent`, for threads alone.
)
"""The supervisor, for the engine; a C compiler, which ends at once; what measures, tests and shows
it, for itself."""
MAY_HAVE_THREADS = (
    *("testing/", "demo/", "store/disk", "store/shared", "store/stored_tier.py", ENCODES),
    *("connectors/handoff/requests.py", "replay/trace.py", "store/clients/redis"),
    *("store/clients/blobs.py", "store/peers/network.py"),
    *("replay/plan.py",),
    *("store/process/tier_slots", "store/clients/mooncake.py", "store/clients/objects.py"),
    "server/access_log.py",
    "connectors/sglang/pool_pages.py",  # It starts none: those of HiCache wait for each other.
)
"""Nothing that runs in an engine of ours: a benchmark shows what they would cost there. The disk
tier and shared stores, and what opens them, are in the store process. vLLM makes no calls while it
is idle (decision 16). A recording, if one is asked for, is written in the server's process, and
beside vLLM's scheduler; spans, if they are asked for, are sent from the server's process.
The pool of processes of `penstock plan`, a command of its own, has a thread."""
PROCESSES = re.compile(
    # A future that some thread of ours completes starts nothing.
    r"^\s*(import|from) (subprocess|multiprocessing|concurrent)\b"
    r"(?!\.futures import (Future, wait|Future|wait)$)"
    r"|\bos\.(fork|forkpty|posix_spawnp?|spawn\w+|system|popen)\(",
    re.MULTILINE,
)
THREADS = re.compile(
    # Whose thread it is may be asked.
    r"^\s*(import|from) (threading|_thread|concurrent)\b(?! import get_ident$)"
    r"|\brun_in_executor\(|\bto_thread\(",
    re.MULTILINE,
)


def package_files() -> dict[str, Path]:
    """The files of both wheels, by their paths in them."""
    packages = (ROOT / "src" / "penstock", ROOT / "server" / "src" / "penstock_serve")
    return {
        path.relative_to(package).as_posix(): path
        for package in packages
        for path in sorted(package.rglob("*.py"))
    }


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def named_in(section: str) -> list[str]:
    return re.findall(r"`(?:lab/)?tests/[\w/]+\.py::\w+`", section)


def test_every_requirement_names_a_test() -> None:
    sections = re.split(r"^\*\*(R\d+)\.", PAGE, flags=re.MULTILINE)[1:]

    tests = dict(zip(sections[::2], map(named_in, sections[1::2]), strict=True))

    assert list(tests) == [f"R{number}" for number in range(1, 12)]
    assert all(tests.values())


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    assert name in functions_of(ROOT / path)


def test_only_the_supervisor_starts_processes_and_nothing_starts_threads() -> None:
    found = []
    for name, path in package_files().items():
        text = path.read_text(encoding="utf-8")
        if PROCESSES.search(text) and not name.startswith(MAY_START_PROCESSES):
            found.append(f"{name} starts processes")
        if THREADS.search(text) and not name.startswith(MAY_HAVE_THREADS):
            found.append(f"{name} starts threads")

    assert not found
