"""The examples run as they are, and show what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from tests.serve.conftest import make_checkpoint

if TYPE_CHECKING:
    import numpy as np

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LINES_MAX = 85
"""docs/integrating.md promises it of the example that integrators copy from."""
ENDED = re.compile(r"(?P<name>chat \d+): found \((?P<device>\d+), (?P<host>\d+)\); .+")


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example"])


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs_and_is_no_longer_than_a_page(
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "gguf.py":
        pytest.skip("needs llama-cpp-python: tests/connectors/llama_cpp/test_page.py runs it")
    if name == "offline.py":
        make_checkpoint(tmp_path / "small-model")
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "small-model")])
    assert printed_by(name, capsys)
    assert len((EXAMPLES / name).read_text().splitlines()) <= LINES_MAX


def test_the_engine_that_decodes_gets_the_prompt_of_the_other_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed_by("handoff.py", capsys)

    assert "decode: delivered, True KV of 10 tokens, and then (110,)" in lines


def test_every_chat_of_the_embedded_cache_ends(capsys: pytest.CaptureFixture[str]) -> None:
    *lines, last = printed_by("embed.py", capsys)

    refused = [line for line in lines if line.startswith("too long: refused; ")]
    ended = [ENDED.fullmatch(line) for line in lines]

    assert sorted(each["name"] for each in ended if each) == sorted(f"chat {n}" for n in range(12))
    assert len(refused) == 1
    assert len(lines) == 12 + 1
    assert "unsettled=0" in last


def test_chats_come_back_through_the_cache_after_preemption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, leases = penstock.Cache.acquire, []

    def counted(cache: penstock.Cache, *given: Any, **named: Any) -> penstock.Lease:
        leases.append(acquire(cache, *given, **named))
        return leases[-1]

    monkeypatch.setattr(penstock.Cache, "acquire", counted)
    lines = printed_by("embed.py", capsys)

    found = [(int(each["device"]), int(each["host"])) for each in map(ENDED.match, lines) if each]

    assert any(host > 0 for _, host in found)
    # Nobody else has tokens of its answer: who finds more than its prompt was here before.
    prompt_tokens = 160
    assert any(device + host > prompt_tokens for device, host in found)
    assert len(leases) > len(found)


def test_the_embedding_engine_notices_kv_that_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[np.ndarray[Any, Any]] = []
    open_cache, grow = penstock.open, penstock.Lease.grow

    def keep(config: Any, *, kv: Any) -> penstock.Cache:
        opened.append(kv)
        return open_cache(config, kv=kv)

    def spoil(lease: penstock.Lease, token_count: int) -> None:
        grow(lease, token_count)
        if lease.cached_by_tier[1]:
            opened[0][lease.block_table[0]] = opened[0][lease.block_table[1]]

    monkeypatch.setattr(penstock, "open", keep)
    monkeypatch.setattr(penstock.Lease, "grow", spoil)

    with pytest.raises(AssertionError, match="KV of other tokens"):
        runpy.run_path(str(EXAMPLES / "embed.py"), run_name="__main__")


def test_the_chat_finds_second_turns_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("chat.py", capsys)

    assert "client 1, turn 1: 180 tokens, found 0, 0 (device, host); block 0: never seen" in lines
    assert (
        "client 8, turn 2: 244 tokens, found 96, 96 (device, host); block 12: never seen" in lines
    )
    assert lines[-1] == "65% of 3392 prompt tokens were found."


def test_a_notebook_finds_its_document_again_and_after_a_restart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [line for line in printed_by("notebook.py", capsys) if line.startswith("question ")]

    cached = [int(line.partition(": ")[2].partition(" ")[0]) for line in lines]
    assert cached == [0, 992, 992, 992, 992, 992]


def test_the_second_turn_of_an_offline_chat_is_found_in_the_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "small-model")
    monkeypatch.setattr(sys, "argv", ["offline.py", str(tmp_path / "small-model")])

    lines = [line for line in printed_by("offline.py", capsys) if line.startswith("turn ")]

    cached = [int(line.rpartition("(")[2].partition(" ")[0]) for line in lines]
    assert cached[:3] == [0, 0, 0]
    assert all(cached[3:])
