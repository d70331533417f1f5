"""What the machine says of itself: files of the kernel, limits, packages, short measurements.

Checks know the machine by `MachineFacts` alone, so a test can be any machine: `root` is the folder
that /proc and /sys lie in, and every fact that is no file is a function in a field.

The one rule: a fact that cannot be found is `None`, empty or a sentence that says why. It is never
an exception, and no measurement lasts longer than a few seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as version_of
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from penstock.movers.compiled import find_compiler
from penstock.tiers.linux_memory import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.config import Config

NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
"""Classes of PCI devices that are GPUs, with or without a screen."""
SERVER = "penstock-serve"
SERVER_EXTRAS = frozenset({"engine", "otel", "transformers"})
"""Extras of the server's wheel; the others are of `penstock`."""
REACH_S = 2.0
DISK_BYTES = 64 << 20
DISK_PIECE_BYTES = 4 << 20
DISK_S = 2.0
"""After so long, the rate is that of what was written or read until then."""
GPU_BYTES = 256 << 20
GPU_ROUNDS = 5
_UNSYNCHRONISED = 5
"""What adjtimex(2) returns while nobody keeps the clock."""
_TIMEX_BYTES = 512
"""More than `struct timex` has; all zero means: change nothing."""


class DiskRate(NamedTuple):
    """What a folder's disk did, past the file cache where its file system can."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    direct: bool
    """Whether the file cache was out of the way; otherwise the rates are at most memory's."""


class GpuRate(NamedTuple):
    """What copies between pinned host memory and one GPU reached."""

    address: str
    """Of the device, as /sys/bus/pci/devices spells it."""
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float


class GpuLink(NamedTuple):
    """A GPU in /sys/bus/pci."""

    address: str
    numa_node: int
    """-1: the machine does not say."""
    speed: str
    width: str
    speed_max: str
    width_max: str


class DiskRoom(NamedTuple):
    """Of a file system."""

    total_bytes: int
    free_bytes: int


def package_version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


def packages_of(extra: str) -> list[str]:
    """The distributions that an extra of Penstock brings; none where it is not installed.

    An extra of the server brings the server.
    """
    wheel = SERVER if extra in SERVER_EXTRAS else "penstock"
    try:
        wanted = requires(wheel) or []
    except PackageNotFoundError:
        return [SERVER] if wheel == SERVER else []
    ends = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    found = (re.match(r"[\w.-]+", each) for each in wanted if ends.search(each))
    return [each[0] for each in found if each]


def room_of(path: str) -> DiskRoom | None:
    """The room of the file system that a path is on, or would be on."""
    for folder in (Path(path), *Path(path).parents):
        if folder.is_dir():
            try:
                found = shutil.disk_usage(folder)
            except OSError:
                return None
            return DiskRoom(found.total, found.free)
    return None


