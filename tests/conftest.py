"""What all tests share: equal examples every time, and an end for every process they start."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from lab.fixtures.run_end import end_processes_with_this_run
from tests.store.mooncake_master import MooncakeMaster
from tests.store.redis_server import RedisServer, require_redis

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

end_processes_with_this_run()

settings.register_profile(
    "penstock",
    deadline=None,
    derandomize=True,
    max_examples=50,
    # How long examples take to draw says something about the machine, and nothing about the code.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")

# Ten thousand tests, and the libraries they import, stay until the end: looking for garbage among
# them costs a tenth of a run.
gc.disable()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with an empty memory."""
    require_redis()
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    """The master of a Mooncake store."""
    found = MooncakeMaster()
    yield found
    found.kill()


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among what was collected."""
    gc.freeze()
    gc.enable()
