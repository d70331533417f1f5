"""Parts that other distributions add: stores, tier kinds, eviction policies, data transports.

A distribution names its part in an entry point, in its `pyproject.toml`:

    [project.entry-points."penstock.policies"]
    clock = "my_package.policies:ClockPolicy"

and a configuration then uses it like a built-in one: `eviction = "clock"`.

| group                 | the entry point names                       | used by                    |
|-----------------------|---------------------------------------------|----------------------------|
| `penstock.policies`   | a callable that makes an `EvictionPolicy`   | `eviction`                 |
| `penstock.stores`     | a callable that opens a `BlobStore`         | `store` of a shared tier   |
| `penstock.tiers`      | a `TierFactory`                             | `kind` of a tier           |
| `penstock.transports` | a `DataTransport`                           | `transport` of `[handoff]` |

Entry points are looked for only when a name is not built in, and only the one that is named is
loaded. So built-in names cannot be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.metadata import EntryPoint

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFactory:
    """A kind of tier."""

    build: Callable[..., Any]
    """Makes a tier: `build(layout, slot_count, name=…, options=…)`, where `options` has a value
    for each option of the factory. It returns a `SlotStore` that keeps checksums (`KeepsSums`).
    It raises `ConfigError` with the name of an option that is wrong, and `UnavailableError` if the
    machine lacks what the tier needs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys that only tiers of this kind have, each a `penstock.config.TierOption`. With one
    named `gib`, of type `Gib`, a tier can be given a size in GiB instead of `blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTransport:
    """Both sides of a data transport; `penstock.transport.remote` says what they do."""

    open_target: Callable[..., Any]
    """`open_target(folder)` opens the `Target` of a decode rank. `folder` is a path that only
    this user can enter, if the engine named one, for transports that meet at a path."""
    connect: Callable[..., Any] | None = None
    """`connect(description)` connects a prefill rank to an area: returns a `WriterLink`."""
    open_writer: Callable[..., Any] | None = None
    """Instead of `connect`, for transports whose links share something: `open_writer()` opens what
    a prefill rank connects with, an object with `connect(description)` and `close()`."""
    pins: bool = False
    """Whether both take `pin=` (`penstock.transport.remote.PinMemory`), which registers their
    memory for copies of a GPU. Only such a transport serves KV that lies on one."""
    device_areas: bool = False
    """Whether both take `device=` (`penstock.transport.remote.DeviceMemory`), in which areas may
    lie for ranks whose KV lies on a GPU."""
    takes_addresses: bool = False
    """Whether `open_target` and `open_writer` take `addresses=`
    (`penstock.transport.remote.HandoffAddresses`), by which they choose a network interface."""

    def __post_init__(self) -> None:
        if (self.connect is None) == (self.open_writer is None):
            raise ValueError("a DataTransport must have one of connect and open_writer")


@dataclass(frozen=True, slots=True)
class ExtensionGroup(Generic[Part]):
    """The entry points of one group."""

    group: str
    expected: str
    """What an entry point must name, for messages."""
    accepts: Callable[[object], bool]
    """Whether a loaded object is that."""

    def names(self) -> tuple[str, ...]:
        """Which parts are installed. Nothing is loaded."""
        return tuple(sorted({point.name for point in _entry_points(self.group)}))

    def find(self, name: str, place: str) -> Part | None:
        """Loads the part with this name; `None` if no distribution has one.

        Args:
            name: What the configuration asks for.
            place: The setting that asks, for messages.

        Raises:
            ConfigError: two distributions have a part with this name, or it cannot be loaded, or
                it is not what the group needs.
        """
        found = [point for point in _entry_points(self.group) if point.name == name]
        if not found:
            return None
        if len(found) > 1:
            owners = " and ".join(f"{point.value!r} of {_owner(point)}" for point in found)
            raise ConfigError(
                place,
                f"is {name!r}, which more than one entry point of group {self.group!r} provides: "
                f"{owners}; uninstall all but one of them",
            )
        return self._load(found[0], place)

    def _load(self, point: EntryPoint, place: str) -> Part:
        entry = (
            f"is {point.name!r}: the entry point {point.name} = {point.value!r} of {_owner(point)} "
            f"in group {self.group!r}"
        )
        try:
            part: Part = point.load()
        except Exception as error:
            # It runs a module of somebody else, which may raise anything; all of it is reported.
            raise ConfigError(
                place,
                f"{entry} cannot be loaded: {type(error).__name__}: {error}; must be "
                f"'module:object' and name {self.expected}",
            ) from error
        if not self.accepts(part):
            raise ConfigError(
                place, f"{entry} names a {type(part).__name__}, must name {self.expected}"
            )
        return part


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    # Slow to import, and most configurations never need it.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return tuple(entry_points(group=group))


def _owner(point: EntryPoint) -> str:
    return f"distribution {point.dist.name}" if point.dist else "an unknown distribution"


OTHER_POLICIES: ExtensionGroup[Callable[..., Any]] = ExtensionGroup(
    "penstock.policies", "a callable (slot_count, standing) that makes an EvictionPolicy", callable
)
OTHER_STORES: ExtensionGroup[Callable[..., Any]] = ExtensionGroup(
    "penstock.stores", "a callable (address, *, threads) that opens a BlobStore", callable
)
OTHER_TIERS: ExtensionGroup[TierFactory] = ExtensionGroup(
    "penstock.tiers",
    "a penstock.extensions.TierFactory",
    lambda part: isinstance(part, TierFactory),
)
OTHER_TRANSPORTS: ExtensionGroup[DataTransport] = ExtensionGroup(
    "penstock.transports",
    "a penstock.extensions.DataTransport",
    lambda part: isinstance(part, DataTransport),
)
