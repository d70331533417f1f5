"""What an engine calls, and what it gets: the four machines as an engine sees them.

An engine talks to its scheduler's machine, and its workers to their rank's; a driver between
them and the machines carries out the effects (`penstock.handoff.protocol.effects`). docs/handoff.md
tells the order of calls with an example that runs.

| when                                  | prefill engine           | decode engine              |
|---------------------------------------|--------------------------|----------------------------|
| a request comes                       | `submit`                 | `submit`                   |
| a rank is about to compute it         | `admit`, on each rank    |                            |
| a layer, or a chunk, is computed      | `progress`, on each rank |                            |
| the first token is sampled            | `first_token`            |                            |
| the client is gone                    | `cancel`                 | `cancel`                   |
| its room is needed for others         |                          | `withdraw`                 |
| `Ended` comes, once for each `submit` | its blocks are not read  | its slots are the          |
|                                       | any more                 | request's, or free         |
| a rank's process is seen dead         | `suspect(rank)`          | `suspect(rank)`            |
| a peer is silent                      | `suspect(peer)`          | `suspect(peer)`            |

What must not break: progress is reported only for bytes that *are* there. On a CUDA device that
is when the event recorded behind the layer's last kernel has passed; not when the kernel was
launched.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Progress(NamedTuple):
    """The KV of a prompt's first `tokens` tokens is there in one layer of this rank."""

    handoff: str
    layer: int
    tokens: int


class ProgressSource(Protocol):
    """Tells a prefill rank what its device has computed.

    On CUDA: one event for each layer of each step, recorded behind the layer's kernels, for all
    requests of the step together. No thread waits for them. They are looked at when a step
    begins or ends (`poll`), and while the engine waits for its step's result anyway (`drive`),
    so that the writes of early layers go out while later layers compute.
    """

    def poll(self) -> list[Progress]:
        """What was computed since the last call; never waits."""
        ...

    def drive(self, until: float) -> list[Progress]:
        """Waits for the next event, at most until then on the monotonic clock."""
        ...


class StepProgress:
    """Which prompts each layer of each step in flight belongs to, without a device.

    What every progress source needs beside its events: the engine says what a step will
    compute (`begin`), the source says which layer of which step is done (`layer_done`), in any
    order; out comes the progress of each prompt. Engines have two steps in flight, and a rank
    never hears of the same layer twice.
    """

    def __init__(self, *, step_count_max: int = 8) -> None:
        if step_count_max < 1:
            raise ValueError(f"step_count_max is {step_count_max}, must be at least 1")
        self.step_count_max = step_count_max
        self.steps: dict[int, tuple[dict[str, int], set[int]]] = {}

    def begin(self, step: int, tokens: dict[str, int], layers: range) -> None:
        """A step will have computed so many tokens of each prompt, in these layers.

        Raises:
            ValueError: the step is known, or too many are in flight.
        """
        if step in self.steps:
            raise ValueError(f"step is {step}, which is in flight already")
        if len(self.steps) >= self.step_count_max:
            raise ValueError(f"{len(self.steps)} steps are in flight, at most that many may be")
        if not layers:
            raise ValueError(f"layers is {layers}, must not be empty")
        self.steps[step] = (dict(tokens), set(layers))

    def layer_done(self, step: int, layer: int) -> list[Progress]:
        """A layer of a step is computed.

        Raises:
            ValueError: it is not in flight.
        """
        tokens, layers = self.steps.get(step, ({}, set()))
        if layer not in layers:
            raise ValueError(f"layer {layer} of step {step} is not in flight")
        layers.remove(layer)
        if not layers:
            del self.steps[step]
        return [Progress(handoff, layer, count) for handoff, count in tokens.items()]

    def abandon(self, step: int) -> None:
        """A step failed: nothing more will come of it. What was never begun is left alone."""
        self.steps.pop(step, None)
