"""Whether a request may begin, and on which instances: those with most of its prefix.

    await gate.enter()      # raises `RequestRefusal`, or waits, as configured
    gate.begin()            # no `await` between the two
    gate.end()

Several causes may hold the gate at once, such as an operator's pause and a change of weights; it
opens when the last one is released.

The one rule: `enter` is called once for a request. A request that is retried after the loss of its
instance has begun before, so it may finish while others are held.

| role      | what it gets                                                                       |
|-----------|------------------------------------------------------------------------------------|
| `both`    | requests, whose prompts it computes itself                                          |
| `decode`  | requests; any `prefill` instance that it can reach computes their prompts           |
| `prefill` | prompts, whose KV it hands over                                                     |

For every request the router chooses the instance that answers and, unless that one has the prompt
already, the one that computes it: by what each has of the prefix, its load and its failures. The
weights are settings, `[routing]`; equals take turns. A request whose instance is lost before the
first token is sent to another one.
"""

from __future__ import annotations

import asyncio
import enum
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from penstock.config import RoutingTable
from penstock_serve.engine.messages import (
    Abort,
    ChangePrefill,
    ComputeLocally,
    ResetCache,
    SetRole,
    StopAnswer,
)
from penstock_serve.server.fleet import Fleet, PromptKeys
from penstock_serve.server.instance_link import InstanceLink, InstanceLost, RequestRefusal
from penstock_serve.server.pairs import PairTable
from penstock_serve.server.routes import RequestRoute, Routes, able_prefills

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from penstock import KvEvent
    from penstock.toolkit import Recorder
    from penstock_serve.engine.messages import RoleName
    from penstock_serve.engine.requests import Output, Request


class ServerState(enum.Enum):
    """What a server does; the last one that holds is shown."""

    RUNNING = "running"
    PAUSED = "paused"
    LOADING = "loading weights"
    ASLEEP = "asleep"


class RequestGate:
    """Counts the requests under way, and holds back new ones.

    While the server is paused they are refused with status 503; where it `waits`, after `wait_s`.
    """

    def __init__(self, *, waits: bool = False, wait_s: float = 600.0) -> None:
        self._waits = waits
        self._wait_s = wait_s
        self._held: set[ServerState] = set()
        self._opened = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborts = False
        self.running = 0
        """Requests that are at an instance."""

    @property
    def state(self) -> ServerState:
        states = [state for state in ServerState if state in self._held]
        return states[-1] if states else ServerState.RUNNING

    @property
    def refuses(self) -> bool:
        """Whether a request that comes now is refused."""
        return bool(self._held) and not self._waits

    def holds(self, state: ServerState) -> bool:
        return state in self._held

    def hold(self, state: ServerState) -> None:
        """Lets no further request begin; may be called twice."""
        self._held.add(state)
        self._opened.clear()

    def release(self, state: ServerState) -> None:
        """Takes one cause away; requests begin again after the last one."""
        self._held.discard(state)
        if not self._held:
            self._aborts = False
            self._opened.set()

    def abort(self) -> None:
        """No request is sent to another instance any more, until the gate opens."""
        self._aborts = bool(self._held)

    async def enter(self) -> None:
        """Returns when a request may begin.

        Raises `RequestRefusal`: the server is paused, and requests do not wait, or waited too long.
        """
        if self.refuses:
            raise self.refusal()
        try:
            async with asyncio.timeout(self._wait_s):
                while self._held:
                    await self._opened.wait()
        except TimeoutError as error:
            raise self.refusal(waited=True) from error

    def begin(self) -> None:
        """A request is sent to an instance.

        Raises `RequestRefusal`: the requests under way are being aborted.
        """
        if self._aborts:
            raise self.refusal()
        self.running += 1
        self._idle.clear()

    def end(self) -> None:
        """A request ended at its instance; it may `begin` at another one."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is under way; returns whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def refusal(self, *, waited: bool = False) -> RequestRefusal:
        """The answer to a request that may not begin."""
        more = f" and was not resumed within {self._wait_s:g} s" if waited else ""
        return RequestRefusal("paused", f"the server is {self.state.value}{more}; try again later")


@dataclass(slots=True)
class RequestCounts:
    """What the router saw of an instance's requests; `balance.py` says what the fields are."""

    computed: int = 0
    begun: int = 0
    handed: int = 0
    waited_s: float = 0.0


