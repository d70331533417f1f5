"""The checks of epochs in the shipped machines (P6), and how to take each of them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.handoff.protocol.decode_rank import DecodeRank
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.prefill_rank import PrefillRank
from penstock.handoff.protocol.prefill_scheduler import PrefillScheduler
from penstock.handoff.protocol.states import WantMove

if TYPE_CHECKING:
    import pytest

    from penstock.handoff.protocol import messages as msg


def believe_every_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode scheduler takes what is said of any claim for said of the present one."""
    monkeypatch.setattr(
        DecodeScheduler, "_is_current", lambda self, message: message.handoff in self.claimed
    )


def begin_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode rank begins with what it was told to drop."""
    monkeypatch.setattr(DecodeRank, "_dropped_epoch", lambda *_: 0)


def serve_what_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill rank begins again when a claim was overtaken by its own stop."""
    monkeypatch.setattr(PrefillRank, "_stopped", lambda *_: 0)


def merge_earlier_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill rank takes what an earlier claim says for said by the present one."""
    want = PrefillRank._want

    def want_any(rank: PrefillRank, claim: msg.Claim, have: int, spoiled: tuple[int, ...]) -> None:
        wants = rank.wants[claim.sender.name]
        known = wants.get(claim.handoff)
        if known is not None and known.epoch > claim.epoch:
            wants[claim.handoff] = known.merged(have, spoiled)
        else:
            want(rank, claim, have, spoiled)

    monkeypatch.setattr(PrefillRank, "_want", want_any)


def stop_later_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill rank lets a late stop end the claim that came after."""
    hear_stop = PrefillRank._on_stop

    def stop_any(rank: PrefillRank, stop: msg.Stop) -> None:
        if stop.handoff in rank.wants.get(stop.sender.name, {}):
            rank._forget(stop.sender.name, stop.handoff, WantMove.STOP)
        hear_stop(rank, stop)

    monkeypatch.setattr(PrefillRank, "_on_stop", stop_any)


def close_later_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill scheduler lets the end of one claim end a later one."""
    monkeypatch.setattr(PrefillScheduler, "_is_latest", lambda *_: True)


def answer_earlier_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill scheduler goes back to an earlier claim that asks late."""
    hear_await = PrefillScheduler._on_await

    def await_any(scheduler: PrefillScheduler, awaited: msg.Await) -> None:
        known = scheduler.prefills.get(awaited.handoff)
        if known is not None and known.epoch > awaited.epoch:
            scheduler.prefills[awaited.handoff] = known._replace(epoch=awaited.epoch)
        hear_await(scheduler, awaited)

    monkeypatch.setattr(PrefillScheduler, "_on_await", await_any)
