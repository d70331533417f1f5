"""The cache of one model of transformers: what `penstock.transformers.open` returns.

    enter   look the rows up, bring their blocks up from a disk, load them   ─→ a filled cache
    (generate computes the rest, in place)
    exit    copy down what is not there yet, and wait until it is            ─→ found by anybody

A row is a prompt without its padding, so a prompt has the same blocks alone and in a batch. All
rows are restored up to one column, the furthest that each of them reaches.

The one rule: what cannot be done costs a prompt its hit, never its answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

import penstock
from penstock.connectors.base.report import PromptReport, tier_lines
from penstock.connectors.transformers.layers import (
    BlockStage,
    Restored,
    first_kept,
    new_cache,
    read_layers,
    rotary_limit,
    why_not,
)
from penstock.connectors.transformers.weights import weight_marks, weights_version
from penstock.errors import PenstockError, UnavailableError, counted
from penstock.vocabulary.arguments import as_int

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray
    from transformers import DynamicCache, PreTrainedModel

    from penstock import Config, Found, KeyChain, Offload, Started

CAUSE = "prompt"
TIERS_S = 30.0
"""A disk comes on within a second or two; on a machine that is busy, later."""
LOAD_S = 30.0
"""How long a prompt waits for blocks on a disk: to compute as much without a GPU takes minutes."""
SAVE_S = 10.0
"""How long the end of a prompt waits for a disk: it writes several GB meanwhile."""
ANSWER_S = 0.25
"""A disk says within milliseconds what other processes have written since it listed its blocks."""
ASKED_MAX = 3
"""How often a disk is asked for a prompt: what it has may be more than there was room for."""
TRIES = 3
"""A block that fails its sum is forgotten, and what is before it is loaded once more."""
CHANGED = "the weights were changed since the cache was opened: close it, and open another"

LONG = "rope_type is 'longrope': beyond {} tokens, the KV of a prefix is another"


def open(  # noqa: A001 - read as penstock.transformers.open, which is what it does
    model: PreTrainedModel, config: Config | Path | str
) -> PromptCache:
    """Opens a cache for the prompts of a model, which computes one token to show its layers.

    Args:
        model: It alone may fill what `prompt` yields. If its KV cannot be cached, the cache does
            nothing, and its report says why.
        config: A configuration, or the path of a TOML file with one. `model.weights_version` may be
            empty for a model that was read from safetensors.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the machine.
    """
    if not isinstance(config, penstock.Config):
        config = penstock.load_config(config)
    return PromptCache(model, config)


class Row(NamedTuple):
    """One prompt of a batch."""

    tokens: NDArray[np.uint32]
    pad: int
    """Columns of padding before it."""
    chain: KeyChain
    """The keys of its full blocks."""


class PromptCache:
    """The prompts of one model, in tiers below it. One thread at a time may use it."""

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        self._model = model
        self._config = config
        self._report = PromptReport()
        self._offload: Offload
        self._stage: BlockStage
        self._is_open = False
        """Whether there are tiers, and so the two above."""
        self._unusable = why_not(model)
        """Why no prompt will ever be cached; empty if nothing is wrong."""
        if not self._unusable:
            try:
                self._open()
            except (OSError, RuntimeError, UnavailableError) as error:
                self._unusable = str(error)
        if self._unusable:
            self._report.leave_out(self._unusable, prompts=0)

    def _open(self) -> None:
        model, given = self._model, self._config
        self._layers = read_layers(model)
        self._marks = weight_marks(model)
        self._rotary_limit = rotary_limit(model.config)
        named = replace(
            given.model,
            weights_version=weights_version(model, given.model.weights_version),
            kv_dtype=str(self._layers[0].dtype).removeprefix("torch."),
        )
        groups = len({layer.window for layer in self._layers})
        cache = replace(given.cache, device=None, rank_count=1, group_count=groups)
        self._config = replace(given, model=named, cache=cache, equal_ranks=False)
        devices = {layer.device for layer in self._layers}
        # Elsewhere, and where a model lies on several devices, copies go through host memory.
        gpu = next((each for each in devices if each.type == "cuda" and len(devices) == 1), None)
        self._stage = BlockStage(
            self._layers, block_tokens=cache.block_tokens, device=gpu or torch.device("cpu")
        )
        self._offload = penstock.open_offload(
            self._config, kv=self._stage.tier, wait_for_tiers_s=TIERS_S
        )
        self._is_open = True

    def prompt(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        copies: int = 1,
        tenant: str = "",
    ) -> PromptBatch:
        """A batch of prompts that `generate` is about to be called with.

        Args:
            input_ids: What `generate` will be given: `[row, token]`.
            attention_mask: What `generate` will be given. Padding must be on the left.
            copies: How often `generate` takes each row: its `num_beams` or `num_return_sequences`.
            tenant: Who pays; tenants share nothing.

        Raises:
            ValueError: it is not a batch of token ids.
        """
        ids = torch.as_tensor(input_ids)
        mask = None if attention_mask is None else torch.as_tensor(attention_mask).long()
        if ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point():
            what = f"{ids.dtype} of shape {list(ids.shape)}"
            raise ValueError(f"input_ids are {what}, must be token ids of shape [row, token]")
        if mask is not None and mask.shape != ids.shape:
            shape = list(mask.shape)
            raise ValueError(f"attention_mask has shape {shape}, must be {list(ids.shape)}")
        copies = as_int("copies", copies, 1)
        return PromptBatch(owner=self, ids=ids, mask=mask, copies=copies, tenant=tenant)

    def report(self) -> PromptReport:
        """Hits, misses with their reasons, and bytes so far: to be printed."""
        if not self._is_open:
            return replace(self._report)
        self._offload.adopt_thread()
        self._offload.step()  # Takes what a disk has said of itself meanwhile.
        return replace(self._report, tiers=tier_lines(self._offload.statistics()))

    def close(self, timeout_s: float = SAVE_S) -> None:
        """Gives the memory back; what is on its way to a disk may take `timeout_s` to get there."""
        if self._is_open:
            self._is_open, self._unusable = False, "the cache is closed"
            self._offload.adopt_thread()
            self._offload.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, prompt: PromptBatch) -> DynamicCache | None:
        """A cache with what was found of a batch; `None` if the batch is not cached."""
        try:
            why = self._unusable or self._why_not(prompt)
            if not why:
                self._offload.adopt_thread()
                return self._restore(prompt)
        except (PenstockError, OSError) as error:
            why = str(error)
        self._report.leave_out(why, prompts=len(prompt.ids))
        return None

    def _why_not(self, prompt: PromptBatch) -> str:
        asked = self._model.generation_config
        if weight_marks(self._model) != self._marks:
            return CHANGED
        if asked.cache_implementation is not None:
            return f"cache_implementation is {asked.cache_implementation!r}, must be None"
        if 0 < self._rotary_limit < prompt.ids.shape[1]:
            return LONG.format(self._rotary_limit)
        if asked.use_cache is False:
            return "use_cache is False"
        if prompt.mask is not None:
            left = bool((prompt.mask[:, -1] == 1).all() and (prompt.mask.diff(dim=1) >= 0).all())
            return "" if left else "attention_mask has padding that is not on the left"
        # `generate` makes a mask of its own then, if it sees padding.
        if asked.pad_token_id is not None and bool((prompt.ids == asked.pad_token_id).any()):
            return "input_ids have padding, and no attention_mask is given"
        return ""

    def _restore(self, prompt: PromptBatch) -> DynamicCache:
        rows = prompt.rows = self._rows_of(prompt)
        cache = new_cache(self._model)
        for _ in range(TRIES):
            prompt.found = [self._bring_up(row) for row in rows]
            columns = min(map(self._reach, rows, prompt.found))
            if columns <= min(row.pad for row in rows):
                break
            restored = self._load(rows, columns)
            if restored is not None:
                restored.give_to(cache, copies=prompt.copies)
                cache.activate_past_recording = partial(self._start_over, prompt, cache)
                prompt.columns = columns
                break
        return cache

    def _start_over(self, prompt: PromptBatch, cache: DynamicCache) -> None:
        """Assisted decoding begins: it gives the model all of a prompt, whatever its cache has."""
        if cache.get_seq_length() > prompt.columns:
            return  # The prompt is computed already: this is another part of `generate`.
        cache.layers[:] = new_cache(self._model).layers
        prompt.columns = 0
        self._report.leave_out("assisted decoding starts from no cache", prompts=len(prompt.rows))

    def _rows_of(self, prompt: PromptBatch) -> list[Row]:
        pads = [0] * len(prompt.ids)
        if prompt.mask is not None:
            pads = (prompt.mask == 0).sum(dim=1).tolist()
        rows = []
        for ids, pad in zip(prompt.ids.cpu().numpy().astype(np.uint32), pads, strict=True):
            rows.append(Row(ids[pad:], pad, self._config.key_chain(tenant=prompt.tenant)))
            rows[-1].chain.extend(rows[-1].tokens)
        return rows

    def _reach(self, row: Row, found: Found) -> int:
        """Up to which column a row can be restored; its last token is always computed."""
        tokens = min(found.ready, found.worth) * self._config.cache.block_tokens
        return row.pad + min(tokens, len(row.tokens) - 1)

    def _bring_up(self, row: Row) -> Found:
        """Looks a row up, and waits until what lies on a disk is in host memory."""
        offload, deadline, asked = self._offload, time.monotonic() + LOAD_S, 0
        keys = row.chain.keys[: (len(row.tokens) - 1) // self._config.cache.block_tokens]
        found = offload.lookup(keys)
        while offload.persists and found.ready < len(keys) and time.monotonic() < deadline:
            status = offload.store_status(CAUSE)
            if status and status.due:
                pass  # The step takes what the store has said so far.
            elif found.rising or (status and status.searching):
                offload.wait(deadline)
            elif asked == ASKED_MAX or (asked and not found.below):
                break
            else:
                asked += 1
                offload.prefetch(keys, cause=CAUSE)
                if status and status.on:
                    offload.wait(min(deadline, time.monotonic() + ANSWER_S))
            offload.step()
            offload.poll()
            found = offload.lookup(keys)
        return found

    def _load(self, rows: Sequence[Row], columns: int) -> Restored | None:
        """Loads all rows up to one column; `None` if a block did not arrive."""
        stage = self._stage
        restored = Restored(self._layers, row_count=len(rows), token_count=columns)
        for number, row in enumerate(rows):
            count = -(-(columns - row.pad) // self._config.cache.block_tokens)
            for first in range(0, count, stage.block_count):
                keys = row.chain.keys[first : min(count, first + stage.block_count)]
                slots = stage.slots_of(columns, pad=row.pad, block=first, count=len(keys))
                if self._settle(self._offload.load(keys, slots, cause=CAUSE)) < len(keys):
                    return None
                stage.put(restored, row=number, pad=row.pad, block=first, count=len(keys))
                self._submitted()
                self._report.bytes_loaded += stage.bytes_in(slots)
        return restored

    def _end(self, prompt: PromptBatch, cache: DynamicCache, *, failed: bool) -> None:
        """Saves what was computed of a batch, and waits until it is where others find it."""
        vars(cache).pop("activate_past_recording", None)  # It would keep the cache's memory.
        for row, found, cached in zip(prompt.rows, prompt.found, prompt.cached_tokens, strict=True):
            complete = found.miss.reason is penstock.MissReason.NONE
            miss = "complete" if complete else found.miss.reason.value
            self._report.found(tokens=len(row.tokens), cached=cached, miss=miss)
        if failed:
            return  # Nobody knows how much of the prompt each layer has.
        try:
            why = self._unusable or (weight_marks(self._model) != self._marks and CHANGED)
            if not why:
                self._offload.adopt_thread()
                why = self._save(prompt, cache)
        except (PenstockError, OSError) as error:
            why = str(error)
        if why:
            self._report.leave_out(f"not saved: {why}", prompts=len(prompt.ids))

    def _save(self, prompt: PromptBatch, cache: DynamicCache) -> str:
        """Saves a batch; returns why it could not."""
        columns, length = cache.get_seq_length(), prompt.ids.shape[1]
        if columns < length:
            return "the prompt was not computed with this cache"
        if 0 < self._rotary_limit < columns:
            return LONG.format(self._rotary_limit)
        held, copies = cache.layers[0].keys.shape[0], prompt.copies
        if held != copies * len(prompt.rows):
            return f"the cache has {counted(held, 'row')}, not {copies} of each prompt: see copies"
        deadline = time.monotonic() + SAVE_S
        for number, row in enumerate(prompt.rows):
            if prompt.answers is not None and copies == 1:
                row.chain.extend(prompt.answers[number, : columns - length])
            self._save_row(prompt, row, cache, number * copies, deadline)
        return ""

    def _save_row(
        self, prompt: PromptBatch, row: Row, cache: DynamicCache, number: int, deadline: float
    ) -> None:
        stage, keys = self._stage, row.chain.keys
        found = self._offload.lookup(keys)
        start = found.ready + found.pending
        kept = max(map(first_kept, cache.layers))
        if row.pad + start * self._config.cache.block_tokens < kept:
            raise UnavailableError(f"of {kept} tokens, a sliding window has dropped some")
        # A half of host memory at most may be on its way to a disk; the rest would not be written.
        most = max(1, min(stage.block_count, self._offload.hub_counts().slots // 2))
        while start < len(keys):
            some = keys[start : start + most]
            stage.take(cache, row=number, pad=row.pad, block=start, count=len(some))
            self._submitted()
            slots = np.tile(np.arange(len(some)), (len(stage.windows), 1))
            parent = keys[start - 1] if start else None
            started = self._offload.save(
                some, slots, cause=CAUSE, parent=parent, tenant=prompt.tenant
            )
            self._report.bytes_saved += self._settle(started) * stage.block_bytes
            self._drain(deadline)
            if started.miss.reason is not penstock.MissReason.NONE:
                raise UnavailableError(f"the tiers took no more: {started.miss.reason.value}")
            start += len(some)

    def _submitted(self) -> None:
        """What was just copied from or to the stage comes before the next copies of the tiers."""
        if self._stage.device.type == "cuda" and self._offload.steps is not None:
            stream = torch.cuda.current_stream(self._stage.device)
            self._offload.steps.submitted(stream.cuda_stream)

    def _settle(self, started: Started) -> int:
        """Waits until nothing touches the stage; returns how many blocks were moved.

        Raises `UnavailableError`: a copy does not end, and the stage can never be used again.
        """
        offload, waiting, moved = self._offload, set(started.operations), 0
        deadline = time.monotonic() + 2 * self._config.cache.operation_timeout_s
        while waiting:
            offload.step()
            for result in offload.poll():
                if result.operation not in waiting:
                    continue
                if isinstance(result, penstock.Settled) or result.settled:
                    waiting.remove(result.operation)
                if isinstance(result, penstock.Ended) and result.outcome is penstock.Outcome.DONE:
                    moved += result.block_count
            if waiting and not offload.wait(deadline) and time.monotonic() >= deadline:
                self._unusable = "a copy between the model and the tiers does not end"
                raise UnavailableError(self._unusable)
        return moved

    def _drain(self, deadline: float) -> None:
        """Waits for copies to a disk."""
        while self._offload.busy and time.monotonic() < deadline:
            self._offload.wait(deadline)
            self._offload.step()
            self._offload.poll()


@dataclass(slots=True, kw_only=True)
class PromptBatch:
    """A batch of prompts: a context manager around `generate`, made by `PromptCache.prompt`."""

    owner: PromptCache
    ids: torch.Tensor
    mask: torch.Tensor | None
    copies: int
    tenant: str
    rows: list[Row] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    columns: int = 0
    """How many columns are restored."""
    answers: NDArray[np.uint32] | None = None
    """The tokens that were generated, if they are kept."""
    cache: DynamicCache | None = None
    """What `generate` fills."""

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """How many tokens of each row need not be computed; empty if the batch is not cached."""
        return tuple(max(0, self.columns - row.pad) for row in self.rows)

    def keep(self, sequences: torch.Tensor) -> None:
        """Has the answers saved as well, unless there are several `copies`.

        Args:
            sequences: What `generate` has returned: prompts and answers.

        Raises:
            ValueError: they do not begin with the prompts.
        """
        found, ids = torch.as_tensor(sequences).cpu(), self.ids.cpu()
        if self.copies == 1 and not found[:, : ids.shape[1]].equal(ids):
            raise ValueError(f"sequences of {list(found.shape)} do not begin with the prompts")
        self.answers = found[:, ids.shape[1] :].numpy().astype(np.uint32)

    def __enter__(self) -> DynamicCache | None:
        self.cache = self.owner._begin(self)  # noqa: SLF001 - a part of this module
        return self.cache

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.cache is not None:
            self.owner._end(self, self.cache, failed=kind is not None)  # noqa: SLF001 - as above
        self.cache = None
