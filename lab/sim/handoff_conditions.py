"""What kind of world a seed of the scenario `handoff` is: engines, prompts, network, faults.

Everything is drawn from the seed, the rates of faults too.

The one rule that must not break: in a *calm* world nothing goes wrong but the network, and
everybody has time enough; so there every handoff must be delivered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from lab.worlds.scene import GPU_MEMORY, Prompt, Scene, shares
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes

CALM_SHARE = 0.25
SLOW_LINK_SHARE = 0.15
LONG_CUT_SHARE = 0.25
PREEMPTING_SHARE = 0.15
GPU_SHARE = 0.15
_LINK_DRAWS = 0x51_0E_1A_6B_2D_44_93_07
AMPLE_S = 4000.0
"""Thirty resends at the longest cap (128 s): so many are not all lost, not even at 30 % loss. With
600 s, one calm world of a few thousand ran out of time, because five were."""

_SMALL = (1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 8)
"""Numbers of ranks: small ones more often, because they run quicker and show as much."""

_LARGE_RANK_COUNT = 8
"""A world with more ranks than that on both sides is large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConditions:
    """All parameters of one world. Rates are probabilities, times are seconds."""

    calm: bool
    scene: Scene

    # How long things take: means of what is drawn for each.
    delay_s: float
    """Of a message."""
    fifo: bool
    """Whether messages between two parties keep their order."""
    write_s: float
    take_s: float
    layer_s: float
    gap_s: float
    """Between two requests, and between the two engines' hearing of one."""
    slow: tuple[str, ...]
    """Ranks for which everything takes ten times as long."""
    link_s: float
    """For how long a message occupies the link between the two engines, and a write four times as
    long; the next ones wait. 0: the link is never busy."""

    # What goes wrong, per message, write or request.
    loss: float
    duplicate: float
    spoil: float
    write_failure: float
    stray: float
    """Writes that land once more, later. Only into GPU memory: nothing keeps them out."""
    cancel: float
    """Each engine, for itself."""
    preempt: float
    """The prefill engine loses the blocks of a prompt, and computes it anew."""
    withdraw: float
    insistence: float
    """The decode engine claims again what was not delivered."""
    misrouting: float
    """A request reaches one engine only."""

    # What befalls the world, so often.
    crash_count: int
    partition_count: int
    long_cut: bool
    """Whether partitions last for 10 to 30 s, longer than anybody is patient; else about 1 s."""
    suspicion_count: int
    fence_on_death: bool
    """Whether a fence holds only when the writer is dead; otherwise it shuts a living one out."""


def draw_handoff_conditions(rng: Random) -> HandoffConditions:
    """The conditions of one seed."""
    # Of its own, so that seeds of worlds with a quick link show what they always did.
    link = Random()
    link.setstate(rng.getstate())
    link.seed(link.getrandbits(64) ^ _LINK_DRAWS)
    calm = rng.random() < CALM_SHARE
    scene = _draw_scene(rng, calm=calm)
    ranks = (*scene.prefill_ranks, *scene.decode_ranks)

    def fault(chance: float, most: float) -> float:
        drawn = rng.uniform(0.0, most) if rng.random() < chance else 0.0
        return 0.0 if calm else drawn

    def count(chance: float, most: int) -> int:
        drawn = rng.randint(1, most) if rng.random() < chance else 0
        return 0 if calm else drawn

    conditions = HandoffConditions(
        calm=calm,
        scene=scene,
        delay_s=rng.choice((0.001, 0.01, 0.1)),
        fifo=rng.random() < 0.5,
        write_s=rng.choice((0.001, 0.02, 0.2)),
        take_s=rng.choice((0.001, 0.01, 0.1)),
        layer_s=rng.choice((0.001, 0.02, 0.1)),
        gap_s=rng.choice((0.0, 0.05, 0.5)),
        slow=tuple(rank for rank in ranks if rng.random() < 0.08),
        link_s=link.choice((0.002, 0.05)) if link.random() < SLOW_LINK_SHARE else 0.0,
        loss=rng.uniform(0.0, 0.3) if rng.random() < 0.7 else 0.0,
        duplicate=rng.uniform(0.0, 0.3) if rng.random() < 0.6 else 0.0,
        spoil=fault(0.4, 0.3),
        write_failure=fault(0.3, 0.15),
        stray=0.0,
        cancel=fault(0.4, 0.4),
        withdraw=fault(0.5, 1.0),
        insistence=fault(0.3, 1.0),
        misrouting=fault(0.3, 0.3),
        crash_count=count(0.4, 3),
        partition_count=count(0.3, 2),
        long_cut=link.random() < LONG_CUT_SHARE,
        preempt=0.5 if link.random() < PREEMPTING_SHARE and not calm else 0.0,
        suspicion_count=count(0.3, 3),
        fence_on_death=rng.random() < 0.3,
    )
    if link.random() >= GPU_SHARE:
        return conditions
    on_gpu = replace(scene, transport=GPU_MEMORY)
    stray = 0.0 if calm else link.uniform(0.1, 0.5)
    return replace(conditions, scene=on_gpu, fence_on_death=False, stray=stray)


