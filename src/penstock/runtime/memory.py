"""Tiers that change their size while a cache is open, and sleep: memory goes back to the system.

| call                          | device blocks | host tier              | leases and copies  |
|-------------------------------|---------------|------------------------|--------------------|
| `resize_tier("host", gib=…)`  | stay          | has fewer or more slots | go on             |
| `resize_tier("disk", gib=…)`  | stay          | stays                  | go on              |
| `sleep()`                     | are forgotten | stays                  | none may be open   |
| `sleep(host=True)`            | are forgotten | is forgotten           | none may be open   |

Addresses stay: pages go back to the kernel, which makes new ones, full of zeros, when they are used
again. Memory of a GPU is taken again by `wake`, and host memory registered for it again; it is the
engine's, so `sleep` is refused unless the engine can give it back (`TensorTier.memory`). There a
smaller host tier lets its blocks leave and keeps its memory.

The store process changes the room of a stored tier; `resize_status` says when it has, or why not.

The one rule: pages are returned only of slots that hold nothing, and that no copy can touch.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.settings import DEVICE, HUB
from penstock.errors import ConfigError, UnavailableError, counted
from penstock.machine.events import EmptyDevice, ResizeTier
from penstock.machine.faults import SLOTS_MAX
from penstock.runtime.copy_executor import NOT_GIVEN_BACK
from penstock.runtime.lower_tiers import stored_sizes
from penstock.runtime.rank_links import LocalLink
from penstock.tiers.host import slots_in, tier_size
from penstock.tiers.linux_memory import read_text, require_room
from penstock.vocabulary.arguments import as_float, as_int

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.machine.effects import Effect
    from penstock.runtime.driver import Driver
    from penstock.runtime.lower_tiers import StoredSizes
    from penstock.runtime.rank_facts import RankFacts
    from penstock.runtime.stored_tiers import StoredTiers

GIB = 1 << 30
GIB_MAX = 1 << 30
"""More than any machine has."""
ASLEEP = "the cache is asleep"


class ResizeStatus(NamedTuple):
    """What came of a change of a tier's size."""

    done: bool
    """Whether the tier has its size, or was found able to have it."""
    problem: str = ""
    """Why it cannot have it; empty if it can."""
    waits_for: str = ""
    """What it waits for, if it is neither done nor refused."""


