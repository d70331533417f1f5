"""The connector with a hand in its works, to show what is found and what the tests would notice.

The file that `PENSTOCK_TAMPER` names says what is done to every load from then on:

| word       | done to the second block of each load                     | must be        |
|------------|-----------------------------------------------------------|----------------|
| `flip`     | a bit of it is flipped in host memory                      | found          |
| `zero`     | its bytes in host memory are zeroed                        | found          |
| `exchange` | its bytes and sums are exchanged with another block's      | found          |
| `stale`    | it holds the bytes and the sums of another block           | found          |
| `sums`     | a sum of it is changed                                     | found          |
| `device`   | its bytes on the device are zeroed after the load          | in the output  |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.ledger import Purpose
from penstock.connectors.vllm.adapter import PenstockConnector
from penstock.connectors.vllm.working import Working
from penstock.runtime.plans import decode_plan

if TYPE_CHECKING:
    from penstock.connectors.vllm.messages import StepPlan


class TamperedWorking(Working):
    def after_forward(self, told: StepPlan | None) -> None:
        path = Path(os.environ["PENSTOCK_TAMPER"])
        word = path.read_text() if path.exists() else ""
        plan = told.plan if told is not None else None
        copies = decode_plan(plan).copies if word and plan is not None else []
        loads = [copy for copy in copies if copy.purpose is Purpose.LOAD and len(copy.keys) > 2]
        device, host = self._rank.carrier.stores
        for load in loads:
            if word != "device" and self._rank.facts.rank == 0:
                tamper(host, word, *load.source_slots.tolist()[1:3])
        super().after_forward(told)
        for load in loads:
            if word == "device":
                for group, slots in enumerate(load.target_slots.tolist()):
                    zero_on_device(device, group, slots)


def tamper(host: Any, word: str, slot: int, other: int) -> None:
    one, two = rows_of(host, slot), rows_of(host, other)
    slots = np.array([slot, other], dtype=np.int32)
    sums = host.sums(slots).copy()
    if word == "flip":
        one[5] ^= 1
    elif word == "zero":
        one[:] = 0
    elif word == "exchange":
        kept = one.copy()
        one[:], two[:] = two, kept
        host.keep_sums(slots, sums[::-1])
    elif word == "stale":
        one[:] = two
        host.keep_sums(slots[:1], sums[1:])
    elif word == "sums":
        sums[0, 0] ^= np.uint64(1)
        host.keep_sums(slots, sums)
    else:
        raise ValueError(word)


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
    blocks = device.blocks([slot])
    for layer in blocks.layout.groups[group].layers:
        for plane in layer.planes:
            start = plane.offset + slot * plane.block_stride
            blocks.buffers[plane.buffer][start : start + plane.segment_bytes] = 0


class TamperedConnector(PenstockConnector):
    def _make_working(self, rank: Any, *, on_gpu: bool) -> Working:
        working = super()._make_working(rank, on_gpu=on_gpu)
        working.__class__ = TamperedWorking
        return working
