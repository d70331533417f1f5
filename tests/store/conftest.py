"""A store process with a tier in memory, and engines that use it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from penstock.store.process import link
from tests.store.store_lab import PATIENCE_S, StoreEngine, StoreProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.store.store_lab import MakeEngine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with closing(StoreProcess(tmp_path / "store")) as store:
        store.start()
        yield store


@pytest.fixture
def make_engine(store: StoreProcess) -> Iterator[MakeEngine]:
    with ExitStack() as stack:
        yield lambda **wishes: stack.enter_context(closing(StoreEngine(store.config, **wishes)))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a busy machine keeps from answering is not taken for one that hangs."""
    monkeypatch.setattr(link, "SILENT_S", PATIENCE_S)
