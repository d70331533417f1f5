"""A recording is a trace of what came, says nothing else, and never holds anybody up."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.config import parse_config
from penstock.errors import ConfigError
from penstock.replay import trace
from penstock.replay.trace import Recorder, TraceReader, TraceRequest, natural_block_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


GOOD = {"timestamp": 1, "block_tokens": 4, "input_length": 5, "blocks": "0" * 16}


def keys_of(*names: str) -> list[bytes]:
    return [name.encode() * 8 for name in names]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "day.jsonl"


@pytest.fixture
def recorder(file: Path) -> Iterator[Recorder]:
    times = iter(range(1000))
    made = Recorder(str(file), bytes_max=MIB, clock=lambda: float(next(times)))
    yield made
    made.close()


def read(file: Path, block_tokens: int = 4) -> list[TraceRequest]:
    text = f'version = 1\nmodel.name = "m"\ncache = {{ block_tokens = {block_tokens}, blocks = 9 }}'
    return list(TraceReader(parse_config(text)).read(str(file)))


def test_requests_are_read_as_they_came(recorder: Recorder, file: Path) -> None:
    recorder.begin("a", keys_of("1", "2"), token_count=9, block_tokens=4)
    recorder.begin("b", keys_of("1", "3"), token_count=8, block_tokens=4)
    recorder.end("b", 5)
    recorder.end("a", 7)
    recorder.close()

    first, second = read(file)

    assert (first.at_s, first.token_count, first.output_tokens) == (1.0, 9, 7)
    assert (second.at_s, second.token_count, second.output_tokens) == (2.0, 8, 5)
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]
    assert natural_block_tokens(str(file)) == 4


def test_larger_blocks_are_named_by_their_last_part(recorder: Recorder, file: Path) -> None:
    recorder.begin("a", keys_of(*"12345"), token_count=21, block_tokens=4)
    recorder.close()

    (small,) = read(file)
    (large,) = read(file, block_tokens=8)

    assert large.keys == small.keys[1::2]
    with pytest.raises(ConfigError, match=r":1: block_tokens is 4, must divide .* 6"):
        read(file, block_tokens=6)


def test_neither_keys_nor_names_of_requests_are_written(tmp_path: Path) -> None:
    keys = keys_of("k")
    for name in ("one", "two"):
        recorder = Recorder(str(tmp_path / name), bytes_max=MIB)
        recorder.begin("client-7", keys, token_count=4, block_tokens=4)
        recorder.close()

    one, two = (msgspec.json.decode((tmp_path / name).read_bytes()) for name in ("one", "two"))

    assert set(one) == {"timestamp", "block_tokens", "input_length", "output_length", "blocks"}
    assert one["blocks"] != two["blocks"]
    assert keys[0].hex() not in one["blocks"]
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kept", [1, 40, 90, 117])
def test_a_file_that_was_cut_is_read_to_its_last_whole_line(
    recorder: Recorder, file: Path, kept: int
) -> None:
    for name in ("a", "b"):
        recorder.begin(name, keys_of("1"), token_count=5, block_tokens=4)
        recorder.end(name, 1)
    recorder.close()
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1

    file.write_bytes(whole[: first + min(kept, len(whole) - first - 2)])

    assert [each.at_s for each in read(file)] == [1.0]


def test_a_last_line_without_its_end_is_read_if_it_is_whole(file: Path) -> None:
    lines = [msgspec.json.encode({**GOOD, "timestamp": at}) for at in (1, 2)]
    file.write_bytes(b"\n".join(lines))

    assert [each.at_s for each in read(file)] == [0.001, 0.002]

    file.write_bytes(lines[0] + b'\n{"timestamp": 2}')
    with pytest.raises(ConfigError, match=r":2: input_length is missing, must be"):
        read(file)


def test_a_name_after_other_blocks_is_another_block(file: Path) -> None:
    names = ["a" * 16 + "a" * 16, "a" * 16 + "b" * 16, "b" * 16 + "a" * 16]
    lines = [{**GOOD, "input_length": 8, "blocks": name} for name in names]
    file.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))

    once_more, first, circle = read(file)

    assert once_more.keys[0] == first.keys[0] != once_more.keys[1]
    assert not set(circle.keys) & {*once_more.keys, *first.keys}


def test_a_full_file_ends_the_recording_and_says_so_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(str(file), bytes_max=400)

    with caplog.at_level(logging.WARNING):
        for name in map(str, range(20)):
            recorder.begin(name, keys_of("1"), token_count=5, block_tokens=4)
            recorder.end(name, 1)
        recorder.close()

    assert len(caplog.messages) == 1
    assert "it is full (serve.record_mib)" in caplog.messages[0]
    assert file.stat().st_size <= 400
    assert 1 <= len(read(file)) < 20


def test_a_block_has_one_name_also_when_names_are_not_kept_any_more(
    recorder: Recorder, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "NAMES_KEPT", 4)
    prompts = ["12", "13", "456789", "12", "1456"]
    for number, prompt in enumerate(prompts):
        name = str(number)
        recorder.begin(name, keys_of(*prompt), token_count=4 * len(prompt), block_tokens=4)
    recorder.close()

    lines = [msgspec.json.decode(line)["blocks"] for line in file.read_bytes().splitlines()]
    found = [
        {block: line[16 * at : 16 * at + 16] for at, block in enumerate(prompt)}
        for prompt, line in zip(prompts, lines, strict=True)
    ]
    names = {block: {each[block] for each in found if block in each} for block in "123456789"}
    assert {len(each) for each in names.values()} == {1}
    assert len({name for each in names.values() for name in each}) == 9


def test_a_name_that_comes_again_is_another_request(recorder: Recorder, file: Path) -> None:
    recorder.begin("long", keys_of("1"), token_count=5, block_tokens=4)
    recorder.begin("same", keys_of("2"), token_count=6, block_tokens=4)
    recorder.end("same", 3)
    recorder.begin("same", keys_of("3"), token_count=7, block_tokens=4)
    recorder.begin("same", keys_of("4"), token_count=4, block_tokens=4)
    recorder.end("same", 8)
    recorder.end("long", 9)
    recorder.close()

    found = [(each.at_s, each.token_count, each.output_tokens) for each in read(file)]
    assert found == [(1.0, 5, 9), (2.0, 6, 3), (3.0, 7, 0), (4.0, 4, 8)]


def test_keys_of_an_answer_that_are_added_later_are_no_part_of_the_prompt(
    recorder: Recorder, file: Path
) -> None:
    keys = keys_of("1", "2")
    recorder.begin("a", keys, token_count=9, block_tokens=4)
    keys += keys_of("3")
    recorder.close()

    assert len(read(file)[0].keys) == 2


def test_what_comes_is_written_soon_without_being_closed(
    recorder: Recorder, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LINGER_S", 0.01)
    written, real_write = threading.Event(), os.write

    def write(file: int, data: bytes) -> int:
        count = real_write(file, data)
        written.set()
        return count

    monkeypatch.setattr(trace, "os", SimpleNamespace(write=write, close=os.close))
    for name in ("a", "b"):
        written.clear()
        recorder.begin(name, keys_of("1"), token_count=5, block_tokens=4)
        recorder.end(name, 1)
        assert written.wait(60)

    assert len(read(file)) == 2


def test_requests_that_the_writer_is_too_slow_for_are_left_out_and_counted(
    recorder: Recorder, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "QUEUE_MAX", 3)
    for name in "abcde":
        recorder.begin(name, keys_of("1"), token_count=5, block_tokens=4)

    # It may take the first ones at any time.
    assert recorder.left_out <= 2
    recorder.close()
    assert len(read(file)) + recorder.left_out == 5


def test_a_request_that_does_not_end_holds_a_bounded_number_back(
    recorder: Recorder, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "OPEN_MAX", 3)
    recorder.begin("endless", keys_of("1"), token_count=5, block_tokens=4)
    for name in "abcd":
        recorder.begin(name, keys_of("1"), token_count=5, block_tokens=4)
        recorder.end(name, 9)
    recorder.end("endless", 100)
    recorder.close()

    assert [each.output_tokens for each in read(file)] == [0, 9, 9, 9, 9]


def test_a_file_that_does_not_answer_is_not_waited_for_and_told(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(trace, "CLOSE_S", 0.05)
    slow = SimpleNamespace(
        write=lambda *given: goes_on.wait(60) and os.write(*given), close=os.close
    )
    monkeypatch.setattr(trace, "os", slow)
    recorder.begin("a", keys_of("1"), token_count=4, block_tokens=4)
    recorder.end("a", 1)

    try:
        recorder.close()
        assert "the last requests are not written" in caplog.messages[-1]
    finally:
        goes_on.set()


def test_a_file_that_is_there_is_left_alone_and_another_one_is_begun(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "FILES_MAX", 3)
    file.write_text("what was recorded yesterday", encoding="utf-8")

    for number in (2, 3):
        recorder = Recorder(str(file), bytes_max=MIB)
        recorder.begin("a", keys_of("1"), token_count=4, block_tokens=4)
        recorder.close()
        assert recorder.path == str(file.with_stem(f"{file.stem}-{number}"))
        assert len(read(Path(recorder.path))) == 1

    with pytest.raises(ConfigError, match=r"serve.record: is '.*', and there are 3 such files"):
        Recorder(str(file), bytes_max=MIB)
    with pytest.raises(ConfigError, match=r"serve.record: is '.*', cannot be written: Not a dir"):
        Recorder(str(file / "x"), bytes_max=MIB)
    assert file.read_text(encoding="utf-8") == "what was recorded yesterday"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"blocks": "zz"},
            r":1: blocks is 'zz', must be 16 hexadecimal digits for every full block",
        ),
        ({"blocks": "00"}, r":1: blocks has 2 digits, must have 16: 16 for each full block of 5"),
        ({"block_tokens": 0}, r":1: block_tokens is 0, must be a whole number from 1 to 65536"),
        ({"block_tokens": 1.5}, r":1: block_tokens is 1.5, must be a whole number"),
    ],
)
def test_a_line_that_is_wrong_is_refused(file: Path, line: dict[str, object], message: str) -> None:
    file.write_bytes(msgspec.json.encode({**GOOD, **line}) + b"\n")

    with pytest.raises(ConfigError, match=message):
        read(file)
