"""The header of a GGUF file: read as the `gguf` package reads it, with a fraction of the work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from penstock_serve.engine.gguf_file import GgufFile, GgufHeader
from tests.engine.gguf_writing import Manner, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

KINDS = gguf.GGUFValueType
VOCABULARY = 3_000
FIELDS = {
    "test.small": (-3, KINDS.INT8),
    "test.large": (2**63 + 1, KINDS.UINT64),
    "test.flag": (True, KINDS.BOOL),
    "test.double": (0.1, KINDS.FLOAT64),
    "test.text": ("Grüße ✓", KINDS.STRING),
    "test.numbers": ([1, -2, 3], KINDS.ARRAY),
    "test.tokens": ([f"token {n} ÿ" for n in range(VOCABULARY)], KINDS.ARRAY),
}


@pytest.fixture
def path(checkpoint_of: Any, tmp_path: Path) -> Path:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "small.gguf", model, Manner(fields=FIELDS))
    return tmp_path / "small.gguf"


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(path: Path) -> None:
    known = gguf.GGUFReader(path)

    header = GgufHeader(path)

    assert {name: header.value(name) for name in header.names} == {
        name: field.contents()
        for name, field in known.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.value("test.tokens")[-1] == f"token {VOCABULARY - 1} ÿ"
    assert list(header.tensors) == [tensor.name for tensor in known.tensors]
    for tensor in known.tensors:
        found = header.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape)
        assert found.tensor_type == tensor.tensor_type
        np.testing.assert_array_equal(found.data, tensor.data.view(np.uint8))


def test_a_vocabulary_that_nobody_asks_for_costs_one_call_a_token(path: Path) -> None:
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        GgufFile(path)
    finally:
        sys.setprofile(None)

    # The reader of the gguf package makes about 50.
    assert calls < 2 * VOCABULARY


@pytest.mark.parametrize(
    ("at", "changed", "reported"),
    [
        (0, b"GGML", "begins with b'GGML'"),
        (4, b"\0\0\0\3", "version is 50331648, must be 2 or 3, little-endian"),
        (4, b"\1\0\0\0", "version is 1, must be 2 or 3"),
        (8, b"\xff" * 8, "should have more"),
        (16, b"\xff" * 8, "should have more|is stored as|kind|dimensions|twice|codec"),
    ],
)
def test_a_header_that_is_damaged_is_refused(
    path: Path, at: int, changed: bytes, reported: str
) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(changed)] = changed
    path.write_bytes(whole)

    with pytest.raises(ValueError, match=reported):
        GgufHeader(path)
