"""The checks of `penstock doctor`: from facts about a machine to findings with remedies.

A check is one function and one row of `CHECKS`. It returns one finding or several:

| status    | means                                                                              |
|-----------|------------------------------------------------------------------------------------|
| `ok`      | nothing to do                                                                      |
| `warning` | it works, but slower or less surely than it could                                  |
| `problem` | Penstock, or what the configuration asks for, will not work here                   |

The one rule: a finding that is not `ok` says what to change.
"""

from __future__ import annotations

import math
import re
import resource
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from penstock.config.shared_stores import (
    CLIENT_SETTINGS,
    MASTER,
    UNIX,
    MooncakeSettings,
    Node,
    ObjectSettings,
    PeerSettings,
    RedisSettings,
    port_range,
)
from penstock.config.values import EngineTable, ServeTable
from penstock.connectors.base.settings import is_version, name_versions
from penstock.connectors.sglang.versions import TESTED as SGLANG_TESTED
from penstock.connectors.vllm.versions import TESTED, is_tested, tested_versions
from penstock.doctor.facts import SERVER_EXTRAS
from penstock.errors import counted, install_hint, server_install_hint
from penstock.tiers.linux_memory import (
    Pages,
    gib,
    huge_page_bytes,
    huge_pages_missing,
    memory_limits,
    online_nodes,
    pages_to_try,
)
from penstock.transport.machine_keys import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from penstock.config import Config, TierKind
    from penstock.doctor.facts import MachineFacts

MEMORY_BYTES_MIN = 2 << 30
"""Python, torch and the smallest model take about as much."""
FILES_MIN = 4096
"""The default 1,024 connections of a server, its processes, and the files of a disk tier."""
SHM_BYTES_MIN = 1 << 30
"""Penstock needs none, but torch, NCCL and vLLM do; containers have 64 MiB unless told."""
DISK_BYTES_PER_S_MIN = 500e6
"""4,000 tokens a second of a model of 8B parameters (128 KiB a token): most GPUs compute faster."""
LINK_SHARE_MIN = 0.7
"""Of the raw rate. One large pinned copy of an H200 reaches 55 of 63 GB/s, 0.87."""
LANE_BYTES_PER_S = {2.5: 0.25e9, 5: 0.5e9, 8: 0.985e9, 16: 1.969e9, 32: 3.938e9, 64: 7.563e9}
"""Of one PCIe lane, by its transfers a second in 1e9."""
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})
"""Reading these takes a call into the kernel, microseconds each time."""
TESTED_PACKAGES = {
    "torch": (2, 13),
    "transformers": (5, 22),
    "llama-cpp-python": (0, 3, 36),
    "nixl": (1, 5),
    "nixl-cu12": (1, 5),
    "mooncake-transfer-engine": (0, 3, 13),
    "mooncake-transfer-engine-non-cuda": (0, 3, 13),
}
"""As in constraints.txt, which is not part of the package; a test compares them."""
STORE_KINDS = tuple(CLIENT_SETTINGS)
"""Shared stores; each kind but `shared` has an extra of the same name."""
EQUIVALENTS = {
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
    "nixl": ("nixl-cu12", "nixl-cu13"),
}
"""What will do as well as the packages of an extra."""
PORTS_TRIED_MAX = 256


class FindingStatus(Enum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str = ""
    """Where a check leaves it empty, `examine` writes the check's own name."""
    status: FindingStatus
    seen: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.status is FindingStatus.OK) == bool(self.remedy):
            raise ValueError(f"remedy: a finding that is {self.status.value} has {self.remedy!r}")


def _ok(seen: str, *, check: str = "") -> DoctorFinding:
    return DoctorFinding(check=check, status=FindingStatus.OK, seen=seen)


def _warning(seen: str, remedy: str, *, check: str = "") -> DoctorFinding:
    return DoctorFinding(check=check, status=FindingStatus.WARNING, seen=seen, remedy=remedy)


def _problem(seen: str, remedy: str, *, check: str = "") -> DoctorFinding:
    return DoctorFinding(check=check, status=FindingStatus.PROBLEM, seen=seen, remedy=remedy)


