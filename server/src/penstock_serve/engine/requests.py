"""A request and its answers, as the scheduler keeps them.

| `Phase`    | means                                                     | next                 |
|------------|-----------------------------------------------------------|----------------------|
| `WAITING`  | has no blocks: new, preempted, or its blocks were lost     | `LOADING`, `RUNNING` |
| `LOADING`  | its blocks are being loaded; a step may have joined them    | `RUNNING`, `WAITING` |
| `FORKING`  | waits for the first answer's prompt, to share its blocks   | `RUNNING`, `WAITING` |
| `CLAIMING` | a handoff brings its prompt's KV from another instance     | `RUNNING`            |
| `RUNNING`  | can be part of a step                                     | `WAITING`, `ENDED`   |
| `ENDED`    | its blocks are released when no step uses them any more    |                      |
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

import msgspec

# msgspec reads the annotations when a request arrives, so these imports must be real.
from penstock.toolkit import NO_HINTS, RetentionHints
from penstock_serve.engine.sampling_options import Sampled, Sampling, TokenSampling

if TYPE_CHECKING:
    from penstock import Lease

TOKENS_MAX = 1 << 20


class Phase(enum.Enum):
    """What an answer is waiting for."""

    WAITING = "waiting"
    LOADING = "loading"
    FORKING = "forking"
    CLAIMING = "claiming"
    RUNNING = "running"
    ENDED = "ended"


SPENT_IN = {Phase.WAITING: 0, Phase.LOADING: 1, Phase.CLAIMING: 2, Phase.RUNNING: 3}
"""Where the time until the first token is counted: queued, loading, handed over, prefill. An answer
that forks waits for the first one, whose times they are."""


class Reason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    ABORTED = "aborted"


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A prompt with its options: what a server sends to an instance, and an instance computes."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int = 16
    min_tokens: int = 0
    """No stop token is chosen before the answer has this many tokens."""
    answers: int = 1
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end an answer; an instance adds those of the model."""
    ignores_stop_tokens: bool = False
    """Whether it adds none."""
    priority: int = 0
    hints: RetentionHints = NO_HINTS
    """What the client says of how long its blocks are worth keeping."""
    cache_key: str = ""
    """OpenAI's `prompt_cache_key`: requests with the same one go to the same instance."""
    tenant: str = ""
    reuse: bool = True
    """Whether cached blocks may be used."""
    store: bool = True
    """Whether its blocks may be cached."""
    handoff: str = ""
    """The name of the handoff that sends its prompt's KV to another instance, or brings it."""
    prefill: str = ""
    """The instance that computes the prompt of the handoff; a pair was opened before."""
    decode: str = ""
    """The instance that gets its KV."""
    first_alone: bool = False
    """Whether the handoff may bring the first token too, without its log-probability."""
    scores_prompt: bool = False
    """Whether log-probabilities of the prompt's tokens are returned; it is then computed even if
    it is cached."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty, must have at least one token")
        if not 1 <= self.max_tokens <= TOKENS_MAX:
            raise ValueError(f"max_tokens is {self.max_tokens}, must be from 1 to {TOKENS_MAX}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, must be from 0 to max_tokens, {self.max_tokens}"
            )
        if not 1 <= self.answers <= ANSWERS_MAX:
            raise ValueError(f"n is {self.answers}, must be from 1 to {ANSWERS_MAX}")


ANSWERS_MAX = 16


class Output(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A token of an answer, or its end, or both; or tokens of a prompt that are scored."""

    request: str
    answer: int
    sampled: Sampled | None = None
    reason: Reason | None = None
    cached_by_tier: tuple[int, ...] = ()
    """Prompt tokens that came from each tier, device first; with the first token."""
    handed: bool = False
    """With the first token: whether the prompt's KV came from another instance."""
    spent_s: tuple[float, ...] = ()
    """The time that it was queued, loading, handed over, and computed; with the first token."""
    scored: tuple[Sampled, ...] = ()
    """Tokens of the prompt with their log-probabilities, the first of them at `position`; all come
    before the first token."""
    position: int = 0


