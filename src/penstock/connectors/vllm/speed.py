"""How fast vLLM prefills, as far as its connector can honestly tell.

The scheduler's half is called when a step is put together, and when its results are there. Where
vLLM does one step at a time, the time between is that step's; where steps overlap (asynchronous
scheduling) the two calls belong to different steps, and nothing is told.

| a step                             | is told                                                 |
|------------------------------------|---------------------------------------------------------|
| of `STEP_TOKENS_MIN` tokens or more, nearly all of them prefill | its prefilled tokens, its time |
| any other                          | not                                                     |

The one rule: where it errs, it errs to the slow side. A step's time has everything in it: messages
to the workers, decodes beside the prefill, copies that the CPU makes. What looks slower to compute
than it is gets loaded, as everything is where nothing is told.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEP_TOKENS_MIN = 256
"""A smaller step takes about as long on a GPU as one that only decodes: it tells how long steps
are, not how fast prefill is."""
PREFILL_SHARE_MIN = 0.9
"""Of a step's tokens. A token that is decoded costs as much to compute as a prefilled one, and
more to read its past for."""
REQUEST_TOKENS_MIN = 16
"""A request with so many tokens in a step prefills: decoding takes one, and a few with drafts."""


class PrefillSpeed:
    """Clocks the steps of an engine that does one at a time."""

    def __init__(
        self, tell: Callable[[int, float], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The clock of one engine.

        Args:
            tell: Who is told tokens and seconds: `Offload.computed`.
            clock: What time it is.
        """
        self._tell = tell
        self._clock = clock
        self._tokens = 0
        """What the step under way prefills, if that is to be told."""
        self._began = 0.0

    def begin(self, scheduled: Mapping[str, int]) -> None:
        """A step was put together: so many tokens of which requests."""
        self._tokens = 0
        total = sum(scheduled.values())
        if total < STEP_TOKENS_MIN:
            return
        prefilled = sum(count for count in scheduled.values() if count >= REQUEST_TOKENS_MIN)
        if prefilled >= PREFILL_SHARE_MIN * total:
            self._tokens, self._began = prefilled, self._clock()

    def end(self) -> None:
        """The results of the step are here."""
        if not self._tokens:
            return
        tokens, self._tokens = self._tokens, 0
        seconds = self._clock() - self._began
        if seconds > 0:
            self._tell(tokens, seconds)
