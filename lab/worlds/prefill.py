"""A prefill rank with its KV memory and the writes it has posted.

A write is *asked* for by the machine, *posted* by the driver, has *landed*, and is observed to
be done; then it is forgotten. A write whose poster died, or was told that it failed, is a
*ghost*: it may land once more, or never.

What must not break: only what was computed is ever written; nothing more of a claim, once it was
said that it has stopped; and no claim changes what is known of a later one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from lab.explore.world import Violation
from lab.worlds import actions as do
from lab.worlds.actor import Actor, Effects
from lab.worlds.scene import PREFILL
from penstock.handoff.protocol import effects as ef
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.prefill_rank import PrefillRank

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

    from lab.worlds.scene import Scene
    from penstock.handoff.protocol.identity import Identity, Life, WriteId


class Phase(IntEnum):
    """How far a write is."""

    ASKED = 0
    POSTED = 1
    LANDED = 2


class Posting(NamedTuple):
    """A write, as its driver knows it."""

    write: ef.Write
    phase: Phase
    abandoned: bool = False
    """Its source is not read any more: one that was posted had been read, or is given up."""


Ghost = tuple["Life", "WriteId"]
"""Whose write it was, and which."""


class PrefillRankActor(Actor[PrefillRank]):
    """A prefill rank."""

    computed: dict[str, tuple[int, ...]]
    """Tokens of each layer, by handoff."""
    owners: dict[str, int]
    """Whose the blocks of each handoff are: a life of the scheduler."""
    writes: dict[WriteId, Posting]
    ghosts: dict[Ghost, ef.Write]
    stopped: dict[tuple[Life, str], int]
    """By target and handoff, the last claim of which it was said that nothing more comes."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.computed, self.owners, self.writes, self.ghosts, self.stopped = {}, {}, {}, {}, {}
        super().__init__(scene, name)

    def is_computed(self, handoff: str) -> bool:
        """Whether all layers of a prompt are there."""
        prompt = self.scene.prompts[handoff]
        return min(self.computed.get(handoff, (0,))) >= prompt.token_count

    def next_progress(self, handoff: str) -> do.Progress | None:
        """What the engine computes next of a prompt: layer by layer, chunk by chunk."""
        marks = self.computed.get(handoff)
        if marks is None or self.is_computed(handoff):
            return None
        if self.owners[handoff] < max(self.owners.values()):
            return None  # Its engine is gone, and the next one computes something else.
        prompt, lowest = self.scene.prompts[handoff], min(marks)
        layer = self.scene.layers_of(self.name, handoff).start + marks.index(lowest)
        tokens = min(prompt.token_count, lowest + prompt.chunk_tokens)
        return do.Progress(handoff, layer, tokens)

    def write_of(self, leaving: do.Leave | do.Fade) -> ef.Write:
        """The write that lands."""
        if isinstance(leaving, do.Fade):
            return self.ghosts[leaving.source, leaving.write]
        return self.writes[leaving.write].write

    def posted(self) -> list[ef.Write]:
        """Writes that may land any moment; ghosts not among them."""
        return [p.write for p in self.writes.values() if p.phase is Phase.POSTED]

    def reads(self, handoff: str) -> bool:
        """Whether the blocks of a prompt are, or will be, read for a write."""
        return any(
            posting.phase is not Phase.LANDED and not posting.abandoned and write.handoff == handoff
            for write, posting in self.writes.items()
        )

    def in_flight(
        self,
        source: Life,
        target: Life,
        generation: int,
        *,
        posted: bool = True,
        ghosts: bool = True,
    ) -> bool:
        """Whether a write of that life to that area, posted or a ghost, may land any moment."""
        life = self.identity.life
        writes = [
            (life, write) for write, posting in self.writes.items() if posting.phase is Phase.POSTED
        ]
        return any(
            (whose, write.target, write.generation) == (source, target, generation)
            for whose, write in (*(writes if posted else ()), *(self.ghosts if ghosts else ()))
        )

    def is_left(self, write: WriteId) -> bool:
        """Whether the rank writes to another area of that target by now, or to none."""
        lane = self.machine.lanes.get(write.target.name)
        return lane is None or not lane.holds(write)

    def _new_machine(self, identity: Identity) -> PrefillRank:
        return PrefillRank(identity, self.scene.settings, scheduler=PREFILL)

    def _die(self, life: Life) -> None:
        for write, posting in self.writes.items():
            if posting.phase is Phase.POSTED:
                self.ghosts[life, write] = posting.write
        self.writes, self.computed, self.owners, self.stopped = {}, {}, {}, {}

    def _later(self, message: msg.AnyMessage) -> Hashable | None:
        if not isinstance(message, msg.Claim | msg.Stop):
            return None
        want = self.machine.wants.get(message.sender.name, {}).get(message.handoff)
        if want is None or want.epoch <= message.epoch:
            return None
        return (want.epoch, want.have, want.spoiled)

    def _effects_of_own(self, action: do.Action, now: float) -> Effects:
        match action:
            case do.Prefill(handoff=handoff, scheduler=scheduler):
                token_count = self.scene.prompts[handoff].token_count
                layers = self.scene.layers_of(self.name, handoff)
                self.computed[handoff] = (0,) * len(layers)
                self.owners[handoff] = scheduler
                return self.machine.admit(
                    handoff,
                    token_count=token_count,
                    layers=layers,
                    now=now,
                    scheduler=scheduler,
                )
            case do.Progress() | do.Restart():
                return self._compute(action, now)
            case do.Observe(write=write):
                assert self.writes.pop(write).phase is Phase.LANDED
                return self.machine.write_done(write, now)
            case do.GiveUp(write=write):
                posting = self.writes.pop(write)
                assert posting.abandoned
                if posting.phase is Phase.POSTED and not self.scene.transport.recalls:
                    self.ghosts[self.identity.life, write] = posting.write
                return self.machine.write_dropped(write, now)
            case do.RelayDeath():
                return self._lose_links(now)
            case do.Fail(write=write):
                self.ghosts[self.identity.life, write] = self.writes.pop(write).write
                return self.machine.write_failed(write, now)
            case do.Bounce(write=write):
                del self.writes[write]
                return self.machine.write_failed(write, now)
            case _:
                self._go_on(action)
                return []

    def _compute(self, action: do.Progress | do.Restart, now: float) -> Effects:
        handoff, marks = action.handoff, list(self.computed[action.handoff])
        if isinstance(action, do.Restart):
            self.computed[handoff] = (0,) * len(marks)
            return self.machine.restart(handoff, now)
        self._reuse_blocks(self.owners[handoff])
        first = self.scene.layers_of(self.name, handoff).start
        marks[action.layer - first] = action.tokens
        self.computed[handoff] = tuple(marks)
        return self.machine.progress(handoff, layer=action.layer, tokens=action.tokens, now=now)

    def _lose_links(self, now: float) -> Effects:
        """No write is observed to be done any more; those that were posted may land yet."""
        effects: Effects = []
        for write, posting in sorted(self.writes.items(), key=lambda item: item[0]):
            del self.writes[write]
            if posting.phase is Phase.POSTED:
                self.ghosts[self.identity.life, write] = posting.write
            effects += self.machine.write_failed(write, now)
        return effects

    def _go_on(self, action: do.Action) -> None:
        """What happens to a write without the machine's knowledge."""
        match action:
            case do.Submit(write=write):
                posting = self.writes[write]
                self._check_computed(posting.write)
                self.writes[write] = posting._replace(phase=Phase.POSTED)
            case do.Leave(write=write):
                self.writes[write] = self.writes[write]._replace(phase=Phase.LANDED)
            case do.Fade(source=source, write=write):
                del self.ghosts[source, write]
            case do.Purge(handoff=handoff):
                self.computed.pop(handoff, None)
                self.owners.pop(handoff, None)
            case _:
                raise TypeError(f"a prefill rank cannot {action!r}")

    def _reuse_blocks(self, scheduler: int) -> None:
        """To a scheduler that began anew all blocks are free: what it computes overwrites others'.

        Raises:
            Violation: what an earlier life computed is still read.
        """
        for handoff in [name for name, owner in self.owners.items() if owner < scheduler]:
            if self.reads(handoff):
                raise Violation(
                    "given back",
                    f"{self.name} computes for {PREFILL}#{scheduler} while the blocks of "
                    f"{handoff}, of an earlier life, are read",
                )
            del self.computed[handoff], self.owners[handoff]

    def _check_computed(self, write: ef.Write) -> None:
        name = write.write
        marks = self.computed.get(name.handoff)
        if marks is None:
            raise Violation("content", f"{self.name} writes of {name.handoff}, which it has not")
        needed = (write.grid.blocks_of(name.part)[-1] + 1) * write.grid.block_tokens
        needed = min(needed, self.scene.prompts[name.handoff].token_count)
        first = self.scene.layers_of(self.name, name.handoff).start
        if any(marks[layer - first] < needed for layer in write.grid.layers_of(name.part)):
            raise Violation("content", f"{self.name} writes part {name.part} before it is computed")

    def _carry_out(self, effects: Effects) -> tuple[msg.AnyMessage, ...]:
        for effect in effects:
            if isinstance(effect, ef.Send) and isinstance(effect.message, msg.Stopped):
                stopped = effect.message
                self.stopped[stopped.target, stopped.handoff] = stopped.epoch
            elif isinstance(effect, ef.Write):
                self._check_wanted(effect.write)
        return super()._carry_out(effects)

    def _check_wanted(self, write: WriteId) -> None:
        if write.epoch <= self.stopped.get((write.target, write.handoff), 0):
            raise Violation(
                "stopped",
                f"{self.name} writes for claim {write.epoch} of {write.handoff}, which it stopped",
            )

    def _carry_out_own(self, effect: ef.AnyEffect) -> None:
        if isinstance(effect, ef.AbandonWrite):
            posting = self.writes[effect.write]
            self.writes[effect.write] = posting._replace(abandoned=True)
            return
        if not isinstance(effect, ef.Write):
            raise TypeError(f"a prefill rank does not ask for {effect!r}")
        if effect.write in self.writes or (self.identity.life, effect.write) in self.ghosts:
            raise Violation("names", f"{effect.write} is asked for twice")
        self.writes[effect.write] = Posting(effect, Phase.ASKED)

    def _clone_own(self, twin: Self) -> None:
        twin.computed, twin.owners = dict(self.computed), dict(self.owners)
        twin.writes, twin.ghosts = dict(self.writes), dict(self.ghosts)
        twin.stopped = dict(self.stopped)

    def _freeze_own(self) -> Hashable:
        return (
            tuple(sorted(self.computed.items())),
            tuple(sorted(self.owners.items())),
            tuple(
                sorted(
                    (write, posting.phase, posting.abandoned)
                    for write, posting in self.writes.items()
                )
            ),
            tuple(sorted(self.ghosts)),
            tuple(sorted(self.stopped.items())),
        )
