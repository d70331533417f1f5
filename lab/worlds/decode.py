"""A decode rank with its landing memory, its slots, and the takes and fences under way.

What must not break: nothing lands in memory that was given back, or in a berth that is being
read, where sums are not to find that; and a slot gets what its part is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.worlds import actions as do
from lab.worlds.actor import Actor, Effects
from lab.worlds.scene import DECODE
from penstock.handoff.protocol import effects as ef
from penstock.handoff.protocol.decode_rank import DecodeRank

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

    from lab.worlds.scene import Scene
    from penstock.handoff.protocol.identity import Identity, Life

Area = tuple["Life", int]
"""The peer's life that may write there, and the generation."""
Content = tuple[str, str, str, int]
"""What a part holds, in place of its bytes: handoff, source and target rank, part."""

SPOILED: Content = ("", "", "", -1)


def content_of(handoff: str, source: str, target: str, part: int) -> Content:
    """What is right for a part."""
    return (handoff, source, target, part)


class DecodeRankActor(Actor[DecodeRank]):
    """A decode rank."""

    berths: dict[Area, tuple[Content | None, ...]]
    """Landing areas that are open, and what lies in each of their berths."""
    revoked: set[Area]
    """Areas whose fence holds: nothing that is posted from then on can land there."""
    takes: list[ef.Take]
    takers: list[Life]
    """For each take, the life of the scheduler whose slots it writes to."""
    fences: list[Area]
    slots: dict[tuple[str, int], frozenset[Content]]
    """What was moved into the slots of a handoff and epoch."""

    def __init__(self, scene: Scene, name: str) -> None:
        self._clear()
        super().__init__(scene, name)

    def has_all(self, handoff: str, epoch: int) -> bool:
        """Whether every part of a prompt lies in its slots, as it should."""
        here = self.slots.get((handoff, epoch), frozenset())
        wanted = self.scene.prompts[handoff].wanted.get(self.name, ())
        return all(
            content_of(handoff, source, self.name, part) in here
            for source, grid in wanted
            for part in range(grid.part_count)
        )

    def is_closed(self, area: Area) -> bool:
        """Whether nothing that is posted now can land there."""
        return area in self.revoked

    def touches(self) -> frozenset[tuple[str, int]]:
        """Handoffs and epochs whose slots are being written to by this rank's mover."""
        return frozenset((take.handoff, take.epoch) for take in self.takes)

    def _new_machine(self, identity: Identity) -> DecodeRank:
        return DecodeRank(identity, self.scene.settings, scheduler=DECODE)

    def _die(self, life: Life) -> None:
        del life
        self._clear()

    def _clear(self) -> None:
        self.berths, self.revoked, self.slots = {}, set(), {}
        self.takes, self.takers, self.fences = [], [], []

    def _effects_of_own(self, action: do.Action, now: float) -> Effects:
        match action:
            case do.Finish(take=take):
                return self._finish(take, now)
            case do.Fenced(peer=peer, generation=generation):
                self.fences.remove((peer, generation))
                if self.scene.transport.ends_writes:
                    self.revoked.add((peer, generation))
                return self.machine.fenced(peer, generation, now)
            case do.RelayDeath():
                return self._lose_agents(now)
            case do.Land():
                self._land(action)
                return []
            case do.Purge(handoff=handoff, epoch=epoch):
                self.slots.pop((handoff, epoch), None)
                return []
            case _:
                raise TypeError(f"a decode rank cannot {action!r}")

    def _lose_agents(self, now: float) -> Effects:
        """No area of this rank can be written to any more; the fences of retired ones hold soon."""
        self.revoked |= self.berths.keys()
        effects: Effects = []
        for peer, generation in sorted(self.berths.keys() - set(self.machine.retired)):
            effects += self.machine.area_failed(peer, generation, now, why="the relay has ended")
        return effects

    def _land(self, action: do.Land) -> None:
        write, area = action.write.write, (action.source, action.write.write.generation)
        if write.target != self.identity.life:
            return  # The memory it was meant for went with the process.
        berths, own = self.berths.get(area), self.scene.transport.own_memory
        if berths is None and own:
            return  # In memory that nobody has any more.
        if berths is None:
            raise Violation(
                "given back", f"{self.name}: {action.source} writes into area {area[1]}, given back"
            )
        if write.berth >= len(berths):
            raise Violation("bounds", f"{self.name}: no berth {write.berth} in area {area[1]}")
        for take in self.takes:
            # Of one's own memory, a copy that is torn is found spoiled, as if all had changed.
            if not own and (take.source, take.generation, take.berth) == (*area, write.berth):
                raise Violation(
                    "berth", f"{self.name}: berth {write.berth} is written to while it is read"
                )
        right = content_of(write.handoff, action.source.name, self.name, write.part)
        landed = right if action.intact else SPOILED
        self.berths[area] = (*berths[: write.berth], landed, *berths[write.berth + 1 :])

    def _finish(self, take: ef.Take, now: float) -> Effects:
        number = self.takes.index(take)
        del self.takes[number], self.takers[number]
        berths = self.berths.get((take.source, take.generation))
        if berths is None:
            raise Violation("given back", f"{self.name} takes part {take.part} from a freed area")
        right = content_of(take.handoff, take.source.name, self.name, take.part)
        if berths[take.berth] != right:
            return self.machine.part_spoiled(take, now)
        place = (take.handoff, take.epoch)
        self.slots[place] = self.slots.get(place, frozenset()) | {right}
        return self.machine.parts_taken((take,), now)

    def _carry_out_own(self, effect: ef.AnyEffect) -> None:
        match effect:
            case ef.Take():
                self._begin_take(effect)
            case ef.OpenArea(peer=peer, generation=generation, berth_count=berth_count):
                if (peer, generation) in self.berths:
                    raise Violation("names", f"{self.name} opens area {generation} of {peer} twice")
                self.berths[peer, generation] = (None,) * berth_count
                self._check_bounds()
            case ef.Fence(peer=peer, generation=generation):
                self.fences.append((peer, generation))
            case ef.FreeArea(peer=peer, generation=generation):
                if self.berths.pop((peer, generation), None) is None:
                    raise Violation("once", f"{self.name} frees area {generation} of {peer} twice")
            case _:
                raise TypeError(f"a decode rank does not ask for {effect!r}")

    def _begin_take(self, take: ef.Take) -> None:
        """To a scheduler that began anew all slots are free, so nothing old may write to them."""
        scheduler = self.machine.life_of(DECODE)
        if any(other != scheduler for other in self.takers):
            raise Violation(
                "given back",
                f"{self.name} takes a part for {scheduler} while one for its earlier life is moved",
            )
        self.takes.append(take)
        self.takers.append(scheduler)

    def _check_bounds(self) -> None:
        """A new area is opened only while all of them, and the retired ones, are within bounds."""
        bounds = self.scene.settings.bounds
        for what, count, most in (
            ("landing", len(self.berths), bounds.landing_bytes_max),
            ("retired", len(self.fences), bounds.retired_bytes_max),
        ):
            if count * bounds.area_bytes > most:
                raise Violation(
                    "bounds", f"{self.name} has {count} {what} areas, more than {most} bytes"
                )

    def _clone_own(self, twin: Self) -> None:
        twin.berths, twin.revoked = dict(self.berths), set(self.revoked)
        twin.takes, twin.takers = list(self.takes), list(self.takers)
        twin.fences = list(self.fences)
        twin.slots = dict(self.slots)

    def _freeze_own(self) -> Hashable:
        return (
            tuple(sorted(self.berths.items(), key=lambda item: item[0])),
            tuple(sorted(self.revoked)),
            tuple(
                sorted(
                    (t.source, t.generation, t.berth, t.handoff, t.epoch, life.incarnation)
                    for t, life in zip(self.takes, self.takers, strict=True)
                )
            ),
            tuple(sorted(self.fences)),
            tuple(sorted((place, tuple(sorted(slot))) for place, slot in self.slots.items())),
        )
