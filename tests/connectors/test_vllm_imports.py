"""vLLM is known in three modules, so that an interface that moves has one place to move in."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock.connectors.vllm

FOLDER = Path(penstock.connectors.vllm.__file__).parent
FACING_VLLM = {"adapter", "facing", "metrics"}


def parsed() -> dict[str, ast.Module]:
    return {path.stem: ast.parse(path.read_text()) for path in FOLDER.glob("*.py")}


def imported(module: ast.Module) -> set[str]:
    """The packages that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_three_modules_import_vllm() -> None:
    knowing = {name for name, module in parsed().items() if "vllm" in imported(module)}

    assert knowing == FACING_VLLM


def test_nothing_is_guessed_by_asking_whether_it_is_there() -> None:
    asking = [
        f"{name}:{node.lineno}"
        for name, module in parsed().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Name) and node.id == "hasattr"
    ]

    assert not asking


def test_the_connector_has_no_threads() -> None:
    threaded = {
        name
        for name, module in parsed().items()
        if imported(module) & {"threading", "concurrent", "asyncio", "multiprocessing"}
    }

    assert not threaded
