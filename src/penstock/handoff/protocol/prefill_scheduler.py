"""The prefill scheduler: sends the first token to decode, and waits for its ranks at the end.

A decode engine's request and the prompt itself come in any order. The blocks of a prompt are
kept until decode sends `Close`, or the request is cancelled, or the lease is over: a decode engine
that never answers again holds memory until then, and no longer.

P2, P16: each handoff that was submitted ends with exactly one `HandoffEnded`, and only when no rank
reads its blocks any more.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CapacityError, InvariantViolation, UnavailableError
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import HandoffEnded
from penstock.handoff.protocol.party import Party
from penstock.handoff.protocol.states import (
    PREFILL_MOVES,
    HandoffOutcome,
    PrefillMove,
    PrefillState,
    Role,
    advance,
)

if TYPE_CHECKING:
    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.identity import Identity
    from penstock.handoff.protocol.party import TimerKey
    from penstock.handoff.protocol.settings import HandoffSettings


class Prefill(NamedTuple):
    """One handoff with the prefill scheduler."""

    state: PrefillState
    decode: str = ""
    """The decode scheduler that asked for it, if one did."""
    epoch: int = 0
    """Of its latest claim."""
    lease_s: float = 0.0
    """It is given up when decode has not asked for it this long."""
    tokens: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    released: int = 0
    """The set of ranks that read its blocks no more."""
    outcome: HandoffOutcome | None = None
    why: str = ""


class PrefillScheduler(Party):
    """The scheduler of a prefill engine with any number of ranks."""

    role = Role.PREFILL_SCHEDULER

    def __init__(
        self, identity: Identity, settings: HandoffSettings, *, ranks: tuple[str, ...]
    ) -> None:
        super().__init__(identity, settings)
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks is {ranks}, must be at least one name, and none twice")
        self.ranks = ranks
        self.everyone = (1 << len(ranks)) - 1
        self.prefills: dict[str, Prefill] = {}

    # The engine.

    def submit(self, handoff: str, now: float, *, lease_s: float | None = None) -> list[AnyEffect]:
        """Offers the KV of a prompt that is about to be computed. Ends with one `HandoffEnded`.

        Raises `ValueError`: it is known, or is over; `UnavailableError`: a rank is not there;
        `CapacityError`: too many handoffs at once.
        """
        lease = self.settings.times.lease_s if lease_s is None else lease_s
        known = self.prefills.get(handoff)
        if not handoff or (known is not None and known.state is not PrefillState.AWAITED):
            raise ValueError(f"handoff is {handoff!r}, which is empty or known already")
        if (handoff,) in self.remembered:
            raise ValueError(f"handoff is {handoff!r}, which is over")
        if not lease > 0:
            raise ValueError(f"lease_s is {lease}, must be > 0")
        missing = [name for name in self.ranks if not self.is_open(name)]
        if missing:
            raise UnavailableError(f"ranks {missing} are not there")
        if known is None and len(self.prefills) >= self.settings.bounds.handoff_count_max:
            raise CapacityError(tier="handoffs", wanted=1, available=0)
        self._start(now)
        self._disarm(("park", handoff))
        self.prefills[handoff] = known or Prefill(PrefillState.AWAITED)
        self._move(handoff, PrefillMove.SUBMIT)
        if known is not None and known.outcome is not None:
            # Decode was through with it before it came here.
            self._end(handoff, known.outcome, known.why)
        else:
            self.prefills[handoff] = self.prefills[handoff]._replace(lease_s=lease)
            self._arm(("lease", handoff), lease)
        return self.effects

    def first_token(
        self, handoff: str, now: float, *, tokens: tuple[int, ...], drafts: tuple[int, ...] = ()
    ) -> list[AnyEffect]:
        """The prompt is computed; its first token goes to decode, with any draft tokens.

        What comes after the end is left alone.
        Raises `ValueError`: the handoff was never submitted, had its first token, or gets none.
        """
        prefill = self.prefills.get(handoff)
        if not 0 < len(tokens) <= msg.TOKEN_COUNT_MAX or len(drafts) > msg.TOKEN_COUNT_MAX:
            raise ValueError(f"tokens is {tokens}, must be from 1 to {msg.TOKEN_COUNT_MAX}")
        if prefill is None and (handoff,) not in self.remembered:
            raise ValueError(f"handoff is {handoff!r}, which was never submitted")
        if prefill is not None and prefill.state in (PrefillState.AWAITED, PrefillState.READY):
            raise ValueError(f"handoff is {handoff!r}, which is {prefill.state.value}")
        self._start(now)
        if prefill is not None and prefill.state is PrefillState.COMPUTING:
            self._move(handoff, PrefillMove.FIRST_TOKEN)
            self.prefills[handoff] = self.prefills[handoff]._replace(tokens=tokens, drafts=drafts)
            self._send_finished(handoff)
        return self.effects

    def cancel(self, handoff: str, now: float, *, why: str = "cancelled") -> list[AnyEffect]:
        """The request was aborted or has failed; decode gets `Gone`. Ends with `HandoffEnded`.

        Raises `ValueError`: it was never submitted, or has ended.
        """
        prefill = self.prefills.get(handoff)
        if prefill is None or prefill.state is PrefillState.AWAITED:
            raise ValueError(f"handoff is {handoff!r}, which was not submitted or has ended")
        self._start(now)
        if prefill.state is not PrefillState.RELEASING:
            self._send_gone_and_end(handoff, HandoffOutcome.CANCELLED, why)
        return self.effects

    def _by_name(self) -> list[tuple[str, Prefill]]:
        """All handoffs in the order of their names."""
        return sorted(self.prefills.items(), key=itemgetter(0))

    # Messages.

    def _on_message(self, message: msg.AnyMessage) -> None:
        is_rank = message.sender.name in self.ranks
        match message:
            case msg.Released() if is_rank:
                self._on_released(message)
            case msg.Await() if not is_rank:
                self._on_await(message)
            case msg.Close() if not is_rank:
                self._on_close(message)
            case _:
                self._refuse("not for this role")

    def _on_await(self, awaited: msg.Await) -> None:
        handoff, name = awaited.handoff, awaited.sender.name
        prefill = self.prefills.get(handoff)
        if (handoff,) in self.remembered:
            self._send_gone(awaited, self.remembered[handoff,][1])
        elif prefill is None:
            self._park(handoff, Prefill(PrefillState.AWAITED, name, awaited.epoch))
        elif prefill.epoch > awaited.epoch or prefill.decode not in ("", name):
            self._refuse("from another epoch")
        elif prefill.outcome is not None:
            self._send_gone(awaited, prefill.why)
        else:
            self.prefills[handoff] = prefill._replace(decode=name, epoch=awaited.epoch)
            self._renew(handoff)
            self._send_finished(handoff)

    def _on_close(self, close: msg.Close) -> None:
        handoff = close.handoff
        prefill = self.prefills.get(handoff)
        ended = Prefill(
            PrefillState.AWAITED,
            close.sender.name,
            close.epoch,
            outcome=close.outcome,
            why=close.why,
        )
        if prefill is None and (handoff,) not in self.remembered:
            if not self._park(handoff, ended):
                return
        elif prefill is not None and prefill.decode not in ("", close.sender.name):
            self._refuse("from another decode engine")
            return
        elif prefill is not None and self._is_latest(prefill, close):
            if prefill.state is PrefillState.AWAITED:
                self.prefills[handoff] = ended
            elif prefill.state is not PrefillState.RELEASING:
                self.prefills[handoff] = prefill._replace(
                    decode=close.sender.name, epoch=close.epoch
                )
                self._end(handoff, close.outcome, close.why)
        self._send(
            msg.CloseConfirmed(
                sender=self.life, target=close.sender, handoff=handoff, epoch=close.epoch
            )
        )

    def _is_latest(self, prefill: Prefill, close: msg.Close) -> bool:
        """Whether the claim that is closed was not followed by another (P6)."""
        return close.epoch >= prefill.epoch

    def _on_released(self, released: msg.Released) -> None:
        prefill = self.prefills.get(released.handoff)
        if prefill is None or prefill.state is not PrefillState.RELEASING:
            self._refuse("released, but nobody said so")
        else:
            self._answered(released.sender.name, ("release", released.handoff))
            self._released(released.handoff, 1 << self.ranks.index(released.sender.name))

    def _park(self, handoff: str, prefill: Prefill) -> bool:
        """Keeps a question for a request that has not come yet, if there is room."""
        awaited = sum(each.state is PrefillState.AWAITED for each in self.prefills.values())
        if awaited >= self.settings.bounds.parked_count_max:
            return self._refuse("no room to park a question")
        self.prefills[handoff] = prefill
        self._arm(("park", handoff), self.settings.times.park_s)
        return True

    def _renew(self, handoff: str) -> None:
        """Decode still waits for it: the lease begins anew (P7)."""
        timer = ("lease", handoff)
        if timer in self.timers:
            self._disarm(timer)
            self._arm(timer, self.prefills[handoff].lease_s)

    # The end.

    def _end(self, handoff: str, outcome: HandoffOutcome, why: str) -> None:
        """The outcome is known: ranks stop reading its blocks."""
        self._move(handoff, PrefillMove.END)
        self._disarm(("lease", handoff))
        gone = sum(1 << n for n, name in enumerate(self.ranks) if not self.is_open(name))
        prefill = self.prefills[handoff]._replace(outcome=outcome, why=why[:512], released=gone)
        self.prefills[handoff] = prefill
        for name in self._unreleased(handoff):
            self._asked(name, ("release", handoff))
        self._let_ranks_release(handoff)
        self._released(handoff, 0)

    def _send_gone_and_end(self, handoff: str, outcome: HandoffOutcome, why: str) -> None:
        prefill = self.prefills[handoff]
        if self.is_open(prefill.decode):
            self._send(
                msg.Gone(
                    sender=self.life,
                    target=self.life_of(prefill.decode),
                    handoff=handoff,
                    epoch=prefill.epoch,
                    why=why[:512],
                )
            )
        self._end(handoff, outcome, why)

    def _let_ranks_release(self, handoff: str) -> None:
        for name in self._unreleased(handoff):
            self._send(
                msg.ReleaseBlocks(sender=self.life, target=self.life_of(name), handoff=handoff)
            )
        self._arm_resend(("resend", handoff))

    def _unreleased(self, handoff: str) -> list[str]:
        """The ranks that may still read its blocks."""
        released = self.prefills[handoff].released
        return [name for n, name in enumerate(self.ranks) if not released >> n & 1]

    def _released(self, handoff: str, ranks: int) -> None:
        """Some ranks read its blocks no more; after the last of them the handoff has ended."""
        prefill = self.prefills[handoff]
        if ranks & ~prefill.released:
            self._hasten(("resend", handoff))
        prefill = prefill._replace(released=prefill.released | ranks)
        self.prefills[handoff] = prefill
        if prefill.released != self.everyone:
            return
        assert prefill.outcome is not None
        self._move(handoff, PrefillMove.ALL_RELEASED)
        del self.prefills[handoff]
        self._disarm(("resend", handoff))
        self._remember((handoff,), prefill.epoch, prefill.why or prefill.outcome.value)
        self.effects.append(
            HandoffEnded(
                handoff=handoff, epoch=prefill.epoch, outcome=prefill.outcome, why=prefill.why
            )
        )

    def _send_finished(self, handoff: str) -> None:
        """Sends decode the first token, once it is there and was asked for."""
        prefill = self.prefills[handoff]
        if prefill.tokens and self.is_open(prefill.decode):
            self._send(
                msg.Finished(
                    sender=self.life,
                    target=self.life_of(prefill.decode),
                    handoff=handoff,
                    epoch=prefill.epoch,
                    tokens=prefill.tokens,
                    drafts=prefill.drafts,
                )
            )

    def _send_gone(self, awaited: msg.Await, why: str) -> None:
        self._send(
            msg.Gone(
                sender=self.life,
                target=awaited.sender,
                handoff=awaited.handoff,
                epoch=awaited.epoch,
                why=why or "over",
            )
        )

    # Timers and peers.

    def _on_timer(self, timer: TimerKey) -> None:
        match timer:
            case ("lease", handoff):
                self._send_gone_and_end(handoff, HandoffOutcome.EXPIRED, "its lease is over")
            case ("resend", handoff):
                for name in self._unreleased(handoff):
                    self._asked_again(name, ("release", handoff))
                self._let_ranks_release(handoff)
            case ("park", handoff):
                self._count("questions forgotten")
                self._move(handoff, PrefillMove.FORGET)
                del self.prefills[handoff]
            case _:
                raise InvariantViolation(f"timer {timer} is not one of a prefill scheduler")

    def _asked_by(self, timer: TimerKey) -> list[str]:
        return self._unreleased(timer[1])

    def _peer_open(self, name: str) -> None:
        """Nothing to do: a decode scheduler asks again, and ranks are asked by the resend."""

    def _peer_refused(self, name: str, *, why: str) -> None:
        """Nothing to do: the decode engine fails its claims, and the lease ends the offers."""

    def _peer_silent(self, name: str) -> None:
        """A decode scheduler is silent: what it asked for is not kept for it any longer."""
        for handoff, prefill in self._by_name():
            if prefill.decode == name:
                self._give_up(handoff, f"{name} is silent")

    def _peer_gone(self, name: str) -> None:
        if name not in self.ranks:
            self._peer_silent(name)
            return
        for handoff, prefill in self._by_name():
            if prefill.state in (PrefillState.COMPUTING, PrefillState.READY):
                self._give_up(handoff, f"{name} is lost")
            if handoff in self.prefills and prefill.state is not PrefillState.AWAITED:
                self._released(handoff, 1 << self.ranks.index(name))

    def _give_up(self, handoff: str, why: str) -> None:
        match self.prefills[handoff].state:
            case PrefillState.AWAITED:
                self._disarm(("park", handoff))
                self._move(handoff, PrefillMove.FORGET)
                del self.prefills[handoff]
            case PrefillState.COMPUTING | PrefillState.READY:
                self._send_gone_and_end(handoff, HandoffOutcome.FAILED_OVER, why)
            case _:
                pass

    def _move(self, handoff: str, move: PrefillMove) -> None:
        prefill = self.prefills[handoff]
        state = advance(PREFILL_MOVES, prefill.state, move)
        self.prefills[handoff] = prefill._replace(state=state)
