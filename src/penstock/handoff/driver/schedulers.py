"""The drivers of the two schedulers: what an engine's scheduler calls, with the clock filled in.

The one rule: every `Expect` carries all that a rank has to know of its prompt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.handoff.driver.party_driver import (
    CONTENT_BYTES_MAX,
    Content,
    PartyDriver,
    block_keys,
    encode_content,
    handoff_name,
    numbers,
    slot_numbers,
    whole_number,
)
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.grid import PART_BYTES_MIN
from penstock.handoff.protocol.prefill_scheduler import PrefillScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.handoff.driver.directory import Directory
    from penstock.handoff.driver.lines import Lines
    from penstock.handoff.protocol.effects import HandoffEnded
    from penstock.handoff.protocol.settings import HandoffSettings


class PrefillSchedulerDriver(PartyDriver[PrefillScheduler]):
    """The scheduler of a prefill engine."""

    def __init__(
        self,
        directory: Directory,
        lines: Lines,
        *,
        incarnation: int,
        settings: HandoffSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        engine = directory.prefill
        identity = directory.identity(engine.scheduler, incarnation)
        machine = PrefillScheduler(identity, settings, ranks=engine.rank_names)
        super().__init__(machine, lines, clock=clock)

    def submit(self, handoff: str, *, lease_s: float | None = None) -> None:
        """Offers the KV of a prompt; see `PrefillScheduler.submit`."""
        name = handoff_name(handoff)
        self._carry_out(self.machine.submit(name, self._clock(), lease_s=lease_s))

    def first_token(
        self, handoff: str, tokens: tuple[int, ...], drafts: tuple[int, ...] = ()
    ) -> None:
        """The prompt is computed; see `PrefillScheduler.first_token`."""
        tokens, drafts = numbers("tokens", tokens), numbers("drafts", drafts)
        now = self._clock()
        self._carry_out(self.machine.first_token(handoff, now, tokens=tokens, drafts=drafts))

    def cancel(self, handoff: str, *, why: str = "cancelled") -> None:
        """The request is aborted; see `PrefillScheduler.cancel`."""
        self._carry_out(self.machine.cancel(handoff, self._clock(), why=why))


class DecodeSchedulerDriver(PartyDriver[DecodeScheduler]):
    """The scheduler of a decode engine."""

    def __init__(
        self,
        directory: Directory,
        lines: Lines,
        *,
        incarnation: int,
        settings: HandoffSettings,
        clock: Callable[[], float] = time.monotonic,
        part_bytes_min: int = PART_BYTES_MIN,
    ) -> None:
        engine = directory.decode
        identity = directory.identity(engine.scheduler, incarnation)
        machine = DecodeScheduler(identity, settings, ranks=engine.rank_names)
        super().__init__(machine, lines, clock=clock)
        self._directory = directory
        self._part_bytes_min = part_bytes_min
        self._contents: dict[str, dict[str, bytes]] = {}
        """Of the handoffs that are under way, as they are attached: for each rank by name."""

    def submit(
        self,
        handoff: str,
        *,
        token_count: int,
        slots: Mapping[str, Sequence[int]],
        keys: Sequence[bytes],
        cached_tokens: int | Mapping[str, int] = 0,
        epoch: int = 1,
        patience_s: float | None = None,
        part_tokens: int | None = None,
    ) -> None:
        """Claims the part of a prompt that is missing here. Ends with one `HandoffEnded`.

        Raises `TypeError`: an argument is of another kind. ValueError, UnavailableError,
        CapacityError: see `DecodeScheduler.submit`.
        """
        handoff = handoff_name(handoff)
        token_count = whole_number("token_count", token_count, first=1)
        by_rank = self._by_rank(cached_tokens)
        cached = by_rank if isinstance(cached_tokens, Mapping) else int(cached_tokens)
        epoch = whole_number("epoch", epoch, first=1)
        if part_tokens is not None:
            part_tokens = whole_number("part_tokens", part_tokens, first=1)
        taken = {name: slot_numbers(f"slots of {name!r}", given) for name, given in slots.items()}
        wanted = self._directory.wanted(
            cached_tokens=cached,
            token_count=token_count,
            berth_bytes=self.machine.settings.bounds.berth_bytes,
            part_bytes_min=self._part_bytes_min,
            part_tokens=part_tokens,
        )
        self._require_slots(taken, by_rank, token_count)
        contents = self._contents_of(block_keys(keys), by_rank, token_count)
        effects = self.machine.submit(
            handoff,
            self._clock(),
            prefill=self._directory.prefill.scheduler,
            wanted=wanted,
            epoch=epoch,
            slots=taken,
            patience_s=patience_s,
        )
        self._contents[handoff] = contents
        self._carry_out(effects)

    def _by_rank(self, cached_tokens: int | Mapping[str, int]) -> dict[str, int]:
        if not isinstance(cached_tokens, Mapping):
            return dict.fromkeys(self.machine.ranks, whole_number("cached_tokens", cached_tokens))
        return {
            name: whole_number(f"cached_tokens of {name!r}", cached_tokens.get(name))
            for name in self.machine.ranks
        }

    def _require_slots(
        self,
        slots: Mapping[str, Sequence[int]],
        cached_tokens: Mapping[str, int],
        token_count: int,
    ) -> None:
        """Refuses what is not one slot of its own for each missing block."""
        size = self._directory.plan.target_tokens
        for name, given in slots.items():
            cached = cached_tokens.get(name, 0)
            missing = 0 if cached == token_count else -(-token_count // size) - cached // size
            different = len(set(given))
            if not len(given) == different == missing:
                raise ValueError(
                    f"slots of {name!r} are {len(given)}, {different} of them different, must be "
                    f"{missing} different ones"
                )

    def _contents_of(
        self, keys: tuple[bytes, ...], cached_tokens: Mapping[str, int], token_count: int
    ) -> dict[str, bytes]:
        """What each rank has to know of a prompt, as it is attached."""
        size = self._directory.plan.source_tokens
        block_count = -(-token_count // size)
        if len(keys) != block_count:
            raise ValueError(
                f"keys has {len(keys)} keys, {token_count} tokens in blocks of {size} need "
                f"{block_count}"
            )
        contents: dict[int, bytes] = {}
        for cached in set(cached_tokens.values()):
            missing = keys[cached // size :] if cached < token_count else ()
            content = encode_content(Content(token_count=token_count, keys=missing))
            if len(content) > CONTENT_BYTES_MAX:
                raise ValueError(
                    f"keys have {len(content)} bytes together, must be at most {CONTENT_BYTES_MAX}"
                )
            contents[cached] = content
        return {name: contents[cached] for name, cached in cached_tokens.items()}

    def cancel(self, handoff: str, *, why: str = "cancelled") -> None:
        """Nobody wants it any more; see `DecodeScheduler.cancel`."""
        self._carry_out(self.machine.cancel(handoff, self._clock(), why=why))

    def withdraw(self, handoff: str) -> None:
        """Gives this claim up; see `DecodeScheduler.withdraw`."""
        self._carry_out(self.machine.withdraw(handoff, self._clock()))

    def _attach(self, message: msg.AnyMessage) -> bytes:
        if not isinstance(message, msg.Expect):
            return b""
        return self._contents.get(message.handoff, {}).get(message.target.name, b"")

    def _over(self, ended: HandoffEnded) -> None:
        del self._contents[ended.handoff]