def _judged(seen: str, remedy: str, *, wrong: bool) -> DoctorFinding:
    """A warning if something is wrong."""
    return _warning(seen, remedy) if wrong else _ok(seen)


def _tiers(facts: MachineFacts, kind: str) -> list[tuple[str, TierKind]]:
    if facts.config is None:
        return []
    pairs = zip(facts.config.cache.tiers, facts.config.tier_kinds, strict=True)
    return [(tier.name, found) for tier, found in pairs if found.name == kind]


def _instances_of(config: Config) -> dict[int, int]:
    """The instances that `penstock serve` starts with this file, by how many ranks they have."""
    engine, serve = config.engine or EngineTable(), config.serve or ServeTable()
    ranks = config.cache.rank_count
    if engine.role == "router":
        return {}
    if engine.role in {"prefill", "decode"}:
        own = engine.prefill_tp if engine.role == "prefill" else engine.decode_tp
        return {own or ranks: serve.instances}
    if not engine.prefill_tp:
        return {ranks: serve.instances}
    found = Counter({engine.prefill_tp: serve.prefill or serve.instances})
    found[engine.decode_tp] += serve.decode or serve.instances
    return dict(found)


def _host_bytes(facts: MachineFacts) -> int:
    """The memory of all host tiers whose size is given in GiB, on all ranks of this machine."""
    config = facts.config
    if config is None:
        return 0
    of_rank = sum(round(kind.gib * (1 << 30)) for _, kind in _tiers(facts, "host") if kind.gib)
    arenas = sum(
        count * (1 if config.equal_ranks else ranks)
        for ranks, count in _instances_of(config).items()
    )
    return of_rank * arenas


def _check_memory(facts: MachineFacts) -> DoctorFinding:
    limits = memory_limits(facts.read)
    if not limits:
        return _ok("the machine does not say how much there is")
    tightest = min(limits, key=lambda limit: limit.available_bytes)
    seen = f"{gib(tightest.available_bytes)} are available: {tightest.source}"
    wanted = _host_bytes(facts)
    if wanted > tightest.available_bytes:
        return _problem(
            f"{seen}; host tiers need {gib(wanted)}",
            "make the host tiers smaller (each rank of each instance takes gib), start fewer, end "
            "other programs, or raise the limit (memory.max, docker --memory, "
            "resources.limits.memory)",
        )
    if tightest.available_bytes < MEMORY_BYTES_MIN:
        return _warning(seen, f"free some: a server needs {gib(MEMORY_BYTES_MIN)} and its model")
    return _ok(f"{seen}; host tiers need {gib(wanted)}" if wanted else seen)


def _check_locked_memory(facts: MachineFacts) -> DoctorFinding:
    soft, _ = facts.limit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    seen = f"RLIMIT_MEMLOCK is {gib(soft) if limited else 'unlimited'}"
    adapters = facts.names_in("/sys/class/infiniband")
    if limited and adapters and soft < max(_host_bytes(facts), 1 << 30):
        return _warning(
            f"{seen}, and there are RDMA adapters ({', '.join(adapters)})",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1): "
            "NIXL registers memory with them, which counts as locked",
        )
    return _ok(seen)


def _check_open_files(facts: MachineFacts) -> DoctorFinding:
    soft, hard = facts.limit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_MIN:
        return _ok(f"RLIMIT_NOFILE is {'unlimited' if soft < 0 else soft}")
    return _warning(
        f"RLIMIT_NOFILE is {soft} of at most {'any number' if hard < 0 else hard}",
        f"ulimit -n {FILES_MIN} or more (systemd: LimitNOFILE=, docker: --ulimit nofile=)",
    )


def _check_huge_pages(facts: MachineFacts) -> DoctorFinding:
    wanted = _host_bytes(facts)
    if not wanted:
        return _ok("no host tier asks for them")
    best = pages_to_try(wanted, facts.read)[0]
    if best is not Pages.PLAIN:
        return _ok(f"host tiers get {best.value} pages")
    missing = huge_pages_missing(wanted, facts.read)
    return _warning(
        f"host tiers of {gib(wanted)} get plain pages",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or set "
        f"{missing} more of {gib(huge_page_bytes(facts.read))} aside (sysctl vm.nr_hugepages)",
    )


