"""Plans of resharding: who sends what to whom, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.fixtures.extents import cell_positions
from lab.fixtures.reshard_oracle import KINDS, Model, Side
from lab.fixtures.route_copying import source_cuts, target_cuts
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import HeadRange, Layout, narrow
from penstock.vocabulary.planes import DType
from penstock.vocabulary.reshard import ReshardPlan, Route, plan_reshard


@given(
    heads=st.integers(1, 12),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    stages=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kind=st.sampled_from(list(KINDS)),
)
@settings(max_examples=40)
def test_every_cell_of_every_target_comes_from_one_source_that_has_it(
    heads: int, sizes: tuple[int, int], stages: tuple[int, int], kind: str
) -> None:
    model = Model(kind=kind, layers=4, heads=heads)
    sources, targets = (
        Side(tensor_size=size, stage_count=count).forms(model)
        for size, count in zip(sizes, stages, strict=True)
    )

    plan = plan_reshard(sources, targets)

    for target, form in enumerate(targets):
        arriving: Counter[int] = Counter()
        for route in (each for each in plan.routes if each.target == target):
            arriving.update(cell_positions(form.layout, target_cuts(route)))
            there = narrow(sources[route.source].layout, source_cuts(route))
            here = narrow(form.layout, target_cuts(route))
            assert [(cell.layer, cell.head, cell.length) for cell in there.cells] == [
                (cell.layer, cell.head, cell.length) for cell in here.cells
            ]
        assert arriving == Counter(range(len(form.layout.cells)))
    assert sum(map(bytes_of, plan.routes)) == sum(form.layout.block_bytes for form in targets)
    assert plan == plan_reshard(sources, targets)


def bytes_of(route: Route) -> int:
    """Bytes for one block of the target."""
    return sum(piece.block_bytes for piece in route.pieces)


def plan_of(model: Model, source: Side, target: Side) -> ReshardPlan:
    return plan_reshard(source.forms(model), target.forms(model))


def side(tensor_size: int, stage_count: int = 1, block_tokens: int = 2) -> Side:
    return Side(tensor_size=tensor_size, stage_count=stage_count, block_tokens=block_tokens)


def heads_sent(plan: ReshardPlan) -> dict[tuple[int, int], str]:
    return {
        (route.source, route.target): ", ".join(str(piece.heads) for piece in route.pieces)
        for route in plan.routes
    }


def test_three_ranks_to_two_cut_the_middle_one() -> None:
    plan = plan_of(Model(kind="split", layers=2, heads=6), side(3), side(2))

    assert heads_sent(plan) == {
        (0, 0): "0-1 of 6",
        (1, 0): "2-2 of 6",
        (1, 1): "3-3 of 6",
        (2, 1): "4-5 of 6",
    }


def test_uneven_heads_go_where_they_belong() -> None:
    plan = plan_of(Model(kind="split", layers=2, heads=8), side(3), side(2))

    assert heads_sent(plan) == {
        (0, 0): "0-1 of 8",
        (1, 0): "2-3 of 8",
        (1, 1): "4-4 of 8",
        (2, 1): "5-7 of 8",
    }


def test_stages_send_the_layers_that_they_have() -> None:
    plan = plan_of(Model(kind="split", layers=5, heads=2), side(1, 2), side(1, 3))

    assert {(r.source, r.target): r.pieces[0].layers for r in plan.routes} == {
        (0, 0): (0, 1),
        (0, 1): (2,),
        (1, 1): (3,),
        (1, 2): (4,),
    }


@pytest.mark.parametrize(
    ("kind", "heads", "source", "target"),
    [
        ("latent", 1, 8, 4),
        ("latent", 1, 4, 8),
        ("latent", 1, 3, 3),
        ("split", 2, 8, 4),
        ("split", 2, 8, 8),
        ("split", 1, 6, 3),
        ("split", 4, 8, 16),
    ],
)
def test_sources_that_hold_the_same_share_the_work(
    kind: str, heads: int, source: int, target: int
) -> None:
    """None sends to a second target while another that holds the same sends to none."""
    plan = plan_of(Model(kind=kind, layers=3, heads=heads), side(source), side(target))

    loads = Counter(route.source for route in plan.routes)
    sent_bytes = Counter[int]()
    for route in plan.routes:
        sent_bytes[route.source] += bytes_of(route)

    assert loads.total() == target
    assert max(loads.values()) == max(1, target // source)
    assert max(sent_bytes.values()) * min(source, target) == sent_bytes.total()


def test_equal_engines_send_each_rank_to_itself() -> None:
    for kind in KINDS:
        plan = plan_of(Model(kind=kind, layers=4, heads=8), side(4, 2), side(4, 2))

        assert [(route.source, route.target) for route in plan.routes] == [
            (rank, rank) for rank in range(8)
        ]


def form_of(**changes: object) -> Form:
    fields: dict[str, object] = {
        "layers": range(2),
        "heads": HeadRange.all_of(4),
        "channels": 4,
        "dtype": DType.BF16,
        "block_tokens": 4,
        "block_count": 1,
    }
    return Form(layout=Layout.split(**{**fields, **changes}))  # type: ignore[arg-type]


def opaque(heads: HeadRange | None, block_tokens: int = 4) -> Form:
    return Form(
        layout=Layout.opaque(
            layers=range(2),
            block_bytes=7,
            encoding="bytes of an engine",
            block_tokens=block_tokens,
            block_count=1,
            heads=heads,
        )
    )


LATENT = Form(
    layout=Layout.mla(layers=range(2), channels=4, dtype=DType.BF16, block_tokens=4, block_count=1)
)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (form_of(block_tokens=6), form_of(), "block_tokens is 6 at the sources and 4 at the t"),
        (form_of(dtype=DType.FP16), form_of(), "dtype of plane k of layer 0 is 'fp16' at the so"),
        (
            form_of(channels=8),
            form_of(),
            "channels of plane k of layer 0 is 8 at the sources and 4",
        ),
        (form_of(heads=HeadRange.all_of(8)), form_of(), "KV heads of the model in layer 0 is 8 at"),
        (form_of(layers=range(1)), form_of(), "layer 1 of target rank 0 is on no source rank: th"),
        (LATENT, form_of(), "planes of layer 0 are latent at the sources and k v on target rank 0"),
        (
            form_of(scale_dtype=DType.FP32),
            form_of(),
            "planes of layer 0 are k v k_scale v_scale at the sources and k v on target rank 0",
        ),
        (
            form_of(heads=HeadRange(first=0, count=3, total=4)),
            form_of(),
            "head 3 of layer 0 of target rank 0 is on no source rank: they have 0-2 of 4",
        ),
        (
            opaque(HeadRange.all_of(4)),
            opaque(HeadRange(first=0, count=2, total=4)),
            "plane opaque of layer 0 has no heads to cut: it is of heads 0-3 of 4 at the sources "
            "and of 0-1 of 4 on target rank 0",
        ),
        (opaque(None, 8), opaque(None), "tokens per position of plane opaque of layer 0 is 8 at t"),
    ],
)
def test_what_cannot_be_resharded_is_refused_with_both_values(
    source: Form, target: Form, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_reshard([source], [target])


def test_sides_must_have_ranks_that_agree_among_themselves() -> None:
    with pytest.raises(ValueError, match="sources is empty"):
        plan_reshard([], [form_of()])
    with pytest.raises(ValueError, match="4 on target rank 0 and 8 on target rank 1"):
        plan_reshard([form_of()], [form_of(), form_of(block_tokens=8)])


def test_opaque_blocks_go_to_who_holds_the_same_heads() -> None:
    halves = [opaque(HeadRange(first=first, count=2, total=4)) for first in (0, 2)]

    plan = plan_reshard(halves, list(reversed(halves)))

    assert [(route.source, route.target) for route in plan.routes] == [(0, 1), (1, 0)]


def test_sums_carry_over_only_for_blocks_of_one_size_and_algorithm() -> None:
    form, coarse = form_of(), form_of(block_tokens=8)
    other = Form(layout=form.layout, checksum=Algorithm.MIX64)

    assert plan_reshard([form], [form]).same_sums
    assert not plan_reshard([form], [coarse]).same_sums
    assert not plan_reshard([form], [other]).same_sums
