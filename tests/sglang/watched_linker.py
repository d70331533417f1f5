"""The linker with a hand in its works, and a file that shows what it counts.

The file that `PENSTOCK_TAMPER` names says what is done to loads from then on:

| word     | done                                                         | must be       |
|----------|--------------------------------------------------------------|---------------|
| `flip`   | a bit of the second page of a load is flipped in host memory | found         |
| `first`  | the same, of one load alone                                  | found         |
| `late`   | the same, behind the back of a `lookup` that has verified it | found         |
| `device` | a page on the device is zeroed after its load                | in the output |

Only the first rank does it: a page that is wrong on one is wrong. What that rank has counted so
far is in the file that `PENSTOCK_COUNTS` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.cache.operations import Purpose
from penstock.connectors.base.pages import SCRATCH_PAGE
from penstock.connectors.sglang.linker import PenstockLinker


class WatchedLinker(PenstockLinker):
    def __init__(self, *given: Any, **how: Any) -> None:
        self._totals: dict[str, Any] = {}
        super().__init__(*given, **how)
        self._report = None
        if self._tiers is not None and self._rank == 0:
            executor = self._tiers.offload._driver.links.executor
            submit = executor.submit

            def tampered(copy: Any) -> None:
                if copy.purpose is Purpose.LOAD:
                    tamper_host(executor.stores[1], copy)
                submit(copy)

            executor.submit = tampered

    def load(self, rid: str, transfers: Any) -> bool:
        good = super().load(rid, transfers)
        if word() == "device":
            (tokens,) = (each.device_indices for each in transfers)
            pool = self.pools[next(iter(self.pools))]
            for layer in (*pool.k_buffer, *pool.v_buffer):
                layer[tokens[-self._page_tokens :]] = 0
        return good

    def num_completed_offloads(self) -> int:
        count = super().num_completed_offloads()
        self._show()
        return count

    def _show(self) -> None:
        changes = self._counts.counters.take()
        if self._rank or not changes:
            return
        for name, value in changes.items():
            if isinstance(value, list):
                self._totals[name] = self._totals.get(name, 0) + len(value)
            elif name in {"disk_on", "disk_blocks", "host_slots", "host_slots_ready"}:
                self._totals[name] = value
            else:
                self._totals[name] = self._totals.get(name, 0) + value
        write_whole(Path(os.environ["PENSTOCK_COUNTS"]), json.dumps(self._totals))


def word() -> str:
    path = Path(os.environ["PENSTOCK_TAMPER"])
    return path.read_text() if path.exists() else ""


def tamper_host(host: Any, copy: Any) -> None:
    verifies = copy.target_slots.ravel().tolist() == [SCRATCH_PAGE]
    asked = word()
    if asked not in {"flip", "first", "late"} or (asked == "late" and verifies):
        return
    slots = copy.source_slots.ravel().tolist()
    if len(slots) < 2 and not verifies:
        return
    blocks = host.blocks([slots[-1 if verifies else 1]])
    (buffer,) = blocks.buffers.values()
    plane = blocks.layout.groups[0].layers[0].planes[0]
    buffer[plane.offset + blocks.numbers[0] * plane.block_stride + 5] ^= 1
    if asked == "first":
        write_whole(Path(os.environ["PENSTOCK_TAMPER"]), "")


def write_whole(path: Path, text: str) -> None:
    """Others read it at any time."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)
