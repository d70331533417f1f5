"""The supervisor is small, and nobody else starts processes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.supervisor.client import Supervisor

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "src" / "penstock", ROOT / "server" / "src" / "penstock_serve")

SUPERVISOR = "supervisor/"
OTHERS = {
    "demo/": "starts the server that it shows, as its user would",
    "movers/compiled.py": "asks the C compiler, once, and waits for it: nothing lives on",
    "replay/plan.py": "replays a trace on all cores, in a pool that ends with the command",
    "testing/": "starts peers that a test may kill",
}
"""Who else may, and why: none leaves one in an engine. One that does not fails the test, too."""

MODULES = {"subprocess", "multiprocessing", "pty", "concurrent.futures.process"}
NAMES = re.compile(r"fork(pty)?|posix_spawnp?|spawn[lv]p?e?|exec[lv]p?e?|system|popen")
POOLS = {"ProcessPoolExecutor"}


def ways_to_start_a_process(source: str) -> Iterator[int]:
    """The lines that import or name one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = any(_is_banned(name.name) for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                found = _is_banned(module) or any(
                    name.name in POOLS or _is_banned(f"{module}.{name.name}") for name in names
                )
            case ast.Attribute(value=ast.Name(id="os"), attr=name):
                found = bool(NAMES.fullmatch(name))
            case _:
                found = False
        if found:
            yield node.lineno


def _is_banned(module: str) -> bool:
    parent, _, name = module.rpartition(".")
    return (
        module in MODULES
        or module.partition(".")[0] in MODULES
        or (parent == "os" and bool(NAMES.fullmatch(name)))
    )


def test_only_the_supervisor_starts_processes() -> None:
    sources = {
        str(path.relative_to(package)): path.read_text()
        for package in PACKAGES
        for path in package.rglob("*.py")
    }

    found = {name: [*ways_to_start_a_process(source)] for name, source in sources.items()}

    starters = {name for name, lines in found.items() if lines}
    allowed = (SUPERVISOR, *OTHERS)
    assert not {name: found[name] for name in starters if not name.startswith(allowed)}
    for folder in allowed:
        assert any(name.startswith(folder) for name in starters), folder


def test_every_way_to_start_a_process_is_seen() -> None:
    ways = """
import subprocess
import multiprocessing.pool
from os import fork
from multiprocessing import Process
from concurrent.futures import ProcessPoolExecutor
os.posix_spawn
os.execv
os.spawnlp
os.system
""".strip()

    assert [*ways_to_start_a_process(ways)] == [*range(1, 10)]


def test_a_supervisor_loads_neither_numpy_nor_torch_and_has_one_thread(
    supervisor: Supervisor,
) -> None:
    process = Path("/proc") / str(supervisor.pid)

    libraries = {line.split()[-1] for line in (process / "maps").read_text().splitlines()}
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())

    assert not [path for path in libraries if re.search(r"numpy|torch|zmq|xxhash", path)]
    assert any("msgspec" in path for path in libraries)  # So libraries would have been seen.
    assert status["Threads"] == "1"
    assert int(status["VmRSS"].split()[0]) < 32 << 10
