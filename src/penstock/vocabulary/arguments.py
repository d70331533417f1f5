"""Checks of what callers hand in, made before anything is touched.

| function     | returns                                                            |
|--------------|--------------------------------------------------------------------|
| `as_int`     | an `int` within bounds; whatever has `__index__` counts, no `bool` |
| `as_seconds` | a finite number of seconds as `float`                              |
| `as_time`    | a time on a clock as `float`, not from before the clock's user     |
| `as_flag`    | a `bool`                                                           |
| `as_text`    | a `str` that UTF-8 can hold, of bounded length                     |
| `as_keys`    | keys of blocks as a list or tuple; `as_key`: one                   |
| `as_bytes`   | a message                                                          |

`require_methods` refuses objects that lack what will be called of them.

Each raises `ValueError` with the name of the argument, its value, and what would be right.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

INT_MAX = 2**63 - 1
TEXT_MAX = 4096
"""Characters of a name or a reason: it is kept in stories and travels to every rank."""
FD_MAX = 2**31 - 1
MEMBERS_MAX = 2**24
"""Of a list that is gone through one by one: more blocks than a sequence has. A `range` can be
longer than all memory."""
PAST_S = 60.0
"""How much older than the cache a deadline may be. An older one is not from its clock."""


def as_int(name: str, value: object, low: int = 0, high: int = INT_MAX) -> int:
    """A whole number from `low` to `high`."""
    number = value if type(value) is int else _index(name, value, low, high)
    if low <= number <= high:
        return number
    # A value that is too large shows that the upper bound matters, even if it is the default.
    bounds = f"from {low} to {high}" if number > high else _bounds(low, high)
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be an int {bounds}")


def _index(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, bool | np.bool_):
        try:
            return int(operator.index(value))  # type: ignore[arg-type]
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            pass  # A tensor without memory, for example, has no number to give.
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be an int {_bounds(low, high)}")


def _bounds(low: int, high: int) -> str:
    return f"of at least {low}" if high == INT_MAX else f"from {low} to {high}"


def as_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """A finite number of seconds above 0, or of at least 0."""
    seconds = as_float(value)
    if seconds is not None and math.isfinite(seconds) and (seconds > 0 or (zero and seconds == 0)):
        return seconds
    least = "of at least 0" if zero else "above 0"
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be a number of seconds {least}")


def as_time(name: str, value: object, *, opened_at: float, now: float) -> float:
    """A time on the clock of whoever was opened at `opened_at`; it may have passed by `now`."""
    time = as_float(value)
    if time is None or math.isnan(time):
        raise ValueError(
            f"{name} is {reprlib.repr(value)}, must be a time on the monotonic clock, such as "
            "time.monotonic() + 5"
        )
    if time < opened_at - PAST_S:
        raise ValueError(
            f"{name} is {time:g}, which is {now - time:.0f} s in the past, before this was opened; "
            "must be a time on the monotonic clock, such as time.monotonic() + 5, not a number of "
            "seconds"
        )
    return time


def as_float(value: object) -> float | None:
    """A real number as `float`, perhaps infinite; `None` for what is no number, or a `bool`."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]


def as_flag(name: str, value: object) -> bool:
    if type(value) is bool:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be True or False")


