"""Two engines that hand KV over: names, addresses, layouts, keys, and which data transports.

| name            | between                                     | fence                      |
|-----------------|---------------------------------------------|----------------------------|
| `shared_memory` | processes of one machine                    | the writer's process ended |
| `gpu`           | the same; areas in GPU memory where both    | the writer unmapped it, or |
|                 | can map it, else as `shared_memory`         | its process ended          |
| `nixl`          | any two machines that UCX joins (RDMA, TCP) | the area's agent destroyed |

`HandoffPair.transport` names one, or `auto`: see `choose_transport`. Other distributions add theirs
by an entry point: see `penstock.extensions`.

    pair = HandoffPair(
        prefill=HandoffEngine(name="prefill", address="ipc:///run/toy/prefill"),
        decode=HandoffEngine(name="decode", address="ipc:///run/toy/decode"),
        model="toy",
        weights="v1",
    )

Both engines, and every rank of them, are given the same pair. They compare it when they connect,
and refuse each other with the first difference named.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config.values import AUTO, GPU, NIXL, SHARED_MEMORY
from penstock.errors import ConfigError, install_hint
from penstock.extensions import OTHER_TRANSPORTS, DataTransport
from penstock.handoff.driver.directory import Directory, EnginePlace, RankPlace
from penstock.handoff.protocol.identity import NAME_CHARS_MAX
from penstock.relay.agents import is_installed
from penstock.relay.sides import NixlTarget, NixlWriter
from penstock.transport.machine_keys import MachineKeys, host_of, is_local, require_keys
from penstock.transport.shared_memory import SharedTarget, connect_shared
from penstock.vocabulary.arguments import as_text, as_tuple
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.transport.remote import (
        DeviceMemory,
        HandoffAddresses,
        PinMemory,
        Target,
        WriterLink,
    )


def _shared_target(
    folder: Path | None, *, pin: PinMemory | None = None, device: DeviceMemory | None = None
) -> Target:
    return SharedTarget(huge_pages=False, pin=pin, device=device, folder=folder)


def _nixl_target(
    _folder: Path | None,
    *,
    pin: PinMemory | None = None,
    addresses: HandoffAddresses | None = None,
) -> Target:
    return NixlTarget(pin=pin, addresses=addresses)


TRANSPORTS: dict[str, DataTransport] = {
    SHARED_MEMORY: DataTransport(open_target=_shared_target, connect=connect_shared, pins=True),
    GPU: DataTransport(
        open_target=_shared_target, connect=connect_shared, pins=True, device_areas=True
    ),
    NIXL: DataTransport(
        open_target=_nixl_target, open_writer=NixlWriter, pins=True, takes_addresses=True
    ),
}
"""The built-in ones."""


def transport_named(name: str, *, place: str = "transport") -> DataTransport:
    """The data transport with this name: a built-in one, or that of an entry point.

    Raises `ConfigError`: there is none, or its entry point is broken; `place` is the setting.
    """
    found = TRANSPORTS.get(name) or OTHER_TRANSPORTS.find(name, place)
    if found is None:
        known = ", ".join([AUTO, *TRANSPORTS, *OTHER_TRANSPORTS.names()])
        raise ConfigError(place, f"is {name!r}, must be one of {known}")
    return found


def choose_transport(
    name: str, addresses: Sequence[str], *, on_gpu: bool = False, place: str = "transport"
) -> str:
    """The data transport that two engines use; both come to the same answer.

    | `name` | where the engines and their ranks listen           | answer                      |
    |--------|----------------------------------------------------|-----------------------------|
    | `auto` | all at `ipc` or loopback addresses, or at one host | `gpu` or, without `on_gpu`, |
    |        |                                                    | `shared_memory`             |
    | `auto` | at several hosts                                   | `nixl`                      |
    | other  | anywhere                                           | `name`                      |

    With `on_gpu`, ranks may have their KV on GPUs.
    Raises `ConfigError`: there is no such transport; or `auto` needs NIXL, which is not installed.
    """
    if name != AUTO:
        transport_named(name, place=place)
        return name
    hosts = sorted({"this machine" if is_local(each) else host_of(each) for each in addresses})
    if len(hosts) < 2:
        return GPU if on_gpu else SHARED_MEMORY
    if not is_installed():
        raise ConfigError(
            place,
            f"is {AUTO!r}, and the engines are on different machines ({', '.join(hosts)}), which "
            f"needs NIXL on each: {install_hint('nixl')}",
        )
    return NIXL


class Writer:
    """What a prefill rank connects with, whichever transport it is."""

    def __init__(
        self,
        transport: DataTransport,
        *,
        pin: PinMemory | None = None,
        device: DeviceMemory | None = None,
        addresses: HandoffAddresses | None = None,
    ) -> None:
        options: dict[str, Any] = {} if pin is None else {"pin": pin}
        if device is not None:
            options["device"] = device
        self._opened: Any = None
        if transport.open_writer is not None:
            places = {"addresses": addresses} if transport.takes_addresses else {}
            self._opened = transport.open_writer(**options, **places)
        plain = None if transport.connect is None else partial(transport.connect, **options)
        self.connect: Callable[[bytes], WriterLink] = plain or self._opened.connect
        """Makes a link to the area that a target described; see `penstock.transport.remote`."""

    def close(self) -> None:
        """Gives back what belongs to no single link."""
        if self._opened is not None:
            self._opened.close()


CHECKSUMS = tuple(algorithm.value for algorithm in Algorithm)
_KINDS = ("ipc://", "tcp://")
_RANK_CHARS = 8
"""Room for a rank's number behind the name of its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEngine:
    """One of the two engines, as both of them know it."""

    name: str
    address: str
    """Where the engine listens for the other one and for its own ranks: `ipc://` and a path, or
    `tcp://` with host and port."""
    rank_addresses: tuple[str, ...] = ()
    """Where each rank of a prefill engine listens. Left out, the ranks listen beside an `ipc`
    address."""
    layouts: tuple[Layout, ...] = ()
    """How the KV of each rank lies. Left out, the engine has one rank, with the layout of the KV
    that the pair is opened with."""
    listener: str = ""
    """The name of the `SharedListener` of each of its processes, where the engine is in several
    pairs; left out, it has addresses of its own in this one."""

    def __post_init__(self) -> None:
        name = as_text("name", self.name)
        if not 0 < len(name) <= NAME_CHARS_MAX - _RANK_CHARS:
            raise ValueError(
                f"name is {reprlib.repr(name)}, must have 1 to {NAME_CHARS_MAX - _RANK_CHARS} "
                "characters"
            )
        layouts = as_tuple("layouts", self.layouts)
        for number, layout in enumerate(layouts):
            if not isinstance(layout, Layout):
                raise ValueError(f"layouts[{number}] is {reprlib.repr(layout)}, must be a Layout")  # noqa: TRY004
        as_text("listener", self.listener)
        _require_address("address", self.address)
        addresses = as_tuple("rank_addresses", self.rank_addresses)
        for number, address in enumerate(addresses):
            _require_address(f"rank_addresses[{number}]", address)
        object.__setattr__(self, "layouts", layouts)
        object.__setattr__(self, "rank_addresses", addresses)

    @property
    def rank_count(self) -> int:
        """How many ranks the engine has."""
        return max(1, len(self.layouts))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPair:
    """A prefill engine, the decode engine that gets its KV, and what both compute with."""

    prefill: HandoffEngine
    decode: HandoffEngine
    model: str
    weights: str
    """The version of the weights: engines with other weights compute other KV."""
    checksum: str = "xxh3"
    """How the bytes are summed: `mix64` where the KV of an engine is on a GPU, which sums it
    there; `xxh3` is quicker on CPUs."""
    secret: bytes | MachineKeys = field(default=b"", repr=False)
    """Known to both engines and their ranks; nobody else is let in. Where they are on several
    machines, the keys of the machine that this one is."""
    transport: str = AUTO
    """How the KV travels: `shared_memory`, `gpu`, `nixl`, or a data transport that another
    distribution adds by an entry point of group `penstock.transports`. With `auto` it is NIXL
    between machines; on one machine it is `gpu` with `mix64` sums, and shared memory otherwise."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            engine = getattr(self, name)
            if not isinstance(engine, HandoffEngine):
                raise ValueError(f"{name} is {reprlib.repr(engine)}, must be a HandoffEngine")  # noqa: TRY004
        as_text("model", self.model)
        as_text("weights", self.weights)
        if self.checksum not in CHECKSUMS:
            raise ValueError(
                f"checksum is {reprlib.repr(self.checksum)}, must be one of {', '.join(CHECKSUMS)}"
            )
        if not isinstance(self.secret, bytes | MachineKeys):
            raise ValueError(  # noqa: TRY004
                f"secret is a {type(self.secret).__name__}, must be bytes or MachineKeys"
            )
        for engine in (self.prefill, self.decode):
            for address in (engine.address, *engine.rank_addresses):
                require_keys(address, self.secret)
        if self.prefill.name == self.decode.name:
            raise ValueError(f"both engines are named {self.prefill.name!r}, names must differ")
        _rank_addresses(self.prefill)
        as_text("transport", self.transport)
        _ = self.data_transport  # Refused here if it is none.

    @property
    def data_transport(self) -> str:
        """The data transport in use, where `transport` is `auto`, too."""
        on_gpu = self.checksum == Algorithm.MIX64.value
        return choose_transport(self.transport, self._addresses, on_gpu=on_gpu)

    @property
    def _addresses(self) -> list[str]:
        ranks = _rank_addresses(self.prefill)
        return [self.prefill.address, *ranks, self.decode.address, *self.decode.rank_addresses]


def directory_of(pair: HandoffPair, layout: Layout | None = None) -> Directory:
    """All parties of a pair.

    Args:
        pair: the two engines.
        layout: the KV of the caller's one rank; for engines that name no layouts.

    Raises:
        ValueError: a layout is missing, or the blocks of one engine cannot become those of the
            other.
    """
    sums, silent = Algorithm(pair.checksum), [""] * pair.decode.rank_count
    return Directory(
        prefill=_place("prefill", pair.prefill, layout, _rank_addresses(pair.prefill), sums),
        decode=_place("decode", pair.decode, layout, silent, sums),
        model=pair.model,
        weights=pair.weights,
        transport=pair.data_transport,
    )


def keys_of(
    pair: HandoffPair, tokens: NDArray[np.uint32], *, block_tokens: int, origin: str
) -> list[bytes]:
    """What the checksums of a prompt's blocks are bound to, a partly filled one included.

    A key depends on all tokens up to the end of its block and on everything else that the KV
    depends on, so blocks of another prompt, tenant or version of the weights never pass for the
    right ones.

    Args:
        pair: the two engines.
        tokens: the prompt.
        block_tokens: tokens in a block of the prefill engine.
        origin: what the KV depends on besides the model and the prompt.
    """
    start = msgspec.msgpack.encode((pair.model, pair.weights, origin))
    key = blake2b(start, digest_size=KEY_BYTES).digest()
    keys: list[bytes] = []
    for first in range(0, len(tokens), block_tokens):
        block = tokens[first : first + block_tokens].tobytes()
        key = blake2b(block, key=key, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def rank_name(engine: str, rank: int) -> str:
    """The name of a rank among the parties of a handoff."""
    return f"{engine}/{rank}"


def _require_address(name: str, address: object) -> None:
    if not as_text(name, address).startswith(_KINDS):
        raise ValueError(f"{name} is {address!r}, must begin with {' or '.join(_KINDS)}")


def _rank_addresses(engine: HandoffEngine) -> list[str]:
    count = engine.rank_count
    if not engine.rank_addresses and engine.address.startswith("ipc://"):
        return [f"{engine.address}-rank-{rank}" for rank in range(count)]
    if len(engine.rank_addresses) != count:
        raise ValueError(
            f"rank_addresses of {engine.name!r} are {len(engine.rank_addresses)}, must be {count}, "
            "one for each rank of a prefill engine"
        )
    return [*engine.rank_addresses]


def _place(
    role: str,
    engine: HandoffEngine,
    layout: Layout | None,
    addresses: list[str],
    checksum: Algorithm,
) -> EnginePlace:
    layouts = engine.layouts or (() if layout is None else (layout,))
    if not layouts:
        raise ValueError(
            f"layouts of the {role} engine {engine.name!r} are left out, must have one layout for "
            "each rank where the pair is opened without kv"
        )
    return EnginePlace(
        scheduler=engine.name,
        address=engine.address,
        listener=engine.listener,
        ranks=tuple(
            RankPlace(
                name=rank_name(engine.name, rank),
                form=Form(layout=each, checksum=checksum),
                address=address,
            )
            for rank, (each, address) in enumerate(zip(layouts, addresses, strict=True))
        ),
    )
