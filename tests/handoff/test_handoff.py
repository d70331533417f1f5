"""`open_prefill` and `open_decode`: a prompt goes over, or both sides learn why it did not."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import penstock
from lab.reference_pages import completed
from penstock.errors import AccessError, UnavailableError
from penstock.vocabulary.layout import HeadRange
from penstock.vocabulary.planes import DType
from tests.handoff.conftest import (
    BLOCK,
    LAYERS,
    SETTINGS,
    SLOTS,
    SOON_S,
    Engines,
    a_pair,
    memory,
    open_files,
    require_files_at_most,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = list(range(100, 110))
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE_LINES_MAX = 80
"""Of the example that engine authors begin with."""


def outcomes(engines: Engines) -> dict[str, list[str]]:
    return {side: [r.outcome.value for r in found] for side, found in engines.results.items()}


def test_a_prompt_that_is_computed_here_is_there(engines: Engines) -> None:
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7])
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2])
    engines.compute("r", PROMPT, [0, 1, 2])
    engines.finish()

    assert outcomes(engines) == {"prefill": ["delivered"], "decode": ["delivered"]}
    assert engines.prefill.connected
    assert engines.decode.connected
    assert engines.results["decode"][0].tokens == (42,)
    assert engines.results["decode"][0].delivered
    for there, here in zip(engines.source, engines.target, strict=True):
        np.testing.assert_array_equal(here[[5, 6, 7]], there[:3])
    assert engines.decode.statistics().parts >= 1
    assert engines.decode.statistics().under_way == 0


def test_a_rank_gets_the_last_blocks_that_it_names(engines: Engines) -> None:
    engines.decode.claim_by_rank("r", PROMPT, slots=[[6, 7]])
    (offer,) = engines.prefill.offer_by_rank("r", PROMPT, slots=[[4, 2]])
    for blocks in engines.source:
        blocks[4], blocks[2] = 4, 2
    engines.prefill.computed({"r": len(PROMPT)})
    engines.prefill.first_token("r", 42)
    engines.finish()

    assert (offer.first_block, offer.slots) == (1, [4, 2])
    assert outcomes(engines)["decode"] == ["delivered"]
    assert all((blocks[6] == 4).all() and (blocks[7] == 2).all() for blocks in engines.target)
    assert engines.decode.statistics().bytes == 2 * sum(each[0].nbytes for each in engines.source)


def test_a_prompt_goes_over_step_by_step_and_from_other_blocks_when_it_is_computed_anew(
    engines: Engines,
) -> None:
    engines.meet()
    engines.decode.claim_by_rank("r", PROMPT, slots=[[5, 6, 7]], part_tokens=BLOCK)
    engines.prefill.offer_by_rank("r", PROMPT, slots=[[]], first_blocks=[0])
    meeting = engines.decode.statistics().parts
    for blocks in engines.source:
        blocks[[0, 3, 4]] = np.array([1, 2, 3])[:, None, None]

    engines.prefill.extend("r", [0])
    engines.prefill.computed({"r": BLOCK})
    engines.until(lambda: engines.decode.statistics().parts > meeting)
    sent = engines.prefill.early_bytes
    engines.prefill.restart("r")
    for blocks in engines.source:
        blocks[0] = 9
        blocks[2] = 1
    engines.prefill.extend("r", [2, 3, 4])
    engines.prefill.computed({"r": len(PROMPT)})
    engines.prefill.first_token("r", 42)
    engines.finish()

    assert outcomes(engines)["decode"] == ["delivered"]
    assert all((blocks[[5, 6, 7], 0, 0] == [1, 2, 3]).all() for blocks in engines.target)
    assert sent == sum(blocks[0].nbytes for blocks in engines.source)


def test_a_block_that_a_rank_has_no_more_fails_its_handoff(engines: Engines) -> None:
    engines.decode.claim_by_rank("r", PROMPT, slots=[[5, 6, 7]])
    engines.prefill.offer_by_rank("r", PROMPT, slots=[[1, 2]])
    engines.prefill.computed({"r": len(PROMPT)})
    engines.prefill.first_token("r", 42)
    engines.finish()

    assert outcomes(engines)["decode"] == ["failed_over"]
    assert engines.prefill.statistics().refused["block"] >= 1
    assert all((blocks[5] == 0).all() for blocks in engines.target)


def test_what_is_cached_on_either_side_is_not_computed_or_sent_again(engines: Engines) -> None:
    for blocks in engines.source:
        blocks[:2] = 7
    engines.decode.claim("r", PROMPT, slots=[6, 7], cached_tokens=BLOCK)
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2], cached_tokens=2 * BLOCK)
    engines.prefill.computed({"r": len(PROMPT)})
    engines.prefill.first_token("r", 42)
    engines.finish()

    assert outcomes(engines)["decode"] == ["delivered"]
    assert all((blocks[6] == 7).all() for blocks in engines.target)
    assert engines.decode.statistics().bytes == 2 * sum(each[0].nbytes for each in engines.source)


@pytest.mark.parametrize(
    ("prompt", "origin"), [([*PROMPT[:-1], 0], ""), (PROMPT, "another tenant")]
)
def test_blocks_of_another_prompt_or_tenant_are_refused(
    engines: Engines, prompt: list[int], origin: str
) -> None:
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7])
    engines.prefill.offer("r", prompt, slots=[0, 1, 2], origin=origin)
    engines.compute("r", prompt, [0, 1, 2])
    engines.finish()

    assert outcomes(engines)["decode"] == ["failed_over"]
    assert engines.results["decode"][0].why


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_handoff_that_is_cancelled_ends_on_both_sides(engines: Engines, side: str) -> None:
    engines.meet()
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7])
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2])

    for _ in range(2):  # Twice does no harm.
        getattr(engines, side).cancel("r", "the client left")
    engines.finish()

    assert outcomes(engines)[side] == ["cancelled"]
    assert not engines.results["prefill" if side == "decode" else "decode"][0].delivered
    getattr(engines, side).cancel("r")


def test_a_claim_that_is_withdrawn_can_be_made_again(engines: Engines) -> None:
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7])
    engines.decode.withdraw("r")
    engines.until(lambda: bool(engines.results["decode"]))
    engines.decode.claim("r", PROMPT, slots=[1, 2, 3], epoch=2)
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2])
    engines.compute("r", PROMPT, [0, 1, 2])
    engines.finish()
    engines.until(lambda: len(engines.results["decode"]) == 2)

    assert outcomes(engines)["decode"] == ["withdrawn", "delivered"]


def test_a_claim_that_nobody_answers_fails_after_its_timeout(engines: Engines) -> None:
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7], timeout_s=0.2)
    engines.until(lambda: bool(engines.results["decode"]))

    assert outcomes(engines)["decode"] == ["expired"]


def test_an_offer_that_nobody_claims_fails_after_its_timeout(engines: Engines) -> None:
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2], timeout_s=0.2)
    engines.until(lambda: bool(engines.results["prefill"]))

    assert outcomes(engines)["prefill"] == ["expired"]
    engines.prefill.first_token("r", 1)


def test_a_stream_is_refused_where_the_kv_is_in_memory_of_the_cpu(engines: Engines) -> None:
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2])

    with pytest.raises(ValueError, match="stream is 7, must be left out: the KV is not on a GPU"):
        engines.prefill.computed({"r": len(PROMPT)}, layer=0, stream=7)
    with pytest.raises(ValueError, match="stream is 'x', must be an int"):
        engines.prefill.computed({"r": len(PROMPT)}, layer=0, stream="x")


def test_engines_sum_alike_or_refuse_each_other() -> None:
    with pytest.raises(ValueError, match="checksum is 'md5', must be one of xxh3, mix64"):
        a_pair(checksum="md5")


@pytest.mark.parametrize("checksum", ["xxh3", "mix64"])
def test_a_prompt_goes_over_with_either_checksum(checksum: str) -> None:
    with ExitStack() as stack:
        engines = Engines(stack, checksum=checksum)
        engines.meet()
        assert engines.decode.statistics().parts >= 1


HALVES = tuple(
    penstock.Layout.split(
        layers=range(2),
        heads=HeadRange(first=rank, count=1, total=2),
        channels=2,
        dtype=DType.FP32,
        block_tokens=BLOCK,
        block_count=SLOTS,
    )
    for rank in range(2)
)
"""Two ranks, each with one of two heads."""


def a_pair_of_two_ranks() -> penstock.HandoffPair:
    plain = a_pair()
    engines = {
        side: penstock.HandoffEngine(
            name=side, address=getattr(plain, side).address, layouts=HALVES
        )
        for side in ("prefill", "decode")
    }
    return a_pair(**engines)


def test_ranks_in_other_places_get_their_halves_of_the_heads() -> None:
    pair = a_pair_of_two_ranks()
    opens = {"prefill": penstock.open_prefill, "decode": penstock.open_decode}
    kv = {
        (side, rank): [np.zeros((SLOTS, BLOCK, 1, 2), dtype=np.float32) for _ in range(4)]
        for side in opens
        for rank in range(2)
    }
    with ExitStack() as stack:
        ranks: dict[tuple[str, int], Any] = {
            (side, n): stack.enter_context(
                opens[side](pair, kv=blocks, rank=n, layout=HALVES[n], settings=SETTINGS)
            )
            for (side, n), blocks in kv.items()
        }
        prefill, decode = (
            stack.enter_context(
                opened_beside([*ranks.values()], lambda opened=opened: opened(pair))
            )
            for opened in opens.values()
        )
        decode.claim("r", PROMPT, slots=[5, 6, 7])
        offer = prefill.offer("r", PROMPT, slots=[0, 1, 2])
        for n in range(2):
            ranks["prefill", n].admit(offer)
            for blocks in kv["prefill", n]:
                blocks[:3] = n + 1
            ranks["prefill", n].computed({"r": len(PROMPT)})
        prefill.first_token("r", 42)
        results, deadline = [], time.monotonic() + SOON_S
        while not results and time.monotonic() < deadline:
            for each in (*ranks.values(), prefill):
                each.step()
            results = decode.step()

    assert [each.delivered for each in results] == [True]
    assert all((blocks[5:7] == n + 1).all() for n in range(2) for blocks in kv["decode", n])


def opened_beside(ranks: list[Any], opens: Callable[[], Any]) -> Any:
    """What is opened while its ranks run, as they do in processes of their own."""
    stop = threading.Event()

    def run() -> None:
        for rank in ranks:
            rank.adopt_thread()
        while not stop.is_set():
            for rank in ranks:
                rank.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return opens()
    finally:
        stop.set()
        thread.join()
        for rank in ranks:
            rank.adopt_thread()


def test_an_engine_whose_ranks_do_not_come_says_which() -> None:
    layout = penstock.Layout.opaque(
        layers=[0], block_bytes=8, encoding="x", block_tokens=BLOCK, block_count=SLOTS
    )
    plain = a_pair()
    engines = {
        side: penstock.HandoffEngine(
            name=side, address=getattr(plain, side).address, layouts=(layout,)
        )
        for side in ("prefill", "decode")
    }
    pair = penstock.HandoffPair(**engines, model="toy", weights="v1")

    with pytest.raises(UnavailableError, match=r"ranks decode/0 did not connect within 0\.05 s"):
        penstock.open_decode(pair, timeout_s=0.05)


def test_engines_with_other_weights_refuse_each_other() -> None:
    pair, opened = a_pair(), {"block_tokens": BLOCK, "settings": SETTINGS}
    other = penstock.HandoffPair(
        prefill=pair.prefill, decode=pair.decode, model="toy", weights="v2"
    )
    with (
        penstock.open_prefill(pair, kv=memory(), **opened) as prefill,
        penstock.open_decode(other, kv=memory(), **opened) as decode,
    ):
        decode.claim("r", PROMPT, slots=[5, 6, 7], timeout_s=SOON_S)
        results, deadline = [], time.monotonic() + SOON_S
        while not results and time.monotonic() < deadline:
            prefill.step()
            results = decode.step()
            decode.wait(time.monotonic() + 0.01)

    assert [each.delivered for each in results] == [False]
    assert "weights is 'v2' here and 'v1' there" in results[0].why


def test_a_foreign_thread_is_refused_until_it_adopts(engines: Engines) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        for each in (engines.prefill.step, lambda: engines.decode.cancel("r")):
            try:
                each()
            except AccessError as error:
                raised.append(error)
        engines.prefill.adopt_thread()
        engines.prefill.step()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

    assert [str(each).partition(" is used")[0] for each in raised] == [
        "the handoff of 'prefill'",
        "the handoff of 'decode'",
    ]
    engines.prefill.adopt_thread()


def test_a_forked_child_can_neither_use_nor_close_it(engines: Engines) -> None:
    child = os.fork()
    if child == 0:
        try:
            engines.decode.close()
            engines.decode.step()
        except AccessError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7])
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2])
    engines.compute("r", PROMPT, [0, 1, 2])
    engines.finish()
    assert outcomes(engines)["decode"] == ["delivered"]


def test_what_is_closed_says_so_and_holds_nothing() -> None:
    gc.collect()
    before = open_files()
    pair = a_pair()
    prefill = penstock.open_prefill(pair, kv=memory(), block_tokens=BLOCK)
    decode = penstock.open_decode(pair, kv=memory(), block_tokens=BLOCK)
    for each in (prefill, decode):
        each.close()
        each.close()
        with pytest.raises(UnavailableError, match=r"the handoff of '\w+' is closed"):
            each.step()
    assert repr(decode) == "<DecodeHandoff 'decode': closed>"

    require_files_at_most(before + 4)  # ZeroMQ keeps some for its own threads.
    # The same addresses can be listened on again.
    penstock.open_prefill(pair, kv=memory(), block_tokens=BLOCK).close()


WRONG: list[tuple[Callable[[Engines], object], str]] = [
    (lambda e: e.decode.claim(5, PROMPT, slots=[1, 2, 3]), "handoff is 5, must be a str"),
    (lambda e: e.decode.claim("r", [], slots=[]), "tokens are empty, must be at least one"),
    (lambda e: e.decode.claim("r", PROMPT, slots=[1, 2]), "slots are 2, 2 of them different, must"),
    (lambda e: e.decode.claim("r", PROMPT, slots=[1, 2, 2]), "slots are 3, 2 of them different"),
    (lambda e: e.decode.claim("r", PROMPT, slots=[1, 2, SLOTS]), r"slots\[2\] is 16, must be an"),
    (
        lambda e: e.decode.claim("r", PROMPT, slots=[1, 2, 3], cached_tokens=3),
        "cached_tokens is 3, must be a multiple of 4",
    ),
    (lambda e: e.decode.claim("r", PROMPT, slots=[1, 2, 3], timeout_s=0), "timeout_s is 0, must"),
    (lambda e: e.prefill.offer("r", PROMPT, slots="abc"), "slots is 'abc', must be a sequence"),
    (lambda e: e.prefill.offer("r" * 200, PROMPT, slots=[1, 2, 3]), "handoff has 200 characters"),
    (lambda e: e.prefill.offer("r", PROMPT, slots=[1, 2, 3], cached_tokens=11), "from 0 to 10"),
    (
        lambda e: e.decode.claim_by_rank("r", PROMPT, slots=[[1], [2]]),
        "slots are for 2 ranks, must be for 1",
    ),
    (
        lambda e: e.prefill.offer_by_rank("r", PROMPT, slots=[[1, 2, 3, 4]]),
        r"slots\[0\] are 4, must be at most 3",
    ),
    (
        lambda e: e.prefill.offer_by_rank("r", PROMPT, slots=[[1, 2]], first_blocks=[2]),
        r"first_blocks\[0\] is 2, must be an int from 0 to 1",
    ),
    (
        lambda e: e.prefill.offer_by_rank("r", PROMPT, slots=[[]], first_blocks=[0, 0]),
        "first_blocks are for 2 ranks, must be for 1",
    ),
    (
        lambda e: e.decode.claim_by_rank("r", PROMPT, slots=[[1, 2, 3]], part_tokens=0),
        "part_tokens is 0, must be an int of at least 1",
    ),
    (lambda e: e.prefill.extend("x", [1]), "handoff is 'x', which was never admitted"),
    (lambda e: e.prefill.extend("x", [1.5]), r"slots\[0\] is 1.5, must be an int"),
    (lambda e: e.prefill.restart("x"), "handoff is 'x', which was never admitted"),
    (lambda e: e.prefill.computed({"x": 1}), "handoff is 'x', which was never admitted"),
    (lambda e: e.prefill.computed("x"), "tokens is 'x', must map handoffs to token counts"),
    (lambda e: e.prefill.first_token("r", 1.5), "token is 1.5, must be an int"),
    (lambda e: e.prefill.rank_died(1), "rank is 1, must be an int from 0 to 0"),
    (lambda e: e.decode.wait(5.0), "must be a time on the monotonic clock"),
]


@pytest.mark.parametrize(("call", "problem"), WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(
    engines: Engines, call: Callable[[Engines], object], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        call(engines)

    assert engines.prefill.statistics().under_way == engines.decode.statistics().under_way == 0
    engines.decode.claim("r", PROMPT, slots=[5, 6, 7])
    engines.prefill.offer("r", PROMPT, slots=[0, 1, 2])
    engines.compute("r", PROMPT, [0, 1, 2])
    engines.finish()
    assert outcomes(engines)["decode"] == ["delivered"]


OPENED_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pair": "x"}, "pair is a str, must be a HandoffPair"),
    ({"kv": None}, "layout and block_tokens are given, must be left out without kv"),
    ({"kv": None, "block_tokens": 0}, "layouts of the prefill engine 'prefill' are left out"),
    ({"block_tokens": 0}, "block_tokens is 0, must be the tokens of a block"),
    ({"kv": "x"}, "kv is a str, must be NumPy arrays or torch tensors"),
    ({"settings": 5}, "settings is a int, must be HandoffSettings or None"),
    ({"rank": 1}, "rank is 1, must be an int from 0 to 0"),
    ({"timeout_s": "x"}, "timeout_s is 'x', must be a number of seconds above 0"),
]


@pytest.mark.parametrize(("given", "problem"), OPENED_WRONG)
@pytest.mark.parametrize("opens", [penstock.open_prefill, penstock.open_decode])
def test_what_cannot_be_opened_says_why(
    opens: Callable[..., object], given: dict[str, Any], problem: str
) -> None:
    arguments = {"pair": a_pair(), "kv": memory(), "block_tokens": BLOCK, **given}

    with pytest.raises(ValueError, match=problem):
        opens(**arguments)


def test_a_folder_that_is_no_path_is_refused() -> None:
    with pytest.raises(ValueError, match="folder is a str, must be a Path or None"):
        penstock.open_decode(a_pair(), kv=memory(), block_tokens=BLOCK, folder=str(Path()))


def test_the_example_of_the_page_is_the_one_that_can_be_run_and_is_short() -> None:
    example = (ROOT / "examples" / "handoff.py").read_text(encoding="utf-8")
    page = completed((ROOT / "docs" / "integrating.md").read_text(encoding="utf-8"))

    assert f"```python\n{example}```\n" in page
    assert len(example.splitlines()) <= EXAMPLE_LINES_MAX


class Unlike(NamedTuple):
    """Two engines of which one opens the pair with other KV, and what they say."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    why: str


