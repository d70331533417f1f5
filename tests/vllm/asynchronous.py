"""Asynchronous scheduling, vLLM's default on GPUs, in its CPU build.

vLLM puts a step together while the one before it runs, from tokens that are not known yet. Its CPU
build switches this off "as not required", though its scheduler, its engine's queue of steps and its
worker's thread for outputs are the same code. What the model runner needs of CUDA for it are
streams and events: on a CPU a step's results are there when its calls return, so these do nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from collections.abc import Iterator


class Passed:
    """A stream or an event that nobody has to wait for."""

    device = torch.device("cpu")

    def __init__(self, *_args: Any, **_how: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass


@contextmanager
def in_stream(_: Any) -> Iterator[None]:
    yield


def switch_on() -> None:
    """In this process and those that it forks, engines schedule asynchronously."""
    restrict = CpuPlatform.check_and_update_config

    def allow(vllm_config: Any) -> None:
        restrict(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(allow)  # type: ignore[method-assign]
    torch.cuda.Event = torch.cuda.Stream = Passed  # type: ignore[misc, assignment]
    torch.cuda.current_stream = Passed  # type: ignore[assignment]
    torch.cuda.stream = in_stream  # type: ignore[assignment]
