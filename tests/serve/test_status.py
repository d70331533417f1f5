"""`penstock status` and `penstock top` against running servers."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from penstock.cli.app import run
from penstock.errors import UnavailableError
from penstock_serve.cli.status import describe_live, seconds_text
from penstock_serve.cli.top import TopView, can_draw, draw, sparkline
from penstock_serve.server.server_socket import address_of, listen
from tests.serve.conftest import SOON_S, eventually
from tests.serve.vllm_servers import FakeVllm, RunningRouter, answering, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running


@pytest.fixture
def decode() -> Iterator[FakeVllm]:
    found = FakeVllm("decode")
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def router(decode: FakeVllm) -> Iterator[RunningRouter]:
    with running([], [decode]) as found:
        yield found


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:8000/v2",
        "http://127.0.0.1:8000/v1/models",
        "http://127.0.0.1:8000?x=1",
        "http://name:password@127.0.0.1:8000",
        "http://a\nb:1",
        f"http://{'x' * 300}:1",
        "a\nb:1",
        "::1",
        "127.0.0.1:99999",
        "127.0.0.1:8000/v2",
        "name:password@127.0.0.1:8000",
    ],
)
def test_an_address_that_is_none_is_refused_by_name(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["status", url])

    said = capsys.readouterr().err
    assert status == 2
    assert said.startswith("penstock: URL: is ")
    assert said.endswith(
        ", must be the address of a server: HOST:PORT, http://HOST:PORT, or the absolute path of "
        "its socket\n"
    )
    assert said.count("\n") == 1


def test_https_to_a_server_without_tls_says_what_to_try(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["status", server.address.replace("http://", "https://")])

    said = capsys.readouterr().err
    assert status == 3
    assert "its address begins with http://" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("end", ["/v1", "/v1/"])
def test_the_address_that_clients_of_openai_take_will_do(
    end: str, router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", router.address + end]) == 0
    assert capsys.readouterr().out.startswith(f"{router.address}: ok ")


def test_an_address_without_a_scheme_will_do(
    router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    port = router.address.rpartition(":")[2]

    for typed in (f"127.0.0.1:{port}", f"localhost:{port}/v1", f":{port}", port):
        assert run(["status", typed]) == 0
        assert f":{port}: ok (" in capsys.readouterr().out
        assert run(["top", typed, "--once"]) == 0
        assert f":{port}  overview" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [["status"], ["top", "--once"], ["load", "--requests", "1"], ["status", "localhost"]],
    ids=" ".join,
)
def test_without_an_address_or_a_port_the_default_port_is_asked(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever is there, or nobody: the message or the answer says where."""
    run(command)

    said = capsys.readouterr()
    host = "localhost" if "localhost" in command else "127.0.0.1"
    assert f"{host}:8000" in said.out + said.err


def test_the_status_of_a_server_says_how_it_is(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server.complete("a prompt for the status, of which some blocks are stored")

    def said() -> str:
        assert run(["status", server.address]) == 0
        return capsys.readouterr().out

    # It may be a second old, from before the first request.
    eventually(lambda: "first token" in said(), wanted=True)
    first, *lines = said().splitlines()
    assert first.startswith(f"{server.address}: ok (small-model, penstock ")
    titles = [line[:14].strip() for line in lines]
    for title in ("requests", "prompt tokens", "first token", "device", "host", "missed"):
        assert title in titles
    assert re.search(r"^prompt tokens  [\d,]+ in 10 min: .*% computed$", "\n".join(lines), re.M)


def test_the_status_is_1_and_says_why_if_requests_are_not_answered(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server.client.post("/admin/pause", json={}).raise_for_status()
    try:
        eventually(lambda: run(["status", server.address]), 1)
        assert ": down (" in capsys.readouterr().out
        assert run(["status", server.address]) == 1
        assert "\n  the server is paused\n" in capsys.readouterr().out
    finally:
        server.client.post("/admin/resume", json={}).raise_for_status()
    eventually(lambda: run(["status", server.address]), 0)


def test_the_status_of_a_router_names_its_servers(
    router: RunningRouter, decode: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    router.complete()

    assert run(["status", router.address]) == 0
    assert f"{decode.url} up" in capsys.readouterr().out
    decode.health = 500
    eventually(lambda: run(["status", router.address]), 1)
    assert "is down" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("status",), ("top",)])
def test_json_alone_is_written_to_standard_output(
    command: tuple[str, ...], router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, router.address, "--json", "-"]) == 0

    assert json.loads(capsys.readouterr().out)["kind"] == "router"


