"""The conversations of `lab bench vllm`."""

from __future__ import annotations

from lab.bench.vllm_workload import Workload

SMALL = Workload(
    conversations=5, turns=3, system_tokens=7, question_tokens=4, answer_tokens=2, together=2
)


def test_a_round_depends_on_its_seed_alone() -> None:
    assert list(SMALL.waves(3)) == list(SMALL.waves(3))
    assert list(SMALL.waves(3)) != list(SMALL.waves(4))


def test_every_turn_begins_with_the_one_before() -> None:
    prompts = [prompt for wave in SMALL.waves(0) for prompt in wave]

    for earlier, later in zip(prompts, prompts[SMALL.conversations :], strict=False):
        assert later[: len(earlier)] == earlier
        assert len(later) == len(earlier) + 6
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1


def test_all_conversations_take_a_turn_before_any_takes_its_next() -> None:
    lengths = [len(prompt) for wave in SMALL.waves(0) for prompt in wave]

    assert lengths == sorted(lengths)
    assert SMALL.working_set_tokens == 7 + 5 * 3 * 6


def test_without_reuse_no_prompt_begins_like_another() -> None:
    fresh = Workload(conversations=5, turns=3, system_tokens=64, together=2, reuse=False)

    beginnings = [tuple(prompt[:32]) for wave in fresh.waves(0) for prompt in wave]

    assert len(set(beginnings)) == len(beginnings)
