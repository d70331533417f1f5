"""A store process with a tier in memory, and engines that use it."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.store_tier_suite import WAIT_S, wait_until_recovered
from penstock.store.disk.tier import DiskTier
from penstock.store.process import link
from tests.store.store_lab import PATIENCE_S, StoreEngine, StoreProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.store.store_lab import MakeEngine


DISK_BYTES = 8 << 20


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


@pytest.fixture(name="make")
def make_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens the tier of one folder, any number of times; earlier ones are closed."""
    made: list[DiskTier] = []

    def open_tier(size_bytes: int = DISK_BYTES, **settings: object) -> DiskTier:
        close_all()
        made.append(DiskTier(tmp_path / "tier", size_bytes, **settings))  # type: ignore[arg-type]
        wait_until_recovered(made[-1])
        return made[-1]

    def close_all() -> None:
        for each in made:
            each.close(deadline=time.monotonic() + WAIT_S)

    yield open_tier
    close_all()
