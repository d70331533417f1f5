"""`lab bench shared-prefix`: a long prefix that one vLLM replica computed is asked of another.

| side                | the replicas share                                                     |
|---------------------|------------------------------------------------------------------------|
| `recompute`         | nothing: every prompt is computed                                      |
| `penstock redis`    | a Redis, each through its own store process                            |
| `lmcache redis`     | a Redis, each through its own LMCache server (its multiprocess mode)   |
| `penstock mooncake` | a Mooncake Store, whose memory another process lends                   |
| `vllm mooncake`     | a Mooncake Store, through vLLM's own MooncakeStoreConnector            |

The first replica of a side computes prompts, stores them and is killed, one side after the other.
Then the second replicas of all sides run together, and are asked for a prompt in turns: seconds to
the first token. Load-or-recompute is off, so that Penstock loads whatever is quicker.

The one rule: a side is compared only if it found the prefix and its log-probabilities are those of
who computed it. One that cannot run is a note that says why, and the others go on.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.bench.measure import summarize
from lab.bench.store_servers import StoreServers, values_in_mooncake, values_in_redis
from lab.bench.vllm_child import BLOCK_TOKENS
from lab.bench.vllm_engine import START_S, EngineProcess, ending_in_order
from lab.bench.vllm_model import HandoffModel
from lab.bench.vllm_shared_child import TAIL_TOKENS
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lab.bench.report import BenchReport

TOKENS = 16_384
PROMPTS = 3
LOGPROB_MAX = 1e-3
NUDGE_S = 0.25
"""Between requests that keep an engine at work while it stores: its connector gets a turn in
each step only."""
QUIET_S = 3.0
"""A store that has grown for so long no more has everything. Penstock and both peers write while
they have something to write."""
STORED_S = 240.0
NUDGE_SEED = 1_000_000
CHUNK_TOKENS = 256
"""LMCache's own default."""
RECOMPUTE = "recompute"
PEERS = {"penstock redis": "lmcache redis", "penstock mooncake": "vllm mooncake"}
"""Who does the same over the same kind of store."""
MODEL = """
import sys
from pathlib import Path
from lab.bench.vllm_model import HandoffModel, make_handoff_model
make_handoff_model(Path(sys.argv[1]), HandoffModel(positions=int(sys.argv[2])))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """What is measured."""

    python: Path
    """Of an environment with vLLM, and what the sides need."""
    model: Path
    tokens: int
    prompts: int

    @property
    def blocks(self) -> int:
        """Of a prefix."""
        return self.tokens // BLOCK_TOKENS

    @property
    def stored_mib(self) -> int:
        """What all prefixes take."""
        return self.prompts * self.tokens * HandoffModel().token_bytes >> 20


@dataclass(slots=True)
class SharingSide:
    """One side while it is measured."""

    name: str
    plan: SharedPlan
    folder: Path
    servers: StoreServers
    reported: dict[str, Any] = field(default_factory=dict)
    """What its replicas are told."""
    variables: dict[str, str] = field(default_factory=dict)
    count: Callable[[], int] | None = None
    """How many values its store holds."""
    computed: list[dict[str, float]] = field(default_factory=list)
    found: list[dict[str, float]] = field(default_factory=list)

    def start_replica(self, number: int) -> EngineProcess:
        """Starts one; the caller closes it.

        Raises:
            UnavailableError: it does not start.
        """
        reported = {"model": str(self.plan.model), "blocks": self.plan.blocks, **self.reported}
        if self.name == "lmcache redis":
            memory_gib = max(1.0, 2 * self.plan.stored_mib / 1024)
            reported["port"] = self.servers.start_lmcache(
                self.reported["redis"], memory_gib, chunk_tokens=CHUNK_TOKENS
            )
        # A store process of its own, as on another machine.
        runtime = self.folder / str(number)
        runtime.mkdir(mode=0o700)
        return EngineProcess(
            self.name,
            self.plan.python,
            reported,
            module="lab.bench.vllm_shared_child",
            variables={"XDG_RUNTIME_DIR": str(runtime), **self.variables},
        )


def run_vllm_shared(
    report: BenchReport, *, python: Path, tokens: int, prompts: int, sides: Sequence[str]
) -> None:
    """Measures sides that share a store beside one that computes; adds rows and ratios.

    Raises:
        UnavailableError: the model cannot be made: vLLM's environment has no transformers.
    """
    with ending_in_order(), ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        plan = SharedPlan(python=python, model=place / "model", tokens=tokens, prompts=prompts)
        report.progress("making a model")
        _make_model(plan)
        ready = []
        for name in sides:
            folder = place / name.replace(" ", "-")
            folder.mkdir()
            servers = stack.enter_context(StoreServers(folder, python))
            side = SharingSide(name, plan, folder, servers)
            try:
                _require_packages(python, NEEDS[name])
                PREPARE[name](side)
                if name != RECOMPUTE:
                    _store(side, report)
            except UnavailableError as problem:
                _tell_absent(report, name, problem)
            else:
                ready.append(side)
        tell(report, _ask_in_turns(report, ready, plan), tokens=tokens)


def _make_model(plan: SharedPlan) -> None:
    positions = str(plan.tokens + 2 * BLOCK_TOKENS)
    made = subprocess.run(
        [str(plan.python), "-c", MODEL, str(plan.model), positions],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    if made.returncode:
        raise UnavailableError(f"no model can be made by {plan.python}: {made.stderr[-500:]}")


def _store(side: SharingSide, report: BenchReport) -> None:
    """The first replica computes prompts, until all of them are in the store."""
    assert side.count is not None
    report.progress(f"{side.name}: the first replica starts")
    replica = side.start_replica(1)
    try:
        _wait_until_on(replica)
        for seed in range(side.plan.prompts):
            side.computed.append(replica.ask([seed, side.plan.tokens + TAIL_TOKENS]))
        stored, grown_at = -1, time.monotonic()
        deadline = time.monotonic() + STORED_S
        while (now := time.monotonic()) < min(deadline, grown_at + QUIET_S):
            replica.require_running(NUDGE_S)
            replica.ask([NUDGE_SEED, 1])
            count = side.count()
            if count != stored:
                stored, grown_at = count, now
    finally:
        replica.close()
    report.progress(f"{side.name}: the first replica has stored {stored} values")
    if not stored:
        raise UnavailableError("the first replica stored nothing")


def _wait_until_on(replica: EngineProcess) -> None:
    """Waits until a replica uses its store; its first request, which takes longer, is over then."""
    replica.wait_ready()
    deadline = time.monotonic() + START_S
    while not replica.ask([NUDGE_SEED, 2 * BLOCK_TOKENS])["on"]:
        if time.monotonic() > deadline:
            raise UnavailableError(f"its store was not opened in {START_S:g} s")
        replica.require_running(NUDGE_S)


def _ask_in_turns(
    report: BenchReport, sides: Sequence[SharingSide], plan: SharedPlan
) -> list[SharingSide]:
    """Asks the second replicas of all sides for each prompt; those that answered all of them."""
    replicas: dict[str, EngineProcess] = {}
    left = list(sides)
    try:
        for side in sides:
            report.progress(f"{side.name}: the second replica starts")
            try:
                replicas[side.name] = side.start_replica(2)
                _wait_until_on(replicas[side.name])
            except UnavailableError as problem:
                _tell_absent(report, side.name, problem)
                left.remove(side)
        for seed in range(plan.prompts):
            for side in left.copy():
                try:
                    answer = replicas[side.name].ask([seed, plan.tokens + TAIL_TOKENS])
                except UnavailableError as problem:
                    _tell_absent(report, side.name, problem)
                    left.remove(side)
                else:
                    side.found.append(answer)
                    report.progress(f"{side.name}: prompt {seed}: {answer['seconds']:.3f} s")
            # Who was first in this round is last in the next one.
            left = [*left[1:], *left[:1]]
    finally:
        for replica in replicas.values():
            replica.close()
    return [side for side in sides if side in left]


def tell(report: BenchReport, sides: Sequence[SharingSide], *, tokens: int) -> None:
    """Adds what each side did, and compares those that found the prefix and were right."""
    seconds: dict[str, list[float]] = {}
    reference = next((side.found for side in sides if side.name == RECOMPUTE), None)
    for side in sides:
        times = [each["seconds"] for each in side.found]
        report.add_row(
            bench="shared-prefix",
            side=side.name,
            params={"tokens": tokens},
            metric="first token",
            unit="s",
            summary=summarize(times),
        )
        if _is_right(report, side, reference or side.computed, tokens=tokens):
            seconds[side.name] = times
    for name, times in seconds.items():
        if name != RECOMPUTE and RECOMPUTE in seconds:
            _compare(report, f"{name}: sooner than recomputing, times", seconds[RECOMPUTE], times)
        peer = PEERS.get(name)
        if peer in seconds:
            _compare(report, f"{name}: sooner than {peer}, times", seconds[peer], times)


def _is_right(
    report: BenchReport,
    side: SharingSide,
    reference: Sequence[Mapping[str, float]],
    *,
    tokens: int,
) -> bool:
    """Whether a side found what it should, and answered as if it had computed it."""
    worst = max(
        abs(one["logprob"] - other["logprob"])
        for one, other in zip(reference, side.found, strict=True)
    )
    if worst > LOGPROB_MAX:
        report.add_note(f"WRONG: log-probabilities of {side.name} differ by {worst:.3g}")
    cached = [int(each["cached"]) for each in side.found]
    if side.name != RECOMPUTE:
        report.add_note(f"{side.name}: {cached} of {tokens} tokens were found")
    # A side may look for whole chunks only; of what it must compute then, it has the time.
    whole = side.name == RECOMPUTE or min(cached) > tokens - CHUNK_TOKENS
    if not whole:
        report.add_note(f"{side.name} is not compared: it had to compute what was not found")
    return whole and worst <= LOGPROB_MAX


def _compare(
    report: BenchReport, name: str, theirs: Sequence[float], ours: Sequence[float]
) -> None:
    """The median of rounds in which both took turns."""
    sooner = median(there / here for there, here in zip(theirs, ours, strict=True))
    if name.startswith("penstock"):
        report.add_ratio(name, sooner, at_least=1.0)
    else:
        report.add_note(f"{name}: {sooner:.2f}")


def _tell_absent(report: BenchReport, name: str, problem: UnavailableError) -> None:
    lines = str(problem).strip().splitlines()
    said = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    report.add_note(f"no side {name}: {said[:500]}")


def _require_packages(python: Path, names: Sequence[str]) -> None:
    program = "import sys\nfrom importlib.util import find_spec\n"
    program += "print(*[name for name in sys.argv[1:] if find_spec(name) is None])"
    done = subprocess.run(
        [str(python), "-c", program, *names],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    if done.returncode or done.stdout.strip():
        missing = done.stdout.strip() or done.stderr[-300:]
        raise UnavailableError(f"the environment of {python} lacks {missing}")


def _prepare_nothing(_side: SharingSide) -> None:
    """It shares nothing."""


def _prepare_redis(side: SharingSide) -> None:
    port = side.servers.start_redis()
    side.count = lambda: values_in_redis(port)
    side.reported = {"redis": port, "store": f'kind = "redis"\nurl = "redis://127.0.0.1:{port}"'}


def _prepare_mooncake(side: SharingSide) -> None:
    # Twice what is stored: a master begins to evict before it is full.
    lent_mib = max(512, 2 * side.plan.stored_mib)
    address, metrics = side.servers.start_mooncake(lent_mib)
    side.count = lambda: values_in_mooncake(metrics)
    file = side.folder / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": address,
                "protocol": "tcp",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": "256MB",
            }
        )
    )
    side.reported = {"store": f'kind = "mooncake"\nmaster = "{address}"'}
    side.variables = {"MOONCAKE_CONFIG_PATH": str(file)}


PREPARE: dict[str, Callable[[SharingSide], None]] = {
    RECOMPUTE: _prepare_nothing,
    "penstock redis": _prepare_redis,
    "lmcache redis": _prepare_redis,
    "penstock mooncake": _prepare_mooncake,
    "vllm mooncake": _prepare_mooncake,
}
NEEDS: dict[str, tuple[str, ...]] = {
    RECOMPUTE: ("vllm",),
    "penstock redis": ("vllm", "penstock", "redis"),
    "lmcache redis": ("vllm", "lmcache"),
    "penstock mooncake": ("vllm", "penstock", "mooncake"),
    "vllm mooncake": ("vllm", "mooncake"),
}
"""Packages of its environment."""
SIDES = tuple(PREPARE)
