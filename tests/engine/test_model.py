"""The decoder against the reference implementation, whatever way its KV went."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock_serve.engine.architecture import read_architecture, share_of
from penstock_serve.engine.batch import TokenSpan, on_device
from penstock_serve.engine.checkpoints import RankWeights, SafetensorsCheckpoint
from penstock_serve.engine.model import Alone, Decoder
from tests.engine.conftest import KINDS

BLOCK = 8
CPU = torch.device("cpu")
# float32 on other kernels: sums in another order.
BOUND = 2e-4


class Small:
    """A decoder with room for a few requests."""

    def __init__(self, folder: Any, blocks: int = 40) -> None:
        architecture = read_architecture(folder)
        share = share_of(architecture, rank=0, ranks=1)
        weights = RankWeights(
            SafetensorsCheckpoint(folder),
            share,
            head_dim=architecture.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        self.decoder = Decoder(architecture, weights, Alone(share))
        shape = (2, blocks, BLOCK, architecture.kv_heads, architecture.head_dim)
        self.kv = [torch.full(shape, 7.0) for _ in range(architecture.layers)]

    def step(self, *spans: TokenSpan) -> torch.Tensor:
        logits = self.decoder.forward(on_device(spans, block_tokens=BLOCK, device=CPU), self.kv)
        assert logits is not None
        return logits


def prompt(count: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 211, (count,), generator=draw).tolist()


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_one_piece_gives_the_logits_of_the_reference(
    checkpoint_of: Any, kind: str
) -> None:
    folder, model = checkpoint_of(kind)
    tokens = prompt(90)

    logits = Small(folder).step(TokenSpan(0, 0, tokens, list(range(3, 15))))

    torch.testing.assert_close(logits[0], expected(model, tokens)[-1], atol=BOUND, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_decodes_and_scattered_blocks_change_nothing(checkpoint_of: Any, kind: str) -> None:
    folder, model = checkpoint_of(kind)
    tokens, other = prompt(60), prompt(45, seed=1)
    table, other_table = [31, 2, 17, 9, 30, 1, 22, 8], [5, 12, 6, 38, 39, 0]
    small = Small(folder)

    small.step(TokenSpan(0, 0, tokens[:13], table), TokenSpan(1, 0, other[:30], other_table))
    small.step(TokenSpan(0, 13, tokens[13:57], table), TokenSpan(1, 30, other[30:31], other_table))
    small.step(TokenSpan(1, 31, other[31:43], other_table), TokenSpan(0, 57, tokens[57:58], table))
    logits = small.step(
        TokenSpan(0, 58, tokens[58:59], table), TokenSpan(1, 43, other[43:44], other_table)
    )

    wanted = torch.stack((expected(model, tokens)[58], expected(model, other)[43]))
    torch.testing.assert_close(logits, wanted, atol=BOUND, rtol=0)


def test_one_block_of_another_request_is_noticed(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    tokens = prompt(60)
    small = Small(folder)
    small.step(TokenSpan(0, 0, tokens[:59], [0, 1, 2, 3, 4, 5, 6, 7]))
    small.step(TokenSpan(1, 0, prompt(16, seed=2), [20, 21]))

    logits = small.step(TokenSpan(0, 59, tokens[59:], [0, 1, 2, 20, 4, 5, 6, 7]))

    assert (logits[0] - expected(model, tokens)[59]).abs().max() > 100 * BOUND


def test_only_wanted_rows_have_logits_and_they_keep_their_order(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    small = Small(folder)

    logits = small.step(
        TokenSpan(0, 0, prompt(10), [1, 2], wants_output=False),
        TokenSpan(1, 0, prompt(9, seed=1), [3, 4]),
    )

    torch.testing.assert_close(logits, expected(model, prompt(9, seed=1))[-1:], atol=BOUND, rtol=0)


def test_layers_are_reported_after_they_wrote_and_before_the_next_one_does(
    checkpoint_of: Any,
) -> None:
    small = Small(checkpoint_of("llama")[0])
    reported: list[tuple[int, list[bool]]] = []

    def written() -> list[bool]:
        return [bool((each[:, 1] != 7.0).all()) for each in small.kv]

    small.decoder.forward(
        on_device([TokenSpan(0, 0, prompt(BLOCK), [1])], block_tokens=BLOCK, device=CPU),
        small.kv,
        after_layer=lambda layer: reported.append((layer, written())),
    )

    assert reported == [(layer, [number <= layer for number in range(3)]) for layer in range(3)]
