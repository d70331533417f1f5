"""Requests that cannot be carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sized

WAITING_MAX = 64
"""An engine asks once, and once more after a deadline that passed."""


class RefusedError(Exception):
    """Nothing was changed; the message names the field, its value and what would be right."""

    def __init__(self, problem: str, *, blame: Literal["caller", "world"] = "caller") -> None:
        super().__init__(problem)
        self.problem = problem
        self.blame: Literal["caller", "world"] = blame


def require_room(waiting: Sized, who: str) -> None:
    """Refuses a request to stop where many wait for the same already."""
    if len(waiting) >= WAITING_MAX:
        raise RefusedError(f"{who}: {WAITING_MAX} requests wait for the end, which is the most")
