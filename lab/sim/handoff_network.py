"""The network between the parties of a simulated handoff: it delays, loses, repeats, overtakes.

It is cut and healed. Between the two engines it may be slow: then one message waits for another.

What must not break: a message that was sent is delivered never, once or more often, and never
with another content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.worlds import actions as do
from lab.worlds.scene import PREFILL

if TYPE_CHECKING:
    from lab.sim.handoff import HandoffWorld
    from penstock.handoff.protocol.messages import AnyMessage

_LATE_S = 3.0
"""A message that comes twice may come so much later: after everything it was about has ended."""


class Network:
    """What messages go through."""

    def __init__(self, world: HandoffWorld) -> None:
        self._world = world
        self._rng = world.rng
        self._conditions = world.conditions
        self._last: dict[tuple[str, str], float] = {}
        """When the latest message between two parties arrives."""
        self._cut_until = 0.0
        self.apart = False
        """Whether the two engines cannot reach each other, for how long soever."""
        self._busy_until = {True: 0.0, False: 0.0}
        """The link between the engines, to the prefill engine and from it."""
        self.sent_count = 0
        """Messages that were sent, whatever became of them."""

    def cut(self, duration_s: float) -> None:
        """The two engines do not hear each other for a while."""
        self._world.note("partition")
        self._cut_until = max(self._cut_until, self._world.now + duration_s)

    def occupy(self, sender: str, target: str, *, messages: int = 1) -> float:
        """How long something takes that crosses a slow link, with what is before it."""
        service_s = messages * self._conditions.link_s
        to_prefill = target.startswith(PREFILL)
        if not service_s or sender.startswith(PREFILL) == to_prefill:
            return 0.0
        self._world.note("slow link")
        begin = max(self._world.now, self._busy_until[to_prefill])
        self._busy_until[to_prefill] = begin + service_s
        return begin + service_s - self._world.now

    def is_cut(self, sender: str, target: str) -> bool:
        """Whether nothing gets through between two parties now."""
        across = sender.startswith(PREFILL) != target.startswith(PREFILL)
        return across and (self.apart or self._world.now < self._cut_until)

    def send(self, message: AnyMessage) -> None:
        """Takes a message, and does with it what networks do."""
        self.sent_count += 1
        if self._rng.random() < self._conditions.loss:
            self._world.note("message lost")
            self._world.tell("%s is lost", type(message).__name__)
            return
        self._deliver(message, self._delay(message))
        if self._rng.random() < self._conditions.duplicate:
            self._world.note("message twice")
            late_s = self._rng.uniform(0.0, _LATE_S) if self._rng.random() < 0.5 else 0.0
            self._deliver(message, self._delay(message) + late_s)

    def _delay(self, message: AnyMessage) -> float:
        sender, target = message.sender.name, message.target.name
        delay_s = self._conditions.delay_s * self._rng.expovariate(1.0)
        delay_s *= max(self._world.slowness(sender), self._world.slowness(target))
        arrival = self._world.now + delay_s + self.occupy(sender, target)
        last = self._last.get((sender, target), 0.0)
        if arrival < last:
            if self._conditions.fifo:
                arrival = last
            else:
                self._world.note("message overtaken")
        self._last[sender, target] = max(last, arrival)
        return arrival - self._world.now

    def _deliver(self, message: AnyMessage, delay_s: float) -> None:
        self._world.after(delay_s, self._arrive, message)

    def _arrive(self, message: AnyMessage) -> None:
        sender, target = message.sender.name, message.target.name
        if self.is_cut(sender, target):
            self._world.note("message cut off")
        elif not self._world.is_up(target):
            self._world.note("message to the dead")
        else:
            if message.sender != self._world.actors[sender].identity.life:
                self._world.note("message from an earlier life")
            self._world.give(target, do.Receive(message))
