"""The servers of `lab bench vllm --handoff`, in pairs, and the ways to ask them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from random import Random
from threading import Event
from typing import TYPE_CHECKING

from lab.bench.vllm_model import VOCABULARY
from lab.bench.vllm_proxy import AtOnce, Prompt, alone, in_turn, prefilled
from lab.bench.vllm_servers import BLOCK_TOKENS, nixl_settings, penstock_settings, plain_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lab.bench.vllm_proxy import Answer
    from lab.bench.vllm_servers import VllmForks, VllmServer

PLAIN, NIXL, OURS, AT_ONCE = "plain", "nixl", "penstock", "penstock-at-once"
ANSWER_TOKENS = 4
IDLE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to have a prompt computed and answered."""

    name: str
    ask: Callable[[Prompt], Answer]
    servers: Mapping[str, VllmServer]
    """Those that take part, by their role."""
    received: Callable[[], float] | None = None
    """How many prompts were handed over so far."""


class Pairs:
    """The servers of all sides, all up from the start."""

    def __init__(self, forks: VllmForks, *, peer: bool) -> None:
        """Starts them, and waits until they answer.

        Args:
            forks: Starts servers.
            peer: Whether there is a pair with NixlConnector.

        Raises:
            UnavailableError: one does not start.
        """
        cores = sorted(os.sched_getaffinity(0))
        self._forks = forks
        self._prefill_core, self._decode_core = cores[-1], cores[0]
        self.names = [NIXL, OURS] if peer else [OURS]
        self.plain = forks.start(plain_settings(self._prefill_core))
        self.prefill: dict[str, VllmServer] = {}
        self.decode: dict[str, VllmServer] = {}
        for name in self.names:
            settings = nixl_settings if name == NIXL else penstock_settings
            self.decode[name] = forks.start(settings("kv_consumer", self._decode_core))
            self.start_prefill(name)
        for server in (self.plain, *self.prefill.values(), *self.decode.values()):
            server.wait_ready()

    def start_prefill(self, name: str) -> None:
        """Starts the prefill server of a pair, again if it was killed; it is not ready yet."""
        settings = nixl_settings if name == NIXL else penstock_settings
        self.prefill[name] = self._forks.start(settings("kv_producer", self._prefill_core))

    def begin_turn(self, side: str) -> None:
        """From now on a side is measured. NIXL's threads poll while idle: they run in its turn."""
        for server in (self.prefill.get(NIXL), self.decode.get(NIXL)):
            if server is not None and side == NIXL:
                server.resume()
            elif server is not None:
                server.pause()

    def idle_share(self, pair: str) -> float:
        """CPU time that the servers of a pair take while nothing is asked, a second."""
        self.begin_turn(pair)
        servers = self.prefill[pair], self.decode[pair]
        before_s = sum(sum(each.thread_seconds().values()) for each in servers)
        began = time.monotonic()
        # Nothing happens that could be waited for.
        Event().wait(IDLE_S)
        after_s = sum(sum(each.thread_seconds().values()) for each in servers)
        return (after_s - before_s) / (time.monotonic() - began)

    def asking(self, name: str) -> Callable[[Prompt], Answer]:
        """Asks a pair as proxies do; also after its prefill server was started again."""
        return lambda prompt: in_turn(self.prefill[name], self.decode[name], prompt)

    def at_once(self) -> Callable[[Prompt], Answer]:
        """Asks both servers of our pair at the same time."""
        reported = prefilled(self.prefill[OURS], draw_prompt("address", tokens=BLOCK_TOKENS))
        ask = AtOnce(reported["penstock"]["address"])
        return lambda prompt: ask(self.prefill[OURS], self.decode[OURS], prompt)

    def received(self, name: str) -> float:
        """How many prompts were handed over to a decode server so far."""
        metric = {
            NIXL: "vllm:nixl_bytes_transferred_count",
            OURS: "vllm:penstock_prompts_received_total",
        }
        return self.decode[name].counted(metric[name])

    def sides(self) -> dict[str, Side]:
        """All ways to ask."""
        plain = Side(
            name=PLAIN,
            ask=lambda prompt: alone(self.plain, prompt),
            servers={"prefill": self.plain},
        )
        sides = [plain, *(self._side(name, name) for name in self.names)]
        sides.append(self._side(AT_ONCE, OURS, ask=self.at_once()))
        return {side.name: side for side in sides}

    def _side(self, name: str, pair: str, *, ask: Callable[[Prompt], Answer] | None = None) -> Side:
        return Side(
            name=name,
            ask=ask or self.asking(pair),
            servers={"prefill": self.prefill[pair], "decode": self.decode[pair]},
            received=lambda: self.received(pair),
        )


def draw_prompt(salt: str, *, tokens: int, answer_tokens: int = ANSWER_TOKENS) -> Prompt:
    """A prompt that depends on its salt alone, up to the first `~`, and shares no prefix."""
    draw = Random(salt.partition("~")[0])
    drawn = [draw.randrange(10, VOCABULARY) for _ in range(tokens)]
    return Prompt(tokens=drawn, answer_tokens=answer_tokens, salt=salt)
