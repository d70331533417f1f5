"""A long prompt whose prefix another engine has computed: time to its first token, on CPUs.

| side       | what it does                                                             |
|------------|--------------------------------------------------------------------------|
| `computed` | an engine computes a prompt of that length                               |
| `redis`    | it finds the prefix in a Redis                                           |
| `peers`    | it finds the prefix in the host memory of the other engine, mapped       |
| `peers tcp`, `peers nixl` | the same as from another machine, encrypted or by NIXL    |

Every round begins with new engines, whose device and host memory are empty, and that have loaded a
short prefix. The engine that has
computed the prefix is idle meanwhile.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from lab.bench.engine_clients import Clients, prompt
from lab.bench.engine_model import EIGHT_B, Model
from lab.bench.engine_parts import ratio_of_rounds
from lab.bench.measure import collector_paused, summarize
from lab.bench.peer_blocks import PEERS as RATE_SIDES
from lab.bench.store_servers import StoreServers, values_in_redis
from lab.bench.vllm_child import free_port
from penstock.errors import UnavailableError
from penstock_serve.engine.scheduler import SchedulerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.bench.report import BenchReport

TOKENS = 8192
QUESTION_TOKENS = 32
SHORT_TOKENS = 256
"""Of a prefix that is loaded first."""
SETTLED_S = 1.0
BLOCK_TOKENS = 64
ARCHITECTURE = replace(
    EIGHT_B,
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=8,
    head_dim=64,
    intermediate=512,
    vocabulary=997,
)
SETTINGS = SchedulerSettings(step_tokens=2048, step_requests=2, steps_in_flight=1)
PATIENCE_S = 120.0
FOUND_SHARE = 0.98
PEERS = {side: transport for side, transport in RATE_SIDES.items() if side != "peers unix"}
SOONER_MIN = 1.0


class _Side:
    """Where an engine finds the prefix."""

    def __init__(self, name: str, model: Model, keys: list[str], tokens: int) -> None:
        self.name, self._model, self._keys = name, model, keys
        self._blocks = -(-(tokens + SHORT_TOKENS + 2 * QUESTION_TOKENS) // BLOCK_TOKENS) + 2

    def open(self, stack: ExitStack, number: int) -> Clients:
        """The first engine (0), which computes the prefix, or the second."""
        below = f'name = "shared", ask_ms = 10000, timeout_s = 60, {self._keys[number]}'
        engine = self._model.engine(
            block_tokens=BLOCK_TOKENS,
            blocks=self._blocks,
            host_blocks=2 * self._blocks,
            settings=SETTINGS,
            load_gate="off",
            below=below,
        )
        clients = Clients(stack.enter_context(engine))
        _until(clients.engine.cache.health, lambda health: health.ok, [clients])
        return clients


def _until(ask: Callable[[], object], done: Callable[..., bool], stepped: list[Clients]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done(found := ask()):
        if time.monotonic() > deadline:
            raise UnavailableError(f"bench peer-blocks: it stays {found}")
        for each in stepped:
            each.engine.cache.wait(time.monotonic() + 0.05)
            each.step()


def _listed(clients: Clients) -> int:
    store = clients.engine.cache.statistics().tiers[-1].store
    return 0 if store is None else store.blocks


def run_peer_first_token(report: BenchReport, *, rounds: int, tokens: int = TOKENS) -> None:
    """Adds rows and ratios.

    Raises:
        UnavailableError: the prefix does not come, or redis-server is not installed.
    """
    model = Model(ARCHITECTURE, device="cpu", dtype=torch.float32)
    random, words = Random(tokens), ARCHITECTURE.vocabulary
    prefix, short = (prompt(random, count, words) for count in (tokens, SHORT_TOKENS))
    all_blocks = (tokens + SHORT_TOKENS) // BLOCK_TOKENS
    found: dict[str, list[float]] = {side: [] for side in ("computed", "redis", *PEERS)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        servers = stack.enter_context(StoreServers(folder, Path(sys.executable)))
        port = servers.start_redis()
        redis = _Side(
            "redis", model, 2 * [f'kind = "redis", url = "redis://127.0.0.1:{port}"'], tokens
        )
        report.progress("computing a prefix")
        with ExitStack() as first:
            clients = redis.open(first, 0)
            clients.answer(short, max_tokens=1)
            clients.answer(prefix, max_tokens=1)
            _until(lambda: values_in_redis(port), lambda count: count >= all_blocks, [clients])
        lenders: dict[_Side, Clients] = {}
        for name, transport in PEERS.items():
            side = _Side(name, model, _peer_keys(transport), tokens)
            lenders[side] = _compute_there(side, stack, short, prefix)
        sides = [redis, *lenders]
        for number in range(-1, rounds):  # The first one compiles what the others need.
            report.progress(f"first token: round {number + 1} of {rounds}")
            question = prompt(random, QUESTION_TOKENS, words)
            for side in sides if number % 2 else sides[::-1]:
                with ExitStack() as second:
                    reader = side.open(second, 1)
                    if side in lenders:
                        _wait_until_listed(lenders[side], reader, all_blocks)
                    _open_connections(reader, [*short, *question])
                    with collector_paused():
                        took_s = {side.name: _found_s(reader, [*prefix, *question], tokens)}
                        if side.name == "peers":
                            took_s["computed"] = _computed_s(reader, prompt(random, tokens, words))
                for name, seconds in took_s.items() if number >= 0 else ():
                    found[name].append(seconds)
    _add_rows(report, tokens, tokens * model.token_bytes, found)


def _peer_keys(transport: str) -> list[str]:
    """Of the tiers of two engines."""
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    return [
        f'kind = "peers", listen = "{each}", peers = "{",".join(places)}", '
        f'transport = "{transport}"'
        for each in places
    ]


def _compute_there(side: _Side, stack: ExitStack, *prompts: list[int]) -> Clients:
    """The first engine of a side, which has computed prompts.

    Unless others are to map its memory, they find none of its sockets: as on another machine.
    """
    runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = runtime
    try:
        lender = side.open(stack, 0)
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
    for tokens in prompts:
        lender.answer(tokens, max_tokens=1)
    lender.settle()
    # Its own processes have connected by now.
    for path in [] if side.name == "peers" else Path(runtime).rglob("*"):
        if path.is_socket():
            path.unlink()
    return lender


def _wait_until_listed(lender: Clients, reader: Clients, blocks: int) -> None:
    _until(lambda: _listed(reader), lambda count: count >= blocks, [lender, reader])


def _open_connections(reader: Clients, tokens: list[int]) -> None:
    """An engine that has just started opens its connections with its first loads."""
    _found_s(reader, tokens, SHORT_TOKENS)
    ends = time.monotonic() + SETTLED_S
    _until(time.monotonic, lambda now: now >= ends, [reader])


def _found_s(clients: Clients, tokens: list[int], found: int) -> float:
    asked = clients.answer(tokens, max_tokens=1)
    clients.settle()
    if sum(asked.cached) < FOUND_SHARE * found:
        raise UnavailableError(f"{asked.cached} of {found} tokens were found, by tier")
    return asked.first_token_s


def _computed_s(clients: Clients, tokens: list[int]) -> float:
    asked = clients.ask(tokens, max_tokens=1, reuse=False, store=False)
    clients.until(asked)
    clients.settle()
    return asked.first_token_s


def _add_rows(report: BenchReport, tokens: int, nbytes: int, found: dict[str, list[float]]) -> None:
    for side, values in found.items():
        report.add_row(
            bench="peer-blocks",
            side=side,
            params={"tokens": tokens, "bytes": nbytes},
            metric="first token",
            unit="s",
            summary=summarize(values),
        )
    for side in PEERS:
        for theirs in ("computed", "redis"):
            report.add_ratio(
                f"prefix of {side}: times sooner than {theirs}",
                ratio_of_rounds(found[theirs], found[side]),
                at_least=SOONER_MIN,
            )
