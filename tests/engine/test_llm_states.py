"""An `LLM` that is paused, put to sleep and given other weights, in any order."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import penstock
import penstock_serve
from tests.engine.test_weights import other_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "m"\nengine = { threads = 1 }\n'
    'cache = { block_tokens = 8, blocks = 24, load_gate = "off" }\n'
    'tiers = [{ name = "host", kind = "host", blocks = 40, huge_pages = "never" }]\n'
)
PROMPTS = [list(range(first, first + 37)) for first in (3, 50, 90)]


def answers(llm: penstock_serve.LLM, prompt: list[int]) -> tuple[int, ...]:
    return llm.generate([prompt], max_tokens=6, temperature=0)[0].token_ids


@pytest.fixture(scope="module")
def folders(checkpoint_of: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, _ = checkpoint_of("llama")
    return [folder, other_of("llama", tmp_path_factory.mktemp("states") / "other")]


@pytest.fixture(scope="module")
def wanted(folders: list[Path]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The answer to each prompt with each checkpoint, by an `LLM` that did nothing else."""
    found = {}
    for number, folder in enumerate(folders):
        for at, prompt in enumerate(PROMPTS):
            with penstock_serve.LLM(folder, config=CONFIG) as llm:
                found[number, at] = answers(llm, prompt)
    return found


class AnyOrder(RuleBasedStateMachine):
    folders: ClassVar[list[Path]]
    wanted: ClassVar[dict[tuple[int, int], tuple[int, ...]]]

    def __init__(self) -> None:
        super().__init__()
        self.llm = penstock_serve.LLM(self.folders[0], config=CONFIG)
        self.weights, self.paused, self.asleep = 0, False, False

    @rule(prompt=st.sampled_from(range(len(PROMPTS))))
    def ask(self, prompt: int) -> None:
        if self.paused or self.asleep:
            state = "asleep" if self.asleep else "paused"
            with pytest.raises(penstock.UnavailableError, match=f"the engine is {state}"):
                answers(self.llm, PROMPTS[prompt])
        else:
            assert answers(self.llm, PROMPTS[prompt]) == self.wanted[self.weights, prompt]

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:  # noqa: FBT001 - a strategy
        self.paused = paused
        (self.llm.pause if paused else self.llm.resume)()

    @rule(level=st.integers(1, 2), host=st.booleans())
    def sleep(self, level: int, host: bool) -> None:  # noqa: FBT001 - a strategy
        self.llm.sleep(level=level, host=host)
        self.asleep = True

    @rule()
    def wake(self) -> None:
        self.llm.wake()
        self.asleep = False

    @rule(number=st.integers(0, 1))
    def load(self, number: int) -> None:
        if self.asleep:
            with pytest.raises(penstock.UnavailableError, match="asleep, must be woken first"):
                self.llm.load_weights(self.folders[number], version="same name")
        else:
            self.llm.load_weights(self.folders[number], version="same name")
            self.weights = number

    @invariant()
    def is_sound(self) -> None:
        self.llm._engine.cache.audit()
        assert self.llm.statistics().blocks_corrupt == 0

    def teardown(self) -> None:
        self.llm.close()


def test_every_answer_is_right_or_refused_whatever_the_order(
    folders: list[Path], wanted: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    AnyOrder.folders, AnyOrder.wanted = folders, wanted

    run_state_machine_as_test(
        AnyOrder, settings=settings(max_examples=6, stateful_step_count=20, deadline=None)
    )


def test_weights_that_sleep_take_no_memory(folders: list[Path]) -> None:
    with penstock_serve.LLM(folders[0], config=CONFIG) as llm:
        before = answers(llm, PROMPTS[0])
        llm.load_weights(folders[1])
        llm.load_weights(folders[0])
        tensors = [
            *llm._engine.workers.worker.decoder.tensors()  # type: ignore[attr-defined]
        ]
        assert _resident_pages(tensors) == _whole_pages(tensors) > 0

        llm.sleep(level=2)

        assert _resident_pages(tensors) == 0
        llm.wake()
        assert answers(llm, PROMPTS[0]) == before


def test_sleep_waits_only_while_blocks_are_being_written(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock_serve.LLM(folders[0], config=CONFIG) as llm:
        answers(llm, PROMPTS[0])
        llm.load_weights(folders[1])
        cache = llm._engine.cache

        def wait(_deadline: float) -> bool:
            assert cache.busy
            return True

        monkeypatch.setattr(cache, "wait", wait)

        llm.sleep()

        assert cache.asleep


def _page_ranges(tensors: Sequence[torch.Tensor]) -> list[range]:
    """The numbers of the whole pages of each tensor."""
    unit = mmap.PAGESIZE
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    return [range(-(-start // unit), end // unit) for start, end in zip(starts, ends, strict=True)]


def _whole_pages(tensors: Sequence[torch.Tensor]) -> int:
    return sum(map(len, _page_ranges(tensors)))


def _resident_pages(tensors: Sequence[torch.Tensor]) -> int:
    """How many of these pages are in memory, or were written out, by the kernel's own table."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
        found = 0
        for pages in _page_ranges(tensors):
            entries = os.pread(table.fileno(), 8 * len(pages), 8 * pages.start)
            found += sum(entry >> 62 != 0 for (entry,) in struct.iter_unpack("<Q", entries))
    return found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"level": 3}, "level is 3, must be an int from 1 to 2"),
        ({"host": 1}, "host is 1, must be"),
        ({"timeout_s": -1}, "timeout_s is -1, must be"),
    ],
)
def test_a_wrong_argument_of_sleep_changes_nothing(
    folders: list[Path], wrong: dict[str, Any], message: str
) -> None:
    with penstock_serve.LLM(folders[0], config=CONFIG) as llm:
        with pytest.raises(ValueError, match=message):
            llm.sleep(**wrong)

        assert answers(llm, PROMPTS[0])
