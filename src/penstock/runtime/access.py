"""Who may call a cache or a rank now: one thread of one process, one call at a time.

    with self._access:          # a call that changes something
        ...
    self._access.require()      # a question

`thread` is the number of the thread that may call; it is `NOBODY` while a call is under way, and
for good once the cache is closed, was broken off, or is seen from a forked child. So one comparison
of two integers answers all of it.

The one rule: a call that ends by anything but a refusal (an interrupt, say) has left its work
half done. Nothing that depends on it is done any more: every later call says so.
"""

from __future__ import annotations

import inspect
import os
from threading import get_ident
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

from penstock.errors import AccessError, InvariantViolation, PenstockError, UnavailableError

if TYPE_CHECKING:
    from types import TracebackType

NOBODY = 0
"""No thread has this number."""
_CALLS = frozenset(
    (
        *(f"penstock.runtime.{name}" for name in ("cache", "lease", "offload", "base", "rank")),
        *(f"penstock.handoff.{name}" for name in ("handoff", "prefill", "decode")),
    )
)
"""Where calls begin: if one of them is already on the stack, a call comes from within another."""


class Access:
    """The right to call one cache or rank, and why it is refused."""

    __slots__ = ("__weakref__", "_broken", "_closed", "_forked", "_owner", "_what", "thread")

    def __init__(self, what: str) -> None:
        self._what = what
        self._owner = get_ident()
        self.thread = self._owner
        self._closed = False
        self._forked = False
        self._broken = ""
        _everybody.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened it."""
        return self._forked

    @property
    def broken(self) -> str:
        """Why it cannot be relied on any more; empty if it can."""
        if self._forked or self._closed:
            return ""
        if self.thread == NOBODY and not self._broken:
            self._look_at_unfinished()
        return self._broken

    @property
    def usable(self) -> bool:
        return not (self._closed or self._forked or self._broken)

    @property
    def state(self) -> str:
        if self._forked:
            return "of another process"
        if self._closed:
            return "closed"
        return "broken" if self._broken else "open"

    def require(self) -> None:
        """Refuses a question that may not be asked now."""
        if get_ident() != self.thread:
            self._refuse()

    def __enter__(self) -> None:
        if get_ident() != self.thread:
            self._refuse()
        self.thread = NOBODY

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or is_refusal(kind):
            self.thread = self._owner
        else:
            self._broken = describe(error)

    def adopt(self) -> None:
        """From now on the thread that calls this makes all calls."""
        if not self.usable or self.broken:
            self._refuse()
        if self.thread == NOBODY:
            raise AccessError(
                f"{self._what} is in the middle of a call of thread {self._owner}: it can be "
                "adopted between calls"
            )
        self._owner = self.thread = get_ident()

    def close(self) -> None:
        """No call is allowed any more."""
        self._closed = True
        self.thread = NOBODY

    def leave_to_parent(self) -> None:
        """This process is a child of the one that opened it."""
        self._forked = True
        self.thread = NOBODY

    def _refuse(self) -> NoReturn:
        here = get_ident()
        if self._forked:
            raise AccessError(
                f"{self._what} was opened by another process, and process {os.getpid()} was forked "
                "from it: a child opens one of its own"
            )
        if self._closed:
            raise UnavailableError(f"{self._what} is closed")
        if here != self._owner:
            raise AccessError(
                f"{self._what} is used by thread {self._owner}, and was called by thread {here}: "
                "one thread makes all calls; to hand it over, call adopt_thread() in the thread "
                "that goes on with it"
            )
        if why := self.broken:
            raise UnavailableError(
                f"{self._what} cannot be used any more: {why}, so its books may be wrong. "
                "Close it, and open another one"
            )
        raise AccessError(
            f"{self._what} was called from within another of its calls, by a signal handler or a "
            "destructor: let the handler set a flag, as penstock.StopSignal does"
        )

    def _look_at_unfinished(self) -> None:
        """Marks the access broken if a call was cut off at its first or last instruction."""
        if get_ident() == self._owner and not _within_a_call():
            self._broken = "a call was interrupted before its end"


def is_refusal(kind: type[BaseException]) -> bool:
    """Whether an error says that nothing was changed."""
    if issubclass(kind, InvariantViolation | AccessError):
        return False
    return issubclass(kind, ValueError | PenstockError)


def describe(error: BaseException | None) -> str:
    """What broke a call off, in words."""
    name = type(error).__name__
    said = str(error).partition("\n")[0]
    return f"a call was broken off by {name}" + (f" ({said})" if said else "")


def _within_a_call() -> bool:
    """Whether a call of ours is on the stack below the one that is being made."""
    frame = inspect.currentframe()
    ours = True
    while frame is not None and (frame := frame.f_back) is not None:
        name = frame.f_globals.get("__name__", "")
        if ours:
            ours = name.startswith(("penstock.runtime.", "penstock.handoff."))
        elif name in _CALLS:
            return True
    return False


_everybody: WeakSet[Access] = WeakSet()


def _after_fork_in_child() -> None:
    for access in list(_everybody):
        access.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
