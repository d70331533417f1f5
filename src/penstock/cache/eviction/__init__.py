"""Which block leaves a tier first: one small interface, several policies.

`EvictionPolicy` is what a policy has to do, `POLICIES` are the built-in ones, and `policy_named`
also finds those that other distributions add by an entry point of group `penstock.policies`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.eviction.adaptive import AdaptivePolicy
from penstock.cache.eviction.base import (
    Admits,
    EvictionPolicy,
    FollowsRequests,
    Judge,
    SharesArrays,
    Standing,
)
from penstock.cache.eviction.queues import LruPolicy
from penstock.errors import ConfigError
from penstock.extensions import OTHER_POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    MakePolicy = Callable[[int, Standing], EvictionPolicy]

POLICIES: dict[str, MakePolicy] = {
    "lru": LruPolicy,
    "adaptive": AdaptivePolicy,
}

REPLACED = {"s3fifo": "adaptive", "learned": "adaptive"}
"""What took the place of policies of earlier versions."""


def policy_named(name: str, *, place: str = "eviction") -> MakePolicy:
    """What makes the policy with this name: a built-in one, or that of an entry point.

    Raises:
        ConfigError: there is none, or its entry point is broken; `place` is the setting.
    """
    make = POLICIES.get(name) or OTHER_POLICIES.find(name, place)
    if make is None and name in REPLACED:
        raise ConfigError(place, f"is {name!r}, must be {REPLACED[name]!r}, which took its place")
    if make is None:
        known = ", ".join([*POLICIES, *OTHER_POLICIES.names()])
        raise ConfigError(place, f"is {name!r}, must be one of {known}")
    return make


__all__ = [
    "POLICIES",
    "REPLACED",
    "AdaptivePolicy",
    "Admits",
    "EvictionPolicy",
    "FollowsRequests",
    "Judge",
    "LruPolicy",
    "SharesArrays",
    "Standing",
    "policy_named",
]