def _check_numa(facts: MachineFacts) -> DoctorFinding:
    nodes = online_nodes(facts.read)
    if len(nodes) == 1:
        return _ok("the machine has one node")
    of_gpus = sorted({gpu.numa_node for gpu in facts.gpus() if gpu.numa_node >= 0})
    seen = f"nodes {nodes}, GPUs on {of_gpus or 'no known one'}"
    strays = [
        f"{name} on node {node}" if node >= 0 else f"{name} on any node"
        for name, kind in _tiers(facts, "host")
        if of_gpus and (node := int(kind.options.get("numa_node", -1))) not in of_gpus
    ]
    if not strays:
        return _ok(seen)
    return _warning(
        f"{seen}; host tiers: {', '.join(strays)}",
        f"numa_node = {of_gpus[0]} for the tier, so that copies do not cross sockets; an "
        "engine for each node where GPUs are on several",
    )


def _check_cpus(facts: MachineFacts) -> DoctorFinding:
    cores, quota = facts.cores(), _cpu_quota(facts)
    if quota is not None and quota < cores:
        return _warning(
            f"{cores} cores can be used, but only {quota:.2g} of them at a time (cgroup quota)",
            f"engine.threads = {max(1, math.floor(quota))}, or raise the quota (docker --cpus, "
            "resources.limits.cpu): threads beyond it are stopped within steps",
        )
    return _judged(
        f"{counted(cores, 'core')} can be used",
        "give it two or more: the engine and the server's processes take turns otherwise",
        wrong=cores < 2,
    )


