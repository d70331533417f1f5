"""What a connector counts, times and logs about loads, saves, requests and prefill.

| class            | holds                                                                      |
|------------------|----------------------------------------------------------------------------|
| `Counters`       | counts, times and gauges since they were last taken                        |
| `TransferCounts` | what the scheduler's side counts and logs of loads, saves and requests     |
| `RateLimitedLog` | warnings that may repeat: the first at once, then one a minute             |
| `PrefillTimer`   | how fast the engine prefills, where that can be measured                   |

A counter says what the engine did with a block. Tokens count as loaded when the engine continues a
request behind them, not when they were copied: of a load with a damaged block the engine keeps
what stands before that block, and computes the rest. A gauge is reported in the step in which it
changed: engines ask at the end of every step and only then, so a change outside of a step (a
reset) makes one more step necessary.

Prefill is measured from the moment a step is put together to the moment its results are there.
Where steps overlap (asynchronous scheduling) these belong to different steps, and nothing is
measured. Errors are to the slow side: the time has messages, decodes and copies in it. A prefix
that looks slower to compute than it is gets loaded, as everything is where nothing is measured.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.cache.operations import BlockFault, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.machine.effects import Ended
    from penstock.machine.statistics import HubCounts
    from penstock.runtime.messages import RankFacts
    from penstock.runtime.stored_tiers import StoreStatus
    from penstock.vocabulary.keys import Key

log = logging.getLogger("penstock.connectors")

Taken: TypeAlias = "dict[str, int | list[float]]"

COUNTERS: Mapping[str, str] = {
    "lookups": "Requests looked up below the device.",
    "tokens_found": "Tokens that were found below the device and promised to the engine.",
    "tokens_loaded": "Tokens that were not computed because they were loaded and verified.",
    "bytes_loaded": "Bytes copied to the device and verified, on all ranks.",
    "loads_failed": "Loads of which at least one block was computed instead.",
    "loads_not_started": "Requests computed because the engine could not start their load.",
    "checksum_failures": "Blocks whose checksum did not match when they were loaded.",
    "timeouts": "Loads and saves that did not end within operation_timeout_s.",
    "blocks_saved": "Blocks written below the device.",
    "bytes_saved": "Bytes of these blocks, on all ranks.",
    "saves_failed": "Copies to below the device that failed or ran out of time.",
    "blocks_dropped_pinned": "Blocks not saved because too many were pinned already.",
    "blocks_dropped_window": "Blocks not saved because a sliding window had passed them.",
    "blocks_dropped_room": "Blocks not saved because there was no room, or they were refused.",
    "blocks_evicted": "Blocks that left the first tier below the device to make room for others.",
    "disk_blocks_loaded": "Blocks brought up from a disk into host memory, and verified.",
    "disk_blocks_saved": "Blocks written to a disk, or already there.",
    "disk_blocks_dropped": "Blocks that the disk was too slow to take.",
    "disk_failures": "Copies from or to a disk that did not succeed as a whole.",
    "requests_refused": "Requests kept out because their kv_transfer_params were wrong.",
    "prompts_sent": "Prompts whose KV a decode engine has received and verified.",
    "prompts_not_sent": "Prompts that were offered and not taken, or whose handoff failed.",
    "bytes_sent_early": "Bytes of prompts sent before the last step that computes them began.",
    "prompts_received": "Prompts whose KV was received from a prefill engine and verified.",
    "prompts_not_received": "Prompts computed here because their handoff failed.",
    "prompts_lost": "Of these, prompts whose prefill engine was gone.",
    "tokens_received": "Tokens whose KV was received from prefill engines.",
    "resets": "Times that everything below the device was voided.",
}
GAUGES: Mapping[str, str] = {
    "host_slots": "Blocks that fit into the first tier below the device; 0 while it is off.",
    "host_slots_ready": "Blocks in it that can be loaded.",
    "disk_on": "1 while a disk can be used, 0 while it is off, starts, or is not configured.",
    "disk_blocks": "Blocks on the disk, of all engines that share it, on each rank.",
    "pinned_blocks": "Device blocks that are kept from reuse until a copy has settled.",
}
TIMES: Mapping[str, str] = {
    "load_seconds": "From the moment that a request had blocks to load into, to its end.",
    "disk_wait_seconds": "How long a request waited for blocks that came up from a disk.",
}
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a load of one block in a step to the longest that operation_timeout_s usually allows."""
FAULTS = {
    BlockFault.CORRUPT: "its checksum does not match",
    BlockFault.UNREADABLE: "it could not be copied",
}
EVERY_S = 60.0
"""How often a kind of warning is logged at most: a client or a bad memory module could otherwise
fill the log."""
GIVEN_UP = "it had not ended when its step did"
"""Why a load failed that a step waited for, and that missed the end of it."""
STEP_TOKENS_MIN = 256
"""A smaller step takes about as long on a GPU as one that only decodes: it does not show how fast
prefill is."""
PREFILL_SHARE_MIN = 0.9
"""The part of a step's tokens. A decoded token costs as much to compute as a prefilled one, and
more to read its context."""
STEPS_PLANNED_MAX = 64
"""Measured steps without results: vLLM has as many under way as it has stages, and one more."""
REQUEST_TOKENS_MIN = 16
"""A request with at least this many tokens in a step prefills; decoding takes one, or a few with
drafts."""


