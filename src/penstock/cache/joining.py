"""When a request whose layers are still arriving may join a step.

    layer     0      1      2      3
    arrives   ──┤    ──────┤ ──────────┤ ─────────────┤
    needed    │      │      │      │                        the step alone
              └stall ┘

A step waits for a layer that is not there, and everything after it is needed that much later.
The one rule: a long load must not hold up the requests that decode in the same step, so it
joins only when all its waits together are a small share of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STALL_SHARE_MAX = 0.05


def stall_s(arrivals_s: Sequence[float], needs_s: Sequence[float]) -> float:
    """How long a step that begins now waits for its layers, all in all.

    Args:
        arrivals_s: In how many seconds each layer is there; 0 if it is.
        needs_s: How long after its beginning the step, if it never waits, needs each layer.

    Raises:
        ValueError: the two differ in length.
    """
    if len(arrivals_s) != len(needs_s):
        raise ValueError(f"{len(arrivals_s)} layers arrive, {len(needs_s)} are needed")
    # Once it has waited for one layer, the step needs every later one that much later.
    late = (there - wanted for there, wanted in zip(arrivals_s, needs_s, strict=True))
    return max(0.0, max(late, default=0.0))


def joins_step(
    arrivals_s: Sequence[float],
    needs_s: Sequence[float],
    *,
    step_s: float,
    stall_share_max: float = STALL_SHARE_MAX,
) -> bool:
    """Whether the step would wait for at most `stall_share_max` of its own length.

    Raises:
        ValueError: `step_s` is not positive, or the layers do not match.
    """
    if not step_s > 0:
        raise ValueError(f"step_s is {step_s}, must be more than 0")
    return stall_s(arrivals_s, needs_s) <= stall_share_max * step_s
