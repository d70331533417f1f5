"""The process of an instance: `python -m penstock.engine.instance SPEC`, SPEC being JSON.

It loads the model (or meets the ranks that do), dials the server, and then turns in one loop:
take what the server says, compute a step, tell what came of it. When nothing can run it sleeps
on its channels.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import torch

import penstock
from penstock.engine import messages as ms
from penstock.engine.checkpoints import find_model
from penstock.engine.engine import Engine, LocalWorkers
from penstock.engine.handed_ranks import handed_rank
from penstock.engine.handoffs import handoffs_of
from penstock.engine.loading import load_rank
from penstock.engine.meeting import meet_ranks, nobody
from penstock.engine.remote import RemoteWorkers
from penstock.engine.requests import Output, Phase, Request
from penstock.engine.sampling import Sampling
from penstock.engine.scheduler import Scheduler, SchedulerSettings
from penstock.engine.spec import InstanceSpec
from penstock.errors import CapacityError, PeerError, UnavailableError
from penstock.transport.base import BacklogError, Closed, Empty, Failed, Item
from penstock.transport.waiting import wait_any, wait_readable
from penstock.transport.zeromq import Listener, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.engine.architecture import Architecture
    from penstock.engine.handoffs import Handoffs
    from penstock.transport.base import Channel, Waitable

logger = logging.getLogger(__name__)

DIAL_S = 60.0
RANKS_S = 300.0
"""Loading a large model takes minutes; then something is wrong."""
IDLE_S = 3600.0
"""With nothing to do it looks up so often; everything else wakes it."""
DRAIN_S = 5.0
SLOW_SERVER_S = 1.0
"""So often a server that has not taken what it was told is looked after."""


class Outbox:
    """What the server is told, in order; what it has no room for waits here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames: deque[bytes] = deque()

    def put(self, message: ms.Message) -> None:
        """Sends a message, now or when there is room."""
        self._frames.append(ms.encode(message))

    def flush(self) -> bool:
        """Sends what there is room for; returns whether that was all.

        Raises:
            UnavailableError: the server is gone.
        """
        while self._frames:
            try:
                self._channel.send(self._frames[0])
            except BacklogError:
                return False
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
        self._outbox = Outbox(channel)
        config = penstock.parse_config(spec.config)
        assert config.cache.device is not None
        self._tiers = ["device", *(tier.name for tier in config.cache.tiers)]
        room = config.cache.device.slot_count * config.cache.block_tokens
        self._longest = min(architecture.positions, room)

    def tell_ready(self, model: str) -> None:
        """Says what it can do; requests may come from now on."""
        self._outbox.put(
            ms.Ready(
                model=model,
                positions=self._longest,
                stop_tokens=list(self._architecture.stop_tokens),
                config=self._spec.config,
                tiers=self._tiers,
                role=self._spec.role.value,
                partner=self._spec.partner,
            )
        )

    def run(self, stop: penstock.StopSignal) -> str:
        """Serves until the server is gone or the process is asked to stop; returns why.

        Raises:
            UnavailableError: a rank, or the server, is lost.
            PeerError: a rank or the server said what makes no sense.
        """
        while not stop.stopping:
            ended = self._listen()
            if ended:
                return ended
            if not self._outbox.flush():
                # The server is slower than we are: it is waited for, so that nothing piles up.
                wait_readable(self._channel.descriptor, time.monotonic() + SLOW_SERVER_S)
                continue
            for output in self._engine.step():
                self._outbox.put(_progress(output))
            kept = self._engine.cache.take_kv_events()
            if kept:
                self._outbox.put(ms.Kept(events=kept))  # type: ignore[arg-type]
            if self._outbox.flush():
                self._wait(stop)
        return "it was asked to stop"

    def close(self) -> None:
        """Drains the copies and gives everything back."""
        self._engine.close(DRAIN_S)

    def abandon(self) -> None:
        """A rank is lost: gives everything back at once."""
        self._engine.abandon()

    def _wait(self, stop: penstock.StopSignal) -> None:
        engine = self._engine
        if not engine.idle or (engine.copies_here and engine.cache.busy):
            return
        channels: list[Waitable] = [self._channel, *engine.channels]
        descriptors = [stop.descriptor]
        deadline = time.monotonic() + IDLE_S
        if engine.handoffs is not None:
            if engine.handoffs.has_work:
                return
            channels += engine.handoffs.waitables
            descriptors += engine.handoffs.descriptors
            deadline = engine.handoffs.next_deadline(deadline)
        wait_any(channels, descriptors, deadline=deadline)

    def _listen(self) -> str:
        while True:
            match self._channel.receive():
                case Item(frame):
                    self._take(ms.read_by_instance(frame))
                case Empty():
                    return ""
                case Closed():
                    return "the server closed the channel"
                case Failed(cause):
                    raise UnavailableError(f"the server is lost: {cause}")

    def _take(self, message: ms.ToInstance) -> None:
        match message:
            case ms.Submit():
                self._submit(message)
            case ms.Abort():
                self._engine.abort(message.id)
            case ms.Local():
                self._engine.scheduler.compute_here(message.id)
            case ms.StopAnswer():
                self._engine.scheduler.stop(message.id, message.answer)
            case ms.Reset(why=why, weights_version=version):
                if version:
                    self._engine.change_weights(version)
                else:
                    self._engine.cache.reset(why)
            case ms.Ask():
                self._outbox.put(ms.Told(id=message.id, json=self._answer(message)))

    def _submit(self, message: ms.Submit) -> None:
        try:
            self._engine.add(self._request(message))
        except CapacityError as error:
            self._outbox.put(ms.Refused(id=message.id, kind="busy", problem=str(error)))
        except ValueError as error:
            self._outbox.put(ms.Refused(id=message.id, kind="invalid", problem=str(error)))

    def _request(self, message: ms.Submit) -> Request:
        if len(message.prompt) + message.max_tokens > self._longest:
            raise ValueError(
                f"prompt and max_tokens come to {len(message.prompt)} and {message.max_tokens} "
                f"tokens, must be at most {self._longest} together, the longest context"
            )
        words = self._architecture.vocabulary
        wrong = [token for token in message.prompt if not 0 <= token < words]
        if wrong:
            raise ValueError(f"prompt has token {wrong[0]}, must be from 0 to {words - 1}")
        return Request(
            id=message.id,
            prompt=tuple(message.prompt),
            max_tokens=message.max_tokens,
            answers=message.answers,
            sampling=Sampling(
                temperature=message.temperature,
                top_p=message.top_p,
                seed=message.seed,
                logprobs=message.logprobs,
            ),
            stop_tokens=frozenset(self._architecture.stop_tokens),
            priority=message.priority,
            tenant=message.tenant,
            reuse=message.reuse,
            store=message.store,
            handoff=message.handoff,
            first_alone=not message.tells_logprobs and message.answers == 1,
        )

    def _answer(self, ask: ms.Ask) -> bytes:
        if ask.what == "story":
            return msgspec.json.encode(self._engine.cache.story(ask.of))
        if ask.what == "audit":
            # Raises what no client can mend: the instance ends, with the story.
            self._engine.cache.audit()
        return msgspec.json.encode(
            {
                "instance": self._spec.name,
                "cache": self._engine.cache.statistics(),
                "health": self._engine.cache.health(),
                "waiting": self._engine.scheduler.count(Phase.WAITING),
                "loading": self._engine.scheduler.count(Phase.LOADING),
                "running": self._engine.scheduler.count(Phase.RUNNING),
                "claiming": self._engine.scheduler.count(Phase.CLAIMING),
                "preemptions": self._engine.scheduler.preemptions,
                "handoffs": self._engine.handoff_outcomes,
                "handed_bytes": self._engine.handed_bytes,
            }
        )