def as_text(name: str, value: object) -> str:
    """Text that can be kept and sent."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}, must be a str")  # noqa: TRY004
    if len(value) > TEXT_MAX:
        raise ValueError(
            f"{name} is {reprlib.repr(value)} of {len(value)} characters, must have at most "
            f"{TEXT_MAX}"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            raise ValueError(
                f"{name} is {reprlib.repr(value)}, which has no UTF-8 encoding: {problem.reason}"
            ) from None
    return value


def as_keys(keys: object, *, start: int = 0) -> Sequence[bytes]:
    """Keys of blocks, from `start` on looked at one by one, as a list or tuple."""
    if type(keys) is not list and type(keys) is not tuple:
        if isinstance(keys, str | bytes | bytearray) or not isinstance(keys, Sequence):
            raise ValueError(
                f"keys is {reprlib.repr(keys)}, must be a sequence of keys of {KEY_BYTES} bytes"
            )
        keys = as_tuple("keys", keys)
    looked_at = keys[start:] if start else keys
    # Sets of types and lengths are made without a step of Python's for each key.
    if not set(map(type, looked_at)) <= {bytes} or not set(map(len, looked_at)) <= {KEY_BYTES}:
        position, key = next(
            (position, key)
            for position, key in enumerate(looked_at, start=start)
            if type(key) is not bytes or len(key) != KEY_BYTES
        )
        raise ValueError(f"keys[{position}] is {reprlib.repr(key)}, must be {KEY_BYTES} bytes")
    return keys


def as_key(name: str, value: object) -> bytes:
    if type(value) is bytes and len(value) == KEY_BYTES:
        return value
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be a key of {KEY_BYTES} bytes")


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """Some things, whatever they are, but not so many that they fill the memory."""
    if not isinstance(value, str | bytes | bytearray):
        try:
            count = len(value) if hasattr(value, "__len__") else 0
            if count <= MEMBERS_MAX:
                return tuple(value)  # type: ignore[arg-type]
        except OverflowError:
            count = INT_MAX
        except TypeError:
            count = 0
        if count:
            raise ValueError(f"{name} has {count} members, must have at most {MEMBERS_MAX}")
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be a sequence")


def as_bytes(name: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValueError(f"{name} is {reprlib.repr(value)}, must be bytes")


def as_array(name: str, value: object) -> NDArray[Any]:
    """Integers as an array, of whatever shape; without any, of whatever type."""
    if isinstance(value, range):
        value = as_tuple(name, value)
    try:
        given = np.asarray(value)
    except (TypeError, RuntimeError, ValueError) as problem:
        # Lists of unequal length, and tensors that lie on a device.
        raise ValueError(
            f"{name} is {reprlib.repr(value)}, must be an array of integers: {problem}"
        ) from None
    if given.dtype.kind in "iu" or (not given.size and given.dtype.kind == "f"):
        return given
    raise ValueError(f"{name} are {given.dtype}, must be integers; got {reprlib.repr(value)}")


def as_descriptors(name: str, value: object) -> tuple[int, ...]:
    if value == () and type(value) is tuple:
        return ()
    found = as_tuple(name, value)
    return tuple(as_int(f"{name}[{index}]", each, 0, FD_MAX) for index, each in enumerate(found))


def require_type(name: str, value: object, kind: type) -> None:
    """Refuses what is not of a class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {reprlib.repr(value)}, must be of class {kind.__name__}")  # noqa: TRY004


def set_ints(owner: object, *numbers: tuple[str, str, int, int]) -> None:
    """Replaces fields of a frozen dataclass by plain ints: name, what it is, low and high."""
    for field, name, low, high in numbers:
        object.__setattr__(owner, field, as_int(name, getattr(owner, field), low, high))


def require_methods(name: str, value: object, kind: str, *methods: str) -> None:
    """Refuses what cannot stand for something of a kind, since it lacks what will be called."""
    if isinstance(value, type) or not all(
        callable(getattr(value, method, None)) for method in methods
    ):
        raise ValueError(f"{name} is {reprlib.repr(value)}, must be a {kind}")


def as_waitables(name: str, value: object) -> tuple[Any, ...]:
    """Channels, and whatever else can be waited for as they can."""
    waitables = as_tuple(name, value)
    for index, each in enumerate(waitables):
        # Asked of the class: to ask the thing itself would be to look whether it is ready.
        if not all(hasattr(type(each), wanted) for wanted in ("ready", "descriptor", "alarm")):
            raise ValueError(f"{name}[{index}] is {reprlib.repr(each)}, must be a Channel")
    return waitables
