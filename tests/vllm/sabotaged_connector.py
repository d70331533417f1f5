"""The proof connector with a hand in its works, to show that the proof would notice.

The file `PENSTOCK_TAMPER` says `flip`: a byte of each loaded block is flipped in host memory before
the load, which must be found; or `zero`: a block is zeroed on the device after the load, which
nobody can find, and which must spoil the output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from proof_connector import ProofConnector, Working

from penstock.cache.operations import Purpose
from penstock.runtime.messages import decode_plan


class SabotagedWorking(Working):
    def step(self, plan: bytes | None) -> None:
        copies = decode_plan(plan).copies if plan is not None else []
        loads = [copy for copy in copies if copy.purpose is Purpose.LOAD]
        device, host = self.rank.executor.stores
        word = Path(os.environ["PENSTOCK_TAMPER"])
        asked = word.read_text() if word.exists() else ""
        if asked == "flip":
            for load in loads:
                self._touch(host, load.source_slots.tolist()[2:3], lambda old: old ^ 1)
        super().step(plan)
        if asked == "zero":
            for load in loads:
                self._touch(device, load.target_slots[0].tolist()[2:3], lambda old: old * 0)

    def _touch(self, store: Any, slots: list[int], change: Any) -> None:
        for slot in slots:
            blocks = store.blocks([slot])
            for plane in (
                p for group in blocks.layout.groups for layer in group.layers for p in layer.planes
            ):
                start = plane.offset + slot * plane.block_stride
                part = blocks.buffers[plane.buffer][start : start + 4096]
                part[:] = change(part)


class SabotagedConnector(ProofConnector):
    working_kind = SabotagedWorking
