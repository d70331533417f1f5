"""Debian's redis-server, started for tests."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.stopped import stop_process

if TYPE_CHECKING:
    from pathlib import Path


def require_redis() -> None:
    """Skips a test where Redis cannot be had."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")


def free_port() -> int:
    """A port of loopback that nobody has now, and that the system gives to no connection.

    Nor does it give the one that is 10,000 higher, which a server of a cluster has too.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(15_000, 22_000)
        with socket.socket() as found, socket.socket() as of_cluster:
            try:
                found.bind(("127.0.0.1", port))
                of_cluster.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    pytest.fail("100 ports of loopback are taken")


class RedisServer:
    """A server with an empty memory on a port of its own; it keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, config: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.options = options
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @classmethod
    def sentinel(cls, folder: Path, config: Path) -> RedisServer:
        """A Sentinel; it writes to its configuration."""
        return cls(folder, "--sentinel", config=config)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        command = ["redis-server", *([str(self.config)] if self.config else ["--save", ""])]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, *self.options],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        # Its own words; a pipe of 64 KiB holds whatever it says later.
        log = []
        for line in self.process.stdout:
            log.append(line)
            if b"eady to accept connections" in line or b"Sentinel ID" in line:
                return
        self.kill()
        pytest.fail(f"redis-server did not start:\n{b''.join(log).decode()}")

    def stop(self) -> None:
        stop_process(self._process.pid)

    def proceed(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process
