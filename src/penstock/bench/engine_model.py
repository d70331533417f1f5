"""Models with random weights, and engines on them: what `penstock bench engine` measures.

One rule: engines of one benchmark share a model, and each has blocks and a cache of its own, so
that they differ in what is compared and in nothing else.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

import penstock
from penstock.engine.architecture import Architecture
from penstock.engine.checkpoints import RankWeights
from penstock.engine.engine import Engine, LocalWorkers
from penstock.engine.model import Alone, Decoder
from penstock.engine.scheduler import Scheduler, SchedulerSettings
from penstock.engine.sharding import share_of
from penstock.engine.worker import Worker, allocate_kv, attention_on, device_of, kv_tier, lane_on

if TYPE_CHECKING:
    from collections.abc import Iterator

EIGHT_B = Architecture(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    positions=40_960,
    qk_norm=False,
    qkv_bias=False,
    tied=False,
    stop_tokens=(),
)
"""The sizes of Llama-3.1-8B: 128 KiB of KV a token in bfloat16."""


class RandomCheckpoint:
    """Weights by the names of a checkpoint, drawn where they are needed.

    They are wide enough that what is answered depends on all that was read.
    """

    def __init__(self, architecture: Architecture, *, device: torch.device, seed: int = 7) -> None:
        self._architecture = architecture
        self._draw = torch.Generator(device=device).manual_seed(seed)
        self._device = device

    def __contains__(self, name: str) -> bool:
        return True

    def rows(self, name: str, held: range | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        shape = self._shape(name)
        rows = shape[0] if held is None else len(held)
        drawn = torch.randn((rows, *shape[1:]), generator=self._draw, device=self._device)
        if len(shape) == 1:
            return drawn * 0.1 + (1.0 if "norm" in name else 0.0)
        # Sums of so many products keep the size of what goes in; embeddings start with it.
        spread = 1.0 if "embed" in name else 1.2 / shape[1] ** 0.5
        return drawn * spread

    def columns(self, name: str, held: range) -> torch.Tensor:
        """A range of a matrix's columns."""
        return self.rows(name)[:, held.start : held.stop]

    def close(self) -> None:
        """There are no files."""

    def _shape(self, name: str) -> tuple[int, ...]:
        of = self._architecture
        kind = re.sub(r"^model\.layers\.\d+\.", "", name)
        queries, keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (of.vocabulary, of.hidden),
            "lm_head.weight": (of.vocabulary, of.hidden),
            "model.norm.weight": (of.hidden,),
            "input_layernorm.weight": (of.hidden,),
            "post_attention_layernorm.weight": (of.hidden,),
            "self_attn.q_proj.weight": (queries, of.hidden),
            "self_attn.k_proj.weight": (keys, of.hidden),
            "self_attn.v_proj.weight": (keys, of.hidden),
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
            "self_attn.q_norm.weight": (of.head_dim,),
            "self_attn.k_norm.weight": (of.head_dim,),
            "self_attn.o_proj.weight": (of.hidden, queries),
            "mlp.gate_proj.weight": (of.intermediate, of.hidden),
            "mlp.up_proj.weight": (of.intermediate, of.hidden),
            "mlp.down_proj.weight": (of.hidden, of.intermediate),
        }
        return shapes[kind]


class Model:
    """A model with random weights, whole, on one device.

    Devices draw differently: models that are to be equal say where their weights are drawn.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        device: str,
        dtype: torch.dtype,
        drawn_on: str | None = None,
    ) -> None:
        self.architecture = architecture
        self.device = device_of(device, 0)
        self.dtype = dtype
        self.share = share_of(architecture, rank=0, ranks=1)
        weights = RankWeights(
            RandomCheckpoint(architecture, device=torch.device(drawn_on or self.device)),
            self.share,
            head_dim=architecture.head_dim,
            dtype=dtype,
            device=self.device,
        )
        self.decoder = Decoder(
            architecture, weights, Alone(self.share), attention=attention_on(self.device)
        )

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        of = self.architecture
        return of.layers * 2 * of.kv_heads * of.head_dim * int(self.dtype.itemsize)

    @contextmanager
    def engine(
        self,
        *,
        block_tokens: int,
        blocks: int,
        host_blocks: int,
        settings: SchedulerSettings,
        graphs: bool = True,
        load_gate: str = "measured",
    ) -> Iterator[Engine]:
        """An engine on this model; with `host_blocks`, it has a host tier of so many blocks."""
        kv = allocate_kv(
            self.architecture,
            self.share,
            block_count=blocks,
            block_tokens=block_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        host = f'{{ name = "host", kind = "host", blocks = {host_blocks}, required = true }}'
        config = penstock.parse_config(
            f"""
            version = 1
            model.name = "random"
            cache.block_tokens = {block_tokens}
            cache.blocks = {blocks}
            cache.load_gate = "{load_gate}"
            tiers = [{host if host_blocks else ""}]
            """
        )
        tier = kv_tier(self.architecture, self.share, kv, block_tokens=block_tokens)
        lane = lane_on(self.device, graphs=graphs)
        worker = Worker(self.decoder, kv, block_tokens=block_tokens, lane=lane)
        with penstock.open(config, kv=tier) as cache:
            worker.steps = cache.steps
            scheduler = Scheduler(cache, settings, block_tokens=block_tokens, block_count=blocks)
            yield Engine(scheduler, LocalWorkers(worker))
