"""The values that a prefill rank keeps: prompts, what decode ranks want of them, and its writes.

Watermarks record how far the computation is; sets record which parts were written and which the
target has. Neither ever goes back, except by a new epoch or a new area, or where a prompt is
computed anew.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from penstock.handoff.protocol.states import WantState

if TYPE_CHECKING:
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import Life, WriteId


class Prompt(NamedTuple):
    """A prompt whose KV this rank computes."""

    token_count: int
    layer_first: int
    watermarks: tuple[int, ...]
    """Tokens ready in each layer of this rank."""

    def covers(self, grid: Grid) -> bool:
        """Whether the prompt and this rank have all that a grid asks for."""
        blocks = -(-self.token_count // grid.block_tokens)
        return (
            self.layers.start <= grid.layer_first
            and grid.layer_first + grid.layer_count <= self.layers.stop
            and grid.block_first + grid.block_count <= blocks
        )

    @property
    def layers(self) -> range:
        """The layers of this rank."""
        return range(self.layer_first, self.layer_first + len(self.watermarks))

    def raised(self, tokens: int, layers: range) -> Prompt:
        """The prompt after `tokens` tokens are ready in these layers."""
        marks = self.watermarks
        first, end = layers.start - self.layer_first, layers.stop - self.layer_first
        middle = (max(mark, tokens) for mark in marks[first:end])
        return self._replace(watermarks=(*marks[:first], *middle, *marks[end:]))

    def restarted(self) -> Prompt:
        """The prompt after its blocks were lost."""
        return self._replace(watermarks=(0,) * len(self.watermarks))


class Want(NamedTuple):
    """What one decode rank wants of one prompt."""

    state: WantState
    epoch: int
    grid: Grid
    have: int = 0
    """The set of parts that the target has."""
    posted: int = 0
    """The set of parts that were written and, as far as we know, need not be written again."""
    ready: int = 0
    """The set of parts that are computed."""
    spoiled: tuple[int, ...] = ()
    """Parts whose first attempt was not intact; then their second; and so on."""

    @property
    def sendable(self) -> int:
        """The set of parts to write as soon as a berth is free."""
        return self.ready & ~(self.posted | self.have) if self.state is WantState.OPEN else 0

    def attempt_of(self, part: int) -> int:
        """Which attempt at a part is the next."""
        return sum(spoiled >> part & 1 for spoiled in self.spoiled)

    def merged(self, have: int, spoiled: tuple[int, ...]) -> Want:
        """The want after a claim of its epoch, which may be older than others before it."""
        pairs = list(zip_longest(self.spoiled, spoiled, fillvalue=0))
        again = 0
        for before, after in pairs:
            again |= after & ~before
        return self._replace(
            have=self.have | have,
            posted=self.posted & ~again,
            spoiled=tuple(before | after for before, after in pairs),
        )

    def computed(self, prompt: Prompt, layers: range | None = None) -> Want:
        """The want after its prompt made progress, in these layers or in any."""
        marks, first, tokens = prompt.watermarks, prompt.layer_first, prompt.token_count
        ready = self.ready | self.grid.ready(marks, first, tokens, layers)
        return self if ready == self.ready else self._replace(ready=ready)


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
