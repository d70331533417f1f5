"""The router of a simulated world of pairs: chooses instances, introduces them, tries again.

Which pairs are open, and who may open one, the shipped `PairTable` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lab.explore.world import Violation
from lab.sim.handoff_conditions import AMPLE_S
from lab.sim.pairs_conditions import prompt_of
from penstock.config import HandoffTable, parse_config
from penstock.handoff.protocol.states import HandoffOutcome
from penstock_serve.engine import messages as ms
from penstock_serve.engine.spec import EngineSpec
from penstock_serve.server.pairs import PairTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.sim.agenda import Agenda
    from lab.sim.pairs import Couple, PairsSimulation
    from lab.sim.pairs_conditions import Asked

CONFIG = parse_config('version = 1\nmodel.name = "simulated"\ncache = { blocks = 8 }\n')
TRY_COUNT_MAX = 3
"""A request that was not handed over so often is computed by its decode instance."""
DEADLINE_S = {False: 300.0, True: 8 * AMPLE_S}
"""A request ends by this; in calm worlds everybody is patient."""
_SERVED_S = 200.0
"""A request for which a decode instance was there so long must not have to wait for its deadline:
three patiences, and a few resends that were lost."""
_AGAIN_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request of a client."""

    name: str
    asked: Asked
    try_count: int = 0
    handoff: str = ""
    """Of the present try; empty while there is none."""
    couple: Couple | None = None
    """The pair that it uses."""
    opening: int = 0
    """The number of that pair."""
    alone: str = ""
    """The decode instance that computes it itself."""
    outcome: str = ""


class Timer:
    """Something that the table has on the agenda, until it is cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def ring(self) -> None:
        """Its time has come."""
        if self._call is not None:
            self._call()

    def cancel(self) -> None:
        """It is not called any more."""
        self._call = None


class AgendaLoop:
    """The clock and the timers of an event loop, on the agenda of a world."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda

    def time(self) -> float:
        """Now."""
        return self._agenda.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        """Calls at a time."""
        timer = Timer(call)
        self._agenda.at(when, timer.ring)
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        """Calls after what happens now."""
        self._agenda.after(0.0, call)


class Link:
    """What the table knows of one life of an instance."""

    def __init__(self, world: PairsSimulation, name: str) -> None:
        conditions = world.conditions
        table = HandoffTable(peers_max=conditions.peers_max, idle_s=conditions.idle_s)
        self.name = name
        self.lost = ""
        self.ready = ms.InstanceReady(
            model="simulated",
            positions=1,
            stop_tokens=[],
            config=replace(CONFIG, handoff=table),
            tiers=["device"],
            engine=EngineSpec(name=name, ranks=1, address=f"ipc://{name}"),
        )
        self._world = world

    def send(self, message: ms.OpenPair | ms.ClosePair) -> None:
        """The instance opens or closes its side when it hears of it."""
        world = self._world
        if isinstance(message, ms.ClosePair):
            couple = message.prefill, message.decode
            world.send(self.name, world.close_side, self.name, couple)
            return
        pair = message.pair
        couple = pair.prefill.name, pair.decode.name
        if self.name == couple[0]:
            world.note("pair opened")
        world.send(self.name, world.open_side, self.name, couple, pair.number)


class WatchedPairs(PairTable):
    """The table, under the eyes of a world."""

    def __init__(self, world: PairsSimulation) -> None:
        loop: Any = AgendaLoop(world.agenda)
        super().__init__(lambda: loop)
        self._world = world

    def _make_room(self, link: Any) -> None:  # noqa: ANN401 - one of this file
        before = len(self._open)
        super()._make_room(link)
        if len(self._open) < before:
            self._world.note("pair closed to make room")

    def _close_idle(self) -> None:
        before = self.names
        super()._close_idle()
        for couple in before:
            if couple not in self.names:
                self._world.note("pair closed when idle")
                self._world.check_idle(couple)


