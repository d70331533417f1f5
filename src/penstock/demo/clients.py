"""Several clients that talk at the same time, each in several conversations by turns.

A client begins when the one before it has heard its first token, as people do not all come at
once; from then on each goes on as soon as it has its answer.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.demo.asking import ANSWER_S, ask
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.demo.asking import Turn
    from penstock.demo.chats import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How a round of conversations is held."""

    address: str
    clients: int
    max_tokens: int
    cache: str = "use"
    said: Mapping[tuple[str, int], str] | None = None
    """Answers of an earlier round by chat and turn: with them, the same prompts are sent again,
    whatever is answered this time."""


def hold(talk: Talk, chats: Sequence[Chat], told: Callable[[Turn], None]) -> list[Turn]:
    """Holds all conversations to their end; `told` hears of each turn, in any thread.

    Raises:
        UnavailableError: a client was not answered.
    """
    begun = [threading.Event() for _ in range(talk.clients + 1)]
    begun[0].set()
    with ThreadPoolExecutor(talk.clients) as pool:
        asked = [
            pool.submit(
                _talk, talk, chats[number :: talk.clients], begun[number : number + 2], number, told
            )
            for number in range(talk.clients)
        ]
        return [turn for each in asked for turn in each.result()]


def _talk(
    talk: Talk,
    chats: Sequence[Chat],
    begun: Sequence[threading.Event],
    client: int,
    told: Callable[[Turn], None],
) -> list[Turn]:
    mine, next_one = begun
    turns: list[Turn] = []
    answers: dict[str, tuple[str, ...]] = {chat.name: () for chat in chats}
    try:
        if not mine.wait(ANSWER_S):
            raise UnavailableError(f"client {client} had to wait for its turn for {ANSWER_S} s")
        for number in range(max((len(chat.questions) for chat in chats), default=0)):
            for chat in chats:
                turn = ask(
                    talk.address,
                    chat.messages(answers[chat.name]),
                    chat=chat.name,
                    number=number,
                    client=client,
                    max_tokens=talk.max_tokens,
                    cache=talk.cache,
                    on_first=next_one.set,
                )
                told(turn)
                turns.append(turn)
                said = turn.text if talk.said is None else talk.said[chat.name, number]
                answers[chat.name] += (said,)
    finally:
        # Whatever happened, nobody waits for this client.
        next_one.set()
    return turns
