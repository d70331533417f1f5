"""A replay of a trace that is far larger than memory should be: does it stay flat, and how fast?

    python -m lab.bench.long_trace [TOUCHES [BLOCK_TOKENS]]

A second process writes conversations in the format of a recording into a pipe, and this one plays
them through a device of 40 GiB over a host tier of 128 GiB, as `penstock replay` does without
`--config`, the bound included. At 1, 3, 10 and 30 million touches, and at the end, it prints the
touches so far, how many a second of its own CPU time, and the most memory that it ever had.
BLOCK_TOKENS is 16 if not given; with 512, requests have about as many blocks as in the shipped
traces.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from penstock.cli.replay import DEVICE_GIB, HOST_GIB, KV_BYTES
from penstock.config import parse_config
from penstock.replay.report import report_on
from penstock.replay.simulation import GIB, BestPossible, Replay, sized_cache
from penstock.replay.trace import TraceReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.replay.trace import TraceRequest

TOUCHES = 30_000_000
MARKS = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
PROMPT_TOKENS = 4_096
"""Of a system prompt: each conversation has one of a few."""
TURN_TOKENS = (512, 8_192)
"""What a turn adds, at least and at most."""
KINDS = 4
"""Of system prompts."""
CONTEXT_TOKENS = 32_768
"""A conversation ends before its prompt is longer than this."""
OPEN = 200
"""Conversations that go on at a time: with the longest prompts, twice what both tiers hold."""


def write(touches: int, block_tokens: int) -> None:
    """Writes requests until they have so many blocks: as a stream, whatever their number."""
    draw = random.Random(18)
    tokens, names, conversations = [0] * OPEN, [[""]] * OPEN, [0] * OPEN
    started, written, number = KINDS, 0, 0
    while written < touches:
        place = draw.randrange(OPEN)
        if not 0 < tokens[place] <= CONTEXT_TOKENS:
            started += 1
            kind = draw.randrange(KINDS)
            tokens[place], conversations[place] = PROMPT_TOKENS, started
            names[place] = _names(kind, 0, PROMPT_TOKENS // block_tokens)
        tokens[place] += draw.randint(*TURN_TOKENS)
        chain = names[place]
        chain += _names(conversations[place], len(chain), tokens[place] // block_tokens)
        sys.stdout.write(
            f'{{"timestamp":{number * 100},"input_length":{tokens[place]},'
            f'"block_tokens":{block_tokens},"blocks":"{"".join(chain)}"}}\n'
        )
        number += 1
        written += len(chain)


def _names(of: int, first: int, end: int) -> list[str]:
    return [f"{of:08x}{block:08x}" for block in range(first, end)]


def play(touches: int, block_tokens: int) -> None:
    """Replays what a second process writes, and prints how it goes."""
    block_bytes = KV_BYTES * block_tokens
    config = parse_config(
        f'version = 1\n[model]\nname = "example"\n'
        f"[cache]\nblock_tokens = {block_tokens}\nblocks = {DEVICE_GIB * GIB // block_bytes}\n"
        f'[[tiers]]\nname = "host"\nkind = "memory"\nblocks = {HOST_GIB * GIB // block_bytes}\n'
    )
    player = Replay(sized_cache(config, token_bytes=KV_BYTES), bound=BestPossible())
    command = [sys.executable, "-m", "lab.bench.long_trace"]
    with subprocess.Popen(
        [*command, str(touches), str(block_tokens), "write"], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        requests = TraceReader(config).read(f"/dev/fd/{writer.stdout.fileno()}")
        player.run(_watched(requests, player))
    _print_row(player, "played")
    report = report_on(player, traces=["long"])
    _print_row(player, "reported")
    assert report.best is not None
    sys.stdout.write(
        f"found {report.token_rate:.2%} of prompt tokens, best possible "
        f"{report.best.token_rate:.2%}\n"
    )


def _watched(requests: Iterator[TraceRequest], player: Replay) -> Iterator[TraceRequest]:
    marks = list(MARKS)
    for request in requests:
        if marks and player.tally.blocks >= marks[0]:
            _print_row(player, f"at {marks.pop(0):,}")
        yield request


def _print_row(player: Replay, when: str) -> None:
    touches, cpu_s = player.tally.blocks, time.process_time()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(
        f"{when:14} {touches:12,} touches {player.tally.requests:9,} requests "
        f"{touches / cpu_s:9,.0f} touches a CPU second {peak_mib:6.0f} MiB at most\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:3]]
    role = write if sys.argv[3:] == ["write"] else play
    role(numbers[0] if numbers else TOUCHES, numbers[1] if len(numbers) > 1 else 16)
