"""File descriptors: those the supervisor holds by name, and those a process inherits.

    arena = Arena.attach(inherited_descriptor("arena-0"))        # in a supervised process

The engine has descriptors held under names of its choice; a process has descriptors kept for its
next life, under names that no other process and not the engine can use. A process that was
restarted finds the same arena under the same name.

The one rule: a descriptor that some process is started with stays open. Its restart must not
fail because an arena is missing.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from penstock.supervisor.messages import RequestRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HELD_MAX = 256
"""A quarter of the 1,024 that a process may have open by default; eight arenas a rank of 32."""


class HeldDescriptors:
    """The descriptors that a supervisor holds, by name. It owns them."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def hold(self, name: str, fd: int) -> None:
        """Takes a descriptor over; the caller still owns it if this is refused."""
        if name in self._descriptors:
            raise RequestRefusedError(f"name is {name!r}, which is held already: forget it first")
        if len(self._descriptors) >= HELD_MAX:
            raise RequestRefusedError(
                f"name is {name!r}, but {HELD_MAX} descriptors are held, which is the most",
                blame="world",
            )
        self._descriptors[name] = fd

    def keep(self, process: str, name: str, fd: int) -> None:
        """Keeps a process's own descriptor, in place of the one of that name, if there is one."""
        owned = f"{process}/{name}"
        if owned in self._descriptors:
            self.forget(owned)
        self.hold(owned, fd)

    def kept_by(self, process: str) -> dict[str, int]:
        """What a process had kept, by the names that it gave; this table still owns them."""
        prefix = f"{process}/"
        return {
            name.removeprefix(prefix): fd
            for name, fd in self._descriptors.items()
            if name.startswith(prefix)
        }

    def forget_kept_by(self, process: str) -> None:
        """Closes what a process had kept, once it is not started again."""
        for name in self.kept_by(process):
            self.forget(f"{process}/{name}")

    def fetch(self, name: str) -> int:
        """The descriptor of a name; this table still owns it."""
        try:
            return self._descriptors[name]
        except KeyError:
            known = ", ".join(sorted(self._descriptors)) or "none"
            problem = f"descriptor {name!r} is not held, must be one of: {known}"
            raise RequestRefusedError(problem) from None

    def forget(self, name: str) -> None:
        os.close(self.fetch(name))
        del self._descriptors[name]

    def close(self) -> None:
        close_all(self._descriptors.values())
        self._descriptors.clear()


# Those that a process inherits, by the names its command line gives them.

_inherited: dict[str, int] = {}


def inherited_descriptor(name: str) -> int:
    """A descriptor that this process was started with; it belongs to this process.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _inherited:
        known = ", ".join(sorted(_inherited)) or "none"
        raise ValueError(
            f"name is {name!r}, must be one of the descriptors this process was started with: "
            f"{known}"
        )
    return _inherited[name]


def inherit_listed(listed: str) -> None:
    """Makes the descriptors of a list available to `inherited_descriptor`."""
    _inherited.update(read_listed(listed))


def list_descriptors(descriptors: Mapping[str, int]) -> str:
    """Descriptors as a command line lists them: `name=number,…`."""
    return ",".join(f"{name}={fd}" for name, fd in descriptors.items())


def read_listed(listed: str) -> dict[str, int]:
    """The descriptors of such a list; programs that this process starts do not inherit them."""
    found: dict[str, int] = {}
    for item in filter(None, listed.split(",")):
        name, _, number = item.partition("=")
        found[name] = int(number)
    make_private(found.values())
    return found


def make_inheritable(descriptors: Iterable[int]) -> None:
    """Lets the next program that this process starts inherit them."""
    for fd in descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFD, 0)


def make_private(descriptors: Iterable[int]) -> None:
    """Keeps the programs that this process starts from inheriting them."""
    for fd in descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def close_all(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
