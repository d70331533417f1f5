"""Requests of OpenAI's API on their way to vLLM, read only as far as the router needs.

| to             | what is changed                                                               |
|----------------|-------------------------------------------------------------------------------|
| prefill server | one token, no stream, no log-probabilities; `kv_transfer_params`               |
| decode server  | `kv_transfer_params`                                                           |
| both           | `penstock` and `prompt_cache_retention` become hints in `kv_transfer_params`   |

`prompt_cache_key` is read, and passes; all other fields pass unread, also unknown ones. What is no
JSON object goes to a decode server as it is: vLLM says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from penstock_serve.server.fields import BadRequest
from penstock_serve.server.openai_requests import read_cache_key, read_request_hints
from penstock_serve.server.vllm_server import VllmRequest, chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock_serve.server.vllm_server import Headers, WholeAnswer

CHAT = "/v1/chat/completions"
_OF_ONE_CONNECTION = {
    b"accept-encoding",  # The first event of a stream is read here.
    b"connection",
    b"content-length",
    b"expect",
    b"host",
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_NOT_OF_ANSWERS = _OF_ONE_CONNECTION | {b"date", b"server", b"x-request-id"}
_NOT_FOR_PREFILL = {"stream_options", "logprobs", "top_logprobs", "min_tokens", "echo"}
_TRUE, _FALSE, _ONE = (msgspec.Raw(each) for each in (b"true", b"false", b"1"))

Fields = dict[str, msgspec.Raw]


class _Switches(msgspec.Struct):
    """Fields that say whether a prompt can be handed over."""

    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    echo: Any = None
    logprobs: Any = None
    kv_transfer_params: Any = None

    def forbid_handoff(self) -> bool:
        several = any(each not in {None, 1} for each in (self.n, self.best_of) if _is_plain(each))
        scored = self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)
        own = self.kv_transfer_params is not None or self.prompt_embeds is not None
        return bool(several or scored or own or self.use_beam_search)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A request for an answer to a prompt."""

    path: str
    headers: Headers
    body: bytes
    fields: Fields | None
    """The fields of the body; `None` if it is no JSON object."""
    chunks: list[bytes]
    """The names of the prompt's beginnings, see `PromptMemory`."""
    may_hand_over: bool
    """Whether another server can compute the prompt for the one that answers."""
    hints: dict[str, float] = field(default_factory=dict)
    """What the client says about the blocks of the prompt, for the connector."""
    affinity: tuple[bytes, str] | None = None
    """What it has in common with requests that should go to the same servers: salt and key."""

    @classmethod
    def read(cls, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> PromptRequest:
        """Reads a request.

        Raises `BadRequest`: its hints or its cache key are wrong: vLLM could not say so.
        """
        kept = [pair for pair in headers if pair[0] not in _OF_ONE_CONNECTION]
        try:
            fields = msgspec.json.decode(body, type=Fields)
            switches = msgspec.json.decode(body, type=_Switches)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls(
                path=path, headers=kept, body=body, fields=None, chunks=[], may_hand_over=False
            )
        hints = _take_hints(fields)
        prompt = bytes(fields.get("messages" if path == CHAT else "prompt", b""))
        context = (bytes(fields.get(name, b"")) for name in ("model", "cache_salt", "tools"))
        return cls(
            path=path,
            headers=kept,
            body=body,
            fields=fields,
            chunks=chunks_of(prompt.strip()[:-1], *context),
            may_hand_over=(path == CHAT or _is_one(prompt)) and not switches.forbid_handoff(),
            hints=hints,
            affinity=_affinity(fields),
        )

    def for_prefill(self, handoff: str) -> VllmRequest:
        """The request that has a prefill server compute the prompt."""
        assert self.fields is not None
        fields = {name: raw for name, raw in self.fields.items() if name not in _NOT_FOR_PREFILL}
        fields |= {"max_tokens": _ONE, "stream": _FALSE}
        if self.path == CHAT:
            fields["max_completion_tokens"] = _ONE
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "penstock": {"handoff": handoff, **self.hints},
        }
        return self._with(fields, _raw(params))

    def for_decode(self, handoff: str, address: str) -> VllmRequest:
        """The request for the server that answers, while `address` computes the prompt."""
        assert self.fields is not None
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "penstock": {"handoff": handoff, "address": address, **self.hints},
        }
        return self._with(self.fields, _raw(params))

    def for_decode_after(self, params: msgspec.Raw) -> VllmRequest:
        """The request for the server that answers, with what the prefill server has said."""
        assert self.fields is not None
        if self.hints:
            said = msgspec.json.decode(params, type=dict[str, Any])
            params = _raw({**said, "penstock": {**said["penstock"], **self.hints}})
        return self._with(self.fields, params)

    def for_decode_alone(self) -> VllmRequest:
        """The request as it came, and its hints where the connector reads them."""
        if self.fields is not None and self.hints:
            return self._with(self.fields, _raw({"penstock": self.hints}))
        return VllmRequest(method="POST", path=self.path, headers=self.headers, body=self.body)

    def _with(self, fields: Fields, params: msgspec.Raw) -> VllmRequest:
        body = msgspec.json.encode({**fields, "kv_transfer_params": params})
        return VllmRequest(method="POST", path=self.path, headers=self.headers, body=body)


