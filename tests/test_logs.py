"""Log lines: one a record, whatever is in it."""

from __future__ import annotations

import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.logs import FIELDS, JsonLines, TextLines, printable


def record(
    message: str, fields: dict[str, object] | None = None, *, exc_info: object = None
) -> logging.LogRecord:
    found = logging.LogRecord("penstock.x", logging.WARNING, "", 0, "%s", (message,), exc_info)  # type: ignore[arg-type]
    setattr(found, FIELDS, fields or {})
    return found


def test_a_line_has_time_level_logger_message_and_fields() -> None:
    line = TextLines().format(record("gone", {"name": "instance-0", "cause": "it ended"}))

    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == 'WARNING penstock.x gone name=instance-0 cause="it ended"'


def test_the_same_as_json() -> None:
    told = json.loads(JsonLines().format(record("gone", {"count": 3, "whole": True, "level": "x"})))

    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "warning",  # A field of that name does not take its place.
        "logger": "penstock.x",
        "message": "gone",
        "count": 3,
        "whole": True,
    }


@given(st.text(), st.text())
def test_nothing_that_is_logged_can_begin_a_line_or_add_a_field(message: str, value: str) -> None:
    fields: dict[str, object] = {"path": value, "status": 200}

    line = TextLines().format(record(message, fields))
    told = JsonLines().format(record(message, fields))

    assert line.isprintable()
    assert told.isascii()
    assert told.isprintable()
    before, _, after = line.rpartition(" path=")
    quoted, _, status = after.rpartition(" status=")
    assert status == "200"
    assert (json.loads(quoted) if quoted.startswith('"') else quoted) == value
    assert before.partition(" penstock.x")[2].strip() == printable(message).strip()
    assert json.loads(told)["path"] == value


@pytest.mark.parametrize(
    "hostile", ["a\nb", "\x1b[31m", "\u202e", "\u2028", "\x85", "\ud800", "\0"]
)
def test_control_characters_are_written_as_escapes(hostile: str) -> None:
    assert printable(hostile).isprintable()
    assert "\\" in printable(hostile)


def test_a_traceback_is_indented_and_its_text_escaped() -> None:
    error = ValueError("x\n2026 INFO forged")

    line = TextLines().format(record("defect", exc_info=(ValueError, error, None)))

    first, *more = line.split("\n")
    assert first.endswith("WARNING penstock.x defect")
    assert more
    assert all(each.startswith("    ") for each in more)
