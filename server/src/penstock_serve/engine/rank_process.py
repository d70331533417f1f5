"""The process of one rank: `python -m penstock_serve.engine.rank_process SPEC`, SPEC a descriptor.

It connects to its scheduler, meets the other ranks, loads its share of the model and computes
steps until the scheduler sends `End`. Any other end has status 1, and the supervisor restarts it.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

import penstock
from penstock.errors import ConfigError, PeerError, UnavailableError
from penstock.toolkit import keeper, set_up_logs
from penstock_serve.engine.peers import peers_of
from penstock_serve.engine.process_life import (
    GIVE_UP_S,
    WRONG_SETTING,
    end_within,
    leave,
    report_problem,
    report_ready,
)
from penstock_serve.engine.remote_workers import RankLoading, encode, join, serve_rank
from penstock_serve.engine.spec import RankSpec, read_sealed
from penstock_serve.engine.worker import load_rank

if TYPE_CHECKING:
    from penstock.toolkit import Channel

logger = logging.getLogger("penstock.engine.rank_process")


COLLECTIVE_S = 60.0
"""The timeout of a collective between ranks."""


def main(given: str, report: str = "") -> int:
    """Runs the rank; returns the exit status, 0 if its scheduler ended and it is not needed."""
    # What was imported stays: a full collection would look at it, for a tenth of a second.
    gc.freeze()
    spec = read_sealed(given, RankSpec)
    instance = spec.instance
    set_up_logs(instance.log_level, as_json=instance.log_json)
    name = f"{instance.name}-rank-{spec.rank}"
    try:
        channel, place = join(
            instance.scheduler,
            name=name,
            rank=spec.rank,
            secret=instance.secret,
            silence_s=instance.silence_s,
        )
        with closing(channel):
            why = _serve(spec, channel, place, report)
    except ConfigError as error:
        # The command that started this process says so, and ends if it was its first life.
        logger.debug("rank ends: name=%s cause=%s", name, error)
        report_problem(report, error)
        return WRONG_SETTING
    except (PeerError, UnavailableError) as error:
        logger.error("rank ends: name=%s cause=%s", name, error)  # noqa: TRY400
        return 1
    finally:
        _part()
    logger.info("rank ends: name=%s cause=%s", name, why)
    return 0


def _serve(spec: RankSpec, channel: Channel, place: str, report: str) -> str:
    instance = spec.instance
    if instance.engine.threads:
        torch.set_num_threads(instance.engine.threads)
    _meet(spec, place)

    def send_progress(layers: int, of: int) -> None:
        channel.send(encode(RankLoading(spec.rank, layers, of)))

    loaded = load_rank(instance, rank=spec.rank, progress=send_progress)
    peers = peers_of(instance, loaded.architecture, tier=loaded.tier, rank=spec.rank)
    loaded.worker.handed = peers
    with (
        nullcontext() if peers is None else closing(peers),
        penstock.open_rank(loaded.config, rank=spec.rank, kv=loaded.tier, keeper=keeper()) as rank,
    ):
        loaded.worker.steps = rank.steps
        # From now on it ends with its scheduler, whose last step it would break otherwise.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report_ready(report)
        try:
            return serve_rank(channel, loaded.worker, rank, peers)
        except (PeerError, UnavailableError):
            end_within(GIVE_UP_S)
            raise


def _meet(spec: RankSpec, place: str) -> None:
    instance = spec.instance
    try:
        distributed.init_process_group(
            "nccl" if instance.engine.device.startswith("cuda") else "gloo",
            init_method=f"file://{place}",
            rank=spec.rank,
            world_size=instance.ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
    except RuntimeError as error:
        raise UnavailableError(f"the ranks did not meet: {error}") from error


def _part() -> None:
    """Ends the threads of gloo before the interpreter ends.

    They release tensors, which needs the interpreter; a thread that does so too late aborts the
    process. (NCCL is left alone: it would wait for a device that may be stuck.)
    """
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
