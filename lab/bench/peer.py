"""vLLM's cache core as a peer to be measured beside ours, in a process of its own.

    with VllmPeer.start(python, timeout_s=180) as peer:
        timings = peer.round(tokens=131072, block=16, seed=7)

The peer runs `peer_vllm.py` with the Python of another environment and speaks JSON lines
over its stdin and stdout. The one rule: every wait has a deadline. A peer that does not
answer, dies or answers something else is ended, and `UnavailableError` says what happened.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import msgspec

from lab.bench import prompts
from lab.bench.index import PeerTimings
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

PEER_SCRIPT = Path(__file__).with_name("peer_vllm.py")

_CLOSE_S = 5.0
"""A peer without orders left ends at once; one that has not by then is killed."""
_ANSWER_LIMIT_BYTES = 1 << 16
"""An answer is a few hundred bytes; more without a newline is no answer."""


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    """The peer has imported vLLM and takes orders."""

    vllm: str
    hash: str


class Refusal(msgspec.Struct, frozen=True, tag_field="kind", tag="refusal"):
    """The peer cannot run, and says why."""

    reason: str


_Answer = Ready | Refusal | PeerTimings
_DECODER: msgspec.json.Decoder[_Answer] = msgspec.json.Decoder(_Answer)


class VllmPeer:
    """A running peer; made by `start`, ended by leaving the `with` block."""

    def __init__(
        self, process: subprocess.Popen[bytes], errors: BinaryIO, timeout_s: float
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._orders = process.stdin
        self._answers = process.stdout
        self._errors = errors
        self.timeout_s = timeout_s
        self._received = b""
        self.vllm_version = ""
        self.hash_name = ""

    @classmethod
    def start(
        cls, python: Path | str, *, timeout_s: float = 180.0, script: Path = PEER_SCRIPT
    ) -> Self:
        """Starts the peer and waits until it has imported vLLM.

        Args:
            python: The interpreter of an environment that has vLLM.
            timeout_s: How long the start, and later each round, may take.
            script: What the interpreter runs; tests have peers of their own.

        Raises:
            UnavailableError: It cannot run here, or did not answer in time.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: must be positive, got {timeout_s}")
        with contextlib.ExitStack() as on_failure:
            # Its log goes to a file, not a pipe: nobody reads it until the peer has died, and
            # a full pipe would stop it.
            errors = on_failure.enter_context(tempfile.TemporaryFile())
            peer = cls(_spawn(python, script, errors), errors, timeout_s)
            on_failure.callback(peer.close)
            peer._greet()
            on_failure.pop_all()
        return peer

    def round(
        self,
        *,
        tokens: int,
        block: int,
        seed: int,
        source: Literal["list", "buffer"] = "list",
        blocks: int | None = None,
    ) -> PeerTimings:
        """Has the peer do one round of work on a fresh cache and returns what it took.

        Args:
            tokens: Length of the prompt, a multiple of `block`.
            block: Tokens per block.
            seed: Names the prompt; `draw_tokens(seed, tokens)` is the same one here.
            source: Whether the prompt comes as a list, or as a buffer to convert first.
            blocks: Blocks in the pool; as many as the prompt has unless told.

        Raises:
            UnavailableError: It died, did not answer in time, or did other work.
        """
        wanted = tokens // block
        if tokens != wanted * block or wanted < 2:
            raise ValueError(f"tokens: need two or more whole blocks of {block}, got {tokens}")
        pool = wanted if blocks is None else blocks
        if pool < wanted:
            raise ValueError(f"blocks: the prompt alone has {wanted}, got {pool}")
        order = {"op": "round", "tokens": tokens, "block": block, "source": source}
        self._send(msgspec.json.encode({**order, "seed": seed, "blocks": pool}) + b"\n")
        timings = self._receive(f"a round of {tokens} tokens")
        if not isinstance(timings, PeerTimings):
            raise self._ended(f"answered a round with {timings}")
        expected = zlib.crc32(prompts.draw_tokens(seed, tokens).astype("<i4").tobytes())
        if timings.tokens_crc32 != expected:
            raise self._ended(f"worked on other tokens than seed {seed} draws")
        return timings

    def close(self) -> None:
        """Ends the peer, by force where it does not end by itself. Repeating it is harmless."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._answers.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _greet(self) -> None:
        match self._receive("its start"):
            case Ready(vllm=version, hash=name):
                self.vllm_version, self.hash_name = version, name
            case Refusal(reason=reason):
                raise self._ended(f"cannot run: {reason}")
            case PeerTimings():
                raise self._ended("answered before it was asked")

    def _send(self, order: bytes) -> None:
        # An order is far smaller than a pipe, and the peer has none unread: this cannot block.
        try:
            self._orders.write(order)
        except BrokenPipeError as problem:
            raise self._ended(f"takes no more orders{self._last_words()}") from problem

    def _receive(self, wait: str) -> _Answer:
        """The next answer, within the deadline."""
        line = self._receive_line(wait)
        try:
            return _DECODER.decode(line)
        except msgspec.MsgspecError as problem:
            raise self._ended(f"answered no answer: {line[:80]!r} ({problem})") from problem

    def _receive_line(self, wait: str) -> bytes:
        poller = select.poll()
        poller.register(self._answers, select.POLLIN)
        give_up = time.monotonic() + self.timeout_s
        while b"\n" not in self._received:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise self._ended(f"did not answer within {self.timeout_s:g} s ({wait})")
            part = os.read(self._answers.fileno(), _ANSWER_LIMIT_BYTES)
            if not part:
                raise self._ended(f"died during {wait}{self._last_words()}")
            self._received += part
            if len(self._received) > _ANSWER_LIMIT_BYTES:
                raise self._ended(f"wrote {len(self._received)} bytes without an answer")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ended(self, what: str) -> UnavailableError:
        """Kills the peer and returns the error that tells why."""
        self._kill()
        return UnavailableError(f"the vLLM peer {what}")

    def _last_words(self) -> str:
        """What a dead peer wrote last to its log."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    def _kill(self) -> None:
        """Ends the peer and all it started; it leads a session of its own."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_CLOSE_S)


def _spawn(python: Path | str, script: Path, errors: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            # -P: the script's folder has modules whose names vLLM may want for its own.
            [python, "-P", script, prompts.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as problem:
        raise UnavailableError(f"cannot start the vLLM peer: {problem}") from problem
