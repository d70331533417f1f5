"""OpenAI's request shapes: what is taken, and what is refused with a message that says why.

One rule: a wish that would not be fulfilled is refused, never ignored. A client that asks for
tools and silently gets none has been lied to.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from penstock.engine.requests import ANSWERS_MAX, TOKENS_MAX
from penstock.engine.sampling import LOGPROBS_MAX

STOPS_MAX = 4
TOKENS_DEFAULT = 128
PRIORITY_MAX = 100


class BadRequest(Exception):  # noqa: N818 - it is the client's, and becomes status 400
    """A request that cannot be served; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


SHOWN_CHARACTERS = 120


def shown(value: object) -> str:
    """A value as messages quote it, cut short where it is long."""
    found = repr(value)
    return found if len(found) <= SHOWN_CHARACTERS else f"{found[:SHOWN_CHARACTERS]}…"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = 0
    """Ours: more urgent requests run first."""
    cache: Literal["use", "read_only", "off"] = "use"
    """Ours: `read_only` stores nothing, `off` neither reads nor stores."""

    # Known to OpenAI's clients, and fulfilled only as they stand here.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[int | str]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str | list[dict[str, Any]]
    name: str | None = None

    def text(self) -> str:
        """What was said, if it is text."""
        if isinstance(self.content, str):
            return self.content
        wrong = [part for part in self.content if part.get("type") != "text"]
        if wrong:
            raise BadRequest(
                f"messages: content has a part of type {wrong[0].get('type')!r}, must be 'text'",
                param="messages",
            )
        return "".join(str(part.get("text", "")) for part in self.content)


class ChatRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def read_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """The request in a body.

    Raises:
        BadRequest: it is no JSON, a field is wrong, or something is asked for that is not done.
    """
    try:
        request = msgspec.convert(_without_nulls(msgspec.json.decode(body)), type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(_plain(str(error)), param=_param(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if isinstance(request, _Common):
        _refuse_what_is_not_done(request)
        _check_ranges(request)
    return request


def _without_nulls(given: object) -> object:
    """A field that is null is one that was left out, as OpenAI has it."""
    if isinstance(given, list):
        return [_without_nulls(each) for each in given]
    if not isinstance(given, dict):
        return given
    return {name: _without_nulls(value) for name, value in given.items() if value is not None}


def _refuse_what_is_not_done(request: _Common) -> None:
    for name, right in (
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("logit_bias", None),
        ("echo", False),
        ("suffix", None),
    ):
        value = getattr(request, name, right)
        if value not in (right, {}):
            raise BadRequest(f"{name} is {value!r}, must be left out here", param=name)
    if isinstance(request, ChatRequest):
        form = (request.response_format or {"type": "text"}).get("type")
        if form != "text":
            raise BadRequest(
                f"response_format is of type {form!r}, must be 'text'", param="response_format"
            )
    elif isinstance(request, CompletionRequest) and request.best_of not in {None, request.n}:
        raise BadRequest(f"best_of is {request.best_of}, must be n or left out", param="best_of")


def _check_ranges(request: _Common) -> None:
    tokens, logprobs = max_tokens_of(request), logprobs_of(request)
    of_logprobs = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    stops_fit = len(request.stops) <= STOPS_MAX and all(request.stops)
    seed_fits = request.seed is None or -(2**63) <= request.seed < 2**63
    wanted: list[tuple[bool, str, object, str]] = [
        (0 <= request.temperature <= 2, "temperature", request.temperature, "from 0 to 2"),
        (0 < request.top_p <= 1, "top_p", request.top_p, "above 0 and at most 1"),
        (1 <= request.n <= ANSWERS_MAX, "n", request.n, f"from 1 to {ANSWERS_MAX}"),
        (seed_fits, "seed", request.seed, "a number of 64 bits"),
        (
            abs(request.priority) <= PRIORITY_MAX,
            "priority",
            request.priority,
            f"from -{PRIORITY_MAX} to {PRIORITY_MAX}",
        ),
        (stops_fit, "stop", request.stop, f"at most {STOPS_MAX} strings, none of them empty"),
        (0 <= logprobs <= LOGPROBS_MAX, of_logprobs, logprobs, f"from 0 to {LOGPROBS_MAX}"),
        (
            not logprobs or wants_logprobs(request),
            of_logprobs,
            logprobs,
            "left out, or logprobs true",
        ),
        (
            tokens is None or 1 <= tokens <= TOKENS_MAX,
            "max_tokens",
            tokens,
            f"from 1 to {TOKENS_MAX}",
        ),
    ]
    for fits, name, value, right in wanted:
        if not fits:
            raise BadRequest(f"{name} is {value!r}, must be {right}", param=name)


def max_tokens_of(request: _Common) -> int | None:
    """The longest answer that is wanted, if the request says."""
    if isinstance(request, ChatRequest):
        given = request.max_completion_tokens
        return request.max_tokens if given is None else given
    return request.max_tokens if isinstance(request, CompletionRequest) else None


def logprobs_of(request: _Common) -> int:
    """So many alternatives are wanted with each token."""
    if isinstance(request, ChatRequest):
        return request.top_logprobs or 0
    return (request.logprobs or 0) if isinstance(request, CompletionRequest) else 0


def wants_logprobs(request: _Common) -> bool:
    """Whether log-probabilities are told at all."""
    if isinstance(request, ChatRequest):
        return request.logprobs
    return isinstance(request, CompletionRequest) and request.logprobs is not None


def _plain(message: str) -> str:
    """Msgspec says where, as `- at `$.field``; a client wants the field's name."""
    what, _, where = message.partition(" - at ")
    return f"{_field(where)}: {what}" if where else what


def _param(message: str) -> str | None:
    _, _, where = message.partition(" - at ")
    if where:
        return _field(where)
    # An unknown or missing field is named in the message itself.
    return message.split("`")[1] if message.count("`") >= 2 else None


def _field(where: str) -> str:
    return where.strip("`").removeprefix("$.")
