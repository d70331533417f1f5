"""The supervisor's process: `python -m penstock.supervisor CHANNEL ENGINE`.

`Supervisor.start` runs it. CHANNEL is a descriptor of one end of the channel and ENGINE a pidfd
of the engine; both are inherited.
"""

from __future__ import annotations

import signal
import socket
import sys

from penstock.supervisor.descriptors import make_private
from penstock.supervisor.loop import IGNORED, SupervisorLoop

USAGE = "the supervisor is started by Supervisor.start(), with two descriptors: CHANNEL ENGINE"
WRONG_USE = 2


def main(arguments: list[str]) -> int:
    """Runs a supervisor until the engine ends or asks it to stop."""
    if len(arguments) != 2 or not all(map(str.isdecimal, arguments)):
        sys.stderr.write(f"{USAGE}\n")
        return WRONG_USE
    channel_fd, engine = map(int, arguments)
    make_private((channel_fd, engine))
    _set_signals()
    with socket.socket(fileno=channel_fd) as channel:
        channel.settimeout(0)
        SupervisorLoop(channel, engine).run()
    return 0


def _set_signals() -> None:
    """Resets SIGCHLD, which the engine may ignore, and ignores the signals that ask to stop.

    The engine gets those as well, and drains; it needs its processes until it is done.
    """
    # A process that ignores SIGCHLD cannot read how its children ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
