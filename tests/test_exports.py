"""What `penstock` exports: each name is meant to be used, documented, and says what it is."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from lab.reference_pages import completed
from penstock import exports

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
NAMES = sorted(
    ["TensorTier"]  # Needs torch, so it is imported when it is asked for.
    + [
        name
        for name, value in vars(exports).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
)


def test_the_two_ways_in_are_exported() -> None:
    assert {"open", "open_offload", "Cache", "Offload", "Lease", "Config"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_is_in_the_api_page(name: str) -> None:
    page = completed(PAGE.read_text(encoding="utf-8"))

    # In code, that is: `open` and `Layout` are also words.
    spans = re.findall(r"`([^`\n]+)`", page)
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    assert any(re.search(rf"\b{name}\b", code) for code in (*spans, *blocks))


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_says_what_it_is(name: str) -> None:
    exported = getattr(penstock, name)

    described = vars(exported).get("__doc__") if inspect.isclass(exported) else exported.__doc__

    # A dataclass without one gets its signature for a docstring.
    assert described
    assert not described.startswith(f"{name}(")


@pytest.mark.parametrize(
    "name", [name for name in NAMES if inspect.isclass(getattr(penstock, name))]
)
def test_every_public_method_says_what_it_does(name: str) -> None:
    members = vars(getattr(penstock, name)).items()

    silent = [
        member
        for member, value in members
        if not member.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(value)
    ]

    assert not silent


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_every_exported_name(name: str) -> None:
    exported = getattr(penstock, name)

    assert f"{exported.__name__}" in pydoc.render_doc(exported)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if inspect.isclass(getattr(penstock, name))]
)
def test_the_types_of_an_exported_class_can_be_looked_up(name: str) -> None:
    """As tools do that show, read or write values. Of methods they cannot: some name torch's."""
    exported = getattr(penstock, name)

    hints = typing.get_type_hints(exported)

    assert hints.keys() >= inspect.get_annotations(exported).keys()
    if not issubclass(exported, Exception):  # Python has no signature of those without their own.
        inspect.signature(exported)


def test_what_only_the_cache_may_call_is_no_public_method() -> None:
    assert not hasattr(penstock.Lease, "change")


def test_everything_exported_says_where_it_comes_from() -> None:
    modules = {name: inspect.getmodule(getattr(penstock, name)) for name in NAMES}

    foreign = [
        name
        for name, module in modules.items()
        if module is None or not module.__name__.startswith("penstock.")
    ]

    assert not foreign


def test_a_name_that_is_not_exported_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'opne'"):
        penstock.opne  # noqa: B018

    assert {*NAMES, "__version__"} <= {*dir(penstock)}


def test_a_part_of_the_package_does_not_load_the_whole() -> None:
    program = "import sys, penstock.errors; print(*sys.modules)"

    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()

    assert "penstock.errors" in loaded
    assert not {"numpy", "penstock.exports", "penstock.runtime"} & {*loaded}


@pytest.mark.parametrize("name", ["llama_cpp", "transformers"])
def test_a_connector_is_a_name_that_loads_nothing_of_its_engine(name: str) -> None:
    program = f"import sys, penstock; penstock.{name}; print(*sys.modules)"

    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()

    assert f"penstock.connectors.{name}" in loaded
    assert not {"torch", "llama_cpp", "transformers", "numpy"} & {*loaded}
    assert name in dir(penstock)


def test_the_exports_do_not_load_torch() -> None:
    program = "import sys, penstock; penstock.open; print(*sys.modules)"

    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()

    assert "penstock.runtime.open" in loaded
    assert not {"torch", "penstock.exports", "penstock.handoff"} & {*loaded}
