"""The berths of a prefill rank: where its writes go, and when a place can be used again.

A target's landing area consists of berths, each for one part. All of them belong to the writer
until it writes; then to the target, until it has verified the part and moved it, and says so.
So the number of berths is the credit of this writer, and nobody has to count bytes.

What must not break (P14): a berth is written to again only when the write before was observed
to end *and* the target is through with what lay there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import Write
from penstock.handoff.protocol.names import Life, WriteId
from penstock.handoff.protocol.party import Frozen, Party

if TYPE_CHECKING:
    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.identity import Identity
    from penstock.handoff.protocol.settings import HandoffSettings
    from penstock.handoff.protocol.wants import Want


class Lane(NamedTuple):
    """The landing area of one life of one target, as its writer sees it."""

    target: Life
    generation: int
    berth_count: int
    free: int
    """The set of berths that are ours to write to."""
    poisoned: bool = False
    """A write failed and may land yet: nothing more is written into this generation."""

    def holds(self, write: WriteId) -> bool:
        """Whether a write went into this area."""
        return self.target == write.target and self.generation == write.generation


class Posted(NamedTuple):
    """How far a write is."""

    observed: bool = False
    """It was seen to have ended."""
    settled: bool = False
    """The target is through with it, or does not want it."""
    sums: bytes = b""


class Writer(Party):
    """The part of a prefill rank that writes."""

    books = (*Party.books, "lanes", "writes")

    def __init__(self, identity: Identity, settings: HandoffSettings) -> None:
        super().__init__(identity, settings)
        self.wants: dict[str, dict[str, Want]] = {}
        """By target, then by handoff, the oldest first: that is the order of service."""
        self.lanes: dict[str, Lane] = {}
        self.writes: dict[WriteId, Posted] = {}
        """Writes that were not observed to end, or whose berth is not ours yet."""

    def write_done(self, write: WriteId, now: float, *, sums: bytes = b"") -> list[AnyEffect]:
        """A write was observed to have ended well; `sums` are what its notice carried.

        Raises:
            ValueError: no such write is under way.
        """
        posted = self._under_way(write)._replace(observed=True, sums=sums)
        self._start(now)
        self.writes[write] = posted
        self._count("parts written")
        lane = self.lanes.get(write.target.name)
        if posted.settled or lane is None or not lane.holds(write):
            self._free(write)
        self._after_end(write)
        return self.effects

    def write_failed(self, write: WriteId, now: float) -> list[AnyEffect]:
        """A write ended with an error: it may land yet, so its area is not safe any more (P17).

        Raises:
            ValueError: no such write is under way.
        """
        self._under_way(write)
        self._start(now)
        del self.writes[write]
        self._count("writes failed")
        lane = self.lanes.get(write.target.name)
        if lane is not None and lane.holds(write):
            self.lanes[write.target.name] = lane._replace(poisoned=True)
            self._tell_poisoned(write.target.name)
        self._after_end(write)
        return self.effects

    def write_dropped(self, write: WriteId, now: float) -> list[AnyEffect]:
        """A write that was abandoned has ended, and nothing of it is moved any more (P16).

        Its notice was not given, so its berth is ours again.

        Raises:
            ValueError: no such write is under way.
        """
        self._under_way(write)
        self._start(now)
        self._count("writes dropped")
        self._free(write)
        self._after_end(write)
        return self.effects

    def clone(self) -> Self:
        """A second machine in the same state; the two share nothing that changes."""
        twin = super().clone()
        twin.wants = {target: wants.copy() for target, wants in self.wants.items()}
        return twin

    def _freeze(self) -> Frozen:
        return (
            # The order of wants is the order of service, so it belongs to the state.
            tuple((target, tuple(wants.items())) for target, wants in sorted(self.wants.items())),
            tuple(sorted(self.lanes.items())),
            tuple(sorted(self.writes.items())),
        )

    def _after_end(self, write: WriteId) -> None:
        """A write has ended: others may go out, and somebody may be waiting for it."""
        raise NotImplementedError

    def _under_way(self, write: WriteId) -> Posted:
        posted = self.writes.get(write)
        if posted is None or posted.observed:
            raise ValueError(f"write is {write}, which is not under way")
        return posted

    # Areas.

    def _enter(self, claim: msg.Claim) -> bool:
        """Follows the target into the area that a claim names; `False` if that is over."""
        target = claim.sender.name
        lane = self.lanes.get(target)
        same_life = lane is not None and lane.target == claim.sender
        if lane is not None and same_life and claim.generation <= lane.generation:
            return claim.generation == lane.generation
        self._leave(target)
        self.lanes[target] = Lane(
            claim.sender, claim.generation, claim.berth_count, (1 << claim.berth_count) - 1
        )
        wants = self.wants.setdefault(target, {})
        for handoff, want in wants.items():
            wants[handoff] = want._replace(posted=0)
        return True

    def _leave(self, target: str) -> None:
        """Forgets an area. Writes into it stay known until they were observed to end."""
        self.lanes.pop(target, None)
        for write, posted in list(self.writes.items()):
            if write.target.name == target and posted.observed:
                del self.writes[write]

    # Berths.

    def _settle(self, target: Life, handoff: str, epoch: int) -> None:
        """The target wants nothing of a handoff up to this epoch."""
        for write in [w for w in self.writes if w.handoff == handoff and w.target == target]:
            if write.epoch <= epoch:
                self._settle_write(write)

    def _settle_parts(self, claim: msg.Claim, have: int, spoiled: tuple[int, ...]) -> None:
        """The target is through with the parts that it has, and with those it could not use."""
        self._settle(claim.sender, claim.handoff, claim.epoch - 1)
        for write in [
            w for w in self.writes if w.handoff == claim.handoff and w.target == claim.sender
        ]:
            if write.epoch == claim.epoch:
                bad = spoiled[write.attempt] if write.attempt < len(spoiled) else 0
                if (have | bad) >> write.part & 1:
                    self._settle_write(write)

    def _settle_write(self, write: WriteId) -> None:
        posted = self.writes[write]
        if posted.observed:
            self._free(write)
        else:
            self.writes[write] = posted._replace(settled=True)

    def _free(self, write: WriteId) -> None:
        """A berth is ours again."""
        del self.writes[write]
        lane = self.lanes.get(write.target.name)
        if lane is not None and lane.holds(write):
            self.lanes[lane.target.name] = lane._replace(free=lane.free | 1 << write.berth)

    # Writes.

    def _pump(self, target: str) -> None:
        """Gives the free berths of a target to its wants, the oldest first."""
        if target not in self.lanes:
            return
        for handoff, want in self.wants.get(target, {}).items():
            if not self.lanes[target].free:
                return
            if want.sendable:
                self._post(target, handoff)

    def _post(self, target: str, handoff: str) -> None:
        """Writes all parts of one want that are computed and have a berth."""
        lane = self.lanes[target]
        want = self.wants[target][handoff]
        sendable = want.sendable
        if not sendable or not lane.free or lane.poisoned or not self.is_open(target):
            return
        free, posted = lane.free, want.posted
        while free and sendable:
            part = (sendable & -sendable).bit_length() - 1
            berth = (free & -free).bit_length() - 1
            sendable &= sendable - 1
            free &= free - 1
            posted |= 1 << part
            write = WriteId(
                lane.target,
                lane.generation,
                berth,
                handoff,
                want.epoch,
                part,
                want.attempt_of(part),
            )
            self.writes[write] = Posted()
            notice = self._notice(write, b"")
            self.effects.append(Write(write=write, grid=want.grid, notice=notice))
        self.lanes[target] = lane._replace(free=free)
        self.wants[target][handoff] = want._replace(posted=posted)

    # Notices.

    def _notice(self, write: WriteId, sums: bytes) -> msg.Landed:
        return msg.Landed(
            sender=self.life,
            target=write.target,
            handoff=write.handoff,
            epoch=write.epoch,
            generation=write.generation,
            berth=write.berth,
            part=write.part,
            attempt=write.attempt,
            sums=sums,
        )

    def _unanswered(self, target: str) -> list[WriteId]:
        """Writes whose notice, or the answer to it, may be lost."""
        return [
            w for w, posted in self.writes.items() if w.target.name == target and posted.observed
        ]

    def _keep_noticing(self, target: str) -> None:
        """Lets a timer run while a target owes us an answer."""
        lane = self.lanes.get(target)
        asks = lane is not None and lane.poisoned and any(self._sendable_to(target))
        if self.is_open(target) and (asks or self._unanswered(target)):
            self._arm_resend(("notice", target))
        else:
            # How long this target takes to answer is kept in mind: the next notice waits as long.
            self.timers.pop(("notice", target), None)

    def _notice_again(self, target: str) -> None:
        for write in self._unanswered(target):
            self._send(self._notice(write, self.writes[write].sums))
        lane = self.lanes.get(target)
        if lane is not None and lane.poisoned:
            self._tell_poisoned(target)
        self._keep_noticing(target)

    def _tell_poisoned(self, target: str) -> None:
        lane = self.lanes[target]
        self._send(msg.Poisoned(sender=self.life, target=lane.target, generation=lane.generation))

    def _sendable_to(self, target: str) -> list[int]:
        return [want.sendable for want in self.wants.get(target, {}).values()]
