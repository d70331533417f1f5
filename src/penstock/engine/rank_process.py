"""The process of one rank: `python -m penstock.engine.rank_process SPEC`, SPEC a descriptor.

It connects to its scheduler, meets the other ranks, loads its share of the model and computes
steps until the scheduler sends `End`. Any other end has status 1, and the supervisor restarts it.
"""

from __future__ import annotations

import logging
import signal
import sys
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

import penstock
from penstock.engine.handoffs import rank_handoffs
from penstock.engine.remote_workers import RankLoading, encode, join, serve_rank
from penstock.engine.spec import RankSpec, read_sealed
from penstock.engine.worker import GIVE_UP_S, end_within, load_rank
from penstock.errors import PeerError, UnavailableError
from penstock.observe import logs
from penstock.supervisor.keeper import keeper

if TYPE_CHECKING:
    from penstock.transport.base import Channel

logger = logging.getLogger(__name__)

COLLECTIVE_S = 60.0
"""The timeout of a collective: if it takes longer, a rank is gone."""


def main(given: str) -> int:
    """Runs the rank; returns the exit status, 0 if its scheduler ended gracefully."""
    spec = read_sealed(given, RankSpec)
    logs.set_up(spec.instance.log_level, as_json=spec.instance.log_json)
    name = f"{spec.instance.name}-rank-{spec.rank}"
    try:
        channel, place = join(
            spec.instance.scheduler, name=name, rank=spec.rank, secret=spec.instance.secret
        )
        with closing(channel):
            why = _serve(spec, channel, place)
    except (PeerError, UnavailableError) as error:
        logger.error("rank ends: name=%s cause=%s", name, error)  # noqa: TRY400
        return 1
    finally:
        _part()
    logger.info("rank ends: name=%s cause=%s", name, why)
    return 0


def _serve(spec: RankSpec, channel: Channel, place: str) -> str:
    instance = spec.instance
    if instance.threads:
        torch.set_num_threads(instance.threads)
    _meet(spec, place)

    def send_progress(layers: int, of: int) -> None:
        channel.send(encode(RankLoading(spec.rank, layers, of)))

    loaded = load_rank(instance, rank=spec.rank, progress=send_progress)
    handed = rank_handoffs(instance, loaded.architecture, loaded.tier, rank=spec.rank)
    loaded.worker.handed = handed
    with (
        nullcontext() if handed is None else handed.door,
        penstock.open_rank(loaded.config, rank=spec.rank, kv=loaded.tier, keeper=keeper()) as rank,
    ):
        loaded.worker.steps = rank.steps
        # From now on it ends with its scheduler, whose last step it would break otherwise.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            return serve_rank(channel, loaded.worker, rank, handed)
        except (PeerError, UnavailableError):
            end_within(GIVE_UP_S)
            raise


def _meet(spec: RankSpec, place: str) -> None:
    instance = spec.instance
    try:
        distributed.init_process_group(
            "nccl" if instance.device.startswith("cuda") else "gloo",
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
    sys.exit(main(sys.argv[1]))
