"""What all commands share: options, exit statuses, seeds and JSON.

| option      | means the same everywhere                                        |
|-------------|------------------------------------------------------------------|
| `--config`  | settings from this TOML file                                     |
| `--json`    | the result as JSON, into a file or `-`                           |
| `--seed`    | this one seed                                                    |
| `--jobs`    | how many processes                                               |

The one rule: a command takes these options from here, with this meaning. `docs/cli.md` describes
them for users.
"""

from __future__ import annotations

import inspect
import json
import os
from contextlib import suppress
from dataclasses import Field, fields
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import typer

from penstock.cli.entry import INTERRUPTED as INTERRUPTED  # noqa: PLC0414 - on purpose

if TYPE_CHECKING:
    from collections.abc import Callable

CommandT = TypeVar("CommandT", bound="Callable[..., None]")
SEED_MAX = 2**63 - 1


class ExitStatus(IntEnum):
    """How a command ends."""

    FINE = 0
    """It ran without findings; without `--check`, also a benchmark that misses a target."""
    FINDING = 1
    """It ran, and found something: a seed that fails, a target missed under `--check`."""
    USAGE = 2
    """Arguments or settings were wrong; nothing ran."""
    CANNOT_RUN_HERE = 3
    """This machine or installation lacks something; the message says what."""


ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Take the settings from this TOML file."),
]
JsonOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON, too; '-' writes it to standard output, alone.",
    ),
]
SeedOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--seed", metavar="S", min=0, max=SEED_MAX, help="Run this one seed."),
]
JobsOption: TypeAlias = Annotated[
    int,
    typer.Option("--jobs", metavar="N", min=1, max=1024, help="Use N processes."),
]


class Takes(NamedTuple):
    """What an option takes, behind the type of its field."""

    metavar: str | None = None
    least: float | None = None
    most: float | None = None


def with_options(shape: type, *names: str) -> Callable[[CommandT], CommandT]:
    """Gives a command the fields of a dataclass as options, or some, in place of its `**given`.

    The text under a field is the option's help.
    """
    # Here: the list of commands does without it.
    from penstock.vocabulary.schema import texts_under  # noqa: PLC0415

    def add(command: CommandT) -> CommandT:
        own = inspect.signature(command, eval_str=True)
        kept = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        hints = get_type_hints(shape, include_extras=True)
        given = [
            _option(each, hints[each.name], texts_under(shape).get(each.name))
            for each in fields(shape)
            if not names or each.name in names
        ]
        command.__signature__ = own.replace(parameters=[*kept, *given])  # type: ignore[attr-defined]
        return command

    return add


def _option(field: Field[Any], hint: Any, text: str | None) -> inspect.Parameter:  # noqa: ANN401
    is_told = hasattr(hint, "__metadata__")  # By `Annotated`.
    kind, takes = (hint.__origin__, hint.__metadata__[0]) if is_told else (hint, Takes())
    if isinstance(takes, Takes):
        # With its name, a flag has no other one that says no.
        takes = typer.Option(
            f"--{field.name.replace('_', '-')}",
            metavar=takes.metavar,
            min=takes.least,
            max=takes.most,
            help=text,
        )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[kind, takes],
    )


def require_two_files(json: Path | None, html: Path | None) -> None:
    """Before hours of work: a page needs a file, and another one than the JSON."""
    if html is None:
        return
    if str(html) == "-" or (json is not None and json.resolve() == html.resolve()):
        raise typer.BadParameter(
            f"is {str(html)!r}, must be a file of its own for the page", param_hint="--html"
        )


def name_model(document: dict[str, object]) -> None:
    """For `load_completed`: the file of a server may leave out its model.

    The doctor and a store need none.
    """
    document.setdefault("model", {"name": "any"})


def show_result(json: Path | None, text: str, document: object) -> None:
    """Prints a result as text and writes it as JSON, as far as `--json` asks for each."""
    if str(json) != "-":
        print(text)
    if json is not None:
        write_json(json, document)


def write_json(path: Path, document: object) -> None:
    """Writes a JSON document; to standard output if the path is `-`."""
    text = json.dumps(document, indent=2, allow_nan=False)
    if str(path) == "-":
        print(text)
        return
    write_text(path, text + "\n", option="--json")


def write_text(path: Path, text: str, *, option: str) -> None:
    """Writes a file that an option names, and makes its folder if there is none.

    A file that is there is replaced as a whole: on a full disk it stays as it was.
    """
    # What a link or a device such as /dev/stdout stands for is written where it is.
    plain = not path.is_symlink() and (path.is_file() or not path.exists())
    new = path.with_name(f"{path.name}.{os.getpid()}.new") if plain else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        if plain:
            new.replace(path)
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written: {error.strerror}", param_hint=option
        ) from error
    finally:
        if plain:
            with suppress(OSError):
                new.unlink()