def _progress(output: Output) -> ms.Progress:
    sampled = output.sampled
    return ms.Progress(
        id=output.request,
        answer=output.answer,
        token=None if sampled is None else sampled.token,
        logprob=0.0 if sampled is None else sampled.logprob,
        alternatives=[] if sampled is None else sampled.alternatives,
        reason="" if output.reason is None else output.reason.value,
        cached=list(output.cached_by_tier),
    )


def build_engine(
    spec: InstanceSpec, *, progress: Callable[[int, int, int], None] = nobody
) -> tuple[Engine, Architecture]:
    """The engine of a spec: with its model here, or in the ranks that come.

    Args:
        spec: The instance.
        progress: Told of each layer that a rank has read: rank, layers, of how many.

    Raises:
        UnavailableError: the ranks did not all come, or one was lost.
    """
    if spec.ranks == 1:
        loaded = load_rank(spec, progress=lambda layers, of: progress(0, layers, of))
        rank = handed_rank(spec, loaded.architecture, loaded.tier, rank=0)
        loaded.worker.handed = rank
        handoffs = handoffs_of(spec, loaded.architecture, rank)
        cache = penstock.open(loaded.config, kv=loaded.tier)
        scheduler = _scheduler(spec, cache, handoffs)
        return Engine(scheduler, LocalWorkers(loaded.worker), handoffs), loaded.architecture
    architecture, checkpoint = find_model(spec.model).open()
    checkpoint.close()
    with Listener(f"{spec.name}-scheduler", spec.scheduler) as listener:
        deadline = time.monotonic() + RANKS_S
        channels, facts = meet_ranks(
            listener, ranks=spec.ranks, deadline=deadline, progress=progress
        )
    handoffs = handoffs_of(spec, architecture, None)
    cache = penstock.open_owner(penstock.parse_config(spec.config), ranks=facts)
    scheduler = _scheduler(spec, cache, handoffs)
    return Engine(scheduler, RemoteWorkers(channels, facts), handoffs), architecture


