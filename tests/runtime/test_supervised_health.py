"""The health of a cache depends on the supervisor of its processes."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import ProcessExited, ProcessStarted
from penstock.supervisor.spec import ProcessSpec

if TYPE_CHECKING:
    import pytest

    from tests.runtime.conftest import Engine


def test_a_lost_supervisor_is_bad_health(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cache = engine.cache
    with Supervisor.start() as supervisor:
        cache.supervised_by(supervisor)
        before = cache.health()

        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.receive(deadline=time.monotonic() + 60)
        health = [cache.health(), cache.health()]

    assert before.ok
    why = f"the supervisor is lost: the supervisor (process {supervisor.pid}) ended by signal 9"
    assert [(each.ok, each.reasons) for each in health] == [(False, (why,))] * 2
    assert len([each for each in caplog.records if "supervisor" in each.getMessage()]) == 1


def test_a_look_notices_the_loss_and_takes_no_event_away() -> None:
    with Supervisor.start() as supervisor:
        pid = supervisor.start_process(ProcessSpec(name="brief", module="this"))
        looked = []
        events: list[object] = []
        while not any(isinstance(each, ProcessExited) for each in events):
            looked.append(supervisor.look())
            event = supervisor.receive(deadline=time.monotonic() + 60)
            events.append(event)

    assert set(looked) == {None}
    assert events == [
        ProcessStarted(name="brief", pid=pid),
        ProcessExited(name="brief", pid=pid, code=0),
    ]
