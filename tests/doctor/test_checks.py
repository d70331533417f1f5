"""Each check of `penstock doctor`, on machines that are made of files and functions."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.config import parse_config
from penstock.connectors.sglang.versions import TESTED as SGLANG_TESTED
from penstock.connectors.vllm.versions import TESTED
from penstock.doctor.checks import (
    CHECKS,
    TESTED_PACKAGES,
    DoctorFinding,
    FindingStatus,
    examine,
    link_bytes_per_s,
)
from penstock.doctor.facts import DiskRate, DiskRoom, GpuRate, MachineFacts
from penstock.errors import install_hint, server_install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30
MEMINFO = "MemAvailable:   33554432 kB\nHugepagesize:       2048 kB\nHugePages_Free:        0\n"
GPU = "/sys/bus/pci/devices/0000:41:00.0"
A_GPU = {
    f"{GPU}/vendor": "0x10de\n",
    f"{GPU}/class": "0x030200\n",
    f"{GPU}/numa_node": "1\n",
    f"{GPU}/current_link_speed": "2.5 GT/s PCIe\n",
    f"{GPU}/current_link_width": "16\n",
    f"{GPU}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{GPU}/max_link_width": "16\n",
    "/proc/driver/nvidia/version": "NVRM version: 580\nGCC version: gcc 15\n",
}
CONFIG = """
version = 1
model.name = "m"
cache.blocks = 8
[[tiers]]
name = "host"
kind = "host"
gib = 8
"""
REDIS = CONFIG + '[[tiers]]\nname = "shared"\nkind = "redis"\nurl = "redis://cache:6380"\n'
PEERS = CONFIG + (
    '[[tiers]]\nname = "shared"\nkind = "peers"\nlisten = "127.0.0.1:5300"\n'
    'peers = "redis://cache:6380"\n'
)
CLUSTER = CONFIG + (
    '[[tiers]]\nname = "shared"\nkind = "redis"\nurl = "redis://a,b:7000"\ncluster = true\n'
)
NIXL = f'{CONFIG}[handoff]\ntransport = "nixl"\n'
MOONCAKE = CONFIG + '[[tiers]]\nname = "shared"\nkind = "mooncake"\nmaster = "cache:50051"\n'
OBJECTS = CONFIG + '[[tiers]]\nname = "shared"\nkind = "objects"\nurl = "s3://bucket/kv"\n'
FOLDER = CONFIG + '[[tiers]]\nname = "shared"\nkind = "objects"\nurl = "file:///mnt/kv"\n'
PACKAGES = {
    "engine": ["torch", "gguf"],
    "redis": ["redis"],
    "mooncake": ["mooncake-transfer-engine"],
    "objects": ["obstore"],
    "compression": ["zstandard"],
    "disk-encryption": ["cryptography"],
    "otel": ["opentelemetry-sdk"],
    "nixl": ["nixl"],
}
DISK = CONFIG + '[[tiers]]\nname = "disk"\nkind = "disk"\ngib = 100\npath = "/disk"\n'


class Machine:
    """A healthy machine in a folder, to which a test adds what is wrong."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.facts = MachineFacts(
            root=root,
            limit=lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
            cores=lambda: 16,
            package=lambda _: None,
            packages_of=lambda extra: PACKAGES[extra],
            reach=lambda *_: "",
            compiler=lambda: "gcc",
            room=lambda _: DiskRoom(1000 * GIB, 900 * GIB),
            port=lambda *_: "",
            clock=lambda: True,
            disk_rate=lambda _: DiskRate(2e9, 3e9, direct=True),
            gpu_rates=lambda: [GpuRate("0000:41:00.0", 55e9, 56e9)],
        )
        self.write({"/proc/meminfo": MEMINFO})

    def write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            file = self._root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def check(self, name: str, config: str = "", **facts: Any) -> list[DoctorFinding]:
        if config:
            facts["config"] = parse_config(config)
        return examine(replace(self.facts, **facts), [name])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def only(findings: list[DoctorFinding]) -> tuple[str, str, str]:
    [found] = findings
    return found.status.value, found.seen, found.remedy


def statuses(findings: list[DoctorFinding]) -> list[str]:
    return [each.status.value for each in findings]


