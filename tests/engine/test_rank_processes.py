"""Ranks in processes of their own, over real channels: the same answers, whoever has the heads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import pytest

from penstock.config import parse_config
from penstock.engine.instance import build_engine
from penstock.engine.requests import Request
from penstock.engine.sampling_options import Sampling
from penstock.engine.spec import InstanceSpec, RankSpec, sealed
from penstock.errors import UnavailableError
from penstock.transport.zeromq import IPC
from penstock.transport.zmq_link import private_address
from tests.engine.test_engine import (
    BOUND,
    TELLING,
    make_engine,
    prompt,
    reference,
    require_right_logits,
    run,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.engine.engine import Engine

CONFIG = """
version = 1
model.name = "small"
[cache]
block_tokens = 8
blocks = {blocks}
ranks = {ranks}
load_gate = "off"
[[tiers]]
name = "host"
kind = "host"
blocks = 64
"""

# A rank as its command runs it, which then says whether its group is there at its end.
TELLING_ITS_END = """
import sys
from torch import distributed
from penstock.engine.rank_process import main
status = main(sys.argv[1])
sys.exit(f"there is a group: {distributed.is_initialized()}, status {status}")
"""


@contextmanager
def instance(
    folder: Path,
    *,
    ranks: int,
    blocks: int = 64,
    program: Sequence[str] = ("-m", "penstock.engine.rank_process"),
    errors: IO[str] | None = None,
) -> Iterator[tuple[Engine, list[subprocess.Popen[bytes]]]]:
    spec = InstanceSpec(
        name="test",
        model=str(folder),
        config=parse_config(CONFIG.format(blocks=blocks, ranks=ranks)),
        server="",
        ranks=ranks,
        scheduler=private_address(IPC),
        step_tokens=64,
        step_requests=16,
        threads=1,
    )
    processes = []
    for rank in range(ranks):
        given = sealed(RankSpec(instance=spec, rank=rank))
        processes.append(
            subprocess.Popen(
                [sys.executable, *program, str(given)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stderr=errors,
                pass_fds=(given,),
            )
        )
        os.close(given)
    try:
        engine, _ = build_engine(spec)
        try:
            yield engine, processes
        finally:
            engine.close(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=60)


def test_three_ranks_answer_as_one_would_and_end_with_their_scheduler(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    requests = [Request(id=f"r{n}", prompt=prompt(20 + 9 * n, n), max_tokens=8) for n in range(4)]

    with instance(folder, ranks=3) as (engine, processes):
        told = run(engine, *requests)
        engine.close(1.0)
        ended = [process.wait(timeout=60) for process in processes]

    for request in requests:
        assert tokens_of(told[request.id, 0]) == reference(model, request.prompt, 8)
    assert ended == [0] * 3


def test_two_ranks_find_blocks_in_the_host_memory_of_each(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    first = Request(id="first", prompt=prompt(80, 1), max_tokens=4)
    others = [Request(id=f"o{n}", prompt=prompt(90, 10 + n), max_tokens=4) for n in range(4)]
    asked = Request(id="again", prompt=first.prompt, max_tokens=4, sampling=TELLING)

    with instance(folder, ranks=2, blocks=20) as (engine, _):
        once = run(engine, first)["first", 0]
        run(engine, *others)
        again = run(engine, asked)["again", 0]
        corrupt = engine.cache.statistics().blocks_corrupt

    assert once[0].cached_by_tier == (0, 0)
    assert again[0].cached_by_tier[1] > 0
    assert tokens_of(once) == tokens_of(again) == reference(model, first.prompt, 4)
    require_right_logits(again, model, first.prompt)
    assert corrupt == 0


def test_two_ranks_score_a_prompt_and_choose_tokens_as_one_does(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    sampling = Sampling(
        logprobs=2, temperature=0.8, seed=3, top_k=9, frequency_penalty=0.7, logit_bias=((5, 4.0),)
    )
    asked = Request(
        id="r",
        prompt=prompt(70, 4),
        max_tokens=12,
        sampling=sampling,
        stop_tokens=frozenset({5}),
        min_tokens=10,
        scores_prompt=True,
    )

    with instance(folder, ranks=2) as (engine, _):
        found = run(engine, asked)["r", 0]
    right = run(make_engine(folder), asked)["r", 0]

    assert tokens_of(found) == tokens_of(right)
    assert [(o.position, len(o.scored)) for o in found] == [
        (o.position, len(o.scored)) for o in right
    ]
    for one, other in zip(found, right, strict=True):
        for each, same in zip(one.scored, other.scored, strict=True):
            assert each.token == same.token
            assert each.logprob == pytest.approx(same.logprob, abs=BOUND)


def test_a_rank_that_is_killed_ends_its_instance_at_once(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    with instance(folder, ranks=2) as (engine, processes):
        engine.add(Request(id="r", prompt=prompt(20, 1), max_tokens=200))
        engine.step()
        began = time.monotonic()

        processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"rank . is lost"):
            run(engine)
        engine.abandon()

        assert time.monotonic() - began < 60
        assert processes[0].wait(timeout=60) == 1


@pytest.mark.parametrize("killed", [False, True], ids=["with its scheduler", "after another one"])
def test_a_rank_leaves_no_thread_of_its_group_to_the_end_of_its_process(
    checkpoint_of: Any, tmp_path: Path, *, killed: bool
) -> None:
    """One that needs the interpreter when there is none any more aborts the process."""
    folder, _ = checkpoint_of("llama")
    told = tmp_path / "told"
    with (
        told.open("w") as errors,
        instance(folder, ranks=2, program=("-c", TELLING_ITS_END), errors=errors) as found,
    ):
        engine, processes = found
        if killed:
            processes[1].kill()
            engine.add(Request(id="r", prompt=prompt(20, 1)))
            with pytest.raises(UnavailableError, match=r"rank . is lost"):
                run(engine)
            engine.abandon()
        else:
            engine.close(1.0)
        processes[0].wait(timeout=60)

    assert f"there is a group: False, status {int(killed)}" in told.read_text()