@pytest.mark.parametrize("command", ["status", "top"])
def test_what_is_wrong_is_said_in_one_line(
    command: str, decode: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    key = tmp_path / "key"
    key.write_text("right")
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")

    def ended(*arguments: str) -> tuple[int, str]:
        status = run([command, *arguments])
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return status, error

    assert ended(f"http://127.0.0.1:{port}") == (
        3,
        f"penstock: nobody answers at http://127.0.0.1:{port}: Connection refused\n",
    )
    assert ended("localhost:x")[0] == ended("http://127.0.0.1:99999")[0] == 2
    status, error = ended(decode.url)
    assert status == 3
    assert "is no penstock serve or penstock router" in error
    with running([], [decode], key="right") as locked:
        for given in ((), ("--api-key-file", str(wrong))):
            status, error = ended(locked.address, *given)
            assert status == 2
            assert error.startswith("penstock: API key: is missing or wrong for http://")
        once = ("--once",) if command == "top" else ()
        assert run([command, locked.address, "--api-key-file", str(key), *once]) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b'{"kind": "server"}',
        b'{"kind": "router", "health": {"state": "weird"}}',
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:18]),
)
@pytest.mark.parametrize("words", [["status"], ["top", "--once"]], ids=" ".join)
def test_who_answers_as_no_penstock_does_is_told_in_one_line(
    words: list[str], body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, body) as address:
        assert run([*words, address]) == 3

    complaint = capsys.readouterr().err
    assert complaint.startswith(f"penstock: {address} is no ")
    assert complaint.count("\n") == 1


