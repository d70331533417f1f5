"""A process for the tests of the supervisor: it does one thing, and says what on its line.

python -m supervised TASK ARGUMENT…
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from penstock.errors import UnavailableError
from penstock.supervisor.descriptors import inherited_descriptor
from penstock.supervisor.descriptors import keeper as find_keeper

LINE = socket.socket(fileno=inherited_descriptor("line"))


def say(*words: object) -> None:
    LINE.send(" ".join(map(str, words)).encode())


def run(name: str) -> None:
    say(name, "runs", os.getpid())
    while True:
        signal.pause()


def ignore_sigterm(name: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run(name)


def stop_politely(name: str) -> None:
    """Says when it is asked to end, and when it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    say(name, "runs", os.getpid())
    signal.sigwait({signal.SIGTERM})
    say(name, "stops")
    say(name, "ends")


def kill_supervisor_on_sigterm(name: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGKILL))
    run(name)


def leave_group(name: str) -> None:
    os.setpgid(0, os.getpgid(os.getppid()))
    ignore_sigterm(name)


def fail(name: str) -> None:
    say(name, "fails")
    sys.exit(3)


def succeed(name: str) -> None:
    say(name, "succeeds")


def count_in_arena(crashes: str) -> None:
    """Adds one to what earlier lives counted in the arena; all but the last of them crash."""
    from penstock.tiers.arena import Arena  # noqa: PLC0415  (the others shall start quickly)

    arena = Arena.attach(inherited_descriptor("arena"))
    found = int(arena.bytes[0])
    arena.bytes[0] = found + 1
    say("found", found)
    if found < int(crashes):
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def keep_an_arena(crashes: str) -> None:
    """Makes an arena in its first life, and counts its lives there; all but the last crash."""
    from penstock.tiers.arena import Arena  # noqa: PLC0415  (the others shall start quickly)

    keeper = find_keeper()
    assert keeper is not None
    fd = keeper.kept("arena")
    arena = Arena.create(4096, huge_pages=False) if fd is None else Arena.attach(fd)
    if fd is None:
        keeper.keep("arena", arena.fd)
    found = int(arena.bytes[0])
    arena.bytes[0] = found + 1
    say("found", found, os.fstat(arena.fd).st_ino)
    if found < int(crashes):
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def keep_too_much(name: str) -> None:
    """Keeps its line under more and more names, until it is told that this is enough."""
    keeper = find_keeper()
    assert keeper is not None
    try:
        for number in range(10_000):
            keeper.keep(f"line-{number}", LINE.fileno())
    except UnavailableError as error:
        say(name, "kept", number, "then", error)
    keeper.keep("line-0", LINE.fileno())  # In place of the first: that needs no room.
    say(name, "kept one anew")


def keep_without_asking(name: str) -> None:
    say(name, "has a keeper" if find_keeper() else "has none")


def leave_somebody_behind(name: str) -> None:
    left = os.fork()
    if left:
        say(name, "left", left)
        sys.exit(0)
    signal.pause()


def look_around(name: str) -> None:
    say(
        json.dumps(
            {
                "name": name,
                "arguments": sys.argv[1:],
                "group": os.getpgid(0) == os.getpid(),
                "descriptors": sorted(os.listdir("/proc/self/fd"), key=int),
                "line": LINE.fileno(),
                "inherited": [fd for fd in (0, 1, 2, LINE.fileno()) if os.get_inheritable(fd)],
                "variable": os.environ.get("SUPERVISED"),
                "stdin": os.readlink("/proc/self/fd/0"),
                "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
                "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "path": sys.path[0],
            }
        )
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
