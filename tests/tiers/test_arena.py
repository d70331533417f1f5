"""Shared memory that is handed over by descriptor, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError, UnavailableError
from penstock.tiers import arena as arenas
from penstock.tiers.arena import Arena, MemoryCalls, round_up
from penstock.tiers.linux_memory import Pages, read_text
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.tiers.linux_memory import ReadText

MIB = 1 << 20
PAGE = mmap.PAGESIZE
TWO_NODES = {"/sys/devices/system/node/online": "0-1\n"}


def machine(files: Mapping[str, str]) -> ReadText:
    """This machine, but for some files."""
    return lambda path: files[path] if path in files else read_text(path)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for an arena that no other test has, whoever else runs them now."""
    return f"{request.node.name}-{os.getpid()}"


def refuse(error: int) -> None:
    raise OSError(error, os.strerror(error))


def bytes_in_place(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


# What an arena is.


def test_a_fresh_arena_holds_zeros_in_whole_pages() -> None:
    with Arena.create(MIB + 1, huge_pages=False) as arena:
        assert arena.size == arena.bytes.nbytes == MIB + PAGE
        assert not arena.bytes.any()


def test_two_mappings_of_one_arena_hold_the_same_bytes() -> None:
    with Arena.create(MIB) as arena, Arena.attach(arena.fd) as other:
        arena.bytes[5] = 17
        other.bytes[-1] = 18

        assert other.size == arena.size
        assert other.address != arena.address
        assert (other.bytes[5], arena.bytes[-1]) == (17, 18)


def test_an_arena_that_may_only_be_read_cannot_be_written() -> None:
    with Arena.create(MIB) as arena, Arena.attach(arena.fd, writable=False) as other:
        arena.bytes[5] = 17

        with pytest.raises(ValueError, match="read-only"):
            other.bytes[5] = 18
        assert other.bytes[5] == 17


def test_nobody_can_change_its_size() -> None:
    with Arena.create(MIB) as arena:
        for size in (arena.size - PAGE, arena.size + PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)


def test_it_does_not_reach_programs_that_this_one_starts() -> None:
    with Arena.create(MIB) as arena, Arena.attach(arena.fd) as other:
        assert not os.get_inheritable(arena.fd)
        assert not os.get_inheritable(other.fd)


@pytest.mark.parametrize("size", [0, -1])
def test_an_arena_of_no_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size is {size}, must be at least 1"):
        Arena.create(size)


def test_a_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        with (tmp_path / "file").open("wb") as file:
            for fd, problem in (
                (file.fileno(), "Invalid argument"),
                (unsealed, "its size is not sealed"),
                (empty, "it is empty"),
            ):
                with pytest.raises(ValueError, match=f"fd {fd} is no arena: {problem}"):
                    Arena.attach(fd)
    finally:
        os.close(unsealed)
        os.close(empty)


def test_an_arena_for_which_there_is_no_room_in_the_address_space_is_an_error() -> None:
    fd = os.memfd_create("vast", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 60)  # Without pages: nothing of it is there.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        with pytest.raises(UnavailableError, match="cannot be mapped: Cannot allocate memory"):
            Arena.attach(fd)
    finally:
        os.close(fd)


# How it ends.


def test_an_arena_may_be_closed_twice() -> None:
    arena = Arena.create(MIB)
    fd = arena.fd

    arena.close()
    arena.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for ask in (lambda: arena.bytes, lambda: arena.fd, lambda: arena.address):
        with pytest.raises(ValueError, match="the arena is closed"):
            ask()


def test_a_view_outlives_the_arena_it_was_taken_from(name: str) -> None:
    arena = Arena.create(MIB, name=name)
    view = arena.bytes[:8]

    arena.close()
    view[:] = 3

    assert view.sum() == 24
    assert holders(name) == {os.getpid()}
    del view
    assert holders(name) == set()


def test_an_arena_that_nobody_closed_ends_with_its_last_reference(name: str) -> None:
    arena = Arena.create(MIB, name=name)
    assert holders(name) == {os.getpid()}

    del arena

    assert holders(name) == set()


# Other processes.


CHILD = """
import os, signal, socket, sys
from penstock.tiers.arena import Arena

peer = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[2] == "create":
    arena = Arena.create(8 << 20, name=sys.argv[3])
    arena.bytes[::4096] = 42
    socket.send_fds(peer, [b"made"], [arena.fd])
else:
    _, (fd,), _, _ = socket.recv_fds(peer, 16, 1)
    arena = Arena.attach(fd)
    found = int(arena.bytes[7])
    arena.bytes[8] = found + 1
    peer.sendall(b"seen")
signal.pause()
"""


@contextmanager
def child(task: str, name: str = "") -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Another process that has or gets an arena, and waits for its end."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CHILD, str(theirs.fileno()), task, name]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.settimeout(60)
        try:
            yield process, ours
        finally:
            process.kill()


def holders(name: str) -> set[int]:
    """The processes that have an arena open or mapped."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        seen = [read_text(f"{process}/maps")]
        # Processes and their descriptors come and go, and some do not let us look.
        with suppress(OSError):
            for fd in os.listdir(process / "fd"):
                with suppress(FileNotFoundError):
                    seen.append(os.readlink(process / "fd" / fd))
        if any(f"memfd:penstock-{name} " in text for text in seen):
            found.add(int(process.name))
    return found


def test_another_process_reads_and_writes_what_it_is_handed(name: str) -> None:
    with Arena.create(MIB, name=name) as arena, child("attach") as (process, peer):
        arena.bytes[7] = 40
        socket.send_fds(peer, [b"take"], [arena.fd])
        assert peer.recv(16) == b"seen"

        assert arena.bytes[8] == 41
        assert holders(name) == {os.getpid(), process.pid}

        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert holders(name) == {os.getpid()}
        assert arena.bytes[8] == 41


def test_an_arena_outlives_its_maker_and_then_leaves_nothing_behind(name: str) -> None:
    with child("create", name) as (process, peer):
        _, (fd,), _, _ = socket.recv_fds(peer, 16, 1)
        process.kill()
        assert process.wait() == -signal.SIGKILL

    with Arena.attach(fd) as arena:
        os.close(fd)
        assert arena.size == 8 * MIB
        assert (arena.bytes[::4096] == 42).all()
        assert holders(name) == {os.getpid()}

    assert holders(name) == set()


def test_an_arena_of_a_killed_process_is_gone_with_it(name: str) -> None:
    with child("create", name) as (process, peer):
        message, fds, _, _ = socket.recv_fds(peer, 16, 1)
        for fd in fds:
            os.close(fd)
        assert message == b"made"
        assert holders(name) == {process.pid}

        process.kill()
        process.wait()

    assert holders(name) == set()
    assert not [entry for entry in os.listdir("/dev/shm") if name in entry]


# Its pages are there.


def test_every_page_is_in_place_when_an_arena_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "PREFAULT_BYTES", MIB)
    pieces: list[tuple[int, int]] = []

    def populate(mapping: mmap.mmap, start: int, length: int) -> None:
        pieces.append((start, length))
        arenas.populate_pages(mapping, start, length)

    kernel = MemoryCalls(populate=populate)

    with Arena.create(5 * MIB // 2, huge_pages=False, kernel=kernel) as arena:
        assert bytes_in_place(arena) == arena.size
        assert pieces == [(0, MIB), (MIB, MIB), (2 * MIB, arena.size - 2 * MIB)]
        assert arena.ready_s > 0


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_a_kernel_that_does_not_know_the_advice_has_its_pages_touched(error: int) -> None:
    kernel = MemoryCalls(populate=lambda *_: refuse(error))

    with Arena.create(MIB, huge_pages=False, kernel=kernel) as arena:
        assert bytes_in_place(arena) == arena.size
        assert not arena.bytes.any()


def test_pages_that_the_machine_does_not_give_are_an_error_with_the_reason() -> None:
    kernel = MemoryCalls(populate=lambda *_: refuse(errno.ENOMEM))
    before = open_descriptors()

    with pytest.raises(UnavailableError) as refusal:
        Arena.create(MIB, huge_pages=False, kernel=kernel)

    assert str(refusal.value) == (
        "no arena of 1.0 MiB can be made: plain pages: Cannot allocate memory"
    )
    assert open_descriptors() <= before


def test_an_interruption_leaves_nothing_behind(name: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Arena.create(MIB, name=name, kernel=MemoryCalls(populate=interrupt))

    assert holders(name) == set()


def test_more_than_the_machine_has_is_refused_before_anything_is_touched() -> None:
    kernel = MemoryCalls(read=machine({"/proc/meminfo": "MemAvailable: 1024 kB\n"}))

    with pytest.raises(ConfigError, match=r"size: needs 2\.0 MiB, must be at most the 1\.0 MiB"):
        Arena.create(2 * MIB, kernel=kernel)


# Which pages they are.


def huge_pages_free() -> int:
    meminfo = read_text("/proc/meminfo")
    rows = dict(line.split(":") for line in meminfo.splitlines())
    return int(rows.get("HugePages_Free", "0"))


@pytest.mark.skipif(huge_pages_free() > 0, reason="needs a machine without free huge pages")
def test_huge_pages_that_somebody_else_took_are_replaced_by_others() -> None:
    # When the arena is mapped, the pages that were free a moment ago are not.
    files = {
        "/proc/meminfo": "HugePages_Free: 4\nHugepagesize: 2048 kB\n",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "[never]",
    }

    with Arena.create(8 * MIB, kernel=MemoryCalls(read=machine(files))) as arena:
        assert arena.pages is Pages.PLAIN
        assert arena.fallbacks == ("huge pages: Cannot allocate memory",)
        assert bytes_in_place(arena) == arena.size


def test_an_arena_says_which_pages_it_has() -> None:
    with Arena.create(MIB, huge_pages=False) as arena, Arena.attach(arena.fd) as other:
        assert arena.pages is other.pages is Pages.PLAIN
        assert arena.page_bytes == PAGE
        assert arena.fallbacks == ()


def test_too_few_huge_pages_are_told_as_a_fallback() -> None:
    files = {
        "/proc/meminfo": "HugePages_Free: 1\nHugepagesize: 2048 kB\n",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "[never]",
    }

    with Arena.create(8 * MIB, kernel=MemoryCalls(read=machine(files))) as arena:
        assert arena.pages is Pages.PLAIN
        assert arena.fallbacks == ("huge pages: 3 more would have to be free",)
        assert bytes_in_place(arena) == arena.size


def test_transparent_huge_pages_are_asked_for_by_advice(name: str) -> None:
    files = {
        "/proc/meminfo": "",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never",
    }

    with Arena.create(4 * MIB, name=name, kernel=MemoryCalls(read=machine(files))) as arena:
        assert arena.pages is Pages.TRANSPARENT
        assert "hg" in flags_of(f"penstock-{name}")
        assert bytes_in_place(arena) == arena.size


def test_an_arena_is_left_out_of_core_dumps(name: str) -> None:
    with Arena.create(MIB, name=name):
        assert "dd" in flags_of(f"penstock-{name}")


def flags_of(name: str) -> list[str]:
    """What the kernel has noted about a mapping of this process."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    _, _, mapping = smaps.partition(f"memfd:{name} ")
    _, _, flags = mapping.partition("VmFlags:")
    return flags.splitlines()[0].split()


@pytest.mark.skipif(huge_pages_free() < 2, reason="needs 2 free huge pages")
def test_huge_pages_are_taken_where_the_machine_has_them() -> None:
    with Arena.create(MIB) as arena, Arena.attach(arena.fd) as other:
        arena.bytes[3] = 4

        assert arena.pages is other.pages is Pages.HUGE
        assert arena.size == arena.page_bytes > PAGE
        assert other.bytes[3] == 4


# Where they come from.


def test_an_arena_is_bound_to_the_node_that_was_asked_for() -> None:
    bound: list[tuple[int, int, int]] = []
    kernel = MemoryCalls(read=machine(TWO_NODES), bind=lambda *area: bound.append(area))

    with Arena.create(MIB, numa_node=1, kernel=kernel) as arena:
        assert bound == [(arena.address, arena.size, 1)]
        assert arena.numa_node == 1
        assert not [note for note in arena.fallbacks if "numa" in note]


def test_without_a_wish_nothing_is_bound() -> None:
    kernel = MemoryCalls(read=machine(TWO_NODES), bind=lambda *_: refuse(errno.EPERM))

    with Arena.create(MIB, kernel=kernel, huge_pages=False) as arena:
        assert arena.numa_node is None
        assert arena.fallbacks == ()


def test_a_machine_of_one_node_is_not_asked_to_bind() -> None:
    read = machine({"/sys/devices/system/node/online": "0\n"})

    with Arena.create(
        MIB,
        numa_node=0,
        huge_pages=False,
        kernel=MemoryCalls(read=read, bind=lambda *_: refuse(errno.EPERM)),
    ) as arena:
        assert arena.numa_node is None
        assert arena.fallbacks == ("numa_node 0: the machine has one node",)


def test_a_kernel_that_refuses_to_bind_is_told_as_a_fallback() -> None:
    kernel = MemoryCalls(read=machine(TWO_NODES), bind=lambda *_: refuse(errno.EPERM))

    with Arena.create(MIB, numa_node=1, huge_pages=False, kernel=kernel) as arena:
        assert arena.numa_node is None
        assert arena.fallbacks == ("numa_node 1: Operation not permitted",)
        assert bytes_in_place(arena) == arena.size


def test_a_node_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="numa_node: is 7, must be one of 0, 1"):
        Arena.create(MIB, numa_node=7, kernel=MemoryCalls(read=machine(TWO_NODES)))


@pytest.mark.parametrize(("size", "rounded"), [(1, 8), (8, 8), (9, 16)])
def test_sizes_are_rounded_up(size: int, rounded: int) -> None:
    assert round_up(size, 8) == rounded
