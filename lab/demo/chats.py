"""Clients that talk in turns: several tenants, shared system prompts, all drawn from a seed.

A chat is a system prompt, then a message of the user and an answer, turn after turn. Each turn's
prompt is everything said so far, so most of it was computed before. Clients of one tenant share
system prompts; two tenants that use the same words still share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.demo.toy_model import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

SYSTEM_TOKENS = (180, 260)
"""From short to long; none ends with a block, as real ones do not."""
MESSAGE_TOKENS = (16, 90)
REPLY_TOKENS = (16, 48)
THINKING_STEPS = (5, 120)
"""A user thinks for so many steps of the engine before the next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a user does once: think, then ask for so long an answer."""

    message: tuple[int, ...]
    reply_count: int
    thinking_steps: int


@dataclass(slots=True, kw_only=True, eq=False)
class Chat:
    """One client's conversation, as far as it has come."""

    client: str
    tenant: str
    said: list[int]
    """Every token so far; at first, the system prompt."""
    turns: list[Turn]
    """Still to come."""
    turns_taken: int = 0
    ready_at: int = 0
    """The step of the engine at which the user has thought enough."""
    waiting: bool = field(default=False)
    """Whether the client waits for an answer."""

    @property
    def name(self) -> str:
        """The next request's name, for stories."""
        return f"{self.tenant}/{self.client} turn {self.turns_taken + 1}"


def draw_chats(rng: Random, *, clients: Mapping[str, Sequence[str]], turn_count: int) -> list[Chat]:
    """Chats of the given clients, by tenant; every tenant has the same system prompts."""
    systems = [_draw_tokens(rng, rng.randint(*SYSTEM_TOKENS)) for _ in range(2)]
    chats: list[Chat] = []
    for tenant, names in clients.items():
        for number, client in enumerate(names):
            system = systems[number % len(systems)]
            turns = [draw_turn(rng) for _ in range(turn_count)]
            chats.append(Chat(client=client, tenant=tenant, said=list(system), turns=turns))
    for chat in chats:
        chat.ready_at = rng.randrange(THINKING_STEPS[1])
    return chats


def draw_turn(rng: Random) -> Turn:
    """What a user says next."""
    return Turn(
        message=_draw_tokens(rng, rng.randint(*MESSAGE_TOKENS)),
        reply_count=rng.randint(*REPLY_TOKENS),
        thinking_steps=rng.randint(*THINKING_STEPS),
    )


def _draw_tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