def test_top_shows_every_view_once(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    answer = server.complete("a prompt for top")
    eventually(lambda: answer["id"] in run_once(server, capsys), wanted=True)

    shown = run_once(server, capsys)
    for text in ("overview", "instance-0", "first token", "prompt tokens"):
        assert text in shown


def run_once(server: Running, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["top", server.address, "--once"]) == 0
    return capsys.readouterr().out


def test_top_without_a_terminal_says_what_to_use(
    router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", router.address]) == 3
    assert "--once" in capsys.readouterr().err


def test_top_in_a_terminal_that_can_show_no_screen_says_what_to_use(
    router: RunningRouter,
) -> None:
    with in_terminal("top", router.address, TERM="dumb") as (process, ours):
        assert process.wait(SOON_S) == 3
        assert b"--once" in wait_for(ours, b"\n", b"")


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_a_top_that_is_told_to_end_leaves_the_terminal_as_it_was(
    router: RunningRouter, asked: signal.Signals
) -> None:
    with in_terminal("top", router.address) as (process, ours):
        before = termios.tcgetattr(ours)
        seen = wait_for(ours, b"overview", b"")
        process.send_signal(asked)
        assert process.wait(SOON_S) == 128 + asked
        assert b"\x1b[?1049l" in wait_for(ours, b"\x1b[?1049l", seen)
        assert termios.tcgetattr(ours) == before


RECORDED = Path(__file__).parents[1] / "observe" / "pages" / "live-server.json"


def test_numbers_of_requests_are_whole_in_a_narrow_terminal() -> None:
    asked = {
        "request": "cmpl-2b784077490f449087030c5dad253165",
        "began": 0.0,
        "prompt_tokens": 12345,
        "found": {"device": 12000},
        "first_token_s": 0.00491,
        "took_s": 1.52,
        "generated": 400,
        "outcome": "answered",
    }
    live: dict[str, Any] = {
        "kind": "server",
        "now": 5.0,
        "health": {"state": "ok", "why": []},
        "traffic": {"requests": [asked]},
    }
    console = Console(width=80)

    with console.capture() as captured:
        console.print(draw("http://here", live, TopView(view=2)))

    row = next(line for line in captured.get().splitlines() if line.startswith("cmpl-"))
    name, *cells = re.split(r"\s{2,}", row.strip())
    assert name.endswith("…")
    assert cells == ["5", "12,345", "12,000", "4.91 ms", "1.52 s", "400", "answered"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (1.5, "1.5 s"), (59.96, "1 min 0 s"), (119.7, "2 min 0 s")],
)
def test_times_are_rounded_before_they_are_divided(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def recorded() -> Any:
    live = json.loads(RECORDED.read_text(encoding="utf-8"))
    live["traffic"]["rates"] = {"requests_per_s": 2.5, "output_tokens_per_s": 321.4}
    live["traffic"]["between"] = {"count": 9, "p50_s": 0.012, "p95_s": 0.03}
    live["traffic"]["alike"] = {
        "tokens_min": 2048,
        "tokens_max": 4095,
        "warm_count": 9,
        "warm_p50_s": 0.1,
        "cold_count": 8,
        "cold_p50_s": 0.45,
    }
    live["traffic"]["slices"][0] |= {"generated": 400, "between_p50_s": 0.012}
    return live


def test_status_says_how_much_is_answered_and_compares_prompts_of_one_length() -> None:
    lines = list(describe_live("http://here", recorded()))

    assert "last minute    2.5 requests/s, 321 output tokens/s" in lines
    assert "between tokens 12 ms median, 95 % within 30 ms" in lines
    sooner = "4.5 times sooner mostly cached, of prompts of 2,048 to 4,095 tokens"
    assert f"first token    {sooner}" in lines


def test_status_shows_a_server_that_says_nothing_of_rates() -> None:
    live = json.loads(RECORDED.read_text(encoding="utf-8"))

    assert not [line for line in describe_live("http://here", live) if "requests/s" in line]


def test_the_overview_of_top_has_bars_and_lines_where_they_can_be_shown() -> None:
    def printed(*, is_drawn: bool) -> str:
        console = Console(width=140)
        with console.capture() as captured:
            console.print(draw("http://here", recorded(), TopView(), is_drawn=is_drawn))
        return captured.get()

    rows = dict(
        re.split(r"\s{2,}", line, maxsplit=1) for line in printed(is_drawn=True).splitlines()[1:7]
    )

    assert list(rows) == ["device", "host", "disk", "requests/s", "output tokens/s", "first token"]
    # 126 of 128 blocks of the device, and all of the host's.
    assert rows["device"].startswith("█" * 29)
    assert rows["device"].split()[-3:] == ["98", "%", "full"]
    assert rows["requests/s"].split() == ["█", "2.5", "now,", "6", "at", "most"]
    assert rows["output tokens/s"].split() == ["█", "321", "now,", "40", "at", "most"]
    assert "█" not in printed(is_drawn=False)
    assert (can_draw("utf-8"), can_draw("ascii"), can_draw("latin-1")) == (True, False, False)


def test_what_is_not_nothing_is_seen_in_a_line() -> None:
    assert sparkline([0, 0.001, 5, 10]) == " ▁▄█"
    assert sparkline([0, 0]) == "  "


def test_rows_are_sorted_by_the_column_that_was_chosen() -> None:
    servers = [
        {"name": name, "role": "decode", "up": True, "cause": "", "load": load}
        for name, load in (("b", 1), ("a", 3), ("c", 2))
    ]
    live: dict[str, Any] = {
        "kind": "router",
        "health": {"state": "ok", "why": []},
        "servers": servers,
    }
    view = TopView()

    def order() -> str:
        console = Console(width=80)
        with console.capture() as captured:
            console.print(draw("http://here", live, view))
        return "".join(re.findall(r"^([abc]) ", captured.get(), re.MULTILINE))

    assert view.press("2")
    assert order() == "bac"
    assert view.press("s")
    assert order() == "abc"
    assert view.press("r")
    assert order() == "cba"
    assert all(view.press(key) for key in "sss")
    assert order() == "acb"
    assert not view.press("q")


def test_top_is_driven_by_keys_and_leaves_the_terminal_as_it_was(router: RunningRouter) -> None:
    with in_terminal("top", router.address) as (process, ours):
        seen = wait_for(ours, b"overview", b"")
        os.write(ours, b"3")
        seen = wait_for(ours, b"first token", seen)
        os.write(ours, b"q")
        assert process.wait(SOON_S) == 0
        # The screen that was there before is shown again.
        assert b"\x1b[?1049l" in wait_for(ours, b"\x1b[?1049l", seen)


@contextmanager
def in_terminal(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command in a terminal, and the descriptor of whoever sits in front of it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "penstock.cli.entry", *words]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(SOON_S)
        os.close(ours)
        os.close(theirs)


def wait_for(descriptor: int, text: bytes, seen: bytes) -> bytes:
    """Reads from a terminal until it showed something; returns all that it showed."""
    deadline = time.monotonic() + SOON_S
    while text not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        assert ready, seen
        seen += os.read(descriptor, 1 << 16)
    return seen


# Over a socket.


@pytest.fixture
def at_socket(decode: FakeVllm, tmp_path: Path) -> Iterator[RunningRouter]:
    found = RunningRouter([], [decode], "", host=f"unix:{tmp_path}/penstock.sock")
    found.start()
    try:
        yield found
    finally:
        found.stop()


@pytest.mark.parametrize("before", ["", "unix:"])
def test_a_server_at_a_socket_is_found_by_its_path(
    at_socket: RunningRouter, before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{before}{tmp_path}/penstock.sock"

    assert run(["status", url]) == 0
    assert capsys.readouterr().out.startswith(f"{at_socket.address}: ok (router of vLLM servers")
    assert run(["top", "--once", url]) == 0
    assert "overview" in capsys.readouterr().out


def test_a_socket_without_a_server_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", f"{tmp_path}/none"]) == 3
    assert capsys.readouterr().err == (
        f"penstock: nobody answers at unix:{tmp_path}/none: No such file or directory\n"
    )
    assert run(["top", f"unix:/{'x' * 200}"]) == 2
    assert "at most 107 bytes" in capsys.readouterr().err


def test_a_socket_belongs_to_its_user_and_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    with listen(f"unix:{path}", 0):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(UnavailableError, match="Address already in use"):
            listen(f"unix:{path}", 0)
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    left = tmp_path / "penstock.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
        killed.listen(1)
    with listen(f"unix:{left}", 0) as bound:
        assert address_of(bound) == f"unix:{left}"
    file = tmp_path / "notes"
    file.write_text("kept")

    with pytest.raises(UnavailableError, match="Address already in use"):
        listen(f"unix:{file}", 0)

    assert file.read_text() == "kept"