def test_a_healthy_machine_has_no_finding_but_ok(machine: Machine) -> None:
    shmem = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    machine.write({**A_GPU, shmem: "always [advise] never\n"})

    findings = examine(replace(machine.facts, config=parse_config(DISK)))

    assert set(statuses(findings)) == {"ok"}
    # A file without [serve] asks for no port.
    # None has packages that matter here, and no store is shared.
    unasked = {"ports", "versions", "packages", "shared store"}
    assert {each.check for each in findings} == {*CHECKS, "disk room"} - unasked


def test_a_machine_that_says_nothing_is_no_problem(tmp_path: Path, machine: Machine) -> None:
    silent = replace(machine.facts, root=tmp_path / "none", room=lambda _: None, clock=lambda: None)

    assert set(statuses(examine(silent))) == {"ok"}


def test_a_host_tier_larger_than_the_memory_is_a_problem(machine: Machine) -> None:
    status, seen, remedy = only(machine.check("memory", CONFIG.replace("gib = 8", "gib = 64")))

    assert status == "problem"
    assert "32.00 GiB are available" in seen
    assert "64.00 GiB" in seen
    assert "make the host tiers smaller" in remedy


@pytest.mark.parametrize(
    ("tables", "wanted"),
    [
        ("", 8),
        ("cache.ranks = 2\n", 16),
        ("[serve]\ninstances = 3\n", 24),
        ("[engine]\nprefill_tp = 2\ndecode_tp = 1\n", 24),
        ("[engine]\nprefill_tp = 2\ndecode_tp = 1\n[serve]\nprefill = 1\ndecode = 2\n", 32),
        ('[engine]\nrole = "decode"\ndecode_tp = 2\nprefill_tp = 1\n[serve]\ninstances = 2\n', 32),
        ('[engine]\nrole = "router"\n[serve]\nrouter = "tcp://127.0.0.1:7000"\n', 0),
    ],
)
def test_every_rank_of_every_instance_takes_the_memory_of_a_host_tier(
    machine: Machine, tables: str, wanted: int
) -> None:
    machine.write({"/proc/meminfo": "MemAvailable:   6291456 kB\n"})
    head, _, tiers = CONFIG.partition("[[tiers]]")
    config = f"{head}{tables}[[tiers]]{tiers}"

    status, seen, _ = only(machine.check("memory", config))

    assert status == ("problem" if wanted else "ok")
    assert f"host tiers need {wanted}.00 GiB" in seen or not wanted


def test_a_control_group_limits_memory_more_than_the_machine(machine: Machine) -> None:
    machine.write(
        {
            "/proc/self/cgroup": "0::/pod\n",
            "/proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "/sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "/sys/fs/cgroup/pod/memory.current": "0\n",
        }
    )

    status, seen, _ = only(machine.check("memory", CONFIG))

    assert status == "problem"
    assert "memory.max in /sys/fs/cgroup/pod" in seen


def test_little_memory_is_a_warning_without_a_configuration(machine: Machine) -> None:
    machine.write({"/proc/meminfo": "MemAvailable:   1048576 kB\n"})

    assert only(machine.check("memory"))[0] == "warning"


def test_locked_memory_matters_where_there_is_rdma(machine: Machine) -> None:
    def limit(_: int) -> tuple[int, int]:
        return 8 << 20, 8 << 20

    assert only(machine.check("locked memory", limit=limit))[0] == "ok"
    machine.write({"/sys/class/infiniband/mlx5_0/node_type": "1: CA\n"})

    status, seen, remedy = only(machine.check("locked memory", limit=limit))

    assert (status, "mlx5_0" in seen) == ("warning", True)
    assert "ulimit -l unlimited" in remedy


def test_few_open_files_are_a_warning(machine: Machine) -> None:
    status, _, remedy = only(machine.check("open files", limit=lambda _: (1024, 1 << 20)))

    assert status == "warning"
    assert "ulimit -n" in remedy


def test_a_host_tier_of_plain_pages_says_how_to_get_huge_ones(machine: Machine) -> None:
    status, _, remedy = only(machine.check("huge pages", CONFIG))

    assert status == "warning"
    assert "shmem_enabled" in remedy
    assert "4096 more of 2.0 MiB" in remedy
    assert only(machine.check("huge pages"))[0] == "ok"


