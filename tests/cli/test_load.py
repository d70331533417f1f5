"""`penstock load` against a small server, and `penstock load-compare` of what it wrote."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock_serve.server.guard import KEY_VARIABLE
from tests.loadtest.conftest import answer_whole
from tests.serve import browser
from tests.serve.conftest import SOON_S, eventually
from tests.serve.vllm_servers import Conversation, FakeVllm, fail, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FROM_A_TERMINAL = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from penstock.cli.entry import main; sys.exit(main(sys.argv[1:]))"
)
"""A shell has what it starts in the background ignore Ctrl-C, the tests as well."""
SMALL = ("--model", "small", "--system-tokens", "3", "--turn-tokens", "4", "--gap-s", "0")


@pytest.fixture
def openai() -> Iterator[FakeVllm]:
    server = FakeVllm("openai")
    server.always = answer_whole
    yield server
    server.stop()


def test_a_run_prints_a_table_and_writes_a_report_and_a_page(
    openai: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, page = tmp_path / "run.json", tmp_path / "run.html"

    status = run(
        [
            "load",
            f"{openai.url}/v1",
            *SMALL,
            "--requests",
            "7",
            "--json",
            str(report),
            "--html",
            str(page),
            "--label",
            "mine",
        ]
    )

    assert status == 0
    shown = capsys.readouterr()
    assert "first token, p50" in shown.out
    assert "75.0%" in shown.out
    assert shown.err == "", "there is no progress where there is no terminal"
    written = json.loads(report.read_text(encoding="utf-8"))
    assert (written["requests"], written["answered"], written["label"]) == (7, 7, "mine")
    assert written["settings"]["workload"] == "conversations"
    assert len(written["records"]) == 7
    assert "mine" in page.read_text(encoding="utf-8")


def test_the_same_command_asks_the_same_again(openai: FakeVllm) -> None:
    command = ["load", openai.url, *SMALL, "--requests", "6", "--concurrency", "1", "--seed", "5"]

    assert run(command) == run(command) == 0

    assert openai.bodies[:6] == openai.bodies[6:]


def test_requests_that_fail_are_shown_and_make_a_finding(
    openai: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.behaves = [fail(503), fail(503), fail(400)]

    status = run(["load", openai.url, *SMALL, "--requests", "5"])

    assert status == 1
    shown = capsys.readouterr().out
    assert "2 failed, status 503: 503" in shown
    assert "1 failed, status 400: 400" in shown


def test_a_trace_is_asked_at_a_rate(openai: FakeVllm, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 9, "hash_ids": [1, %d]}\n'
    trace.write_text("".join(line % (at, at) for at in (2, 4, 8)), encoding="utf-8")

    status = run(
        [
            "load",
            openai.url,
            "--model",
            "small",
            "--trace",
            str(trace),
            "--rate",
            "20",
            "--api",
            "chat",
            "--prompt-max",
            "520",
        ]
    )

    assert status == 0
    words = [each["messages"][0]["content"].split() for each in openai.asked]
    assert [len(each) for each in words] == [520] * 3
    assert words[0][:512] == words[1][:512] == words[2][:512]
    assert {each["max_tokens"] for each in openai.asked} == {9}


@pytest.mark.parametrize("way", ["file", "environment"])
def test_the_api_key_is_sent_and_written_nowhere(
    openai: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    report, key_file = tmp_path / "run.json", tmp_path / "key"
    key_file.write_text("s3cret\n", encoding="utf-8")
    monkeypatch.setenv(KEY_VARIABLE, "s3cret" if way == "environment" else "other")
    options = ["--api-key-file", str(key_file)] if way == "file" else []

    status = run(["load", openai.url, *SMALL, "--requests", "1", "--json", str(report), *options])

    assert status == 0
    assert openai.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("asked", ["SIGINT", "SIGTERM"])
def test_a_run_that_is_interrupted_reports_what_was_measured_so_far(
    openai: FakeVllm, tmp_path: Path, asked: str
) -> None:
    def answer_one(conversation: Conversation) -> None:
        (answer_whole if len(openai.asked) == 1 else Conversation.hang)(conversation)

    openai.always = answer_one
    report = tmp_path / "run.json"
    options = [*SMALL, "--concurrency", "1", "--json", str(report)]
    command = [sys.executable, "-c", FROM_A_TERMINAL, "load", openai.url, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            eventually(lambda: len(openai.asked), 2)
            process.send_signal(getattr(signal, asked))
            out, err = process.communicate(timeout=SOON_S)
        finally:
            process.kill()

    assert (process.returncode, err) == (130, "")
    assert "the run was interrupted" in out
    written = json.loads(report.read_text(encoding="utf-8"))
    assert (written["interrupted"], written["answered"]) == (True, 1)


def test_a_page_replaces_the_one_before_as_a_whole(openai: FakeVllm, tmp_path: Path) -> None:
    page, kept = tmp_path / "pages" / "run.html", tmp_path / "kept.html"
    command = ["load", openai.url, *SMALL, "--requests", "1", "--html", str(page)]
    assert run([*command, "--label", "first"]) == 0
    kept.hardlink_to(page)

    assert run([*command, "--label", "second"]) == 0

    # Whoever has the first page open reads that one to its end.
    assert "first" in kept.read_text(encoding="utf-8")
    assert "second" in page.read_text(encoding="utf-8")
    assert list(page.parent.iterdir()) == [page]


def test_a_server_that_wants_another_key_is_wrong_usage_and_says_where_to_put_it(
    openai: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    with running([], [openai], key="right") as locked:
        status = run(["load", locked.address])

    assert status == 2
    assert capsys.readouterr().err == (
        f"penstock: API key: is missing or wrong for {locked.address}, must be in "
        f"--api-key-file FILE or {KEY_VARIABLE}\n"
    )


def test_https_to_a_server_without_tls_says_what_to_try(
    openai: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["load", openai.url.replace("http://", "https://")])

    assert status == 3
    assert capsys.readouterr().err.endswith("; if it has no TLS, its address begins with http://\n")


def test_runs_are_laid_side_by_side(
    openai: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("one.json", "two.json")]
    for file in files:
        assert run(["load", openai.url, *SMALL, "--requests", "3", "--json", file]) == 0
    capsys.readouterr()
    page = tmp_path / "both.html"

    status = run(["load-compare", *files, "--html", str(page)])

    assert status == 0
    assert capsys.readouterr().out.splitlines()[0].split() == [files[0], files[1], "better"]
    assert files[1] in page.read_text(encoding="utf-8")


@pytest.mark.skipif(not browser.PROGRAM, reason="there is no chromium: apt-get install chromium")
def test_the_page_of_two_runs_fits_every_screen_and_can_be_read(
    openai: FakeVllm, tmp_path: Path
) -> None:
    files = [str(tmp_path / f"{name}-{'x' * 80}.json") for name in ("one", "<b>two")]
    for file in files:
        assert run(["load", openai.url, *SMALL, "--requests", "3", "--json", file]) == 0
    file = tmp_path / "both.html"
    assert run(["load-compare", *files, "--html", str(file)]) == 0

    with browser.browsing(tmp_path / "profile") as page:
        page.open(file.as_uri())
        page.suits_every_screen()
        assert page.run("document.querySelectorAll('svg polyline').length") >= 4
        assert page.run("document.querySelectorAll('b').length") == 0
        assert page.requests == [file.as_uri()]
        assert page.errors == []


def test_nobody_at_the_address_cannot_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]

    assert run(["load", f"http://127.0.0.1:{port}"]) == 3
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rate", "nan"], "--rate"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--concurrency", "2"], "--rate"),
        (["--timeout", "-1"], "--timeout"),
        (["--timeout", "inf"], "--timeout"),
        (["--ttft-bound", "nan"], "--ttft-bound"),
        (["--gap-s", "-1"], "--gap-s"),
        (["--requests", "0"], "--requests"),
        (["--requests", "1.5"], "--requests"),
        (["--workload", "chaos"], "--workload"),
        (["--api", "soap"], "--api"),
        (["--prompt-max", "5"], "--prompt-max"),
        (["--trace", "conversation", "--turns", "5"], "--turns"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--api-key-file", "nowhere.key"], "--api-key-file: is 'nowhere.key'"),
        (["--api-key-file", ""], "--api-key-file: is empty"),
        (["--html", "-"], "--html"),
        (["--html", "here", "--json", "here"], "--html"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["load", "http://127.0.0.1:1", *options]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "localhost:x", "ftp://here", "http://here/?x=1"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["load", url]) == 2
    assert "must be a URL" in capsys.readouterr().err


def test_one_run_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["load-compare", "one.json"]) == 2
    assert "must be two or more" in capsys.readouterr().err
