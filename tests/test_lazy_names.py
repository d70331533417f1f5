"""Exported names are loaded when they are asked for, and every line of their lists is true."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock
from penstock import tensors, testing, toolkit
from penstock.lazy_names import homes_of

LISTS = ("penstock.exports", "penstock.toolkit", "penstock.tensors")
SOURCE = Path(__file__).resolve().parent.parent / "src"


@pytest.mark.parametrize("listing", LISTS)
def test_every_import_of_a_list_is_a_line_that_is_understood(listing: str) -> None:
    path = SOURCE / f"{listing.replace('.', '/')}.py"

    words = re.findall(r"^ *from penstock\..*", path.read_text(encoding="utf-8"), re.MULTILINE)

    imported = [line for line in words if "lazy_names" not in line]
    assert len(homes_of(listing)) == len(imported) > 5


@pytest.mark.parametrize("name", sorted(homes_of("penstock.toolkit")))
def test_a_name_of_the_toolkit_is_what_its_home_says(name: str) -> None:
    home = homes_of("penstock.toolkit")[name]

    assert getattr(toolkit, name) is getattr(__import__(home, fromlist=[name]), name)


@pytest.mark.parametrize("name", sorted(homes_of("penstock.tensors")))
def test_the_homes_of_what_needs_torch_exist(name: str) -> None:
    path = SOURCE / f"{homes_of('penstock.tensors')[name].replace('.', '/')}.py"

    assert re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("module", [penstock, toolkit, tensors, testing])
def test_a_name_in_no_list_is_no_attribute(module: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        module.opne  # type: ignore[attr-defined] # noqa: B018


def test_a_list_that_is_not_there_has_no_names() -> None:
    assert find_spec("penstock.no_such_list") is None
    assert homes_of("penstock.no_such_list") == {}
