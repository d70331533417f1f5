"""Commands of Penstock on machines of a network, with keys for all of them."""

from __future__ import annotations

import select
import subprocess
import time
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

import httpx
import pytest

import penstock_serve
from penstock.transport.machine_keys import MachineKeys
from tests.machines.machines import Network, why_no_machines
from tests.serve.conftest import ONE_EACH, READY_S, SOON_S, make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.machines.machines import Machine

ROUTER_PORT, HTTP_PORT = 7000, 8000
SIZES = ("--blocks", "96", "--block-tokens", "8", "--host-gib", "0.01")
MODEL_TOKENS = 12


class Site:
    """Machines, their keys, and the commands that were started on them."""

    def __init__(self, network: Network, folder: Path, model: Path) -> None:
        self.network = network
        self.model = model
        self.folder = folder
        self._stack = ExitStack()

    def add(self, name: str, *, listed: Sequence[Machine] | None = None) -> Machine:
        """A machine with a key file; it and those in `listed`, by default all, list each other."""
        known = self.network.machines.copy() if listed is None else list(listed)
        machine = self.network.machine(name)
        home = self.home(machine)
        home.mkdir()
        keys = MachineKeys.new()
        keys = keys.with_peer(machine.host, keys.public)
        for other in known:
            theirs = MachineKeys.read(self.keys(other))
            keys = keys.with_peer(other.host, theirs.public)
            theirs.with_peer(machine.host, keys.public).write(self.keys(other), replace=True)
        keys.write(self.keys(machine))
        return machine

    def home(self, machine: Machine) -> Path:
        return self.folder / machine.name

    def keys(self, machine: Machine) -> Path:
        return self.home(machine) / "machine.keys"

    def log(self, machine: Machine) -> str:
        """What the commands on a machine have logged."""
        return (self.home(machine) / "log").read_text()

    def penstock(self, machine: Machine, *arguments: str) -> subprocess.Popen[str]:
        """Starts `penstock` on a machine; the log goes to a file."""
        with (self.home(machine) / "log").open("a") as log:
            process = machine.python(
                "penstock.cli.entry",
                *arguments,
                folder=self.home(machine),
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        self.opened(process.stdout)
        return process

    def opened(self, pipe: IO[str]) -> None:
        """Closes what a command says when the machines are gone."""
        self._stack.callback(pipe.close)

    def serve(self, machine: Machine, *options: str) -> subprocess.Popen[str]:
        """Starts `penstock serve` with the model and the keys of the machine."""
        # Cuts are shorter than the silence that a stall of a machine may last.
        keys = ("--keys-file", str(self.keys(machine)), "--silence-s", "5")
        return self.penstock(machine, "serve", "--model", str(self.model), *keys, *options)

    def close(self) -> None:
        self._stack.close()


def line_of(process: subprocess.Popen[str], begin: str) -> str:
    """The next line of a command, which must begin like that."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    assert poll.poll(READY_S * 1000), f"no line {begin!r} came"
    line = process.stdout.readline()
    assert line.startswith(begin), line
    return line


class Client:
    """A client of the router, on a machine."""

    def __init__(self, machine: Machine, address: str) -> None:
        self._machine = machine
        self._client = httpx.Client(base_url=address, timeout=SOON_S, limits=ONE_EACH)

    def get(self, path: str) -> httpx.Response:
        return self._machine.call(self._client.get, path)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._machine.call(self._client.post, path, json=body)

    def complete(self, prompt: str | list[int], **wishes: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": MODEL_TOKENS, **wishes}
        return self.post("/v1/completions", body)

    def text(self, prompt: str, **wishes: Any) -> str:
        answer = self.complete(prompt, **wishes)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    def health(self) -> dict[str, bool]:
        """Whether each instance takes requests."""
        found: dict[str, bool] = self.get("/health").json()["instances"]
        return found

    def wait_for(self, *instances: str) -> None:
        """Waits until exactly these instances take requests."""
        deadline = time.monotonic() + READY_S
        while (found := {name for name, well in self.health().items() if well}) != set(instances):
            assert time.monotonic() < deadline, f"instances are {found}, must be {instances}"
            select.select([], [], [], 0.1)

    def close(self) -> None:
        self._client.close()


class Reference:
    """The right answers: one engine in this process, without any network."""

    def __init__(self, model: Path) -> None:
        self._llm = penstock_serve.LLM(model)

    def text(self, prompt: str) -> str:
        [answer] = self._llm.generate([prompt], max_tokens=MODEL_TOKENS, temperature=0)
        return answer.text

    def close(self) -> None:
        self._llm.close()


@pytest.fixture(scope="session")
def machine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines") / "small-model"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def site(machine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A network without machines yet, for all tests of a module."""
    why = why_no_machines()
    if why:
        pytest.skip(why)
    with Network() as network:
        found = Site(network, tmp_path_factory.mktemp("site"), machine_model)
        yield found
    found.close()


@pytest.fixture(scope="module")
def right(machine_model: Path) -> Iterator[Reference]:
    reference = Reference(machine_model)
    yield reference
    reference.close()
