"""Requests in OpenAI's format, with the fields that other servers have added.

A request is read field by field, each by the reader in its annotation (`fields.py`), and then
checked as a whole. Options that it does not set, such as the temperature, have the model's defaults
(`defaults_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from penstock.errors import shown
from penstock.toolkit import (
    HINT_FIELDS,
    NO_HINTS,
    RETENTIONS,
    RetentionHints,
    read_hints,
    with_retention,
)
from penstock_serve.engine.requests import ANSWERS_MAX, TOKENS_MAX
from penstock_serve.engine.sampling_options import BIAS_MAX, BIASES_MAX, RANGES, TOP_K_MAX
from penstock_serve.server.fields import (
    BadRequest,
    flag,
    number,
    one_of,
    only,
    read_as,
    read_fields,
    read_object,
    readers_of,
    refuse,
    whole,
    word,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock_serve.server.fields import Read

STOPS_MAX = 32
STOP_CHARACTERS_MAX = 256
"""Every token of an answer is compared with all prefixes of all stop strings."""
PROMPTS_MAX = 128
TOKENS_DEFAULT = 128
TOKEN_END = 1 << 31
"""The largest token that a message can hold; the instance checks the vocabulary."""
PRIORITY_MAX = 100
CACHE_KEY_CHARACTERS_MAX = 512
"""It is remembered for a while; OpenAI's own clients send up to 64."""
ROLES = ("system", "developer", "user", "assistant")
TEMPLATE_VARIABLES_MAX = 16
TEMPLATE_OWN = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"),
        *("mask_token", "additional_special_tokens", "raise_exception", "strftime_now"),
    }
)
"""What a template gets from the server and its tokenizer."""
_TOP_P = "a number above 0 and at most 1"
_TEXTS = "a text, or a list of texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """The fields of completions and chats, and how each is read; `None`: the model's default."""

    model: Annotated[str | None, word] = None
    temperature: Annotated[float | None, read_as(RANGES["temperature"])] = None
    top_p: Annotated[float | None, read_as(RANGES["top_p"], _TOP_P)] = None
    top_k: Annotated[int | None, _top_k] = None
    min_p: Annotated[float | None, read_as(RANGES["min_p"])] = None
    repetition_penalty: Annotated[float | None, read_as(RANGES["repetition_penalty"])] = None
    presence_penalty: Annotated[float, read_as(RANGES["presence_penalty"])] = 0.0
    frequency_penalty: Annotated[float, read_as(RANGES["frequency_penalty"])] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], _biases] = ()
    n: Annotated[int, whole(1, ANSWERS_MAX)] = 1
    seed: Annotated[int | None, whole(-(2**63), 2**63 - 1, "a whole number of 64 bits")] = None
    stop: Annotated[tuple[str, ...], _stops] = ()
    stop_token_ids: Annotated[tuple[int, ...], _stop_tokens] = ()
    ignore_eos: Annotated[bool, flag] = False
    min_tokens: Annotated[int, whole(0, TOKENS_MAX)] = 0
    max_tokens: int | None = None
    stream: Annotated[bool, flag] = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    logprobs: int | None = None
    """Alternatives that are returned with each token; `None`: no log-probabilities at all."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    priority: Annotated[int, whole(-PRIORITY_MAX, PRIORITY_MAX)] = 0
    """Ours: more urgent requests run first."""
    cache: Annotated[str, one_of("use", "read_only", "off")] = "use"
    """Ours: `read_only` stores nothing, `off` neither reads nor stores."""
    hints: RetentionHints = NO_HINTS
    """How long its blocks are worth keeping: our field `penstock`, and `prompt_cache_retention`."""
    prompt_cache_key: Annotated[str, _cache_key] = ""
    """Requests with the same key go to the same instance, where several would do."""

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are returned."""
        return self.echo and self.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(TextRequest):
    """`POST /v1/completions`."""

    prompts: tuple[str | list[int], ...]
    """Texts or tokens, each with its own answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    """`POST /v1/chat/completions`."""

    messages: tuple[dict[str, str], ...]
    """Each with `role` and `content`, and `name` if it has one."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the model's chat template, such as `enable_thinking`."""


def read_completion(body: bytes) -> CompletionRequest:
    """The request in the body of `POST /v1/completions`.

    Raises `BadRequest`: it is not JSON, or a field is wrong or unsupported.
    """
    found = read_fields(read_object(body), _COMPLETION)
    if "prompt" not in found:
        raise BadRequest("prompt is missing, must be a text or tokens", param="prompt")
    best = found.pop("best_of", None)
    if best is not None and best != found.get("n", 1):
        refuse("best_of", best, "as many as n, or left out: no answer is made to be thrown away")
    return CompletionRequest(prompts=found.pop("prompt"), **_common(found))


