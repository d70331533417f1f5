"""An engine for the tests of its death: it has a supervisor, an arena and two processes.

    python -m engine LINE NAME [fork]

It says on LINE which processes there are, and waits to be killed. With `fork`, somebody else has
copies of all its descriptors.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import OnFailure, ProcessSpec
from penstock.tiers.arena import Arena


def main(line: int, name: str, *how: str) -> None:
    supervisor = Supervisor.start()
    arena = Arena.create(1 << 20, name=name, huge_pages=False)
    supervisor.hold("arena", arena.fd)
    supervisor.hold("line", line)
    pids = [
        supervisor.start_process(
            ProcessSpec(
                name=task.replace("_", "-"),
                module="supervised",
                arguments=(task, task),
                descriptors=("line", "arena"),
                restart=OnFailure(),
                stop_s=0.3,
            )
        )
        for task in ("run", "ignore_sigterm")
    ]
    forked = os.fork() if "fork" in how else None
    if forked == 0:
        signal.pause()
    pids += [forked] if forked else []
    socket.socket(fileno=line).send(" ".join(map(str, ["pids", supervisor.pid, *pids])).encode())
    signal.pause()


main(int(sys.argv[1]), *sys.argv[2:])
