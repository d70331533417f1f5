"""Nothing in the package is left over: what nobody names, nobody calls.

A name counts wherever it stands as a word in the code of the package, of the lab or of an
example. So what is found here is surely unused, while what shares its name with something else
can hide.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "src" / "penstock", ROOT / "server" / "src" / "penstock_serve")
WORD = re.compile(r"[A-Za-z_]\w*")
DEFINED = re.compile(r"\b(?:def|class) +(\w+)")

FOR_TESTS = "testing/"
"""What lies there is used by tests, ours and those of others."""

_CONNECTOR = "vLLM calls it: part of what it asks of a connector"
_STORAGE = "SGLang asks for it of every storage backend, and calls it without `interface_v1`"
_LINKER = "SGLang calls it: part of what it asks of a linker"
_UVICORN = "uvicorn calls it: what its server or a connection of it does"

_AUTHORS = "part of the interface for engine authors, on the pages; Penstock's own do without"

# Each exception: where it is, and why. One that is no longer needed fails the test as well.
CALLED_FROM_ELSEWHERE = {
    "connectors/sglang/linker.py:cancel_queued_load": _LINKER,
    "connectors/sglang/linker.py:pop_completed_offload": _LINKER,
    "connectors/sglang/storage.py:batch_get": _STORAGE,
    "connectors/sglang/storage.py:batch_set": _STORAGE,
    "connectors/vllm/adapter.py:has_pending_push_work": _CONNECTOR,
    "connectors/vllm/adapter.py:save_kv_layer": _CONNECTOR,
    "connectors/vllm/adapter.py:set_xfer_handshake_metadata": _CONNECTOR,
    "connectors/vllm/versions.py:emit": "logging calls it: what a handler does with a record",
    "connectors/vllm/translation.py:is_empty": "vLLM calls it: part of what it asks of statistics",
    "handoff/handoff.py:engine_died": _AUTHORS,
    "server/http.py:capture_signals": _UVICORN,
    "server/http.py:main_loop": _UVICORN,
    "server/http.py:send_400_response": _UVICORN,
    "vocabulary/keys.py:from_anchor": _AUTHORS,
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def named_once(sources: Mapping[str, str]) -> set[str]:
    """What is defined in some files and named nowhere else in any, as `file:name`."""
    words = Counter(word for text in sources.values() for word in WORD.findall(text))
    return {
        f"{file}:{node.name}"
        for file, text in sources.items()
        if not file.startswith(FOR_TESTS)
        # To read a file word by word is quick, to parse it is not.
        if any(words[name] == 1 for name in DEFINED.findall(text))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Definition) and words[node.name] == 1
        if not is_special(node.name) and not is_command(node)
    }


def is_special(name: str) -> bool:
    """Whether Python itself calls it."""
    return name.startswith("__") and name.endswith("__")


def is_command(node: Definition) -> bool:
    """Whether the command line calls it: `@app.command(…)`."""
    called = (each.func for each in node.decorator_list if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr == "command" for each in called)


def package_files() -> dict[str, str]:
    """The files of both wheels."""
    return {
        path.relative_to(package).as_posix(): path.read_text("utf-8")
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
    }


def words_of_callers() -> set[str]:
    """All names in what uses the package: the lab and the examples. A word on a page is no use."""
    callers = [path for folder in ("lab", "examples") for path in (ROOT / folder).rglob("*.py")]
    return {word for path in callers for word in WORD.findall(path.read_text("utf-8"))}


def test_everything_in_the_package_is_used() -> None:
    found = named_once(package_files())

    used = words_of_callers()
    unused = {where for where in found if where.partition(":")[2] not in used}

    assert not sorted(unused - CALLED_FROM_ELSEWHERE.keys())
    assert not CALLED_FROM_ELSEWHERE.keys() - found


def test_what_nobody_names_is_found_and_nothing_else() -> None:
    sources = {
        "one.py": """
class Left:
    def called(self): ...
    @property
    def over(self): ...
    def __len__(self): ...

@app.command("run")
def run_it(): ...

@cache
async def forgotten(): ...
""",
        "two.py": "thing.called()",
        "testing/three.py": "def test_something(): ...",
    }

    found = named_once(sources)

    assert found == {"one.py:Left", "one.py:over", "one.py:forgotten"}
