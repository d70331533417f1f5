"""What the scheduler's half counts and logs of loads, saves and requests.

The one rule: a counter says what vLLM made of it. Tokens count as loaded when vLLM goes on with
a request behind them, not when they were copied: of a load with a damaged block vLLM keeps what
stands before that block, and computes the rest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.ledger import BlockFault, Outcome
from penstock.connectors.vllm.layerwise import GIVEN_UP
from penstock.connectors.vllm.logs import TroubleLog
from penstock.connectors.vllm.statistics import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.machine.effects import Ended
    from penstock.runtime.facts import RankFacts
    from penstock.runtime.offload import HubCounts
    from penstock.vocabulary.ids import Key

FAULTS = {
    BlockFault.CORRUPT: "its checksum does not match",
    BlockFault.UNREADABLE: "it could not be copied",
}


class BlockBytes(NamedTuple):
    """Bytes of one block, on all ranks together."""

    loaded: int = 0
    saved: int = 0
    """Fewer, where ranks with equal bytes share one copy."""

    @classmethod
    def of(cls, ranks: Sequence[RankFacts], *, shared: bool) -> BlockBytes:
        """Those of an engine; where ranks share one copy, one writes it and all of them read it."""
        each = [rank.block_bytes for rank in ranks]
        return cls(loaded=sum(each), saved=each[0] if shared else sum(each))


NO_BYTES = BlockBytes()


class Counting:
    """The counts of one scheduler's half."""

    def __init__(
        self, block_bytes: BlockBytes = NO_BYTES, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing yet.

        Args:
            block_bytes: What a block counts for.
            clock: What time it is.
        """
        self.tally = Tally()
        self.clock = clock
        self._block_bytes = block_bytes
        self._trouble = TroubleLog(clock=clock)

    def refused(self, request: str, why: str) -> None:
        """A request is kept out because of what its parameters say."""
        self.tally.add("requests_refused")
        message = "a request is neither loaded nor saved: request=%s reason=%s"
        self._trouble.warn("request", message, request, why)

    def copied(self, told: Ended, blocks: int) -> None:
        """A load of so many blocks has ended, whoever wanted it: what it brought was verified."""
        if told.outcome is Outcome.DONE or told.faults:
            good = blocks - len(told.faults)
            self.tally.add("bytes_loaded", good * self._block_bytes.loaded)

    def arrived(self, began: float) -> None:
        """All that a request was to get has ended."""
        self.tally.time("load_seconds", self.clock() - began)

    def kept(self, arriving: tuple[int, int], computed: int) -> None:
        """A request goes on behind its computed tokens: what of its load is among them."""
        first, end = arriving
        self.tally.add("tokens_loaded", max(0, min(computed, end) - first))

    def load_failed(self, told: Ended, keys: Sequence[Key]) -> None:
        """A load did not bring all of these blocks, and somebody waits for them."""
        self.tally.add("loads_failed")
        self._report("load", told, keys)

    def saved(self, told: Ended, keys: Sequence[Key]) -> None:
        """A save of these blocks has ended; one that was cancelled was counted when it was."""
        if told.outcome is Outcome.DONE:
            self.tally.add("blocks_saved", len(keys))
            self.tally.add("bytes_saved", len(keys) * self._block_bytes.saved)
        elif told.outcome is not Outcome.CANCELLED:
            self.tally.add("saves_failed")
            self._report("save", told, keys)

    def sizes(self, hub: HubCounts) -> None:
        """The first tier below the device, as it is now."""
        self.tally.gauge("host_slots", hub.slots)
        self.tally.gauge("host_slots_ready", hub.ready)
        self.tally.total("blocks_evicted", hub.evicted)
        self.tally.total("checksum_failures", hub.corrupt)

    def _report(self, what: str, told: Ended, keys: Sequence[Key]) -> None:
        """Says which block of an operation failed, and why."""
        late = told.outcome is Outcome.EXPIRED or GIVEN_UP in told.failure
        self.tally.add("timeouts", 1 if late else 0)
        position, fault = told.faults[0] if told.faults else (0, None)
        self._trouble.warn(
            f"{what} {'late' if late else fault}",
            "a %s failed: request=%s block=%s, the first of %d in %d, reason=%s",
            what,
            told.cause,
            keys[position].hex() if position < len(keys) else "unknown",
            len(told.faults) or len(keys),
            len(keys),
            told.failure or (FAULTS[fault] if fault is not None else told.outcome.value),
        )
