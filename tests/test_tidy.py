"""The house style, as far as a test can tell it."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lab.architecture import statements_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ("src/penstock/", "server/src/penstock_serve/")

FILE_LINES_MAX = 900
FUNCTION_LINES_MAX = 60
PAGE_LINES_MAX = {"CONTRIBUTING.md": 150}
DECISION_WORDS_MAX = 150

# Each exception: where it is, and why. One that is no longer needed fails the test as well.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
BROAD_EXCEPTS: dict[str, str] = {
    "server/src/penstock_serve/engine/text.py": "tokenizers raises a bare Exception",
    "src/penstock/connectors/sglang/pool_pages.py": "an error is for the thread whose call it is",
    "src/penstock/extensions.py": "an entry point imports code of others, which may raise anything",
    "src/penstock/handoff/driver/decode_rank.py": "one part fails its handoff, not the rank",
    "src/penstock/handoff/driver/prefill_rank.py": "one part fails its handoff, not the rank",
    "src/penstock/store/clients/blobs.py": "a thread that ended would keep its caller waiting",
    "src/penstock/store/disk/threads.py": "a thread that ended would keep its jobs for ever",
    "src/penstock/store/stored_tier.py": "a thread that ended would keep its jobs for ever",
}

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# Spelled in pieces, so that this file does not find itself.
OF_ONE_MACHINE = re.compile(
    "|".join(
        (
            "/" + "work/",
            "/" + "root/",
            "/" + "home/",
            "index" + "-url",
            "find" + "-links",
            r"(pypi|pythonhosted)" + r"\.org",
            r"pytorch" + r"\.org/whl",
        )
    )
)


@cache
def project_files() -> tuple[str, ...]:
    """What belongs to the project, as paths from its root: what git tracks or would add."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if not _is_made(path)]
    return tuple(sorted(name for name in listed if (ROOT / name).is_file()))


def _is_made(path: Path) -> bool:
    """Without git: environments, caches and build results lie in hidden or known folders."""
    parents = path.relative_to(ROOT).parts[:-1]
    return any(
        part in {"build", "dist", "__pycache__"} or (part.startswith(".") and part != ".ci")
        for part in parents
    )


def python_files(*folders: str) -> list[str]:
    return [name for name in project_files() if name.endswith(".py") and name.startswith(folders)]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def line_count(name: str) -> int:
    return len(text_of(name).splitlines())


def lines_matching(pattern: re.Pattern[str], name: str) -> list[str]:
    lines = enumerate(text_of(name).splitlines(), start=1)
    return [f"{name}:{number}: {line.strip()}" for number, line in lines if pattern.search(line)]


class FileFacts(NamedTuple):
    """What the tests want to know of a Python file: to parse all of them takes seconds."""

    docstring: str | None
    functions: dict[str, int]
    """Each function, as `file:name`, with its length, docstring included."""
    broad_excepts: list[int]
    """The lines of handlers that catch everything."""
    public_classes: list[str]


@cache
def facts_of(name: str) -> FileFacts:
    module = ast.parse(text_of(name))
    facts = FileFacts(
        ast.get_docstring(module),
        {},
        [],
        [
            node.name
            for node in module.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ],
    )
    for node in statements_of(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            facts.functions[f"{name}:{node.name}"] = node.end_lineno - node.lineno + 1
        elif isinstance(node, ast.ExceptHandler) and _catches_everything(node):
            facts.broad_excepts.append(node.lineno)
    return facts


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = [None] if handler.type is None else ast.walk(handler.type)
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
        for kind in caught
    )


def public_names_of(package: str) -> set[str]:
    """What the `__init__` of a package says is public: `__all__`, its re-exports, or its docstring.

    Names are relative to the package: `module`, `module.name`, or a name of `__init__` itself. The
    docstring names them after "Public", up to the end of that paragraph or list.
    """
    module = ast.parse(text_of(f"{package}/__init__.py"))
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.name == alias.asname}
    stated = re.search(r"\bPublic\b.*?(\n\n(?!- )|\Z)", ast.get_docstring(module) or "", re.DOTALL)
    if stated:
        names |= {"Public", *re.findall(r"`(?!penstock\b)([\w.]+)`", stated[0])}
    return names


def packages() -> list[str]:
    """Every package but `penstock` itself, which tests/test_exports.py looks at."""
    found = [name.removesuffix("/__init__.py") for each in WHEELS for name in python_files(each)]
    return [name for name in found if (ROOT / name).is_dir() and f"{name}/" not in WHEELS]


