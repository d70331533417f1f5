"""The descriptors that the supervisor handed to this process, by name.

    arena = Arena.attach(inherited.descriptor("arena-0"))

A process that was restarted finds the same arena under the same name.
"""

from __future__ import annotations

from penstock.supervisor.descriptors import make_private

_descriptors: dict[str, int] = {}


def descriptor(name: str) -> int:
    """A descriptor that this process was started with; it is this process's own.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _descriptors:
        known = ", ".join(sorted(_descriptors)) or "none"
        raise ValueError(
            f"name is {name!r}, must be one of the descriptors this process was started with: "
            f"{known}"
        )
    return _descriptors[name]


def take_over(listed: str) -> None:
    """Takes over what the command line lists."""
    _descriptors.update(read_listed(listed))


def read_listed(listed: str) -> dict[str, int]:
    """Descriptors that a command line lists, as `name=number,…`."""
    found: dict[str, int] = {}
    for item in filter(None, listed.split(",")):
        name, _, number = item.partition("=")
        found[name] = int(number)
    # Ours, and not to be found by accident in programs that this one starts.
    make_private(found.values())
    return found
