"""Everything Penstock raises on purpose, as one tree.

    PenstockError
    ├── AccessError            the caller: another thread, a forked process, or a call within a call
    ├── CapacityError          the world: not enough room now; retrying later may work
    │   └── NeverFitsError     the caller: more was asked for than there is; retrying never works
    ├── ConfigError            the caller: a setting is wrong (also a ValueError)
    ├── LeaseError             the caller: a lease was used after its end (also a ValueError)
    ├── PeerError              they: another process said what makes no sense here
    ├── UnavailableError       the world: this machine lacks something the call needs
    └── InvariantViolation     us: the cache's own books do not add up; carries the story

A message says what happened, with names and numbers. Bad arguments raise plain
`ValueError`. Nothing here is ever swallowed: a failed copy is no exception but an outcome
of its operation, and ends as a counted miss.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class PenstockError(Exception):
    """The root of all errors that Penstock raises on purpose.

    Errors can be sent to another process: they are made again with all that they carry.
    """

    def __reduce__(self) -> tuple[Callable[..., PenstockError], tuple[object, ...]]:
        # By default the constructor would be called with the message alone.
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(
    kind: type[PenstockError], arguments: tuple[object, ...], fields: dict[str, object]
) -> PenstockError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class AccessError(PenstockError, RuntimeError):
    """A call came from where none may come from; nothing was changed."""


class CapacityError(PenstockError):
    """A tier has fewer slots to give than were asked for; nothing was changed."""

    never = False
    """Whether it will be so for ever: see `NeverFitsError`."""

    def __init__(self, *, tier: str, wanted: int, available: int) -> None:
        super().__init__(self._describe(tier, wanted, available))
        self.tier = tier
        self.wanted = wanted
        self.available = available

    def _describe(self, tier: str, wanted: int, available: int) -> str:
        return f"tier {tier!r} can give {counted(available, 'slot')}, wanted: {wanted}"


class NeverFitsError(CapacityError):
    """More was asked for than a tier could ever give: do not try again.

    `wanted` is all that the request needs, `available` the most that one request can have.
    """

    never = True

    def _describe(self, tier: str, wanted: int, available: int) -> str:
        slots = counted(wanted, "slot")
        return f"tier {tier!r} can never give {slots}: a request can have at most {available}"


class ConfigError(PenstockError, ValueError):
    """A setting is wrong; `field` names it.

    A file with several wrong settings is refused by one error: `further` has the others, and the
    message has a line for each.
    """

    def __init__(self, field: str, problem: str, *, further: Sequence[ConfigError] = ()) -> None:
        super().__init__("\n".join((f"{field}: {problem}", *map(str, further))))
        self.field = field
        self.problem = problem
        self.further = tuple(further)


class LeaseError(PenstockError, ValueError):
    """A lease was used in a state that does not allow it; nothing was changed."""


class PeerError(PenstockError):
    """Another process said something that makes no sense here; nothing was changed."""


class UnavailableError(PenstockError):
    """This machine or installation lacks what the call needs."""


class InvariantViolation(PenstockError):  # noqa: N818 - a defect of ours, not an error of yours
    """The cache's own books do not add up: a defect of Penstock, never of the caller.

    `story` tells what last happened to the block concerned, or lately if no block is; `node`
    is that block's number in the index.
    """

    def __init__(
        self, problem: str, *, story: tuple[str, ...] = (), node: int | None = None
    ) -> None:
        super().__init__("\n  ".join((problem, *story)))
        self.problem = problem
        self.story = story
        self.node = node


INSTALL = 'pip install ".[{extras}]" in a clone of the repository'
"""Every message that asks for an extra has this: a release changes it here alone."""


SERVER_INSTALL = 'pip install ".[cli]" "./server{extras}" in a clone of the repository'
"""The same for the wheel `penstock-serve`."""


def install_hint(extras: str) -> str:
    """How to install extras of Penstock, as messages say it."""
    return INSTALL.format(extras=extras)


def server_install_hint(extras: str = "") -> str:
    """How to install the server, with some of its extras."""
    return SERVER_INSTALL.format(extras=f"[{extras}]" if extras else "")


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 block, 2 blocks."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


SHOWN_CHARACTERS = 120


def shown(value: object) -> str:
    """A wrong value as a message quotes it: in JSON's spelling, and cut short where it is long."""
    if isinstance(value, str | list):
        value = value[: SHOWN_CHARACTERS + 1]
    elif isinstance(value, int) and value.bit_length() > SHOWN_CHARACTERS:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
