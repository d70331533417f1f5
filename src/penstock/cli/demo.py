"""`penstock demo`: a real model, served, asked by several clients, and every answer checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console

import penstock
from penstock.cli.conventions import ExitStatus, JsonOption, write_json
from penstock.cli.demo_table import PIPED_WIDTH, print_played
from penstock.cli.serve import ModelOption, require_extras

if TYPE_CHECKING:
    from penstock.demo import Played

ChatsOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Conversations.")
]
TurnsOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Turns of each.")
]
ClientsOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Clients that hold them.")
]
TokensOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens of an answer, at most.")
]
BlocksOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Blocks on the device of each instance.")
]
PictureOption: TypeAlias = Annotated[
    Path, typer.Option(metavar="FILE", help="Where the timeline goes, as HTML.")
]


def show_demo(
    *,
    model: ModelOption = None,
    chats: ChatsOption = None,
    turns: TurnsOption = None,
    clients: ClientsOption = None,
    tokens: TokensOption = None,
    blocks: BlocksOption = None,
    picture: PictureOption = Path("build/demo.html"),
    json: JsonOption = None,
) -> None:
    """Serve a model by a pair of instances, talk to it, and check every answer.

    Conversations with shared system prompts, with the cache and without; each answer is
    compared with a fresh computation. Ends with status 1 if anything is not as it should be.
    """
    require_extras()
    wishes = {
        "chats": chats,
        "turns": turns,
        "clients": clients,
        "max_tokens": tokens,
        "blocks": blocks,
    }
    played = play_stage(model, {name: wish for name, wish in wishes.items() if wish is not None})
    _write_picture(picture, played)
    if json is None or str(json) != "-":
        print_played(_console(), played, picture)
    if json is not None:
        write_json(json, {"penstock": penstock.__version__} | played.document())
    raise typer.Exit(ExitStatus.FINDING if played.findings else ExitStatus.FINE)


def play_stage(model: str | None, wishes: dict[str, int]) -> Played:
    """Plays it with these wishes, and tells on standard error how it goes on."""
    from penstock.demo import Stage, play  # noqa: PLC0415  (needs the extras)

    try:
        stage = Stage(model=model, **wishes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    progress = Console(stderr=True, highlight=False)
    return play(stage, lambda line: progress.print(line, style="dim", soft_wrap=True))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def _write_picture(path: Path, played: Played) -> None:
    from penstock.demo.picture import html_of  # noqa: PLC0415

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html_of(played), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written: {error.strerror}", param_hint="--picture"
        ) from error
