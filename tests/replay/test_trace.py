"""Files of requests are read as they are, or refused with the line that is wrong."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import threading
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import parse_config
from penstock.errors import ConfigError, UnavailableError
from penstock.replay import lines
from penstock.replay.lines import copies_of_pipes
from penstock.replay.trace import TraceReader, TraceRequest, natural_block_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.config import Config

MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 9, "hash_ids": [7, 8, 9]}


def config_of(block_tokens: int) -> Config:
    text = f'version = 1\nmodel.name = "m"\ncache = {{ block_tokens = {block_tokens}, blocks = 9 }}'
    return parse_config(text)


def reader(block_tokens: int = 512) -> TraceReader:
    return TraceReader(config_of(block_tokens))


def write(folder: Path, *lines: object, name: str = "t.jsonl") -> str:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def read(path: str, block_tokens: int = 512) -> list[TraceRequest]:
    return list(reader(block_tokens).read(path))


def test_mooncakes_lines_have_a_key_for_every_full_block(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, {**MOONCAKE, "hash_ids": [7, 8, 10]}, "")

    first, second = read(path)

    assert (first.at_s, first.token_count, first.output_tokens) == (1.5, 1030, 9)
    assert len(first.keys) == 2
    assert first.keys == second.keys


def test_an_id_after_other_blocks_is_another_block(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, {**MOONCAKE, "hash_ids": [8, 7, 9]})

    first, second = read(path)

    assert not set(first.keys) & set(second.keys)


def test_an_id_is_divided_into_the_blocks_of_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)

    (request,) = read(path, block_tokens=16)

    assert len(request.keys) == len(set(request.keys)) == 1030 // 16


def test_blocks_that_do_not_divide_an_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache.block_tokens: is 48, must divide 512 or be"):
        read(write(tmp_path, MOONCAKE), block_tokens=48)


def test_lines_of_tokens_have_the_keys_of_production(tmp_path: Path) -> None:
    path = write(tmp_path, {"timestamp": 2.5, "tokens": list(range(40)), "tenant": "a"})
    config = parse_config(
        'version = 1\nmodel.name = "m"\ncache.block_tokens = 16\ncache.blocks = 1'
    )

    (request,) = TraceReader(config).read(path)

    chain = config.key_chain(tenant="a")
    chain.extend(list(range(40)))
    assert request == TraceRequest(0.0025, chain.keys, 40, 0, "a")


def test_requests_to_openai_share_the_blocks_of_equal_beginnings(tmp_path: Path) -> None:
    system = {"role": "system", "content": "x" * 200}
    path = write(
        tmp_path,
        {"created": 3, "messages": [system, {"role": "user", "content": "one"}]},
        {
            "created": 4,
            "body": {"messages": [system, {"role": "user", "content": [{"text": "two"}]}]},
            "usage": {"completion_tokens": 11},
        },
        {"timestamp": 5000, "prompt": "a text"},
        {"timestamp": 6000, "prompt": list(range(33))},
    )

    first, second, third, fourth = read(path, block_tokens=16)

    assert first.at_s == 3.0
    assert second.output_tokens == 11
    assert first.keys[:3] == second.keys[:3]
    assert len(first.keys) == 3
    assert third.token_count == 2
    assert (fourth.token_count, len(fourth.keys)) == (33, 2)


def test_fields_that_are_null_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    asked = {"created": 3, "messages": [{"role": "user", "content": "one"}]}
    empty = {"prompt": None, "tools": None, "body": None, "usage": {"completion_tokens": None}}
    path = write(tmp_path, asked, {**asked, **empty}, {"created": 3, "body": {**asked, **empty}})

    first, *others = read(path)

    assert others == [first, first]


def test_calls_of_tools_are_part_of_a_request(tmp_path: Path) -> None:
    def turn(argument: str) -> dict[str, object]:
        call = {"id": "1", "function": {"name": "read", "arguments": argument}}
        return {"created": 3, "messages": [{"role": "assistant", "tool_calls": [call]}]}

    first, second = read(write(tmp_path, turn("a" * 400), turn("b" * 400)), block_tokens=16)

    assert first.token_count > 100
    assert first.keys[-1] != second.keys[-1]


def test_files_are_read_whatever_they_are_packed_with_and_called(tmp_path: Path) -> None:
    text = json.dumps(MOONCAKE).encode()
    packed = zstandard.ZstdCompressor().compress(text + b"\n")
    (tmp_path / "gzip").write_bytes(gzip.compress(text))
    (tmp_path / "xz.gz").write_bytes(lzma.compress(text))
    (tmp_path / "zstd.xz").write_bytes(packed + packed)
    (tmp_path / "plain.zst").write_bytes(text)

    (request,) = read(str(tmp_path / "plain.zst"))

    assert read(str(tmp_path / "gzip")) == read(str(tmp_path / "xz.gz")) == [request]
    assert read(str(tmp_path / "zstd.xz")) == [request, request]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + json.dumps(MOONCAKE).encode())

    assert read(str(tmp_path / "t")) == read(write(tmp_path, MOONCAKE))
    assert natural_block_tokens(str(tmp_path / "t")) == 512


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_pipe_is_read_once_or_copied_and_read_again(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    expected = read(write(tmp_path, *[MOONCAKE] * 2000))
    content = pack((tmp_path / "t.jsonl").read_bytes())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def written() -> threading.Thread:
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        return writer

    writer = written()
    assert read(str(pipe)) == expected
    writer.join()
    writer = written()
    with copies_of_pipes([str(pipe), "conversation"]) as copies:
        writer.join()
        again = TraceReader(config_of(512), copies=copies)
        assert natural_block_tokens(str(pipe), copies=copies) == 512
        assert list(again.read(str(pipe))) == list(again.read(str(pipe))) == expected
        (copy,) = copies.values()
    assert not os.path.exists(copy)


def test_what_is_wrong_in_a_copied_pipe_is_said_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, MOONCAKE, "nonsense")

    with pytest.raises(ConfigError, match=r"^a pipe:2: is 'nonsense', must be JSON"):
        list(TraceReader(config_of(512), copies={"a pipe": f"{tmp_path}/t.jsonl"}).read("a pipe"))


def test_a_device_is_not_copied_and_a_copy_without_room_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(ConfigError, match="/dev/zero: is a device, must be a file or a pipe"),
        copies_of_pipes(["/dev/zero"]),
    ):
        pass
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))

    with (
        pytest.raises(UnavailableError, match=r"missing: No such file.*; set TMPDIR to"),
        copies_of_pipes([str(tmp_path / "pipe")]),
    ):
        pass


def test_ids_may_stand_for_any_number_of_tokens(tmp_path: Path) -> None:
    line = {**MOONCAKE, "input_length": 40, "hash_ids": [7, 8, 9]}
    path = write(tmp_path, line, {**line, "hash_ids": [7, 8]})
    large = write(tmp_path, {**line, "hash_ids": [7, 8, 10]}, name="large")

    first, second = TraceReader(config_of(16), id_tokens=16).read(path)
    (small,) = TraceReader(config_of(4), id_tokens=16).read(large)
    (both,) = TraceReader(config_of(32), id_tokens=16).read(large)

    # An id for the tokens after the last full block may be missing.
    assert first == second
    assert len(small.keys) == len(set(small.keys)) == 10
    assert both.keys == first.keys[1:]
    assert natural_block_tokens(path, id_tokens=16) == 16


def test_another_number_of_ids_is_refused_with_the_option_that_would_be_right(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, {**MOONCAKE, "hash_ids": list(range(65))})
    tokens = write(tmp_path, {"timestamp": 1, "tokens": [1]}, name="tokens")

    with pytest.raises(ConfigError, match=r"must have 3: .* tokens; or --trace-block-tokens 16$"):
        read(path)
    with pytest.raises(ConfigError, match=r"must have 258: one for each 4 of 1030 tokens; or"):
        list(TraceReader(config_of(2), id_tokens=4).read(path))
    with pytest.raises(ConfigError, match=r"cache.block_tokens: is 24, must divide 16 or be a"):
        list(TraceReader(config_of(24), id_tokens=16).read(path))
    with pytest.raises(ConfigError, match=r"--trace-block-tokens: is 16, must be left out: .*:1 "):
        list(TraceReader(config_of(16), id_tokens=16).read(tokens))


def test_several_files_are_merged_by_time_and_their_ids_kept_apart(tmp_path: Path) -> None:
    late = write(tmp_path, {**MOONCAKE, "timestamp": 9000}, name="late")
    early = write(tmp_path, MOONCAKE, name="early")

    first, second = reader().read_all([late, early])

    assert (first.at_s, second.at_s) == (1.5, 9.0)
    assert not set(first.keys) & set(second.keys)


def test_the_shipped_traces_are_those_of_the_paper() -> None:
    conversation = list(reader().read("conversation"))
    synthetic = list(reader().read("synthetic"))

    assert (len(conversation), len(synthetic)) == (12_031, 3_993)
    assert sum(-(-each.token_count // 512) for each in conversation) == 288_500
    assert natural_block_tokens("conversation") == 512


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", r"t.jsonl:2: is 'nonsense', must be JSON"),
        ("[1]", r"t.jsonl:2: is \[1\], must be an object"),
        ({**MOONCAKE, "input_length": "x"}, r":2: input_length is 'x', must be a whole number"),
        ({**MOONCAKE, "input_length": 0}, r":2: input_length is 0, must be a whole number from 1"),
        ({**MOONCAKE, "timestamp": -1}, r":2: timestamp is -1, must be milliseconds from 0"),
        ({**MOONCAKE, "hash_ids": [1, -2, 3]}, r":2: hash_ids is \[1, -2, 3\], must be a list of"),
        ({**MOONCAKE, "hash_ids": [1, 2**65, 3]}, r":2: hash_ids is .*, must be .* from 0 to"),
        ({**MOONCAKE, "hash_ids": [1]}, r":2: hash_ids has 1 ids, must have 3: one for each 512"),
        ({"timestamp": 1, "input_length": 5}, r":2: hash_ids is missing, must be a list of whole"),
        ({**MOONCAKE, "timestamp": 1}, r":2: the time is 0.001 s, must be at least .* 1.5 s: sort"),
    ],
)
def test_a_line_that_is_wrong_is_refused_by_its_place(
    tmp_path: Path, line: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, MOONCAKE, line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"timestamp": 1, "tokens": []}, r":1: tokens has 0 ids, must have 1 to"),
        ({"timestamp": 1, "tokens": [1, -5]}, r":1: .*-5"),
        ({"timestamp": 1, "tokens": "abc"}, r":1: tokens is 'abc', must be a list"),
        ({"messages": [{"content": "x"}]}, r":1: timestamp is missing"),
        ({"timestamp": 1, "prompt": ""}, r":1: messages and prompt are empty"),
        ({"timestamp": 1, "messages": [{"content": 5}]}, r":1: content is 5, must be a text"),
        ({"time": 1}, r":1: has the fields .*time.*, must have one of hash_ids, tokens, blocks"),
    ],
)
def test_a_first_line_that_is_wrong_is_refused_too(
    tmp_path: Path, line: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, line), block_tokens=16)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 5000)[:20])
    (tmp_path / "cut.zst").write_bytes(zstandard.ZstdCompressor().compress(b"x" * 5000)[:-3])
    (tmp_path / "wrong.zst").write_bytes(lines.ZSTD + b"x" * 5000)

    with pytest.raises(ConfigError, match=r"nowhere: is not there, must be a file or one of"):
        read("nowhere")
    with pytest.raises(ConfigError, match=r"cut.gz:1: cannot be read"):
        read(str(tmp_path / "cut.gz"))
    with pytest.raises(ConfigError, match=r"cut.zst:1: cannot be read: the file ends before"):
        read(str(tmp_path / "cut.zst"))
    with pytest.raises(ConfigError, match=r"wrong.zst:1: cannot be read: zstd"):
        read(str(tmp_path / "wrong.zst"))
    with pytest.raises(ConfigError, match=r"has no request"):
        read(write(tmp_path, "", ""))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 100)

    with pytest.raises(ConfigError, match=r":1: is longer than 100 bytes"):
        read(write(tmp_path, "x" * 200))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
fields = st.sampled_from(
    ["timestamp", "created", "input_length", "output_length", "hash_ids", "tokens", "tenant",
     "blocks", "block_tokens",
     "messages", "prompt", "tools", "body", "usage"]
)  # fmt: skip


@given(
    st.lists(
        st.binary(max_size=40)
        | st.dictionaries(fields, values).map(lambda found: json.dumps(found).encode()),
        min_size=1,
        max_size=3,
    )
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_hostile_lines_are_read_or_refused_and_nothing_else(
    tmp_path: Path, written: list[bytes]
) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"\n".join(written))

    try:
        found = read(str(path), block_tokens=16)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert all(len(each.keys) == each.token_count // 16 for each in found)