def _take_hints(fields: Fields) -> dict[str, float]:
    """Takes our field and OpenAI's out of the others, and returns them as hints."""
    given: dict[str, object] = {
        name: msgspec.json.decode(fields.pop(name))
        for name in ("penstock", "prompt_cache_retention")
        if name in fields
    }
    hints = read_request_hints(given).given
    if hints and bytes(fields.get("kv_transfer_params", b"null")) != b"null":
        raise BadRequest(
            "penstock is beside kv_transfer_params, must be in it, or kv_transfer_params left out",
            param="penstock",
        )
    return hints


def _affinity(fields: Fields) -> tuple[bytes, str] | None:
    given = {"prompt_cache_key": msgspec.json.decode(fields.get("prompt_cache_key", b"null"))}
    key = read_cache_key(given)
    # A salt may be as long as the body: a digest stands for it.
    salt = blake2b(fields.get("cache_salt", b""), digest_size=16).digest()
    return (salt, key) if key else None


class _Own(msgspec.Struct):
    """Penstock's part of `kv_transfer_params`."""

    address: str = ""


class _Params(msgspec.Struct):
    penstock: _Own | None = None


class _Computed(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def read_computed(answer: WholeAnswer) -> tuple[msgspec.Raw, str]:
    """What a prefill server has said: the parameters for the decode server, and its own address.

    The address is empty if it hands nothing over.
    """
    try:
        params = msgspec.json.decode(answer.body, type=_Computed).kv_transfer_params
        said = msgspec.json.decode(params, type=_Params | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.Raw(b"null"), ""
    # A copy: it would keep the whole answer otherwise.
    return params.copy(), said.penstock.address if said and said.penstock else ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class AnswerHead(msgspec.Struct):
    """What the access log says of an answer."""

    id: str = ""
    usage: _Usage | None = None

    @classmethod
    def read(cls, body: bytes) -> AnswerHead:
        """Reads a whole answer or the first event of a stream; nothing is found in others."""
        try:
            found = msgspec.json.decode(body.removeprefix(b"data: ").strip(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls()
        # It becomes a header.
        return found if found.id.isascii() and found.id.isprintable() else cls(usage=found.usage)


def relayed(headers: Headers) -> Headers:
    """The headers of an answer that the client gets, too."""
    return [pair for pair in headers if pair[0] not in _NOT_OF_ANSWERS]


def _is_one(prompt: bytes) -> bool:
    """Whether the JSON of `prompt` is one prompt: a text, a list of tokens, or a list of one."""
    inner = prompt.strip()[1:].lstrip()[:1]
    if not prompt.strip().startswith(b"["):
        return bool(prompt)
    return inner.isdigit() or len(msgspec.json.decode(prompt, type=list[msgspec.Raw])) == 1


def _is_plain(value: object) -> bool:
    """Whether it can be compared; vLLM refuses what cannot."""
    return value is None or isinstance(value, int)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
