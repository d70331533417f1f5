"""`penstock status` and `penstock cache`: how a running server is, and orders to its caches.

`LiveClient` asks a server for the document that its live page shows; `penstock top` uses it, too.

| command                     | asks for                                              |
|-----------------------------|-------------------------------------------------------|
| `clear URL`                 | `POST /admin/reset`                                   |
| `story URL REQUEST`         | `GET /cache/story`, in the words of the live page     |
"""

from __future__ import annotations

import json as json_module
import re
import socket
from collections import Counter
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ssl import SSLError
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import msgspec
import typer

from penstock import MissReason
from penstock.cli.conventions import ExitStatus, JsonOption, show_result
from penstock.config import UNIX, require_socket
from penstock.errors import ConfigError, UnavailableError, counted, shown
from penstock_serve.cli.serve import DEFAULT_SERVER, ApiKeyFileOption, server_url
from penstock_serve.observe.live import HANDED, RouterLive, ServerLive
from penstock_serve.observe.miss_reasons import MISS_ADVICE
from penstock_serve.server.guard import find_client_key, wrong_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


ANSWER_S = 20.0
"""A server waits up to 5 s for its instances."""
DOCUMENT_BYTES_MAX = 16 << 20
MISSES_SHOWN = 5

LiveUrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL|SOCKET",
        help="A running server: its URL, HOST:PORT, or the path of its socket.",
    ),
]


class _Tier(msgspec.Struct):
    name: str
    slots: int
    free: int
    held: int
    on: bool


class _Cache(msgspec.Struct):
    tiers: list[_Tier]
    misses: dict[str, int]
    prefill_tokens_per_s: float | None


class _Instance(msgspec.Struct):
    """What is shown of `InstanceStatistics`: a server of another version may have other fields."""

    instance: str
    role: str
    state: str
    running: int
    waiting: int
    loading: int
    claiming: int
    handoffs: dict[str, int]
    cache: _Cache


class SocketConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def _socket_of(url: str) -> str:
    """The path of a socket, as `penstock serve` prints it or alone; empty if it is none."""
    path = url.removeprefix(UNIX)
    if not path.startswith("/") or path.startswith("//"):
        return ""
    require_socket("URL", f"{UNIX}{path}")
    return path


