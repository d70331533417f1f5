"""The master of Mooncake Store from its package, started for tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stopped import stop_process
from tests.store.redis_server import free_port


def require_mooncake() -> Path:
    """The master's program; skips a test where Mooncake cannot be had."""
    try:
        from mooncake import store  # noqa: PLC0415
    except ImportError as problem:
        pytest.skip(f"no Mooncake Store here, or no libibverbs1: {problem}")
    program = Path(store.__file__).parent / "mooncake_master"
    if not program.exists():
        pytest.skip("mooncake_master is not in the package")
    return program


class MooncakeMaster:
    """A master on ports of its own."""

    def __init__(self) -> None:
        self.program = require_mooncake()
        self.port = free_port()
        self.metrics_port = free_port()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it. It says nothing when it is ready; clients try until it is."""
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.metrics_port}"]
        hosts = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        self.process = subprocess.Popen(
            [str(self.program), *hosts, *ports],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        stop_process(self.process.pid)

    def proceed(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


HOLDER = """
import sys
from penstock.store.clients.blobs import BlobStoreError
from penstock.config.shared_stores import MooncakeSettings
from penstock.store.clients.mooncake import MooncakeBlobs
blobs = MooncakeBlobs(MooncakeSettings(master=sys.argv[1], segment_gib=0.25, threads=1))
while True:
    try:
        blobs.exists(["a"], timeout_s=60)
        break
    except BlobStoreError:
        pass
print("ready", flush=True)
sys.stdin.read()
"""


class MooncakeSegment:
    """A process that lends its memory to a store, for as long as it lives."""

    def __init__(self, master: MooncakeMaster) -> None:
        self.master = master
        self.start()

    def start(self) -> None:
        """Starts it, and waits until the master has its memory."""
        command = [sys.executable, "-c", HOLDER, self.master.address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) != b"ready\n":
            assert line, "the holder of a segment has ended"

    def stop(self) -> None:
        stop_process(self.process.pid)

    def proceed(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
