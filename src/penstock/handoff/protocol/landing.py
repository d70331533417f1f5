"""The landing areas of a decode rank: memory that others write to, and when it is free again.

Each life of each source rank gets an area of its own, so that whatever one of them still writes
hurts nobody else. An area is *retired* when its writer is silent, started again or says that a
write failed: from then on nothing is believed that comes from it, but its memory stays ours,
because a timeout ends our interest in it and not the writer's ability to write. It is given
back when the transport's fence holds.

What must not break (P18, P19): the memory of an area is given back only when it is fenced and
none of our own moves reads it; and all areas together stay within `landing_bytes_max`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.handoff.protocol.effects import Fence, FreeArea, OpenArea, Take
from penstock.handoff.protocol.party import Frozen, Party

if TYPE_CHECKING:
    from penstock.handoff.protocol import messages as msg
    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import Identity
    from penstock.handoff.protocol.names import Life
    from penstock.handoff.protocol.settings import HandoffSettings


class Area(NamedTuple):
    """The landing area of one life of one source; `open` until it is retired."""

    peer: Life
    generation: int
    """Counted per life, and never given twice."""
    open: bool


class Berth(NamedTuple):
    """One place in an area."""

    peer: Life
    generation: int
    berth: int


class Landing(Party):
    """The part of a decode rank that keeps landing areas."""

    books = (*Party.books, "areas", "retired", "takes")

    def __init__(self, identity: Identity, settings: HandoffSettings) -> None:
        super().__init__(identity, settings)
        self.areas: dict[str, Area] = {}
        """The latest area of each source, by its name."""
        self.retired: dict[tuple[Life, int], bool] = {}
        """Areas that are not used any more, and whether the fence holds."""
        self.takes: dict[Berth, Take] = {}
        """Our own moves out of berths."""

    def fenced(self, peer: Life, generation: int, now: float) -> list[AnyEffect]:
        """The transport's fence holds: this life can write to this area no more.

        Raises:
            ValueError: no such area is retired.
        """
        if (peer, generation) not in self.retired:
            raise ValueError(f"area {generation} of {peer} is not retired")
        self._start(now)
        self.retired[peer, generation] = True
        self._free_if_unused(peer, generation)
        return self.effects

    @property
    def open_bytes(self) -> int:
        """Bytes of areas that are in use."""
        return sum(area.open for area in self.areas.values()) * self.settings.bounds.area_bytes

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that wait for a fence."""
        return len(self.retired) * self.settings.bounds.area_bytes

    def _freeze(self) -> Frozen:
        return (
            tuple(sorted(self.areas.items())),
            tuple(sorted(self.retired.items())),
            tuple(sorted((berth, take.handoff, take.epoch) for berth, take in self.takes.items())),
        )

    def _area_of(self, name: str) -> Area | None:
        """The area that a source's current life writes to; a new one, if there is room."""
        peer = self.life_of(name)
        area = self.areas.get(name)
        if area is not None and area.open and area.peer == peer:
            return area
        bounds = self.settings.bounds
        if not self._has_room_for(name):
            return None
        before = area.generation if area is not None and area.peer == peer else 0
        area = Area(peer, before + 1, open=True)
        self.areas[name] = area
        self._count("areas opened")
        self.effects.append(
            OpenArea(
                peer=peer,
                generation=area.generation,
                berth_count=bounds.berth_count,
                berth_bytes=bounds.berth_bytes,
            )
        )
        return area

    def _has_room_for(self, name: str) -> bool:
        """Whether one more area of a peer may be opened: not while much is retired."""
        bounds = self.settings.bounds
        retired = sum(peer.name == name for peer, _ in self.retired)
        every_bytes = self.open_bytes + self.retired_bytes
        return (
            retired < bounds.retired_count_max
            and self.retired_bytes + bounds.area_bytes <= bounds.retired_bytes_max
            and every_bytes + bounds.area_bytes <= bounds.landing_bytes_max
        )

    def _retire(self, name: str) -> None:
        """Stops using an area, without giving its memory back."""
        area = self.areas.get(name)
        if area is None or not area.open:
            return
        self.areas[name] = area._replace(open=False)
        self.retired[area.peer, area.generation] = False
        self._count("areas retired")
        self.effects.append(Fence(peer=area.peer, generation=area.generation))

    def _free_if_unused(self, peer: Life, generation: int) -> None:
        """Gives memory back that nobody can write to and that we do not read."""
        if not self.retired.get((peer, generation), False):
            return
        if any((berth.peer, berth.generation) == (peer, generation) for berth in self.takes):
            return
        del self.retired[peer, generation]
        self._count("areas freed")
        self.effects.append(FreeArea(peer=peer, generation=generation))

    def _take(self, landed: msg.Landed, grid: Grid) -> None:
        """Lets our mover verify a part and move it into its slots."""
        berth = Berth(landed.sender, landed.generation, landed.berth)
        take = Take(
            handoff=landed.handoff,
            epoch=landed.epoch,
            source=landed.sender,
            generation=landed.generation,
            berth=landed.berth,
            grid=grid,
            part=landed.part,
            attempt=landed.attempt,
            sums=landed.sums,
        )
        self.takes[berth] = take
        self.effects.append(take)

    def _end_take(self, take: Take, now: float) -> None:
        """One of our moves has ended.

        Raises:
            ValueError: it is not under way.
        """
        berth = Berth(take.source, take.generation, take.berth)
        if self.takes.get(berth) != take:
            raise ValueError(f"take of part {take.part} out of {berth} is not under way")
        self._start(now)
        del self.takes[berth]
        self._free_if_unused(take.source, take.generation)
