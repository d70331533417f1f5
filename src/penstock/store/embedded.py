"""A store process that an engine starts where nobody listens, under a supervisor of its own.

What starts it again is `penstock.supervisor.embedded`; here is what it runs, and what its exit
status says about its folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.logs import is_json, level_asked_for
from penstock.store.messages import FOLDER_FAILED
from penstock.supervisor.embedded import EmbeddedProcess
from penstock.supervisor.spec import ProcessSpec

if TYPE_CHECKING:
    from penstock.store.messages import StoreConfig
    from penstock.supervisor.messages import ProcessExited

MODULE = "penstock.store"
PROCESS = "store"
STARTING = "the store process is starting"
"""Why there is no store yet."""
STOP_S = 10.0
"""From SIGTERM to SIGKILL: longer than the tiers have to end what is in hand."""


class EmbeddedStore(EmbeddedProcess):
    """The store process of one engine. It belongs to one thread."""

    def __init__(self, config: StoreConfig, module: str) -> None:
        self._folder = Path(config.socket).parent
        config = msgspec.structs.replace(config, log_level=level_asked_for(), log_json=is_json())
        super().__init__(
            ProcessSpec(name=PROCESS, module=module, arguments=(config.to_json(),), stop_s=STOP_S)
        )

    def _why_ended(self, exited: ProcessExited) -> str:
        if exited.code is not None and exited.code > FOLDER_FAILED:
            problem = os.strerror(exited.code - FOLDER_FAILED)
            return f"folder {self._folder} cannot be used: {problem}"
        return super()._why_ended(exited)
