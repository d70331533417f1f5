"""An engine that forks: what its fork hears from the supervisor, and what is left to the engine."""

from __future__ import annotations

import os

from penstock.supervisor.client import Supervisor

with Supervisor.start() as supervisor:
    supervisor.hold("output", 1)
    if os.fork() == 0:
        for call in (supervisor.events, lambda: supervisor.fetch("output")):
            try:
                call()
            except ValueError as error:
                os.write(1, f"{error}\n".encode())
        supervisor.close()
        os._exit(0)
    _, status = os.wait()
    os.write(1, f"the fork ended: {status}\n".encode())
    os.close(supervisor.fetch("output"))
    os.write(1, f"the engine's is {supervisor.lost or 'well'}\n".encode())