def imports_on_pages() -> Iterator[tuple[str, str, str]]:
    """Each name of Penstock that an example imports: where, from which module, which name."""
    for name in project_files():
        if name.startswith("examples/") and name.endswith(".py"):
            blocks = [text_of(name)]
        elif name.endswith(".md") and not name.startswith(("lab/", "src/")):
            blocks = re.findall(r"^```py[^\n]*\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL)
        else:
            continue
        for block in blocks:
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                    yield from ((name, node.module or "", alias.name) for alias in node.names)


def is_public(module: str, name: str) -> bool:
    *parents, last = module.split(".")
    if (ROOT / "src" / "/".join([*parents, last, "__init__.py"])).is_file():
        return module == "penstock" or name in public_names_of("/".join(["src", *parents, last]))
    if parents == ["penstock"]:
        return True  # A module that no package hides.
    return not {last, f"{last}.{name}"}.isdisjoint(public_names_of("/".join(["src", *parents])))


def test_the_project_has_files_to_look_at() -> None:
    found = project_files()

    assert {"pyproject.toml", "tests/test_tidy.py", "src/penstock/errors.py"} <= set(found)
    assert not [name for name in found if "__pycache__" in name]


def test_no_python_file_is_longer_than_one_idea() -> None:
    counts = {
        name: line_count(name) for name in python_files("src", "server", "lab", "tests", "examples")
    }

    long = {name: count for name, count in counts.items() if count > FILE_LINES_MAX}

    assert long.keys() == LONG_FILES.keys(), long


def test_no_function_is_longer_than_a_page() -> None:
    lengths = dict(
        function
        for name in python_files("src", "server", "lab", "tests", "examples")
        for function in facts_of(name).functions.items()
    )

    long = {where: length for where, length in lengths.items() if length > FUNCTION_LINES_MAX}

    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_errors_are_caught_by_name_except_at_the_edge() -> None:
    lines = {name: facts_of(name).broad_excepts for name in python_files("src", "server", "lab/")}

    broad = {name: found for name, found in lines.items() if found}

    assert broad.keys() == BROAD_EXCEPTS.keys(), broad


def test_every_module_says_what_it_is_for() -> None:
    modules = [
        name for name in python_files("src", "server", "lab/") if not name.startswith("lab/tests/")
    ]

    silent = [name for name in modules if not facts_of(name).docstring]

    assert not silent


def test_nothing_is_left_to_do() -> None:
    names = [name for name in project_files() if name != "tests/test_tidy.py"]

    assert not [line for name in names for line in lines_matching(UNFINISHED, name)]


def test_nothing_in_the_package_sleeps() -> None:
    sleep = re.compile(r"\btime\.sleep\(|\bfrom time import .*\bsleep\b")

    assert not [
        line
        for name in python_files("src", "server", "lab/")
        for line in lines_matching(sleep, name)
    ]


def test_no_file_speaks_of_one_machine_or_registry() -> None:
    found = [line for name in project_files() for line in lines_matching(OF_ONE_MACHINE, name)]

    assert not found


def test_pages_that_should_be_short_are_short() -> None:
    counts = {name: line_count(name) for name in PAGE_LINES_MAX}
    limits = dict(PAGE_LINES_MAX)
    for name in project_files():
        if name.startswith("docs/decisions/") and name.endswith(".md"):
            counts[name] = len(text_of(name).split())
            limits[name] = DECISION_WORDS_MAX

    assert not {name: count for name, count in counts.items() if count > limits[name]}


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for name in (*python_files(WHEELS[0]), *python_files(WHEELS[1])):
        for found in facts_of(name).public_classes:
            places.setdefault(found, []).append(name)

    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_every_package_says_what_is_public_of_it() -> None:
    silent = [package for package in packages() if not public_names_of(package)]

    assert packages()
    assert not silent


def test_what_a_package_says_is_public_exists() -> None:
    missing = []
    for package in packages():
        init = ast.parse(text_of(f"{package}/__init__.py"))
        own = " ".join(ast.unparse(node) for node in init.body[1:])
        for name in public_names_of(package) - {"Public"}:
            module, _, member = name.partition(".")
            path = f"{package}/{module}.py"
            if (ROOT / path).is_file():
                defined = set(re.findall(r"^(?:class |def )?(\w+)", text_of(path), re.MULTILINE))
                found = not member or member in defined
            else:
                found = (ROOT / package / module).is_dir() or re.search(rf"\b{module}\b", own)
            if not found:
                missing.append(f"{package}: {name}")

    assert not missing


def test_examples_import_only_what_is_public() -> None:
    private = {where for where in imports_on_pages() if not is_public(*where[1:])}

    assert not sorted(private)