class Counters:
    """Counts, times and gauges of one scheduler since they were last taken."""

    def __init__(self) -> None:
        self._added: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}
        self._totals: dict[str, int] = {}
        self._gauges: dict[str, int] = {}
        self._changed: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Counts something of `COUNTERS`."""
        if count:
            self._added[name] = self._added.get(name, 0) + count

    def time(self, name: str, seconds: float) -> None:
        """Records one of `TIMES`."""
        self._times.setdefault(name, []).append(seconds)

    def total(self, name: str, value: int) -> None:
        """Sets one of `COUNTERS` from a total that is counted elsewhere.

        A total that is smaller than before is that of a process which was started again.
        """
        before = self._totals.get(name, 0)
        self.add(name, value - before if value >= before else value)
        self._totals[name] = value

    def gauge(self, name: str, value: int) -> None:
        """Sets one of `GAUGES`; it is reported if it has changed."""
        if self._gauges.get(name) != value:
            self._gauges[name] = self._changed[name] = value

    def take(self) -> Taken:
        """What was added or has changed since the last call."""
        taken: Taken = {**self._added, **self._changed, **self._times}
        self._added, self._changed, self._times = {}, {}, {}
        return taken


def combined(one: Mapping[str, int | list[float]], other: Mapping[str, int | list[float]]) -> Taken:
    """Merges two results of `take`: counters add up, times are joined, the later gauge counts."""
    both = dict(one)
    for name, value in other.items():
        before = both.get(name)
        both[name] = value if before is None or name in GAUGES else before + value  # type: ignore[operator]
    return both


def reduced(taken: Mapping[str, int | list[float]]) -> dict[str, int | float]:
    """The same for a log line: of times their count, mean and maximum."""
    summary: dict[str, int | float] = {}
    for name, value in taken.items():
        if not isinstance(value, list):
            summary[name] = value
        elif value:
            summary[f"{name}_count"] = len(value)
            summary[f"{name}_mean"] = round(sum(value) / len(value), 6)
            summary[f"{name}_max"] = round(max(value), 6)
    return summary


class RateLimitedLog:
    """Warnings that may repeat: the first of a kind at once, then one in `EVERY_S` at most."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}
        """When each kind was last logged."""
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Logs a warning, unless one of its kind was logged a short while ago."""
        now = self._clock()
        if kind in self._logged and now - self._logged[kind] < EVERY_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._logged[kind] = now
        left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more of this kind since the last such line)" if left_out else ""
        log.warning(f"{message}{more}", *args)  # noqa: G004 - the message is a constant


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


class TransferCounts:
    """Counts and logs loads, saves and requests of one scheduler."""

    def __init__(
        self, block_bytes: BlockBytes = NO_BYTES, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts with nothing counted."""
        self.counters = Counters()
        self.clock = clock
        self._block_bytes = block_bytes
        self._warnings = RateLimitedLog(clock=clock)

    def refused(self, request: str, why: str) -> None:
        """A request is neither loaded nor saved because its parameters are invalid."""
        self.counters.add("requests_refused")
        message = "a request is neither loaded nor saved: request=%s reason=%s"
        self._warnings.warn("request", message, request, why)

    def copied(self, ended: Ended, blocks: int) -> None:
        """A load has ended, with or without a waiting request; loaded blocks were verified."""
        if ended.outcome is Outcome.DONE or ended.faults:
            good = blocks - len(ended.faults)
            self.counters.add("bytes_loaded", good * self._block_bytes.loaded)

    def load_failed(self, ended: Ended, keys: Sequence[Key]) -> None:
        """A load that a request waits for did not load all of these blocks."""
        self.counters.add("loads_failed")
        self._report("load", ended, keys)

    def load_not_started(self, request: str) -> None:
        """A load that the engine was offered would never start: its request is computed."""
        self.counters.add("loads_not_started")
        message = "a request is computed, the engine has no room to load it: request=%s"
        self._warnings.warn("not started", message, request)

    def saved(self, ended: Ended, keys: Sequence[Key]) -> None:
        """A save of these blocks has ended; a cancelled one was counted when it was cancelled."""
        if ended.outcome is Outcome.DONE:
            self.counters.add("blocks_saved", len(keys))
            self.counters.add("bytes_saved", len(keys) * self._block_bytes.saved)
        elif ended.outcome is not Outcome.CANCELLED:
            self.counters.add("saves_failed")
            self._report("save", ended, keys)

    def stored(self, counter: str, ended: Ended) -> None:
        """A copy between host memory and a disk has ended; `counter` counts its blocks."""
        if ended.outcome is Outcome.DONE or ended.faults:
            self.counters.add(counter, ended.block_count - len(ended.faults))
        if ended.outcome in {Outcome.FAILED, Outcome.EXPIRED}:
            self.counters.add("disk_failures")

    def store(self, status: StoreStatus) -> None:
        """The store process, as it is now."""
        self.counters.gauge("disk_on", int(status.on))
        self.counters.gauge("disk_blocks", status.blocks)
        self.counters.total("disk_blocks_dropped", status.saves_dropped)

    def sizes(self, hub: HubCounts) -> None:
        """The first tier below the device, as it is now."""
        self.counters.gauge("host_slots", hub.slots)
        self.counters.gauge("host_slots_ready", hub.ready)
        self.counters.total("blocks_evicted", hub.evicted)
        self.counters.total("checksum_failures", hub.corrupt)

    def _report(self, what: str, ended: Ended, keys: Sequence[Key]) -> None:
        """Logs which block of an operation failed, and why."""
        late = ended.outcome is Outcome.EXPIRED or GIVEN_UP in ended.failure
        self.counters.add("timeouts", 1 if late else 0)
        position, fault = ended.faults[0] if ended.faults else (0, None)
        self._warnings.warn(
            f"{what} {'late' if late else fault}",
            "a %s failed: request=%s block=%s, the first of %d in %d, reason=%s",
            what,
            ended.cause,
            keys[position].hex() if position < len(keys) else "unknown",
            len(ended.faults) or len(keys),
            len(keys),
            ended.failure or (FAULTS[fault] if fault is not None else ended.outcome.value),
        )


