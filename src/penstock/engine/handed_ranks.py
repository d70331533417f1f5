"""The part of a rank in handoffs: it sends the KV it computes, or takes in what others computed.

    prefill rank:  begin(step), layer_computed(n) … while a step is computed
    decode rank:   step() alone: blocks arrive between the steps of the engine

The one rule: progress is told of what is in the blocks, not of what will be. On the CPU a layer
is there when its function has returned.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.pairing import SETTINGS, directory_of, rank_name
from penstock.engine.spec import InstanceRole
from penstock.engine.steps import HandedCounts
from penstock.handoff.driver.decode_rank import DecodeRankDriver
from penstock.handoff.driver.lines import zmq_lines
from penstock.handoff.driver.prefill_rank import PrefillRankDriver
from penstock.handoff.driver.reading import ArrayReader
from penstock.handoff.driver.taking import ArrayTaker
from penstock.transport.shared_memory import SharedTarget
from penstock.transport.shared_writer import connect_shared
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.engine.architecture import Architecture
    from penstock.engine.spec import InstanceSpec
    from penstock.engine.steps import Step
    from penstock.tiers.tensors import TensorTier
    from penstock.transport.base import Waitable


def _nobody() -> None:
    """Nobody else is to be served between layers."""


class HandedRank:
    """One rank of an instance of a pair."""

    def __init__(
        self, driver: PrefillRankDriver | DecodeRankDriver, target: SharedTarget | None = None
    ) -> None:
        self._driver = driver
        self._target = target
        self._stops: dict[str, int] = {}
        """Of the step under way: so many tokens of each prompt will be there."""
        self.between_layers: Callable[[], None] = _nobody
        """Called while a step is computed: others in this process have lines, too."""

    @property
    def counts(self) -> HandedCounts:
        """What it has handed over, or taken in."""
        driver = self._driver
        if isinstance(driver, PrefillRankDriver):
            return HandedCounts(bytes_moved=driver.bytes_written)
        return HandedCounts(driver.parts_taken, driver.bytes_taken)

    def begin(self, step: Step) -> None:
        """A step is about to be computed."""
        driver = self._driver
        if not isinstance(driver, PrefillRankDriver):
            return
        for offer in step.offers:
            driver.admit(
                offer.handoff,
                token_count=offer.token_count,
                slots=offer.slots,
                keys=offer.keys,
                scheduler=offer.scheduler,
            )
            if offer.cached:
                driver.chunk_progress(offer.handoff, tokens=offer.cached)
        self._stops = {name: step.spans[span].stop for span, name in step.handed}
        driver.step()

    def layer_computed(self, layer: int) -> None:
        """The KV of the step is there in one layer: it goes out while the next is computed."""
        driver = self._driver
        if self._stops and isinstance(driver, PrefillRankDriver):
            for name, stop in self._stops.items():
                driver.progress(name, layer=layer, tokens=stop)
            driver.step()
            self.between_layers()

    def step(self) -> None:
        """Does what there is to do; never waits."""
        self._driver.step()

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do, whatever comes."""
        return self._driver.has_work

    @property
    def waitables(self) -> Sequence[Waitable]:
        """What to ask, and then to wait for, until there is something to do."""
        return self._driver.lines.waitables

    @property
    def descriptors(self) -> Sequence[int]:
        """What to wait for, besides."""
        return self._driver.descriptors

    def next_deadline(self) -> float | None:
        """When to call `step` although nothing came."""
        return self._driver.next_deadline()

    def close(self) -> None:
        """Ends it: nothing is written after this returns."""
        self._driver.close()
        if self._target is not None:
            self._target.close()


def handed_rank(
    spec: InstanceSpec, architecture: Architecture, tier: TensorTier, *, rank: int
) -> HandedRank | None:
    """The rank's part in handoffs, if its instance is one of a pair."""
    if spec.pair is None:
        return None
    directory = directory_of(spec, architecture)
    name = rank_name(spec.name, rank)
    lines = zmq_lines(directory, name, secret=spec.pair.secret)
    incarnation = secrets.randbits(63) + 1
    if spec.role is InstanceRole.PREFILL:
        source = PrefillRankDriver(
            directory,
            name,
            lines,
            reader=ArrayReader(tier, Algorithm.XXH3),
            connect=connect_shared,
            incarnation=incarnation,
            settings=SETTINGS,
        )
        return HandedRank(source)
    target = SharedTarget(huge_pages=False, folder=Path(spec.folder) if spec.folder else None)
    driver = DecodeRankDriver(
        directory,
        name,
        lines,
        taker=ArrayTaker(tier, Algorithm.XXH3),
        target=target,
        incarnation=incarnation,
        settings=SETTINGS,
    )
    return HandedRank(driver, target)
