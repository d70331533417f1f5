"""Machines for tests: namespaces of this one, on an Ethernet whose cables can be cut.

    with Network() as network:
        first, second = network.machine("first"), network.machine("second")
        process = first.start([sys.executable, "-m", …], stdout=subprocess.PIPE)
        first.call(client.get, "/health")     # in a thread that is in the machine's network
        second.cut()                          # its cable is pulled out
        second.heal()
        second.limit(mbit=10)                 # both directions
        second.kill()                         # all its processes end at once

A machine has network, pid, ipc and mount namespaces of its own: nothing gets from one to the other
except through its cable. The bridge is in another namespace, so the network of the computer that
runs the tests is not touched.

The one rule: all of it ends with the process that made it, however that ends. A namespace goes when
the process that holds it ends, and that one ends when it reads the end of a pipe from the maker.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

ROOT = Path(__file__).resolve().parents[2]
ResultT = TypeVar("ResultT")

NEW_PID, NEW_NET = 0x20000000, 0x40000000
"""`CLONE_NEWPID` and `CLONE_NEWNET`."""
SOON_S = 120.0
"""Longer than anything takes that works: a busy computer is no failure."""
SUBNET = "10.0.0"
TOOLS = ("ip", "tc", "unshare", "nsenter")
# The first process of a pid namespace adopts the orphans of the others; nobody waits for them.
HOLD = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("held", flush=True)
sys.stdin.read()
"""
RUNTIME = "/dev/shm/run"
"""Where processes of a machine keep their sockets: another machine has another one."""
# Shared memory and sockets in the file system would lead past the cable; and processes on machines
# with the same boot id take each other for neighbours.
ENTER = f"""
mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 {RUNTIME} && echo "$1" > /dev/shm/boot_id &&
mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id && ip link set lo up &&
shift && exec "$@"
"""

_libc = ctypes.CDLL(None, use_errno=True)


