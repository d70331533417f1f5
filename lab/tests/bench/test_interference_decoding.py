"""The decode loops' model, on the CPU: one step is one step of a Llama-like model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from lab.bench.interference.decoding import SAMPLED, Decoder  # noqa: E402
from lab.bench.interference.shapes import EIGHT_B, Shape  # noqa: E402

TINY = Shape(
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    vocabulary=64,
    batch=2,
    context=8,
)


def decoder() -> Decoder:
    return Decoder(TINY, device="cpu", dtype=torch.float32)


def test_the_large_shape_has_eight_billion_numbers() -> None:
    assert EIGHT_B.parameters == pytest.approx(8.03e9, rel=0.01)


def test_a_step_has_as_many_pieces_as_layers() -> None:
    with torch.inference_mode():
        assert len(list(decoder().forward())) == TINY.layers


def test_a_step_samples_tokens_of_the_vocabulary_with_runners_up() -> None:
    model = decoder()

    with torch.inference_mode():
        list(model.forward())

    assert model.sampled.shape == (TINY.batch, SAMPLED)
    assert 0 <= model.sampled.min() <= model.sampled.max() < TINY.vocabulary
    assert len(set(model.sampled[0].tolist())) == SAMPLED


def test_the_result_of_a_batch_of_32_has_4_kib() -> None:
    assert EIGHT_B.batch * SAMPLED * 8 == 4096


def test_equal_models_decode_equal_tokens() -> None:
    one, other = decoder(), decoder()

    with torch.inference_mode():
        for _ in range(10):
            list(one.forward())
            list(other.forward())

    assert torch.equal(one.sampled, other.sampled)


def test_query_heads_in_place_of_positions_attend_as_grouped_heads_do() -> None:
    model = decoder()
    q = torch.randn(TINY.batch, TINY.heads, TINY.head_dim)
    k = torch.randn(TINY.batch, TINY.kv_heads, TINY.head_dim)
    v = torch.randn(TINY.batch, TINY.kv_heads, TINY.head_dim)

    found = model._attend(1, q, k, v)

    keys = model._keys[1].repeat_interleave(TINY.heads // TINY.kv_heads, dim=1)
    values = model._values[1].repeat_interleave(TINY.heads // TINY.kv_heads, dim=1)
    assert torch.equal(model._keys[1][:, :, 0], k)
    weights = torch.softmax(q[:, :, None] @ keys.transpose(2, 3) / TINY.head_dim**0.5, dim=-1)
    expected = (weights @ values).reshape(TINY.batch, -1)
    torch.testing.assert_close(found, expected)


def test_shapes_that_no_model_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="heads is 3"):
        Shape(
            layers=1,
            hidden=8,
            heads=3,
            kv_heads=2,
            head_dim=8,
            intermediate=8,
            vocabulary=8,
            batch=1,
            context=8,
        )