def _scheduler(spec: InstanceSpec, cache: penstock.Cache, handoffs: Handoffs | None) -> Scheduler:
    settings = SchedulerSettings(
        step_tokens=spec.step_tokens,
        step_requests=spec.step_requests,
        waiting_max=spec.waiting_max,
    )
    config = penstock.parse_config(spec.config).cache
    assert config.device is not None
    return Scheduler(
        cache,
        settings,
        block_tokens=config.block_tokens,
        block_count=config.device.slot_count,
        handoffs=handoffs,
    )


def main(given: str) -> int:
    """Runs the instance; the exit status is 0 when it ended in good order."""
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    spec = msgspec.json.decode(given, type=InstanceSpec)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    with penstock.StopSignal() as stop:
        try:
            channel = connect(spec.server, name=spec.name, deadline=time.monotonic() + DIAL_S)
            with closing(channel):
                why = _serve(spec, channel, stop)
        except (PeerError, UnavailableError) as error:
            # The supervisor starts us anew, and our ranks with us.
            logger.error("instance ends: name=%s cause=%s", spec.name, error)  # noqa: TRY400
            return 1
    logger.info("instance ends: name=%s cause=%s", spec.name, why)
    return 0


def _serve(spec: InstanceSpec, channel: Channel, stop: penstock.StopSignal) -> str:
    def tell(rank: int, layers: int, of: int) -> None:
        channel.send(ms.encode(ms.Loading(rank=rank, layers=layers, of=of)))

    engine, architecture = build_engine(spec, progress=tell)
    instance = Instance(spec, engine, architecture, channel)
    instance.tell_ready(find_model(spec.model).name)
    try:
        why = instance.run(stop)
    except (PeerError, UnavailableError):
        instance.abandon()
        raise
    instance.close()
    return why


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
