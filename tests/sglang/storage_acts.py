"""What the tests of storage have engines do between requests, see `engine_run.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from penstock.store.disk.inspect import inspect_folder

SOON_S = 240.0


def wait_until_stored(_engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """Waits until so many `pages` are on a `disk`: HiCache writes them after it has answered."""
    deadline = time.monotonic() + SOON_S
    while (count := live_on(act["disk"])) < act["pages"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"pages": count}


def live_on(disk: str) -> int:
    """The pages that are on a disk now; it may be written meanwhile."""
    return sum(each.live for each in inspect_folder(Path(disk)).report.spaces)


def clear(engine: Any, _act: dict[str, Any]) -> dict[str, Any]:
    """SGLang has its storage forget all pages."""
    manager = engine.tokenizer_manager
    return {"cleared": engine.loop.run_until_complete(manager.clear_hicache_storage()).success}


ACTS = {each.__name__: each for each in (wait_until_stored, clear)}