@pytest.mark.parametrize(("node", "status"), [("-1", "warning"), ("0", "warning"), ("1", "ok")])
def test_a_host_tier_belongs_on_the_node_of_the_gpu(
    machine: Machine, node: str, status: str
) -> None:
    machine.write({**A_GPU, "/sys/devices/system/node/online": "0-1\n"})

    found = only(machine.check("numa", f"{CONFIG}numa_node = {node}\n"))

    assert found[0] == status
    assert status == "ok" or "numa_node = 1" in found[2]


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({"/sys/fs/cgroup/cpu.max": "250000 100000\n"}, "warning"),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, "ok"),
        ({"/sys/fs/cgroup/cpu.max": "garbage\n"}, "ok"),
        ({"/sys/fs/cgroup/cpu.max": "5 0\n"}, "ok"),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            "warning",
        ),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, "ok"),
    ],
)
def test_a_quota_below_the_cores_is_a_warning(
    machine: Machine, files: dict[str, str], status: str
) -> None:
    machine.write(files)

    found = only(machine.check("cpu limit"))

    assert found[0] == status
    assert status == "ok" or "engine.threads = 2" in found[2]


def test_one_core_is_a_warning(machine: Machine) -> None:
    assert only(machine.check("cpu limit", cores=lambda: 1))[0] == "warning"


def test_the_shared_memory_of_a_plain_container_is_a_warning(machine: Machine) -> None:
    status, _, remedy = only(machine.check("/dev/shm", room=lambda _: DiskRoom(64 << 20, 64 << 20)))

    assert status == "warning"
    assert "--shm-size" in remedy


def test_a_missing_compiler_is_a_warning_where_there_is_a_gpu(machine: Machine) -> None:
    without = only(machine.check("compiler", compiler=lambda: None))
    machine.write(A_GPU)

    status, _, remedy = only(machine.check("compiler", compiler=lambda: None))

    assert without[0] == "ok"
    assert status == "warning"
    assert "gcc" in remedy


def test_a_gpu_without_a_driver_is_a_problem(machine: Machine) -> None:
    machine.write({path: text for path, text in A_GPU.items() if path.startswith(GPU)})

    assert only(machine.check("cuda"))[0] == "problem"


def test_a_configuration_for_cuda_needs_a_gpu(machine: Machine) -> None:
    wanted = f'{CONFIG}[engine]\ndevice = "cuda"\ndtype = "bfloat16"\n'

    assert only(machine.check("cuda", wanted))[0] == "problem"
    machine.write(A_GPU)
    assert only(machine.check("cuda", wanted))[0] == "ok"


def test_a_link_that_gives_what_it_should_is_ok_also_where_it_sleeps_when_idle(
    machine: Machine,
) -> None:
    machine.write(A_GPU)

    status, seen, _ = only(machine.check("pcie"))

    assert status == "ok"
    assert "87% of the link's 63.0 GB/s" in seen


def test_a_slow_link_and_missing_lanes_are_warnings(machine: Machine) -> None:
    machine.write({**A_GPU, f"{GPU}/current_link_width": "8\n"})

    findings = machine.check("pcie", gpu_rates=lambda: [GpuRate("0000:41:00.0", 26e9, 27e9)])

    assert statuses(findings) == ["warning", "warning"]
    assert "8 lanes" in findings[0].seen
    assert "41% of" in findings[1].seen


def test_a_link_that_cannot_be_measured_says_why(machine: Machine) -> None:
    machine.write(A_GPU)

    status, seen, _ = only(machine.check("pcie", gpu_rates=lambda: "torch finds no CUDA device"))

    assert (status, seen) == ("warning", "not measured: torch finds no CUDA device")


def test_without_a_gpu_no_link_is_measured(machine: Machine) -> None:
    assert machine.check("pcie", gpu_rates=lambda: pytest.fail("measured")) == []


@pytest.mark.parametrize(
    ("speed", "width", "rate"),
    [
        ("32.0 GT/s PCIe", "16", 63.008e9),
        ("8.0 GT/s PCIe", "4", 3.94e9),
        ("Unknown", "16", None),
        ("32.0 GT/s PCIe", "", None),
        ("7.7 GT/s PCIe", "16", None),
        ("", "0", None),
    ],
)
def test_what_a_link_should_give_follows_from_its_lanes(
    speed: str, width: str, rate: float | None
) -> None:
    assert link_bytes_per_s(speed, width) == rate


