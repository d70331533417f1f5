"""The folder of whole states, without a model: what else lies there costs at most one state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.connectors.llama_cpp.states import StateFolder

if TYPE_CHECKING:
    from pathlib import Path

KEY = bytes(range(16))
TOKENS = np.arange(40, dtype=np.intc)
LOGITS = np.zeros(0, dtype=np.single)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    made = StateFolder(tmp_path / "states", 1 << 20)
    made.write(KEY, TOKENS, b"state", LOGITS)
    return made


def state_of(folder: StateFolder) -> Path:
    (state,) = folder.path.glob("*.state")
    return state


@pytest.mark.parametrize("other", ["folder", "link to itself"])
def test_a_state_that_cannot_be_read_costs_that_one_alone(folder: StateFolder, other: str) -> None:
    bad = state_of(folder)
    folder.write(KEY, TOKENS[::-1].copy(), b"another", LOGITS)
    bad.unlink()
    if other == "folder":
        bad.mkdir()
    else:
        bad.symlink_to(bad.name)
    fresh = StateFolder(folder.path, 1 << 20)

    assert fresh.find(KEY, TOKENS) == []
    [(reach, name)] = fresh.find(KEY, TOKENS[::-1])
    found = fresh.read(name)
    assert (reach, found and found.state) == (40, b"another")
    assert fresh.damaged > 0


@pytest.mark.parametrize("ending", ["-1.state", ".state.bak", " (copy).state"])
def test_a_file_with_another_name_is_left_alone(folder: StateFolder, ending: str) -> None:
    state = state_of(folder)
    copy = state.with_name(state.name.removesuffix(".state") + ending)
    os.link(state, copy)
    fresh = StateFolder(folder.path, 1 << 20)

    [(reach, name)] = fresh.find(KEY, TOKENS)

    assert (reach, name) == (40, state.name)
    assert copy.exists()
