"""Prefill and decode instances as rates, under a load that shifts: what changes of roles are worth.

    answered = RoleWorld(seed=1, prefills=2, decodes=2, phases=PHASES, pace_s=30.0).run()

A prefill instance computes one prompt after the other. A decode instance has `PLACES`, each with an
answer that grows at its own pace. A request goes to the instances with least in hand, as equals do
in the server's router. An instance whose role changes ends what it has, besides what it gets in the
new one. The decision is the server's own, `RoleBalance`, which is told what instances of the server
would tell. Nothing here says how quick an engine is: times are in the unit of `Phase`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from lab.sim.agenda import Agenda
from penstock_serve.server.balance import InstanceWork, RoleBalance

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACES = 8
"""Answers of a decode instance at once."""
UNDER_WAY_MAX = 64
"""More requests than this are refused, as by `serve.requests_max`."""
TICKS_A_PACE = 8
"""How often the balance looks at the instances while it may change one."""
STEP_COUNT_MAX = 4_000_000


class Phase(NamedTuple):
    """A kind of load, for some time."""

    seconds: float
    prefill_s: float
    """Mean time that a prompt takes."""
    decode_s: float
    """Mean time that an answer takes in its place."""
    rate: float
    """Requests a second; they arrive by chance."""


def long_prompts(seconds: float, *, share: float = 0.9) -> Phase:
    """Long prompts, short answers: three of four instances should compute prompts."""
    return Phase(seconds, prefill_s=0.6, decode_s=1.2, rate=3 / 0.6 * share)


def long_answers(seconds: float, *, share: float = 0.9) -> Phase:
    """Short prompts, long answers: one of four instances should compute prompts."""
    return Phase(seconds, prefill_s=0.1, decode_s=3.2, rate=3 * PLACES / 3.2 * share)


class Request:
    """A prompt and its answer."""

    __slots__ = ("arrived", "begun_at", "decode_s", "prefill_s", "ready_at")

    def __init__(self, arrived: float, prefill_s: float, decode_s: float) -> None:
        self.arrived, self.prefill_s, self.decode_s = arrived, prefill_s, decode_s
        self.ready_at = math.nan
        """When its prompt was computed."""
        self.begun_at = math.nan


@dataclass(slots=True, eq=False)
class RoleInstance:
    """An instance with what it has in hand, and what it did since it was looked at."""

    name: str
    role: str
    prompts: deque[Request] = field(default_factory=deque)
    """That it computes, one after the other."""
    waiting: deque[Request] = field(default_factory=deque)
    """Computed prompts that wait for a place here."""
    expected: int = 0
    """Requests that come here when their prompts are computed."""
    running: int = 0
    integrated_at: float = 0.0
    step_s: float = 0.0
    room_s: float = 0.0
    computed: int = 0
    begun: int = 0
    prompts_waited_s: float = 0.0
    answers_waited_s: float = 0.0

    @property
    def in_hand(self) -> int:
        return len(self.prompts) + len(self.waiting) + self.expected + self.running

    @property
    def settled(self) -> bool:
        """Whether it does nothing any more of another role."""
        if self.role == "prefill":
            return not (self.waiting or self.running or self.expected)
        return not self.prompts

    def integrate(self, now: float) -> None:
        """Counts the time since the last change of what it does."""
        past = now - self.integrated_at
        self.integrated_at = now
        self.step_s += past * bool(self.prompts)
        self.room_s += past * self.running / PLACES

    def report(self, now: float) -> InstanceWork:
        """What it tells the balance."""
        self.integrate(now)
        is_prefill = self.role == "prefill"
        work = InstanceWork(
            name=self.name,
            role="prefill" if is_prefill else "decode",
            settled=self.settled,
            step_s=self.step_s,
            room_s=self.room_s,
            computed=self.computed,
            begun=self.begun,
            handed=self.begun,
            waited_s=self.prompts_waited_s if is_prefill else self.answers_waited_s,
            waiting=max(0, len(self.prompts) - 1) if is_prefill else len(self.waiting),
            in_hand=self.in_hand,
        )
        self.step_s = self.room_s = self.prompts_waited_s = self.answers_waited_s = 0.0
        self.computed = self.begun = 0
        return work


class RoleWorld:
    """Instances, a load, and perhaps a balance."""

    def __init__(
        self, *, seed: int, prefills: int, decodes: int, phases: Sequence[Phase], pace_s: float
    ) -> None:
        """A world; its roles never change if `pace_s` is 0."""
        self.rng = Random(seed)
        self.agenda = Agenda()
        self.instances = [RoleInstance(f"prefill-{n}", "prefill") for n in range(prefills)]
        self.instances += [RoleInstance(f"decode-{n}", "decode") for n in range(decodes)]
        self.phases = phases
        self.balance = RoleBalance(pace_s) if pace_s else None
        self.ended: list[Request] = []
        self.changes: list[tuple[float, str]] = []
        """When roles changed, and which is the new one."""
        self.refused = 0
        self._answering: dict[Request, RoleInstance] = {}
        """Which instance answers a request whose prompt is not computed yet."""
        self._under_way = 0
        self._changing: RoleInstance | None = None

    def run(self) -> RoleWorld:
        """Lives through all phases; what is under way then has its time to end."""
        begins = 0.0
        for phase in self.phases:
            at = begins + self.rng.expovariate(phase.rate)
            while at < begins + phase.seconds:
                # Nearly equal lengths: what is compared is the split, not luck.
                spread = self.rng.uniform(0.7, 1.3), self.rng.uniform(0.7, 1.3)
                request = Request(at, phase.prefill_s * spread[0], phase.decode_s * spread[1])
                self.agenda.at(at, self._arrive, request)
                at += self.rng.expovariate(phase.rate)
            begins += phase.seconds
        if self.balance is not None:
            self.agenda.at(0.0, self._look, begins)
        self.agenda.run(step_count_max=STEP_COUNT_MAX)
        return self

    def in_time(self, first_token_s: float) -> float:
        """Answers a second whose first token came within this time."""
        count = sum(each.begun_at - each.arrived <= first_token_s for each in self.ended)
        return count / sum(phase.seconds for phase in self.phases)

    def _least(self, role: str) -> RoleInstance:
        return min(
            (each for each in self.instances if each.role == role),
            key=lambda each: (each.in_hand, self.rng.random()),
        )

    def _arrive(self, request: Request) -> None:
        if self._under_way >= UNDER_WAY_MAX:
            self.refused += 1
            return
        self._under_way += 1
        prefill, decode = self._least("prefill"), self._least("decode")
        self._answering[request] = decode
        decode.expected += 1
        prefill.integrate(self.agenda.now)
        prefill.prompts.append(request)
        if len(prefill.prompts) == 1:
            self._compute(prefill, request)

    def _compute(self, prefill: RoleInstance, request: Request) -> None:
        prefill.prompts_waited_s += self.agenda.now - request.arrived
        self.agenda.after(request.prefill_s, self._computed, prefill, request)

    def _computed(self, prefill: RoleInstance, request: Request) -> None:
        now = self.agenda.now
        prefill.integrate(now)
        prefill.prompts.popleft()
        prefill.computed += 1
        if prefill.prompts:
            self._compute(prefill, prefill.prompts[0])
        request.ready_at = now
        decode = self._answering.pop(request)
        decode.expected -= 1
        decode.waiting.append(request)
        self._begin(decode)

    def _begin(self, decode: RoleInstance) -> None:
        now = self.agenda.now
        decode.integrate(now)
        while decode.waiting and decode.running < PLACES:
            request = decode.waiting.popleft()
            decode.running += 1
            decode.begun += 1
            request.begun_at = now
            decode.answers_waited_s += now - request.ready_at
            self.agenda.after(request.decode_s, self._answered, decode, request)

    def _answered(self, decode: RoleInstance, request: Request) -> None:
        decode.integrate(self.agenda.now)
        decode.running -= 1
        self._under_way -= 1
        self.ended.append(request)
        self._begin(decode)

    def _look(self, until: float) -> None:
        assert self.balance is not None
        now = self.agenda.now
        if self._changing is not None and self._changing.settled:
            self._changing = None
            self.balance.note_end(now, done=True)
        works = [each.report(now) for each in self.instances]
        change = self.balance.propose(now, works, steady=self._changing is None)
        if change is not None:
            [self._changing] = [each for each in self.instances if each.name == change.instance]
            self._changing.role = change.role
            self.changes.append((now, change.role))
        if now < until:
            self.agenda.after(self.balance.pace_s / TICKS_A_PACE, self._look, until)
