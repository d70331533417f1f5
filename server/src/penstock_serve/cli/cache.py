"""`penstock cache`: what an operator does to the caches of a running `penstock serve`.

| command                     | asks for                                              |
|-----------------------------|-------------------------------------------------------|
| `clear URL`                 | `POST /admin/reset`                                   |
| `story URL REQUEST`         | `GET /cache/story`, in the words of the live page     |
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from penstock.cli.conventions import JsonOption, write_json
from penstock_serve.cli.serve import ApiKeyFileOption
from penstock_serve.cli.status import LiveUrlArgument, live_client

commands = typer.Typer(no_args_is_help=True)


class _Cleared(msgspec.Struct):
    reset: list[str]


class _Story(msgspec.Struct):
    story: list[Annotated[str, msgspec.Meta(pattern=r"^[0-9.]+ ")]]


@commands.command()
def clear(
    url: LiveUrlArgument, *, api_key_file: ApiKeyFileOption = None, json: JsonOption = None
) -> None:
    """Forget everything that is cached, in all instances and tiers; requests go on."""
    done = live_client(url, api_key_file).call("POST", "/admin/reset", _Cleared)
    _tell(json, done, f"cleared: {', '.join(done['reset']) or 'no instance is ready'}")


@commands.command()
def story(
    url: LiveUrlArgument,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The id of an answer, or its x-request-id.")
    ],
    *,
    api_key_file: ApiKeyFileOption = None,
    json: JsonOption = None,
) -> None:
    """Say what happened to the blocks of a request, step by step."""
    path = f"/cache/story?request={quote(request, safe='')}"
    found = live_client(url, api_key_file).call("GET", path, _Story)
    _tell(json, found, "\n".join(story_lines(found["story"], request)))


def story_lines(lines: list[str], request: str) -> list[str]:
    """The events of a request in order, with the milliseconds since the first of them.

    `[prefill]`: in the instance that computed the prompt for another one.
    """
    events = sorted((float(at), text) for at, _, text in (line.partition(" ") for line in lines))
    return [
        f"{f'+{1000 * (at - events[0][0]):.1f} ms':>12}  {_told(text, request)}"
        for at, text in events
    ]


def _told(text: str, request: str) -> str:
    mark = "[prefill] " if f" cause={request}/" in text else ""
    words = re.sub(r"\s+lease=\d+", "", text.replace(f" cause={request}", ""), count=1)
    return mark + re.sub(r"^([a-z ]+)/\d+", r"\1", words)


def _tell(json: Path | None, document: dict[str, Any], text: str) -> None:
    if json is not None:
        write_json(json, document)
    if str(json) != "-":
        print(text)
