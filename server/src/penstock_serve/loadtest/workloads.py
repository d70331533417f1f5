"""What a load test asks: sessions of one or more turns, made from a seed or from a trace.

| workload        | every session                                                                |
|-----------------|------------------------------------------------------------------------------|
| `conversations` | a chat that grows by a question and an answer each turn                      |
| `shared`        | one question after one of a few long system prompts                          |
| `documents`     | a long document of its own, and several questions about it                   |
| `agents`        | a task after a shared list of tools; each step adds the result of a tool     |
| of a trace      | one request; prompts have equal beginnings where those of the trace have     |

Text consists of common English words, each about one token: servers say in `usage` how many tokens
they counted. The answers in a history are part of the script unless the caller puts in the
server's own, so that two servers are asked exactly the same.

The one rule: everything here follows from the seed and the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random
from typing import TYPE_CHECKING

from penstock.config import parse_config
from penstock.errors import ConfigError
from penstock.toolkit import TraceReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.toolkit import TraceRequest

_WORD_LIST = """
able about above across act add after again age ago agree air all allow almost alone along
already also always among amount and animal answer any appear apple are area arm around arrive
art ask away baby back bad ball bank base bear beat became because become bed been before began
begin behind believe below best better between big bird black blood blue board boat body bone
book both bottom bought box boy branch bread break bright bring broad brother brought brown build
burn busy but buy call came camp can capital captain car care carry case cat catch cause cell
center century certain chair chance change character charge chart check chief child choose
church circle city claim class clean clear climb clock close cloth cloud coast coat cold collect
color column come common company compare complete condition connect consider contain continue
control cook cool copy corn corner correct cost cotton could count country course cover cow
create crop cross crowd cry current cut dance danger dark day dead deal dear death decide deep
degree depend describe desert design determine develop did differ difficult direct discuss
distant divide doctor does dog dollar done door double down draw dream dress drink drive drop
dry during each ear early earth ease east eat edge effect egg eight either electric element else
end enemy energy engine enough enter equal even evening event ever every exact example except
excite exercise expect experience experiment eye face fact fair fall family famous far farm fast
fat father favor fear feed feel feet
"""
WORDS = tuple(_WORD_LIST.split())
"""256: one for each byte of a key, so that different keys are different texts."""
VARIATION = (0.5, 1.5)
"""Turns have lengths between these parts of the given one."""
TRACE_BLOCK_TOKENS = 16
"""A key of a trace has 16 bytes, and each of them becomes one word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The shape of the sessions of a workload; lengths are in words, about as many tokens."""

    prefixes: int
    """How many different system prompts sessions share."""
    system_tokens: int
    context_tokens: int
    """What a session begins with and no other session has."""
    turn_tokens: int
    output_tokens: int
    turns: int
    gap_s: float
    """The mean time between an answer and the next turn: somebody reads, or a tool runs."""
    keeps_history: bool = True

    def __post_init__(self) -> None:
        for name in ("prefixes", "turn_tokens", "output_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("system_tokens", "context_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.gap_s < math.inf:
            raise ValueError(f"gap_s: must be seconds from 0 on, got {self.gap_s}")


PROFILES = {
    "conversations": Profile(
        prefixes=1,
        system_tokens=100,
        context_tokens=0,
        turn_tokens=200,
        output_tokens=150,
        turns=5,
        gap_s=2.0,
    ),
    "shared": Profile(
        prefixes=4,
        system_tokens=2000,
        context_tokens=0,
        turn_tokens=100,
        output_tokens=100,
        turns=1,
        gap_s=0.0,
    ),
    "documents": Profile(
        prefixes=1,
        system_tokens=50,
        context_tokens=8000,
        turn_tokens=40,
        output_tokens=100,
        turns=4,
        gap_s=1.0,
        keeps_history=False,
    ),
    "agents": Profile(
        prefixes=1,
        system_tokens=3000,
        context_tokens=500,
        turn_tokens=600,
        output_tokens=60,
        turns=10,
        gap_s=1.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTurn:
    """One request of a session."""

    messages: tuple[ChatMessage, ...]
    """What it adds to the history."""
    answer: str
    """What the history has as its answer, where the server's own is not wanted."""
    output_tokens: int
    gap_s: float = 0.0
    """How long after the answer before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSession:
    """Turns that follow each other; each is sent when the one before it was answered."""

    number: int
    turns: tuple[ScriptTurn, ...]
    at_s: float = 0.0
    """When it begins in an open loop."""
    opening: tuple[ChatMessage, ...] = ()
    """What every turn begins with."""
    keeps_history: bool = True


def generate(
    profile: Profile, *, seed: int, requests: int, rate: float | None = None
) -> Iterator[ScriptSession]:
    """Sessions with so many requests in all; with a rate, they arrive as a Poisson process."""
    prefixes = [
        _text(Random(f"{seed} system {number}"), profile.system_tokens)
        for number in range(profile.prefixes)
    ]
    arrivals = Random(f"{seed} arrivals")
    at_s = 0.0
    left = requests
    for number in count():
        if left <= 0:
            return
        session = _session(profile, number, prefixes, Random(f"{seed} session {number}"))
        yield replace(session, turns=session.turns[:left], at_s=at_s)
        left -= profile.turns
        if rate is not None:
            at_s += arrivals.expovariate(rate / profile.turns)


def _session(profile: Profile, number: int, prefixes: list[str], random: Random) -> ScriptSession:
    opening = []
    if profile.system_tokens:
        opening.append(ChatMessage(role="system", content=prefixes[number % len(prefixes)]))
    context = _text(random, profile.context_tokens)
    turns = []
    for turn in range(profile.turns):
        words = max(1, round(profile.turn_tokens * random.uniform(*VARIATION)))
        asked = _text(random, words)
        # A document stands before every question, other contexts before the first one only.
        if context and (turn == 0 or not profile.keeps_history):
            asked = f"{context}\n\n{asked}"
        turns.append(
            ScriptTurn(
                messages=(ChatMessage(role="user", content=asked),),
                answer=_text(random, profile.output_tokens),
                output_tokens=profile.output_tokens,
                gap_s=random.expovariate(1 / profile.gap_s) if turn and profile.gap_s else 0.0,
            )
        )
    return ScriptSession(
        number=number,
        turns=tuple(turns),
        opening=tuple(opening),
        keeps_history=profile.keeps_history,
    )


def _text(random: Random, words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Which requests of a trace are sent, and when."""

    trace: str
    requests: int
    rate: float | None = None
    """Requests a second, on average over those that are sent; without it, the trace's own times."""
    prompt_max: int | None = None
    """Longer prompts are cut, for models that take no more."""
    output_tokens: int | None = None
    """Instead of the lengths that the trace has."""