@cache
def why_no_machines() -> str:
    """Why this computer cannot make machines; empty: it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"machines need {', '.join(missing)}, of iproute2 and util-linux"
    if os.geteuid() != 0:
        return "machines need root, who may make namespaces"
    try:
        with Network() as network:
            network.machine("first").limit(mbit=100)
    except (OSError, RuntimeError) as error:
        return f"machines need network, pid, ipc and mount namespaces: {error}"
    return ""


class Network:
    """A bridge, and the machines that are connected to it."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._holder = stack.enter_context(_Holder(["unshare", "--net"]))
            self._ip("link add switch type bridge\nlink set switch up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def machine(self, name: str) -> Machine:
        """Another machine, with an address of its own."""
        number = len(self.machines) + 1
        machine = self._stack.enter_context(Machine(self, name, number))
        self._ip(
            f"link add cable{number} type veth peer name eth0 netns {machine.pid}\n"
            f"link set cable{number} master switch up"
        )
        machine.ip(f"addr add {machine.host}/24 dev eth0\nlink set eth0 up")
        self.machines.append(machine)
        return machine

    def _ip(self, lines: str) -> None:
        run_in(self._holder.pid, ["ip", "-batch", "-"], lines)

    def set_cable(self, number: int, state: str) -> None:
        """Sets the cable of a machine `up` or `down`."""
        self._ip(f"link set cable{number} {state}")

    def limit_cable(self, number: int, shape: Sequence[str]) -> None:
        """Limits what a machine receives."""
        run_in(self._holder.pid, ["tc", *_shaped(f"cable{number}", shape)])


class Machine:
    """A computer on the network."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.host = f"{SUBNET}.{number}"
        self._network = network
        self._number = number
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        namespaces = ["unshare", "--net", "--ipc", "--uts", "--mount-proc"]
        with ExitStack() as stack:
            self._holder = stack.enter_context(
                _Holder([*namespaces, "sh", "-c", ENTER, "sh", str(uuid.uuid4())], new_pids=True)
            )
            self._threads = stack.enter_context(
                ThreadPoolExecutor(initializer=_enter, initargs=(self.pid, NEW_NET))
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process that holds its namespaces."""
        return self._holder.pid

    def start(
        self, command: Sequence[str], *, folder: str = "/", **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a process on this machine; `options` are those of `subprocess.Popen`."""
        namespaces = ["-n", "-i", "-u", "-m", f"--wdns={folder}"]
        inside = ["nsenter", "-t", str(self.pid), *namespaces, *command]

        def start() -> subprocess.Popen[str]:
            _enter(self.pid, NEW_PID)
            return subprocess.Popen(inside, text=True, **options)

        process = _in_a_thread(start)
        self._holder.started.append(process)
        return process

    def python(
        self, module: str, *arguments: str, folder: Path, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a module of Python, which keeps what belongs to the machine in `folder`."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder),
            "XDG_RUNTIME_DIR": RUNTIME,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
        }
        command = [sys.executable, "-m", module, *arguments]
        return self.start(command, folder=str(folder), env=environment, **options)

    def call(self, function: Callable[..., ResultT], *arguments: Any, **named: Any) -> ResultT:
        """What a function returns whose sockets are in the network of this machine."""
        return self._threads.submit(function, *arguments, **named).result(SOON_S * 10)

    def ip(self, lines: str) -> None:
        """Runs lines of `ip` on this machine."""
        run_in(self.pid, ["ip", "-batch", "-"], lines)

    def cut(self) -> None:
        """Pulls its cable out."""
        self._network.set_cable(self._number, "down")

    def heal(self) -> None:
        """Puts its cable back."""
        self._network.set_cable(self._number, "up")

    def limit(self, *, mbit: int) -> None:
        """Limits its cable, in both directions."""
        shape = f"rate {mbit}mbit burst 64kb latency 400ms".split()
        self._network.limit_cable(self._number, shape)
        run_in(self.pid, ["tc", *_shaped("eth0", shape)])

    def kill(self) -> None:
        """Ends all its processes at once, without a word to others; may be called twice."""
        self._stack.close()


class _Holder:
    """A process that keeps its namespaces for as long as this process lives."""

    def __init__(self, command: Sequence[str], *, new_pids: bool = False) -> None:
        self._command = [*command, sys.executable, "-c", HOLD]
        self._new_pids = new_pids
        self.started: list[subprocess.Popen[str]] = []
        """Processes in its pid namespace that are children of this one."""

    def __enter__(self) -> Self:
        self._process = _in_a_thread(self._start)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "held\n":
            self.__exit__()
            raise RuntimeError(f"{' '.join(self._command[:5])} … failed")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        # The first process of a pid namespace is there until all others were waited for.
        for process in self.started:
            process.wait(SOON_S)
        self._process.communicate(timeout=SOON_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[str]:
        if self._new_pids and _libc.unshare(NEW_PID) != 0:
            raise OSError(ctypes.get_errno(), "unshare was refused")
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


def run_in(pid: int, command: Sequence[str], lines: str = "") -> None:
    """Runs a command in the network of a process."""
    done = subprocess.run(
        ["nsenter", "-t", str(pid), "-n", *command],
        input=lines,
        text=True,
        capture_output=True,
        timeout=SOON_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} {lines!r} failed: {done.stderr.strip()}")


def _shaped(device: str, shape: Sequence[str]) -> list[str]:
    return ["qdisc", "replace", "dev", device, "root", "tbf", *shape]


def _enter(pid: int, kind: int) -> None:
    """Puts this thread, or its children where pids are concerned, into a namespace of a process."""
    fd = os.pidfd_open(pid)
    try:
        if _libc.setns(fd, kind) != 0:
            raise OSError(ctypes.get_errno(), f"setns to process {pid} was refused")
    finally:
        os.close(fd)


def _in_a_thread(function: Callable[[], ResultT]) -> ResultT:
    """What a function returns whose thread is in other namespaces than this one."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(function).result(SOON_S)
