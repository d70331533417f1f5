"""The parts of the documentation that are made from the code: keys, commands and metrics.

A page says where a part goes by a line such as `<!-- from the code: commands -->`, which
`docs_site` replaces. `python -m lab.reference_pages NAME` prints a part.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

import penstock
import penstock_serve
from lab.cli.app import LAB
from penstock.cli.app import PENSTOCK
from penstock.config.toml import KEYS, key_table
from penstock.connectors.base.statistics import COUNTERS, GAUGES, TIMES
from penstock.machine import machine
from penstock.runtime import base, copy_executor
from penstock_serve.observe.metrics import METRICS, RouterMetrics, ServerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.cli.app import CommandLine

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- from the code: (?P<part>[\w -]+) -->$", re.MULTILINE)
SIGNATURES = "signatures of "
OWNERS = (penstock, penstock_serve, base, copy_executor, machine)
"""Where names of the interface are looked for."""
COMMON = (base.BaseCache, penstock.Handoff, penstock.PrefillHandoff)
"""What several classes have in common is shown once."""
NOT_FOR_ENGINES = {"Lease.change", "EngineSteps.close"}
"""Public to the cache that made the lease and to a rank that ends, and to nobody else."""
LINE_MAX = 96
SECTIONS = ("Args:", "Returns:", "Raises:")
ENTRY = re.compile(r"    (?P<name>\w+): (?P<text>.+)")
ABSENT = (None, "", False)
"""Defaults that say nothing."""


def completed(markdown: str) -> str:
    """A page with the parts that it wants from the code."""
    return MARK.sub(lambda found: part(found["part"]), markdown)


def part(name: str) -> str:
    """One of `PARTS`, or the signatures of what is named."""
    names = name.removeprefix(SIGNATURES)
    return PARTS[name]() if names == name else signatures(names.split())


def table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows]) + "\n"


# Commands.


def commands_of(program: CommandLine) -> Iterator[tuple[str, Any]]:
    """Every command with its words; a group's own are those below it."""
    for name in program.commands:
        root: Any = get_command(program.app_for([name]))
        yield from _below(f"{program.name} {name}", root.commands[name])


