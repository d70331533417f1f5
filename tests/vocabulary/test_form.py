"""Forms: equal exactly if their copies are interchangeable, and able to say what differs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form, Shard, StorageFormat
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

    forms = [Form(layout=split(heads=shard.heads(8)), shard=shard) for shard in shards]

    assert forms[0] == forms[1]
    assert Form(layout=mla(), shard=shards[0]) == Form(layout=mla(), shard=Shard())


@pytest.mark.parametrize(
    ("other", "field", "ours", "theirs"),
    [
        (Form(layout=split(), checksum=Algorithm.MIX64), "checksum", "xxh3", "mix64"),
        (Form(layout=split(), storage=StorageFormat.IN_PLACE), "storage", "packed", "in_place"),
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


def test_copies_in_place_differ_by_the_strides_inside_a_block_alone() -> None:
    def in_place(layout: Layout) -> Form:
        return Form(layout=layout, storage=StorageFormat.IN_PLACE)

    form = in_place(split())

    assert form == in_place(split(block_count=30))
    assert form.difference(in_place(split(order=HEAD_FIRST))) == (
        "group.0.layer.0.k.axes",
        "head:2:8 token:4:16 channel:8:1",
        "head:2:32 token:4:8 channel:8:1",
    )


def test_the_stride_of_an_axis_of_one_entry_means_nothing() -> None:
    def in_place(stride: int) -> Form:
        one_head = split(heads=HeadRange(first=0, count=1, total=1), scale_dtype=None)

        def with_stride(layer: Layer) -> Layer:
            k, v = layer.planes
            dims = tuple(
                replace(dim, stride=stride) if dim.axis is Axis.HEAD else dim for dim in k.dims
            )
            return replace(layer, planes=(replace(k, dims=dims), v))

        layout = with_first_layer(one_head, with_stride)
        return Form(layout=layout, storage=StorageFormat.IN_PLACE)

    assert in_place(0) == in_place(8) == in_place(-5)


def test_a_form_compares_with_forms_alone() -> None:
    assert Form(layout=mla()) != Form(layout=mla()).fingerprint


def test_a_fingerprint_digests_the_framed_facts_under_their_domain() -> None:
    form = Form(layout=mla())

    expected = hashlib.sha256(b"\x10\0\0\0penstock.form.v1" + encoded()).digest()[:16]

    assert form.fingerprint == expected


def test_fingerprints_stay_what_they_were() -> None:
    layout = Layout.join(split(), mla(), opaque())

    packed = Form(layout=layout).fingerprint
    in_place = Form(layout=layout, storage=StorageFormat.IN_PLACE).fingerprint

    assert packed.hex() == "e040e0c4e87d2bbc1fe583e571f5197f"
    assert in_place.hex() == "1a6d385e55056cf03d36212be16533ec"


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
        storage=draw(st.sampled_from(StorageFormat)),
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


def test_a_form_describes_itself_to_people() -> None:
    layout = Layout.join(
        split(heads=HeadRange(first=2, count=1, total=4)), mla(layers=(7, 8)), opaque()
    )

    text = Form(layout=layout, shard=Shard(tensor_size=4, tensor_rank=2)).describe()

    assert text.splitlines() == [
        "packed, 4 tokens and 484 bytes a block, xxh3 sums",
        "tensor rank 2 of 4, stage 0 of 1",
        "group 0: attention, heads 2-2 of 4",
        "  layers 0-1: k fp8_e4m3 1 heads × 4 tokens × 8 channels, "
        "v fp8_e4m3 1 heads × 4 tokens × 8 channels, "
        "k_scale fp32 1 heads × 4 tokens × 1 channels, "
        "v_scale fp32 1 heads × 4 tokens × 1 channels",
        "group 1: latent, the same on every rank",
        "  layers 7-8: latent bf16 4 tokens × 12 channels",
        "group 2: opaque, the same on every rank",
        "  layers 9-9: opaque uint8 tiles of 100 bytes",
    ]


def test_heads_are_dealt_out_evenly_and_held_twice_where_ranks_outnumber_them() -> None:
    def dealt(ranks: int) -> list[str]:
        return [str(Shard(tensor_size=ranks, tensor_rank=rank).heads(4)) for rank in range(ranks)]

    assert dealt(1) == ["0-3 of 4"]
    assert dealt(2) == ["0-1 of 4", "2-3 of 4"]
    assert dealt(8) == [f"{rank // 2}-{rank // 2} of 4" for rank in range(8)]
    assert [Shard(tensor_size=ranks).replicas(4) for ranks in (1, 2, 8)] == [1, 1, 2]
    with pytest.raises(ValueError, match="total is 4 KV heads for 3 ranks"):
        Shard(tensor_size=3).heads(4)


def test_layers_are_dealt_out_in_order_with_the_rest_to_the_first_stages() -> None:
    stages = [Shard(stage_count=3, stage=stage).layers(8) for stage in range(3)]

    assert stages == [range(3), range(3, 6), range(6, 8)]
    with pytest.raises(ValueError, match="total is 2 layers, must be at least 3 stages"):
        Shard(stage_count=3).layers(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_size": 2, "tensor_rank": 2}, "tensor_rank is 2, must be from 0 to 1"),
        ({"stage_count": 2, "stage": -1}, "stage is -1, must be from 0 to 1"),
    ],
)
def test_a_rank_that_is_not_among_the_ranks_is_refused(
    arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Shard(**arguments)


def test_a_share_that_leaves_heads_on_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of group 0 are 2-3 of 8, but tensor_size is 2"):
        Form(layout=split(), shard=Shard(tensor_size=2))
