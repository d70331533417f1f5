"""The prompts of one `Llama`: what `penstock.llama_cpp.open` returns.

    cache[prompt]                      a state with more of it than Llama has, or KeyError
    cache[prompt + answer] = state     what Llama does when it has answered

Of a state, logits are kept with `logits_all` alone: `echo` reads those of the prompt. Without it
nothing ever writes them, and they are nine tenths of the bytes. The last token of a prompt is
computed again after any restore, so no answer needs what was kept of it.

The one rule: Llama lets errors of its cache end the call, so each ends here, as a line of the
report. The seed of a state is Llama's own, or answers would differ from those without the cache.
"""

from __future__ import annotations

import glob
import re
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Llava15ChatHandler

import penstock
from penstock.cache.explain import MissReason
from penstock.connectors.base.report import PromptReport
from penstock.connectors.llama_cpp.states import StateFolder, common_tokens
from penstock.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_cpp import Llama, LlamaState
    from numpy.typing import NDArray

    from penstock import Config

FOLDER = "llama_cpp"
"""Below the path of the disk tier, whose own files may lie beside it."""
HEADER_BYTES = 16 << 20
"""Of a model's file: its header, with sizes and vocabulary, and some weights."""
SHARD = re.compile(r"(.+)-\d{5}(-of-\d{5}\.gguf)")
NO_MATTER = frozenset({"n_batch", "n_ubatch", "n_threads", "n_threads_batch", "no_perf"})
"""Settings of a context that change nothing in a state but the order of sums."""
NOT_CACHED = (
    (llama_cpp.llama_model_is_recurrent, "recurrent layers"),
    (llama_cpp.llama_model_is_hybrid, "recurrent layers"),
    (llama_cpp.llama_model_n_swa, "sliding windows"),
    (llama_cpp.llama_model_has_encoder, "an encoder"),
)
OTHER_MODEL = "the cache was opened for another Llama: open one for each"
CHANGED = "the model's file was changed since it was opened: load it again, and open another cache"


def open(  # noqa: A001 - read as penstock.llama_cpp.open, which is what it does
    llm: Llama, config: Config | Path | str
) -> StateCache:
    """Opens a cache of states for `llm.set_cache`.

    Args:
        llm: It alone may use the cache. If its states cannot be cached, the cache does nothing, and
            its report says why.
        config: A configuration, or the path of a TOML file with one. Folder and size are those of
            its disk. With `model.weights_version`, the time of the model's file does not count.

    Raises:
        ConfigError: the configuration is wrong, or has no disk.
        ValueError: `llm` is no Llama.
    """
    if not isinstance(llm, llama_cpp.Llama):
        raise ValueError(  # noqa: TRY004 - as all wrong arguments
            f"llm is a {type(llm).__name__}, must be a Llama of llama_cpp"
        )
    if not isinstance(config, penstock.Config):
        config = penstock.load_config(config)
    return StateCache(llm, config)


