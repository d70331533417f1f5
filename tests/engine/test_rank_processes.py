"""Ranks in processes of their own, over real channels: the same answers, whoever has the heads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import pytest

from penstock.config import EngineTable, parse_config
from penstock.errors import UnavailableError
from penstock.transport.zeromq import IPC
from penstock.transport.zmq_link import private_address
from penstock_serve.engine.instance import build_engine
from penstock_serve.engine.requests import Request
from penstock_serve.engine.sampling_options import Sampling
from penstock_serve.engine.spec import InstanceSpec, RankSpec, sealed
from tests.engine.test_engine import (
    BOUND,
    SOON_S,
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

    from penstock_serve.engine.engine import Engine

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
from penstock_serve.engine.rank_process import main
status = main(sys.argv[1])
print(f"there is a group: {distributed.is_initialized()}, status {status}", file=sys.stderr)
sys.exit(status)
"""


@contextmanager
def instance(
    folder: Path,
    *,
    ranks: int,
    blocks: int = 64,
    program: Sequence[str] = ("-m", "penstock_serve.engine.rank_process"),
    errors: IO[str] | None = None,
) -> Iterator[tuple[Engine, list[subprocess.Popen[bytes]]]]:
    spec = InstanceSpec(
        name="test",
        engine=EngineTable(model=str(folder), step_tokens=64, step_requests=16, threads=1),
        config=parse_config(CONFIG.format(blocks=blocks, ranks=ranks)),
        server="",
        ranks=ranks,
        scheduler=private_address(IPC),
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
            process.wait(timeout=SOON_S)


def test_three_ranks_answer_as_one_would_and_end_with_their_scheduler(
    checkpoint_of: Any, tmp_path: Path
) -> None:
    """None leaves a thread of its group behind."""
    folder, model = checkpoint_of("llama")
    requests = [Request(id=f"r{n}", prompt=prompt(20 + 9 * n, n), max_tokens=8) for n in range(4)]

    with telling_ranks(folder, tmp_path / "told", ranks=3) as (engine, processes):
        reported = run(engine, *requests)
        engine.close(1.0)
        ended = [process.wait(timeout=SOON_S) for process in processes]

    for request in requests:
        assert tokens_of(reported[request.id, 0]) == reference(model, request.prompt, 8)
    assert ended == [0] * 3
    assert (tmp_path / "told").read_text().count("there is a group: False, status 0") == 3


class TwoRanks(NamedTuple):
    engine: Engine
    processes: list[subprocess.Popen[bytes]]
    told: Path


@pytest.fixture(scope="module")
def two(checkpoint_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    """For all tests but the last, which leave it as they found it but for what it has cached."""
    folder, _ = checkpoint_of("llama")
    told = tmp_path_factory.mktemp("two") / "told"
    with telling_ranks(folder, told, ranks=2, blocks=20) as (engine, processes):
        yield TwoRanks(engine, processes, told)


@pytest.fixture
def two_ranks(two: TwoRanks) -> Engine:
    return two.engine


def test_two_ranks_find_blocks_in_the_host_memory_of_each(
    checkpoint_of: Any, two_ranks: Engine
) -> None:
    _, model = checkpoint_of("llama")
    first = Request(id="first", prompt=prompt(80, 1), max_tokens=4)
    others = [Request(id=f"o{n}", prompt=prompt(90, 10 + n), max_tokens=4) for n in range(4)]
    asked = Request(id="again", prompt=first.prompt, max_tokens=4, sampling=TELLING)

    once = run(two_ranks, first)["first", 0]
    run(two_ranks, *others)
    again = run(two_ranks, asked)["again", 0]
    corrupt = two_ranks.cache.statistics().blocks_corrupt

    assert once[0].cached_by_tier == (0, 0)
    assert again[0].cached_by_tier[1] > 0
    assert tokens_of(once) == tokens_of(again) == reference(model, first.prompt, 4)
    require_right_logits(again, model, first.prompt)
    assert corrupt == 0


def test_two_ranks_score_a_prompt_and_choose_tokens_as_one_does(
    checkpoint_of: Any, two_ranks: Engine
) -> None:
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

    found = run(two_ranks, asked)["r", 0]
    right = run(make_engine(folder), asked)["r", 0]

    assert tokens_of(found) == tokens_of(right)
    assert [(o.position, len(o.scored)) for o in found] == [
        (o.position, len(o.scored)) for o in right
    ]
    for one, other in zip(found, right, strict=True):
        for each, same in zip(one.scored, other.scored, strict=True):
            assert each.token == same.token
            assert each.logprob == pytest.approx(same.logprob, abs=BOUND)


def test_a_killed_rank_ends_its_instance_and_the_process_of_the_other_rank(two: TwoRanks) -> None:
    """A thread of its group that is left to the end of a process aborts that process."""
    two.engine.add(Request(id="r", prompt=prompt(20, 1), max_tokens=120))
    two.engine.step()

    two.processes[1].send_signal(signal.SIGKILL)
    with pytest.raises(UnavailableError, match=r"rank . is lost"):
        run(two.engine)
    two.engine.abandon()

    assert two.processes[0].wait(timeout=SOON_S) == 1
    assert "there is a group: False, status 1" in two.told.read_text()


@contextmanager
def telling_ranks(
    folder: Path, reported: Path, *, ranks: int, blocks: int = 64
) -> Iterator[tuple[Engine, list[subprocess.Popen[bytes]]]]:
    """Ranks that write at their end whether their group is there."""
    program = ("-c", TELLING_ITS_END)
    with (
        reported.open("w") as errors,
        instance(folder, ranks=ranks, blocks=blocks, program=program, errors=errors) as found,
    ):
        yield found