def test_a_folder_that_cannot_be_written_to_is_a_problem(machine: Machine) -> None:
    status, seen, remedy = only(machine.check("disk", DISK, disk_rate=lambda _: "/disk: no"))

    assert status == "problem"
    assert "'disk'" in seen
    assert "/disk" in remedy


@pytest.mark.parametrize(
    ("rate", "status"),
    [
        (DiskRate(2e9, 3e9, direct=True), "ok"),
        (DiskRate(2e9, 1e8, direct=True), "warning"),
        (DiskRate(2e9, 3e9, direct=False), "warning"),
    ],
)
def test_a_slow_disk_and_one_in_memory_are_warnings(
    machine: Machine, rate: DiskRate, status: str
) -> None:
    assert statuses(machine.check("disk", DISK, disk_rate=lambda _: rate)) == ["ok", status]


@pytest.mark.parametrize(
    ("total", "free", "status"), [(200, 150, "ok"), (200, 50, "warning"), (80, 70, "problem")]
)
def test_a_disk_must_have_the_room_of_its_tier(
    machine: Machine, total: int, free: int, status: str
) -> None:
    findings = machine.check("disk", DISK, room=lambda _: DiskRoom(total * GIB, free * GIB))

    assert statuses(findings)[0] == status


def test_a_port_in_use_is_a_problem_where_the_configuration_asks_for_it(machine: Machine) -> None:
    def taken(_: str, port: int) -> str:
        return "Address already in use" if port == 8000 else ""

    status, seen, _ = only(machine.check("ports", f"{CONFIG}[serve]\n", port=taken))

    assert (status, seen) == ("problem", "127.0.0.1:8000: Address already in use")
    assert only(machine.check("ports", port=taken))[0] == "warning"
    assert only(machine.check("ports", f"{CONFIG}[serve]\nport = 8001\n", port=taken))[0] == "ok"
    assert machine.check("ports", CONFIG, port=taken) == []
    at_socket = f'{CONFIG}[serve]\nhost = "unix:/run/penstock.sock"\n'
    assert only(machine.check("ports", at_socket, port=taken))[0] == "ok"


def test_a_range_of_ports_that_is_mostly_taken_is_a_warning(machine: Machine) -> None:
    findings = machine.check(
        "ports",
        f'{CONFIG}[serve]\nports = "17000-17009"\n',
        port=lambda _, port: "in use" if 17000 <= port < 17006 else "",
    )

    assert statuses(findings) == ["ok", "warning"]
    assert findings[1].seen.startswith("6 of 10 ports")


@pytest.mark.parametrize(
    ("config", "packages", "missing", "extra"),
    [
        (CONFIG, {}, "", ""),
        (f"{CONFIG}[serve]\n", {}, "torch, gguf", "engine"),
        (f"{CONFIG}[serve]\n", {"torch": "2", "gguf": "1"}, "", ""),
        (REDIS, {}, "redis", "redis"),
        (PEERS, {}, "redis", "redis"),
        (f'{PEERS}transport = "nixl"\n', {"redis": "8"}, "nixl", "nixl"),
        (f'{REDIS}compression = "zstd"\n', {"redis": "8"}, "zstandard", "compression"),
        (MOONCAKE, {}, "mooncake-transfer-engine", "mooncake"),
        (MOONCAKE, {"mooncake-transfer-engine-non-cuda": "0.3.13"}, "", ""),
        (OBJECTS, {}, "obstore", "objects"),
        (FOLDER, {}, "", ""),
        (f'{DISK}key_file = "/key"\n', {}, "cryptography", "disk-encryption"),
        (NIXL, {}, "nixl", "nixl"),
        (NIXL, {"nixl-cu12": "1.5.1"}, "", ""),
        (NIXL, {"nixl-cu13": "1.5.1"}, "", ""),
    ],
)
def test_what_a_configuration_asks_for_must_be_installed(
    machine: Machine, config: str, packages: dict[str, str], missing: str, extra: str
) -> None:
    findings = machine.check("packages", config, package=packages.get)

    if not missing:
        assert findings == []
        return
    status, seen, remedy = only(findings)
    assert status == "problem"
    assert seen.startswith(f"{missing} not installed, and ")
    hint = server_install_hint if extra == "engine" else install_hint
    assert remedy == hint(extra)


