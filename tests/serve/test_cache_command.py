"""`penstock cache` against a running server: clear, pin, unpin, story."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli.app import run
from penstock_serve.cli.cache import story_lines
from penstock_serve.engine.named_pins import PINS_MAX
from tests.serve.conftest import eventually
from tests.serve.vllm_servers import answering

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Running

PROMPT = "this prefix is long enough for several blocks, and an operator wants it to stay " * 2


def pins(server: Running) -> int:
    [instance] = server.client.get("/cache").json()["instances"]
    found: int = instance["cache"]["pins"]
    return found


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompt"
    file.write_text(PROMPT)
    return file


@pytest.fixture
def unpinned(server: Running) -> Iterator[Running]:
    yield server
    for name in ("kept", "other"):
        server.client.post("/admin/unpin", json={"name": name})
    assert pins(server) == 0


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = run(["cache", *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_prefix_is_pinned_by_name_and_unpinned(
    unpinned: Running, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpinned.complete(PROMPT)
    where = ("--prompt-file", str(prompt_file))

    status, printed, _ = said(capsys, "pin", unpinned.address, "kept", *where, "--json", "-")

    assert status == 0
    done = json.loads(printed)
    assert done["blocks"]["instance-0"] == done["cached"]["instance-0"] > 1
    assert pins(unpinned) == 1
    # Under the same name it is the same pin, for another time.
    assert said(capsys, "pin", unpinned.address, "kept", *where)[0] == 0
    assert pins(unpinned) == 1
    status, printed, _ = said(capsys, "unpin", unpinned.address, "kept")
    assert (status, printed) == (0, f"instance-0: unpinned {done['blocks']['instance-0']} blocks\n")
    assert pins(unpinned) == 0
    status, printed, _ = said(capsys, "unpin", unpinned.address, "kept")
    assert status == 1
    assert "'kept' is not pinned" in printed


def test_a_pin_ends_by_itself(unpinned: Running, prompt_file: Path) -> None:
    asked = ["cache", "pin", unpinned.address, "other", "--system-file", str(prompt_file)]

    assert run([*asked, "--seconds", "1"]) == 0

    eventually(lambda: pins(unpinned), 0)


def test_pins_are_bounded(unpinned: Running) -> None:
    post = unpinned.client.post
    [instance] = unpinned.client.get("/cache").json()["instances"]
    # More than half of the device's slots, which is what may be pinned.
    slots = instance["cache"]["tiers"][0]["slots"]
    too_long = list(range(3, 3 + slots * 8))[: slots * 8 - 16]

    refused = post("/admin/pin", json={"name": "kept", "prompt": too_long})

    assert refused.status_code in {400, 503}
    assert "must have at most" in refused.text or "pin_share" in refused.text
    for number in range(PINS_MAX):
        post("/admin/pin", json={"name": f"n{number}", "prompt": PROMPT}).raise_for_status()
    try:
        answer = post("/admin/pin", json={"name": "kept", "prompt": PROMPT})
        assert answer.status_code == 503
        assert f"{PINS_MAX} prefixes are pinned" in answer.json()["failed"]["instance-0"]
    finally:
        for number in range(PINS_MAX):
            post("/admin/unpin", json={"name": f"n{number}"}).raise_for_status()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x"}, "name"),
        ({"name": "", "prompt": "x"}, "name"),
        ({"name": "n" * 65, "prompt": "x"}, "name"),
        ({"name": "kept"}, "prompt"),
        ({"name": "kept", "prompt": "x", "messages": []}, "messages"),
        ({"name": "kept", "prompt": ""}, "prompt"),
        ({"name": "kept", "prompt": [-1]}, "prompt"),
        ({"name": "kept", "prompt": "x", "seconds": 0}, "seconds"),
        ({"name": "kept", "prompt": "x", "seconds": True}, "seconds"),
        ({"name": "kept", "prompt": "x", "seconds": 1e12}, "seconds"),
    ],
)
def test_a_wrong_pin_is_refused_by_its_field(
    server: Running, body: dict[str, Any], field: str
) -> None:
    answer = server.client.post("/admin/pin", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


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


def test_nobody_there_and_no_file_are_told(
    prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = "http://127.0.0.1:9"

    assert said(capsys, "clear", nobody)[0] == 3
    assert said(capsys, "pin", nobody, "kept")[0] == 2
    status, _, complaint = said(capsys, "pin", nobody, "kept", "--prompt-file", f"{prompt_file}.no")
    assert status == 2
    assert "cannot be read" in " ".join(complaint.split())


@pytest.mark.parametrize(
    "words", [("clear",), ("pin", "kept"), ("unpin", "kept"), ("story", "cmpl-1")], ids="/".join
)
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b'{"reset": 5, "blocks": [], "failed": {}, "story": ["x"]}'),
        (404, b'{"error": "not found"}'),
        (503, b'{"failed": "x"}'),
    ],
)
def test_who_is_no_penstock_is_told_in_one_line(
    words: tuple[str, ...],
    status: int,
    body: bytes,
    prompt_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *name = words
    options = ["--prompt-file", str(prompt_file)] if command == "pin" else []

    with answering(status, body) as address:
        ended, _, complaint = said(capsys, command, address, *name, *options)

    assert ended == 3
    assert complaint.startswith(f"penstock: {address}")
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("tenant", ["a\nb", "é", "日本"])
def test_a_tenant_that_no_header_can_name_is_refused(
    tenant: str, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("pin", "http://127.0.0.1:9", "kept", "--prompt-file", str(prompt_file))

    status, _, complaint = said(capsys, *words, "--tenant", tenant)

    assert status == 2
    assert "--tenant" in complaint
