"""docs/api.md and docs/extending.md describe all of the interface, with its true signatures."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import penstock
import penstock_serve
from lab.reference_pages import completed
from penstock import errors, exports
from penstock.cache.eviction import EvictionPolicy
from penstock.machine import effects, events, kv_events
from penstock.machine.machine import CacheMachine
from penstock.machine.statistics import CacheStatistics, TierStatistics
from penstock.runtime.base import BaseCache
from penstock.runtime.copy_executor import EngineSteps

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = completed((DOCS / "api.md").read_text(encoding="utf-8"))
EXTENDING = completed((DOCS / "extending.md").read_text(encoding="utf-8"))
SAME_ARGUMENTS = "`open_offload` takes the same arguments and returns an `Offload`."
CLASSES: dict[str, type] = {
    "BaseCache": BaseCache,
    "Cache": penstock.Cache,
    "Lease": penstock.Lease,
    "Pin": penstock.Pin,
    "EngineSteps": EngineSteps,
    "Offload": penstock.Offload,
    "RankRegistry": penstock.RankRegistry,
    "Rank": penstock.Rank,
    "RankFacts": penstock.RankFacts,
    "StopSignal": penstock.StopSignal,
    "Handoff": penstock.Handoff,
    "PrefillHandoff": penstock.PrefillHandoff,
    "LocalPrefillHandoff": penstock.LocalPrefillHandoff,
    "PrefillHandoffRank": penstock.PrefillHandoffRank,
    "DecodeHandoff": penstock.DecodeHandoff,
    "DecodeHandoffRank": penstock.DecodeHandoffRank,
    "CacheMachine": CacheMachine,
    "LLM": penstock_serve.LLM,
}
COMMON = (BaseCache, penstock.Handoff, penstock.PrefillHandoff)
NOT_FOR_ENGINES = {"Lease.change", "EngineSteps.close"}
"""Public to the cache that made the lease and to a rank that ends, and to nobody else."""


def written_signatures() -> dict[str, str]:
    """What the pages' `text` blocks say of each function, by its name."""
    found: dict[str, str] = {}
    for block in re.findall(r"^```text\n(.*?)^```", PAGE + EXTENDING, re.MULTILINE | re.DOTALL):
        if not re.match(r"(def|class) ", block):
            continue
        stub = re.sub(r"(-> .*[^:\n])$", r"\1: ...", block, flags=re.MULTILINE)
        for node in ast.parse(stub).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = signature_of(node)
            elif isinstance(node, ast.ClassDef) and node.name in CLASSES:
                methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
                found |= {f"{node.name}.{each.name}": signature_of(each) for each in methods}
    if SAME_ARGUMENTS in PAGE:
        found["open_offload"] = found["open"].replace("-> Cache", "-> Offload")
    return found


def true_signatures() -> dict[str, str]:
    found: dict[str, str] = {}
    for function in (
        penstock.open,
        penstock.open_offload,
        penstock.open_rank,
        penstock.open_prefill,
        penstock.open_decode,
        penstock.load_config,
        penstock.parse_config,
    ):
        found[function.__name__] = true_signature(function)
    for name, owner in CLASSES.items():
        for method, function in public_functions(owner):
            found[f"{name}.{method}"] = true_signature(function)
    return {name: text for name, text in found.items() if name not in NOT_FOR_ENGINES}


def public_functions(owner: type) -> Iterator[tuple[str, object]]:
    described = [base for base in COMMON if base in owner.__mro__ and base is not owner]
    for each in owner.__mro__:
        # What several classes have in common is described once.
        shared = any(issubclass(base, each) for base in described)
        if not each.__module__.startswith("penstock") or shared:
            continue
        for name, member in vars(each).items():
            function = member.fget if isinstance(member, property) else member
            function = member.__func__ if isinstance(member, classmethod) else function
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function


def true_signature(function: object) -> str:
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    return signature_of(node)


def signature_of(node: ast.FunctionDef) -> str:
    assert node.returns is not None
    text = f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
    # Modules are spelled out in the code, where their short names mean something.
    return re.sub(r"\b(ef|ev)\.", "", text)


def test_every_signature_is_the_true_one() -> None:
    assert written_signatures() == true_signatures()


def names_of(module: object, base: type) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]


def exported() -> list[str]:
    public = ((name, value) for name, value in vars(exports).items() if not name.startswith("_"))
    return [name for name, value in public if not inspect.ismodule(value)]


@pytest.mark.parametrize(
    "names",
    [
        exported(),
        [f"{reason.name}` | `{reason.value}" for reason in penstock.MissReason],
        [state.name for state in penstock.LeaseState],
        [field.name for field in msgspec.structs.fields(CacheStatistics)],
        [field.name for field in msgspec.structs.fields(TierStatistics)],
        names_of(errors, errors.PenstockError),
        names_of(kv_events, kv_events.KvEvent),
        [name for name, _ in public_functions(EvictionPolicy)],
    ],
    ids=["exports", "reasons", "states", "statistics", "tiers", "errors", "kv events", "policy"],
)
def test_every_name_is_described(names: list[str]) -> None:
    assert names

    pages = PAGE + EXTENDING
    missing = [name for name in names if not re.search(rf"(`|\b){re.escape(name)}(`|\b)", pages)]

    assert not missing


@pytest.mark.parametrize(
    ("module", "base"),
    [(events, events.Event), (effects, effects.Effect)],
    ids=["events", "effects"],
)
def test_every_event_and_effect_of_the_machine_is_listed(module: object, base: type) -> None:
    rows = re.findall(r"^\| `([A-Za-z ]+)` \|", EXTENDING, re.MULTILINE)
    listed = {name for row in rows for name in row.split()}

    assert set(names_of(module, base)) <= listed
