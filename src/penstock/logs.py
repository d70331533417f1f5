"""Log lines of the processes that Penstock starts: one line a record, for people or as JSON.

    2026-11-16T05:37:59.123Z INFO penstock.serve.access request=cmpl-1f… method=POST status=200
    {"time": "2026-11-16T05:37:59.123Z", "level": "info", "logger": "penstock.serve.access", …}

The one rule that must not break: whatever a client or a peer sent, it cannot begin a line or add
a field of its own. Characters that are not printable are escaped, values that need it are quoted.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = "penstock_fields"
"""The attribute of a record that has its fields; give it as `extra={FIELDS: {…}}`."""

_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./:@%+~?&,\[\]-]+")


LEVELS = ("debug", "info", "warning", "error")


def set_up_logs(level: str, *, as_json: bool, fields: Mapping[str, object] | None = None) -> None:
    """Has everything that this process logs written to standard error.

    Args:
        level: One of `LEVELS`, for our own loggers; those of other packages log warnings and errors
            only.
        as_json: One JSON object a line, instead of text.
        fields: What every line ends with: which process it comes from.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(fields) if as_json else TextLines(fields))
    wanted = getattr(logging, level.upper())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(wanted, logging.WARNING))
    logging.getLogger("penstock").setLevel(wanted)


def level_asked_for() -> str:
    """The level for a process that this one starts, and that writes to its standard error.

    A program that has Penstock embedded asked for no lines there: only warnings and errors are
    worth it, unless it gave the logger `penstock` a level, as `set_up_logs` does.
    """
    given = logging.getLogger("penstock").level
    if given == logging.NOTSET:
        return "warning"
    return next((name for name in LEVELS if given <= getattr(logging, name.upper())), "error")


def is_json() -> bool:
    """Whether this process logs as `set_up_logs` does with `as_json`."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


class _Lines(logging.Formatter):
    """A formatter that knows which process it is in."""

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._own = dict(fields or {})

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        """The fields of a record, then those of the process."""
        found = _fields_of(record)
        return {**found, **{name: each for name, each in self._own.items() if name not in found}}


class TextLines(_Lines):
    """Time, level, logger, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; only a traceback adds lines, which are indented."""
        message = printable(record.getMessage())
        parts = [_time_of(record), record.levelname, record.name, *([message] if message else [])]
        parts += [f"{name}={_value(value)}" for name, value in self.fields_of(record).items()]
        lines = [" ".join(parts)]
        lines += [f"    {printable(line)}" for line in self._trace(record).splitlines()]
        return "\n".join(lines)

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonLines(_Lines):
    """The same as an object, with each field under its own name."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON, in ASCII."""
        fields: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if message := record.getMessage():
            fields["message"] = message
        fields |= {
            name: value for name, value in self.fields_of(record).items() if name not in fields
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def printable(text: str) -> str:
    """Text in which every character that is not printable is written as an escape."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _value(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, FIELDS, {})
    return found


def _time_of(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03}Z"