class Router:
    """Who knows all instances."""

    def __init__(self, world: PairsSimulation) -> None:
        self._world = world
        self._rng = world.rng
        self._serving: dict[str, float] = {}
        """Instances that get requests, and since when."""
        self._links: dict[str, Any] = {}
        """Instances that are there, those that drain too."""
        self._pairs = WatchedPairs(world)
        self._requests: dict[str, Request] = {}
        self._handoffs: dict[str, Request] = {}

    # ---------------------------------------------------------------- requests

    def arrive(self, name: str, asked: Asked) -> None:
        """A client asks for something."""
        request = self._requests[name] = Request(name=name, asked=asked)
        deadline_s = DEADLINE_S[self._world.conditions.calm]
        self._world.agenda.after(deadline_s, self._give_up, request)
        self._route(request)

    def _route(self, request: Request) -> None:
        """Begins the next try, as soon as there are instances for it."""
        if request.outcome or request.handoff or request.alone:
            return
        decodes = self._role("decode")
        if decodes and request.try_count >= TRY_COUNT_MAX:
            self._let_compute(request, self._rng.choice(decodes))
            return
        couples = [
            (prefill, decode)
            for prefill in self._role("prefill")
            for decode in decodes
            if self._pairs.can_use(self._links[prefill], self._links[decode])
        ]
        if not couples:
            self._world.note("no pair for a request")
            self._world.agenda.after(_AGAIN_S, self._route, request)
            return
        # The one that is used least: ties rotate by chance.
        couple = min(couples, key=lambda each: (self._uses_of(each), self._rng.random()))
        self._hand_over(request, couple)

    def _hand_over(self, request: Request, couple: Couple) -> None:
        world = self._world
        request.try_count += 1
        handoff = request.handoff = f"{request.name}.{request.try_count}"
        self._handoffs[handoff] = request
        request.opening = self._pairs.use(self._links[couple[0]], self._links[couple[1]])
        request.couple = couple
        prefill, decode = (world.instances[name] for name in couple)
        world.pair_of(couple).prompts[handoff] = prompt_of(
            request.asked, handoff, prefill_ranks=prefill.ranks, decode_ranks=decode.ranks
        )
        world.send(couple[0], self._begin_prefill, couple, handoff)
        world.send(couple[1], self._begin_claim, couple, handoff)

    def _begin_prefill(self, couple: Couple, handoff: str) -> None:
        if couple in self._world.instances[couple[0]].open:
            self._world.pairs[couple].world.engines.prefill(handoff)
        else:
            self._world.note("request for a closed pair")

    def _begin_claim(self, couple: Couple, handoff: str) -> None:
        if couple in self._world.instances[couple[1]].open:
            self._world.pairs[couple].world.engines.claim(handoff, 1)
        else:
            self._world.note("request for a closed pair")
            self._world.report(couple[1], self.handoff_ended, handoff, None)

    def handoff_ended(self, handoff: str, outcome: HandoffOutcome | None) -> None:
        """A decode instance reports the end of a handoff; of one whose pair was closed, none."""
        request = self._handoffs[handoff]
        if request.outcome or request.handoff != handoff:
            return  # It was tried again meanwhile.
        couple = self._release(request)
        match outcome:
            case HandoffOutcome.DELIVERED | HandoffOutcome.CANCELLED:
                self._end(request, outcome.value)
            case HandoffOutcome.FAILED_OVER | HandoffOutcome.EXPIRED if self._rng.random() < 0.5:
                self._let_compute(request, couple[1])
            case _:
                self._world.note("tried again")
                self._route(request)

    def _let_compute(self, request: Request, decode: str) -> None:
        """The decode instance computes a prompt itself."""
        self._world.note("computed by decode")
        request.alone = decode
        self._world.send(decode, self._computed, request)

    def _computed(self, request: Request) -> None:
        if not request.outcome:
            self._end(request, "computed")

    def _end(self, request: Request, outcome: str) -> None:
        self._world.tell(f"{request.name} ends: {outcome}")
        request.outcome = outcome

    def _give_up(self, request: Request) -> None:
        """The deadline of a request."""
        if request.outcome:
            return
        served = [
            self._world.agenda.now - since for since in map(self._since, self._role("decode"))
        ]
        if max(served, default=0.0) > _SERVED_S:
            raise Violation("liveness", f"{request.name} did not end by its deadline")
        self._world.note("request given up")
        self._release(request)
        self._end(request, "deadline")

    def _since(self, name: str) -> float:
        return self._serving[name]

    def _role(self, role: str) -> list[str]:
        """The instances of a role that get requests."""
        return [name for name in self._serving if self._world.instances[name].role == role]

    def _release(self, request: Request) -> Couple:
        """A try is over: its pair may be idle now."""
        couple, request.couple, request.handoff = request.couple, None, ""
        assert couple is not None or request.outcome == ""
        if couple is not None and all(name in self._links for name in couple):
            prefill, decode = (self._links[name] for name in couple)
            self._pairs.release(prefill, decode, request.opening)
        return couple or ("", "")

    # ---------------------------------------------------------------- pairs

    def _uses_of(self, couple: Couple) -> int:
        return sum(each.couple == couple for each in self._requests.values())

    def pair_failed(self, couple: Couple) -> None:
        """An instance could not open a pair: it is closed on the other side, too."""
        if couple in self._pairs.names:
            failed = ms.PairFailed(prefill=couple[0], decode=couple[1], problem="no room")
            self._pairs.note_failure(self._links[couple[0]], failed)
            self._try_elsewhere(couple)

    def _try_elsewhere(self, couple: Couple) -> None:
        """The requests of a pair that is closed go on in another one."""
        for request in [each for each in self._requests.values() if each.couple == couple]:
            self._world.note("another instance")
            self._release(request)
            self._route(request)

    # ---------------------------------------------------------------- instances

    def joined(self, name: str) -> None:
        """An instance is there, for the first time or again."""
        self._links[name] = Link(self._world, name)
        self._serving[name] = self._world.agenda.now

    def lost(self, name: str, life: int) -> None:
        """An instance is gone: its requests go elsewhere, and then its peers close their pairs."""
        if self._world.instances[name].life != life or name not in self._links:
            return
        gone = [couple for couple in self._pairs.names if name in couple]
        self._remove(name)
        for couple in gone:
            self._try_elsewhere(couple)
        for request in self._requests.values():
            if request.alone == name and not request.outcome:
                request.alone = ""
                self._route(request)

    def _remove(self, name: str) -> None:
        self._serving.pop(name, None)
        link = self._links.pop(name)
        link.lost = "gone"
        self._pairs.remove(link)

    def leave(self) -> None:
        """An instance that others can stand in for drains, and leaves for good."""
        self._drain("leave")

    def change_role(self) -> None:
        """An instance that others can stand in for drains, and gets the other role."""
        self._drain("role")

    def _drain(self, then: str) -> None:
        spare = [
            name for name in self._serving if len(self._role(self._world.instances[name].role)) > 1
        ]
        if not spare:
            return
        name = self._rng.choice(spare)
        self._world.note("instance drains")
        del self._serving[name]
        self._when_drained(name, self._world.instances[name].life, then)

    def _when_drained(self, name: str, life: int, then: str) -> None:
        world, instance = self._world, self._world.instances[name]
        if name not in self._links or instance.life != life or name in self._serving:
            return  # It died meanwhile, and begins again in its role.
        busy = any(name in (*(each.couple or ()), each.alone) for each in self._unended())
        if busy:
            world.agenda.after(_AGAIN_S, self._when_drained, name, life, then)
            return
        self._pairs.close_pairs_of(self._links[name])
        world.send(name, self._drained, name, then)

    def _drained(self, name: str, then: str) -> None:
        """All pairs of an instance are closed on its side."""
        world, instance = self._world, self._world.instances[name]
        if instance.open:
            raise Violation("drain", f"{name} drained with pairs open: {instance.open}")
        if then == "leave":
            world.note("instance leaves")
            instance.up = False
            self._remove(name)
            return
        world.note("role changes")
        instance.role = "decode" if instance.role == "prefill" else "prefill"
        world.report(name, self.joined, name)

    def _unended(self) -> list[Request]:
        return [each for each in self._requests.values() if not each.outcome]

    # ---------------------------------------------------------------- the end

    def check_at_rest(self) -> None:
        """Every request has ended, and no pair is open.

        Raises:
            Violation: one has not, or is; or in a calm world one was not handed over.
        """
        for request in self._requests.values():
            if not request.outcome:
                raise Violation("liveness", f"{request.name} has not ended")
            if self._world.conditions.calm and request.outcome != "delivered":
                raise Violation(
                    "usefulness",
                    f"{request.name} is {request.outcome}, though nothing was in the way",
                )
        if self._pairs.names:
            raise Violation("drain", f"pairs are open: {sorted(self._pairs.names)}")