def _below(words: str, command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - typer's own
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        yield words, command
    for name, each in below.items():
        yield from _below(f"{words} {name}", each)


def command_list() -> str:
    """All commands with one sentence about each."""
    rows = [
        f"| [`{words}`](#{words.replace(' ', '-')}) | {_cell(command.help.split(chr(10) * 2)[0])} |"
        for program in (PENSTOCK, LAB)
        for words, command in commands_of(program)
    ]
    return table("| command | does |", rows)


def command_options() -> str:
    """All commands with their arguments and options."""
    parts = []
    for program in (PENSTOCK, LAB):
        for words, command in commands_of(program):
            parts.append(f"### {words}\n\n{command.help}\n")
            rows = [_option(each) for each in command.params if each.name != "help"]
            if rows:
                parts.append(table("| argument or option | default | |", rows))
    return "\n".join(parts)


def _option(param: Any) -> str:  # noqa: ANN401 - typer's own
    names = [*param.opts, *param.secondary_opts]
    if param.param_type_name == "argument":
        shown = f"`{(param.metavar or param.name.upper()).replace('|', ' or ')}`"
    else:
        value = f" {param.metavar}" if param.metavar else ""
        shown = ", ".join(f"`{name}{value}`" for name in names)
    default = param.default.value if isinstance(param.default, Enum) else param.default
    default = "" if default in ABSENT or default == [] else f"`{default}`"
    return f"| {shown} | {'required' if param.required else default} | {_cell(param.help)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Metrics.


def server_metrics() -> str:
    """What `penstock serve` has on `/metrics`."""
    labels = {f"penstock_{row.name}": ("instance", *row.labels) for row in METRICS}
    return _metrics(ServerMetrics().text([], retries=0), labels)


def router_metrics() -> str:
    """What `penstock router` has on `/metrics`."""
    return _metrics(RouterMetrics().text([]), {})


def _metrics(page: bytes, labels: Mapping[str, Sequence[str]]) -> str:
    rows = []
    for family in text_string_to_metric_families(page.decode()):
        # When a series began is added by the client library.
        if not family.name.endswith("_created"):
            of = ",".join(labels.get(family.name, ()))
            name = family.name + ("_total" if family.type == "counter" else "")
            shown = name + ("{" + of + "}" if of else "")
            rows.append(f"| `{shown}` | {family.type} | {_cell(family.documentation)} |")
    return table("| name | kind | |", rows)


def connector_metrics() -> str:
    """What the connector adds to vLLM's `/metrics`."""
    kinds = {"counter": COUNTERS, "gauge": GAUGES, "histogram": TIMES}
    rows = [
        f"| `{name}` | {kind} | {_cell(about)} |"
        for kind, names in kinds.items()
        for name, about in names.items()
    ]
    return table("| name | kind | |", rows)


# The Python interface.


def signatures(names: Sequence[str]) -> str:
    """Signatures of functions and classes of the interface, and what each call does."""
    owners = {name: next(getattr(at, name) for at in OWNERS if hasattr(at, name)) for name in names}
    stubs = []
    about = []
    for name, owner in owners.items():
        if isinstance(owner, type):
            stubs.append(
                "\n".join(
                    [f"class {name}:", *(_signature(each, "    ") for each in _methods(owner))]
                )
            )
            about += [_about(f"{name}.{each.__name__}", each) for each in _methods(owner)]
        else:
            stubs.append(_signature(owner))
            about.append(_about(name, owner))
    return "```text\n" + "\n\n".join(stubs) + "\n```\n\n" + "\n".join(about) + "\n"


def _about(name: str, function: Callable[..., object]) -> str:
    """The docstring as an item of a list, with its arguments and errors below."""
    lines = []
    section = False
    for line in (inspect.getdoc(function) or "").splitlines():
        entry = ENTRY.match(line)
        if line in SECTIONS:
            section = True
        elif section and entry:
            lines.append(f"    - `{entry['name']}`: {entry['text']}")
        elif line.strip() and not line.startswith("|"):
            lines.append(f"{'      ' if section else '  '}{line.strip()}")
    first = lines[0].strip() if lines else ""
    return "\n".join([f"- `{name}`: {first}", *lines[1:]])


def _methods(owner: type) -> Iterator[Callable[..., object]]:
    """Functions and properties of a class, without those of a base that is shown itself."""
    shared = {
        each
        for base in COMMON
        if base is not owner and base in owner.__mro__
        for each in base.__mro__
    }
    for each in owner.__mro__:
        if each in shared or not each.__module__.startswith("penstock"):
            continue
        for name, member in vars(each).items():
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            hidden = name.startswith("_") or f"{owner.__name__}.{name}" in NOT_FOR_ENGINES
            if inspect.isfunction(function) and not hidden:
                yield function


def _signature(function: Callable[..., object], indent: str = "") -> str:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    assert node.returns is not None
    arguments, returns = _shown(node.args), _shown(node.returns)
    line = f"{indent}def {node.name}({arguments}) -> {returns}"
    if len(line) <= LINE_MAX:
        return line
    each = re.split(r", (?=\*?\w*(?::|,|$))", arguments)
    lines = "".join(f"{indent}    {argument},\n" for argument in each)
    return f"{indent}def {node.name}(\n{lines}{indent}) -> {returns}"


def _shown(node: ast.AST) -> str:
    # Modules are spelled out in the code, where their short names mean something.
    text = re.sub(r"\b(ef|ev)\.", "", ast.unparse(node))
    return re.sub(r"(?<=[\w\]])=", " = ", text)


def example(name: str) -> str:
    """A program of `examples/`."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    return f"```python\n{text}```\n"


def miss_reasons() -> str:
    """The names of the reasons, and their values."""
    rows = [f"| `{reason.name}` | `{reason.value}` |" for reason in penstock.MissReason]
    return table("| `MissReason` | `reason.value` |", rows)


PARTS: Mapping[str, Callable[[], str]] = {
    **{f"keys of {name}": partial(key_table, name) for name in KEYS},
    **{f"example {name}": partial(example, name) for name in ("handoff", "misses", "shared_store")},
    "miss-reasons": miss_reasons,
    "commands": command_list,
    "command-options": command_options,
    "server-metrics": server_metrics,
    "router-metrics": router_metrics,
    "connector-metrics": connector_metrics,
}


if __name__ == "__main__":
    sys.stdout.write(PARTS[sys.argv[1]]())
