"""Two engines, of which one computes prompts and the other answers: exact, whatever goes wrong."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.config import EngineTable, parse_config
from penstock.handoff import PrefillHandoff
from penstock_serve.engine.instance import build_engine
from penstock_serve.engine.requests import Output, Phase, Request
from penstock_serve.engine.sampling_options import LOGPROBS_MAX, Sampling
from penstock_serve.engine.spec import InstanceRole, InstanceSpec, PairSpec
from tests.engine.test_engine import SOON_S, require_right_logits, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock_serve.engine.engine import Engine

BLOCK = 8
NAMES: dict[str, Any] = {"prefill": "prefill-0", "decode": "decode-0"}
TELLING = Sampling(logprobs=LOGPROBS_MAX)
CONFIG = f"""
version = 1
model.name = "small"
cache = {{ block_tokens = {BLOCK}, blocks = 64, load_gate = "off" }}
tiers = [{{ name = "host", kind = "memory", blocks = 64 }}]
"""


class Pair:
    """Both engines in one process, driven by turns."""

    def __init__(self, folder: Any) -> None:
        self.prefill = self._engine(folder, InstanceRole.PREFILL)
        self.decode = self._engine(folder, InstanceRole.DECODE)
        self.introduce()
        self.reported: dict[tuple[str, int], list[Output]] = {}

    def introduce(self) -> None:
        """Has both engines open the pair, as a router does."""
        places = []
        for engine in (self.prefill, self.decode):
            assert engine.handoffs is not None
            places.append(engine.handoffs.peers.place())
        pair = PairSpec(prefill=places[0], decode=places[1])
        self.prefill.open_pair(pair)
        self.decode.open_pair(pair)

    def _engine(self, folder: Any, role: InstanceRole) -> Engine:
        spec = InstanceSpec(
            name=f"{role.value}-0",
            engine=EngineTable(model=str(folder), step_tokens=16, step_requests=8),
            config=parse_config(CONFIG),
            server="",
            role=role,
            hands_over=True,
        )
        return build_engine(spec)[0]

    def submit(self, name: str, prompt: tuple[int, ...], **wishes: Any) -> None:
        wishes = {"max_tokens": 6, "sampling": TELLING, **wishes}
        self.decode.add(Request(id=name, prompt=prompt, handoff=name, **wishes, **NAMES))
        first = {"tenant": wishes.get("tenant", ""), **NAMES}
        self.prefill.add(Request(id=name, prompt=prompt, handoff=name, max_tokens=1, **first))

    def turn(self, *, prefill: bool = True) -> None:
        if prefill:
            self.prefill.step()
        for output in self.decode.step():
            self.reported.setdefault((output.request, output.answer), []).append(output)

    def until(self, condition: Callable[[], bool], *, prefill: bool = True) -> None:
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, self.story()
            self.turn(prefill=prefill)

    def meet(self) -> None:
        """Hands something over, so that all parties have met."""
        self.submit("meeting", prompt_of(20, 7))
        self.finish()

    def finish(self) -> None:
        self.until(lambda: not self.decode.unfinished and not self.prefill.unfinished)
        for engine in (self.prefill, self.decode):
            engine.cache.audit()
            assert engine.cache.statistics().leases == 0

    def story(self) -> str:
        """Who has not ended, for a test that waits in vain."""
        found = []
        for engine in (self.prefill, self.decode):
            answers = engine.scheduler._answers.values()
            found += [(a.name, a.phase.value, a.held, a.left) for a in answers]
            found += [self.outcomes(engine)]
        return str(found)

    def outcomes(self, engine: Engine) -> dict[str, int]:
        assert engine.handoffs is not None
        return dict(engine.handoffs.outcomes)

    def close(self) -> None:
        self.decode.close(1.0)
        self.prefill.close(1.0)


@contextmanager
def paired(folder: Any) -> Iterator[Pair]:
    pair = Pair(folder)
    try:
        yield pair
    finally:
        pair.close()


def prompt_of(count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 211, (count,), generator=generator).tolist())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_after_a_handoff_are_those_of_the_reference(checkpoint_of: Any, kind: str) -> None:
    folder, model = checkpoint_of(kind)
    prompts = {f"r{n}": prompt_of(count, n) for n, count in enumerate((41, 40, 17, 70))}
    with paired(folder) as pair:
        for name, prompt in prompts.items():
            pair.submit(name, prompt)
        pair.finish()

        for name, prompt in prompts.items():
            require_right_logits(pair.reported[name, 0], model, prompt)
        assert pair.outcomes(pair.decode) == pair.outcomes(pair.prefill) == {"delivered": 4}


def test_what_decode_has_already_is_not_handed_over_again(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    shared, rest = prompt_of(32), prompt_of(30, 1)
    with paired(folder) as pair:
        pair.submit("first", (*shared, *prompt_of(9, 2)))
        pair.finish()
        assert pair.decode.handoffs is not None
        assert pair.decode.handoffs.peers.has_rank
        before = pair.decode.handoffs.peers.counts.bytes_moved

        pair.submit("second", (*shared, *rest))
        pair.finish()

        require_right_logits(pair.reported["second", 0], model, (*shared, *rest))
        assert pair.reported["second", 0][0].cached_by_tier[0] == 32
        assert pair.decode.handoffs.peers.counts.bytes_moved - before == before / 6 * 4
        assert pair.outcomes(pair.decode) == {"delivered": 2}


def test_a_first_token_without_probabilities_comes_from_prefill(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    prompt = prompt_of(37)
    with paired(folder) as pair:
        pair.submit("told", prompt)
        pair.finish()
        pair.decode.cache.reset("to begin again")
        pair.submit("alone", prompt, sampling=Sampling(), first_alone=True)
        pair.finish()

        assert tokens_of(pair.reported["alone", 0]) == tokens_of(pair.reported["told", 0])
        assert pair.outcomes(pair.decode) == {"delivered": 2}


def test_several_answers_share_a_prompt_that_was_handed_over(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    prompt = prompt_of(29)
    with paired(folder) as pair:
        pair.submit("r", prompt, answers=3, sampling=Sampling(logprobs=20, temperature=1, seed=5))
        pair.finish()

        for number in range(3):
            require_right_logits(pair.reported["r", number], model, prompt)
        assert pair.outcomes(pair.decode) == {"delivered": 1}


def test_one_block_of_another_prompt_would_be_far_outside_the_bound(
    checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = checkpoint_of("llama")
    prompt = prompt_of(41)
    with paired(folder) as pair:
        pair.submit("right", prompt)
        pair.finish()
        assert pair.prefill.handoffs is not None
        # What the sums are bound to is the same on both sides, and the blocks are not.
        door = pair.prefill.handoffs.peers.door("prefill-0", "decode-0")
        assert isinstance(door, PrefillHandoff)
        offer = door.offer
        monkeypatch.setattr(door, "offer", lambda name, _, **rest: offer(name, prompt, **rest))
        pair.decode.cache.reset("to begin again")
        pair.decode.add(
            Request(
                id="mixed", prompt=prompt, handoff="mixed", max_tokens=6, sampling=TELLING, **NAMES
            )
        )
        other = (*prompt[:16], *prompt_of(8, 9), *prompt[24:])
        pair.prefill.add(Request(id="mixed", prompt=other, handoff="mixed", max_tokens=1, **NAMES))
        pair.finish()

        require_right_logits(pair.reported["right", 0], model, prompt)
        with pytest.raises(AssertionError):
            require_right_logits(pair.reported["mixed", 0], model, prompt)
        assert pair.outcomes(pair.decode) == {"delivered": 2}


def test_blocks_of_another_prompt_are_refused_and_computed_here(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    prompt = prompt_of(41)
    with paired(folder) as pair:
        pair.decode.add(
            Request(id="r", prompt=prompt, handoff="r", max_tokens=6, sampling=TELLING, **NAMES)
        )
        other = (*prompt[:16], *prompt_of(8, 9), *prompt[24:])
        pair.prefill.add(Request(id="r", prompt=other, handoff="r", max_tokens=1, **NAMES))
        pair.finish()

        require_right_logits(pair.reported["r", 0], model, prompt)
        assert pair.outcomes(pair.decode) == {"failed_over": 1}


@pytest.mark.parametrize("lost", [False, True])
def test_an_instance_computes_a_prompt_itself_when_its_partner_cannot(
    checkpoint_of: Any, *, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = checkpoint_of("llama")
    prompt = prompt_of(41)
    with paired(folder) as pair:
        pair.meet()
        pair.submit("r", prompt)
        pair.until(lambda: pair.decode.scheduler.count(Phase.CLAIMING) == 1, prefill=False)

        pair.decode.scheduler.compute_here("r", lost=lost)
        pair.until(lambda: not pair.decode.unfinished, prefill=False)
        pair.finish()

        require_right_logits(pair.reported["r", 0], model, prompt)
        outcome = "lost" if lost else "cancelled"
        assert pair.outcomes(pair.decode) == {"delivered": 1, outcome: 1}
        assert pair.decode.handoffs is not None
        assert [each.outcome for each in pair.decode.handoffs.ended] == ["delivered", outcome]
        assert ("handoff lost" in caplog.text) is lost


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_an_abort_on_either_side_gives_all_blocks_back(checkpoint_of: Any, side: str) -> None:
    folder, model = checkpoint_of("llama")
    prompt = prompt_of(60)
    with paired(folder) as pair:
        pair.meet()
        pair.submit("r", prompt)
        pair.until(lambda: pair.decode.scheduler.count(Phase.CLAIMING) == 1)
        pair.prefill.step()

        getattr(pair, side).abort("r")
        pair.finish()

        if side == "decode":
            assert [output.sampled for output in pair.reported["r", 0]] == [None]
        else:
            require_right_logits(pair.reported["r", 0], model, prompt)
        assert pair.outcomes(pair.decode)["delivered"] == 1


def test_what_was_computed_in_vain_is_let_go(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    with paired(folder) as pair:
        pair.prefill.add(Request(id="r", prompt=prompt_of(41), handoff="r", max_tokens=1, **NAMES))
        pair.until(lambda: any(output.reason for output in pair.prefill.step()))
        assert pair.prefill.unfinished == 1

        pair.prefill.abort("r")
        pair.finish()

        assert pair.outcomes(pair.prefill) == {"cancelled": 1}


def test_an_engine_without_its_partner_releases_everything(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    with paired(folder) as pair:
        pair.meet()
        pair.submit("begun", prompt_of(41), max_tokens=20)
        pair.until(lambda: ("begun", 0) in pair.reported)
        # Computed and offered: only decode, which does not know of it, would claim it.
        pair.prefill.add(
            Request(id="r", prompt=prompt_of(41, 1), handoff="r", max_tokens=1, **NAMES)
        )
        pair.until(lambda: any(output.reason for output in pair.prefill.step()))
        assert pair.prefill.unfinished == pair.decode.unfinished == 1

        pair.prefill.abort_all()
        pair.decode.abort_all()
        pair.finish()

        assert pair.outcomes(pair.prefill) == {"delivered": 2, "cancelled": 1}
        assert pair.decode.handoffs is not None
        assert pair.decode.handoffs.delivered == set()
