"""What the two kinds of engine have in common: pins, prefetches, cancels, ticks.

An engine here is a client of the cache and nothing else: it knows what it was told, keeps
the contract of the events it sends, and takes every liberty that the contract leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from penstock.cache.explain import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.settings import Gate
from penstock.errors import CapacityError
from penstock.machine import events as ev
from penstock.machine.effects import Pinned, Started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lab.sim.managed import Request
    from lab.sim.world import World
    from penstock.cache.explain import Miss
    from penstock.machine.effects import Effect
    from penstock.vocabulary.keys import Key, PinId


class Engine(ABC):
    """A client of the cache."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.conditions = world.conditions
        self.library = world.library
        self.block_tokens = world.library.block_tokens
        self.pins: dict[PinId, list[Key]] = {}
        self.pinned: set[Key] = set()
        self.last_request = ""
        self.last_keys: list[Key] = []
        self.reactions: dict[type[Effect], Callable[..., None]] = {}
        """What it does when it is told something that is no answer."""
        self._named = 0
        self._told_speed = False

    def next_name(self) -> str:
        """A name for a request."""
        self._named += 1
        self.last_request = f"r{self._named}"
        return self.last_request

    def step(self) -> None:
        """One step: mostly requests, now and then something else."""
        rng, conditions = self.rng, self.conditions
        if rng.random() < 0.15:
            self.world.send(ev.Tick())
        if rng.random() < conditions.pin:
            self._pin_or_unpin()
        if rng.random() < conditions.prefetch / 4 and conditions.settings.tiers:
            self._prefetch()
        if rng.random() < conditions.cancel:
            self._cancel()
        if conditions.tell_speed and rng.random() < conditions.tell_speed:
            self._tell_speed()
        self.advance()

    @abstractmethod
    def advance(self) -> None:
        """Does something about one request."""

    @abstractmethod
    def stop(self) -> None:
        """Some requests end while their copies are under way."""

    def finish(self) -> None:
        """All requests end, and all pins."""
        for pin in list(self.pins):
            self._unpin(pin)

    @abstractmethod
    def recover(self) -> None:
        """Whatever happened before, a new request must be served, and hit what it computed."""

    def waiting(self) -> Iterable[Request]:
        """Requests that may be waiting for copies."""
        return ()

    @abstractmethod
    def rank_died(self) -> None:
        """The device memory of a rank is gone."""

    @abstractmethod
    def check_no_one_waits(self) -> None:
        """Every copy has ended, so nobody has anything to wait for."""

    def _tell_speed(self) -> None:
        count = self.rng.randint(1, 20)
        jitter = self.rng.choice((0.5, 1.0, 1.0, 1.0, 20.0))
        self._told_speed = True
        seconds = jitter * count / self.conditions.tokens_per_s
        self.world.send(ev.Computed(token_count=count, seconds=seconds))

    def check_skipped(self, name: str, miss: Miss, keys: Sequence[Key]) -> None:
        """What lies below is computed only where that may be quicker, or saves too little."""
        if miss.reason is not MissReason.RECOMPUTE:
            return
        self.world.note("recompute is quicker")
        settings = self.conditions.settings
        measured = settings.load_gate is Gate.MEASURED and self._told_speed
        if not (measured or settings.load_tokens_min > 1):
            raise Violation("usefulness", f"{name} computes what it could load: {miss}")
        books = self.world.books
        node = books.nodes.get(keys[miss.block])
        # One of them may have made room, in the same event, for what the device evicts next.
        lower = books.lower_tiers()
        there = any(tier.slot_of[node] != NOWHERE for tier in lower)
        if not there and not any(tier.name in self.world.kv.removed_now for tier in lower):
            raise Violation("usefulness", f"{name}: nothing lies below, but {miss}")

    def _pin_or_unpin(self) -> None:
        if self.pins and self.rng.random() < 0.4:
            self._unpin(self.rng.choice(list(self.pins)))
            return
        keys = self.library.all_keys(self.library.next_text())
        keys = keys[: self.rng.randint(1, 3)]
        self.world.watch()
        try:
            effects = self.world.send(ev.PinBlocks(keys=keys))
        except CapacityError:
            self.world.check_unchanged()
            self.world.note("no room")
            return
        for effect in effects:
            if isinstance(effect, Pinned):
                self.pins[effect.pin] = keys
                self.pinned.update(keys)

    def _unpin(self, pin: PinId) -> None:
        del self.pins[pin]
        # Before the event: it may be followed by an eviction in the same breath.
        self.pinned = {key for keys in self.pins.values() for key in keys}
        self.world.send(ev.UnpinBlocks(pin=pin))

    def _prefetch(self) -> None:
        keys = self.library.all_keys(self.library.next_text())
        if keys:
            self.prefetch(keys, self.next_name())

    def prefetch(self, keys: list[Key], cause: str) -> Started:
        """Has blocks brought nearer, and checks the answer."""
        return self.only_start(self.world.send(ev.Prefetch(keys=keys, cause=cause)), keys)

    def only_start(self, effects: list[Effect], keys: Sequence[Key]) -> Started:
        """The answer to a wish for copies; they move what it says they do."""
        started = [effect for effect in effects if isinstance(effect, Started)]
        if len(started) != 1:
            raise Violation("operations", f"{len(started)} answers to one wish")
        jobs = [self.world.ranks.open[operation] for operation in started[0].operations]
        moved = [key for job in jobs for key in job.keys]
        if moved != [keys[position] for position in started[0].accepted]:
            raise Violation("operations", "copies move other blocks than was told")
        return started[0]

    def _cancel(self) -> None:
        running = [job for job in self.world.ranks.open.values() if not job.ended]
        if running:
            self.world.note("copy cancelled")
            self.world.send(ev.Cancel(operation=self.rng.choice(running).id))
