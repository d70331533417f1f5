"""Whether blocks are loaded or computed is not decided by how late a step notices a load."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import torch

from lab.bench.engine_clients import Clients, prompt
from lab.bench.engine_model import EIGHT_B, Model
from penstock.machine import gate
from penstock.movers.table import mover_between
from penstock.runtime import copy_executor
from penstock_serve.engine.engine import Engine
from penstock_serve.engine.scheduler import SchedulerSettings

if TYPE_CHECKING:
    import pytest
    from numpy.typing import ArrayLike

    from penstock.machine.effects import Copy
    from penstock.movers.base import Moved, Mover
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import OperationId

TINY = replace(
    EIGHT_B, layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocabulary=97
)


BEHIND = 3
"""Steps after which a copy is seen to have ended: two are under way, and another has begun."""


class Device:
    """Copies at once, as a GPU does, but behind the steps that were submitted before the copy."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._step = 0
        self._polls = 0
        """Since the last step."""
        self._due: list[tuple[int, Moved]] = []

    without = ""

    @property
    def busy(self) -> bool:
        return self._mover.busy or bool(self._due)

    def submit(self, copy: Copy) -> None:
        self._mover.submit(copy)

    def abandon(self, operation: OperationId) -> None:
        self._mover.abandon(operation)

    def step_submitted(self, stream: int, slots: ArrayLike | None = None) -> None:  # noqa: ARG002
        self._step += 1
        self._polls = 0

    def guard(self, stream: int, slots: ArrayLike) -> bool:  # noqa: ARG002
        return True

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        moved, spent = self._mover.poll(budget_bytes=budget_bytes)
        self._due += [(self._step + BEHIND, each) for each in moved]
        self._polls += 1
        reached = math.inf if self._polls > 3 else self._step
        ended = [each for step, each in self._due if step <= reached]
        self._due = [(step, each) for step, each in self._due if step > reached]
        return ended, spent


def test_loads_that_many_requests_ask_for_at_once_do_not_look_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[Device] = []

    def between(read: SlotStore, write: SlotStore, algorithm: Algorithm) -> Mover:
        devices.append(Device(mover_between(read, write, algorithm)))
        return devices[-1]

    monkeypatch.setattr(copy_executor, "mover_between", between)
    monkeypatch.setattr(gate, "LOAD_WAIT_S", 0.0)
    # An engine so quick that it computes whatever a measured hop would bring.
    monkeypatch.setattr(Engine, "_report_speed", lambda self, *_: self.cache.computed(10**9, 1e-3))
    model = Model(TINY, device="cpu", dtype=torch.float32)
    random = Random(3)
    stories = [prompt(random, 64, 97) for _ in range(12)]
    settings = SchedulerSettings(step_tokens=64, step_requests=12, steps_in_flight=1)

    with model.engine(block_tokens=8, blocks=80, host_blocks=400, settings=settings) as engine:
        engine.cache.steps._knowing = devices[:1]
        clients = Clients(engine)
        # One more in every iteration, so that each begins a load.
        for story in stories * 4:
            clients.ask([*story, *prompt(random, 3, 97)], max_tokens=3)
            clients.step()
        clients.settle()
        statistics = engine.cache.statistics()

    assert statistics.tiers[1].tokens_cached > 0
    assert statistics.misses["recompute is quicker"] == 0
