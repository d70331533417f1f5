"""Which block leaves a tier first: one small interface, several policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.eviction.base import EvictionPolicy, SharesArrays, Standing
from penstock.cache.eviction.lru import LruPolicy
from penstock.cache.eviction.s3fifo import S3FifoPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES: dict[str, Callable[[int, Standing], EvictionPolicy]] = {
    "lru": LruPolicy,
    "s3fifo": S3FifoPolicy,
}

__all__ = ["POLICIES", "EvictionPolicy", "LruPolicy", "S3FifoPolicy", "SharesArrays", "Standing"]
