"""Fields of a model's files, read with their types and bounds.

Model files come from anywhere. The one rule: a value is used only after its type and range were
checked, and a refusal names the file, the field, the value and what would be right.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JSON_BYTES_MAX = 256 << 20
"""Of a config, an index or a tokenizer's settings; the largest index of today has a few MB."""


class Fields:
    """Named values of one file."""

    def __init__(self, file: str, values: Mapping[str, object]) -> None:
        self.file = file
        self.values = values

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raises the refusal of one field."""
        raise ConfigError(f"{self.file}: {name}", problem)

    def whole(
        self, name: str, *, minimum: int = 1, maximum: int, default: int | None = None
    ) -> int:
        """A whole number; without a default it must be there."""
        value = self._value(name, default)
        right = f"a whole number from {minimum} to {maximum}"
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(name, f"is {shown(value)}, must be {right}")
        return value

    def number(
        self, name: str, *, above: float = 0.0, maximum: float, default: float | None = None
    ) -> float:
        """A finite number; without a default it must be there."""
        value = self._value(name, default)
        right = f"a number above {above:g} and up to {maximum:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, f"is {shown(value)}, must be {right}")
        # `nan` compares with nothing; a whole number may be too large for a float.
        if not above < value <= maximum or not math.isfinite(value):
            self.refuse(name, f"is {shown(value)}, must be {right}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"is {shown(value)}, must be true or false")
        return value

    def table(self, name: str) -> Fields:
        """Fields within a field; none where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return Fields(self.file, {})
        if not isinstance(value, dict):
            self.refuse(name, f"is {shown(value)}, must be an object")
        return Fields(f"{self.file}: {name}", value)

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            self.refuse(name, "is missing")
        return value


def read_json(path: Path) -> Fields:
    """The object in a JSON file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        size = path.stat().st_size
        if size > JSON_BYTES_MAX:
            raise ConfigError(
                path.name, f"has {size} bytes, must have at most {JSON_BYTES_MAX}: {path}"
            )
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(path.name, f"cannot be read: {error.strerror}: {path}") from error
    except RecursionError:
        raise ConfigError(path.name, f"is nested too deeply: {path}") from None
    except ValueError as error:
        raise ConfigError(path.name, f"is no JSON: {error}: {path}") from error
    if not isinstance(read, dict):
        raise ConfigError(path.name, f"is {shown(read)}, must be a JSON object: {path}")
    return Fields(path.name, read)
