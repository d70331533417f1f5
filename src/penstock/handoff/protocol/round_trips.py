"""How long a peer takes to answer, as RFC 6298 computes it: for how long a resend should wait.

A question that is sent again before its answer can have come costs a slow link what it has least
of. So a party measures, for each peer, how long questions that have an immediate answer take, and
resends nothing sooner than that. As in TCP, one question of a peer is measured at a time.

Karn's rule: a question that was sent twice is not measured, because nobody knows which of the two
was answered. What it shows is that the wait was too short, or that a message was lost: the wait
doubles and stays so until a question that was sent once has had its answer.

Where messages are lost and the link is not slow, most questions are sent twice and would keep waits
long. So an answer that comes within a measured wait of the last resend is taken for the answer to
that one, and the wait is as measured again. On a link that has become slow, this is wrong: the
answer to an earlier one came just then. Therefore it happens once, and again only when a question
that was sent once has shown that what was measured still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

    from penstock.handoff.protocol.settings import HandoffTimes

# The weights of a new sample in the mean and in the deviation, and how many deviations a wait
# allows for: RFC 6298, section 2.
_MEAN_WEIGHT = 1 / 8
_DEVIATION_WEIGHT = 1 / 4
_DEVIATIONS = 4.0


class RoundTrip(NamedTuple):
    """What is known of the round trips to one peer."""

    wait_s: float = 0.0
    """A question is sent again no sooner; 0 when nothing is known."""
    mean_s: float | None = None
    """Smoothed; none before the first sample."""
    deviation_s: float = 0.0
    doubled_at: float = float("-inf")
    heard: bool = False
    """Whether some message came since then, an answer or not: its link is not cut."""
    overdue: Hashable = None
    """The question whose resend made the wait longer, at `doubled_at`."""
    shortened: bool = False
    """Whether the wait was made as measured without a sample."""
    question: Hashable = None
    """What is being measured; none if nothing is."""
    asked_at: float = 0.0

    def asked(self, question: Hashable, now: float, *, patience_s: float) -> RoundTrip:
        """After a question was sent for the first time.

        It is measured, unless another one is: one that has waited for `patience_s` may never be
        answered, and gives way.
        """
        if self.question is not None and now < self.asked_at + patience_s:
            return self
        return self._replace(question=question, asked_at=now)

    def answered(self, question: Hashable, now: float, times: HandoffTimes) -> RoundTrip:
        """After the answer to a question came."""
        if self.question is None or question != self.question:
            return self._answered_unmeasured(question, now, times)
        sample_s = now - self.asked_at
        if self.mean_s is None:
            mean_s, deviation_s = sample_s, sample_s / 2
        else:
            error_s = sample_s - self.mean_s
            mean_s = self.mean_s + _MEAN_WEIGHT * error_s
            deviation_s = self.deviation_s + _DEVIATION_WEIGHT * (abs(error_s) - self.deviation_s)
        return RoundTrip(mean_s + _DEVIATIONS * deviation_s, mean_s, deviation_s)

    def heard_from(self) -> RoundTrip:
        """After any message came, though it may answer nothing."""
        return self if self.heard else self._replace(heard=True)

    def _answered_unmeasured(
        self, question: Hashable, now: float, times: HandoffTimes
    ) -> RoundTrip:
        trip = self.heard_from()
        if self.mean_s is None or self.shortened or question != self.overdue:
            return trip
        measured_s = self.mean_s + _DEVIATIONS * self.deviation_s
        if now > self.doubled_at + max(measured_s, times.resend_s):
            return trip
        return trip._replace(wait_s=measured_s, overdue=None, shortened=True)

    def asked_again(self, question: Hashable, now: float, times: HandoffTimes) -> RoundTrip:
        """After a question that waited in vain was sent once more.

        Several may wait at a time, each with a timer of its own: the wait doubles once for all of
        them, not once for each. Beyond the cap it doubles only while messages come, and the answer
        does not: it waits behind others. A peer that is silent, because its link is cut, is asked
        as soon as the link may be healed.
        """
        trip = self._replace(question=None) if question == self.question else self
        wait_s = max(self.wait_s, times.resend_s)
        if now < self.doubled_at + wait_s:
            return trip
        most_s = times.resend_limit_s if self.heard else max(wait_s, times.resend_cap_s)
        return trip._replace(
            wait_s=min(2 * wait_s, most_s), doubled_at=now, overdue=question, heard=False
        )
