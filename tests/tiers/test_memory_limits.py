"""How much memory there is, on machines that are made up of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError
from penstock.tiers.linux_memory import gib, memory_limits, node_limits, read_text, require_room

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.tiers.linux_memory import ReadText

GIB = 1 << 30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"
V2_MOUNT = "29 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def machine(files: Mapping[str, object]) -> ReadText:
    return lambda path: str(files.get(path, ""))


def group(folder: str, **rows: object) -> dict[str, object]:
    return {f"{folder}/{name.replace('__', '.')}": value for name, value in rows.items()}


def available(read: ReadText) -> int:
    return min(limit.available_bytes for limit in memory_limits(read))


def test_a_machine_without_groups_has_what_the_kernel_says_is_available() -> None:
    (limit,) = memory_limits(machine({"/proc/meminfo": MEMINFO}))

    assert limit.available_bytes == 16 * GIB
    assert limit.source == "MemAvailable in /proc/meminfo"


def test_a_group_leaves_what_it_does_not_use() -> None:
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/pod/engine\n",
        "/proc/self/mountinfo": V2_MOUNT,
        **group("/sys/fs/cgroup/pod/engine", memory__max=8 * GIB, memory__current=3 * GIB),
    }

    limit = memory_limits(machine(files))[-1]

    assert limit.available_bytes == 5 * GIB
    assert limit.source == (
        "memory.max in /sys/fs/cgroup/pod/engine is 8.00 GiB, 3.00 GiB are in use"
    )


def test_every_group_on_the_way_up_counts() -> None:
    files = {
        "/proc/self/cgroup": "0::/pod/engine\n",
        "/proc/self/mountinfo": V2_MOUNT,
        **group("/sys/fs/cgroup/pod/engine", memory__max="max", memory__current=GIB),
        **group("/sys/fs/cgroup/pod", memory__max=4 * GIB, memory__current=2 * GIB),
        **group("/sys/fs/cgroup/other", memory__max=0, memory__current=0),
    }

    assert available(machine(files)) == 2 * GIB


def test_the_file_cache_of_a_group_is_available() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT,
        **group(
            "/sys/fs/cgroup",
            memory__max=8 * GIB,
            memory__current=8 * GIB,
            memory__stat=f"anon {GIB}\nfile {7 * GIB}\nactive_file {2 * GIB}\n"
            f"inactive_file {4 * GIB}\nshmem {GIB}\n",
        ),
    }

    assert available(machine(files)) == 6 * GIB


def test_memory_beyond_which_a_group_is_throttled_is_not_available() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT,
        **group("/sys/fs/cgroup", memory__max="max", memory__high=2 * GIB, memory__current=3 * GIB),
    }

    assert available(machine(files)) == 0


def test_groups_of_the_first_version_are_understood() -> None:
    files = {
        "/proc/self/cgroup": "5:devices:/a\n4:cpu,memory:/a/b\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNT,
        **group(
            "/sys/fs/cgroup/memory/a/b",
            memory__limit_in_bytes=9_223_372_036_854_771_712,
            memory__usage_in_bytes=GIB,
        ),
        **group(
            "/sys/fs/cgroup/memory/a",
            memory__limit_in_bytes=6 * GIB,
            memory__usage_in_bytes=4 * GIB,
            memory__stat=f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
        ),
    }

    (limit,) = memory_limits(machine(files))

    assert limit.available_bytes == 4 * GIB
    assert "memory.limit_in_bytes in /sys/fs/cgroup/memory/a " in limit.source


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/", "/../elsewhere"])
def test_a_container_that_sees_its_own_part_of_the_tree_alone_is_understood(path: str) -> None:
    files = {
        "/proc/self/cgroup": f"4:memory:{path}\n",
        "/proc/self/mountinfo": V1_MOUNT.replace("0:32 /", "0:32 /docker/abc"),
        **group(
            "/sys/fs/cgroup/memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=GIB // 4
        ),
    }

    assert available(machine(files)) == 3 * GIB // 4


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"/proc/meminfo": "MemTotal: 5 kB\n"},
        {"/proc/self/cgroup": "0::/a\n"},
        {"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": "nothing of the kind\n"},
        {
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/memory.max": "max",
            "/sys/fs/cgroup/memory.current": "5",
        },
    ],
)
def test_a_machine_that_does_not_tell_sets_no_limit(files: Mapping[str, object]) -> None:
    read = machine(files)

    require_room(1 << 60, read, setting="size")

    assert memory_limits(read) == []


def test_what_fits_exactly_is_taken_and_a_byte_more_is_refused() -> None:
    read = machine({"/proc/meminfo": MEMINFO})

    require_room(16 * GIB, read, setting="size")

    with pytest.raises(ConfigError) as refusal:
        require_room(16 * GIB + 1, read, setting="tiers[0].gib")
    assert refusal.value.field == "tiers[0].gib"
    assert refusal.value.problem == (
        "needs 16.00 GiB, must be at most the 16.00 GiB that are available: "
        "MemAvailable in /proc/meminfo"
    )


def test_a_node_has_its_own_limit() -> None:
    node = "Node 1 MemFree: 1048576 kB\nNode 1 Active(file): 1024 kB\nNode 1 Inactive(file): 8 kB\n"
    path = "/sys/devices/system/node/node1/meminfo"
    read = machine({"/proc/meminfo": MEMINFO, path: node})

    (limit,) = node_limits(1, read)

    assert limit.available_bytes == GIB + (1024 + 8 << 10)
    require_room(2 * GIB, read, setting="size")
    with pytest.raises(ConfigError, match=r"MemFree and file cache in .*/node1/meminfo"):
        require_room(2 * GIB, read, setting="size", node=1)
    assert node_limits(2, read) == []


def test_this_machine_tells_what_it_has() -> None:
    limits = memory_limits(read_text)

    assert any(limit.available_bytes > 1 << 20 for limit in limits)


def test_a_file_that_is_not_there_says_nothing() -> None:
    assert read_text("/proc/no such file") == ""


@pytest.mark.parametrize(
    ("size", "text"),
    [(512, "512 bytes"), (3 << 19, "1.5 MiB"), (5 << 29, "2.50 GiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert gib(size) == text
