"""The connector with a hand in its works, to show what is found and what the tests would notice.

The file that `PENSTOCK_TAMPER` names says what is done to every load from then on:

| word       | done to the second block of each load                         | must be        |
|------------|---------------------------------------------------------------|----------------|
| `flip`     | a bit of it is flipped in host memory                          | found          |
| `first`    | the same, of a step's first load alone                         | found          |
| `exchange` | its bytes and sums are exchanged with another block's          | found          |
| `older`    | bytes and sums that lay in its slot before the reset come back | found          |
| `layers`   | the bytes and sums of two of its layers are exchanged          | found          |
| `tail`     | the second half of its bytes is zeroed                         | found          |
| `sums`     | a sum of it is changed                                         | found          |
| `device`   | its bytes on the device are zeroed after the load              | in the output  |
| `remember` | nothing; what lies in host memory is kept, for `older`         | nowhere        |

With `hold` no plan is carried out until something was computed that is to be saved, and three
steps more: loads are late, and requests may be gone when they write. With `slow` every plan is
carried out three steps late: requests end before their blocks are saved.

With `fail` no load is carried out: each is reported as failed, and its blocks stay in host memory.
With the variable `PENSTOCK_OFFERS_AGAIN` a request whose load failed is offered another one.

Pins are counted as well: `PINNED` and two numbers are printed, how many there are and may be. When
a worker starts it prints `ENCODING`, and what the form of a block says of its bytes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache.operations import Purpose
from penstock.connectors.base.requests import Pins
from penstock.connectors.base.scheduler import SchedulerConnector
from penstock.connectors.base.worker import WorkerConnector
from penstock.connectors.vllm.adapter import PenstockConnector
from penstock.runtime.messages import decode_plan, encode_plan

if TYPE_CHECKING:
    from penstock.connectors.base.scheduler import StepPlan


HOLD_STEPS = 3


class TamperedWorker(WorkerConnector):
    def after_forward(self, told: StepPlan | None, *, computes: bool = True) -> None:
        path = Path(os.environ["PENSTOCK_TAMPER"])
        word = path.read_text() if path.exists() else ""
        if word == "slow":
            HELD.append(told)
            late = HELD.pop(0) if len(HELD) > HOLD_STEPS else None
            super().after_forward(late, computes=computes)
            return
        if word == "hold" and hold(told):
            return
        while HELD:
            super().after_forward(HELD.pop(0), computes=computes)
        if word == "hold":
            super().after_forward(told, computes=computes)
            return
        SAVING.clear()
        told = self._failing(told, word)
        plan = told.plan if told is not None else None
        copies = decode_plan(plan).copies if word and plan is not None else []
        loads = [copy for copy in copies if copy.purpose is Purpose.LOAD and len(copy.keys) > 2]
        device, host, *_ = self._rank.executor.stores
        for load in loads[:1] if word == "first" else loads:
            # One rank is enough: a block that is wrong on one is wrong.
            if word != "device" and self._rank.facts.rank == 0:
                tamper(host, word, *load.source_slots.tolist()[1:3])
        # What is zeroed on the device below must have been loaded in this step.
        super().after_forward(told, computes=computes or word == "device")
        for load in loads:
            if word == "device":
                for group, slots in enumerate(load.target_slots.tolist()):
                    zero_on_device(device, group, slots)

    def _failing(self, told: StepPlan | None, word: str) -> StepPlan | None:
        """The same step; if it is to fail and loads, its plan is one for another life."""
        if word != "fail" or told is None or told.plan is None:
            return told
        plan = decode_plan(told.plan)
        if not any(copy.purpose is Purpose.LOAD for copy in plan.copies):
            return told
        other = plan._replace(lives=[self._rank.facts.life + 1])
        return replace(told, plan=encode_plan(other))


HELD: list[StepPlan | None] = []
SAVING: list[bool] = []
"""One entry for each step since something was to be saved."""


def hold(told: StepPlan | None) -> bool:
    """Whether the plan of this step is held back; if so, it is kept."""
    if len(SAVING) > HOLD_STEPS:
        return False
    plan = decode_plan(told.plan) if told is not None and told.plan is not None else None
    if SAVING or (plan and any(copy.purpose is not Purpose.LOAD for copy in plan.copies)):
        SAVING.append(True)
    HELD.append(told)
    return True


REMEMBERED: dict[int, tuple[Any, Any]] = {}
"""What lay in each slot of host memory: bytes, and their sums."""


def tamper(host: Any, word: str, slot: int, other: int) -> None:
    one, two = rows_of(host, slot), rows_of(host, other)
    slots = np.array([slot, other], dtype=np.int32)
    sums = host.sums(slots).copy()
    if word in {"flip", "first"}:
        one[5] ^= 1
    elif word == "exchange":
        kept = one.copy()
        one[:], two[:] = two, kept
        host.keep_sums(slots, sums[::-1])
    elif word == "older":
        one[:], sums[0] = REMEMBERED[slot]
        host.keep_sums(slots, sums)
    elif word == "layers":
        exchange_layers(one, layer_count(host))
        exchange_layers(sums[0], layer_count(host))
        host.keep_sums(slots, sums)
    elif word == "tail":
        one[len(one) // 2 :] = 0
    elif word == "sums":
        sums[0, 0] ^= np.uint64(1)
        host.keep_sums(slots, sums)
    elif word == "remember":
        remember(host)
    elif word != "fail":
        raise ValueError(word)


def exchange_layers(block: Any, layers: int) -> None:
    """The first two layers of a block, or of its sums, change places."""
    rows = block.reshape(layers, -1)
    rows[[0, 1]] = rows[[1, 0]]


def layer_count(host: Any) -> int:
    return sum(len(group.layers) for group in host.blocks([0]).layout.groups)


def remember(host: Any) -> None:
    every = np.arange(host.blocks([0]).layout.block_count, dtype=np.int32)
    written = np.flatnonzero(host.sums(every).any(axis=1)).astype(np.int32)
    for slot, sums in zip(written.tolist(), host.sums(written), strict=True):
        REMEMBERED[slot] = rows_of(host, slot).copy(), sums.copy()


def rows_of(host: Any, slot: int) -> Any:
    """The bytes of a slot of the host tier, where a block is one run."""
    blocks = host.blocks([slot])
    (buffer,) = blocks.buffers.values()
    plane = blocks.layout.groups[0].layers[0].planes[0]
    start = plane.offset + slot * plane.block_stride
    return buffer[start : start + blocks.layout.block_bytes]


def zero_on_device(device: Any, group: int, slots: list[int]) -> None:
    """Zeroes the last block that was loaded: every group needs that one."""
    slot = [slot for slot in slots if slot >= 0][-1]
    tensors = device
    if device.medium == "cuda":
        tensors = device.tensors
        torch.cuda.synchronize()  # Its loads are copied in another stream.
    for layer in device.layout.groups[group].layers:
        for plane in layer.planes:
            start = plane.offset + slot * plane.block_stride
            tensors.numbers(plane.buffer, torch.uint8)[start : start + plane.segment_bytes] = 0


class CountedPins(Pins):
    def add(self, *args: Any) -> None:
        super().add(*args)
        sys.stdout.write(f"PINNED {self.count} {self.limit}\n")


class ForgetfulScheduler(SchedulerConnector):
    """Does not remember which requests have had their load."""

    def note_started(self, request: Any) -> None:
        super().note_started(request)
        self._requests[request.request_id].had_load = False


class TamperedConnector(PenstockConnector):
    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._tier is not None
        planes = self._tier.layout.groups[0].layers[0].planes
        sys.stdout.write(f"ENCODING {planes[0].encoding}\n")
        sys.stdout.flush()

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata(metadata)
        assert self._scheduler is not None
        self._scheduler._pins.__class__ = CountedPins
        if os.environ.get("PENSTOCK_OFFERS_AGAIN"):
            self._scheduler.__class__ = ForgetfulScheduler

    def _make_worker(self, rank: Any, *, on_gpu: bool) -> WorkerConnector:
        working = super()._make_worker(rank, on_gpu=on_gpu)
        working.__class__ = TamperedWorker
        return working