def from_trace(settings: TraceSettings) -> tuple[int, Iterator[ScriptSession]]:
    """The first requests of a trace as sessions of one turn, and how many there are.

    The trace is read once before, so that a wrong line is found before anything was sent.
    Raises `ConfigError`: the trace cannot be read.
    """
    times = [request.at_s for request in _requests(settings)]
    scale = 1.0
    if settings.rate is not None and len(times) > 1:
        lasted_s = times[-1] - times[0]
        if not lasted_s:
            raise ConfigError(
                "--rate",
                f"is {settings.rate:g}, must not be given: all requests of {settings.trace} "
                "have the same time",
            )
        scale = (len(times) - 1) / settings.rate / lasted_s
    return len(times), _trace_sessions(settings, times[0], scale)


def _requests(settings: TraceSettings) -> Iterator[TraceRequest]:
    config = parse_config(
        f'version = 1\nmodel.name = "trace"\n'
        f"cache = {{ block_tokens = {TRACE_BLOCK_TOKENS}, blocks = 1 }}\n"
    )
    return islice(TraceReader(config).read(settings.trace), settings.requests)


def _trace_sessions(
    settings: TraceSettings, first_s: float, scale: float
) -> Iterator[ScriptSession]:
    for number, request in enumerate(_requests(settings)):
        tokens = min(request.token_count, settings.prompt_max or request.token_count)
        keys = request.keys[: tokens // TRACE_BLOCK_TOKENS]
        # What is left of the last block belongs to no key, and to this request alone.
        rest = tokens - len(keys) * TRACE_BLOCK_TOKENS
        words = [WORDS[byte] for key in keys for byte in key]
        words += Random(f"rest {number}").choices(WORDS, k=rest)
        output = settings.output_tokens or max(1, request.output_tokens)
        message = ChatMessage(role="user", content=" ".join(words))
        yield ScriptSession(
            number=number,
            turns=(ScriptTurn(messages=(message,), answer="", output_tokens=output),),
            at_s=(request.at_s - first_s) * scale,
        )
