"""Which requests compute which tokens in the next step: continuous batching over leases.

    scheduler.add(request)
    step = scheduler.plan()                     # None when nothing can run
    outputs = scheduler.finish(step, sampled)   # in the order of the steps

Decodes come first, then chunks of prompts, then new requests, within a number of tokens a step. A
request that loads blocks from a lower tier does not delay others; where its layers arrive in time,
it joins a step before the last has come, and its token is held back until all are verified. When
blocks run out, the least urgent request is preempted and later finds its blocks in the cache.

The one rule: a lease is released or preempted only when no step under way uses its blocks, even if
its request has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock import LeaseState, Verdict
from penstock.errors import CapacityError
from penstock_serve.engine.handoffs import Handoffs
from penstock_serve.engine.requests import Answer, Output, Phase, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.engine.steps import Draw, HandedSpan, PlannedStep, Score, Step, StepTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import Cache, Lease
    from penstock_serve.engine.batch import TokenSpan


COMMITTED_BLOCKS = 4
"""Blocks of an answer that are committed together (fewer at its end): each commit costs its step a
save, and half an answer is rarely reused."""
ALONE_S = 1e6
"""The length of a step that has nothing else to compute: whatever it waits for delays nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds of a step and of the queue."""

    step_tokens: int = 512
    """Tokens computed in one step, at most."""
    step_requests: int = 64
    waiting_max: int = 1024
    """Requests that wait; more are refused."""
    steps_in_flight: int = 1
    loads_ahead: int = 4
    """Requests that are admitted although the step is full, so that their blocks are loaded while
    it is computed; only with a tier to load from."""

    def __post_init__(self) -> None:
        if self.loads_ahead < 0:
            raise ValueError(f"loads_ahead is {self.loads_ahead}, must be at least 0")
        for name in ("step_tokens", "step_requests", "waiting_max", "steps_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.step_tokens < self.step_requests:
            raise ValueError(
                f"step_tokens is {self.step_tokens}, must be at least step_requests, "
                f"{self.step_requests}: every running request gets a token a step"
            )


class Scheduler:
    """The answers of one engine and their leases."""

    def __init__(
        self,
        cache: Cache,
        settings: SchedulerSettings,
        *,
        block_tokens: int,
        block_count: int,
        handoffs: Handoffs | None = None,
    ) -> None:
        self.cache = cache
        self.settings = settings
        self.preemptions = 0
        self.joins = 0
        """Requests that joined a step before their blocks were loaded."""
        self.step_times = StepTimes()
        self._handoffs = handoffs or Handoffs()
        self._has_tiers = bool(cache.config.cache.tiers)
        self.block_tokens = block_tokens
        self._block_count = block_count
        self._answers: dict[int, Answer] = {}
        self._by_request: dict[str, list[int]] = {}
        self._arrivals = 0
        self._steps = 0
        self._flying: deque[tuple[Step, list[int]]] = deque()
        self._outputs: list[Output] = []
        self._ended: list[Lease] = []
        """Leases of ended answers, which are released later."""

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._by_request)

    def abort_all(self) -> None:
        """Ends every request, also those whose KV waits for a handoff."""
        for request in list(self._by_request):
            self.abort(request)

    @property
    def flying(self) -> int:
        return len(self._flying)

    def count(self, phase: Phase) -> int:
        """How many answers are in a phase."""
        return sum(answer.phase is phase for answer in self._answers.values())

    def add(self, request: Request) -> None:
        """Adds a request.

        Raises `ValueError`: it can never fit on the device, or its id is in use; `CapacityError`:
        too many requests wait.
        """
        if request.id in self._by_request:
            raise ValueError(f"id is {request.id!r}, must be one that no running request has")
        tokens = len(request.prompt) + request.max_tokens
        room = self._block_count * self.block_tokens
        if tokens > room:
            raise ValueError(
                f"prompt and max_tokens come to {tokens} tokens, must be at most {room}, which "
                "is what the device has room for"
            )
        waiting = self.count(Phase.WAITING)
        if waiting >= self.settings.waiting_max:
            raise CapacityError(
                tier="queue", wanted=1, available=max(0, self.settings.waiting_max - waiting)
            )
        numbers = []
        for number in range(request.answers):
            self._arrivals += 1
            self._answers[self._arrivals] = Answer(request, number, self._arrivals)
            numbers.append(self._arrivals)
        self._by_request[request.id] = numbers
        if self.cache.persists and request.reuse:
            # It waits for its turn: what lies on a disk is in host memory by then.
            self.cache.prefetch(request.prompt, request=request.id, tenant=request.tenant)
            for number in numbers:
                self._answers[number].sought = True

    def abort(self, request: str) -> None:
        """Ends a request, unless it has ended."""
        for number in self._by_request.get(request, ()):
            answer = self._answers[number]
            if answer.phase is not Phase.ENDED:
                self._end(answer, Reason.ABORTED)
                self._report(answer, None)
            elif answer.held:
                # It is computed, and its KV is not needed any more.
                self._handoffs.cancel(answer)
        self._release_ended()

    def stop(self, request: str, number: int) -> None:
        """Ends one answer, after a stop string."""
        for arrival in self._by_request.get(request, ()):
            answer = self._answers[arrival]
            if answer.number == number and answer.phase is not Phase.ENDED:
                self._end(answer, Reason.STOP)
        self._release_ended()

    def compute_here(self, request: str, *, lost: bool = False) -> None:
        """Computes a request's prompt here, without a handoff."""
        for number in self._by_request.get(request, ()):
            answer = self._answers[number]
            answer.handed, answer.next_request = True, None
            if answer.phase is Phase.CLAIMING:
                self._handoffs.cancel(answer, lost=lost)

    def change_prefill(
        self, request: str, handoff: str, prefill: str, *, lost: bool = False
    ) -> None:
        """Another instance computes a request's prompt, unless it is being computed here."""
        for number in self._by_request.get(request, ()):
            answer = self._answers[number]
            if answer.number or not answer.request.handoff:
                continue
            changed = msgspec.structs.replace(answer.request, handoff=handoff, prefill=prefill)
            if answer.phase is Phase.CLAIMING:
                answer.next_request = changed
                self._handoffs.cancel(answer, lost=lost)
            elif not answer.handed:
                answer.request = changed

    def step_handoffs(self) -> None:
        """Advances handoffs; answers that waited for one continue, also if it failed."""
        for answer, tokens in self._handoffs.step():
            answer.held = False
            if answer.phase is not Phase.CLAIMING:
                continue
            changed, answer.next_request = answer.next_request, None
            assert answer.lease is not None
            if changed is None or tokens or answer.lease.state is not LeaseState.READY:
                self._resume(answer, tokens)
            else:
                answer.request, answer.handed = changed, False
                self._begin(answer)
        self._release_ended()

    def take_outputs(self) -> list[Output]:
        """Outputs since the last call that no step returned, such as those of aborts."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def plan(self) -> Step | None:
        """The next step; `None` when enough are under way, or nothing can run."""
        self._release_ended()
        if self.flying >= self.settings.steps_in_flight:
            return None
        self._wake()
        plan = PlannedStep(self.settings.step_tokens, self.settings.step_requests)
        before = self.preemptions
        for answer in self._in_order(Phase.RUNNING):
            self._schedule(answer, plan)
        for answer in self._in_order(Phase.WAITING):
            if answer.sought and self._is_searching(answer):
                continue
            # Blocks that a preemption has just freed are for running requests. A request that
            # is admitted now would be preempted next.
            crowded = plan.chunks and self.preemptions > before
            late = plan.full and not self._loads_ahead(answer, plan)
            if late or crowded or not self._admit(answer):
                break
            self._schedule(answer, plan)
        for answer in self._in_order(Phase.LOADING):
            self._join(answer, plan)
        if not plan.chunks:
            return None
        return self._launch(plan)

    def finish(
        self,
        step: Step,
        sampled: Sequence[Sampled],
        scored: Sequence[Sequence[Sampled]] = (),
    ) -> list[Output]:
        """Processes the results of a step; steps must be finished in the order of their plans.

        Raises `ValueError`: it is another step's turn, or not every draw was answered.
        """
        if not self._flying or self._flying[0][0] is not step:
            raise ValueError(f"step {step.number} is not the oldest one under way")
        if len(sampled) != len(step.draws):
            raise ValueError(f"{len(sampled)} tokens for {len(step.draws)} draws")
        if len(scored) != len(step.scores):
            raise ValueError(f"{len(scored)} scored prompts, {len(step.scores)} were asked for")
        _, owners = self._flying.popleft()
        for draw in step.draws:
            self._answers[draw.answer].unknown -= 1
        for span, owner in zip(step.spans, owners, strict=True):
            self._computed(self._answers[owner], span)
        for score, found in zip(step.scores, scored, strict=True):
            self._scored(self._answers[score.answer], step.spans[score.span].start + 1, found)
        for draw, token in zip(step.draws, sampled, strict=True):
            if self._answers[draw.answer].joined:
                self._answers[draw.answer].withheld = token
                continue
            self._chosen(self._answers[draw.answer], self._answers[owners[draw.span]], token)
        # Outputs come first: the release of a long lease takes time, and can wait until the next
        # step is planned, while another one is computed.
        self._release_ended(keep_leases=bool(self._flying))
        return self.take_outputs()

    # Planning.

    def _in_order(self, phase: Phase) -> list[Answer]:
        """The answers of a phase, the most urgent first."""
        found = [answer for answer in self._answers.values() if answer.phase is phase]
        return sorted(found, key=lambda answer: (-answer.request.priority, answer.arrival))

    def _wake(self) -> None:
        """Continues answers whose blocks have been loaded, or were lost."""
        for answer in self._answers.values():
            if answer.lease is None or answer.flying or answer.phase is Phase.ENDED:
                continue
            if answer.held:
                continue
            if answer.lease.state is LeaseState.LOST:
                answer.lease.release()
                answer.lease, answer.scheduled = None, 0
                answer.joined, answer.withheld = False, None
                answer.enter(Phase.WAITING)
            elif answer.joined:
                self._judge(answer)
            elif answer.phase is Phase.LOADING and answer.lease.state is LeaseState.READY:
                self._begin(answer)
        self._release_ended()

    def _judge(self, answer: Answer) -> None:
        """Its blocks are verified: what was computed on them counts, or is computed again."""
        assert answer.lease is not None
        verdict = answer.lease.take_verdict()
        if verdict is Verdict.HOLD:
            return
        token, answer.withheld = answer.withheld, None
        answer.joined = False
        if verdict is Verdict.ROLL_BACK:
            self._begin(answer)
            return
        answer.enter(Phase.RUNNING)
        answer.lease.commit(answer.tokens[answer.lease.token_count : answer.computed])
        if token is not None:
            self._chosen(answer, answer, token)

    def _begin(self, answer: Answer) -> None:
        """Its blocks are loaded: it can run, unless a handoff brings its prompt."""
        assert answer.lease is not None
        answer.enter(Phase.RUNNING)
        answer.scheduled = answer.computed = answer.lease.token_count
        if not self._handoffs.begin(answer):
            self._end(answer, Reason.ABORTED)
            self._report(answer, None)

    def _resume(self, answer: Answer, tokens: tuple[int, ...]) -> None:
        """A handoff has ended: what it did not deliver is computed here."""
        assert answer.lease is not None
        answer.enter(Phase.RUNNING)
        first_alone = bool(tokens) and answer.request.first_alone
        if tokens and answer.lease.state is LeaseState.READY:
            # If log-probabilities are wanted, the last token is computed here for its logits.
            count = len(answer.request.prompt) - (not first_alone)
            answer.lease.commit_prompt(max(count, answer.lease.token_count))
        answer.scheduled = answer.computed = answer.lease.token_count
        if first_alone and answer.lease.state is LeaseState.READY:
            self._chosen(answer, answer, Sampled(tokens[0], 0.0))

    def _schedule(self, answer: Answer, plan: PlannedStep) -> None:
        count = plan.room_for(answer)
        if answer.phase is not Phase.RUNNING or plan.full or count < 1:
            return
        if answer.generated >= answer.request.max_tokens:
            # The last token is under way, and its KV is not needed.
            return
        if answer.waits_for_token:
            return
        if answer.unknown and len(self._sharers(answer)) > 1:
            # Other answers are about to share its unfinished block, so it must not be written.
            return
        if not self._grown(answer, answer.scheduled + count, plan):
            return
        ends = count == answer.left
        plan.add(answer, count, ends=ends)

    def _join(self, answer: Answer, plan: PlannedStep) -> None:
        """Computes on blocks that still arrive, where the step would hardly wait for them."""
        lease, steps = answer.lease, self.cache.steps
        count = plan.room_for(answer)
        if lease is None or steps is None or answer.joined or plan.full or count < 1:
            return
        request = answer.request
        if request.answers > 1 or answer.scores or not answer.handed:
            return
        if len(lease.block_table) * self.block_tokens < answer.scheduled + count:
            return
        loads = lease.loads
        step_s = self.step_times.expected_s(plan.prompt_tokens + count) if plan.chunks else ALONE_S
        if not loads or not step_s or not steps.joinable(loads, step_s=step_s):
            return
        lease.join()
        answer.joined = True
        plan.joins += loads
        plan.add(answer, count, ends=count == answer.left)
        self.joins += 1

    def _is_searching(self, answer: Answer) -> bool:
        """Whether a store has yet to say which blocks of a request it has; never for long."""
        status = self.cache.store_status(answer.request.id)
        answer.sought = status is not None and status.searching
        return answer.sought

    def _loads_ahead(self, answer: Answer, plan: PlannedStep) -> bool:
        """Whether a request may load its blocks before there is room in a step for it."""
        if not self._has_tiers:
            return False
        prefills = [
            other
            for other in self._answers.values()
            if other.phase is Phase.LOADING or (other.phase is Phase.RUNNING and other.left > 1)
        ]
        if sum(not plan.has(other) for other in prefills) >= self.settings.loads_ahead:
            return False
        # What another one computes now is found by a request that is admitted later.
        return not any(_computes_for(other, answer, self.block_tokens) for other in prefills)

    def _admit(self, answer: Answer) -> bool:
        """Acquires blocks for a request; returns False if there are not enough."""
        request = answer.request
        hints = request.hints
        try:
            answer.lease = self.cache.acquire(
                answer.tokens,
                request=answer.name,
                tenant=request.tenant,
                # Tokens that are not computed have no log-probabilities.
                reuse=request.reuse and not answer.scores,
                store=request.store,
                priority=request.priority if hints.priority is None else hints.priority,
                ttl_s=hints.ttl_s,
                keep_tokens=hints.keep_tokens,
                search_s=0,  # The prefetch has asked, and was waited for.
            )
        except CapacityError:
            return False
        if not answer.cached_by_tier:
            answer.cached_by_tier = answer.lease.cached_by_tier
        if answer.lease.state is LeaseState.LOADING:
            answer.enter(Phase.LOADING)
            answer.scheduled = answer.computed = answer.lease.token_count
        else:
            self._begin(answer)
        return True

    def _grown(self, answer: Answer, token_count: int, plan: PlannedStep) -> bool:
        """Grows the lease, preempting less urgent requests; returns whether it has room."""
        assert answer.lease is not None
        room = len(answer.lease.block_table) * self.block_tokens
        if room >= token_count and not answer.shares:
            return True
        while True:
            try:
                answer.lease.grow(token_count)
            except CapacityError:
                victim = self._least_urgent(plan)
                if victim is None:
                    return False
                if victim is answer:
                    self._preempt(answer)
                    return False
                self._preempt(victim)
                continue
            answer.shares = False
            if answer.lease.state is LeaseState.LOADING:
                # After a fork: the unfinished block is being copied.
                answer.enter(Phase.LOADING)
                return False
            return True

    def _least_urgent(self, plan: PlannedStep) -> Answer | None:
        """The request to preempt, if there is one whose blocks no step uses."""
        found = [
            answer
            for answer in self._in_order(Phase.RUNNING)
            if not answer.flying and not answer.held and not plan.has(answer)
        ]
        return found[-1] if found else None

    def _preempt(self, answer: Answer) -> None:
        assert answer.lease is not None
        self._publish(answer)
        answer.lease.preempt()
        answer.shares = False
        answer.lease, answer.scheduled = None, 0
        answer.enter(Phase.WAITING)
        self.preemptions += 1

    def _launch(self, plan: PlannedStep) -> Step:
        spans: list[TokenSpan] = []
        owners: list[int] = []
        draws: list[Draw] = []
        scores: list[Score] = []
        handed: list[HandedSpan] = []
        for chunk in plan.in_batch_order():
            answer = chunk.answer
            if chunk.ends:
                draws += [
                    Draw(len(spans), sharer.arrival, sharer.token_sampling())
                    for sharer in self._sharers(answer)
                ]
            if answer.held:
                request = answer.request
                handed.append(HandedSpan(len(spans), request.handoff, request.decode))
            score = chunk.score(len(spans))
            if score is not None:
                scores.append(score)
            spans.append(chunk.span())
            owners.append(answer.arrival)
            answer.scheduled += chunk.count
            answer.flying += 1
        for draw in draws:
            self._answers[draw.answer].unknown += 1
        self._steps += 1
        offers = self._handoffs.take_offers()
        step = Step(
            self._steps,
            spans,
            draws,
            offers=offers,
            handed=handed,
            scores=scores,
            joins=plan.joins,
        )
        self._flying.append((step, owners))
        return step

    def _sharers(self, answer: Answer) -> list[Answer]:
        """The answers whose first token comes from the same prompt, and itself."""
        others = [self._answers[number] for number in self._by_request[answer.request.id]]
        return [
            answer,
            *(other for other in others if other.phase is Phase.FORKING and answer.number == 0),
        ]

    # Results.

    def _computed(self, answer: Answer, span: TokenSpan) -> None:
        answer.flying -= 1
        if answer.phase is Phase.ENDED or answer.lease is None:
            return
        answer.computed = span.stop
        if answer.joined:
            # Nothing is committed before the blocks are verified.
            return
        if span.start < len(answer.request.prompt):
            answer.lease.commit(answer.tokens[answer.lease.token_count : span.stop])
        elif span.stop - answer.lease.token_count >= COMMITTED_BLOCKS * self.block_tokens:
            self._publish(answer)

    def _scored(self, answer: Answer, position: int, found: Sequence[Sampled]) -> None:
        """Returns tokens of a prompt as they are scored; one that is computed twice comes twice."""
        if answer.phase is Phase.ENDED or not found:
            return
        answer.scored = max(answer.scored, position + len(found))
        self._outputs.append(
            Output(
                request=answer.request.id,
                answer=answer.number,
                scored=tuple(found),
                position=position,
            )
        )

    def _publish(self, answer: Answer) -> None:
        """Commits the full blocks of an answer that are not committed yet."""
        lease = answer.lease
        if lease is None or answer.joined or lease.state is not LeaseState.READY:
            return
        full = answer.computed // self.block_tokens * self.block_tokens
        if full > lease.token_count:
            lease.commit(answer.tokens[lease.token_count : full])

    def _chosen(self, answer: Answer, origin: Answer, token: Sampled) -> None:
        if answer.phase is Phase.ENDED:
            return
        if answer.phase is Phase.FORKING:
            self._fork(answer, origin)
        answer.settle_time()
        answer.tokens.append(token.token)
        self._handoffs.sampled(answer, token.token)
        if token.token in answer.request.stop_tokens:
            self._end(answer, Reason.STOP)
        elif answer.generated - answer.unknown >= answer.request.max_tokens:
            self._end(answer, Reason.LENGTH)
        self._report(answer, token)

    def _fork(self, answer: Answer, origin: Answer) -> None:
        answer.cached_by_tier = origin.cached_by_tier
        if origin.lease is None or origin.phase is Phase.ENDED:
            # The first answer has ended: this one finds its blocks in the cache.
            answer.enter(Phase.WAITING)
            return
        answer.lease = origin.lease.fork(answer.name)
        answer.shares = origin.shares = True
        answer.enter(Phase.RUNNING)
        answer.scheduled = answer.computed = answer.lease.token_count

    def _end(self, answer: Answer, reason: Reason) -> None:
        answer.reason = reason
        answer.enter(Phase.ENDED)
        if answer.held and reason is Reason.ABORTED:
            self._handoffs.cancel(answer)

    def _release_ended(self, *, keep_leases: bool = False) -> None:
        """Releases the blocks of ended answers that no step uses any more."""
        for arrival, answer in list(self._answers.items()):
            if answer.phase is not Phase.ENDED or answer.flying or answer.unknown or answer.held:
                continue
            if answer.lease is not None:
                self._publish(answer)
                self._ended.append(answer.lease)
            del self._answers[arrival]
            numbers = self._by_request[answer.request.id]
            numbers.remove(arrival)
            if not numbers:
                del self._by_request[answer.request.id]
        while self._ended and not keep_leases:
            self._ended.pop().release()

    def _report(self, answer: Answer, token: Sampled | None) -> None:
        first = answer.generated - answer.unknown == 1
        self._outputs.append(
            Output(
                request=answer.request.id,
                answer=answer.number,
                sampled=token,
                reason=answer.reason,
                cached_by_tier=answer.cached_by_tier if first else (),
                spent_s=tuple(answer.spent_s) if first else (),
            )
        )


def _computes_for(other: Answer, answer: Answer, block_tokens: int) -> bool:
    """Whether the next block that an answer computes is one of another answer's prompt."""
    end = (other.computed // block_tokens + 1) * block_tokens
    if end > min(len(other.request.prompt), len(answer.request.prompt)):
        return False
    return other.request.prompt[:end] == answer.request.prompt[:end]
