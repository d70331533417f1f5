"""What a client says about the blocks of its request: hints, which the eviction policies obey.

| field         | says                                                                          |
|---------------|-------------------------------------------------------------------------------|
| `over`        | nothing comes after this request: its blocks are let go when it ends           |
| `keep_tokens` | only its first tokens are used again: blocks after them are let go             |
| `ttl_s`       | after this many seconds without a use, its blocks are the first to leave       |
| `priority`    | blocks of lower priority leave first; above 0, for as long as `ttl_s`          |

The same object is a field of a request to our server, a part of vLLM's `kv_transfer_params`, and a
field of a trace. Blocks that are let go are found until others need their room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import shown
from penstock.vocabulary.schema import Flag, Number, ValueKind, Whole

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
HINT_PRIORITY_MAX = 100
TTL_MAX_S = 604_800.0
"""A week: what is kept for longer is pinned by an operator, not by a client."""
KEEP_TOKENS_MAX = 1 << 27
TTL_IS = f"a number of seconds above 0 and at most {TTL_MAX_S:g}"
RAISED_S = 3600.0
"""How long a priority above 0 lasts where no `ttl_s` is given: blocks that nobody comes back for do
not take their client's share for ever."""
_KINDS: Mapping[str, ValueKind[Any]] = {
    "over": Flag(),
    "keep_tokens": Whole(minimum=0, maximum=KEEP_TOKENS_MAX),
    "ttl_s": Number(minimum=math.ulp(0.0), maximum=TTL_MAX_S),
    "priority": Whole(minimum=-HINT_PRIORITY_MAX, maximum=HINT_PRIORITY_MAX),
}
HINT_FIELDS = tuple(_KINDS)
RETENTIONS = {"in_memory": None, "in-memory": None, "24h": 86_400.0}
"""Values of OpenAI's `prompt_cache_retention`, and for how many seconds blocks are then kept before
others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionHints:
    """How long the blocks of a request are worth keeping; `None` where nothing is said."""

    priority: int | None = None
    ttl_s: float | None = None
    keep_tokens: int | None = None
    """0 for a conversation that is over."""

    def keep_blocks(self, block_tokens: int) -> int | None:
        """The leading blocks that are worth keeping."""
        return None if self.keep_tokens is None else -(-self.keep_tokens // block_tokens)

    @property
    def given(self) -> dict[str, float]:
        """The fields that say something, as a client writes them."""
        fields = {"priority": self.priority, "ttl_s": self.ttl_s, "keep_tokens": self.keep_tokens}
        return {name: value for name, value in fields.items() if value is not None}


NO_HINTS = RetentionHints()


def read_hints(given: Mapping[Any, object], place: str = "penstock") -> RetentionHints:
    """The hints in an object of a client.

    Raises:
        ValueError: a field is unknown or wrong; the message begins with its name.
    """
    found: dict[str, Any] = dict.fromkeys(_KINDS)
    for name, value in given.items():
        kind = _KINDS.get(name)
        if kind is None:
            known = ", ".join(_KINDS)
            raise ValueError(f"{place}.{_named(name)} is no hint, must be one of {known}")
        if value is not None:
            found[name] = _taken(f"{place}.{name}", value, kind)
    over, keep = found["over"], found["keep_tokens"]
    if over and keep:
        raise ValueError(
            f"{place}.keep_tokens is {keep}, must be left out, or over left out: one says all"
        )
    return _lasting(
        RetentionHints(
            priority=found["priority"], ttl_s=found["ttl_s"], keep_tokens=0 if over else keep
        )
    )


def with_retention(hints: RetentionHints, retention: object) -> RetentionHints:
    """Hints, and what OpenAI's `prompt_cache_retention` says where they say nothing.

    Raises:
        ValueError: it is no value of that field.
    """
    if not isinstance(retention, str) or retention not in RETENTIONS:
        known = ", ".join(map(repr, RETENTIONS))
        raise ValueError(f"prompt_cache_retention is {shown(retention)}, must be one of {known}")
    ttl_s = RETENTIONS[retention]
    if ttl_s is None or hints.priority is not None:
        return hints
    return RetentionHints(priority=1, ttl_s=hints.ttl_s or ttl_s, keep_tokens=hints.keep_tokens)


def _lasting(hints: RetentionHints) -> RetentionHints:
    if hints.ttl_s is not None or hints.priority is None or hints.priority <= 0:
        return hints
    return RetentionHints(priority=hints.priority, ttl_s=RAISED_S, keep_tokens=hints.keep_tokens)


def _taken(place: str, given: object, kind: ValueKind[T]) -> T:
    if isinstance(given, float) and given.is_integer() and isinstance(kind, Whole):
        given = int(given)
    found = kind.taken(given)
    if found is None:
        right = TTL_IS if kind is _KINDS["ttl_s"] else kind
        raise ValueError(f"{place} is {shown(given)}, must be {right}")
    return found


def _named(name: object) -> str:
    return shown(name)[1:-1] if isinstance(name, str) else shown(name)
