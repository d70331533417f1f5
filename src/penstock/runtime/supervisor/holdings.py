"""Descriptors that are kept by name, so that what they stand for outlives who made it.

The one rule: a descriptor that some process is to be started with stays. Its restart must not
fail for want of an arena.
"""

from __future__ import annotations

import os

from penstock.runtime.supervisor.refusing import RefusedError

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