def _draw_scene(rng: Random, *, calm: bool) -> Scene:
    tensor, decode_count = rng.choice(_SMALL), rng.choice(_SMALL)
    stages = rng.choice((1, 1, 1, 2)) if tensor <= 4 else 1
    layer_count = rng.randint(stages, 4)
    prompts = {}
    # Two can get into each other's way; where there are many ranks, more would cost much time.
    large = tensor * stages + decode_count > _LARGE_RANK_COUNT
    for number in range(2 if large else rng.randint(1, 4)):
        handoff = f"h{number}"
        grid, token_count = draw_grid(rng, layer_count)
        prompts[handoff] = Prompt(
            handoff=handoff,
            token_count=token_count,
            layer_count=layer_count,
            wanted=shares(tensor, decode_count, grid, stages=stages),
            chunk_tokens=rng.randint(1, token_count),
            patience_s=AMPLE_S if calm else rng.uniform(1.0, 8.0),
            lease_s=AMPLE_S if calm else rng.uniform(2.0, 12.0),
        )
    return Scene(
        prefill_count=tensor * stages,
        decode_count=decode_count,
        prompts=prompts,
        stages=stages,
        settings=_draw_settings(rng, calm=calm),
    )


def draw_grid(rng: Random, layer_count: int) -> tuple[Grid, int]:
    """What travels of a prompt: all layers, and the blocks that the decode side lacks."""
    block_tokens = rng.choice((1, 2, 4))
    block_count = rng.randint(1, 4)
    token_count = block_count * block_tokens - rng.randrange(block_tokens)
    prefix = rng.choice((0, 0, rng.randrange(block_count)))
    grid = Grid(
        layer_first=0,
        layer_count=layer_count,
        block_first=prefix,
        block_count=block_count - prefix,
        part_layers=rng.choice((1, 1, 2)),
        part_blocks=rng.choice((1, 1, 2)),
        block_tokens=block_tokens,
        part_bytes=1,
    )
    return grid, token_count


def _draw_settings(rng: Random, *, calm: bool) -> HandoffSettings:
    resend_s = rng.choice((0.05, 0.2, 0.5))
    berth_count = rng.choice((1, 2, 2, 4, 8))
    # Where a cap never comes into it, the number of messages depends on the parts alone.
    resend_cap_s = resend_s * (rng.choice((64, 256)) if calm else rng.choice((8, 32)))
    return HandoffSettings(
        times=HandoffTimes(
            resend_s=resend_s,
            resend_cap_s=resend_cap_s,
            resend_limit_s=max(30.0, resend_cap_s),
            park_s=AMPLE_S if calm else rng.uniform(2.0, 8.0),
        ),
        bounds=HandoffBounds(
            berth_bytes=1,
            berth_count=berth_count,
            landing_bytes_max=berth_count * 64,
            retired_bytes_max=berth_count * rng.choice((1, 2, 8)),
            attempt_count_max=rng.choice((2, 3, 5)),
            poison_count_max=rng.choice((1, 2)),
            close_count_max=AMPLE_CLOSES if calm else rng.choice((2, 8)),
        ),
    )


AMPLE_CLOSES = 1000
