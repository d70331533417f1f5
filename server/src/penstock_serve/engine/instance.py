"""The process of an instance: `python -m penstock_serve.engine.instance SPEC`, SPEC a descriptor.

It loads the model (or waits for the ranks that do), connects to the server, and runs one loop:
receive the server's messages, compute a step, send its results. When nothing can run, it waits on
its channels.

The one rule: where ranks compute, this process does not import torch, which takes seconds and
180 MiB.

When the server that started it is lost, it ends. When a server that it joined is lost, its requests
end, its cache stays, and it dials the server again.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

import penstock
from penstock import AllCleared, BlocksStored, chains_of
from penstock.errors import CapacityError, ConfigError, PeerError, UnavailableError
from penstock.toolkit import (
    KEYS_PER_EVENT,
    BacklogError,
    ChannelClosed,
    ChannelFailed,
    ChannelSettings,
    Empty,
    Listener,
    ReceivedFrame,
    connect,
    dial,
    keeper,
    set_up_logs,
    wait_any,
    wait_readable,
)
from penstock_serve.engine import messages as ms
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.engine import Engine, EnginePaused, LocalWorkers
from penstock_serve.engine.handoffs import InstanceHandoffs
from penstock_serve.engine.orders import Orders, answer_to, token_bytes_of
from penstock_serve.engine.peers import peers_of
from penstock_serve.engine.process_life import (
    GIVE_UP_S,
    WRONG_SETTING,
    end_within,
    leave,
    report_problem,
    report_ready,
)
from penstock_serve.engine.remote_workers import RemoteWorkers, ignore_progress, meet_ranks
from penstock_serve.engine.requests import Output, Request
from penstock_serve.engine.scheduler import Scheduler, SchedulerSettings
from penstock_serve.engine.spec import InstanceRole, InstanceSpec, read_sealed

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.toolkit import Channel, Waitable, ZmqChannel
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.handoffs import Handoffs
    from penstock_serve.engine.spec import EngineSpec, PairSpec

logger = logging.getLogger("penstock.engine.instance")

DIAL_S = 60.0
REFUSED_S = 0.5
"""The pause before a server that refused the connection is dialled again."""
DIAL_AGAIN_S = 5.0
"""The timeout of one attempt to connect, for an instance that joins a server."""
RANKS_S = 300.0
"""The timeout for all ranks to load; a large model takes minutes."""
DISK_S = 30.0
"""How long a disk is waited for at the start: its store process takes about a second, and many
times that on a machine whose cores are taken by others."""
IDLE_S = 3600.0
"""The longest wait of an idle instance; messages, ranks and signals end it earlier."""
DRAIN_S = 5.0
EVENTS_A_MESSAGE = 512
SLOW_SERVER_S = 1.0
"""The longest wait for room in the channel to a slow server."""


class ServerLost(UnavailableError):  # noqa: N818 - what happened to a server
    """The server is gone."""


class ServerOutbox:
    """Messages to the server, in order, kept until the channel has room."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames: deque[bytes] = deque()

    @property
    def empty(self) -> bool:
        """Whether everything was sent."""
        return not self._frames

    def put(self, message: ms.InstanceMessage | Output) -> None:
        """Adds a message, which `flush` sends."""
        self._frames.append(ms.encode(message))

    def flush(self) -> bool:
        """Sends what there is room for; returns whether that was all.

        Raises `ServerLost`: the server is gone.
        """
        while self._frames:
            try:
                self._channel.send(self._frames[0])
            except BacklogError:
                return False
            except UnavailableError as error:
                raise ServerLost(f"the server is lost: {error}") from error
            self._frames.popleft()
        return True