def port_problem(host: str, port: int) -> str:
    """Why nobody could listen there now; empty if one could."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except (OSError, UnicodeError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def reach_problem(host: str, port: int) -> str:
    """Why nobody can be reached within 2 s; empty if somebody can. Port 0: `host` is a socket."""
    try:
        if port:
            socket.create_connection((host, port), timeout=REACH_S).close()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                caller.settimeout(REACH_S)
                caller.connect(host)
    except TimeoutError:
        return f"no answer within {REACH_S:g} s"
    except (OSError, UnicodeError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def clock_is_synchronised() -> bool | None:
    """Whether somebody keeps the machine's clock; `None` if it cannot be told."""
    try:
        ask = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = ask(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _UNSYNCHRONISED


def measure_disk(folder: str) -> DiskRate | str:
    """Writes and reads a file of 64 MiB there, for at most 2 s each; or says why it cannot."""
    place = Path(folder)
    try:
        while not place.is_dir() and place != place.parent:
            if place.exists():
                return f"{place}: it is no folder"
            place = place.parent
        fd, path = tempfile.mkstemp(prefix=".penstock-doctor-", dir=place)
        os.close(fd)
        try:
            return _measure_file(path)
        finally:
            os.unlink(path)
    except OSError as error:
        return f"{place}: {error.strerror or error}"


def _measure_file(path: str) -> DiskRate:
    with mmap.mmap(-1, DISK_PIECE_BYTES) as piece:
        piece.write(os.urandom(DISK_PIECE_BYTES))
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            direct = True
        except OSError:
            fd = os.open(path, os.O_RDWR)
            direct = False
        try:
            began = perf_counter()
            written = _within(lambda offset: os.pwrite(fd, piece, offset), DISK_BYTES)
            os.fdatasync(fd)
            write_s = perf_counter() - began
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began = perf_counter()
            read = _within(lambda offset: os.preadv(fd, [piece], offset), written)
            read_s = perf_counter() - began
        finally:
            os.close(fd)
    return DiskRate(written / max(write_s, 1e-9), read / max(read_s, 1e-9), direct)


def _within(transfer: Callable[[int], int], limit_bytes: int) -> int:
    """Transfers piece after piece until the limit or the time is reached; returns the bytes."""
    done = 0
    deadline = perf_counter() + DISK_S
    while done < limit_bytes and perf_counter() < deadline:
        moved = transfer(done)
        if not moved:
            break
        done += moved
    return done


def measure_gpus() -> list[GpuRate] | str:
    """The rates of all GPUs that torch can use; or says why there are none."""
    try:
        import torch  # noqa: PLC0415  (an extra, and seconds to import: only where there is a GPU)
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        return [_measure_gpu(number) for number in range(torch.cuda.device_count())]
    except RuntimeError as error:
        return f"CUDA failed: {error}"


def _measure_gpu(number: int) -> GpuRate:
    import torch  # noqa: PLC0415

    found = torch.cuda.get_device_properties(number)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    with torch.cuda.device(number):
        host = torch.empty(GPU_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(GPU_BYTES, dtype=torch.uint8, device="cuda")
        rates = []
        for target, source in ((device, host), (host, device)):
            best = 0.0
            for _ in range(GPU_ROUNDS):
                torch.cuda.synchronize()
                began = perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                best = max(best, GPU_BYTES / (perf_counter() - began))
            rates.append(best)
    return GpuRate(address, rates[0], rates[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """A machine, and the configuration that it should be fit for."""

    config: Config | None = None
    root: Path = field(default=Path("/"))
    """Where /proc and /sys are."""
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    cores: Callable[[], int] = field(default=lambda: len(os.sched_getaffinity(0)))
    package: Callable[[str], str | None] = package_version
    packages_of: Callable[[str], list[str]] = packages_of
    compiler: Callable[[], str | None] = find_compiler
    room: Callable[[str], DiskRoom | None] = room_of
    port: Callable[[str, int], str] = port_problem
    reach: Callable[[str, int], str] = reach_problem
    clock: Callable[[], bool | None] = clock_is_synchronised
    disk_rate: Callable[[str], DiskRate | str] = measure_disk
    gpu_rates: Callable[[], list[GpuRate] | str] = measure_gpus

    def read(self, path: str) -> str:
        """The text of a file of the kernel; empty if there is none."""
        return read_text(str(self.root / path.lstrip("/")))

    def names_in(self, path: str) -> list[str]:
        """What lies in a folder of the kernel; nothing if there is none."""
        try:
            return sorted(each.name for each in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def gpus(self) -> Iterator[GpuLink]:
        """NVIDIA's GPUs, as the bus knows them."""
        for address in self.names_in("/sys/bus/pci/devices"):
            folder = f"/sys/bus/pci/devices/{address}"

            def told(name: str, folder: str = folder) -> str:
                return self.read(f"{folder}/{name}").strip()

            if told("vendor") == NVIDIA and told("class").startswith(_DISPLAY_CLASS):
                node = told("numa_node")
                yield GpuLink(
                    address,
                    int(node) if node.isdigit() else -1,
                    told("current_link_speed"),
                    told("current_link_width"),
                    told("max_link_speed"),
                    told("max_link_width"),
                )
