"""A worker's side of a connector: executes plans, reports failures, shares arenas.

Rank 0 creates the memory and passes its descriptors to the others over a socket that exists only
while they start. The engine calls all ranks twice, and makes the second call when every rank has
answered the first (vLLM's names):

    register_kv_caches        rank 0 creates the memory and listens
    get_handshake_metadata    the others connect, which succeeds at once, and rank 0 serves them

Copies start after the step's forward pass was submitted, in the engine's own thread, and are
polled once a step. On a GPU they wait on the device for the steps before them; on the CPU a step
copies a bounded number of bytes. Loads that the step itself computes on start before it and end
with it (`layerwise`).

On the CPU, a step that computes nothing ends with the first request whose load is complete. That
request is computed next, and the other loads go on after its forward pass. Otherwise all requests
would be ready at once and be computed in one step, and the first would wait for the last.

The rules:

- Every wait has a timeout. A rank that does not come in time costs the engine its host tier, not
  its start.
- Every other load that was announced is reported as received exactly once, whether it succeeded or
  not. The engine keeps a request's blocks until then, even of an aborted request.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from penstock.cache.nodes import NOWHERE
from penstock.connectors.base.layerwise import LayerwiseWorker, load_slots, lost_slots
from penstock.errors import UnavailableError, counted
from penstock.movers.base import WAIT_S
from penstock.runtime.messages import decode_report, encode_report
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.transport.unix_sockets import NamedFolder, named_folder, socket_peer
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from penstock.connectors.base.scheduler import StepPlan
    from penstock.movers.base import Moved
    from penstock.runtime.messages import RankFacts
    from penstock.runtime.rank import Rank
    from penstock.vocabulary.keys import OperationId


CONNECT_S = 30.0
"""Ranks are called at the same time and have nothing to do before they connect; a machine that
is busy starting several engines may still be slow."""
NAMES_BYTES_MAX = 65_536
DESCRIPTORS_MAX = 64


class ArenaServer:
    """Rank 0, which creates the memory and shares it."""

    def __init__(self, engine: str, *, peers: int) -> None:
        """Starts to listen.

        Raises `UnavailableError`: the address is taken.
        """
        self._peers = peers
        try:
            self._folder = NamedFolder(_name(engine))
        except UnavailableError as error:
            raise UnavailableError(f"ranks cannot meet to share memory: {error}") from error
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(bytes(_address(self._folder.path)))
        except OSError as error:
            self._listener.close()
            self._folder.close()
            raise UnavailableError(f"ranks cannot meet to share memory: {error}") from error
        self._listener.listen(peers)

    def hand_out(self, arenas: Mapping[str, int], *, timeout_s: float = CONNECT_S) -> None:
        """Sends the descriptors to every other rank, and stops listening.

        Raises `UnavailableError`: a rank did not connect in time.
        """
        deadline = time.monotonic() + timeout_s
        names = msgspec.msgpack.encode(list(arenas))
        served = 0
        with closing(self._folder), self._listener:
            while served < self._peers:
                self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    raise UnavailableError(
                        f"{served} of {counted(self._peers, 'rank')} came for the shared memory in "
                        f"{timeout_s:g} s"
                    ) from None
                with peer, suppress(OSError):  # A peer that has gone is not a rank.
                    if socket_peer(peer).uid == os.getuid():
                        socket.send_fds(peer, [names], list(arenas.values()))
                        served += 1


def fetch_arenas(engine: str, *, timeout_s: float = CONNECT_S) -> dict[str, int]:
    """The descriptors of rank 0, by the names of their tiers.

    Raises `UnavailableError`: rank 0 is not there, or did not hand them out in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s)
        try:
            link.connect(bytes(_address(named_folder(_name(engine)))))
            if socket_peer(link).uid != os.getuid():
                raise UnavailableError("rank 0 does not share its memory: it is another user's")
            received, descriptors, _, _ = socket.recv_fds(link, NAMES_BYTES_MAX, DESCRIPTORS_MAX)
        except OSError as error:
            raise UnavailableError(f"rank 0 does not share its memory: {error}") from error
    try:
        names = msgspec.msgpack.decode(received, type=list[str]) if received else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        names = []
    if len(names) != len(descriptors) or not names:
        for descriptor in descriptors:
            os.close(descriptor)
        raise UnavailableError("rank 0 ended before it shared its memory")
    return dict(zip(names, descriptors, strict=True))


def _name(engine: str) -> str:
    return f"arenas of {engine}"


def _address(folder: Path) -> Path:
    return folder / "arenas"


def copied_blocks(ranks: Iterable[RankFacts]) -> int:
    """How many blocks every rank copies within a step, before the engine allocates again.

    Zero where a device copies by itself: its copies may end in a later step.
    """
    return min(
        0 if facts.algorithm == Algorithm.MIX64.value else STEP_BUDGET_BYTES // facts.block_bytes
        for facts in ranks
    )


@dataclass(slots=True)
class _Waiting:
    """A request whose blocks are being loaded on this rank."""

    operations: set[OperationId]
    invalid: set[int] = field(default_factory=set)
    failed: bool = False


