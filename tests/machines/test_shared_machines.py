"""Prefill and decode instances on several machines that share a Redis: the commands of the page."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.relay.agents import is_installed
from tests.machines.conftest import HTTP_PORT, SIZES, Client, line_of
from tests.serve.conftest import SOON_S, eventually
from tests.serve.test_roles import require_same
from tests.serve.test_shared_store import (
    BLOCK_TOKENS,
    GENERATED,
    PROMPT,
    shared_config,
    tier_of,
)
from tests.store.redis_server import require_redis

if TYPE_CHECKING:
    from tests.machines.conftest import Site
    from tests.machines.machines import Machine

PAGE = Path(__file__).parents[2] / "docs" / "shared-stores.md"
COMMAND = re.compile(r"^([a-c])\$ (.*)$", re.MULTILINE)
REDIS = "redis://10.0.0.1:6379"


class Shells:
    """Runs the commands of the page, each on its machine."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.machines = {name: site.add(name) for name in "abc"}
        for machine in self.machines.values():
            (site.home(machine) / "shared.toml").write_text(shared_config(REDIS))

    def run(self, name: str, line: str) -> subprocess.Popen[str]:
        machine = self.machines[name]
        program, *arguments = shlex.split(line)
        if program == "redis-server":
            return self.redis(machine, arguments)
        assert program == "penstock", line
        process = self.site.penstock(
            machine, *arguments, "--model", str(self.site.model), "--drain-s", "1", *SIZES
        )
        line_of(process, "penstock: ")
        return process

    def redis(self, machine: Machine, arguments: list[str]) -> subprocess.Popen[str]:
        command = ["redis-server", *arguments]
        process = machine.start(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        self.site.opened(process.stdout)
        while "eady to accept connections" not in (line := process.stdout.readline()):
            assert line, "redis-server has ended"
        return process


@pytest.mark.long
def test_a_conversation_goes_on_at_a_prefill_instance_of_another_machine(site: Site) -> None:
    require_redis()
    if not is_installed():
        pytest.skip("KV between machines needs NIXL, which is not installed")
    shells = Shells(site)
    lines = COMMAND.findall(PAGE.read_text())
    last = lines.pop()
    processes = [shells.run(*line) for line in lines]
    client = Client(shells.machines["a"], f"http://10.0.0.1:{HTTP_PORT}")
    client.wait_for("prefill-0", "decode-0")
    eventually(lambda: tier_of(client, "prefill-0")["on"], wanted=True)
    eventually(lambda: tier_of(client, "decode-0")["on"], wanted=True)

    first = client.complete(PROMPT, max_tokens=GENERATED, logprobs=1).json()
    told = PROMPT + first["choices"][0]["logprobs"]["token_ids"]
    whole = (len(told) - 1) // BLOCK_TOKENS
    eventually(lambda: tier_of(client, "decode-0")["ready"] >= whole, wanted=True)
    [prefill] = [each for each, line in zip(processes, lines, strict=True) if "prefill" in line[1]]
    prefill.send_signal(signal.SIGTERM)
    prefill.wait(SOON_S)
    shells.run(*last)
    client.wait_for("prefill-1", "decode-0")
    eventually(lambda: tier_of(client, "prefill-1")["on"], wanted=True)
    second = client.complete(told + PROMPT[:12], logprobs=5).json()
    found = tier_of(client, "prefill-1")["tokens_cached"]
    expected = client.complete(told + PROMPT[:12], logprobs=5, cache="off").json()
    client.close()

    assert found == whole * BLOCK_TOKENS
    require_same(second, expected)
