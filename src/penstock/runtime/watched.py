"""What an engine can ask about its cache, whichever way it uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.machine.statistics import CacheStatistics
    from penstock.runtime.driver import Driver
    from penstock.vocabulary.ids import Key


class Watched:
    """A cache that tells what it does; asking changes nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return self._driver.busy

    def statistics(self) -> CacheStatistics:
        """Counts and sizes, as a frozen value."""
        return self._driver.machine.statistics()

    def story(self, of: Key | str) -> tuple[str, ...]:
        """What last happened to a block (by key) or a request (by name)."""
        return self._driver.machine.story(of)

    def take_kv_events(self) -> list[KvEvent]:
        """KV events since the last call, for routers."""
        return self._driver.machine.take_kv_events()

    def kv_snapshot(self) -> Snapshot:
        """All that can be matched or loaded now, tier by tier."""
        return self._driver.machine.kv_snapshot()

    def audit(self) -> None:
        """Checks every invariant of the whole state; raises `InvariantViolation`."""
        self._driver.audit()