def read_chat(body: bytes) -> ChatRequest:
    """The request in the body of `POST /v1/chat/completions`.

    Raises `BadRequest`: it is not JSON, or a field is wrong or unsupported.
    """
    found = read_fields(read_object(body), _CHAT)
    if "messages" not in found:
        raise BadRequest("messages is missing, must be a list of messages", param="messages")
    if "max_completion_tokens" in found:
        found["max_tokens"] = found.pop("max_completion_tokens")
    top, wanted = found.pop("top_logprobs", 0), found.pop("logprobs", False)
    if top and not wanted:
        refuse("top_logprobs", top, "left out, or logprobs true")
    if wanted:
        found["logprobs"] = top
    return ChatRequest(**_common(found))


def _common(found: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields that depend on each other."""
    options = found.pop("stream_options", None) or {}
    found["include_usage"] = options.get("include_usage", False)
    found.pop("response_format", None)
    found["hints"] = _hints(found)
    longest = found.get("max_tokens")
    if longest is not None and found.get("min_tokens", 0) > longest:
        refuse("min_tokens", found["min_tokens"], f"at most max_tokens, {longest}")
    return found


# Readers of structured values.


def _stops(name: str, value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > STOPS_MAX
        or not all(
            isinstance(each, str) and 1 <= len(each) <= STOP_CHARACTERS_MAX for each in stops
        )
    ):
        refuse(
            name,
            value,
            f"a string or at most {STOPS_MAX} strings, each of 1 to {STOP_CHARACTERS_MAX} "
            "characters",
        )
    return tuple(stops)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_END


def _stop_tokens(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > STOPS_MAX or not all(map(_is_token, value)):
        refuse(name, value, f"at most {STOPS_MAX} tokens")
    return tuple(value)


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    right = f"a table of at most {BIASES_MAX} tokens"
    if not isinstance(value, dict) or len(value) > BIASES_MAX:
        refuse(name, value, right)
    amount = number(-BIAS_MAX, BIAS_MAX)
    found: dict[int, float] = {}
    for token, bias in value.items():
        if not token.isascii() or not token.isdigit() or not _is_token(int(token[:20])):
            refuse(name, value, f"{right}: {shown(token)} is none")
        found[int(token)] = amount(f"{name}.{token}", bias)
    return tuple(found.items())


def _stream_options(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(name, value, "a table with include_usage")
    return read_fields(value, _STREAM_OPTIONS, f"{name}.")


def _top_k(name: str, value: object) -> int:
    wanted: int = whole(-1, TOP_K_MAX)(name, value)
    return max(0, wanted)


def _response_format(name: str, value: object) -> object:
    if not isinstance(value, dict) or value.get("type") != "text":
        refuse(name, value, "{'type': 'text'}: answers follow no grammar here")
    return value


def _hints(found: dict[str, Any]) -> RetentionHints:
    """Takes the hints out of the fields that were read."""
    hints = found.pop("penstock", NO_HINTS)
    retention = found.pop("prompt_cache_retention", None)
    return hints if retention is None else with_retention(hints, retention)


def read_request_hints(given: Mapping[str, object]) -> RetentionHints:
    """The hints in the fields `penstock` and `prompt_cache_retention` of a request.

    Raises `BadRequest`: one of them is wrong.
    """
    return _hints(read_fields(given, _HINTS))


def read_cache_key(given: Mapping[str, object]) -> str:
    """The field `prompt_cache_key` of a request, empty if it has none.

    Raises `BadRequest`: it is wrong.
    """
    found: str = read_fields(given, {"prompt_cache_key": _cache_key}).get("prompt_cache_key", "")
    return found


def _penstock(name: str, value: object) -> RetentionHints:
    if not isinstance(value, dict):
        refuse(name, value, f"a table with {', '.join(HINT_FIELDS)}")
    try:
        return read_hints(value, name)
    except ValueError as error:
        # The message begins with the field.
        raise BadRequest(str(error), param=str(error).split(" ", 1)[0]) from error


def _cache_key(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > CACHE_KEY_CHARACTERS_MAX:
        refuse(name, value, f"a string of at most {CACHE_KEY_CHARACTERS_MAX} characters")
    return value


def _completion_logprobs(name: str, value: object) -> int | None:
    # Clients that have one field for both paths send false here.
    return None if value is False else read_as(RANGES["logprobs"])(name, value)


def _prompts(name: str, value: object) -> tuple[str | list[int], ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        refuse(name, value, "a text, tokens, or a list of these")
    if not value:
        raise BadRequest(f"{name} is empty, must have at least one token", param=name)
    if _are_whole(value):
        return (_tokens(name, value),)
    if len(value) > PROMPTS_MAX:
        raise BadRequest(
            f"{name} has {len(value)} entries, must have at most {PROMPTS_MAX}", param=name
        )
    return tuple(read_prompt(f"{name}[{at}]", each) for at, each in enumerate(value))


def read_prompt(name: str, value: object) -> str | list[int]:
    """The value of a field that holds one prompt: a text, or tokens."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        refuse(name, value, "a text, or tokens")
    return _tokens(name, value)


def _tokens(name: str, value: list[Any]) -> list[int]:
    # Without a call for each of thousands of tokens, unless one is wrong.
    if not _are_whole(value) or min(value) < 0 or max(value) >= TOKEN_END:
        wrong = [token for token in value if not _is_token(token)]
        raise BadRequest(
            f"{name} has token {shown(wrong[0])}, must be from 0 to {TOKEN_END - 1}", param=name
        )
    return value


def _are_whole(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


def read_messages(name: str, value: object) -> tuple[dict[str, str], ...]:
    """The value of a field that holds a conversation."""
    if not isinstance(value, list):
        refuse(name, value, "a list of messages")
    if not value:
        raise BadRequest(f"{name} is empty, must have at least one message", param=name)
    return tuple(_message(f"{name}[{at}]", each) for at, each in enumerate(value))


def _message(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        refuse(name, value, "a table with role and content")
    found = read_fields(value, _MESSAGE, f"{name}.")
    for needed, right in (("role", f"one of {', '.join(ROLES)}"), ("content", _TEXTS)):
        if needed not in found:
            # JSON's null is the same as absent, but not to whoever sent it.
            given = "null" if needed in value else "missing"
            place = f"{name}.{needed}"
            raise BadRequest(f"{place} is {given}, must be {right}", param=place)
    kept: dict[str, str] = {key: found[key] for key in ("role", "content", "name") if key in found}
    if kept["role"] == "developer":
        # OpenAI's newer name for it; chat templates know the older one.
        kept["role"] = "system"
    return kept


def _template_variables(name: str, value: object) -> dict[str, Any]:
    right = f"a table of at most {TEMPLATE_VARIABLES_MAX} names, each with a text, number or flag"
    if not isinstance(value, dict) or len(value) > TEMPLATE_VARIABLES_MAX:
        refuse(name, value, right)
    for each, given in value.items():
        if each in TEMPLATE_OWN or not each.isidentifier():
            raise BadRequest(
                f"{name} has {shown(each)}, must have names of variables that the server does not "
                "set itself",
                param=name,
            )
        if not isinstance(given, str | int | float | bool | None):
            refuse(f"{name}.{each}", given, "a text, a number, or true or false")
    return value


def _content(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(name, value, _TEXTS)
    return "".join(_part(f"{name}[{at}]", each) for at, each in enumerate(value))


def _part(name: str, value: object) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        kind = value.get("type") if isinstance(value, dict) else value
        refuse(f"{name}.type", kind, "'text'")
    text = value.get("text")
    if not isinstance(text, str):
        refuse(f"{name}.text", text, "a string")
    return text


_STREAM_OPTIONS: Mapping[str, Read] = {
    "include_usage": flag,
    "include_obfuscation": only((False,), why="false: streams are not padded"),
    "continuous_usage_stats": only((False,), why="false: the usage comes at the end"),
}
_NO_CALLS = "left out: this server calls no tools"
_MESSAGE: Mapping[str, Read] = {
    "role": one_of(*ROLES),
    "content": _content,
    "name": word,
    # Fields of an answer that a client sends back with the next turn.
    "refusal": only(("",), why="left out"),
    "annotations": only(([],), why="left out"),
    "tool_calls": only(([],), why=_NO_CALLS),
    "function_call": only((), why=_NO_CALLS),
    "tool_call_id": only((), why=_NO_CALLS),
    "audio": only((), why="left out: messages are text"),
}
_HINTS: Mapping[str, Read] = {
    "penstock": _penstock,
    "prompt_cache_retention": one_of(*RETENTIONS),
}
_TEXT: Mapping[str, Read] = {
    **readers_of(TextRequest),
    **_HINTS,
    "stream_options": _stream_options,
    "response_format": _response_format,
}
_COMPLETION: Mapping[str, Read] = {
    **_TEXT,
    "prompt": _prompts,
    "max_tokens": whole(0, TOKENS_MAX),
    "logprobs": _completion_logprobs,
    "echo": flag,
    "best_of": whole(1, ANSWERS_MAX),
}
_CHAT: Mapping[str, Read] = {
    **_TEXT,
    "messages": read_messages,
    "chat_template_kwargs": _template_variables,
    "max_tokens": whole(1, TOKENS_MAX),
    "max_completion_tokens": whole(1, TOKENS_MAX),
    "logprobs": flag,
    "top_logprobs": read_as(RANGES["logprobs"]),
    "echo": only((False,), why="false: a chat's answer is the next message alone"),
}
