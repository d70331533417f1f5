"""The connector, telling in which order vLLM calls a worker's half.

A step is printed when no step before it was like it: `STEP`, then the names of the calls. Layers
are many, and all alike: what is called for each of them is printed once.
"""

from __future__ import annotations

import sys
from typing import Any

from penstock.connectors.vllm.adapter import PenstockConnector

CALLS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
OF_A_LAYER = {"wait_for_layer_load", "save_kv_layer"}
FIRST, LAST = CALLS[0], CALLS[-1]


class RecordedConnector(PenstockConnector):
    def note(self, name: str) -> None:
        if name == FIRST:
            self.__dict__["calls"] = []
        calls = self.__dict__.setdefault("calls", [])
        if name not in OF_A_LAYER or name not in calls:
            calls.append(name)

    def tell(self) -> None:
        calls = tuple(self.__dict__.pop("calls"))
        told = self.__dict__.setdefault("told", set())
        if calls not in told:
            told.add(calls)
            sys.stdout.write(f"STEP {' '.join(calls)}\n")
            sys.stdout.flush()


def noting(name: str) -> Any:
    def call(self: RecordedConnector, *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        found = getattr(super(RecordedConnector, self), name)(*args, **kwargs)
        if name == LAST:
            self.tell()
        return found

    return call


for each in CALLS:
    setattr(RecordedConnector, each, noting(each))