@pytest.mark.parametrize(
    ("config", "silent", "status", "seen"),
    [
        (REDIS, set(), "ok", "cache:6380: somebody listens"),
        (REDIS, {"cache"}, "problem", "cache:6380: no answer"),
        (PEERS, {"cache"}, "warning", "cache:6380: no answer"),
        (CLUSTER, {"a"}, "warning", "a:6379: no answer; b:7000: somebody listens"),
        (CLUSTER, {"a", "b"}, "problem", "a:6379: no answer; b:7000: no answer"),
        (MOONCAKE, {"cache"}, "problem", "cache:50051: no answer"),
        (OBJECTS, {"cache"}, "ok", "not asked; `penstock store probe` does"),
        (f'{OBJECTS}endpoint = "https://minio"\n', {"minio"}, "problem", "minio:443: no answer"),
    ],
)
def test_a_shared_store_must_be_there(
    machine: Machine, config: str, silent: set[str], status: str, seen: str
) -> None:
    found = only(
        machine.check(
            "shared store", config, reach=lambda host, _: "no answer" if host in silent else ""
        )
    )

    assert found[:2] == (status, f"tier 'shared': {seen}")


def test_a_shared_folder_must_take_files(machine: Machine) -> None:
    assert only(machine.check("shared store", FOLDER))[0] == "ok"
    status, _, remedy = only(machine.check("shared store", FOLDER, disk_rate=lambda _: "/mnt: no"))

    assert (status, remedy[:13]) == ("problem", "mount /mnt/kv")


def test_tested_versions_are_those_that_the_tests_run_with() -> None:
    root = Path(__file__).parents[2]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (root / "constraints.txt").read_text(), re.M))
    pinned["mooncake-transfer-engine"] = pinned["mooncake-transfer-engine-non-cuda"]

    for name, tested in TESTED_PACKAGES.items():
        parts = pinned[name].split(".")[: len(tested)]
        assert parts == [str(part) for part in tested], name
    vllm = (root / ".ci" / "vllm-environment").read_text()
    assert f"{'.'.join(map(str, TESTED[0]))}." in vllm
    assert pinned["sglang"] == ".".join(map(str, SGLANG_TESTED[0]))


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({}, []),
        ({"torch": "2.13.0+cpu", "nixl": "1.5.1"}, ["ok", "ok"]),
        ({"torch": "2.6.0", "nixl": "1.7.0"}, ["warning", "warning"]),
        ({"nixl-cu12": "1.5.1"}, ["ok"]),
        ({"vllm": "0.32.1", "torch": "2.6.0"}, ["ok"]),
        ({"vllm": "0.33.0"}, ["ok"]),
        ({"vllm": "0.40.0"}, ["warning"]),
        ({"sglang": "0.5.23", "torch": "2.14.1"}, ["ok"]),
        ({"sglang": "0.5.22", "mooncake-transfer-engine": "0.3.13.post1"}, ["warning", "ok"]),
        ({"mooncake-transfer-engine": "0.3.9"}, ["warning"]),
    ],
)
def test_versions_are_compared_with_those_tested(
    machine: Machine, packages: dict[str, str], expected: list[str]
) -> None:
    assert statuses(machine.check("versions", package=packages.get)) == expected


def test_a_slow_clock_and_one_that_nobody_keeps_are_warnings(machine: Machine) -> None:
    source = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    machine.write({source: "hpet\n"})

    findings = machine.check("clock", clock=lambda: False)

    assert statuses(findings) == ["warning", "warning"]


def test_a_finding_has_a_remedy_exactly_if_it_is_not_ok() -> None:
    with pytest.raises(ValueError, match="remedy"):
        DoctorFinding(check="x", status=FindingStatus.WARNING, seen="y")
    with pytest.raises(ValueError, match="remedy"):
        DoctorFinding(check="x", status=FindingStatus.OK, seen="y", remedy="z")
