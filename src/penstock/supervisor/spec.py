"""The description of a supervised process: its module, its descriptors, its restarts.

A spec checks itself on both sides of the channel: the engine gets the error where it builds the
spec, and the supervisor does not rely on the engine.
"""

from __future__ import annotations

import re

import msgspec

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

MODULE_CHARACTERS_MAX = 256
ARGUMENTS_MAX = 256
ENVIRONMENT_MAX = 256
PASSED_MAX = 64
"""Descriptors of one process: an arena a rank of a large machine, and some channels."""

READY_S = 30.0
"""From its start until a process reports that it runs: an interpreter may start slowly."""
SECONDS_MAX = 3600.0
RESTARTS_MAX = 1000


class Never(msgspec.Struct, frozen=True, kw_only=True, tag="never", forbid_unknown_fields=True):
    """A process that has ended is not restarted."""


class OnFailure(
    msgspec.Struct, frozen=True, kw_only=True, tag="on_failure", forbid_unknown_fields=True
):
    """A process that did not end with status 0 is restarted, up to a limit."""

    limit: int = 5
    """The most restarts within the window; the next failure is final."""
    window_s: float = 60.0
    delay_s: float = 0.1
    """Before the first restart; doubled for every further one within the window."""
    delay_max_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= RESTARTS_MAX:
            raise ValueError(f"limit is {self.limit}, must be between 1 and {RESTARTS_MAX}")
        if not 0 < self.window_s <= SECONDS_MAX:
            raise ValueError(f"window_s is {self.window_s}, must be in (0, {SECONDS_MAX:g}]")
        if not 0 <= self.delay_s <= self.delay_max_s <= SECONDS_MAX:
            raise ValueError(
                f"need 0 <= delay_s <= delay_max_s <= {SECONDS_MAX:g}, "
                f"got {self.delay_s} and {self.delay_max_s}"
            )


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that the supervisor is to start."""

    name: str
    """Unique among the processes of one supervisor."""
    module: str
    """The module that the engine's interpreter runs with `-m`."""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Added to the environment that the engine had when it started the supervisor."""
    descriptors: tuple[str, ...] = ()
    """Names of held descriptors; the process gets them with `inherited_descriptor`."""
    keeps: bool = False
    """Whether it may have descriptors kept for its next life, with `keeper.keeper`."""
    restart: Never | OnFailure = Never()
    stop_s: float = 5.0
    """From SIGTERM to SIGKILL, when it is stopped."""

    def __post_init__(self) -> None:
        require_name(self.name, "name")
        _require_module(self.module)
        _require_texts(self.arguments)
        _require_environment(self.environment)
        _require_descriptors(self.descriptors)
        require_stop_s(self.stop_s)


def require_name(name: str, field: str) -> None:
    """Refuses what is not a name of a process or of a descriptor."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{field} is {_short(name)}, must be 1 to 64 of a-z, 0-9, '.', '_', '-', "
            "and begin with a letter or digit"
        )


def require_stop_s(stop_s: float) -> None:
    """Refuses a time that no process may have between SIGTERM and SIGKILL."""
    if not 0 <= stop_s <= SECONDS_MAX:
        raise ValueError(f"stop_s is {stop_s}, must be in [0, {SECONDS_MAX:g}]")


def _require_module(module: str) -> None:
    if len(module) > MODULE_CHARACTERS_MAX or not _MODULE.fullmatch(module):
        raise ValueError(f"module is {_short(module)}, must be a dotted name as in `import a.b`")


def _require_texts(arguments: tuple[str, ...]) -> None:
    if len(arguments) > ARGUMENTS_MAX:
        raise ValueError(f"arguments are {len(arguments)}, must be at most {ARGUMENTS_MAX}")
    for number, argument in enumerate(arguments):
        if not _is_text(argument):
            raise ValueError(
                f"arguments[{number}] is {_short(argument)}, must be UTF-8 without NUL"
            )


def _require_environment(environment: tuple[tuple[str, str], ...]) -> None:
    if len(environment) > ENVIRONMENT_MAX:
        raise ValueError(f"environment has {len(environment)}, must have at most {ENVIRONMENT_MAX}")
    for variable, value in environment:
        if not variable or "=" in variable or not _is_text(variable):
            raise ValueError(
                f"environment has the name {_short(variable)}, must be UTF-8 without '=' and NUL"
            )
        if not _is_text(value):
            raise ValueError(
                f"environment[{variable!r}] is {_short(value)}, must be UTF-8 without NUL"
            )


def _require_descriptors(descriptors: tuple[str, ...]) -> None:
    if len(descriptors) > PASSED_MAX:
        raise ValueError(f"descriptors are {len(descriptors)}, must be at most {PASSED_MAX}")
    for name in descriptors:
        require_name(name, "descriptors")
    if len({*descriptors}) < len(descriptors):
        raise ValueError(f"descriptors are {descriptors}, must be different")


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # A lone surrogate: how Python keeps bytes that are not UTF-8.
        return False


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}… ({len(text)} characters)"
