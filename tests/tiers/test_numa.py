"""Memory of one NUMA node."""

from __future__ import annotations

import errno
import mmap
import platform
from pathlib import Path

import numpy as np
import pytest

from penstock.tiers.arena import Arena
from penstock.tiers.linux_memory import bind_memory, online_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-1\n", [0, 1]), ("0,2-3\n", [0, 2, 3]), ("", [0]), ("1\n", [1])],
)
def test_the_nodes_of_a_machine_are_read_from_its_list(text: str, nodes: list[int]) -> None:
    def read(path: str) -> str:
        return text if path == "/sys/devices/system/node/online" else ""

    assert online_nodes(read) == nodes


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="the kernel was built without NUMA"
)
def test_the_kernel_confirms_what_was_bound() -> None:
    with Arena.create(1 << 20, name="bound-by-a-test") as arena:
        try:
            bind_memory(arena.address, arena.size, 0)
        except PermissionError:
            pytest.skip("this container may not bind memory")

        lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8").splitlines()

    (line,) = [line for line in lines if "penstock-bound-by-a-test" in line]
    assert line.split()[1] == "bind:0"


def test_a_node_that_does_not_exist_is_refused_by_the_kernel() -> None:
    area = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(area, dtype=np.uint8).ctypes.data

    with pytest.raises(OSError, match=r"Invalid argument|not implemented|not permitted"):
        bind_memory(address, mmap.PAGESIZE, 1000)


def test_a_processor_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")

    with pytest.raises(OSError, match="mbind has no known number on pdp11") as refusal:
        bind_memory(0, mmap.PAGESIZE, 0)

    assert refusal.value.errno == errno.ENOSYS
