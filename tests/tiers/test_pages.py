"""Which pages an arena is made of, on machines that are made up of files."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest

from penstock.tiers.linux_memory import Pages, huge_page_bytes, huge_pages_missing, pages_to_try

if TYPE_CHECKING:
    from penstock.tiers.linux_memory import ReadText

MIB = 1 << 20


def machine(*, free: int = 0, reserved: int = 0, shmem: str = "always [never] deny") -> ReadText:
    meminfo = (
        f"HugePages_Total:      99\nHugePages_Free:     {free:4}\n"
        f"HugePages_Rsvd:     {reserved:4}\nHugepagesize:       2048 kB\n"
    )
    files = {
        "/proc/meminfo": meminfo,
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": shmem,
    }
    return lambda path: files.get(path, "")


def test_huge_pages_are_taken_where_enough_are_free() -> None:
    assert pages_to_try(8 * MIB, machine(free=4)) == [Pages.HUGE, Pages.PLAIN]


@pytest.mark.parametrize(("free", "reserved"), [(0, 0), (3, 0), (5, 2), (1, 2)])
def test_too_few_free_huge_pages_are_left_alone(free: int, reserved: int) -> None:
    assert pages_to_try(8 * MIB, machine(free=free, reserved=reserved)) == [Pages.PLAIN]


def test_it_is_known_how_many_huge_pages_are_missing() -> None:
    assert huge_pages_missing(8 * MIB + 1, machine(free=3, reserved=1)) == 3
    assert huge_pages_missing(8 * MIB, machine(free=4)) == 0


@pytest.mark.parametrize(
    ("shmem", "pages"),
    [
        ("always within_size [advise] never deny force\n", [Pages.TRANSPARENT, Pages.PLAIN]),
        ("[always] within_size advise never deny force\n", [Pages.TRANSPARENT, Pages.PLAIN]),
        ("always within_size advise [never] deny force\n", [Pages.PLAIN]),
        ("always within_size advise never [deny] force\n", [Pages.PLAIN]),
        ("", [Pages.PLAIN]),
    ],
)
def test_transparent_huge_pages_are_asked_for_where_shared_memory_may_have_them(
    shmem: str, pages: list[Pages]
) -> None:
    assert pages_to_try(8 * MIB, machine(shmem=shmem)) == pages
    assert pages_to_try(8 * MIB, machine(shmem=shmem, free=4)) == [Pages.HUGE, *pages]


def test_a_machine_that_does_not_tell_has_plain_pages() -> None:
    silent = {"/proc/meminfo": ""}

    assert pages_to_try(8 * MIB, lambda path: silent.get(path, "")) == [Pages.PLAIN]
    assert huge_page_bytes(lambda path: silent.get(path, "")) == mmap.PAGESIZE


def test_the_size_of_huge_pages_is_the_machines_own() -> None:
    assert huge_page_bytes(machine()) == 2 * MIB
