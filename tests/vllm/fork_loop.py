"""What a process does that has imported an engine and forks for every job.

It reads one job a line from its input, as JSON, and answers with two lines: the process id of the
fork, then its exit status. A job names a function, its arguments, its environment, and the file
that gets its output. The one rule: the process itself starts no thread and computes nothing,
because neither survives a fork.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def serve(jobs: Mapping[str, Callable[..., None]], *, threads_allowed: bool = False) -> None:
    """Forks for every line of the input until it ends."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1 or threads_allowed, f"{threads} threads: forks would miss them"
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            # It leaves the loop, so that it ends as any process does.
            take_job(line, jobs)
            return
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def take_job(line: str, jobs: Mapping[str, Callable[..., None]]) -> None:
    """In the fork: has the session, the environment and the output of a process of its own."""
    job: dict[str, Any] = json.loads(line)
    os.setsid()
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(job["environment"])
    # What `PYTHONPATH` would have done; engines look for plugins there.
    paths = [each for each in job["environment"].get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in paths if each not in sys.path]
    jobs[job["call"]](*job["arguments"])
