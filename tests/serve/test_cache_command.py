"""`penstock cache` against a running server: clear, story."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock_serve.cli.status import story_lines
from tests.serve.vllm_servers import answering

if TYPE_CHECKING:
    from tests.serve.conftest import Running

PROMPT = "this prefix is long enough for several blocks of the cache, and is used twice " * 2


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = run(["cache", *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_story_is_told_in_order_and_a_stranger_is_not_known(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = server.complete("whose story is this?")

    status, printed, _ = said(capsys, "story", server.address, answer["id"])

    assert status == 0
    lines = printed.splitlines()
    assert lines[0].strip().startswith("+0.0 ms  acquired")
    assert "released" in printed
    assert answer["id"] not in printed
    status, _, complaint = said(capsys, "story", server.address, "cmpl-nobody")
    assert status == 2
    assert "cmpl-nobody" in complaint


def test_a_story_names_the_part_of_a_prefill_instance() -> None:
    lines = ["12.0035 acquired lease=7 cause=cmpl-1/0", "12.001 acquired lease=4 cause=cmpl-1"]

    assert story_lines(lines, "cmpl-1") == [
        "     +0.0 ms  acquired",
        "     +2.5 ms  [prefill] acquired",
    ]
    assert story_lines([], "cmpl-1") == []


def test_what_is_cleared_is_not_found_any_more(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server.complete(PROMPT)

    status, printed, _ = said(capsys, "clear", server.address)

    assert (status, printed) == (0, "cleared: instance-0\n")
    assert server.complete(PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_nobody_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "clear", "http://127.0.0.1:9")[0] == 3


@pytest.mark.parametrize("words", [("clear",), ("story", "cmpl-1")], ids="/".join)
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b'{"reset": 5, "story": ["x"]}'),
        (404, b'{"error": "not found"}'),
        (503, b'{"failed": "x"}'),
    ],
)
def test_who_is_no_penstock_is_told_in_one_line(
    words: tuple[str, ...],
    status: int,
    body: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *name = words

    with answering(status, body) as address:
        ended, _, complaint = said(capsys, command, address, *name)

    assert ended == 3
    assert complaint.startswith(f"penstock: {address}")
    assert complaint.count("\n") == 1
