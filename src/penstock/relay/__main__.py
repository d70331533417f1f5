"""The relay process: `python -m penstock.relay PATH`, PATH being the socket of its engine.

An engine's process starts it through its supervisor. SIGTERM ends it.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys

from penstock.errors import PenstockError
from penstock.logs import set_up_logs
from penstock.relay.agents import Nixl, has_rdma
from penstock.relay.server import Relay
from penstock.transport.waiting import SignalDescriptor

logger = logging.getLogger("penstock.relay")  # This module is `__main__`.

FAILED = 1


def main(path: str) -> int:
    """Serves until the engine or a signal ends it; returns the exit status."""
    fields = {"process": "relay", "pid": os.getpid()}
    set_up_logs("warning", as_json=False, fields=fields)
    os.dup2(2, 1)  # UCX reports to the standard output, which is the engine's.
    stop = SignalDescriptor([signal.SIGTERM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to the engine as well.
    try:
        nixl = Nixl()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(path)
            connection.settimeout(0)
            Relay(nixl, connection, stop.descriptor, rdma=has_rdma()).run()
    except PenstockError as error:
        logger.error("relay ends: cause=%s", error)  # noqa: TRY400 - the message says it all
        return FAILED
    except OSError as error:
        if error.errno not in {errno.ECONNREFUSED, errno.ENOENT}:
            raise
        return FAILED  # The engine is gone.
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    logging.shutdown()
    # Everything was closed. The destructors of the wheel's libraries would end with SIGSEGV.
    os._exit(status)
