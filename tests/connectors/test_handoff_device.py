"""Handoffs of an engine whose device computes steps later than they are submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.connectors.handoff.messages import PairCard
from penstock.connectors.handoff.progress import StepProgress
from penstock.connectors.handoff.requests import WAIT_S
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from tests.connectors.conftest import TOKENS, FakeRequest
from tests.connectors.handoff_pair import LAYERS, PROMPT, SOON_S, answered, asked, kv_of, of_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.connectors.handoff_pair import Engine

STREAM = 77


class FakeEvent:
    """A point in a stream that is reached when the test says so."""

    def __init__(self) -> None:
        self.stream: object = None
        self.is_reached = self.is_closed = False

    def record(self, stream: object) -> None:
        self.stream, self.is_reached = stream, False

    @property
    def reached(self) -> bool:
        return self.is_reached

    def close(self) -> None:
        self.is_closed = True


class Device:
    """What a rank of the prefill engine submits, and how far it is computed."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[FakeEvent] = []
        self._thread = engine._rank_threads[0]
        self.progress = StepProgress(
            self._thread,
            engine.ranks[0],
            layers=range(LAYERS),
            stream=lambda: STREAM,
            make_event=self._make,
        )

    def reach(self, count: int) -> None:
        """The first `count` events are reached, and the thread has looked at them."""
        for event in self.events[:count]:
            event.is_reached = True
        self.settle()

    def settle(self) -> None:
        # The second call is made after a step of the thread.
        for _ in range(2):
            self._thread.make(lambda: None)

    def _make(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


def submitted(prefill: Engine, request: FakeRequest) -> dict[str, int]:
    """A step is planned that computes a prompt to its end: what its layers compute."""
    prefill.requests.expect(request)
    step = prefill.requests.plan_step({"asked": len(PROMPT)}, lambda _: [[3, 1, 2]])
    assert step is not None
    prefill._rank_threads[0].post(prefill.ranks[0].extend, step.added)
    return dict(step.computed)


def test_layers_are_sent_when_the_device_has_computed_them_and_not_when_they_were_submitted(
    prefill: Engine, decode: Engine
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    device, request = Device(prefill), asked(handoff="h-1")
    tokens = submitted(prefill, request)
    for layer in range(LAYERS):
        device.progress.layer(tokens, layer)
    device.progress.end(tokens)
    device.settle()
    # What lies in the blocks before is not what was computed.
    prefill.fill(PROMPT, [3, 1, 2])

    for count in range(LAYERS):
        device.reach(count)
        known = prefill.ranks[0]._prompts["h-1"].layers
        assert known == dict.fromkeys(range(count), len(PROMPT))
    device.reach(LAYERS)
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert {event.stream for event in device.events} == {STREAM}


def test_layers_that_an_engine_does_not_come_by_at_are_reported_with_the_step(
    prefill: Engine, decode: Engine
) -> None:
    """As where a step is replayed from a graph."""
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    device, request = Device(prefill), asked(handoff="h-1")
    tokens = submitted(prefill, request)
    prefill.fill(PROMPT, [3, 1, 2])

    device.progress.layer(tokens, 1)
    device.progress.end(tokens)
    assert len(device.events) == 2
    device.reach(2)
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])


def test_what_was_submitted_for_blocks_that_a_prompt_has_lost_is_not_reported(
    prefill: Engine, decode: Engine
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    device, request = Device(prefill), asked(handoff="h-1")
    tokens = submitted(prefill, request)
    device.progress.end(tokens)
    device.settle()

    prefill._rank_threads[0].make(prefill.ranks[0].restart, ["h-1"])
    device.reach(1)

    assert not any(any(of_layer(decode, layer, [7, 8, 9])) for layer in range(LAYERS))
    # The event is used again.
    device.progress.end({"h-2": TOKENS})
    assert len(device.events) == 1


def test_the_layers_of_a_step_go_over_together_however_long_ago_the_last_one_was(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(prefill)
    tokens = submitted(prefill, asked(handoff="h-1"))
    batches: list[int] = []
    now = iter(range(100))
    with monkeypatch.context() as patched:
        patched.setattr(device._thread, "post", lambda _, layers: batches.append(len(layers)))
        # A clock that goes on between steps, and not within one.
        for _ in range(2):
            at = float(next(now))
            patched.setattr("penstock.connectors.handoff.progress.time.monotonic", lambda at=at: at)
            for layer in range(LAYERS):
                device.progress.layer(tokens, layer)
            device.progress.end(tokens)

    assert batches == [LAYERS, LAYERS]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_claim_is_made_when_steps_under_way_cannot_write_to_its_blocks(
    opened: Callable[..., Engine], prefill: Engine, steps: int
) -> None:
    decode = opened("late", claim_steps=steps)
    params = prefill.prefill(asked(), [3, 1, 2])

    # Blocks are allocated while a step is planned, whose plan follows: that is no later step.
    decode.claim(FakeRequest("answered", PROMPT, kv_transfer_params=params), [7, 8, 9])
    for _ in range(1 + steps):
        assert decode.requests.pending
        assert decode.requests.receiving
        decode.requests._thread.make(lambda: None)
        assert not decode._handoffs._claims
        decode.step()
    decode.requests._thread.make(lambda: None)
    assert decode._handoffs._claims

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])


@pytest.mark.parametrize("how", ["aborted", "reset"])
def test_a_claim_that_ends_before_it_was_made_leaves_nothing(
    opened: Callable[..., Engine], prefill: Engine, how: str
) -> None:
    decode = opened("late", claim_steps=1)
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)
    decode.claim(request, [7, 8, 9])

    if how == "aborted":
        decode.requests.finish(request, completed=False)
    else:
        decode.requests.reset()

    step = decode.step()
    assert step is not None
    assert step.received == step.failed == {"answered"}
    assert not decode.requests.pending
    assert prefill.released()


class FakeEvents:
    """Stands for what an engine waits for, and notes who waits."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


def test_an_engine_that_can_compute_nothing_waits_for_a_prompt_and_for_nothing_else(
    decode: Engine, prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode.requests.wait()
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    ended = FakeEvents()
    with monkeypatch.context() as patched:
        patched.setattr(decode.requests, "_ended", ended)
        decode.requests.wait()
        assert ended.waits == [WAIT_S]
    prefill.prefill(asked(handoff="h-1"), [3, 1, 2])
    assert decode.requests._ended.wait(SOON_S)
    with monkeypatch.context() as patched:
        patched.setattr(decode.requests, "_ended", ended)
        # Its end is there already.
        decode.requests.wait()
        assert ended.waits == [WAIT_S]
    assert decode.ended().failed == frozenset()
    assert not decode.requests._ended.is_set()


def test_engines_that_sum_bytes_in_different_ways_refuse_each_other(prefill: Engine) -> None:
    card = prefill._handoffs._card
    layout = Form.from_bytes(card.forms[0]).layout
    on_gpu = Form(layout=layout, checksum=Algorithm.MIX64).to_bytes()
    other = msgspec.structs.replace(card, forms=[on_gpu])

    with pytest.raises(ValueError, match="checksum is 'xxh3' at the prefill engine and 'mix64'"):
        PairCard(prefill=card, decode=other).to_pair()