class Instance:
    """One engine and the channel to its server."""

    def __init__(
        self, spec: InstanceSpec, engine: Engine, architecture: Architecture, channel: Channel
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._architecture = architecture
        self._channel = channel
        self._outbox = ServerOutbox(channel)
        self._orders = Orders(engine, architecture, send=self._send, on_weights=self._note_weights)
        self._reasons_sent: tuple[str, ...] = ()
        """What the server knows to be wrong with the cache."""
        self._changes_sent = 0
        """The number of the last KV event that the server was sent."""
        self._unkept_reset = 0
        """The last reset that the server was not told to be kept; 0: none."""
        self._drained_by = math.inf
        """The deadline of its requests after a stop signal."""
        config = spec.config
        assert config.cache.device is not None
        self._tiers = ["device", *(tier.name for tier in config.cache.tiers)]
        room = config.cache.device.slot_count * config.cache.block_tokens
        self._longest = min(architecture.positions, room)
        self._token_bytes = token_bytes_of(architecture, spec)

    def send_ready(self, model: str) -> None:
        """Announces the instance; the server sends requests from now on."""
        tiers = self._engine.cache.statistics().tiers
        self._outbox.put(
            ms.InstanceReady(
                model=model,
                positions=self._longest,
                stop_tokens=list(self._architecture.stop_tokens),
                config=self._spec.config,
                tiers=self._tiers,
                ready_s=[tier.ready_s or 0.0 for tier in tiers],
                tiers_off=[tier.why_off for tier in tiers],
                role=self._spec.role.value,
                engine=self._place(),
            )
        )
        self._reasons_sent = ()
        self._unkept_reset = 0  # A server that was restarted counts anew.
        self._send_health()
        self._send_cached_blocks()

    def _send_health(self) -> None:
        reasons = self._engine.cache.health().reasons
        if reasons != self._reasons_sent:
            self._reasons_sent = reasons
            self._outbox.put(ms.HealthChanged(reasons=list(reasons)))

    def _send_reset_kept(self) -> None:
        if self._unkept_reset and self._engine.cache.resets_kept:
            self._outbox.put(ms.ResetKept(number=self._unkept_reset))
            self._unkept_reset = 0

    def _place(self) -> EngineSpec | None:
        """How other instances reach this one for handoffs."""
        engine = self._engine
        if engine.handoffs is None:
            return None
        return engine.handoffs.peers.place(engine.workers.handoff_addresses)

    def run(self, stop: penstock.StopSignal) -> str:
        """Serves until the server closes the channel or a stop signal arrives; returns why.

        After a stop signal it accepts no new requests, and those under way have `drain_s` to
        finish; after a second signal it stops at once.
        Raises `ServerLost`: the server is lost; `UnavailableError`: a rank is lost; `PeerError`: a
        rank or the server sent an invalid message.
        """
        while not (stop.stopping and self._is_drained(stop)):
            ended = self._listen()
            if ended:
                return ended
            if not self._outbox.flush():
                # The server is slower than this instance: wait, so that the outbox stays short.
                wait_readable(self._channel.descriptor, time.monotonic() + SLOW_SERVER_S)
                continue
            for output in self._engine.step():
                self._outbox.put(self._with_handoff(output))
            self._orders.step()
            self._send_cache_changes()
            self._send_health()
            self._send_reset_kept()
            if self._outbox.flush():
                due = min(self._drained_by, self._orders.next_deadline)
                self._wait(stop, min(time.monotonic() + IDLE_S, due))
        return "it was asked to stop"

    def _is_drained(self, stop: penstock.StopSignal) -> bool:
        """Whether all requests have finished, or their time is over."""
        now = time.monotonic()
        if self._drained_by == math.inf:
            self._drained_by = now + self._spec.drain_s
            if self._spec.drain_s > 0:
                self._outbox.put(ms.Leaving())
        if stop.times > 1 or now >= self._drained_by:
            return True
        return self._engine.unfinished == 0 and self._outbox.empty

    def rejoin(self, stop: penstock.StopSignal) -> bool:
        """Ends all requests and connects to the server again; `False` after a stop signal.

        Handoffs and copies continue meanwhile.
        Raises `UnavailableError`: a rank is lost.
        """
        # Also computed prompts that wait for a claim, which may never come.
        self._engine.abort_all()
        self._engine.close_pairs()
        self._orders.forget()
        while not stop.stopping:
            spec = self._spec
            channel = dial(
                spec.server,
                name=spec.name,
                secret=spec.server_secret,
                settings=ChannelSettings(silence_s=spec.silence_s),
            )
            if self._wait_open(channel, stop):
                self._outbox = ServerOutbox(channel)
                return True
            # A pause, for a server that refuses at once.
            wait_readable(stop.descriptor, time.monotonic() + REFUSED_S)
        return False

    def _wait_open(self, channel: ZmqChannel, stop: penstock.StopSignal) -> bool:
        self._channel = channel
        deadline = time.monotonic() + DIAL_AGAIN_S
        while not stop.stopping and time.monotonic() < deadline:
            self._engine.step()
            if channel.ready or channel.is_open:
                break
            self._wait(stop, deadline)
        if channel.is_open:
            return True
        channel.close()
        return False

    def _send_cache_changes(self) -> None:
        """Sends what has changed; if more did than is remembered, everything."""
        kept = self._engine.cache.take_kv_events()
        if not kept:
            return
        if kept[0].sequence != self._changes_sent + 1:
            self._outbox.put(
                ms.CacheChanged(events=[AllCleared(sequence=kept[0].sequence, epoch=kept[0].epoch)])
            )
            self._send_cached_blocks()
            return
        self._changes_sent = kept[-1].sequence
        self._outbox.put(ms.CacheChanged(events=kept))  # type: ignore[arg-type]

    def _send_cached_blocks(self) -> None:
        """Sends every cached block, as if it had just been stored."""
        cache = self._engine.cache
        cache.take_kv_events()  # The snapshot includes them.
        found = cache.kv_snapshot()
        self._changes_sent = found.sequence
        stored: list[BlocksStored] = []
        for tier, blocks in found.blocks.items():
            before = dict(blocks)
            stored += [
                BlocksStored(
                    sequence=found.sequence, epoch=found.epoch, tier=tier, keys=keys, parent=parent
                )
                for keys, parent in chains_of(before, before.__getitem__, longest=KEYS_PER_EVENT)
            ]
        for first in range(0, len(stored), EVENTS_A_MESSAGE):
            self._outbox.put(ms.CacheChanged(events=list(stored[first : first + EVENTS_A_MESSAGE])))

    def _with_handoff(self, output: Output) -> Output:
        """Says once of a request whose prompt a handoff delivered that it was handed over."""
        handoffs = self._engine.handoffs
        if handoffs is None or output.scored or output.request not in handoffs.delivered:
            return output
        handoffs.delivered.discard(output.request)
        return msgspec.structs.replace(output, handed=True)

    def hang_up(self) -> None:
        """Closes the channel to the server; may be called twice."""
        self._channel.close()

    def close(self) -> None:
        """Finishes copies and releases all resources."""
        self._engine.close(DRAIN_S)

    def abandon(self) -> None:
        """A rank is lost: releases all resources without waiting."""
        self._engine.abandon()

    def _wait(self, stop: penstock.StopSignal, deadline: float) -> None:
        engine = self._engine
        if not engine.idle:
            return
        channels: list[Waitable] = [self._channel, *engine.channels]
        # After the first signal the descriptor stays readable.
        descriptors = [] if stop.stopping else [stop.descriptor]
        if engine.handoffs is not None:
            peers = engine.handoffs.peers
            if peers.has_work:
                return
            channels += peers.waitables
            descriptors += peers.descriptors
            deadline = min(deadline, peers.next_deadline() or deadline)
        if not engine.cache.persists and not (engine.copies_here and engine.cache.busy):
            wait_any(channels, descriptors, deadline=deadline)
            return
        # It returns at once if this thread makes copies, else when some have ended, or when the
        # store process has something to say: an engine without requests attaches to it as well.
        if not any(channel.ready for channel in channels):
            alarms = [at for channel in channels if (at := channel.alarm)]
            descriptors += [channel.descriptor for channel in channels]
            engine.cache.wait(min([deadline, *alarms]), descriptors=descriptors)

    def _listen(self) -> str:
        while True:
            match self._channel.receive():
                case ReceivedFrame(frame):
                    self._take(ms.read_by_instance(frame))
                case Empty():
                    return ""
                case ChannelClosed():
                    return "the server closed the channel"
                case ChannelFailed(cause):
                    raise ServerLost(f"the server is lost: {cause}")

    def _take(self, message: ms.ToInstance) -> None:
        match message:
            case Request():
                self._submit(message)
            case ms.Abort():
                self._engine.abort(message.id)
            case ms.ComputeLocally() | ms.ChangePrefill() | ms.OpenPair() | ms.ClosePair():
                self._take_handoff(message)
            case ms.SetRole():
                self._spec = msgspec.structs.replace(self._spec, role=InstanceRole(message.role))
            case ms.StopAnswer():
                self._engine.scheduler.stop(message.id, message.answer)
            case ms.ResetCache(number=number, why=why, weights_version=version):
                self._unkept_reset = number
                if version:
                    self._engine.change_weights(version)
                    self._note_weights(version)
                else:
                    self._engine.cache.reset(why)
            case ms.Ask():
                answer = answer_to(message, self._spec, self._engine, token_bytes=self._token_bytes)
                self._outbox.put(ms.AskAnswer(id=message.id, json=answer))
            case _:
                self._orders.take(message)

    def _send(self, message: ms.InstanceMessage) -> None:
        self._outbox.put(message)

    def _note_weights(self, version: str) -> None:
        self._spec = _with_weights(self._spec, version)

    def _take_handoff(
        self, message: ms.ComputeLocally | ms.ChangePrefill | ms.OpenPair | ms.ClosePair
    ) -> None:
        scheduler = self._engine.scheduler
        match message:
            case ms.ComputeLocally():
                scheduler.compute_here(message.id, lost=message.lost)
            case ms.ChangePrefill():
                scheduler.change_prefill(
                    message.id, message.handoff, message.prefill, lost=message.lost
                )
            case ms.OpenPair():
                self._open_pair(message.pair)
            case ms.ClosePair():
                self._engine.close_pair(message.prefill, message.decode, lost=message.lost)

    def _open_pair(self, pair: PairSpec) -> None:
        """Opens a pair; if that fails, requests in it are computed where they are answered."""
        try:
            self._engine.open_pair(pair)
        except (ValueError, UnavailableError, CapacityError) as error:
            names = pair.prefill.name, pair.decode.name
            logger.warning("pair not opened: prefill=%s decode=%s cause=%s", *names, error)
            self._outbox.put(ms.PairFailed(prefill=names[0], decode=names[1], problem=str(error)))

    def _submit(self, message: Request) -> None:
        try:
            self._engine.add(self._request(message))
        except EnginePaused as error:
            self._outbox.put(ms.SubmitRefused(id=message.id, kind="paused", problem=str(error)))
        except CapacityError as error:
            self._outbox.put(ms.SubmitRefused(id=message.id, kind="busy", problem=str(error)))
        except ValueError as error:
            self._outbox.put(ms.SubmitRefused(id=message.id, kind="invalid", problem=str(error)))

    def _request(self, asked: Request) -> Request:
        """The request with the model's own stop tokens; raises `ValueError`."""
        if len(asked.prompt) + asked.max_tokens > self._longest:
            raise ValueError(
                f"prompt and max_tokens come to {len(asked.prompt)} and {asked.max_tokens} "
                f"tokens, must be at most {self._longest} together, the longest context"
            )
        words = self._architecture.vocabulary
        for name, tokens in (
            ("prompt", asked.prompt),
            ("logit_bias", [token for token, _ in asked.sampling.logit_bias]),
            ("stop_token_ids", sorted(asked.stop_tokens)),
        ):
            wrong = [token for token in tokens if not 0 <= token < words]
            if wrong:
                raise ValueError(f"{name} has token {wrong[0]}, must be from 0 to {words - 1}")
        own = () if asked.ignores_stop_tokens else self._architecture.stop_tokens
        # A config may name a stop token that is not in the vocabulary.
        stops = asked.stop_tokens.union(token for token in own if 0 <= token < words)
        return msgspec.structs.replace(asked, stop_tokens=stops)


def _with_weights(spec: InstanceSpec, version: str) -> InstanceSpec:
    """The spec with another version of the weights."""
    model = replace(spec.config.model, weights_version=version)
    return msgspec.structs.replace(spec, config=replace(spec.config, model=model))


def build_engine(
    spec: InstanceSpec, *, progress: Callable[[int, int, int], None] = ignore_progress
) -> tuple[Engine, Architecture]:
    """Makes the engine of a spec, with its model in this process or in those of its ranks.

    Raises `UnavailableError`: the ranks did not all connect, or one was lost.
    """
    if spec.ranks == 1:
        from penstock_serve.engine.worker import load_rank  # noqa: PLC0415  (imports torch)

        loaded = load_rank(spec, progress=lambda layers, of: progress(0, layers, of))
        peers = loaded.worker.handed = peers_of(spec, loaded.architecture, tier=loaded.tier)
        handoffs = None if peers is None else InstanceHandoffs(spec, peers)
        cache = penstock.open(loaded.config, kv=loaded.tier, keeper=keeper())
        loaded.worker.steps = cache.steps
        scheduler = _scheduler(spec, cache, handoffs)
        # On a CPU, `submit` computes the step: only a GPU needs the timeout.
        engine = Engine(
            scheduler,
            LocalWorkers(loaded.worker),
            handoffs,
            step_timeout_s=loaded.config.device_wait_s,
        )
        return _started(engine, spec), loaded.architecture
    architecture, checkpoint = find_model(spec.model).open()
    checkpoint.close()
    settings = ChannelSettings(silence_s=spec.silence_s)
    with Listener(
        f"{spec.name}-scheduler", spec.scheduler, secret=spec.secret, settings=settings
    ) as listener:
        deadline = time.monotonic() + RANKS_S
        met = meet_ranks(listener, ranks=spec.ranks, deadline=deadline, progress=progress)
    peers = peers_of(spec, architecture, tier=None)
    handoffs = None if peers is None else InstanceHandoffs(spec, peers)
    cache = penstock.open(spec.config, ranks=met.facts)
    scheduler = _scheduler(spec, cache, handoffs)
    workers = RemoteWorkers(met.channels, met.handoff_addresses)
    return _started(Engine(scheduler, workers, handoffs), spec), architecture


def _started(engine: Engine, spec: InstanceSpec) -> Engine:
    """The engine, which knows where its weights came from; its disk is open."""
    model = find_model(spec.model)
    engine.checkpoint = (str(model.path), spec.digest or model.weights_version())
    _await_disk(engine.cache)
    return engine


def _await_disk(cache: penstock.Cache) -> None:
    """Gives the store process time to start: nothing of an earlier prompt would be kept there.

    A disk that cannot be used is not waited for: health says why.
    """
    deadline = time.monotonic() + DISK_S
    while time.monotonic() < deadline:
        status = cache.store_status()
        if status is None or status.settled or status.failed:
            return
        cache.wait(deadline)
        cache.step()


def _scheduler(spec: InstanceSpec, cache: penstock.Cache, handoffs: Handoffs | None) -> Scheduler:
    settings = SchedulerSettings(
        step_tokens=spec.engine.tokens_a_step,
        step_requests=spec.engine.step_requests,
        waiting_max=spec.engine.waiting_max,
        steps_in_flight=spec.steps_in_flight,
    )
    config = spec.config.cache
    assert config.device is not None
    return Scheduler(
        cache,
        settings,
        block_tokens=config.block_tokens,
        block_count=config.device.slot_count,
        handoffs=handoffs,
    )


def main(given: str, report: str = "") -> int:
    """Runs the instance; returns the exit status, 0 for a graceful end."""
    spec = read_sealed(given, InstanceSpec)
    set_up_logs(spec.log_level, as_json=spec.log_json)
    if spec.ranks == 1:
        import torch  # noqa: PLC0415  (see the one rule)

        if spec.engine.threads:
            torch.set_num_threads(spec.engine.threads)
    # What was imported stays: a full collection would look at it, for a tenth of a second.
    gc.freeze()
    with penstock.StopSignal() as stop:
        try:
            why = _serve(spec, _connect(spec, stop), stop, report)
        except ConfigError as error:
            # The command that started this process says so, and ends if it was its first life.
            logger.debug("instance ends: name=%s cause=%s", spec.name, error)
            report_problem(report, error)
            return WRONG_SETTING
        except (PeerError, UnavailableError) as error:
            # The supervisor restarts this process and its ranks.
            logger.error("instance ends: name=%s cause=%s", spec.name, error)  # noqa: TRY400
            return 1
    logger.info("instance ends: name=%s cause=%s", spec.name, why)
    return 0


def _connect(spec: InstanceSpec, stop: penstock.StopSignal) -> ZmqChannel:
    """Connects to the server; a server that it joins may start much later."""
    logged = ""
    while True:
        patience_s = DIAL_AGAIN_S if spec.joins else DIAL_S
        try:
            return connect(
                spec.server,
                name=spec.name,
                deadline=time.monotonic() + patience_s,
                secret=spec.server_secret,
                settings=ChannelSettings(silence_s=spec.silence_s),
            )
        except UnavailableError as error:
            if stop.stopping or not spec.joins:
                raise
            if str(error) != logged:
                logger.warning("server not joined yet: name=%s cause=%s", spec.name, error)
                logged = str(error)
            wait_readable(stop.descriptor, time.monotonic() + REFUSED_S)


def _serve(spec: InstanceSpec, channel: ZmqChannel, stop: penstock.StopSignal, report: str) -> str:
    def send_progress(rank: int, layers: int, of: int) -> None:
        channel.send(ms.encode(ms.LoadProgress(rank=rank, layers=layers, of=of)))

    try:
        engine, architecture = build_engine(spec, progress=send_progress)
    except (ConfigError, PeerError, UnavailableError):
        channel.close()
        raise
    instance = Instance(spec, engine, architecture, channel)
    try:
        report_ready(report)
        why = _answer(spec, instance, stop)
    except (PeerError, UnavailableError):
        end_within(GIVE_UP_S)
        instance.hang_up()
        instance.abandon()
        raise
    instance.close()
    instance.hang_up()
    return why


def _answer(spec: InstanceSpec, instance: Instance, stop: penstock.StopSignal) -> str:
    """Serves until it is asked to stop, or until a server that started it is gone."""
    while True:
        instance.send_ready(find_model(spec.model).name)
        if spec.joins:
            _announce(spec)
        try:
            why = instance.run(stop)
        except ServerLost as error:
            if not spec.joins:
                raise
            why = str(error)
        if stop.stopping or not spec.joins:
            return why
        logger.warning("server lost: name=%s cause=%s", spec.name, why)
        instance.hang_up()
        if not instance.rejoin(stop):
            return "it was asked to stop"


def _announce(spec: InstanceSpec) -> None:
    """Prints that the instance has joined, for the user who started it."""
    sys.stdout.write(f"penstock: ready: {spec.name} has joined {spec.server}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
