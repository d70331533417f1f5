"""The decode scheduler: claims a handoff on all its ranks, and counts their reports.

A handoff is delivered when *every* rank has reported it complete and the first token is there
(P10, P12). Whatever else happens (a rank fails, the prefill side is silent, its deadline passes,
it is cancelled), every rank drops it, and after the last one its slots come back.

P2, P13: each handoff that was submitted ends with exactly one `HandoffEnded`, and its slots are
given back only when no rank touches them any more.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CapacityError, InvariantViolation, UnavailableError
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import HandoffEnded
from penstock.handoff.protocol.party import Party
from penstock.handoff.protocol.states import (
    DECODE_MOVES,
    DecodeMove,
    DecodeState,
    HandoffOutcome,
    ReportStatus,
    Role,
    advance,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import Identity
    from penstock.handoff.protocol.party import TimerKey
    from penstock.handoff.protocol.settings import HandoffSettings


class Order(NamedTuple):
    """What one rank has to get, and where it is to lie."""

    sources: tuple[tuple[str, Grid], ...]
    slots: tuple[int, ...] = ()


class Claimed(NamedTuple):
    """One handoff with the decode scheduler."""

    state: DecodeState
    epoch: int
    prefill: str
    orders: tuple[Order, ...]
    """One for each rank."""
    complete: int = 0
    """The set of ranks that have every part."""
    dropped: int = 0
    """The set of ranks that touch its slots no more."""
    tokens: tuple[int, ...] = ()
    """The first token; nothing until it is there."""
    drafts: tuple[int, ...] = ()
    outcome: HandoffOutcome | None = None
    why: str = ""
    closed: bool = False
    """True once no further `Close` is sent."""
    close_count: int = 0


class DecodeScheduler(Party):
    """The scheduler of a decode engine with any number of ranks."""

    role = Role.DECODE_SCHEDULER

    def __init__(
        self, identity: Identity, settings: HandoffSettings, *, ranks: tuple[str, ...]
    ) -> None:
        super().__init__(identity, settings)
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks is {ranks}, must be at least one name, and none twice")
        self.ranks = ranks
        self.everyone = (1 << len(ranks)) - 1
        self.claimed: dict[str, Claimed] = {}

    # The engine.

    def submit(
        self,
        handoff: str,
        now: float,
        *,
        prefill: str,
        wanted: Mapping[str, tuple[tuple[str, Grid], ...]],
        epoch: int = 1,
        slots: Mapping[str, tuple[int, ...]] | None = None,
        patience_s: float | None = None,
    ) -> list[AnyEffect]:
        """Claims a handoff. Ends with one `HandoffEnded`.

        Raises `ValueError`: it is known, its epoch is over, or a grid or rank is wrong;
        `UnavailableError`: a rank is not there; `CapacityError`: too many handoffs at once.
        """
        self._require_new(handoff, epoch)
        orders = self._orders(wanted, slots or {})
        patience = self.settings.times.handoff_s if patience_s is None else patience_s
        if not patience > 0:
            raise ValueError(f"patience_s is {patience}, must be > 0")
        missing = [name for name in self.ranks if not self.is_open(name)]
        if missing:
            raise UnavailableError(f"ranks {missing} are not there")
        if len(self.claimed) >= self.settings.bounds.handoff_count_max:
            raise CapacityError(tier="handoffs", wanted=1, available=0)
        self._start(now)
        self.claimed[handoff] = Claimed(DecodeState.CLAIMING, epoch, prefill, orders)
        self._arm(("deadline", handoff), patience)
        self._ask(handoff)
        return self.effects

    def cancel(self, handoff: str, now: float, *, why: str = "cancelled") -> list[AnyEffect]:
        """The request was aborted; the prefill side gets a `Close`. Ends with `HandoffEnded`.

        Raises `ValueError`: it is not known, or has ended.
        """
        claimed = self._unended(handoff)
        self._start(now)
        if claimed.state is DecodeState.CLAIMING:
            self._give_up(handoff, HandoffOutcome.CANCELLED, why)
        elif claimed.outcome is HandoffOutcome.WITHDRAWN:
            # It will not be claimed again: now the prefill side needs a `Close`.
            self.claimed[handoff] = claimed._replace(
                outcome=HandoffOutcome.CANCELLED, why=why, closed=False
            )
            self._close(handoff)
        return self.effects

    def withdraw(self, handoff: str, now: float) -> list[AnyEffect]:
        """Gives this claim up, because its room is needed.

        After `HandoffEnded` it may be submitted again with a higher epoch: the prefill side keeps
        what it has computed.
        Raises `ValueError`: it is not known, or has ended.
        """
        claimed = self._unended(handoff)
        self._start(now)
        if claimed.state is DecodeState.CLAIMING:
            self._give_up(handoff, HandoffOutcome.WITHDRAWN, "withdrawn")
        return self.effects

    def _by_name(self) -> list[tuple[str, Claimed]]:
        """All handoffs in the order of their names."""
        return sorted(self.claimed.items(), key=itemgetter(0))

    def _require_new(self, handoff: str, epoch: int) -> None:
        last, _ = self.remembered.get((handoff,), (0, ""))
        if handoff in self.claimed:
            state = self.claimed[handoff].state.value
            raise ValueError(f"handoff is {handoff!r}, which is {state}")
        if not handoff or epoch <= last:
            raise ValueError(f"epoch is {epoch} for {handoff!r}, must be more than {last}")

    def _orders(
        self,
        wanted: Mapping[str, tuple[tuple[str, Grid], ...]],
        slots: Mapping[str, tuple[int, ...]],
    ) -> tuple[Order, ...]:
        strangers = (set(wanted) | set(slots)) - set(self.ranks)
        if strangers:
            raise ValueError(f"wanted is for {sorted(strangers)}, must be for {self.ranks}")
        for sources in wanted.values():
            for source, grid in sources:
                if grid.problem():
                    raise ValueError(f"grid for {source!r} is {grid}: {grid.problem()}")
        return tuple(Order(tuple(wanted.get(r, ())), tuple(slots.get(r, ()))) for r in self.ranks)

    def _unended(self, handoff: str) -> Claimed:
        claimed = self.claimed.get(handoff)
        if claimed is None or claimed.state is DecodeState.CLOSING:
            raise ValueError(f"handoff is {handoff!r}, which is not known or has ended")
        return claimed

    # Messages.

    def _on_message(self, message: msg.AnyMessage) -> None:
        match message:
            case msg.HandoffReport() if message.sender.name in self.ranks:
                if self._is_current(message):
                    self._on_report(message)
            case msg.Finished():
                if self._is_current(message) and self._is_from_prefill(message):
                    self._on_finished(message)
            case msg.Gone():
                if self._is_current(message) and self._is_from_prefill(message):
                    self._on_gone(message)
            case msg.CloseConfirmed():
                if self._is_current(message) and self._is_from_prefill(message):
                    self._answered(message.sender.name, ("close", message.handoff))
                    self._closed(message.handoff)
            case _:
                self._refuse("not for this role")

    def _is_current(self, message: msg.HandoffMessage) -> bool:
        """Whether a message is about the claim that we make now (P6)."""
        claimed = self.claimed.get(message.handoff)
        if claimed is None:
            return self._refuse("of an unknown handoff")
        if claimed.epoch != message.epoch:
            return self._refuse("from another epoch")
        return True

    def _is_from_prefill(self, message: msg.Finished | msg.Gone | msg.CloseConfirmed) -> bool:
        if message.sender.name != self.claimed[message.handoff].prefill:
            return self._refuse("from another prefill engine")
        return True

    def _on_report(self, report: msg.HandoffReport) -> None:
        handoff = report.handoff
        claimed = self.claimed[handoff]
        rank = 1 << self.ranks.index(report.sender.name)
        match report.report:
            case ReportStatus.COMPLETE if claimed.state is DecodeState.CLAIMING:
                if not claimed.complete & rank:
                    self._hasten(("resend", handoff))
                self.claimed[handoff] = claimed._replace(complete=claimed.complete | rank)
                self._deliver_if_complete(handoff)
            case ReportStatus.FAILED if claimed.state is DecodeState.CLAIMING:
                self._give_up(handoff, HandoffOutcome.FAILED_OVER, report.why)
            case ReportStatus.DROPPED if claimed.state is DecodeState.CLAIMING:
                self._refuse("dropped, but nobody said so")
            case ReportStatus.DROPPED:
                self._answered(report.sender.name, ("drop", handoff))
                self._dropped(handoff, rank)
            case _:
                self._count("reports too late")

    def _on_gone(self, gone: msg.Gone) -> None:
        if self.claimed[gone.handoff].state is DecodeState.CLAIMING:
            self._give_up(gone.handoff, HandoffOutcome.FAILED_OVER, gone.why)

    def _on_finished(self, finished: msg.Finished) -> None:
        handoff = finished.handoff
        claimed = self.claimed[handoff]
        if not finished.tokens:
            self._refuse("without a first token")
        elif claimed.state is DecodeState.CLAIMING and not claimed.tokens:
            self._hasten(("resend", handoff))
            self.claimed[handoff] = claimed._replace(tokens=finished.tokens, drafts=finished.drafts)
            self._deliver_if_complete(handoff)

    # The two ways out.

    def _deliver_if_complete(self, handoff: str) -> None:
        claimed = self.claimed[handoff]
        if claimed.state is not DecodeState.CLAIMING or not claimed.tokens:
            return
        if not self._every_rank_is_complete(claimed):
            return
        self._move(handoff, DecodeMove.DELIVER)
        self.claimed[handoff] = self.claimed[handoff]._replace(outcome=HandoffOutcome.DELIVERED)
        self._end(handoff)
        self._begin_dropping(handoff)
        self._close(handoff)
        self._ask_again_later(handoff)

    def _every_rank_is_complete(self, claimed: Claimed) -> bool:
        return claimed.complete == self.everyone

    def _give_up(self, handoff: str, outcome: HandoffOutcome, why: str) -> None:
        self._move(handoff, DecodeMove.GIVE_UP)
        gone = sum(1 << n for n, name in enumerate(self.ranks) if not self.is_open(name))
        closed = outcome is HandoffOutcome.WITHDRAWN
        self.claimed[handoff] = self.claimed[handoff]._replace(
            outcome=outcome, why=why[:512], closed=closed, dropped=gone
        )
        self._disarm(("deadline", handoff))
        self._begin_dropping(handoff)
        self._close(handoff)
        self._ask_again_later(handoff)
        self._dropped(handoff, 0)

    def _dropped(self, handoff: str, ranks: int) -> None:
        """Some ranks touch its slots no more; after the last of them the slots come back."""
        claimed = self.claimed[handoff]
        if ranks & ~claimed.dropped:
            self._hasten(("resend", handoff))
        claimed = claimed._replace(dropped=claimed.dropped | ranks)
        self.claimed[handoff] = claimed
        if claimed.state is DecodeState.ENDING and claimed.dropped == self.everyone:
            self._move(handoff, DecodeMove.ALL_DROPPED)
            self._end(handoff)
        self._forget_if_over(handoff)

    def _end(self, handoff: str) -> None:
        claimed = self.claimed[handoff]
        assert claimed.outcome is not None
        delivered = claimed.outcome is HandoffOutcome.DELIVERED
        self._disarm(("deadline", handoff))
        self.effects.append(
            HandoffEnded(
                handoff=handoff,
                epoch=claimed.epoch,
                outcome=claimed.outcome,
                why=claimed.why,
                tokens=claimed.tokens if delivered else (),
                drafts=claimed.drafts if delivered else (),
            )
        )

    def _closed(self, handoff: str) -> None:
        claimed = self.claimed[handoff]
        if claimed.outcome is None:
            self._refuse("closed, but nobody said so")
            return
        self.claimed[handoff] = claimed._replace(closed=True)
        self._forget_if_over(handoff)

    def _forget_if_over(self, handoff: str) -> None:
        claimed = self.claimed[handoff]
        if claimed.state is not DecodeState.CLOSING or not claimed.closed:
            return
        if claimed.dropped == self.everyone:
            self._move(handoff, DecodeMove.FORGET)
            del self.claimed[handoff]
            self._disarm(("resend", handoff))
            self._remember((handoff,), claimed.epoch)

    # Asking.

    def _asked_by(self, timer: TimerKey) -> list[str]:
        claimed = self.claimed[timer[1]]
        names = self._unfinished(claimed)
        return names if claimed.closed else [*names, claimed.prefill]

    def _unfinished(self, claimed: Claimed) -> list[str]:
        """The ranks that have not done what the handoff's state asks of them."""
        claiming = claimed.state is DecodeState.CLAIMING
        done = claimed.complete if claiming else claimed.dropped
        return [name for n, name in enumerate(self.ranks) if not done >> n & 1]

    def _ask(self, handoff: str) -> None:
        """Sends again whatever has had no answer yet."""
        claimed = self.claimed[handoff]
        if claimed.state is DecodeState.CLAIMING:
            for n, (name, order) in enumerate(zip(self.ranks, claimed.orders, strict=True)):
                if not claimed.complete >> n & 1:
                    self._expect(handoff, claimed.epoch, name, order)
            # Also when the token is there: it renews the lease of the blocks that are missing.
            self._await(handoff)
        else:
            for name in self._unfinished(claimed):
                self._asked_again(name, ("drop", handoff))
            self._let_ranks_drop(handoff)
            self._close(handoff)
        self._ask_again_later(handoff)

    def _ask_again_later(self, handoff: str) -> None:
        if handoff in self.claimed:
            self._arm_resend(("resend", handoff))

    def _expect(self, handoff: str, epoch: int, name: str, order: Order) -> None:
        self._send(
            msg.Expect(
                sender=self.life,
                target=self.life_of(name),
                handoff=handoff,
                epoch=epoch,
                sources=order.sources,
                slots=order.slots,
            )
        )

    def _await(self, handoff: str) -> None:
        claimed = self.claimed[handoff]
        target = self.life_of(claimed.prefill)
        if self.is_open(claimed.prefill):
            self._send(
                msg.Await(sender=self.life, target=target, handoff=handoff, epoch=claimed.epoch)
            )
        else:
            self._greet(target)

    def _begin_dropping(self, handoff: str) -> None:
        for name in self._unfinished(self.claimed[handoff]):
            self._asked(name, ("drop", handoff))
        self._let_ranks_drop(handoff)

    def _let_ranks_drop(self, handoff: str) -> None:
        claimed = self.claimed[handoff]
        for name in self._unfinished(claimed):
            self._send(
                msg.DropHandoff(
                    sender=self.life,
                    target=self.life_of(name),
                    handoff=handoff,
                    epoch=claimed.epoch,
                )
            )

    def _close(self, handoff: str) -> None:
        """Sends the prefill side how it ended; if that is lost, its lease runs out."""
        claimed = self.claimed[handoff]
        if claimed.closed or claimed.outcome is None:
            return
        if (
            not self.is_open(claimed.prefill)
            or claimed.close_count >= self.settings.bounds.close_count_max
        ):
            self.claimed[handoff] = claimed._replace(closed=True)
            self._forget_if_over(handoff)
            return
        if claimed.close_count:
            self._asked_again(claimed.prefill, ("close", handoff))
        else:
            self._asked(claimed.prefill, ("close", handoff))
        self.claimed[handoff] = claimed._replace(close_count=claimed.close_count + 1)
        self._send(
            msg.Close(
                sender=self.life,
                target=self.life_of(claimed.prefill),
                handoff=handoff,
                epoch=claimed.epoch,
                outcome=claimed.outcome,
                why=claimed.why,
            )
        )

    # Timers and peers.

    def _on_timer(self, timer: TimerKey) -> None:
        match timer:
            case ("deadline", handoff):
                self._give_up(handoff, HandoffOutcome.EXPIRED, "its deadline passed")
            case ("resend", handoff):
                self._ask(handoff)
            case _:
                raise InvariantViolation(f"timer {timer} is not one of a decode scheduler")

    def _peer_open(self, name: str) -> None:
        for handoff, claimed in self._by_name():
            waits = claimed.state is DecodeState.CLAIMING and not claimed.tokens
            if claimed.prefill == name and waits:
                self._await(handoff)

    def _peer_silent(self, name: str) -> None:
        """The prefill scheduler is silent: without the first token there is nothing to wait for."""
        why = f"{name} is silent"
        for handoff, claimed in self._by_name():
            if claimed.prefill != name:
                continue
            if claimed.state is DecodeState.CLAIMING and not claimed.tokens:
                self._give_up(handoff, HandoffOutcome.FAILED_OVER, why)
            elif claimed.state is not DecodeState.CLAIMING:
                self._close(handoff)

    def _peer_gone(self, name: str) -> None:
        if name not in self.ranks:
            # Its ranks let go of everything when they saw it die, first token or not.
            for handoff, claimed in self._by_name():
                if claimed.prefill == name and claimed.state is DecodeState.CLAIMING:
                    self._give_up(handoff, HandoffOutcome.FAILED_OVER, f"{name} is gone")
            self._peer_silent(name)
            return
        rank = 1 << self.ranks.index(name)
        for handoff, claimed in self._by_name():
            if claimed.state is DecodeState.CLAIMING:
                self._give_up(handoff, HandoffOutcome.FAILED_OVER, f"{name} is lost")
            if handoff in self.claimed:
                self._dropped(handoff, rank)

    def _peer_refused(self, name: str, *, why: str) -> None:
        for handoff, claimed in self._by_name():
            if claimed.prefill == name and claimed.state is DecodeState.CLAIMING:
                self._give_up(handoff, HandoffOutcome.FAILED_OVER, why)

    def _move(self, handoff: str, move: DecodeMove) -> None:
        claimed = self.claimed[handoff]
        state = advance(DECODE_MOVES, claimed.state, move)
        self.claimed[handoff] = claimed._replace(state=state)
