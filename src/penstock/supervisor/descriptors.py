"""Descriptors: who inherits them, and who closes them."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def make_inheritable(descriptors: Iterable[int]) -> None:
    """Has the next program that this process starts inherit them."""
    for fd in descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFD, 0)


def make_private(descriptors: Iterable[int]) -> None:
    """Has no program inherit them."""
    for fd in descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def close_all(descriptors: Iterable[int]) -> None:
    """Closes what nobody wants."""
    for fd in descriptors:
        os.close(fd)