def _cpu_quota(facts: MachineFacts) -> float | None:
    """How many cores' time the control group gets; `None`: no limit."""
    words = facts.read("/sys/fs/cgroup/cpu.max").split()
    if not words:
        folder = "/sys/fs/cgroup/cpu"
        words = [facts.read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _check_shared_memory(facts: MachineFacts) -> DoctorFinding:
    room = facts.room("/dev/shm")
    return _judged(
        gib(room.total_bytes) if room else "not found",
        "docker --shm-size=8g or --ipc=host (Kubernetes: an emptyDir of medium Memory): ranks of "
        "vLLM and NCCL exchange data there",
        wrong=room is not None and room.total_bytes < SHM_BYTES_MIN,
    )


def _check_compiler(facts: MachineFacts) -> DoctorFinding:
    found = facts.compiler()
    return _judged(
        found or "no C compiler: neither CC is set nor gcc found",
        "apt-get install gcc, or set CC: Triton compiles with it what launches kernels on a GPU",
        wrong=found is None and bool(list(facts.gpus())),
    )


def _check_cuda(facts: MachineFacts) -> DoctorFinding:
    gpus = list(facts.gpus())
    engine = facts.config.engine if facts.config else None
    wanted = engine is not None and engine.device.startswith("cuda")
    driver = facts.read("/proc/driver/nvidia/version").partition("\n")[0].strip()
    if gpus and driver:
        return _ok(f"{counted(len(gpus), 'GPU')}; {driver}")
    if gpus:
        return _problem(
            f"{counted(len(gpus), 'GPU')} on the bus, but no driver "
            "(/proc/driver/nvidia is missing)",
            "install NVIDIA's driver; in a container, start it with --gpus all",
        )
    if wanted:
        return _problem(
            "engine.device is 'cuda', and there is no NVIDIA GPU",
            "engine.device = 'cpu', or start the container with --gpus all",
        )
    return _ok("there is no NVIDIA GPU: the CPU computes")


def _check_links(facts: MachineFacts) -> Iterator[DoctorFinding]:
    gpus = list(facts.gpus())
    if not gpus:
        return
    rates = facts.gpu_rates()
    if isinstance(rates, str):
        yield _warning(f"not measured: {rates}", f"{install_hint('torch')}, with CUDA, and retry")
    measured = {} if isinstance(rates, str) else {rate.address: rate for rate in rates}
    for gpu in gpus:
        full = link_bytes_per_s(gpu.speed_max, gpu.width_max)
        name = f"{gpu.address}: PCIe {gpu.speed_max} × {gpu.width_max}"
        if gpu.width and gpu.width != gpu.width_max:
            yield _warning(
                f"{name}, of which {gpu.width} lanes are in use",
                "seat the GPU in a slot with all its lanes, or look for a faulty riser",
            )
        rate = measured.get(gpu.address)
        if rate is not None:
            yield _link_finding(name, full, rate.to_device_bytes_per_s, rate.to_host_bytes_per_s)


def _link_finding(name: str, full: float | None, down: float, up: float) -> DoctorFinding:
    seen = f"{name}: {down / 1e9:.1f} GB/s to the GPU, {up / 1e9:.1f} GB/s to the host"
    if full is None:
        return _ok(f"{seen}; the bus does not say what the link should give")
    seen = f"{seen}, {min(down, up) / full:.0%} of the link's {full / 1e9:.1f} GB/s"
    return _judged(
        seen,
        "look whether other programs use the GPU, whether memory is on its NUMA node, and in the "
        "BIOS at ACS, IOMMU and the link's speed",
        wrong=min(down, up) < LINK_SHARE_MIN * full,
    )


def link_bytes_per_s(speed: str, width: str) -> float | None:
    """What a PCIe link should give in one direction, as /sys spells its speed and width."""
    transfers = re.match(r"([\d.]+) GT/s", speed)
    lane = LANE_BYTES_PER_S.get(float(transfers[1])) if transfers else None
    return lane * int(width) if lane and width.isdigit() and int(width) else None


def _check_disks(facts: MachineFacts) -> Iterator[DoctorFinding]:
    for name, kind in _tiers(facts, "disk"):
        path = str(kind.options["path"])
        rate = facts.disk_rate(path)
        if isinstance(rate, str):
            yield _problem(
                f"tier {name!r}: nothing can be written: {rate}",
                f"make {path} a folder that the user of the server can write to, with room",
            )
            continue
        yield from _disk_findings(facts, name, kind)
        seen = (
            f"tier {name!r}: {rate.write_bytes_per_s / 1e9:.2f} GB/s written, "
            f"{rate.read_bytes_per_s / 1e9:.2f} GB/s read"
        )
        if not rate.direct:
            yield _warning(
                f"{seen}, through the file cache",
                f"put {path} on a local disk (ext4, xfs): its file system has no direct I/O, so "
                "the tier takes memory from others",
            )
            continue
        yield _judged(
            seen,
            "use an NVMe disk; where loading is slower than computing, Penstock computes",
            wrong=min(rate[:2]) < DISK_BYTES_PER_S_MIN,
        )


def _disk_findings(facts: MachineFacts, name: str, kind: TierKind) -> Iterator[DoctorFinding]:
    """Whether a tier has the room that it may fill."""
    path = str(kind.options["path"])
    room = facts.room(path)
    wanted = round((kind.gib or 0) * (1 << 30))
    if room is None or not wanted:
        return
    seen = f"tier {name!r}: {gib(room.free_bytes)} are free at {path}, it may take {gib(wanted)}"
    if wanted <= room.free_bytes:
        yield _ok(seen, check="disk room")
    elif wanted <= room.total_bytes:
        yield _warning(
            seen,
            "free the rest, or make the tier smaller (gib); what it has already is part of it",
            check="disk room",
        )
    else:
        yield _problem(
            f"{seen}, and the disk has only {gib(room.total_bytes)}",
            "make the tier smaller (gib), or take a larger disk",
            check="disk room",
        )


def _check_ports(facts: MachineFacts) -> Iterator[DoctorFinding]:
    serve = facts.config.serve if facts.config else None
    if facts.config is not None and serve is None:
        return
    host, port = (serve.host, serve.port) if serve else ("127.0.0.1", 8000)
    if host.startswith(UNIX):
        yield _ok(f"{host} takes none")
        return
    why = facts.port(host, port) if port else ""
    if why:
        # Without a configuration nobody has asked for this one.
        found = _problem if serve else _warning
        remedy = "end the program that listens there (ss -ltnp), or choose another serve.port"
        yield found(f"{host}:{port}: {why}", remedy)
    else:
        yield _ok(f"{host}:{port} is free" if port else "any free port is taken")
    ports = port_range(serve.ports) if serve else range(0)
    tried = ports[:PORTS_TRIED_MAX]
    taken = [each for each in tried if facts.port("0.0.0.0", each)]
    if len(taken) * 2 > len(tried):
        yield _warning(
            f"{len(taken)} of {len(tried)} ports of serve.ports are in use",
            "a wider range: each connection takes two",
        )


def _check_packages(facts: MachineFacts) -> Iterator[DoctorFinding]:
    """Whether what the configuration asks for is installed."""
    for extra, why in _wanted_extras(facts):
        names = facts.packages_of(extra)
        missing = [name for name in names if facts.package(name) is None]
        if any(facts.package(name) is not None for name in EQUIVALENTS.get(extra, ())):
            continue
        if missing:
            yield _problem(
                f"{', '.join(missing)} not installed, and {why}",
                server_install_hint(extra) if extra in SERVER_EXTRAS else install_hint(extra),
            )


def _wanted_extras(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    """Each with why."""
    config = facts.config
    if config is None:
        return
    serve, engine, handoff = config.serve, config.engine, config.handoff
    if serve is not None or engine is not None:
        yield "engine", "the file is that of a server"
    if serve is not None and serve.tracing:
        yield "otel", "serve.tracing is true"
    if handoff is not None and handoff.transport == "nixl":
        yield "nixl", "handoff.transport is 'nixl'"
    elif engine is not None and engine.handoff_host and not is_loopback(engine.handoff_host):
        yield "nixl", "engine.handoff_host lets other machines hand over"
    for kind in (*STORE_KINDS, "disk"):
        for name, found in _tiers(facts, kind):
            yield from _extras_of_tier(name, found)


def _extras_of_tier(name: str, kind: TierKind) -> Iterator[tuple[str, str]]:
    options = kind.options
    in_extra = kind.name in STORE_KINDS and kind.name not in ("shared", "peers")
    settings = CLIENT_SETTINGS["peers"](**options) if kind.name == "peers" else None
    if isinstance(settings, PeerSettings) and settings.redis is not None:
        yield "redis", f"tier {name!r} finds its peers in a Redis"
    if isinstance(settings, PeerSettings) and settings.transport == "nixl":
        yield "nixl", f"tier {name!r} has transport 'nixl'"
    if in_extra and not str(options.get("url", "")).startswith("file:"):
        yield kind.name, f"tier {name!r} is of kind {kind.name!r}"
    if options.get("compression", "off") != "off":
        yield "compression", f"tier {name!r} has compression"
    if kind.name == "disk" and options.get("key_file"):
        yield "disk-encryption", f"tier {name!r} has a key_file"


def _check_stores(facts: MachineFacts) -> Iterator[DoctorFinding]:
    """Whether somebody answers where the configuration has its shared stores."""
    for kind in STORE_KINDS:
        for name, found in _tiers(facts, kind):
            yield _store_finding(facts, name, CLIENT_SETTINGS[kind](**found.options))


def _store_finding(facts: MachineFacts, name: str, settings: object) -> DoctorFinding:
    if isinstance(settings, ObjectSettings) and settings.scheme == "file":
        rate = facts.disk_rate(settings.path)
        if isinstance(rate, str):
            return _problem(
                f"tier {name!r}: nothing can be written: {rate}",
                f"mount {settings.path}, and let the user of the server write to it",
            )
        return _ok(f"tier {name!r}: {settings.path} can be written to")
    nodes = _nodes_of(settings)
    if not nodes:
        return _ok(f"tier {name!r}: not asked; `penstock store probe` does")
    problems = {node: facts.reach(*node) for node in nodes}
    seen = "; ".join(f"{node}: {why or 'somebody listens'}" for node, why in problems.items())
    if all(problems.values()) and isinstance(settings, PeerSettings):
        others = "the other engines" if settings.redis is None else "this Redis"
        return _warning(f"tier {name!r}: {seen}", f"start {others}, or mend peers")
    if all(problems.values()):
        return _problem(
            f"tier {name!r}: {seen}",
            "start the store, or mend its address or the way to it (DNS, firewall): without it "
            "the tier is off",
        )
    if any(problems.values()):
        return _warning(f"tier {name!r}: {seen}", "start the others, or take them out")
    return _ok(f"tier {name!r}: {seen}")


def _nodes_of(settings: object) -> list[Node]:
    """The servers of a store that can be asked without its own client."""
    if isinstance(settings, RedisSettings):
        return list(settings.nodes)
    if isinstance(settings, PeerSettings) and settings.redis is not None:
        return list(settings.redis.nodes)
    if isinstance(settings, PeerSettings):
        dialled = [each for each in settings.addresses if not each.startswith(UNIX)]
        return [
            Node(host, int(port)) for host, _, port in (each.rpartition(":") for each in dialled)
        ]
    if isinstance(settings, MooncakeSettings):
        found = MASTER.fullmatch(settings.master)
        return [Node(found["host"], int(found["port"]))] if found and found["port"] else []
    endpoint = urlsplit(settings.endpoint if isinstance(settings, ObjectSettings) else "")
    if not endpoint.hostname:
        return []
    return [Node(endpoint.hostname, endpoint.port or (443 if endpoint.scheme == "https" else 80))]


def _check_versions(facts: MachineFacts) -> Iterator[DoctorFinding]:
    vllm = facts.package("vllm")
    if vllm is not None and not is_tested(vllm):
        yield _warning(
            f"vllm {vllm}; the connector is tested with {tested_versions()}, off with others",
            f'pip install "vllm=={_dotted(TESTED[0])}.*", or penstock vllm-config --any-version',
        )
    elif vllm is not None:
        yield _ok(f"vllm {vllm}, as tested")
    sglang = facts.package("sglang")
    if sglang is not None and not is_version(sglang, SGLANG_TESTED):
        yield _warning(
            f"sglang {sglang}; the linker is tested with {name_versions(SGLANG_TESTED)}, off with "
            "others",
            f'pip install "sglang=={_dotted(SGLANG_TESTED[0])}", or penstock sglang-config '
            "--any-version",
        )
    elif sglang is not None:
        yield _ok(f"sglang {sglang}, as tested")
    for name, tested in TESTED_PACKAGES.items():
        found = facts.package(name)
        # Engines bring the torch that they were built for.
        if found is None or (name == "torch" and (vllm or sglang)):
            continue
        if found.split(".")[: len(tested)] == [str(part) for part in tested]:
            yield _ok(f"{name} {found}, as tested")
        else:
            yield _warning(
                f"{name} {found}; Penstock is tested with {_dotted(tested)}",
                f'if something is wrong, pip install "{name}=={_dotted(tested)}.*" first',
            )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _check_clock(facts: MachineFacts) -> Iterator[DoctorFinding]:
    folder = "/sys/devices/system/clocksource/clocksource0"
    source = facts.read(f"{folder}/current_clocksource").strip()
    slow = source in SLOW_CLOCKS
    yield _judged(
        f"the clock source is {source or 'not known'}{', which is slow to read' if slow else ''}",
        f"echo tsc > {folder}/current_clocksource, or boot with clocksource=tsc",
        wrong=slow,
    )
    if facts.clock() is False:
        yield _warning(
            "the clock is not synchronised",
            "start chrony or systemd-timesyncd: logs of several machines cannot be compared "
            "otherwise; Penstock's own deadlines do not depend on it",
        )


CHECKS: dict[str, Callable[[MachineFacts], DoctorFinding | Iterable[DoctorFinding]]] = {
    "memory": _check_memory,
    "locked memory": _check_locked_memory,
    "open files": _check_open_files,
    "huge pages": _check_huge_pages,
    "numa": _check_numa,
    "cpu limit": _check_cpus,
    "/dev/shm": _check_shared_memory,
    "compiler": _check_compiler,
    "cuda": _check_cuda,
    "pcie": _check_links,
    "disk": _check_disks,
    "shared store": _check_stores,
    "ports": _check_ports,
    "packages": _check_packages,
    "versions": _check_versions,
    "clock": _check_clock,
}


def examine(facts: MachineFacts, names: Collection[str] = CHECKS) -> list[DoctorFinding]:
    """The findings of some checks, or of all."""
    made = {name: CHECKS[name](facts) for name in names}
    return [
        each if each.check else msgspec.structs.replace(each, check=name)
        for name, found in made.items()
        for each in ([found] if isinstance(found, DoctorFinding) else found)
    ]
