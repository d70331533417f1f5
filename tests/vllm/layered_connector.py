"""The tampered connector where steps compute on their loads: it also tells how they were begun.

What `PENSTOCK_TAMPER` says is done to every load that a step has joined, as `tampered_connector`
says, if it has three blocks at least. Two words more are about the step itself:

| word     | what is done                                                  | must be        |
|----------|---------------------------------------------------------------|----------------|
| `late`   | nobody lets the loads get on, and their time is up            | given up       |
| `astray` | the layers of the step do not wait                            | found          |

Each step that joined loads prints a line: `JOINED`, how many requests, whether by layer, and how
many blocks of them were invalid.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tampered_connector import tamper, zero_on_device

from penstock.cache.operations import Purpose
from penstock.connectors.base.worker import WorkerConnector
from penstock.connectors.vllm.adapter import PenstockConnector
from penstock.runtime.messages import decode_plan

if TYPE_CHECKING:
    from penstock.connectors.base.scheduler import StepPlan


class LayeredWorking(WorkerConnector):
    word = ""
    loads: Any = ()
    begun = ""

    def before_forward(self, told: StepPlan | None, *, by_layer: bool) -> bool:
        path = Path(os.environ["PENSTOCK_TAMPER"])
        self.word = path.read_text() if path.exists() else ""
        self.loads = []
        if told is None or not told.joined:
            return super().before_forward(told, by_layer=by_layer)
        self.begun = f"{len(told.joined)} {'by layer' if by_layer else 'whole'}"
        copies = [copy for plan in told.early for copy in decode_plan(plan).copies]
        self.loads = [copy for copy in copies if copy.purpose is Purpose.LOAD]
        # Blocks hold whatever somebody else left there: nothing is right by chance.
        for load in self.loads:
            for slot in load.target_slots[0].tolist():
                zero_on_device(self._rank.executor.stores[0], 0, [slot])
        if self.word not in {"", "device", "late", "astray"} and self._rank.facts.rank == 0:
            # Each slot once, however many requests load it.
            longer = [load for load in self.loads if len(load.keys) > 2]
            places = {tuple(load.source_slots.tolist()[1:3]) for load in longer}
            for place in places:
                tamper(self._rank.executor.stores[1], self.word, *place)
        self._layerwise._wait_s = 0.0 if self.word == "late" else 30.0
        return super().before_forward(told, by_layer=by_layer)

    def wait_layer(self, name: str) -> None:
        if self.word == "astray":
            return
        super().wait_layer(name)
        if self.word == "device":
            for load in self.loads:
                for group, slots in enumerate(load.target_slots.tolist()):
                    zero_on_device(self._rank.executor.stores[0], group, slots)

    def _end_joined(self) -> None:
        before = set(self._received.invalid_blocks)
        super()._end_joined()
        invalid = len(self._received.invalid_blocks - before)
        sys.stdout.write(f"JOINED {self.begun} {invalid} invalid\n")
        sys.stdout.flush()


class LayeredConnector(PenstockConnector):
    def _make_worker(self, rank: Any, *, on_gpu: bool) -> WorkerConnector:
        working = super()._make_worker(rank, on_gpu=on_gpu)
        working.__class__ = LayeredWorking
        return working


class OfferingConnector(LayeredConnector):
    """A control: vLLM offers blocks to others before they were verified, as it does by itself."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._withhold is not None:
            self._withhold = lambda *_: None
