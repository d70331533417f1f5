"""Names that are imported when they are first asked for.

A list of them is ordinary imports, one to a line, each with its alias: type checkers and people
read it as it is, and at run time the lines say where a name is at home. To load all of them takes
half a second, and most processes ask for a few.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec

LINE = re.compile(r"^ *from ([\w.]+) import (\w+) as \2\b", re.MULTILINE)


@cache
def homes_of(listing: str) -> dict[str, str]:
    """The module of each name in a list, which is a module itself and is not imported here."""
    spec = find_spec(listing)
    source = spec.loader.get_source(listing) if spec and spec.loader else None  # type: ignore[attr-defined]
    return {name: home for home, name in LINE.findall(source or "")}


def load_name(listing: str, name: str) -> object:
    """What a name in a list stands for.

    Raises `AttributeError`: it is not in the list.
    """
    home = homes_of(listing).get(name)
    if home is None:
        raise AttributeError(f"module {listing!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    return value
