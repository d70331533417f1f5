"""The fields of a request: how each is read, and the message if it is refused.

| kind of field | what happens                                                             |
|---------------|--------------------------------------------------------------------------|
| read          | checked for type and range, and used                                      |
| a label       | checked for its type; it changes no answer and is not stored              |
| unsupported   | accepted with a neutral value, refused with any other                     |
| any other     | refused, with the nearest known name                                      |

The one rule: an option without effect is refused, never ignored. A client that asks for tools must
not silently get none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

import msgspec

from penstock.config import Flag, Number, String, ValueKind, Whole
from penstock.errors import shown

LABELS_MAX = 16

Read = Callable[[str, Any], Any]
"""Reads the value of the named field; raises `BadRequest`."""


class BadRequest(Exception):  # noqa: N818 - it is the client's, and becomes status 400
    """A wrong request; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


def refuse(name: str, value: object, right: str) -> NoReturn:
    """Raises `BadRequest` with the field, its value, and what would be right."""
    raise BadRequest(f"{name} is {shown(value)}, must be {right}", param=name)


# Readers of values.


def read_as(kind: ValueKind[Any], right: str = "") -> Read:
    """The reader of a kind of values, as the configuration file has them, too."""
    taken, is_whole = kind.taken, isinstance(kind, Whole)

    def read(name: str, value: object) -> object:
        if is_whole and isinstance(value, float) and value.is_integer():
            value = int(value)  # In JSON, 16.0 is a whole number.
        found = taken(value)
        if found is None:
            refuse(name, value, right or str(kind))
        return found

    return read


flag = read_as(Flag())
word = read_as(String())


def one_of(*choices: str) -> Read:
    return read_as(String(choices=choices), f"one of {', '.join(map(repr, choices))}")


def whole(minimum: int, maximum: int, right: str = "") -> Read:
    return read_as(Whole(minimum=minimum, maximum=maximum), right)


def number(minimum: float, maximum: float, right: str = "") -> Read:
    return read_as(Number(minimum=minimum, maximum=maximum), right)


def labels(name: str, value: object) -> dict[str, str]:
    """A small table of strings."""
    if (
        not isinstance(value, dict)
        or len(value) > LABELS_MAX
        or not all(isinstance(each, str) for each in value.values())
    ):
        refuse(name, value, f"a table of at most {LABELS_MAX} strings")
    return value


def only(neutral: tuple[object, ...], why: str) -> Read:
    """A reader that accepts only neutral values of an unsupported field."""

    def read(name: str, value: object) -> object:
        # 0 and 0.0 are the same, 0 and false are not.
        if not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
        ):
            refuse(name, value, why)
        return value

    return read


LABELS: Mapping[str, Read] = {
    "user": word,
    "safety_identifier": word,
    "metadata": labels,
    "request_id": word,
}
"""Labels of a request. They are not stored, and no answer depends on them."""


def _left_out(because: str) -> str:
    return f"left out: {because}"


_NO_TOOLS = _left_out("this server calls no tools")
_NO_GRAMMAR = _left_out("answers follow no grammar here")
_NO_TEMPLATE = _left_out("messages are put together by the model's own chat template")

_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    # OpenAI's.
    "store": ((False,), "false: answers are not stored here"),
    "service_tier": (("auto", "default"), "'auto' or 'default': there is one tier"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), "'none': this server calls no tools"),
    "parallel_tool_calls": ((False, True), "true or false, which changes nothing: no tools"),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), "'none': this server calls no tools"),
    "modalities": ((["text"],), "['text']"),
    "audio": ((), _left_out("answers are text")),
    "prediction": ((), _left_out("answers are not predicted")),
    "reasoning_effort": (("none",), "'none': models here do not reason apart"),
    "verbosity": (("medium",), "'medium': answers are as long as the model makes them"),
    "web_search_options": ((), _left_out("nothing is searched")),
    "suffix": (("",), _left_out("answers only follow a prompt")),
    # Of other servers, whose clients send them with the default value.
    "use_beam_search": ((False,), "false: beams are not searched"),
    "length_penalty": ((1,), "1: beams are not searched"),
    "early_stopping": ((False,), "false: beams are not searched"),
    "include_stop_str_in_output": ((False,), "false: what stops an answer is no part of it"),
    "skip_special_tokens": ((True,), "true: special tokens are no part of an answer"),
    "spaces_between_special_tokens": ((True, False), "true or false, which changes nothing"),
    "detokenize": ((True,), "true: answers are text"),
    "truncate_prompt_tokens": ((), _left_out("prompts are never cut")),
    "prompt_logprobs": ((), _left_out("`echo` with `logprobs` returns them")),
    "add_special_tokens": ((True,), "true"),
    "return_tokens_as_token_ids": ((False,), "false: `token_id` is beside each token"),
    "return_token_ids": ((False,), "false: `token_id` is beside each token"),
    "allowed_token_ids": (([],), _left_out("`logit_bias` can do the same")),
    "bad_words": (([],), _left_out("`logit_bias` can do the same")),
    "logits_processors": (([],), _left_out("there are none here")),
    "guided_json": ((), _NO_GRAMMAR),
    "guided_regex": ((), _NO_GRAMMAR),
    "guided_choice": ((), _NO_GRAMMAR),
    "guided_grammar": ((), _NO_GRAMMAR),
    "structured_outputs": ((), _NO_GRAMMAR),
    "cache_salt": ((), _left_out("the header x-penstock-tenant keeps caches apart")),
    "kv_transfer_params": ((), _left_out("pairs are chosen by the router")),
    "documents": (([],), _NO_TEMPLATE),
    "chat_template": ((), _NO_TEMPLATE),
    "chat_template_kwargs": (({},), _left_out("only chats have a template")),
    "add_generation_prompt": ((True,), "true: the assistant speaks next"),
    "continue_final_message": ((False,), "false: the assistant speaks next"),
}
"""Fields with their neutral values, and what is right instead of any other."""
NOT_DONE = {name: only(neutral, why) for name, (neutral, why) in _UNSUPPORTED.items()}


def read_fields(
    given: Mapping[str, object], known: Mapping[str, Read], at: str = ""
) -> dict[str, Any]:
    """The supported fields of an object; null is the same as absent.

    Raises `BadRequest`: a field is wrong, unknown, or unsupported.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        place = f"{at}{name}"
        if name in known:
            found[name] = known[name](place, value)
        elif not at and (name in LABELS or name in NOT_DONE):
            (LABELS.get(name) or NOT_DONE[name])(place, value)
        else:
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise BadRequest(f"{place} is no field that this server knows{meant}", param=place)
    return found


def readers_of(shape: type) -> dict[str, Read]:
    """The readers of a class's fields: `Annotated` has each behind its type; others have none."""
    hints = get_type_hints(shape, include_extras=True)
    annotated = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: hint.__metadata__[0] for name, hint in annotated.items()}


def read_object(body: bytes) -> dict[str, object]:
    """Reads a body as a JSON object.

    Raises `BadRequest`: it is not one.
    """
    if not body:
        raise BadRequest("the body is empty, must be a JSON object")
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadRequest(f"the body is {shown(given)}, must be a JSON object")
    return given
