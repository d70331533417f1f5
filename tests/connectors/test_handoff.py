"""Two engines in one process whose prompts are handed over: threads, listeners and KV are real."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock.connectors.base.engine import (
    LayerGroup,
    ServedEngine,
    handed_layers,
    handed_tiers,
    tier_of,
)
from penstock.connectors.base.statistics import Counters
from penstock.connectors.handoff.rank import RankSides
from penstock.connectors.handoff.requests import HandoffRequests
from penstock.connectors.handoff.scheduler import SchedulerHandoffs
from penstock.connectors.handoff.thread import HandoffThread
from penstock.transport.waiting import wait_readable
from penstock.vocabulary.layers import GroupKind
from tests.connectors.conftest import TOKENS, FakePool, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.connectors.base.engine import HandedLayer
    from penstock.connectors.handoff.requests import HandoffStep
    from penstock.tiers.tensors import TensorTier

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, HEADS = 3, 16, 4
NULL = 0
"""The block that stands for those that have left a window."""
SOON_S = 120.0
PROMPT = [100 + number for number in range(10)]
"""Two blocks and a half."""


class Engine:
    """One engine: the requests of its scheduler, the KV of its rank, and both their threads."""

    def __init__(
        self,
        name: str,
        *,
        weights: str = "v1",
        ranks: int = 1,
        by_head: bool = True,
        groups: Sequence[Sequence[int]] = (range(LAYERS),),
    ) -> None:
        """Opens it; KV groups with these layers, of which all but the first have windows."""
        heads = HEADS // ranks
        self._group_of = {layer: at for at, group in enumerate(groups) for layer in group}
        shape = (BLOCKS, heads, TOKENS, 8)
        self.kv = [
            [torch.zeros(shape, dtype=torch.uint8) for _ in range(LAYERS)] for _ in range(ranks)
        ]
        """A tensor for each rank and layer."""
        described = [_described(rank, self.kv, groups, by_head=by_head) for rank in range(ranks)]
        self.ranks = [
            RankSides(name, rank, tiers, layers) for rank, (tiers, layers) in enumerate(described)
        ]
        addresses = [rank.addresses for rank in self.ranks]
        self._rank_threads = [
            HandoffThread(f"{name}/{number}", rank) for number, rank in enumerate(self.ranks)
        ]
        handoffs = SchedulerHandoffs(
            name, addresses, model="toy", weights=weights, version="test 1"
        )
        self._handoffs = handoffs
        self.address = handoffs.address
        self.pool = FakePool(BLOCKS)
        self.counters = Counters()
        self.requests = HandoffRequests(
            HandoffThread(name, handoffs),
            handoffs,
            self.pool,
            counters=self.counters,
            block_tokens=TOKENS,
            address=handoffs.address,
            answer={"remote_engine_id": name},
            prefills=True,
            decodes=True,
            null_block=NULL if len(groups) > 1 else None,
        )

    def step(
        self,
        scheduled: dict[str, int] | None = None,
        blocks: Sequence[int] = (),
        preempted: Sequence[str] = (),
        more: Sequence[Sequence[int]] = (),
    ) -> HandoffStep | None:
        """A step of the engine, as every worker of it sees it; `more` blocks of other KV groups."""
        tables = [list(blocks), *more]
        step = self.requests.plan_step(scheduled or {}, lambda _: tables, preempted)
        for thread, rank in zip(self._rank_threads, self.ranks, strict=True):
            if step is not None and step.restarted:
                thread.post(rank.restart, step.restarted)
            if step is not None and step.computed:
                for layer in range(LAYERS):
                    thread.post(rank.computed, step.computed, layer)
        return step

    def prefill(
        self, request: FakeRequest, blocks: Sequence[int], *more: Sequence[int]
    ) -> dict[str, Any]:
        """Computes a prompt to its end, in one step, and answers it."""
        self.fill(request.all_token_ids, blocks, *more)
        self.requests.expect(request)
        self.step({request.request_id: request.num_tokens}, blocks, more=more)
        return self.answer(request)

    def answer(self, request: FakeRequest) -> dict[str, Any]:
        request.all_token_ids.append(7)
        params = self.requests.finish(request, completed=True)
        assert params is not None
        return params

    def fill(self, tokens: Sequence[int], *tables: Sequence[int]) -> None:
        """What a model would write: something of each token, layer and head."""
        own = HEADS // len(self.kv)
        for rank, layers in enumerate(self.kv):
            for layer, tensor in enumerate(layers):
                blocks = tables[self._group_of[layer]]
                for position, token in enumerate(tokens):
                    block, place = divmod(position, TOKENS)
                    for head in range(own):
                        number = (token + layer + 50 * (rank * own + head)) % 251
                        tensor[blocks[block], head, place] = number

    def claim(self, request: FakeRequest, *tables: Sequence[int], computed: int = 0) -> None:
        """A request is queued and gets blocks for what another engine computes."""
        self.requests.expect(request)
        external = self.requests.find_tokens(request, computed)
        # With a window, the last token is computed here.
        assert external == len(PROMPT) - computed - (len(tables) > 1)
        self.requests.start_claim(request, tables, external)

    def ended(self) -> HandoffStep:
        """Steps until a claim has ended."""
        return until(lambda: step if (step := self.step()) and step.received else None)

    def released(self) -> bool:
        """Steps until no block is pinned."""
        return until(lambda: self.step() is None and not self.pool.pinned)

    def close(self) -> None:
        self.requests.close()
        for thread in self._rank_threads:
            thread.close()


def _described(
    rank: int, kv: list[list[Any]], groups: Sequence[Sequence[int]], *, by_head: bool
) -> tuple[list[TensorTier], dict[int, HandedLayer]]:
    """The KV of a rank, as the connector of an engine on a CPU describes it."""
    names = [f"layers.{number}" for number in range(LAYERS)]
    served = ServedEngine(
        name="e",
        groups=tuple(
            LayerGroup(
                kind=GroupKind.SLIDING if at else GroupKind.ATTENTION,
                layer_names=tuple(names[layer] for layer in group),
                block_tokens=TOKENS,
                channels=0,
            )
            for at, group in enumerate(groups)
        ),
        block_count=BLOCKS,
        rank_count=len(kv),
        rank=rank,
        kv_heads=HEADS,
    )
    tier = tier_of(served, dict(zip(names, kv[rank], strict=True)), lambda _: "toy blocks")
    heads = dict.fromkeys(range(LAYERS), "toy heads") if by_head else {}
    return handed_tiers(served, tier, heads), handed_layers(tier.layout)


def until(done: Callable[[], Any]) -> Any:
    """Asks until something is there; threads go on meanwhile."""
    deadline = time.monotonic() + SOON_S
    while not (found := done()):
        assert time.monotonic() < deadline, "it did not happen"
        wait_readable(NEVER, time.monotonic() + 0.002)
    return found


NEVER = torch.multiprocessing.Pipe()[0].fileno()


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def open_engine(name: str, **how: Any) -> Engine:
        engines.append(Engine(name, **how))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def prefill(opened: Callable[..., Engine]) -> Engine:
    return opened("prefill")


@pytest.fixture
def decode(opened: Callable[..., Engine]) -> Engine:
    return opened("decode")


def asked(name: str = "asked", **own: str) -> FakeRequest:
    return FakeRequest(name, PROMPT, kv_transfer_params={"do_remote_decode": True, "penstock": own})


def answered(prefill: Engine, handoff: str) -> FakeRequest:
    own = {"handoff": handoff, "address": prefill.address}
    return FakeRequest(
        "answered", PROMPT, kv_transfer_params={"do_remote_prefill": True, "penstock": own}
    )


def kv_of(engine: Engine, blocks: Sequence[int]) -> list[list[int]]:
    """Of each layer what all ranks together have of a prompt, token after token."""
    found = []
    for layers in zip(*engine.kv, strict=True):
        whole = torch.cat([tensor[list(blocks)] for tensor in layers], dim=1)
        found.append(whole.transpose(1, 2).flatten()[: len(PROMPT) * HEADS * 8].tolist())
    return found


def test_a_prompt_is_handed_over_after_it_was_answered(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)

    decode.claim(request, [7, 8, 9])

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert prefill.released()
    assert decode.counters.take()["tokens_received"] == len(PROMPT)
    sent = prefill.counters.take()
    assert (sent.get("prompts_sent", 0), sent.get("prompts_not_sent", 0)) == (1, 0)


def test_a_prompt_is_handed_over_while_it_is_computed(prefill: Engine, decode: Engine) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.fill(PROMPT, [3, 1, 2])

    prefill.step({"asked": 4}, [3])
    request.num_computed_tokens = 4
    prefill.step({"asked": 6}, [3, 1, 2])
    prefill.answer(request)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])


def test_only_what_the_decode_engine_lacks_is_handed_over(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)

    decode.claim(request, [7, 8, 9], computed=TOKENS)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [8, 9]) == kv_of(prefill, [1, 2])
    assert not any(int(tensor[7].sum()) for tensor in decode.kv[0])


def test_a_prompt_of_which_a_block_is_missing_is_computed(prefill: Engine, decode: Engine) -> None:
    decode.requests.expect(answered(prefill, "h-1"))
    decode.claim(answered(prefill, "h-2"), [7, 8, 9])
    prefill.prefill(asked(handoff="h-1"), [3, 1, 2])

    found = decode.requests.find_tokens(answered(prefill, "h-1"), 2 * TOKENS)

    assert found == 0


def test_the_blocks_of_a_prompt_that_is_not_needed_are_free(
    prefill: Engine, decode: Engine
) -> None:
    params = prefill.prefill(asked(), [3, 1, 2])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)
    decode.claim(request, [7, 8, 9])
    decode.ended()
    again = prefill.prefill(asked("second"), [4, 5, 6])
    second = FakeRequest("second", PROMPT, kv_transfer_params=again)

    decode.requests.expect(second)
    decode.requests.finish(second, completed=False)

    assert prefill.released()
    sent = prefill.counters.take()
    assert (sent["prompts_sent"], sent["prompts_not_sent"]) == (1, 1)


@pytest.mark.parametrize(("prefilling", "decoding"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_ranks_of_engines_with_other_numbers_of_them_get_their_heads(
    opened: Callable[..., Engine], prefilling: int, decoding: int
) -> None:
    prefill, decode = opened("prefill", ranks=prefilling), opened("decode", ranks=decoding)
    params = prefill.prefill(asked(), [3, 1, 2])
    second = asked("second", handoff="h-2")
    prefill.requests.expect(second)
    second.all_token_ids = second.all_token_ids[::-1]
    prefill.fill(second.all_token_ids, [4, 5, 6])

    decode.claim(FakeRequest("answered", PROMPT, kv_transfer_params=params), [7, 8, 9])
    assert decode.ended().failed == frozenset()
    at_once = answered(prefill, "h-2")
    at_once.all_token_ids = [*second.all_token_ids]
    decode.claim(at_once, [10, 11, 12])
    prefill.step({"second": len(PROMPT)}, [4, 5, 6])
    prefill.answer(second)

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [3, 1, 2])
    assert kv_of(decode, [10, 11, 12]) == kv_of(prefill, [4, 5, 6])
    assert prefill.released()


TWO_GROUPS = [[0, 2], [1]]
"""A layer with a window between two without."""


def of_layer(engine: Engine, layer: int, blocks: Sequence[int]) -> list[int]:
    return (
        torch.cat([layers[layer][list(blocks)] for layers in engine.kv], dim=1).flatten().tolist()
    )


@pytest.mark.parametrize(("prefilling", "decoding"), [(1, 1), (2, 1)])
def test_a_group_with_a_window_is_handed_over_as_far_as_it_is_kept(
    opened: Callable[..., Engine], prefilling: int, decoding: int
) -> None:
    prefill = opened("prefill", ranks=prefilling, groups=TWO_GROUPS)
    decode = opened("decode", ranks=decoding, groups=TWO_GROUPS)
    params = prefill.prefill(asked(), [3, 1, 2], [NULL, 4, 5])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)
    nothing = of_layer(decode, 1, [NULL])

    decode.claim(request, [7, 8, 9], [NULL, NULL, 10])

    assert decode.ended().failed == frozenset()
    for layer in TWO_GROUPS[0]:
        assert of_layer(decode, layer, [7, 8, 9]) == of_layer(prefill, layer, [3, 1, 2])
    assert of_layer(decode, 1, [10]) == of_layer(prefill, 1, [5])
    assert of_layer(decode, 1, [NULL]) == nothing
    assert prefill.released()
    assert decode.counters.take()["tokens_received"] == len(PROMPT) - 1


def test_a_group_of_which_nothing_is_read_is_not_handed_over(
    opened: Callable[..., Engine],
) -> None:
    prefill, decode = (opened(name, groups=TWO_GROUPS) for name in ("prefill", "decode"))
    decode.claim(answered(prefill, "h-1"), [7, 8, 9], [NULL, NULL, NULL])

    prefill.prefill(asked(handoff="h-1"), [3, 1, 2], [NULL, 4, 5])

    assert decode.ended().failed == frozenset()
    assert of_layer(decode, 0, [7, 8, 9]) == of_layer(prefill, 0, [3, 1, 2])


def test_a_prompt_of_which_the_prefill_engine_has_lost_a_window_is_computed(
    opened: Callable[..., Engine],
) -> None:
    prefill, decode = (opened(name, groups=TWO_GROUPS) for name in ("prefill", "decode"))
    params = prefill.prefill(asked(), [3, 1, 2], [NULL, NULL, 5])
    request = FakeRequest("answered", PROMPT, kv_transfer_params=params)

    decode.claim(request, [7, 8, 9], [NULL, 10, 11])

    assert decode.ended().failed == {"answered"}
    assert prefill.released()


def test_engines_that_group_their_layers_otherwise_refuse_each_other(
    opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = opened("prefill", groups=TWO_GROUPS), opened("decode", groups=[[0], [1, 2]])

    decode.claim(answered(prefill, "h-1"), [7, 8, 9], [NULL, 10, 11])

    assert decode.ended().failed == {"answered"}
    assert "layers of KV groups is [[0, 2], [1]] here and [[0], [1, 2]] there" in caplog.text


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_engines_whose_blocks_cannot_be_cut_into_heads_refuse_each_other(
    opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture, ranks: tuple[int, int]
) -> None:
    prefill, decode = (
        opened(name, ranks=count, by_head=False)
        for name, count in zip(("prefill", "decode"), ranks, strict=True)
    )

    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == {"answered"}
    assert "plane opaque of layer 0 has no heads to cut" in caplog.text


def test_engines_with_other_weights_refuse_each_other(
    prefill: Engine, opened: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    other = opened("decode", weights="v2")

    other.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert other.ended().failed == {"answered"}
    assert "weights is 'v1' here and 'v2' there" in caplog.text


def test_a_prompt_that_is_aborted_is_computed_by_the_decode_engine(
    prefill: Engine, decode: Engine
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.step({"asked": 4}, [3])

    prefill.requests.finish(request, completed=False)

    assert decode.ended().failed == {"answered"}


def test_a_prompt_that_was_aborted_before_anybody_wanted_it_is_refused_at_once(
    prefill: Engine, decode: Engine
) -> None:
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.requests.finish(request, completed=False)

    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == {"answered"}


def test_a_prompt_whose_request_was_preempted_is_computed_anew_and_handed_over(
    prefill: Engine, decode: Engine
) -> None:
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.step({"asked": 8}, [3, 1])

    prefill.step({}, preempted=["asked"])
    prefill.fill(PROMPT, [4, 5, 6])
    prefill.step({"asked": len(PROMPT)}, [4, 5, 6])
    prefill.answer(request)
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    assert decode.ended().failed == frozenset()
    assert kv_of(decode, [7, 8, 9]) == kv_of(prefill, [4, 5, 6])


def test_a_claim_of_an_aborted_request_ends_once(prefill: Engine, decode: Engine) -> None:
    request = answered(prefill, "h-1")
    decode.claim(request, [7, 8, 9])

    decode.requests.finish(request, completed=False)

    assert decode.ended().received == {"answered"}
    assert decode.step() is None


def test_the_claims_of_an_engine_that_is_gone_fail(prefill: Engine, decode: Engine) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    until(lambda: prefill._handoffs._wants)

    prefill.close()

    assert decode.ended().failed == {"answered"}


def test_the_prompts_for_an_engine_that_is_gone_are_released(
    prefill: Engine, decode: Engine
) -> None:
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])
    request = asked(handoff="h-1")
    prefill.requests.expect(request)
    prefill.step({"asked": len(PROMPT)}, [3, 1, 2])
    until(lambda: any(each.handoffs for each in prefill._handoffs._peers))
    assert prefill.pool.pinned == 3

    decode.close()

    assert prefill.released()


def test_a_reset_drops_prompts_and_claims(prefill: Engine, decode: Engine) -> None:
    prefill.prefill(asked(), [3, 1, 2])
    decode.claim(answered(prefill, "h-1"), [7, 8, 9])

    prefill.requests.reset()
    decode.requests.reset()

    assert prefill.released()
    assert decode.ended().failed == {"answered"}


def test_the_kv_of_another_prompt_is_never_taken(prefill: Engine, decode: Engine) -> None:
    prefill.prefill(asked(handoff="h-1"), [3, 1, 2])
    other = answered(prefill, "h-1")
    other.all_token_ids[1] += 1

    decode.claim(other, [7, 8, 9])

    assert decode.ended().failed == {"answered"}
    assert prefill.released()


@pytest.mark.parametrize("seed", range(3))
def test_handoffs_that_are_aborted_anywhere_end_once_and_leave_nothing(
    prefill: Engine, decode: Engine, seed: int
) -> None:
    draw = random.Random(seed)
    ended: dict[str, bool] = {}
    for number in range(30):
        name, source, target = f"h-{number}", [3, 1, 2], [7, 8, 9]
        wanted, given = answered(prefill, name), asked(name, handoff=name)
        prompt = [draw.randrange(1000) for _ in PROMPT]
        wanted.all_token_ids, given.all_token_ids = [*prompt], [*prompt]
        prefill.fill(prompt, source)
        prefill.requests.expect(given)
        decode.requests.expect(wanted)
        acts = ["claim", "compute", draw.choice(["answer", "abort prefill"])]
        if draw.random() < 0.5:
            acts.insert(draw.randrange(len(acts)), "abort decode")
        if draw.random() < 0.5:
            acts.remove("claim")
            acts.append("claim")
        done = _carry_out(acts, prefill, decode, wanted, given, source, target)
        if "claim" in done:
            step = decode.ended()
            assert step.received == {"answered"}
            ended[name] = not step.failed
            if ended[name]:
                assert kv_of(decode, target) == kv_of(prefill, source)
        else:
            decode.requests.finish(wanted, completed=False)
        assert prefill.released()

    assert any(ended.values())
    assert not all(ended.values())


def _carry_out(
    acts: list[str],
    prefill: Engine,
    decode: Engine,
    wanted: FakeRequest,
    given: FakeRequest,
    source: list[int],
    target: list[int],
) -> list[str]:
    """Does these things in their order, as far as an engine would: which ones were done."""
    done: list[str] = []
    for act in acts:
        if act == "claim" and "abort decode" not in done:
            decode.claim(wanted, target)
        elif act == "compute":
            prefill.step({given.request_id: len(PROMPT)}, source)
        elif act == "answer":
            prefill.answer(given)
        elif act == "abort prefill":
            prefill.requests.finish(given, completed=False)
        elif act == "abort decode":
            decode.requests.finish(wanted, completed=False)
        else:
            continue
        done.append(act)
    return done
