"""Progress of a device by its events: told when passed, and sent while later layers compute."""

from __future__ import annotations

import pytest

from lab.fixtures.handoff_pair import LAYERS
from penstock.handoff.driver.prefill_rank import DRIVE_S, LayerEvents, Progress
from tests.handoff.driver.conftest import World


class Device:
    """A device whose clock goes on whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.look_s = 0.0
        self.made = 0
        self.closed = 0

    def clock(self) -> float:
        self.now += self.look_s
        return self.now

    def event(self) -> DueEvent:
        self.made += 1
        return DueEvent(self)


class DueEvent:
    """Is passed at the time that stands for its stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._due = 0.0

    def record(self, stream: object) -> None:
        assert isinstance(stream, float)
        self._due = stream

    @property
    def reached(self) -> bool:
        return self._device.now >= self._due

    def close(self) -> None:
        self._device.closed += 1


def test_progress_is_told_when_the_device_has_passed_it_and_once() -> None:
    device = Device()
    events = LayerEvents(device.event, clock=device.clock)
    events.record({"a": 16, "b": 5}, 0, 101.0)
    events.record({"a": 16, "b": 5}, 1, 102.0)

    before = events.poll()
    device.now = 101.0
    first = events.poll()
    again = events.poll()
    device.now = 103.0
    second = events.poll()

    assert before == again == []
    assert first == [Progress("a", 0, 16), Progress("b", 0, 5)]
    assert second == [Progress("a", 1, 16), Progress("b", 1, 5)]
    assert not events.busy


def test_two_steps_are_in_flight_and_events_are_used_again() -> None:
    device = Device()
    events = LayerEvents(device.event, clock=device.clock)
    for step in range(6):
        events.record({"a": 4 * step + 4}, 0, device.now + 1)
        events.record({"a": 4 * step + 4}, 1, device.now + 2)
        device.now += 1.5
        events.poll()
    device.now += 10

    last = events.poll()
    events.close()

    assert last[-1] == Progress("a", 1, 24)
    assert device.made == device.closed
    assert device.made < 12


def test_driving_waits_for_the_next_event_but_not_beyond_its_time() -> None:
    device = Device()
    device.look_s = 0.01
    events = LayerEvents(device.event, clock=device.clock)
    events.record({"a": 4}, 0, 100.5)
    events.record({"a": 4}, 1, 200.0)

    found = events.drive(110.0)
    early = device.now
    nothing = events.drive(110.0)

    assert found == [Progress("a", 0, 4)]
    assert early == pytest.approx(100.5, abs=0.05)
    assert nothing == []
    assert device.now == pytest.approx(110.0, abs=0.05)


class Slow:
    """A source that is busy until its time is up, and tells how long it was driven."""

    def __init__(self) -> None:
        self.now = 100.0
        self.driven: list[float] = []

    @property
    def busy(self) -> bool:
        return self.now < 101.0

    def poll(self) -> list[Progress]:
        return []

    def drive(self, until: float) -> list[Progress]:
        self.driven.append(until - self.now)
        self.now = until
        return []


def test_a_rank_that_is_driven_takes_a_step_in_between_and_ends_in_time() -> None:
    source = Slow()
    world = World(sources={"prefill/0": source}, clock=lambda: source.now)

    world.sending["prefill/0"].drive(100.0 + 2.5 * DRIVE_S)

    assert source.driven == pytest.approx([DRIVE_S, DRIVE_S, 0.5 * DRIVE_S])


def test_early_layers_leave_while_the_engine_waits_for_later_ones() -> None:
    device = Device()
    sources = {f"prefill/{n}": LayerEvents(device.event, clock=device.clock) for n in range(2)}
    world = World(sources=sources, clock=device.clock)
    there, here = world.submit("a", 16)
    world.settle()
    for name in world.sending:
        world.pools[name].compute("a", there, range(16))
        for layer in range(LAYERS):
            sources[name].record({"a": 16}, layer, 100.1 + layer / 10)
    device.look_s = 1e-4

    counts = []
    for until in (100.15, 100.25, 100.35):
        for rank in world.sending.values():
            device.now = until - 0.05
            rank.drive(until)
        counts.append(sum(rank.parts_moved for rank in world.sending.values()))
        busy = [source.busy for source in sources.values()]
        assert busy == [until < 100.3] * 2
    device.look_s = 0.0
    world.settle()

    assert 0 < counts[0] < counts[1] < counts[2]
    assert world.is_right("a", here, range(16))


def test_a_stream_is_refused_by_a_rank_without_a_device() -> None:
    world = World()
    world.submit("a", 16)

    with pytest.raises(ValueError, match="stream is 7, must be left out: the KV is not on a GPU"):
        world.sending["prefill/0"].submitted({"a": 16}, layer=0, stream=7)


def test_what_a_prompt_does_not_have_is_refused_before_anything_is_recorded() -> None:
    device = Device()
    events = LayerEvents(device.event, clock=device.clock)
    world = World(sources={"prefill/0": events}, clock=device.clock)
    world.submit("a", 16)
    rank = world.sending["prefill/0"]

    with pytest.raises(ValueError, match="layer is 99"):
        rank.submitted({"a": 16}, layer=99, stream=7)
    with pytest.raises(ValueError, match="tokens is 17"):
        rank.submitted({"a": 17}, layer=None, stream=7)
    with pytest.raises(ValueError, match="'b', which was never admitted"):
        rank.submitted({"a": 16, "b": 1}, layer=0, stream=7)

    assert device.made == 0
