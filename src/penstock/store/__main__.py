"""The store process: `python -m penstock.store CONFIG`, CONFIG being a `StoreConfig` as JSON.

An engine starts it through its supervisor. SIGTERM ends it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.logs import set_up_logs
from penstock.store.process.messages import FOLDER_FAILED, StoreConfig
from penstock.store.process.server import serve_store
from penstock.store.process.tier_slots import TIER_KINDS
from penstock.transport.waiting import SignalDescriptor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.process.tier_slots import OpenTier

logger = logging.getLogger("penstock.store")  # This module is `__main__`.

FAILED = 1


def main(arguments: list[str], kinds: Mapping[str, OpenTier] = TIER_KINDS) -> int:
    """Serves until SIGTERM; returns the exit status."""
    process = {"process": "store", "pid": os.getpid()}
    set_up_logs("warning", as_json=False, fields=process)
    try:
        if len(arguments) != 1:
            raise ConfigMissingError(len(arguments))
        config = StoreConfig.from_json(arguments[0])
        set_up_logs(config.log_level, as_json=config.log_json, fields=process | _names_of(config))
        # To the end of the process: a second signal does not end it before it has closed all.
        stop = SignalDescriptor([signal.SIGTERM])
        return serve_store(config, stop=stop.descriptor, kinds=kinds)
    except PenstockError as error:
        logger.error("store ends: cause=%s", error)  # noqa: TRY400 - the message says it all
        cause = error.__cause__
        return FOLDER_FAILED + (cause.errno or 0) if isinstance(cause, OSError) else FAILED


def _names_of(config: StoreConfig) -> dict[str, str]:
    """Which store it is. Options are not named: they may hold passwords."""
    named = {"tier": ",".join(tier.name for tier in config.tiers)}
    folders = ",".join(tier.folder for tier in config.tiers if tier.folder)
    return named | ({"folder": folders} if folders else {})


class ConfigMissingError(PenstockError):
    """The command line is not one configuration."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} arguments were given, must be one: a configuration as JSON")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