def kv_of(*, layers: int = LAYERS, block: int = BLOCK, dtype: Any = np.float32) -> dict[str, Any]:
    kv = [np.zeros((SLOTS, block, 2), dtype=dtype) for _ in range(layers)]
    return {"kv": kv, "block_tokens": block}


UNLIKE = {
    "block size": Unlike(
        kv_of(block=8), kv_of(), "refused: block_tokens of prefill is '4' here and '8' there"
    ),
    "layers": Unlike(kv_of(layers=4), kv_of(), "refused: layers is '3' here and '4' there"),
    "numbers": Unlike(
        kv_of(dtype=np.float16),
        kv_of(),
        "refused: axes of prefill is 'channel:32 (3 times)' here and 'channel:16 (3 times)' there",
    ),
}


@pytest.mark.parametrize("unlike", UNLIKE.values(), ids=UNLIKE)
def test_engines_whose_kv_differs_name_the_field_and_both_values(unlike: Unlike) -> None:
    pair = a_pair()
    with (
        penstock.open_prefill(pair, settings=SETTINGS, **unlike.prefill) as prefill,
        penstock.open_decode(pair, settings=SETTINGS, **unlike.decode) as decode,
    ):
        decode.claim("r", PROMPT, slots=[5, 6, 7])
        results: list[penstock.HandoffResult] = []
        deadline = time.monotonic() + SOON_S
        while not results and time.monotonic() < deadline:
            prefill.step()
            results = decode.step()
            decode.wait(time.monotonic() + 0.01, descriptors=prefill.descriptors)

    (result,) = results
    assert result.why == unlike.why