PREFILLS_MAX = 2
"""How many instances are tried for the prompt of one attempt; then the one that answers it
computes it."""
CACHE_KEYS_MAX = 4096
"""Cache keys that are remembered: clients choose them."""


class _SentPrompt:
    """A prompt at an instance: it is to have its blocks, and has so many to compute."""

    def __init__(
        self,
        fleet: Fleet,
        link: InstanceLink,
        submit: Request,
        prompt: PromptKeys,
        computing: int,
    ) -> None:
        self.asked = submit
        """The request for the instance."""
        self._fleet = fleet
        self._link = link
        self._computing = computing
        self._expected = fleet.expect(link, prompt)
        fleet.note_computing(link, computing)

    def note_token(self, *, handed: bool = False) -> None:
        """It is computed; may be called twice."""
        del handed
        self._fleet.note_computing(self._link, -self._computing)
        self._computing = 0

    def end(self) -> None:
        """Its request has ended; may be called twice."""
        self.note_token()
        self._fleet.expect_no_more(self._link, self._expected)
        self._expected = []


class _Prefill:
    """A prompt that is computed for another instance, which answers the request.

    If an instance cannot compute it, another one does; if none can, the one that answers.
    """

    def __init__(
        self,
        router: Router,
        route: RequestRoute,
        submit: Request,
        prompt: PromptKeys,
        handoffs: Iterator[str],
    ) -> None:
        self._router = router
        self._blocks = route.computing
        self._decode = route.decode
        assert route.prefill is not None
        self._prefill = route.prefill
        self._request = submit
        self._prompt = prompt
        self._handoffs = handoffs
        """Names of handoffs that were not used yet."""
        self._tried: set[InstanceLink] = set()
        self._delivered = False
        self._over = asyncio.Event()
        """Set when the instance that answers needs no handoff any more."""
        self.asked = self._begin()
        """The request for the instance that answers."""
        self._task = asyncio.create_task(self._compute())

    def note_token(self, *, handed: bool) -> None:
        """If the KV was delivered, the two instances end the handoff by themselves."""
        self._delivered |= handed
        self.end()

    def end(self) -> None:
        """Aborts it unless it was delivered; may be called twice."""
        self._over.set()
        self._sent.end()
        if self._delivered:
            return
        self._task.cancel()
        if not self._prefill.lost:
            self._prefill.send(Abort(id=self.asked.handoff))

    def _begin(self) -> Request:
        """Opens the pair if it is not open, and names the handoff."""
        self._pair = self._router.pairs.use(self._prefill, self._decode)
        self._sent = self._router.send_prompt(
            self._prefill, self._request, self._prompt, self._blocks
        )
        self._tried.add(self._prefill)
        return msgspec.structs.replace(
            self._request,
            handoff=next(self._handoffs),
            prefill=self._prefill.name,
            decode=self._decode.name,
        )

    async def _compute(self) -> None:
        """Has the prompt computed by one instance after the other, until one has done it."""
        while True:
            prefill, pair = self._prefill, self._pair
            try:
                computed = await self._is_computed_by(prefill)
                self._sent.end()
                if computed:
                    # The pair stays open until the KV has arrived.
                    await self._over.wait()
                    return
            finally:
                self._router.pairs.release(prefill, self._decode, pair)
            self._router.note_failure(prefill)
            if self._decode.lost:
                return
            another = self._another()
            if another is None:
                self._sent = self._router.send_prompt(
                    self._decode, self._request, self._prompt, self._blocks
                )
                self._decode.send(ComputeLocally(id=self._request.id, lost=bool(prefill.lost)))
                return
            self._prefill, self._blocks = another
            self.asked = asked = self._begin()
            self._decode.send(
                ChangePrefill(
                    id=asked.id,
                    handoff=asked.handoff,
                    prefill=asked.prefill,
                    lost=bool(prefill.lost),
                )
            )

    def _another(self) -> tuple[InstanceLink, int] | None:
        if len(self._tried) >= PREFILLS_MAX:
            return None
        return self._router.another_prefill(self._decode, self._prompt, self._tried)

    async def _is_computed_by(self, prefill: InstanceLink) -> bool:
        # Each attempt is a request of its own: an earlier one may still hold blocks.
        submit = msgspec.structs.replace(
            self.asked,
            id=self.asked.handoff,
            max_tokens=1,
            min_tokens=min(1, self.asked.min_tokens),
            answers=1,
            sampling=replace(self.asked.sampling, logprobs=0),
        )
        computed = False
        with suppress(InstanceLost, RequestRefusal):
            async with aclosing(prefill.generate(submit)) as tokens:
                async for progress in tokens:
                    computed = progress.sampled is not None
                    if computed and progress.spent_s:
                        self._router.note_computed(prefill, progress)
        return computed


