"""Benchmarks of a GPU, where there is none: they cannot run here, and say so in one line."""

from __future__ import annotations

import pytest
import torch

from lab.cli.app import run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")


@pytest.mark.parametrize(
    "arguments",
    [
        ["transfer"],
        ["handoff", "--device", "cuda"],
        ["engine"],
    ],
    ids=" ".join,
)
def test_a_benchmark_of_a_gpu_says_in_one_line_that_there_is_none(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(["bench", *arguments])

    printed = capsys.readouterr()
    assert ended == 3
    assert printed.out == ""
    assert printed.err.startswith(f"lab: bench {arguments[0]} ")
    assert "CUDA" in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