@dataclass(slots=True)
class ReceivedLoads:
    """Requests whose loads have ended on this rank, and what failed."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    """Failed device blocks of those requests, where a block id identifies its request."""


class WorkerConnector:
    """A worker's side of a connector, for one rank."""

    def __init__(
        self,
        rank: Rank,
        *,
        group_count: int,
        stream: Callable[[], int],
        blocks_stay: bool = True,
        beside: Callable[[], int] | None = None,
        layers: Mapping[str, int] | None = None,
        wait_s: float = WAIT_S,
        copies_itself: bool = True,
    ) -> None:
        """Opens a worker's side."""
        self._rank = rank
        self._names_blocks = group_count == 1 and blocks_stay
        self._stream = stream
        self._copies_itself = copies_itself
        self._waiting: dict[str, _Waiting] = {}
        self._request_of: dict[OperationId, str] = {}
        self._slots_of: dict[OperationId, list[int]] = {}
        self._received = ReceivedLoads()
        self._reports: list[bytes] = []
        self._layerwise = LayerwiseWorker(
            rank, self._work, layers=layers or {}, stream=stream, beside=beside, wait_s=wait_s
        )

    def before_forward(self, step: StepPlan | None, *, by_layer: bool) -> bool:
        """Starts the loads that the step computes on; returns whether its layers must wait."""
        if step is None or not step.joined:
            return False
        self._layerwise.begin(step, by_layer=by_layer)
        return by_layer

    def wait_layer(self, name: str) -> None:
        """Waits, before a layer is computed, for the loads that it reads."""
        self._layerwise.wait_layer(name)

    def after_forward(self, step: StepPlan | None, *, computes: bool = True) -> None:
        """The step was submitted: accepts its plan, if any, and drives copies."""
        if step is not None and step.joined and not self._layerwise.has_begun(step):
            # `before_forward` was not called: no layer has waited, so `end` rejects these loads.
            self._layerwise.begin(step, by_layer=True)
        if self._layerwise.under_way:
            self._end_joined()
        if step is not None:
            self._begin(step)
        self._work(STEP_BUDGET_BYTES if computes else self._idle_budget_bytes())

    def _idle_budget_bytes(self) -> int:
        """How much a step without a forward pass copies: one request's load, if one waits.

        Loads are copied in the order of their requests.
        """
        first = next(iter(self._waiting.values()), None)
        if first is None or not self._copies_itself:
            return STEP_BUDGET_BYTES
        # What the owner has not planned yet cannot be copied, and does not count.
        blocks = sum(len(self._slots_of.get(each, ())) for each in first.operations)
        return min(STEP_BUDGET_BYTES, blocks * self._rank.facts.block_bytes)

    def _work(self, budget_bytes: int) -> None:
        """Drives copies, and reports those that have ended to the scheduler's side."""
        if self._rank.offer is not None:
            # The store process may wait for this rank's memory, whether blocks are copied or not.
            self._rank.offer.poll()
        if not self._rank.busy or (report := self._rank.step(budget_bytes=budget_bytes)) is None:
            return
        decoded = decode_report(report)
        if self._layerwise.has_given_up:
            decoded = decoded._replace(
                moved=[self._layerwise.correct(moved) for moved in decoded.moved]
            )
            report = encode_report(decoded)
        self._reports.append(report)
        for moved in decoded.moved:
            self._moved(moved)

    def _end_joined(self) -> None:
        # The engine does not wait for these requests: it only needs the invalid blocks.
        self._received.invalid_blocks |= self._layerwise.end()

    def _begin(self, step: StepPlan) -> None:
        for loading in step.loads:
            waiting = _Waiting(set(loading.operations), set(loading.missing), bool(loading.missing))
            self._waiting[loading.request] = waiting
            self._request_of |= dict.fromkeys(loading.operations, loading.request)
            self._end_if_done(loading.request, waiting)
        if step.plan is not None:
            # A plan may hold operations that were announced steps ago: long ones are continued.
            if self._request_of:
                self._slots_of |= load_slots(step.plan, self._request_of)
            # Copies of this plan follow the step that was just submitted.
            self._rank.steps.submitted(self._stream())
            self._rank.take(step.plan)

    def take_received(self) -> ReceivedLoads:
        """Loads that have ended since the last call."""
        if self._layerwise.under_way:
            self._end_joined()
        received, self._received = self._received, ReceivedLoads()
        return received

    def take_reports(self) -> list[bytes]:
        """Reports for the scheduler's side since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def take_joined_step(self) -> int:
        """The number of the step that has ended with the loads it computed on; 0 if none has."""
        return self._layerwise.take_ended()

    def close(self) -> None:
        """Closes the rank: nothing touches the engine's memory afterwards."""
        self._rank.close()

    def _moved(self, moved: Moved) -> None:
        self._layerwise.moved(moved)
        name = self._request_of.pop(moved.operation, None)
        if name is None:
            return
        slots = self._slots_of.pop(moved.operation)
        waiting = self._waiting[name]
        waiting.operations.discard(moved.operation)
        lost = lost_slots(moved, slots)
        waiting.failed |= bool(lost)
        waiting.invalid |= lost - {NOWHERE}
        self._end_if_done(name, waiting)

    def _end_if_done(self, name: str, waiting: _Waiting) -> None:
        if waiting.operations:
            return
        del self._waiting[name]
        self._received.requests.add(name)
        if not waiting.failed:
            return
        if self._names_blocks:
            self._received.invalid_blocks |= waiting.invalid
        else:
            # With several groups a block id does not identify its request. Behind a window that
            # has moved on, a block cannot be computed: the KV it needs is gone.
            self._received.failed.add(name)