class CacheMemory:
    """The memory of one cache's tiers."""

    def __init__(
        self, driver: Driver, ranks: Sequence[RankFacts], deliver: Callable[[list[Effect]], None]
    ) -> None:
        self._driver = driver
        self._ranks = ranks
        self._deliver = deliver
        self._resized: set[int] = set()
        """Tiers whose closed slots are to be given back."""
        self._host_asleep = False
        self.asleep = False

    def require_awake(self) -> None:
        """Refuses what needs the device's blocks.

        Raises:
            UnavailableError: the cache is asleep.
        """
        if self.asleep:
            raise UnavailableError(f"{ASLEEP}: call wake first")

    # Sizes.

    def slots_for(self, name: str, *, gib: object = None, blocks: object = None) -> int:
        """How many blocks a tier would have.

        Raises:
            ConfigError: there is no such tier, or it cannot have this size.
        """
        if name in self._stored_names:
            return self._stored_size(name, gib, blocks) // self._stored_sizes.block
        tier = self._index(name)
        if (gib is None) == (blocks is None):
            raise ConfigError(name, "has gib and blocks or none of them, must have one of the two")
        most = self._driver.machine.tier_capacity(tier)
        if blocks is not None:
            try:
                return as_int(f"{name}.blocks", blocks, 1, most)
            except ValueError as error:
                raise ConfigError(
                    f"{name}.blocks",
                    f"is {reprlib.repr(blocks)}, must be from 1 to {most}, with which the tier was "
                    "opened",
                ) from error
        size_gib = as_float(gib)
        in_range = size_gib is not None and 0 <= size_gib <= GIB_MAX
        slots = slots_in(int(size_gib * GIB), *self._block) if in_range and size_gib else 0
        if not 1 <= slots <= most:
            least, largest = (tier_size(count, *self._block) / GIB for count in (1, most))
            raise ConfigError(
                f"{name}.gib",
                f"is {reprlib.repr(gib)}, must be from {least:.6g} to {largest:.6g}, with which "
                "the tier was opened",
            )
        return slots

    def resize(self, name: str, *, gib: object = None, blocks: object = None) -> int:
        """Changes the size of a tier; blocks leave by its policy. Returns how many it has room for.

        Raises:
            ConfigError: it cannot have this size.
        """
        slots = self.slots_for(name, gib=gib, blocks=blocks)
        if name in self._stored_names:
            more = slots > self._driver.machine.tier_sizes()[name]
            size_bytes = self._stored_size(name, gib, blocks)
            tier = self._stored_names[name]
            self._stored.resize(tier, size_bytes, grows_to=slots if more else 0)
        else:
            self._resize(name, slots)
        return slots

    def check_size(self, name: str, *, gib: object = None, blocks: object = None) -> int:
        """Has the store of a tier check a size; what a tier in memory can have is known at once.

        Raises:
            ConfigError: it cannot have this size.
        """
        slots = self.slots_for(name, gib=gib, blocks=blocks)
        if name in self._stored_names:
            size_bytes = self._stored_size(name, gib, blocks)
            self._stored.check_size(self._stored_names[name], size_bytes)
        return slots

    def resize_status(self, name: str) -> ResizeStatus:
        """What came of the last change of a tier's size.

        Raises:
            ConfigError: there is no such tier.
        """
        if name in self._stored_names:
            problem = self._stored.resizes.get(self._stored_names[name], "")
            if problem is None:
                return ResizeStatus(done=False, waits_for="the store has not answered")
            return ResizeStatus(done=not problem, problem=problem)
        closing = self._driver.machine.closing_slots(self._index(name))
        waits_for = f"blocks in use are too many by {closing}" if closing else ""
        return ResizeStatus(done=not closing, waits_for=waits_for)

    def _resize(self, name: str, slot_count: int) -> None:
        tier = self._index(name)
        before = self._driver.machine.tier_sizes()[name]
        if slot_count > before:
            grown = tier_size(slot_count, *self._block) - tier_size(before, *self._block)
            require_room(grown, read_text, setting=f"{name}.gib")
        self._deliver(self._driver.handle(ResizeTier(tier=tier, slot_count=slot_count)))
        self._resized.add(tier)
        self.give_back_closed()

    def give_back_closed(self) -> None:
        """Returns the pages of slots that were closed, once all that must leave have left."""
        for tier in [*self._resized]:
            if not self._driver.machine.closing_slots(tier):
                self._resized.discard(tier)
                links = self._driver.links
                if isinstance(links, LocalLink):
                    links.executor.give_back(tier, self._driver.machine.closed_slots(tier))

    def closed_slots(self, name: str) -> list[int]:
        return self._driver.machine.closed_slots(self._index(name))

    @property
    def _stored(self) -> StoredTiers:
        stored = self._driver.stored
        assert stored is not None
        return stored

    @property
    def _stored_names(self) -> dict[str, int]:
        """The tiers that a store process serves, with their indices."""
        stored, names = self._driver.stored, self._driver.machine.tier_names
        return {} if stored is None else {names[tier]: tier for tier in stored.tiers}

    @property
    def _stored_sizes(self) -> StoredSizes:
        parts = len({facts.tiers[0].memory for facts in self._ranks}) or 1
        return stored_sizes(*self._block, parts)

    def _stored_size(self, name: str, gib: object, blocks: object) -> int:
        """The size of a stored tier in bytes, checked as far as it can be here."""
        if blocks is not None or gib is None:
            raise ConfigError(name, "has blocks or no gib, must have gib: the room of its folder")
        sizes = self._stored_sizes
        size_gib = as_float(gib)
        least, most = sizes.least / GIB, SLOTS_MAX * sizes.block / GIB
        if size_gib is None or not least <= size_gib <= most:
            raise ConfigError(
                f"{name}.gib", f"is {reprlib.repr(gib)}, must be from {least:.6g} to {most:.6g}"
            )
        return int(size_gib * GIB)

    def _index(self, name: str) -> int:
        settings = self._driver.machine.settings
        found = {each.name: tier for tier, each in enumerate(settings.tiers, start=HUB)}
        in_memory = [each.name for each in settings.tiers if not each.stored]
        if name not in in_memory:
            known = ", ".join(map(repr, [*in_memory, *self._stored_names])) or "none"
            raise ConfigError("tier", f"is {name!r}, must be one of: {known}")
        return found[name]

    @property
    def _block(self) -> tuple[int, int]:
        """The bytes of a block, and its sums, on the rank where it is largest."""
        links = self._driver.links
        if isinstance(links, LocalLink):
            device = links.executor.stores[DEVICE]
            assert device is not None
            return device.layout.block_bytes, len(device.layout.cells)
        return max((facts.block_bytes, facts.cell_count) for facts in self._ranks)

    # Sleep.

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
