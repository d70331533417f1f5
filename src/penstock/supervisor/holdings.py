"""Descriptors that are kept by name, so that what they stand for outlives who made it.

The engine has descriptors held; a process has descriptors kept for its own next life, under names
that no other process and not the engine can say.

The one rule: a descriptor that some process is to be started with stays. Its restart must not
fail for want of an arena.
"""

from __future__ import annotations

import os

from penstock.supervisor.refusing import RefusedError

HELD_MAX = 256
"""A quarter of the 1,024 that a process may have open by default; eight arenas a rank of 32."""


class Holdings:
    """Descriptors by name. It owns them."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def hold(self, name: str, fd: int) -> None:
        """Keeps a descriptor; it is the caller's still if this is refused."""
        if name in self._descriptors:
            raise RefusedError(f"name is {name!r}, which is held already: forget it first")
        if len(self._descriptors) >= HELD_MAX:
            raise RefusedError(
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
        """What a process had kept, by the names that it gave; they stay ours."""
        prefix = f"{process}/"
        return {
            name.removeprefix(prefix): fd
            for name, fd in self._descriptors.items()
            if name.startswith(prefix)
        }

    def forget_kept_by(self, process: str) -> None:
        """Closes what a process had kept: it has no next life."""
        for name in self.kept_by(process):
            self.forget(f"{process}/{name}")

    def fetch(self, name: str) -> int:
        """The descriptor of a name; it stays ours."""
        try:
            return self._descriptors[name]
        except KeyError:
            known = ", ".join(sorted(self._descriptors)) or "none"
            problem = f"descriptor {name!r} is not held, must be one of: {known}"
            raise RefusedError(problem) from None

    def forget(self, name: str) -> None:
        """Closes a descriptor."""
        os.close(self.fetch(name))
        del self._descriptors[name]

    def close(self) -> None:
        """Closes them all."""
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()
