"""Few modules import vLLM, so that a change of its interfaces is followed in few places."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock.connectors

FOLDER = Path(penstock.connectors.__file__).parent
TESTED_VERSION = {"vllm/adapter", "vllm/translation"}
OTHER_VERSIONS = {"vllm/versions", "vllm/untested"}
"""These run in versions of vLLM of which nothing is known."""
SGLANG = {
    *("sglang/linker", "sglang/waiting", "sglang/versions", "sglang/untested"),
    *("sglang/storage", "sglang/host_pool", "sglang/events"),
}


def parsed() -> dict[str, ast.Module]:
    return {
        path.relative_to(FOLDER).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in FOLDER.rglob("*.py")
    }


def imported(module: ast.Module) -> set[str]:
    """The packages that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def asks_whether_it_is_there(node: ast.AST) -> bool:
    """`hasattr`, or `getattr` with something to fall back on."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    name, given = node.func.id, len(node.args) + len(node.keywords)
    return name == "hasattr" or (name == "getattr" and given == 3)


def test_four_modules_import_vllm_two_of_them_what_the_tested_version_has() -> None:
    knowing = {name for name, module in parsed().items() if "vllm" in imported(module)}

    assert knowing == TESTED_VERSION | OTHER_VERSIONS


def test_seven_modules_import_sglang_and_what_it_keeps_is_described_without_it() -> None:
    knowing = {name for name, module in parsed().items() if "sglang" in imported(module)}

    assert knowing == SGLANG


def test_nothing_is_guessed_by_asking_whether_it_is_there() -> None:
    asking = [
        f"{name}: {ast.unparse(node)}"
        for name, module in parsed().items()
        for node in ast.walk(module)
        if name not in OTHER_VERSIONS and asks_whether_it_is_there(node)
    ]

    assert not asking


def test_the_connector_has_no_threads_but_for_handoffs() -> None:
    threaded = {
        name
        for name, module in parsed().items()
        if imported(module) & {"threading", "concurrent", "asyncio", "multiprocessing"}
    }

    # HiCache calls a storage backend in threads of its own, which wait for each other there.
    assert threaded == {"handoff/requests", "sglang/pool_pages"}
