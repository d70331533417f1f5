"""Sleep: a cache that is not used gives its memory back to the system.

| call                | device blocks | host tier    | leases and copies |
|---------------------|---------------|--------------|-------------------|
| `sleep()`           | are forgotten | stays        | none may be open  |
| `sleep(host=True)`  | are forgotten | is forgotten | none may be open  |

Addresses stay: pages go back to the kernel, which makes new ones, full of zeros, when they are used
again. Memory of a GPU is taken again by `wake`, and host memory registered for it again; it is the
engine's, so `sleep` is refused unless the engine can give it back (`TensorTier.memory`).

The one rule: pages are returned only of slots that hold nothing, and that no copy can touch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.settings import DEVICE, HUB
from penstock.errors import ConfigError, UnavailableError, counted
from penstock.machine.events import EmptyDevice
from penstock.runtime.copy_executor import NOT_GIVEN_BACK
from penstock.runtime.rank_links import LocalLink
from penstock.tiers.host import tier_size
from penstock.tiers.linux_memory import read_text, require_room

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.machine.effects import Effect
    from penstock.runtime.driver import Driver
    from penstock.runtime.messages import RankFacts

ASLEEP = "the cache is asleep"


class CacheMemory:
    """The memory of one cache's tiers."""

    def __init__(
        self, driver: Driver, ranks: Sequence[RankFacts], deliver: Callable[[list[Effect]], None]
    ) -> None:
        self._driver = driver
        self._ranks = ranks
        self._deliver = deliver
        self._host_asleep = False
        self.asleep = False

    def require_awake(self) -> None:
        """Refuses what needs the device's blocks.

        Raises:
            UnavailableError: the cache is asleep.
        """
        if self.asleep:
            raise UnavailableError(f"{ASLEEP}: call wake first")

    @property
    def _block(self) -> tuple[int, int]:
        """The bytes of a block, and its sums, on the rank where it is largest."""
        links = self._driver.links
        if isinstance(links, LocalLink):
            device = links.executor.stores[DEVICE]
            assert device is not None
            return device.layout.block_bytes, len(device.layout.cells)
        return max((facts.block_bytes, facts.cell_count) for facts in self._ranks)

    def sleep(self, *, host: bool) -> None:
        """Forgets the device's blocks, and the hub's if `host`, and returns their memory.

        Raises:
            UnavailableError: the memory is that of a GPU, and the engine cannot give it back.
            ValueError: leases are open, or copies are under way.
        """
        machine, links = self._driver.machine, self._driver.links
        leases = len(machine.open_requests())
        if leases or machine.operations:
            raise ValueError(
                f"{counted(leases, 'lease')} open and "
                f"{counted(len(machine.operations), 'copy', 'copies')} under way, "
                "must be none when the cache goes to sleep"
            )
        executor = links.executor if isinstance(links, LocalLink) else None
        if executor is not None and not executor.can_give_back:
            raise UnavailableError(NOT_GIVEN_BACK)
        if machine.manages_device:
            self._deliver(self._driver.handle(EmptyDevice(why=ASLEEP)))
        if host and not self._host_asleep and len(machine.tier_names) > HUB:
            self._deliver(self._driver.let_tier_sleep(HUB, ASLEEP))
            self._host_asleep = True
        self.asleep = True
        if executor is not None:
            executor.give_back(DEVICE)
            if self._host_asleep:
                executor.give_back(HUB)

    def wake(self) -> None:
        """The cache can be used again; a hub that slept is empty, or off if a rank has none.

        Raises:
            UnavailableError: there is no memory for it.
        """
        if not self.asleep:
            return
        links = self._driver.links
        try:
            if self._host_asleep and HUB not in self._driver.unusable:
                name = self._driver.machine.tier_names[HUB]
                slots = self._driver.machine.tier_sizes()[name]
                require_room(tier_size(slots, *self._block), read_text, setting=f"tier {name}")
            if isinstance(links, LocalLink):
                links.executor.take_again()
        except (ConfigError, UnavailableError) as error:
            raise UnavailableError(f"the cache cannot wake: {error}") from error
        if self._host_asleep:
            self._deliver(self._driver.wake_tier(HUB))
            self._host_asleep = False
        self.asleep = False
