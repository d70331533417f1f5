"""Forms: equal exactly if their copies are interchangeable, and able to say what differs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.shards import Shard
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import Group, GroupKind, HeadRange, Layer, Layout
from penstock.vocabulary.planes import Axis, DType

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_FIRST = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)
TOKEN_FIRST = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)


def split(
    *,
    layers: tuple[int, ...] = (0, 1),
    heads: HeadRange | None = None,
    channels: int = 8,
    dtype: DType = DType.FP8_E4M3,
    block_tokens: int = 4,
    block_count: int = 3,
    order: tuple[Axis, ...] = TOKEN_FIRST,
    scale_dtype: DType | None = DType.FP32,
) -> Layout:
    return Layout.split(
        layers=layers,
        heads=heads or HeadRange(first=2, count=2, total=8),
        channels=channels,
        dtype=dtype,
        block_tokens=block_tokens,
        block_count=block_count,
        order=order,
        scale_dtype=scale_dtype,
    )


def mla(*, layers: tuple[int, ...] = (7,), block_count: int = 5) -> Layout:
    return Layout.mla(
        layers=layers, channels=12, dtype=DType.BF16, block_tokens=4, block_count=block_count
    )


def opaque(*, encoding: str = "tiles", block_stride: int = 128) -> Layout:
    return Layout.opaque(
        layers=(9,),
        block_bytes=100,
        block_stride=block_stride,
        encoding=encoding,
        block_tokens=4,
        block_count=2,
    )


def with_first_layer(layout: Layout, change: Callable[[Layer], Layer]) -> Layout:
    group = layout.groups[0]
    layers = (change(group.layers[0]), *group.layers[1:])
    return replace_groups(layout, replace(group, layers=layers))


def replace_groups(layout: Layout, *groups: Group) -> Layout:
    return Layout(groups=groups, block_tokens=layout.block_tokens)


@pytest.mark.parametrize(
    "other",
    [
        split(block_count=30),
        split(order=HEAD_FIRST),
        split().packed(block_count=1),
        split().packed(block_count=9, slot_bytes=4096),
        split(layers=(1, 0)),
    ],
    ids=["block count", "order of axes", "packed", "wide slots", "order of layers"],
)
def test_packed_copies_are_alike_wherever_the_blocks_came_from(other: Layout) -> None:
    ours, theirs = Form(layout=split()), Form(layout=other)

    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.difference(theirs) is None


def test_k_and_v_in_one_tensor_are_stored_like_k_and_v_in_two() -> None:
    apart = split(dtype=DType.BF16, scale_dtype=None)

    together = Layout.packed_kv(
        layers=(0, 1),
        heads=HeadRange(first=2, count=2, total=8),
        channels=8,
        dtype=DType.BF16,
        block_tokens=4,
        block_count=3,
    )

    assert Form(layout=together) == Form(layout=apart)


def test_ranks_that_hold_the_same_have_equal_forms() -> None:
    shards = [Shard(tensor_size=16, tensor_rank=rank) for rank in (4, 5)]

    forms = [Form(layout=split(heads=shard.heads(8))) for shard in shards]

    assert forms[0] == forms[1]


@pytest.mark.parametrize(
    ("other", "field", "ours", "theirs"),
    [
        (Form(layout=split(), checksum=Algorithm.MIX64), "checksum", "xxh3", "mix64"),
        (Form(layout=split(block_tokens=8)), "block_tokens", "4", "8"),
        (Form(layout=Layout.join(split(), mla())), "groups", "1", "2"),
        (
            Form(
                layout=replace_groups(split(), replace(split().groups[0], kind=GroupKind.SLIDING))
            ),
            "group.0.kind",
            "attention",
            "sliding",
        ),
        (
            Form(layout=split(heads=HeadRange(first=4, count=2, total=8))),
            "group.0.heads",
            "2-3 of 8",
            "4-5 of 8",
        ),
        (Form(layout=split(layers=(0,))), "group.0.layers", "2", "1"),
        (Form(layout=split(layers=(0, 2))), "group.0.layer.1.number", "1", "2"),
        (
            Form(layout=with_first_layer(split(), lambda layer: replace(layer, draft=True))),
            "group.0.layer.0.draft",
            "no",
            "yes",
        ),
        (
            Form(layout=split(scale_dtype=None)),
            "group.0.layer.0.planes",
            "k v k_scale v_scale",
            "k v",
        ),
        (Form(layout=split(dtype=DType.INT8)), "group.0.layer.0.k.dtype", "fp8_e4m3", "int8"),
        (
            Form(layout=split(channels=16)),
            "group.0.layer.0.k.axes",
            "head:2 token:4 channel:8",
            "head:2 token:4 channel:16",
        ),
        (
            Form(layout=split(scale_dtype=DType.FP16)),
            "group.0.layer.0.k_scale.dtype",
            "fp32",
            "fp16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_field_that_differs_is_named_with_both_values(
    other: Form, field: str, ours: str, theirs: str
) -> None:
    form = Form(layout=split())

    assert form != other
    assert form.fingerprint != other.fingerprint
    assert form.difference(other) == (field, ours, theirs)
    assert other.difference(form) == (field, theirs, ours)


def test_a_difference_reads_as_a_sentence() -> None:
    found = Form(layout=split()).difference(Form(layout=split(), checksum=Algorithm.MIX64))

    assert str(found) == "checksum is 'xxh3' here and 'mix64' there"


def test_opaque_blocks_differ_by_their_encoding_but_not_by_their_distance() -> None:
    form = Form(layout=opaque())

    assert form == Form(layout=opaque(block_stride=256))
    assert form.difference(Form(layout=opaque(encoding="rows"))) == (
        "group.0.layer.0.opaque.encoding",
        "tiles",
        "rows",
    )


def test_a_form_compares_with_forms_alone() -> None:
    assert Form(layout=mla()) != Form(layout=mla()).fingerprint


def test_a_fingerprint_digests_the_framed_facts_under_their_domain() -> None:
    form = Form(layout=mla())

    expected = hashlib.sha256(b"\x10\0\0\0penstock.form.v1" + encoded()).digest()[:16]

    assert form.fingerprint == expected


def test_fingerprints_stay_what_they_were() -> None:
    layout = Layout.join(split(), mla(), opaque())

    assert Form(layout=layout).fingerprint.hex() == "e040e0c4e87d2bbc1fe583e571f5197f"


@st.composite
def forms(draw: st.DrawFn) -> Form:
    attention = split(
        layers=draw(st.sampled_from([(0,), (0, 1), (1, 2)])),
        heads=HeadRange(first=draw(st.integers(0, 2)), count=draw(st.integers(1, 2)), total=4),
        channels=draw(st.sampled_from([1, 8])),
        dtype=draw(st.sampled_from(DType)),
        order=draw(st.sampled_from([HEAD_FIRST, TOKEN_FIRST])),
        scale_dtype=draw(st.sampled_from([None, DType.FP32])),
    )
    others = draw(st.sampled_from([(), (mla(),), (opaque(),), (mla(), opaque())]))
    return Form(
        layout=Layout.join(attention, *others),
        checksum=draw(st.sampled_from(Algorithm)),
    )


@given(forms(), forms())
def test_forms_are_equal_exactly_if_their_fingerprints_are(one: Form, other: Form) -> None:
    assert (one == other) == (one.fingerprint == other.fingerprint)
    assert (one == other) == (one.difference(other) is None)


@given(forms())
def test_an_encoded_form_is_read_back_equal(form: Form) -> None:
    read = Form.from_bytes(form.to_bytes())

    assert read == form
    assert read.layout == form.layout
    assert read.fingerprint == form.fingerprint


def encoded(**changes: str) -> bytes:
    facts = {fact.name: fact.value for fact in Form(layout=mla()).facts} | changes
    return b"".join(
        len(text).to_bytes(4, "little") + text.encode() for fact in facts.items() for text in fact
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the field groups is missing"),
        (encoded()[:-1], "within a field"),
        (encoded() + encoded()[:11], ""),
        (encoded(storage="zipped"), "'zipped' is not a valid StorageFormat"),
        (encoded(block_tokens="four"), "block_tokens is 'four', must be a number"),
        (encoded(groups="2"), "the field group.1.layers is missing"),
        (encoded(**{"group.0.heads": "all"}), "group.0.heads is 'all', must be 'none' or"),
        (encoded(**{"group.0.layer.0.planes": "keys"}), "keys.dtype is missing"),
        (encoded(**{"group.0.layer.0.latent.axes": "token"}), "axes is 'token', must be"),
        (encoded(**{"group.0.layer.0.draft": "maybe"}), "fields of another version"),
        (encoded(compression="zstd"), "fields of another version"),
    ],
)
def test_an_encoded_form_that_makes_no_sense_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"encoded form cannot be read: .*{message}"):
        Form.from_bytes(raw)
