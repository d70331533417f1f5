"""Engines in processes of their own: every wait has an end, and nothing of them is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

ENGINE_S = 480
"""An engine that is not done by then hangs."""
END_S = 120
"""What an engine has started and has not ended by then stays."""


def run_to_the_end(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Runs a command with all that it starts: nothing of it is left behind."""
    engine = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whatever the engine starts is in its session.
        start_new_session=True,
    )
    try:
        printed, _ = engine.communicate(timeout=ENGINE_S)
        left = [pid for pid in session_of(engine.pid) if not ends(pid)]
        assert not left, printed[-6000:]
    finally:
        for pid in session_of(engine.pid):
            os.kill(pid, signal.SIGKILL)
    return engine.returncode, printed


def session_of(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (folder / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # After the name: state, parent, group, session. A zombie has ended.
        state, _, _, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(folder.name))
    return found


def ends(pid: int) -> bool:
    """Whether a process ends by itself."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([watched], [], [], END_S)
    os.close(watched)
    return bool(ended)
