"""The page about several machines: its commands run on machines, one after the other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.cli.app import run
from penstock.relay.agents import is_installed
from tests.machines.conftest import SIZES, line_of
from tests.serve.conftest import SOON_S, eventually

if TYPE_CHECKING:
    from tests.machines.conftest import Site
    from tests.machines.machines import Machine

PAGE = Path(__file__).parents[2] / "docs" / "deploying.md"
COMMAND = re.compile(r"^([a-z])\$ (.*)$")
API_KEY = "0123456789abcdef"


class Shells:
    """The shells of the page: each on a machine, in its home folder."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.machines: dict[str, Machine] = {}
        self.words = {"KEY": API_KEY}
        """What the reader has to put in place of words in capitals."""
        self.ran = 0
        self.began: list[str] = []

    def machine(self, name: str) -> Machine:
        if name not in self.machines:
            self.machines[name] = self.site.network.machine(name)
            home = self.site.home(self.machines[name])
            home.mkdir()
            (home / "api.key").write_text(API_KEY)
            (home / "api.key").chmod(0o600)
        return self.machines[name]

    def run(self, name: str, line: str) -> None:
        machine = self.machine(name)
        line = re.sub(r"\b[A-Z_]{3,}\b", lambda word: self.words[word[0]], line)
        program, *arguments = shlex.split(line)
        self.ran += 1
        if program == "curl":
            self.fetch(machine, arguments)
            return
        assert program == "penstock", line
        serves = arguments[0] == "serve"
        more = ("--model", str(self.site.model), *SIZES) if serves else ()
        process = self.site.penstock(machine, *arguments, *more)
        if serves:
            self.began.append(line_of(process, "penstock: "))
            return
        said = process.communicate(timeout=SOON_S)[0]
        assert process.returncode == 0, said
        if arguments[:2] == ["keys", "new"]:
            self.words[f"KEY_OF_{name.upper()}"] = said.split()[-1]

    def fetch(self, machine: Machine, arguments: list[str]) -> None:
        *options, url = arguments
        header = dict([options[1].split(": ", 1)]) if options else {}

        def status() -> int:
            return machine.call(httpx.get, url, headers=header, timeout=SOON_S).status_code

        eventually(status, 200)


def test_the_commands_of_the_page_are_taken_as_they_stand(
    machine_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of each but its processes: what those do is in the other modules here."""
    words = {}
    served = []
    for found in filter(None, map(COMMAND.match, PAGE.read_text().splitlines())):
        home = tmp_path / found[1]
        home.mkdir(exist_ok=True)
        (home / "api.key").write_text(API_KEY)
        (home / "api.key").chmod(0o600)
        monkeypatch.chdir(home)
        line = re.sub(r"\bKEY_OF_[AB]\b", lambda word: words[word[0]], found[2])
        program, *arguments = shlex.split(line)
        if program == "curl":
            continue
        serves = arguments[0] == "serve"
        more = ("--model", str(machine_model), *SIZES, "--print-config") if serves else ()

        status = run([*arguments, *more])

        said = capsys.readouterr()
        assert status == 0, said.err
        if arguments[:2] == ["keys", "new"]:
            words[f"KEY_OF_{found[1].upper()}"] = said.out.split()[-1]
        served += [line for line in said.out.splitlines() if line.startswith("role = ")]
    roles = [line.removeprefix("role = ").strip('"') for line in served]
    assert sorted(roles) == ["both", "both", "decode", "prefill", "router"]


@pytest.mark.long
def test_the_commands_of_the_page_work_in_their_order(site: Site) -> None:
    shells = Shells(site)
    lines = [found for line in PAGE.read_text().splitlines() if (found := COMMAND.match(line))]
    if not is_installed():  # NIXL, which carries KV from machine to machine.
        lines = [found for found in lines if "--handoff-host" not in found[2]]

    for found in lines:
        shells.run(found[1], found[2])

    assert shells.ran == len(lines) >= 10
    assert any("waits for instances at tcp://10.0.0.1:7000" in line for line in shells.began)
    joined = sum("has joined tcp://10.0.0.1:7000" in line for line in shells.began)
    assert joined == (4 if is_installed() else 2)
    for machine in shells.machines.values():
        assert "Traceback" not in site.log(machine)


@pytest.mark.long
def test_the_page_of_the_router_needs_the_api_key(site: Site) -> None:
    [first, *_] = site.network.machines

    refused = first.call(httpx.get, "http://10.0.0.1:8000/cache", timeout=SOON_S)

    assert refused.status_code == 401
