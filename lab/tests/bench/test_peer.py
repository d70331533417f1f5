from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.bench import prompts
from lab.bench.peer import VllmPeer
from lab.bench.prompts import draw_tokens, other_seed
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

READY = 'say({"kind": "ready", "vllm": "0.32.0", "hash": "sha256"})'
ANSWER_ORDERS = """
for line in sys.stdin:
    order = json.loads(line)
    drawn = draw_tokens(order["seed"], order["tokens"])
    times = {f"{work}_{part}_ns": order["block"] for work in ("miss", "hit", "evict")
             for part in ("match", "allocate", "free")}
    crc32 = zlib.crc32(drawn.tobytes())
    say({"kind": "timings", "tokens_crc32": crc32, "convert_ns": 0,
         "keys_ns": order["blocks"], **times})
"""


def write_peer(folder: Path, body: str) -> Path:
    """A peer that speaks the protocol as `body` tells it to, without vLLM."""
    script = folder / "peer.py"
    opening = f"""
        import json, os, runpy, sys, zlib
        draw_tokens = runpy.run_path({prompts.__file__!r})["draw_tokens"]
        def say(answer):
            print(json.dumps(answer), flush=True)
    """
    script.write_text(textwrap.dedent(opening) + body)
    return script


def start(script: Path, *, timeout_s: float = 60.0) -> VllmPeer:
    return VllmPeer.start(sys.executable, timeout_s=timeout_s, script=script)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_round_returns_what_the_peer_measured(tmp_path: Path) -> None:
    with start(write_peer(tmp_path, READY + ANSWER_ORDERS)) as peer:
        first = peer.round(tokens=64, block=16, seed=1)
        second = peer.round(tokens=128, block=32, seed=2, source="buffer", blocks=9)

    assert (peer.vllm_version, peer.hash_name) == ("0.32.0", "sha256")
    assert (first.keys_ns, first.hit_match_ns, first.evict_free_ns) == (4, 16, 16)
    assert (second.keys_ns, second.hit_match_ns, second.evict_free_ns) == (9, 32, 32)


def test_a_peer_that_is_left_has_ended(tmp_path: Path) -> None:
    with start(write_peer(tmp_path, READY + ANSWER_ORDERS)) as peer:
        pid = peer.process.pid
        assert is_running(pid)

    assert not is_running(pid)


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot start .*no-such-python"):
        VllmPeer.start(tmp_path / "no-such-python")


def test_an_environment_in_which_vllm_does_not_import_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch", "vllm"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('libexample is gone\\nbut why')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(UnavailableError) as refused:
        VllmPeer.start(sys.executable, timeout_s=300.0)

    message = str(refused.value)
    assert message == "the vLLM peer cannot run: ImportError: libexample is gone"


def test_a_peer_that_dies_at_its_start_leaves_its_last_words(tmp_path: Path) -> None:
    script = write_peer(tmp_path, "sys.exit('first line\\nout of luck')")

    with pytest.raises(UnavailableError, match=r"died during its start: out of luck$"):
        start(script)


def test_a_peer_that_dies_in_a_round_is_reported(tmp_path: Path) -> None:
    dies = "\nsys.stdin.readline()\nraise SystemExit('the pool had no room')"

    with (
        start(write_peer(tmp_path, READY + dies)) as peer,
        pytest.raises(UnavailableError, match="died during a round of 64 tokens: the pool had no"),
    ):
        peer.round(tokens=64, block=16, seed=1)


def test_an_order_to_a_peer_that_has_ended_is_reported(tmp_path: Path) -> None:
    with start(write_peer(tmp_path, READY)) as peer:
        peer.process.wait(300)

        with pytest.raises(UnavailableError, match="takes no more orders"):
            peer.round(tokens=64, block=16, seed=1)


@pytest.mark.parametrize(
    "line", ["'Loading weights: 100%'", "'{}'", '\'{"kind": "timings"}\'', "'x' * 100_000"]
)
def test_a_line_that_is_no_answer_ends_the_peer(tmp_path: Path, line: str) -> None:
    script = write_peer(tmp_path, f"print({line}, flush=True)\nsys.stdin.read()")

    with pytest.raises(UnavailableError, match=r"no answer|without an answer"):
        start(script)


def test_a_peer_that_is_silent_at_its_start_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"did not answer within 0.2 s \(its start\)"):
        start(write_peer(tmp_path, "sys.stdin.read()"), timeout_s=0.2)


def test_a_peer_that_hangs_in_a_round_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with start(write_peer(tmp_path, READY + "\nsys.stdin.read()")) as peer:
        peer.timeout_s = 0.2
        pid = peer.process.pid

        with pytest.raises(UnavailableError, match="did not answer within"):
            peer.round(tokens=64, block=16, seed=1)

        assert not is_running(pid)


def test_half_a_line_is_no_answer(tmp_path: Path) -> None:
    body = READY + "\nsys.stdout.write('{\"kind\"')\nsys.stdout.flush()\nsys.stdin.read()"

    with start(write_peer(tmp_path, body)) as peer:
        peer.timeout_s = 0.2

        with pytest.raises(UnavailableError, match="did not answer within"):
            peer.round(tokens=64, block=16, seed=1)


def test_work_on_other_tokens_is_not_compared(tmp_path: Path) -> None:
    body = READY + ANSWER_ORDERS.replace('order["seed"]', 'order["seed"] + 1')

    with (
        start(write_peer(tmp_path, body)) as peer,
        pytest.raises(UnavailableError, match="other tokens than seed 5 draws"),
    ):
        peer.round(tokens=64, block=16, seed=5)


@pytest.mark.parametrize(
    ("tokens", "blocks", "field"), [(60, None, "tokens"), (16, None, "tokens"), (64, 3, "blocks")]
)
def test_a_round_that_cannot_be_is_refused_before_it_is_ordered(
    tmp_path: Path, tokens: int, blocks: int | None, field: str
) -> None:
    with (
        start(write_peer(tmp_path, READY + ANSWER_ORDERS)) as peer,
        pytest.raises(ValueError, match=f"^{field}: "),
    ):
        peer.round(tokens=tokens, block=16, seed=1, blocks=blocks)


def test_a_seed_draws_the_same_prompt_for_ever() -> None:
    tokens = draw_tokens(7, 5)

    assert tokens.dtype == np.int32
    assert tokens.tolist() == [18913, 27045, 9862, 6072, 30814]


def test_a_longer_prompt_of_a_seed_begins_with_the_shorter_one() -> None:
    assert draw_tokens(3, 100)[:40].tolist() == draw_tokens(3, 40).tolist()


def test_the_prompts_of_a_round_share_no_block() -> None:
    prompts = [draw_tokens(seed, 4096) for seed in (1, 2, other_seed(1, 0), other_seed(1, 1))]

    blocks = {prompt[at : at + 16].tobytes() for prompt in prompts for at in range(0, 4096, 16)}

    assert len(blocks) == 4 * 4096 // 16
