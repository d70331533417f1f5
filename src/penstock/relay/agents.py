"""One NIXL agent and the memory that it registers, as the relay uses them.

NIXL's exceptions become `AgentError` here. Three facts about NIXL 1.5.1 shape this module:

- Without its progress thread, which spins, bytes and notices move only while somebody calls the
  agent; over TCP that is true for the target, too.
- It shows no descriptor to wait for. But UCX has its sockets in epoll descriptors of its own,
  which are found by comparing the descriptors of this process before and after.
- Releasing a handle, deregistering memory and removing a remote agent do not keep a writer from
  writing. Destroying the agent does. So an agent serves one area or one link, and `close`
  destroys it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PenstockError, install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""The wheels' own packages first: `nixl` is a thin one that looks for them."""
ENVIRONMENT = (
    # Over shared memory a writer that was stopped goes on writing after the target's agent was
    # destroyed, so no transport of UCX that maps the other process's memory may be used.
    ("UCX_TLS", "^sm,self,cuda_ipc"),
    ("UCX_LOG_LEVEL", "fatal"),
    ("NIXL_LOG_LEVEL", "FATAL"),
)
"""What UCX and NIXL read when they are loaded, beside the interface: see `interfaces`."""
_RDMA = Path("/sys/class/infiniband")


class AgentError(PenstockError):
    """What NIXL could not do; the message is its own."""


def is_installed() -> bool:
    """Whether there is a package of NIXL; it is not loaded."""
    return any(find_spec(name) is not None for name in PACKAGES)


def has_rdma() -> bool:
    """Whether UCX may use network cards whose arrivals none of its sockets shows."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


class Nixl:
    """The package, once it is loaded.

    Raises:
        AgentError: there is none, or it cannot be loaded.
    """

    def __init__(self) -> None:
        found = [name for name in PACKAGES if find_spec(name) is not None]
        if not found:
            raise AgentError(f"there is no package nixl: {install_hint('nixl')}")
        try:
            self.api: Any = import_module(f"{found[0]}._api")
        except (ImportError, OSError) as error:
            raise AgentError(f"package {found[0]} cannot be loaded: {error}") from error
        bindings = vars(self.api.nixlBind).values()
        raised = [kind for kind in bindings if isinstance(kind, type)]
        self.errors: tuple[type[Exception], ...] = (
            RuntimeError,
            *(kind for kind in raised if issubclass(kind, Exception)),
        )


class NixlAgent:
    """An agent with one piece of memory.

    Args:
        nixl: the package.
        fd: of a sealed memory file; it stays the caller's.
        size: bytes of it to register.

    Raises:
        AgentError: it cannot be made.
    """

    def __init__(self, nixl: Nixl, fd: int, size: int) -> None:
        self._nixl = nixl
        self._mapping = mmap.mmap(fd, size)
        self._memory = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)
        before = _epoll_descriptors()
        # The name is this life's alone: NIXL refuses one that a peer has known with other memory.
        name = f"penstock-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl.api.nixl_agent(name, config)
            self._region: Any = self._agent.register_memory([(self.address, size, 0, "")], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except nixl.errors as error:
            raise AgentError(f"no NIXL agent: {error}") from error
        self.descriptors = sorted(_epoll_descriptors() - before)
        """Readable when `advance` or `state` may find something; epoll descriptors of UCX."""
        self._remote = ""

    def connect(self, metadata: bytes) -> None:
        """Names the agent that this one writes to.

        Raises:
            AgentError: what describes it is wrong, or it is gone.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._nixl.errors as error:
            raise AgentError(f"the target's agent cannot be reached: {error}") from error
        self._remote = name.decode() if isinstance(name, bytes) else name

    def begin_write(self, ranges: Sequence[tuple[int, int]], remote: int, notice: bytes) -> Any:  # noqa: ANN401 - NIXL's
        """Begins a write; `None` if it was but a notice, which is sent at once.

        Raises:
            AgentError: the target is gone.
        """
        try:
            if not ranges:
                self._agent.send_notif(self._remote, notice)
                return None
            sides = [
                self._agent.get_xfer_descs(
                    [(base + offset, length, 0) for offset, length in ranges], "DRAM"
                )
                for base in (self.address, remote)
            ]
            handle = self._agent.initialize_xfer("WRITE", *sides, self._remote, notice)
            if self._agent.transfer(handle) == "ERR":
                raise AgentError("the write was refused")
        except self._nixl.errors as error:
            raise AgentError(str(error)) from error
        return handle

    def is_done(self, handle: Any) -> bool:  # noqa: ANN401 - NIXL's
        """Whether the bytes of a write are there; its handle is released then.

        Raises:
            AgentError: the write has failed.
        """
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            self._agent.release_xfer_handle(handle)
        except self._nixl.errors as error:
            raise AgentError(str(error)) from error
        if state != "DONE":
            raise AgentError(f"the write ended as {state}")
        return True

    def advance(self) -> list[bytes]:
        """Lets bytes and notices arrive; returns the notices.

        Raises:
            AgentError: the agent is of no use any more.
        """
        try:
            found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except self._nixl.errors as error:
            raise AgentError(str(error)) from error
        return [notice for notices in found.values() for notice in notices]

    def close(self, handles: Sequence[Any] = ()) -> None:
        """Destroys the agent: after this nothing of it is read or written by anybody."""
        for handle in handles:
            with suppress(*self._nixl.errors):  # Of a write that cannot be called back.
                self._agent.release_xfer_handle(handle)
        with suppress(*self._nixl.errors):
            self._agent.deregister_memory(self._region)
        del self._agent, self._region, self._memory
        self._mapping.close()


def _epoll_descriptors() -> set[int]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # Of the listing itself, which is closed by now.
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                found.add(int(entry))
    return found