class LiveClient:
    """Asks one server about itself."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Makes it; nothing is sent yet.

        Raises `ConfigError`: `url` is not one.
        """
        self._path = _socket_of(url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if self._path:
            self.url = f"{UNIX}{self._path}"
            return
        try:
            parts = urlsplit(url)
            self._port, host = parts.port, parts.hostname or ""
            host.encode("idna")
        except ValueError:  # Also that of a name which no host can have.
            parts, host = urlsplit(""), ""
        # Clients of OpenAI's API have /v1 in theirs, and `penstock serve` prints it so.
        path = parts.path.strip("/").removeprefix("v1")
        beside = path or parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in {"http", "https"} or not host or beside or not url.isprintable():
            raise ConfigError(
                "URL",
                f"is {shown(url)}, must be the address of a server: HOST:PORT, http://HOST:PORT, "
                "or the absolute path of its socket",
            )
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._host = host
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection

    def ask(self) -> dict[str, Any]:
        """The document of `GET /live`.

        Raises `UnavailableError`: nobody answers, or something that is no server of Penstock;
        `ConfigError`: the server has a key, and this is another one.
        """
        status, content = self._exchange("GET", "/live")
        found = _object_in(content)
        if found.get("kind") == "metrics":
            raise UnavailableError(
                f"{self.url} is a penstock dashboard: open it in a browser, or ask a server itself"
            )
        if status != 200 or found.get("kind") not in {"server", "router"}:
            raise UnavailableError(
                f"{self.url} is no penstock serve or penstock router: GET /live has status {status}"
            )
        try:
            live = msgspec.json.decode(content, type=ServerLive | RouterLive)
            for each in live.instances if isinstance(live, ServerLive) else ():
                msgspec.json.decode(each, type=_Instance)
        except msgspec.DecodeError as error:
            raise self._strange("GET /live", error) from error
        return found

    def call(
        self,
        method: str,
        path: str,
        shape: type[msgspec.Struct],
        *,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """What a server answers; also if an instance could not do what was asked for.

        Raises `UnavailableError`: nobody answers, or nobody who knows this path, or not in this
        `shape`; `ConfigError`: the server refuses it, and says why.
        """
        status, content = self._exchange(method, path, body, headers)
        found = _object_in(content)
        asked = f"{method} {path.partition('?')[0]}"
        if status == 200 or (status == 503 and "failed" in found):
            try:
                msgspec.convert(found, shape)
            except msgspec.ValidationError as error:
                raise self._strange(asked, error) from error
            return found
        said = found.get("error")
        problem = said.get("message") if isinstance(said, dict) else None
        if 400 <= status < 500 and problem:
            raise ConfigError(self.url, f"refuses it: {problem}")
        raise UnavailableError(f"{self.url}: {problem or f'{asked} has status {status}'}")

    def _strange(self, asked: str, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self.url} is no Penstock of this version: its answer to {asked} is another ({error})"
        )

    def _exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and content of a response."""
        connection = (
            SocketConnection(self._path)
            if self._path
            else self._kind(self._host, self._port, timeout=ANSWER_S)
        )
        sent = None if body is None else json_module.dumps(body)
        try:
            given = {} if sent is None else {"content-type": "application/json"}
            given |= {**self._headers, **(headers or {})}
            connection.request(method, path, sent, headers=given)
            response = connection.getresponse()
            status, content = response.status, response.read(DOCUMENT_BYTES_MAX)
        except SSLError as error:
            raise UnavailableError(
                f"{self.url} cannot be used: {error.reason or error}; if it has no TLS, its "
                "address begins with http://"
            ) from error
        except (OSError, HTTPException) as error:
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnavailableError(f"nobody answers at {self.url}: {cause}") from error
        finally:
            connection.close()
        if status == 401:
            raise wrong_key(self.url)
        return status, content


def _object_in(content: bytes) -> dict[str, Any]:
    """A JSON object; empty if the content is none."""
    try:
        found = json_module.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def live_client(url: str, api_key_file: str | None) -> LiveClient:
    """A client with the key of a file or of the environment."""
    return LiveClient(server_url(url), find_client_key(api_key_file))


def show_status(
    url: LiveUrlArgument = DEFAULT_SERVER,
    *,
    api_key_file: ApiKeyFileOption = None,
    json: JsonOption = None,
) -> None:
    """Say how a running server is: its health, requests, tiers and misses.

    The status is 0 if nothing is wrong, 1 if something is or requests are not answered, 2 if the
    key is wrong, 3 if nobody answers.
    """
    client = live_client(url, api_key_file)
    live = client.ask()
    show_result(json, "\n".join(describe_live(client.url, live)), live)
    if live["health"]["state"] != "ok":
        raise typer.Exit(ExitStatus.FINDING)


def describe_live(url: str, live: dict[str, Any]) -> Iterator[str]:
    """A document in a few lines."""
    health, name = live["health"], live.get("model") or "router of vLLM servers"
    yield f"{url}: {health['state']} ({name}, penstock {live['version']})"
    for reason in health["why"]:
        yield f"  {reason}"
    rows = _router_rows(live) if live["kind"] == "router" else _server_rows(live)
    for title, text in rows:
        yield f"{title:<14} {text}"


def _server_rows(live: dict[str, Any]) -> Iterator[tuple[str, str]]:
    instances = live["instances"]
    phases = {"running": "running", "waiting": "waiting", "loading": "loading"}
    phases["claiming"] = "being handed over"
    counts = {name: sum(each[name] for each in instances) for name in phases}
    yield "requests", ", ".join(f"{counts[name]} {text}" for name, text in phases.items())
    yield from _rate_rows(live)
    yield "prompt tokens", prompt_tokens_text(live)
    yield from _first_token_rows(live, "mostly cached", "mostly computed")
    yield from tier_texts(live).items()
    handoffs: Counter[str] = Counter()
    for each in instances:
        if each["role"] != "prefill":
            handoffs.update(each["handoffs"])
    if handoffs.total():
        yield "handoffs", ", ".join(f"{n} {name}" for name, n in handoffs.items() if n)
    for reason, count in missed(live)[:MISSES_SHOWN]:
        yield "missed", miss_text(reason, count)


def _router_rows(live: dict[str, Any]) -> Iterator[tuple[str, str]]:
    prompts = live["prompts"]
    yield "prompts", ", ".join(f"{n} by {role}" for role, n in prompts.items()) or "none yet"
    yield from _rate_rows(live)
    yield from _first_token_rows(live, "handed over", "decode alone")
    for each in live["servers"]:
        state = "up" if each["up"] else f"down: {each['cause']}"
        yield each["role"], f"{each['name']} {state}, {counted(each['load'], 'request')}"


def _rate_rows(live: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Requests and tokens a second, and the time between tokens, of a server that says them."""
    rates, between = live["traffic"].get("rates"), live["traffic"].get("between")
    if rates is not None:
        requests, tokens = rates["requests_per_s"], rates["output_tokens_per_s"]
        text = f"{rate_text(requests)} requests/s, {rate_text(tokens)} output tokens/s"
        yield "last minute", text
    if between is not None and between["count"]:
        late = seconds_text(between["p95_s"])
        yield "between tokens", f"{seconds_text(between['p50_s'])} median, 95 % within {late}"


def _first_token_rows(live: dict[str, Any], warm: str, cold: str) -> Iterator[tuple[str, str]]:
    for name, times in ((warm, live["traffic"]["warm"]), (cold, live["traffic"]["cold"])):
        if times["count"]:
            late = seconds_text(times["p95_s"])
            text = f"{seconds_text(times['p50_s'])} median, 95 % within {late}"
            yield "first token", f"{text}, {name}"
    alike = live["traffic"].get("alike")
    if alike is not None and 0 < alike["warm_p50_s"] < alike["cold_p50_s"]:
        sooner = f"{alike['cold_p50_s'] / alike['warm_p50_s']:.1f} times sooner {warm}"
        lengths = f"{alike['tokens_min']:,} to {alike['tokens_max']:,} tokens"
        yield "first token", f"{sooner}, of prompts of {lengths}"


def prompt_tokens_text(live: dict[str, Any]) -> str:
    """Where the prompt tokens of the last ten minutes came from."""
    slices = live["traffic"]["slices"]
    asked = sum(each["prompt_tokens"] for each in slices)
    found: Counter[str] = Counter()
    for each in slices:
        found.update(each["found"])
    if not asked:
        return "none in the last 10 min"
    names = [name for name in found if name != HANDED] + [HANDED] * (HANDED in found)
    parts = [f"{100 * found[name] / asked:.0f} % {name}" for name in names]
    computed = max(0, asked - found.total())
    return f"{asked:,} in 10 min: {', '.join([*parts, f'{100 * computed / asked:.0f} % computed'])}"


def tier_texts(live: dict[str, Any]) -> dict[str, str]:
    """How full each tier is, over all instances."""
    sums: dict[str, Counter[str]] = {}
    for each in live["instances"]:
        for tier in each["cache"]["tiers"]:
            used = tier["slots"] - tier["free"]
            numbers = {"slots": tier["slots"], "used": used, "held": tier["held"]}
            sums.setdefault(tier["name"], Counter()).update({**numbers, "off": int(not tier["on"])})
    return {
        name: f"{n['used']:,} of {n['slots']:,} blocks, {n['held']:,} in use"
        + (f", off in {counted(n['off'], 'instance')}" if n["off"] else "")
        for name, n in sums.items()
    }


def missed(live: dict[str, Any]) -> list[tuple[str, int]]:
    """Requests by why they found no more, most frequent first, since the start."""
    found: Counter[str] = Counter()
    for each in live["instances"]:
        found.update(each["cache"]["misses"])
    del found[MissReason.NONE.value]
    return [(reason, count) for reason, count in found.most_common() if count]


def miss_text(reason: str, count: int) -> str:
    """One reason, and what helps."""
    known = {each.value: advice for each, advice in MISS_ADVICE.items()}
    helps = known[reason].helps if reason in known else ""
    return f"{count:,} {reason}" + (f": {helps}" if helps else "")


def seconds_text(seconds: float | None) -> str:
    """A time as people read it; `–` where there is none."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rate_text(rate: float | None) -> str:
    """How often something happens in a second; `–` where that is not known."""
    if rate is None:
        return "–"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


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
    show_result(json, f"cleared: {', '.join(done['reset']) or 'no instance is ready'}", done)


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
    show_result(json, "\n".join(story_lines(found["story"], request)), found)


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
