"""The handoff's public calls with hostile arguments: refused, and nothing has changed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.errors import PenstockError
from tests.handoff.conftest import BLOCK, SETTINGS, Engines, a_pair, memory
from tests.runtime.test_hostile_arguments import HOSTILE, IndexFails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REFUSALS = (ValueError, PenstockError, IndexFails)
PROMPT = [1, 2, 3]
CALLS: dict[str, dict[str, Any]] = {
    "prefill.offer": {"tokens": PROMPT, "slots": [0], "cached_tokens": 0, "origin": ""},
    "prefill.offer_by_rank": {
        "tokens": PROMPT,
        "slots": [[0]],
        "first_blocks": [0],
        "origin": "",
    },
    "prefill.extend": {"slots": []},
    "prefill.restart": {},
    "decode.claim_by_rank": {
        "tokens": PROMPT,
        "slots": [[0]],
        "origin": "",
        "epoch": 1,
        "part_tokens": BLOCK,
    },
    "decode.claim": {"tokens": PROMPT, "slots": [0], "cached_tokens": 0, "origin": "", "epoch": 1},
    "prefill.first_token": {"token": 1, "drafts": ()},
    "prefill.computed": {"tokens": None, "layer": 0, "stream": None},
    "prefill.cancel": {"why": ""},
    "prefill.rank_died": {"rank": 0},
    "decode.cancel": {"why": ""},
    "decode.withdraw": {},
    "decode.rank_died": {"rank": 0},
    "decode.wait": {"deadline": None, "descriptors": ()},
    "prefill.drive": {"deadline": None},
}
WITHOUT_NAME = {"prefill.computed", "prefill.rank_died", "decode.rank_died", "decode.wait"}


@pytest.fixture(scope="module", name="both")
def open_both() -> Iterator[Engines]:
    with ExitStack() as stack:
        engines = Engines(stack)
        engines.meet()
        yield engines


def refused(call: Callable[..., Any], *given: object, **named: object) -> bool:
    try:
        call(*given, **named)
    except REFUSALS:
        return True
    return False


def state(engines: Engines) -> list[object]:
    return [engines.prefill.statistics(), engines.decode.statistics()]


@pytest.mark.parametrize("called", CALLS)
def test_a_hostile_argument_is_refused_and_the_handoff_goes_on(both: Engines, called: str) -> None:
    for number, hostile in enumerate(HOSTILE):
        for argument in (*CALLS[called], "timeout_s", "handoff"):
            name = f"{called} {argument} {number}"
            arguments = {**CALLS[called]}
            side, _, method = called.partition(".")
            call = getattr(both.prefill if side == "prefill" else both.decode, method)
            if "deadline" in arguments:
                arguments["deadline"] = time.monotonic()
            elif called == "prefill.computed":
                arguments["tokens"] = {name: len(PROMPT)}
            elif called not in WITHOUT_NAME:
                arguments["handoff"] = name
            if argument in {"timeout_s", "handoff"} and argument not in call.__annotations__:
                continue
            if argument == "deadline" and not refused(as_past, hostile):
                continue  # A time in the future: it would be waited for.
            begin(both, name, without=called)
            before = state(both)
            if refused(call, **{**arguments, argument: hostile}):
                assert state(both) == before
            both.prefill.step()
            both.decode.step()
            end(both, name, hostile)


def begin(both: Engines, name: str, *, without: str) -> None:
    """A handoff of this name is under way, but for the call that is tried."""
    if not without.startswith("prefill.offer"):
        both.prefill.offer(name, PROMPT, slots=[0])
    if not without.startswith("decode.claim"):
        both.decode.claim(name, PROMPT, slots=[0])


def end(both: Engines, *names: object) -> None:
    for name in names:
        refused(both.prefill.cancel, name)
        refused(both.decode.cancel, name)


def as_past(deadline: object) -> None:
    if isinstance(deadline, int | float) and deadline > time.monotonic():
        return
    raise ValueError


@pytest.mark.parametrize("opened", [penstock.open_prefill, penstock.open_decode])
def test_a_hostile_argument_opens_nothing(opened: Callable[..., penstock.Handoff]) -> None:
    pair = a_pair()
    right = {"kv": memory(), "block_tokens": BLOCK, "settings": SETTINGS, "timeout_s": 10.0}
    own = ("folder",) if opened is penstock.open_decode else ()

    for argument in (*right, "layout", "rank", *own):
        for hostile in HOSTILE:
            try:
                opened(pair, **{**right, argument: hostile}).close()
            except REFUSALS:
                continue

    # Whatever was refused has left nothing at the addresses.
    with opened(pair, **right) as handoff:
        handoff.step()


@pytest.mark.parametrize(
    "settings", [penstock.HandoffTimes, penstock.HandoffBounds, penstock.HandoffSettings]
)
def test_a_hostile_setting_is_refused_by_its_name(settings: type) -> None:
    names, refused = [each.name for each in fields(settings)], set()
    for name in names:
        for hostile in HOSTILE:
            try:
                made = settings(**{name: hostile})
            except penstock.ConfigError as error:
                refused.add(error.field)
            except IndexFails:
                continue
            else:
                assert type(getattr(made, name)) in {int, float}
    assert refused == set(names)


@pytest.mark.parametrize("hostile", [None, 1, "text", b"", object(), [], {}])
def test_a_pair_is_made_of_engines_and_texts(hostile: object) -> None:
    pair = a_pair()
    right = {"prefill": pair.prefill, "decode": pair.decode, "model": "m", "weights": "w"}

    for name in ("prefill", "decode"):
        with pytest.raises(ValueError, match=name):
            penstock.HandoffPair(**{**right, name: hostile})
    for name in ("model", "weights"):
        if not isinstance(hostile, str):
            with pytest.raises(ValueError, match=name):
                penstock.HandoffPair(**{**right, name: hostile})
