"""`penstock cache`: what an operator does to the caches of a running `penstock serve`.

| command                     | asks for                                              |
|-----------------------------|-------------------------------------------------------|
| `clear URL`                 | `POST /admin/reset`                                   |
| `pin URL NAME`, `unpin`     | `POST /admin/pin`, `/admin/unpin`                     |
| `story URL REQUEST`         | `GET /cache/story`, in the words of the live page     |
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from penstock.cli.conventions import ExitStatus, JsonOption, write_json
from penstock.errors import counted, shown
from penstock_serve.cli.serve import ApiKeyFileOption
from penstock_serve.cli.status import LiveUrlArgument, live_client

commands = typer.Typer(no_args_is_help=True)

PROMPT_BYTES_MAX = 16 << 20


class _Cleared(msgspec.Struct):
    reset: list[str]


class _Unpinned(msgspec.Struct):
    blocks: dict[str, int]
    failed: dict[str, str]


class _Pinned(_Unpinned):
    cached: dict[str, int]


class _Story(msgspec.Struct):
    story: list[Annotated[str, msgspec.Meta(pattern=r"^[0-9.]+ ")]]


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the pin is called.")]


@commands.command()
def clear(
    url: LiveUrlArgument, *, api_key_file: ApiKeyFileOption = None, json: JsonOption = None
) -> None:
    """Forget everything that is cached, in all instances and tiers; requests go on."""
    done = live_client(url, api_key_file).call("POST", "/admin/reset", _Cleared)
    _tell(json, done, f"cleared: {', '.join(done['reset']) or 'no instance is ready'}")


@commands.command()
def pin(
    url: LiveUrlArgument,
    name: NameArgument,
    *,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the text of a prompt.")
    ] = None,
    system_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with a system prompt, as chats begin with it."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, help="For how long; again under the same name: anew."),
    ] = 3600.0,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose cache.")] = "",
    api_key_file: ApiKeyFileOption = None,
    json: JsonOption = None,
) -> None:
    """Keep the blocks of a prefix from being evicted, for some time.

    How much may be pinned is bounded by pin_share. Status 1 if an instance could not.
    """
    if (prompt_file is None) == (system_file is None):
        raise typer.BadParameter(
            "one of it and --system-file must be given", param_hint="--prompt-file"
        )
    body: dict[str, Any] = {"name": name, "seconds": seconds}
    if prompt_file is not None:
        body["prompt"] = _text_in(prompt_file, "--prompt-file")
    if system_file is not None:
        text = _text_in(system_file, "--system-file")
        body["messages"] = [{"role": "system", "content": text}]
    headers = {"x-penstock-tenant": _header("--tenant", tenant)} if tenant else {}
    client = live_client(url, api_key_file)
    done = client.call("POST", "/admin/pin", _Pinned, body=body, headers=headers)
    _tell_pin(json, done, "pinned")


@commands.command()
def unpin(
    url: LiveUrlArgument,
    name: NameArgument,
    *,
    api_key_file: ApiKeyFileOption = None,
    json: JsonOption = None,
) -> None:
    """Let the blocks of a pinned prefix leave again when their turn comes."""
    client = live_client(url, api_key_file)
    done = client.call("POST", "/admin/unpin", _Unpinned, body={"name": name})
    _tell_pin(json, done, "unpinned")


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


def _header(option: str, value: str) -> str:
    """What a header can carry, and every client encodes alike."""
    if not (value.isascii() and value.isprintable()):
        raise typer.BadParameter(
            f"is {shown(value)}, must be printable ASCII characters", param_hint=option
        )
    return value


def _text_in(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(PROMPT_BYTES_MAX + 1)
        text = found.decode()
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be read: {error.strerror}", param_hint=option
        ) from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is no text in UTF-8", param_hint=option) from error
    if not 1 <= len(found) <= PROMPT_BYTES_MAX:
        size = "more bytes" if found else "no byte"
        raise typer.BadParameter(
            f"{path} has {size}, must have from 1 to {PROMPT_BYTES_MAX:,}", param_hint=option
        )
    return text


def _tell_pin(json: Path | None, done: dict[str, Any], verb: str) -> None:
    rows = [
        f"{instance}: {verb} {counted(blocks, 'block')}"
        + (f", {done['cached'][instance]} of them cached now" if verb == "pinned" else "")
        for instance, blocks in done["blocks"].items()
    ]
    rows += [f"{instance}: not {verb}: {why}" for instance, why in done["failed"].items()]
    _tell(json, done, "\n".join(rows) or "no instance is ready")
    if done["failed"]:
        raise typer.Exit(ExitStatus.FINDING)


def _tell(json: Path | None, document: dict[str, Any], text: str) -> None:
    if json is not None:
        write_json(json, document)
    if str(json) != "-":
        print(text)