class StateCache:
    """States of one model in the folder of a disk tier, with the calls of `BaseLlamaCache`."""

    def __init__(self, llm: Llama, config: Config) -> None:
        disk = next((each for each in config.tier_kinds if each.name == "disk"), None)
        if disk is None:
            raise ConfigError("tiers", "have none of kind 'disk': states are kept in its folder")
        if disk.options["key_file"]:
            raise ConfigError("key_file", "is set, but states of llama.cpp are not encrypted")
        self.capacity_bytes = int(disk.gib * (1 << 30))
        self._folder = StateFolder(Path(str(disk.options["path"])) / FOLDER, self.capacity_bytes)
        self._least = config.cache.block_tokens
        self._report = PromptReport()
        self._llm = ref(llm)
        self._unusable = _why_not(llm)
        try:
            if not self._unusable:
                self._files = _files_of(llm)
                self._marks = _marks_of(self._files)
                self._key = _key_of(llm, config, self._files)
                self._folder.files()
        except (OSError, UnavailableError) as error:
            self._unusable = self._line(error)
        if self._unusable:
            self._report.leave_out(self._unusable, prompts=0)

    @property
    def cache_size(self) -> int:
        """Bytes of all states in the folder."""
        return sum(each.st_size for each in self._folder.files().values())

    def report(self) -> PromptReport:
        """Hits, misses with their reasons, and bytes so far: to be printed."""
        try:
            size, room = self.cache_size / 1e6, self.capacity_bytes / 1e6
            line = f"folder: {size:,.1f} of {room:,.1f} MB"
        except (OSError, UnavailableError) as error:
            line = f"folder: {self._line(error)}"
        return replace(self._report, tiers=(line,))

    def __contains__(self, key: Sequence[int]) -> bool:
        with suppress(OSError, UnavailableError):
            return not self._why() and bool(self._folder.find(self._key, _tokens_of(key)))
        return False

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        why, llm, found = self._why(), self._llm(), None
        try:
            if llm is not None and not why:
                found = self._load(llm, _tokens_of(key))
        except (OSError, UnavailableError) as error:
            why = self._line(error)
        if why:
            self._report.leave_out(why, prompts=1)
        if found is None:
            raise KeyError(why or "no state has more of this prompt")
        return found

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        llm = self._llm()
        if llm is None or self._why():
            return  # It was counted when the prompt was looked up.
        tokens = llm.input_ids[: llm.n_tokens]
        if not np.array_equal(value.input_ids[: value.n_tokens], tokens):
            self._unusable = OTHER_MODEL
        elif len(tokens) >= self._least:
            logits = value.scores[: len(tokens) if llm._logits_all else 0]  # noqa: SLF001
            try:
                size = self._folder.write(self._key, tokens, value.llama_state, logits)
            except (OSError, UnavailableError) as error:
                self._report.leave_out(self._line(error), prompts=1)
            else:
                self._report.bytes_saved += size

    def _line(self, error: OSError | UnavailableError) -> str:
        if not isinstance(error, OSError):
            return str(error)
        folder = Path(error.filename).parent if error.filename else self._folder.path
        return f"{folder}: {error.strerror}"

    def _why(self) -> str:
        """Why the cache cannot be used; empty if it can."""
        llm = self._llm()
        if not self._unusable and (llm is None or llm.cache is not self):
            return OTHER_MODEL
        with suppress(OSError):
            if self._unusable or _marks_of(self._files) == self._marks:
                return self._unusable
        self._unusable = CHANGED
        return CHANGED

    def _load(self, llm: Llama, tokens: NDArray[np.intc]) -> LlamaState | None:
        """The state with most of a prompt, if it has enough more of it than Llama itself."""
        held = common_tokens(llm.input_ids[: llm.n_tokens], tokens)
        damaged, found, cached = self._folder.damaged, None, 0
        miss = MissReason.NEVER_SEEN.value
        for reach, name in self._folder.find(self._key, tokens):
            if reach < held + self._least:
                # Almost all prompts share a token with others: that it begins a text.
                if reach <= held and held >= self._least:
                    miss = "in memory"
                elif reach > held and reach >= min(self._least, len(tokens) - 1):
                    miss = MissReason.RECOMPUTE.value
                break
            found = self._folder.read(name)
            if found is not None:
                cached = min(reach, len(tokens) - 1)
                miss = "complete" if cached == len(tokens) - 1 else miss
                break
        miss = MissReason.CORRUPT.value if self._folder.damaged > damaged else miss
        self._report.found(tokens=len(tokens), cached=cached, miss=miss)
        if found is None:
            return None
        self._report.bytes_loaded += len(found.state) + found.logits.nbytes
        input_ids = np.full_like(llm.input_ids, -1)
        input_ids[: len(found.tokens)] = found.tokens
        logits = found.logits.reshape(-1, llm.scores.shape[1])
        return llama_cpp.LlamaState(
            input_ids=input_ids,
            scores=logits if len(logits) else np.zeros((1, 1), dtype=np.single),
            n_tokens=len(found.tokens),
            llama_state=found.state,
            llama_state_size=len(found.state),
            seed=llm._seed,  # noqa: SLF001 - another one would give other answers than no cache
        )


def _why_not(llm: Llama) -> str:
    """Why the states of a model cannot be cached; empty if they can."""
    name = llm.metadata.get("general.architecture", "the model")
    layers = [what for has, what in NOT_CACHED if has(llm.model)]
    layers += ["indexed attention"] * any(".attention.indexer." in key for key in llm.metadata)
    if layers:
        return f"{name} has {layers[0]}: its state may not be restored right"
    if isinstance(llm.chat_handler, Llava15ChatHandler):
        return "chat_handler takes images: KV depends on more than the tokens"
    return "embedding is set, must not be" if llm.context_params.embeddings else ""


def _files_of(llm: Llama) -> list[Path]:
    """All files of a model: its shards, and an adapter."""
    path = Path(llm.model_path).absolute()
    shard = SHARD.fullmatch(path.name)
    files = sorted(path.parent.glob(f"{glob.escape(shard[1])}-*{shard[2]}")) if shard else [path]
    return [*files, *([Path(llm.lora_path).absolute()] if llm.lora_path else [])]


def _marks_of(files: list[Path]) -> list[tuple[int, int]]:
    found = [path.stat() for path in files]
    return [(each.st_size, each.st_mtime_ns) for each in found]


def _key_of(llm: Llama, config: Config, files: list[Path]) -> bytes:
    """What a state depends on beside its tokens: weights, settings and the build of llama.cpp."""
    version, given = config.model.weights_version, llm.context_params
    pairs = [(name, getattr(given, name)) for name, _ in given._fields_ if name not in NO_MATTER]
    settings = [pair for pair in pairs if isinstance(pair[1], int | float)]
    also = (llama_cpp.__version__, llm.kv_overrides, llm.lora_scale, llm._logits_all)  # noqa: SLF001
    digest = blake2b(repr((settings, also)).encode(), digest_size=16)
    digest.update(Path(llama_cpp.llama_cpp._lib._name).read_bytes())  # noqa: SLF001 - its only name
    for path, (size, changed_at) in zip(files, _marks_of(files), strict=True):
        digest.update(f"{size} {'' if version else changed_at} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
    model = replace(config.model, weights_version=f"{version}@{digest.hexdigest()}")
    namespace = replace(config, model=model).namespace()
    return blake2b(namespace.encode(), digest_size=16).digest()


def _tokens_of(key: Sequence[int]) -> NDArray[np.intc]:
    return np.array(key, dtype=np.intc)
