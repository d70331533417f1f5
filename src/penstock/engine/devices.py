"""What a rank computes with, by the device it is on.

The one rule: what a GPU needs is imported where there is one. An engine on the CPU has neither
Triton nor CUDA.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from penstock.engine.attention import Attention
    from penstock.engine.worker import StepLane

GIVE_UP_S = 60.0
"""To give everything back takes milliseconds, or as long as a stuck device is waited for."""


def device_of(name: str, rank: int) -> torch.device:
    """The device of a rank, made the current one: with `cuda` alone, ranks are dealt out.

    Raises:
        UnavailableError: torch sees no such device.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    number = rank if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise UnavailableError(
            f"device is {name!r} for rank {rank}: torch sees {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def attention_on(device: torch.device) -> Attention | None:
    """The attention of a device, where it has one of its own."""
    if device.type != "cuda":
        return None
    from penstock.engine.cuda.attention import CudaAttention  # noqa: PLC0415 - needs Triton

    return CudaAttention()


def lane_on(device: torch.device, *, graphs: bool) -> StepLane | None:
    """Where the steps of a rank run, if not on the CPU; blocks and weights are there already."""
    if device.type != "cuda":
        return None
    from penstock.engine.cuda.lane import CudaLane  # noqa: PLC0415 - needs CUDA

    return CudaLane(device, graphs=graphs)


def end_within(seconds: float) -> None:
    """Has the kernel end this process, if it is still there by then.

    For a process that gives up, so that whoever started it can start it again. What a process
    gives back at its end is memory that a device may still use, and CUDA waits for a device
    without a deadline, inside calls that no Python code can leave. The kernel can.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