class PrefillTimer:
    """Measures prefill in an engine that executes one step after the other.

    It may plan a step while those before it are executed (asynchronous scheduling): a step then
    begins when the results of the one before it arrive.
    """

    def __init__(
        self, report: Callable[[int, float], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The timer of one engine."""
        self._report = report
        self._clock = clock
        self._count = 0
        self.begun = 0
        """The number of the step that was planned last; 0 if it is not measured."""
        self._planned: dict[int, tuple[int, float]] = {}
        """Tokens that steps prefill, and since when they are planned, by number."""
        self._ended = 0.0
        """When results arrived last."""

    def begin(self, scheduled: Mapping[str, int]) -> int:
        """A step was planned, with these numbers of tokens of its requests.

        Returns its number, which must come back with its results; 0 if it is not measured.
        """
        self.begun = 0
        total = sum(scheduled.values())
        if total < STEP_TOKENS_MIN:
            return 0
        prefilled = sum(count for count in scheduled.values() if count >= REQUEST_TOKENS_MIN)
        if prefilled < PREFILL_SHARE_MIN * total:
            return 0
        self._count += 1
        self.begun = self._count
        self._planned[self.begun] = prefilled, self._clock()
        if len(self._planned) > STEPS_PLANNED_MAX:
            # The results of a step that failed never came.
            del self._planned[next(iter(self._planned))]
        return self.begun

    def end(self, number: int = 0) -> None:
        """The results of a step have arrived: of this number, or of one that is not measured."""
        before, self._ended = self._ended, self._clock()
        if number not in self._planned:
            return
        tokens, planned = self._planned.pop(number)
        seconds = self._ended - max(planned, before)
        if seconds > 0:
            self._report(tokens, seconds)