class Router:
    """The connected instances, and which of them gets a request."""

    def __init__(
        self,
        settings: RoutingTable | None = None,
        gate: RequestGate | None = None,
        recorder: Recorder | None = None,
        *,
        salt: str = "",
    ) -> None:
        """A router without instances."""
        self.settings = settings or RoutingTable()
        self.gate = gate or RequestGate()
        self._recorder = recorder
        self.on_ready: Callable[[InstanceLink], None] = lambda _link: None
        """Called when an instance is ready, before it gets any request."""
        self.links: list[InstanceLink] = []
        self._answering: list[InstanceLink] | None = None
        """Kept until the standing of a link changes: every request asks for it several times."""
        self.pairs = PairTable()
        self.retries = 0
        self.counts: dict[InstanceLink, RequestCounts] = {}
        """Since each instance was added."""
        self._fleet = Fleet(self.settings, salt=salt)
        self._at: dict[str, InstanceLink] = {}
        """The instance that answers each request."""
        self._resets = 0
        self._weights_version = ""
        """The version of the weights, if it has changed."""
        self.loads_weights = False
        """Whether an instance with another version has to load weights."""
        self._roles: dict[str, RoleName] = {}
        """Roles that were changed, by the name of the instance, in any of its lives."""
        self._reset_kept: dict[str, int] = {}
        """The last reset that each instance has kept for its next life, in any of its lives."""
        self._had_key: dict[tuple[str, str], str] = {}
        """Tenant and cache key to the name of the instance that had its last request."""

    def add(self, link: InstanceLink) -> None:
        self.links.append(link)
        self.counts[link] = RequestCounts()
        self._fleet.add(link)
        link.on_load = self._fleet.note_load
        link.on_standing = self._note_standing
        link.on_kv_events = self._note_events
        link.on_pair_failed = self.pairs.note_failure
        link.on_ready = self._welcome
        link.on_reset_kept = self._note_reset_kept

    def remove(self, link: InstanceLink) -> None:
        self.links.remove(link)
        del self.counts[link]
        self._answering = None
        self.pairs.remove(link)
        self._fleet.remove(link)

    def handoffs_of(self, request: str) -> list[str]:
        """The names of a request's handoffs, as many as it may have."""
        count = PREFILLS_MAX * self.settings.attempts_max
        return [f"{request}/{n}" for n in range(1, count + 1)]

    @property
    def ready(self) -> list[InstanceLink]:
        """The loaded instances."""
        return [link for link in self.links if link.ready is not None]

    @property
    def answering(self) -> list[InstanceLink]:
        """The instances that accept requests and answer them."""
        if self._answering is None:
            self._answering = [
                link for link in self.ready if self.role_of(link) != "prefill" and is_usable(link)
            ]
        return self._answering

    @property
    def prefilling(self) -> list[InstanceLink]:
        """The instances that accept prompts and compute them for others."""
        return [link for link in self.ready if self.role_of(link) == "prefill" and is_usable(link)]

    def role_of(self, link: InstanceLink) -> RoleName:
        """What a ready instance does."""
        assert link.ready is not None
        return self._roles.get(link.name, link.ready.role)

    def set_role(self, link: InstanceLink, role: RoleName) -> None:
        """From now on an instance gets the requests of another role, after a restart as well.

        Those that it has already end as they began.
        Raises `ValueError`: the instance cannot have the role, or no other one would answer
        requests.
        """
        if role != "both" and (link.ready is None or link.ready.engine is None):
            raise ValueError(f"is {role!r}, must be 'both': {link.name!r} hands nothing over")
        if role == "prefill" and not [each for each in self.answering if each is not link]:
            raise ValueError(
                f"is {role!r}, must be 'decode' or 'both': no instance but {link.name!r} answers "
                "requests"
            )
        self._roles[link.name] = role
        self._note_standing(link)
        link.send(SetRole(role=role))

    def generate(self, submit: Request) -> AsyncGenerator[Output, None]:
        """Sends a request to the best instance, and to another if that is lost before a token.

        Raises `InstanceLost`: no instance is ready, or the one that had begun to answer is gone;
        `RequestRefusal`: the instance refused the request, or the server is paused.
        """
        answered = self._answered(submit)
        return answered if self._recorder is None else self._recorded(submit, answered)

    async def _recorded(
        self, submit: Request, answered: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[Output, None]:
        """The same, and the length of the answer is recorded."""
        assert self._recorder is not None
        output_tokens = 0
        try:
            async with aclosing(answered) as tokens:
                async for progress in tokens:
                    if progress.sampled is not None:
                        output_tokens += 1
                    yield progress
        finally:
            self._recorder.end(submit.id, output_tokens)

    def _record(self, submit: Request, prompt: PromptKeys, link: InstanceLink) -> None:
        """Records a request, unless it keeps out of the cache."""
        if self._recorder is not None and prompt.reuses and submit.store:
            config = self._fleet.cached_of(link).config
            self._recorder.begin(
                submit.id,
                prompt.under(config),
                token_count=prompt.token_count,
                block_tokens=config.cache.block_tokens,
                hints=submit.hints,
            )

    async def _answered(self, submit: Request) -> AsyncGenerator[Output, None]:
        await self.gate.enter()
        tried: set[InstanceLink] = set()
        handoffs = iter(self.handoffs_of(submit.id))
        while True:
            prompt = PromptKeys(submit)
            route = self._choose(prompt, tried)
            link = route.decode
            if not tried:
                self._record(submit, prompt, link)
            tried.add(link)
            begun = False
            self.gate.begin()
            self._at[submit.id] = link
            work = (
                self.send_prompt(link, submit, prompt, route.computing)
                if route.prefill is None
                else _Prefill(self, route, submit, prompt, handoffs)
            )
            try:
                async with aclosing(link.generate(work.asked)) as tokens:
                    async for progress in tokens:
                        if progress.scored:
                            # If this instance is lost, the next one sends it again.
                            yield progress
                            continue
                        if progress.handed or not begun:
                            work.note_token(handed=progress.handed)
                        handed = route.prefill is not None
                        self._note_begun(link, progress, again=begun, handed=handed)
                        begun = True
                        yield progress
            except InstanceLost:
                untried = set(self.answering) - tried
                if begun or not untried or len(tried) >= self.settings.attempts_max:
                    raise
                self.retries += 1
                continue
            finally:
                del self._at[submit.id]
                self.gate.end()
                work.end()
            return

    def stop(self, request: str, answer: int) -> None:
        """Ends one answer of a request; the others continue."""
        link = self._at.get(request)
        if link is not None and not link.lost:
            link.send(StopAnswer(id=request, answer=answer))

    def reset(self, why: str, *, weights_version: str = "") -> list[str]:
        """Clears the caches of all instances, also of those that are restarting.

        Returns the names of the ready ones.
        """
        self._resets += 1
        self._weights_version = weights_version or self._weights_version
        for link in self.ready:
            self._reset(link, why, weights_version)
        return [link.name for link in self.ready]

    @property
    def weights_version(self) -> str:
        """The version that all instances are to have; empty if it has not changed."""
        return self._weights_version

    def weights_of(self, link: InstanceLink) -> str:
        """The version of the weights of one instance."""
        return self._fleet.cached_of(link).config.model.weights_version

    def want_weights(self, version: str) -> None:
        """From now on instances are to load the weights of this version."""
        self._weights_version, self.loads_weights = version, True

    def note_weights(self, link: InstanceLink) -> None:
        """An instance has loaded the wanted weights."""
        self._change_weights(link, self._weights_version)

    def _welcome(self, link: InstanceLink) -> None:
        """Called when an instance is ready, before it gets any request."""
        self._fleet.cached_of(link)
        role = self._roles.get(link.name)
        if role is not None and link.ready is not None and role != link.ready.role:
            link.send(SetRole(role=role))
        self._send_missed_resets(link)
        self.on_ready(link)

    def _send_missed_resets(self, link: InstanceLink) -> None:
        known, version = self.weights_of(link), self._weights_version
        # Weights from a checkpoint are loaded, not only renamed.
        other = version if known != version and not self.loads_weights else ""
        if other or self._reset_kept.get(link.name, 0) < self._resets:
            self._reset(link, "it was away when the others were reset, or died too soon", other)

    def _reset(self, link: InstanceLink, why: str, weights_version: str) -> None:
        link.send(ResetCache(number=self._resets, why=why, weights_version=weights_version))
        if weights_version:
            self._change_weights(link, weights_version)

    def _note_reset_kept(self, link: InstanceLink, number: int) -> None:
        self._reset_kept[link.name] = number

    def _change_weights(self, link: InstanceLink, version: str) -> None:
        """An instance has other weights: pairs were opened for the old ones."""
        self._fleet.change_weights(link, version)
        self.pairs.close_pairs_of(link)

    def _choose(self, prompt: PromptKeys, tried: set[InstanceLink]) -> RequestRoute:
        """The best route; equals take turns."""
        able = self._fleet.answering & ~self._fleet.mask(tried)
        if not able:
            raise InstanceLost("no instance is ready")
        routes = Routes(self._fleet, prompt, self.settings, able=able, can_pair=self._can_pair)
        had_last = self._had_last(prompt)
        route = routes.choose(had_last)
        if route.decode is not had_last:
            self._fleet.note_chosen(route.decode)
        if route.prefill is not None:
            self._fleet.note_chosen(route.prefill)
        if prompt.affinity is not None:
            self._had_key.pop(prompt.affinity, None)
            self._had_key[prompt.affinity] = route.decode.name
            if len(self._had_key) > CACHE_KEYS_MAX:
                del self._had_key[next(iter(self._had_key))]
        return route

    def _had_last(self, prompt: PromptKeys) -> InstanceLink | None:
        """The instance that had the last request with the same cache key."""
        name = self._had_key.get(prompt.affinity) if prompt.affinity else None
        return next((link for link in self.links if link.name == name), None) if name else None

    def another_prefill(
        self, decode: InstanceLink, prompt: PromptKeys, tried: set[InstanceLink]
    ) -> tuple[InstanceLink, int] | None:
        """Who may compute a prompt in the place of those that could not, and how much of it."""
        fleet = self._fleet
        untried = fleet.prefilling & ~fleet.mask(tried)
        leads = fleet.leads(prompt)
        groups = fleet.weigh(untried, leads)
        able = next(able_prefills(fleet, groups, decode, self._can_pair), None)
        return None if able is None else (able[1], fleet.missing(able[1], leads, prompt))

    def send_prompt(
        self, link: InstanceLink, submit: Request, prompt: PromptKeys, computing: int
    ) -> _SentPrompt:
        """An instance has to compute some blocks of a prompt."""
        return _SentPrompt(self._fleet, link, submit, prompt, computing)

    def _can_pair(self, prefill: InstanceLink, decode: InstanceLink) -> bool:
        same = self.weights_of(prefill) == self.weights_of(decode)
        return same and self.pairs.can_use(prefill, decode)

    def note_computed(self, prefill: InstanceLink, first: Output) -> None:
        """A prefill instance has computed a prompt."""
        if (counts := self.counts.get(prefill)) is not None:
            counts.computed += 1
            counts.waited_s += first.spent_s[0]

    def _note_begun(self, link: InstanceLink, first: Output, *, again: bool, handed: bool) -> None:
        """An instance has begun to answer a request, unless it did so `again`."""
        counts = self.counts.get(link)
        if counts is not None and first.spent_s and not again:
            counts.begun += 1
            counts.handed += handed
            counts.waited_s += first.spent_s[0]

    def note_failure(self, prefill: InstanceLink) -> None:
        """A prefill instance did not compute a prompt that it was sent."""
        self._fleet.note_failure(prefill)

    def _note_standing(self, link: InstanceLink) -> None:
        """Whether an instance gets requests, or what it does, has changed."""
        self._answering = None
        self._fleet.note_role(link, self.role_of(link) if is_usable(link) else None)

    def _note_events(self, link: InstanceLink, events: list[KvEvent]) -> None:
        self._fleet.cached_of(link).take(events)


def is_usable(link: InstanceLink) -> bool:
    """Whether an instance may get requests."""
    return link.ready is not None and not link.leaving and not link.held_back
