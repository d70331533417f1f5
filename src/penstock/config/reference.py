"""Tables of all keys of a configuration file, for a reader.

`penstock config keys` prints these tables and the documentation site shows them. A key means what
the first paragraph of the text under its field says.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.config.toml import KEYS, value_text
from penstock.vocabulary.schema import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.vocabulary.schema import TierOption


def key_tables() -> str:
    """Every key with its type, default and meaning, as tables in Markdown."""
    return "\n".join(f"### {name}\n\n{key_table(name)}" for name in KEYS)


def key_table(name: str) -> str:
    """The keys of one table of the file."""
    rows = [
        f"| `{key}` | {_type(setting)} | {_default(setting)} | {meaning_of(setting)} |"
        for key, setting in KEYS[name].items()
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def meaning_of(setting: Setting | TierOption) -> str:
    """What a key of ours means."""
    assert isinstance(setting, Setting), "an option of another distribution"
    return setting.meaning or _meanings(setting.owner)[setting.field]


@cache
def _meanings(owner: type) -> Mapping[str, str]:
    """The first paragraph under each field of a class and of its bases."""
    found = {}
    for each in reversed(owner.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in pairwise(node.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = _as_meaning(text)
                case _:
                    pass
    return found


def _as_meaning(text: str) -> str:
    """The first paragraph, as the cell of a table has it: without its capital and full stop."""
    found = " ".join(text.partition("\n\n")[0].split()).removesuffix(".")
    return found if found[1:2].isupper() else f"{found[:1].lower()}{found[1:]}"


def _type(setting: Setting | TierOption) -> str:
    return str(setting.key).partition(", such as ")[0]


def _default(setting: Setting | TierOption) -> str:
    return "required" if setting.default is None else f"`{value_text(setting.default)}`"
