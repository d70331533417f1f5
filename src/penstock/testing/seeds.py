"""Seeds as loops inside a test: many cases, one item for pytest.

    for seed in range(200):
        with failing_seed(seed):
            ...

An item for each seed would cost more than most of the cases themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class failing_seed:  # noqa: N801  (reads as a function, like contextlib's own)
    """Names the seed in whatever error the block raises."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, AssertionError):
            error.args = (f"seed {self._seed}: {error}",)
        elif error is not None:
            error.add_note(f"seed {self._seed}")
