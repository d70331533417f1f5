"""Which instance should change its role: the decision alone, without clock, router or instances.

    balance = RoleBalance(pace_s=30.0)
    change = balance.propose(now, works, steady=True)       # every few seconds; usually None
    balance.note_end(now, done=True)                        # when the change has ended

What a request costs each role is measured: the time that prefill instances compute for it, and the
room of a decode instance that its answer takes, times how long. Both are independent of the split,
and of how much waits, so under a constant load every split has one worth, and the best is known:

    load of a split = max(prefill cost / prefill instances, decode cost / decode instances)

A change is wanted if the best split has a load that is lower by `GAIN` or more, the role that lacks
an instance is full, and prompts wait for it. It is one step towards the best split, so a change is
never taken back while costs stay within `GAIN`.

The rule: nothing is proposed unless it was wanted for half of `pace_s`, and `pace_s` has passed
since the change before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_serve.engine.messages import RoleName

GAIN = 0.1
"""How much lower the load of the best split must be."""
FULL = 0.5
"""A role whose instances are less in use than this lacks none."""
WAIT_S = 0.05
"""Prompts that wait for a shorter time do not need another split."""
WINDOW = 0.5
"""What is older than this part of the pace counts little."""
COUNT_MIN = 3.0
"""Of fewer prompts, their costs are not known."""
FAILED_PAUSES = 4
"""After a change that failed, so many times the pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceWork:
    """What one instance did since it was looked at before, and what it has in hand."""

    name: str
    role: RoleName
    may_change: bool = True
    """Whether its role may be changed."""
    settled: bool = True
    """Whether no request of an earlier role is under way; else its work says nothing."""
    step_s: float = 0.0
    """Time in which it computed."""
    room_s: float = 0.0
    """The share of its room that answers took, times how long."""
    computed: int = 0
    """Prompts that it computed for others."""
    begun: int = 0
    """Answers that it began."""
    handed: int = 0
    """Those of them whose prompts it did not compute."""
    waited_s: float = 0.0
    """How long all these waited for their turn here."""
    waiting: int = 0
    """Requests that wait for their turn now."""
    in_hand: int = 0
    """All requests that it has."""


class RoleChange(NamedTuple):
    """A proposal."""

    instance: str
    role: Literal["prefill", "decode"]
    why: str


@dataclass(slots=True)
class _RoleSums:
    """What the instances of a role did lately: the longer ago, the less it counts."""

    instance_s: float = 0.0
    """Time, by the number of instances."""
    used_s: float = 0.0
    """The part of it in which they were in use."""
    requests: float = 0.0
    """Prompts computed, or answers begun."""
    handed: float = 0.0
    waited_s: float = 0.0

    def fade(self, share: float) -> None:
        self.instance_s *= share
        self.used_s *= share
        self.requests *= share
        self.handed *= share
        self.waited_s *= share

    @property
    def use(self) -> float:
        """The share of the instances that was in use."""
        return self.used_s / self.instance_s if self.instance_s > 0 else 0.0

    @property
    def wait_s(self) -> float:
        """How long a request waited, on average."""
        return self.waited_s / self.requests if self.requests > 0 else 0.0


class _Wish(NamedTuple):
    """What would help."""

    role: Literal["prefill", "decode"]
    """That lacks an instance."""
    why: str


class RoleBalance:
    """What instances did lately, and since when another split would be better."""

    def __init__(self, pace_s: float) -> None:
        """A balance that proposes a change every `pace_s` at most."""
        self.pace_s = pace_s
        self._sums = {"prefill": _RoleSums(), "decode": _RoleSums()}
        self._at = math.nan
        self._wished: str = ""
        self._wished_since = math.inf
        self._quiet_until = -math.inf

    def propose(
        self, at: float, works: Sequence[InstanceWork], *, steady: bool = True
    ) -> RoleChange | None:
        """Takes in what instances did until now; returns the change that should be made.

        While the fleet is not `steady`, nothing is proposed: an instance is down, draining or
        asleep, the server is paused, or a change is under way.
        """
        self._take(at, works)
        counts = {role: sum(work.role == role for work in works) for role in self._sums}
        wish = self._wish(works, counts) if steady else None
        if wish is None or wish.role != self._wished:
            self._wished = "" if wish is None else wish.role
            self._wished_since = at
        if wish is None or at < max(self._wished_since + self.pace_s / 2, self._quiet_until):
            return None
        giver = "decode" if wish.role == "prefill" else "prefill"
        able = [work for work in works if work.role == giver and work.may_change and work.settled]
        if not able:
            return None
        # Its cache stays, so the one with the least to end is as good as any other.
        chosen = min(able, key=lambda work: (work.in_hand, work.name))
        return RoleChange(chosen.name, wish.role, wish.why)

    def note_end(self, at: float, *, done: bool) -> None:
        """A change has ended, whoever made it; `done`: as it should."""
        self._wished, self._wished_since = "", at
        pauses = 1 if done else FAILED_PAUSES
        self._quiet_until = max(self._quiet_until, at + pauses * self.pace_s)

    def _take(self, at: float, works: Sequence[InstanceWork]) -> None:
        before, self._at = self._at, at
        if math.isnan(before):
            # At first, answers count that have taken little of their room yet.
            self._quiet_until = at + self.pace_s
            return
        past_s = max(0.0, at - before)
        for role, sums in self._sums.items():
            sums.fade(math.exp(-past_s / (WINDOW * self.pace_s)))
            for work in works:
                if work.role != role or not work.settled:
                    continue
                sums.instance_s += past_s
                sums.used_s += work.step_s if role == "prefill" else work.room_s
                sums.requests += work.computed if role == "prefill" else work.begun
                sums.handed += work.handed
                sums.waited_s += work.waited_s

    def _wish(self, works: Sequence[InstanceWork], counts: dict[str, int]) -> _Wish | None:
        """What would help now, whatever was wished for before."""
        prefill, decode = self._sums["prefill"], self._sums["decode"]
        if not (counts["prefill"] and counts["decode"]):
            return None
        if min(prefill.requests, decode.requests) < COUNT_MIN:
            return None
        # Of a request, if another instance computes its prompt, times how often one does.
        prefill_s = prefill.used_s / prefill.requests * decode.handed / decode.requests
        decode_s = decode.used_s / decode.requests
        total = counts["prefill"] + counts["decode"]
        best = best_split(prefill_s, decode_s, total)
        now_load = load_of(counts["prefill"], prefill_s, decode_s, total)
        best_load = load_of(best, prefill_s, decode_s, total)
        if best == counts["prefill"] or best_load > (1 - GAIN) * now_load:
            return None
        role: Literal["prefill", "decode"] = "prefill" if best > counts["prefill"] else "decode"
        sums = self._sums[role]
        waits = any(work.waiting for work in works if work.role == role)
        if sums.use < FULL or not (waits or sums.wait_s >= WAIT_S):
            return None
        return _Wish(
            role,
            f"{role} instances are {sums.use:.0%} in use and prompts waited {sums.wait_s:.2f} s "
            f"for them; a request costs {prefill_s:.3f} s of a prefill and {decode_s:.3f} s of a "
            f"decode instance, for which {best} and {total - best} of them are best",
        )


def load_of(prefills: int, prefill_s: float, decode_s: float, total: int) -> float:
    """How long each request occupies the role that has the least room for it."""
    return max(prefill_s / prefills, decode_s / (total - prefills))


def best_split(prefill_s: float, decode_s: float, total: int) -> int:
    """The number of prefill instances with which most requests are answered; one of each stays."""
    return min(range(1, total), key=lambda prefills: load_of(prefills, prefill_s, decode_s, total))