class Answer:
    """One answer to a request: its tokens, its blocks, and how far its steps are."""

    __slots__ = (
        *("arrival", "cached_by_tier", "computed", "flying", "handed", "held", "joined", "lease"),
        *("next_request", "sought", "withheld"),
        *("number", "phase", "reason", "request", "scheduled", "scored", "shares", "since"),
        *("spent_s", "tokens", "unknown"),
    )

    def __init__(self, request: Request, number: int, arrival: int) -> None:
        self.request = request
        self.number = number
        self.arrival = arrival
        self.phase = Phase.WAITING if number == 0 else Phase.FORKING
        """Changed by `enter` alone, which counts the time."""
        self.since = time.monotonic()
        """Up to when its time is counted."""
        self.spent_s = [0.0] * len(SPENT_IN)
        self.tokens = list(request.prompt)
        """The prompt and the generated tokens."""
        self.lease: Lease | None = None
        self.shares = False
        """Whether its unfinished block may be shared with another answer, until it grows."""
        self.scheduled = 0
        """Leading tokens whose KV is computed, or is being computed by a step under way."""
        self.computed = 0
        """Leading tokens whose KV was computed by steps that have ended."""
        self.unknown = 0
        """Tokens that a step under way will add."""
        self.flying = 0
        """Steps under way that use its blocks."""
        self.handed = not request.handoff or number > 0 or request.scores_prompt
        """Whether its handoff has begun or is not wanted; it is tried once."""
        self.held = False
        """Whether a handoff reads or writes its blocks."""
        self.sought = False
        """Whether a shared store was asked for its blocks, and may not have answered."""
        self.joined = False
        """Whether a step computes, or has computed, on loads that are not verified yet."""
        self.withheld: Sampled | None = None
        """The token of that step, until they are."""
        self.next_request: Request | None = None
        """The request with another handoff, which is tried when the present one has ended."""
        self.scored = 1 if request.scores_prompt and number == 0 else len(request.prompt)
        """Leading tokens of the prompt that are scored; the first has no log-probability."""
        self.cached_by_tier: tuple[int, ...] = ()
        self.reason: Reason | None = None

    def enter(self, phase: Phase) -> None:
        """Changes the phase."""
        self.settle_time()
        self.phase = phase

    def settle_time(self) -> None:
        """Counts the time since the last call for the phase it was spent in, to the first token."""
        if len(self.tokens) > len(self.request.prompt):
            return
        now = time.monotonic()
        kind = SPENT_IN.get(self.phase)
        if kind is not None:
            self.spent_s[kind] += now - self.since
        self.since = now

    @property
    def name(self) -> str:
        """The request's id, with the number of any answer but the first; for stories and logs."""
        return f"{self.request.id}#{self.number}" if self.number else self.request.id

    @property
    def generated(self) -> int:
        """Tokens of the answer so far, those under way included."""
        return len(self.tokens) - len(self.request.prompt) + self.unknown

    @property
    def left(self) -> int:
        """Tokens whose KV no step has been planned for."""
        return len(self.tokens) + self.unknown - self.scheduled

    @property
    def scores(self) -> bool:
        """Whether tokens of its prompt are still to be scored."""
        return self.scored < len(self.request.prompt)

    @property
    def waits_for_token(self) -> bool:
        """Whether its next token depends on one that a step under way samples."""
        return self.unknown > 0 and self.request.sampling.needs_tokens

    def token_sampling(self) -> TokenSampling:
        sampling = self.request.sampling
        seed = sampling.seed if sampling.seed is not None else hash((self.request.id, "seed"))
        # One seed for each position and answer, so that a step that is repeated after a
        # preemption samples the same token.
        position = len(self.tokens) + self.unknown
        mixed = (seed * 0x9E3779B97F4A7C15 + position * 0x100000001B3 + self.number) % 2**63
        request, length = self.request, len(self.request.prompt)
        banned = request.stop_tokens if self.generated < request.min_tokens else ()
        return TokenSampling(
            sampling.temperature,
            sampling.top_p,
            mixed,
            sampling.logprobs,
            sampling.top_k,
            sampling.min_p,
            sampling.change(request.prompt, self.tokens[length:], sorted(banned)),
        )
