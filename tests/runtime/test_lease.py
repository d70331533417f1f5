"""Leases as the engine uses them: chunk by chunk, forked, preempted, aborted, misused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.explain import MissReason
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError, LeaseError
from tests.runtime.conftest import make_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.cache import Lease
    from tests.runtime.conftest import Engine


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# ---------------------------------------------------------------- commits


def test_blocks_can_be_matched_as_soon_as_their_chunk_is_committed(engine: Engine) -> None:
    prompt = tokens(15)
    lease = engine.cache.acquire(prompt)

    seen = []
    for end in (3, 6, 8, 13, 15):
        engine.compute(lease, prompt[:end])
        lease.commit(prompt[lease.token_count : end])
        with engine.cache.acquire(prompt) as other:
            engine.check(other, prompt)
            seen.append(other.cached_tokens)

    assert seen == [0, 4, 8, 12, 12]
    lease.release()
    engine.expect_at_rest()


def test_the_next_turn_finds_the_output_of_the_last(engine: Engine) -> None:
    engine.turn(tokens(6), output=tokens(7, 100))

    found = engine.turn([*tokens(6), *tokens(7, 100), *tokens(5, 200)])

    assert found.cached_tokens == 12


def test_output_may_come_token_by_token(engine: Engine) -> None:
    sequence = tokens(6)
    with engine.cache.acquire(sequence) as lease:
        engine.run(lease, sequence)
        for token in tokens(9, 100):
            sequence = [*sequence, token]
            lease.grow(len(sequence))
            engine.run(lease, sequence)

    assert engine.turn([*sequence, 7]).cached_tokens == 12


def test_prompt_and_output_may_be_committed_at_once(engine: Engine) -> None:
    with engine.cache.acquire(tokens(6)) as lease:
        lease.grow(13)
        engine.run(lease, [*tokens(6), *tokens(7, 100)])

    assert engine.turn([*tokens(6), *tokens(8, 100)]).cached_tokens == 12


def test_a_prompt_can_be_committed_by_its_length(engine: Engine) -> None:
    prompt = tokens(14)
    with engine.cache.acquire(prompt) as lease:
        engine.compute(lease, prompt)
        lease.commit_prompt(9)
        after_chunk = lease.token_count
        lease.commit_prompt(14)

    assert after_chunk == 9
    assert engine.turn(prompt).cached_tokens == 12


def test_a_prompt_is_not_committed_beyond_its_end(engine: Engine) -> None:
    with engine.cache.acquire(tokens(14)) as lease:
        with pytest.raises(ValueError, match="token_count is 15, the prompt has 14 tokens"):
            lease.commit_prompt(15)
        lease.commit_prompt(8)
        with pytest.raises(ValueError, match=r"token_count is 4: .* has 8 tokens and room for 16"):
            lease.commit_prompt(4)

        assert lease.token_count == 8


def test_tokens_that_are_not_of_the_prompt_are_refused_and_change_nothing(engine: Engine) -> None:
    prompt = tokens(14)
    lease = engine.cache.acquire(prompt)
    engine.compute(lease, prompt)
    lease.commit(prompt[:5])

    with pytest.raises(ValueError, match="tokens differ from the prompt after token 5"):
        lease.commit([5, 6, 99])

    assert lease.token_count == 5
    lease.commit(prompt[5:])
    lease.release()
    assert engine.turn(prompt).cached_tokens == 12


def test_what_is_no_token_is_refused_and_changes_nothing(engine: Engine) -> None:
    with engine.cache.acquire(tokens(6)) as lease:
        with pytest.raises(ValueError, match=r"tokens\[1\] is -1"):
            lease.commit([0, -1])

        assert lease.token_count == 0


def test_more_tokens_than_there_is_room_for_are_refused_and_change_nothing(engine: Engine) -> None:
    refused, sequence = [*tokens(7), *tokens(5, 100)], [*tokens(7), *tokens(5, 200)]
    lease = engine.cache.acquire(tokens(7))

    with pytest.raises(ValueError, match=r"token_count is 12: .* room for 8"):
        lease.commit(refused)

    assert lease.token_count == 0
    lease.grow(12)
    engine.run(lease, sequence)
    lease.release()
    # The keys are those of the tokens that were computed, not of those that were refused.
    assert engine.turn([*sequence, 1]).cached_tokens == 12
    assert engine.turn([*refused, 1]).cached_tokens == 4


def test_two_requests_that_compute_the_same_block_end_with_one_copy(engine: Engine) -> None:
    prompt = tokens(14)
    one, other = engine.cache.acquire(prompt), engine.cache.acquire(prompt)
    engine.run(one, prompt)

    engine.run(other, prompt)

    engine.check(one, prompt)
    engine.check(other, prompt)
    one.release()
    engine.check(other, prompt)
    other.release()
    assert engine.cache.statistics().blocks_twinned == 3
    engine.settle()
    assert engine.cache.statistics().tiers[0].ready == 3
    engine.expect_at_rest()


# ---------------------------------------------------------------- room


def test_a_lease_grows_block_by_block(engine: Engine) -> None:
    with engine.cache.acquire(tokens(6)) as lease:
        first = lease.block_table.tolist()
        lease.grow(8)
        same = lease.block_table.tolist()
        lease.grow(9)
        more = lease.block_table.tolist()

    assert len(first) == 2
    assert same == first
    assert more[:2] == first
    assert len(set(more)) == 3


def test_a_lease_that_cannot_grow_is_as_it_was(engine: Engine) -> None:
    prompt = tokens(20)
    with engine.cache.acquire(prompt) as lease, engine.cache.acquire(tokens(12, 500)):
        engine.run(lease, prompt)
        before = lease.block_table.tolist()

        with pytest.raises(CapacityError, match="'device' can give 0 slots, wanted: 1"):
            lease.grow(21)

        assert lease.block_table.tolist() == before
        assert lease.state is LeaseState.READY
        engine.check(lease, prompt)


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("shared", [8, 10])
def test_a_fork_and_its_origin_go_on_in_blocks_of_their_own(engine: Engine, shared: int) -> None:
    prompt = tokens(shared)
    left, right = [*prompt, *tokens(6, 100)], [*prompt, *tokens(6, 200)]
    origin = engine.cache.acquire(prompt)
    engine.run(origin, prompt)

    fork = origin.fork("fork")
    for lease, sequence in ((origin, left), (fork, right)):
        lease.grow(len(sequence))
        engine.wait(lease)
        engine.run(lease, sequence)

    engine.check(origin, left)
    engine.check(fork, right)
    assert origin.block_table[:2].tolist() == fork.block_table[:2].tolist()
    assert origin.block_table[2] != fork.block_table[2]
    origin.release()
    engine.check(fork, right)
    fork.release()
    assert engine.turn([*left, 1]).cached_tokens == (shared + 6) // 4 * 4
    assert engine.turn([*right, 1]).cached_tokens == (shared + 6) // 4 * 4
    engine.expect_at_rest()


def test_an_unfinished_block_is_not_committed_to_while_it_is_shared(engine: Engine) -> None:
    prompt = tokens(10)
    origin = engine.cache.acquire(prompt)
    engine.run(origin, prompt)
    fork = origin.fork("fork")

    with pytest.raises(LeaseError, match="shares its unfinished block with a fork"):
        fork.commit([100])

    assert fork.token_count == 10
    origin.release()
    # The other is gone, so the block is its own now.
    engine.run(fork, [*prompt, 100, 101])
    fork.release()
    assert engine.turn([*prompt, 100, 101, 1]).cached_tokens == 12
    engine.expect_at_rest()


def test_a_fork_in_the_middle_of_the_prompt_may_go_on_otherwise(engine: Engine) -> None:
    prompt = tokens(14)
    other = [*tokens(6), *tokens(8, 100)]
    origin = engine.cache.acquire(prompt)
    engine.run(origin, prompt[:6])

    fork = origin.fork("fork")
    fork.grow(14)
    engine.wait(fork)
    engine.run(fork, other)
    engine.run(origin, prompt)

    engine.check(origin, prompt)
    engine.check(fork, other)
    origin.release()
    fork.release()
    assert engine.turn(prompt).cached_tokens == 12
    assert engine.turn(other).cached_tokens == 12


def test_many_forks_of_one_request_keep_apart() -> None:
    engine = make_engine(blocks=32)
    prompt = tokens(6)
    origin = engine.cache.acquire(prompt)
    engine.run(origin, prompt)

    forks = [origin.fork(f"fork {number}") for number in range(5)]
    sequences = [[*prompt, *tokens(7, 100 * number)] for number in range(1, 6)]
    for fork, sequence in zip(forks, sequences, strict=True):
        fork.grow(len(sequence))
        engine.wait(fork)
        engine.run(fork, sequence)

    for fork, sequence in zip(forks, sequences, strict=True):
        engine.check(fork, sequence)
    engine.check(origin, prompt)
    for lease in (origin, *forks):
        lease.release()
    engine.expect_at_rest()


def test_a_fork_tells_what_it_shares(engine: Engine) -> None:
    prompt = tokens(10)
    with engine.cache.acquire(prompt) as origin:
        engine.run(origin, prompt)

        with origin.fork("fork") as fork:
            assert fork.request == "fork"
            assert fork.cached_tokens == fork.token_count == 10
            assert fork.cached_by_tier == (10, 0)
            assert fork.miss.reason is MissReason.NONE


# ---------------------------------------------------------------- coming and going


def test_a_preempted_request_finds_its_blocks_again_below() -> None:
    engine = make_engine(write="selective", tiers={"host": 64})
    sequence = tokens(14)
    lease = engine.cache.acquire(sequence)
    engine.run(lease, sequence)

    lease.preempt()
    engine.settle()
    engine.forget_device()

    # Nothing was hit twice, so it is the preemption that had its blocks written down.
    assert lease.state is LeaseState.RELEASED
    assert engine.turn(sequence).cached_by_tier == (0, 12)
    engine.expect_at_rest()


def test_a_request_may_be_preempted_while_it_loads(engine: Engine) -> None:
    engine.turn(tokens(14))
    engine.forget_device()
    lease = engine.cache.acquire(tokens(14))

    lease.preempt()

    engine.settle()
    assert engine.turn(tokens(14)).cached_tokens == 12
    engine.expect_at_rest()


@pytest.mark.parametrize("steps", range(5))
def test_a_request_may_be_aborted_at_any_point_of_its_load(engine: Engine, steps: int) -> None:
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    lease = engine.cache.acquire(prompt)
    for _ in range(steps):
        engine.step_a_block()

    state = lease.state
    lease.release()

    assert state is (LeaseState.LOADING if steps < 3 else LeaseState.READY)
    engine.expect_at_rest()
    assert engine.turn(prompt).cached_tokens == 12


def test_a_request_that_shares_a_load_is_served_when_the_other_is_aborted(engine: Engine) -> None:
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    one, other = engine.cache.acquire(prompt), engine.cache.acquire(prompt)
    copies = engine.cache.statistics().operations_running

    one.release()
    engine.wait(other)

    assert copies == 1
    engine.check(other, prompt)
    assert other.token_count == 12
    other.release()
    engine.expect_at_rest()


def test_a_loading_request_may_neither_commit_nor_grow_nor_fork(engine: Engine) -> None:
    engine.turn(tokens(14))
    engine.forget_device()
    lease = engine.cache.acquire(tokens(14))

    for refused in (lambda: lease.commit([12]), lambda: lease.grow(20), lambda: lease.fork("f")):
        with pytest.raises(LeaseError, match=f"lease {lease.id} is loading"):
            refused()

    engine.wait(lease)
    engine.check(lease, tokens(14))
    lease.release()


@pytest.mark.parametrize(
    "use",
    [
        lambda lease: lease.commit([1]),
        lambda lease: lease.commit_prompt(6),
        lambda lease: lease.grow(9),
        lambda lease: lease.fork("fork"),
        lambda lease: lease.preempt(),
        lambda lease: lease.release(),
    ],
)
def test_a_released_lease_can_be_used_for_nothing(
    engine: Engine, use: Callable[[Lease], None]
) -> None:
    lease = engine.cache.acquire(tokens(6), request="done")
    lease.release()

    with pytest.raises(LeaseError, match="of 'done' was released"):
        use(lease)

    engine.expect_at_rest()


def test_a_lease_ends_with_its_block_of_code_even_in_an_error(engine: Engine) -> None:
    def fail(lease: Lease) -> None:
        raise RuntimeError(lease.request)

    with (
        pytest.raises(RuntimeError, match="unlucky"),
        engine.cache.acquire(tokens(6), request="unlucky") as lease,
    ):
        fail(lease)

    assert lease.state is LeaseState.RELEASED
    engine.expect_at_rest()


def test_a_lease_may_end_before_its_block_of_code_does(engine: Engine) -> None:
    with engine.cache.acquire(tokens(6)) as lease:
        lease.release()

    assert lease.state is LeaseState.RELEASED


def test_tokens_may_be_an_array_of_the_engine(engine: Engine) -> None:
    prompt = np.arange(14, dtype=np.int32)
    with engine.cache.acquire(prompt) as lease:
        engine.compute(lease, prompt.tolist())
        lease.commit(prompt)

    assert engine.turn(prompt.tolist()).cached_tokens == 12


def test_the_engine_may_reuse_its_array_of_tokens_at_once(engine: Engine) -> None:
    buffer = np.arange(14, dtype=np.int32)
    lease = engine.cache.acquire(buffer)

    buffer[:] = 77
    engine.run(lease, tokens(14))

    lease.release()
    assert engine.turn(tokens(14)).cached_tokens == 12
