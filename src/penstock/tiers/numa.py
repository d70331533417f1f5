"""Memory that comes from one NUMA node, by mbind(2).

A node is a part of the machine's memory with the processors and devices that are near to it.
The one rule: memory is bound before it is touched; pages that are there already do not move.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tiers.kernel_files import ReadText

NODES_ONLINE = "/sys/devices/system/node/online"

# The C library has no function for it: that one lives in libnuma, which not every machine has.
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_MASK_WORD_BITS = 64


def online_nodes(read: ReadText) -> list[int]:
    """The NUMA nodes of the machine; one, number 0, where it does not tell."""
    nodes: list[int] = []
    for part in read(NODES_ONLINE).strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes += range(int(first), int(last or first) + 1)
    return nodes or [0]


def bind_memory(address: int, length: int, node: int) -> None:
    """Has the pages from `address` on come from one node, when they are touched.

    Raises:
        OSError: the kernel refuses, or this processor is not known here.
    """
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind has no known number on {platform.machine()}")
    words = (ctypes.c_uint64 * (node // _MASK_WORD_BITS + 1))()
    words[node // _MASK_WORD_BITS] = 1 << node % _MASK_WORD_BITS
    # The kernel looks at one bit fewer than it is told.
    bits = len(words) * _MASK_WORD_BITS + 1
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_int(_MPOL_BIND),
        words,
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
