"""The network interface that a relay uses: the one of the address where its engine is reached.

Left to itself, UCX listens at one address of every interface of the machine, and takes memory
registrations from whoever connects there. `UCX_NET_DEVICES` names the interfaces that it may use:

| the engine or its rank listens at       | UCX may use                                            |
|-----------------------------------------|--------------------------------------------------------|
| `ipc://` or loopback, as do its peers   | `lo`                                                   |
| an address of this machine              | its interface, and cards for RDMA                      |
| neither: a rank that dials its peers    | the interface of the route to them, and cards for RDMA |
| every address (`0.0.0.0`, `::`)         | all of them                                            |

Cards for RDMA have no port that listens, and which of them is near a GPU, only UCX knows.

The one rule: an address that belongs to no interface is an error, never a reason to listen on all.
"""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.transport.machine_keys import host_of, is_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.transport.remote import HandoffAddresses

Environment = tuple[tuple[str, str], ...]
"""Variables and their values."""

DEVICES = "UCX_NET_DEVICES"
LOOPBACK = "lo"
EVERYWHERE = {"0.0.0.0", "::", "*"}
_RDMA = Path("/sys/class/infiniband")
_PORT = 9
"""Of a datagram socket that sends nothing: it only asks which way a packet would take."""

_RTM_GETADDR, _RTM_NEWADDR, _NLMSG_DONE = 22, 20, 3
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_MESSAGE = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBi")
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE_BYTES = 1 << 16


def ucx_environment(addresses: HandoffAddresses) -> Environment:
    """What keeps UCX to the interface of these addresses; an operator's own choice is left alone.

    Raises `UnavailableError`: they belong to no interface of this machine.
    """
    own = [each for each in addresses.own if each]
    if DEVICES in os.environ or (own[:1] and host_of(own[0]) in EVERYWHERE):
        return ()
    host = _local_host(own, addresses.peers)
    if not host:
        return ((DEVICES, LOOPBACK),)
    found = dict(addresses_of_this_machine())
    device = found.get(host)
    if device is None:
        raise UnavailableError(
            f"no relay for NIXL: {host} is no address of this machine, which has "
            f"{', '.join(sorted(found))}"
        )
    if device == LOOPBACK:
        return ((DEVICES, LOOPBACK), *_family(host))
    return ((DEVICES, ",".join([device, *_rdma_ports()])), *_family(host))


def _local_host(own: Sequence[str], peers: Sequence[str]) -> str:
    """The address of this machine that stands for the engine; empty: it is reached locally."""
    distant = [address for address in (*own, *peers) if not is_local(address)]
    if not distant:
        return ""
    known = dict(addresses_of_this_machine())
    for address in own:
        for host in () if is_local(address) else _resolved(host_of(address)):
            if host in known:
                return host
    # A rank that listens nowhere, on another machine than its scheduler.
    for address in reversed(distant):
        for host in _resolved(host_of(address)):
            if (source := _source_towards(host)) is not None:
                return source
    return host_of(distant[0])


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [str(each[4][0]).partition("%")[0] for each in found]


def _source_towards(host: str) -> str | None:
    """The address from which this machine would send to a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, _PORT))
        except OSError:
            return None
        return str(asking.getsockname()[0]).partition("%")[0]


def _family(host: str) -> Environment:
    """Which of an interface's addresses UCX listens at: by itself that of IPv4."""
    return (("UCX_TCP_AF_PRIO", "inet6,inet"),) if ip_address(host).version == 6 else ()


def _rdma_ports() -> list[str]:
    if not _RDMA.is_dir():
        return []
    return sorted(f"{port.parts[-3]}:{port.name}" for port in _RDMA.glob("*/ports/*"))


def addresses_of_this_machine() -> Iterator[tuple[str, str]]:
    """Each address of an interface, with the interface's name; the kernel is asked for them."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(10.0)
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        length = _MESSAGE.size + len(request)
        asking.send(_MESSAGE.pack(length, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            received = asking.recv(_RECEIVE_BYTES)
            while received:
                length, kind, *_ = _MESSAGE.unpack_from(received)
                if kind == _NLMSG_DONE or length < _MESSAGE.size:
                    return
                if kind == _RTM_NEWADDR:
                    yield from _address_in(received[_MESSAGE.size : length])
                received = received[_aligned(length) :]


def _address_in(message: bytes) -> Iterator[tuple[str, str]]:
    _, _, _, _, index = _ADDRESS.unpack_from(message)
    rest, found = message[_ADDRESS.size :], {}
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]
    # Of a link between two ends, the other kind is the address of the other end.
    packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if packed:
        yield str(ip_address(packed)), socket.if_indextoname(index)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
