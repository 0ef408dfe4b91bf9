from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.decode.plan import DecodeCall, DecodePlan, Schedule
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Alignment, Causal, Dense, MaskKind, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, make_spec

SCHEDULE = Schedule(keys=64, warps=4, stages=3, programs=132, least_keys=128)
LENGTH = masks.KeyBound(side="last", bound=Load("length", (), "int"))
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("padding", (Index("b"), Index("k")), "int")))


def proved(*kinds: MaskKind, dtype: str = "bool") -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, 1, 128), dtype=dtype))


def spec_of(mask: MaskSpec, seqlen_q: int = 1, **others: object) -> AttentionSpec:
    return make_spec(mask=mask, seqlen_q=seqlen_q, needs_grad=False, **others)  # type: ignore[arg-type]


def operands(spec: AttentionSpec, splits: int | None = 1) -> tuple[str, ...]:
    return decode_plan.of(DecodeCall(spec=spec, schedule=dataclasses.replace(SCHEDULE, splits=splits))).operands


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "expected"),
    [
        (MaskSpec(), 1, ()),
        (BOTTOM_RIGHT, 1, ()),
        (BOTTOM_RIGHT, 4, ("bounds",)),
        (CAUSAL, 1, ("bounds",)),
        (proved(LENGTH), 1, ("bounds",)),
        (proved(LENGTH, PADDING), 1, ("bounds", "keys")),
        (proved(SlidingWindow(left=7, right=None), Causal(alignment=Alignment.BOTTOM_RIGHT)), 1, ("bounds",)),
        (MaskSpec(dense=Dense(shape=(2, 1, 1, 128), dtype="bool"), reason="an input"), 1, ("bounds", "keys")),
        (MaskSpec(dense=Dense(shape=(2, 8, 1, 128), dtype="bool"), reason="an input"), 1, ("bounds", "mask")),
        (MaskSpec(dense=Dense(shape=(2, 1, 1, 128), dtype="float32"), reason="an input"), 1, ("bounds", "bias")),
    ],
)
def test_operands(mask: MaskSpec, seqlen_q: int, expected: tuple[str, ...]) -> None:
    spec = spec_of(mask, seqlen_q)
    assert operands(spec) == expected
    assert operands(spec, splits=4) == operands(spec, splits=None) == ("count", *expected)


def test_sinks_are_the_last_operand() -> None:
    assert operands(spec_of(proved(LENGTH), changes=(Sinks(requires_grad=False),))) == ("bounds", "sinks")


def test_places_of_operands() -> None:
    plan = DecodePlan(count=True, keys=True, bias=True)
    assert [plan.place(*names) for names in (("count",), ("mask", "bias"), ("bounds",))] == [0, 2, None]


def test_a_band_is_an_interval_of_each_query() -> None:
    spec = spec_of(proved(SlidingWindow(left=7, right=None), Causal()), 4)
    assert parts.parts(spec).rows is None
    found = decode_plan.parts(spec)
    assert found.band is None
    assert found.rows is not None
    values = [
        [ix.evaluate(x, {"q": q}, lambda name, at: 0) for x in (found.rows.lower, found.rows.upper) if x is not None]
        for q in (0, 9)
    ]
    assert values == [[-7, 1], [2, 10]]


@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q", "rows"),
    [(8, 8, 1, (16, 1)), (32, 8, 1, (16, 1)), (32, 8, 5, (32, 1)), (32, 4, 16, (64, 2)), (71, 1, 1, (64, 2))],
)
def test_queries_of_a_group_share_tiles(heads: int, heads_kv: int, seqlen_q: int, rows: tuple[int, int]) -> None:
    assert decode_plan.rows_of(make_spec(heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q)) == rows


@pytest.mark.parametrize(
    ("spec", "rows"), [({"head_dim": 256}, (32, 4)), ({"head_dim_v": 256}, (32, 4)), ({"dtype": "float32"}, (16, 8))]
)
def test_tiles_are_smaller_where_registers_are_short(spec: dict[str, Any], rows: tuple[int, int]) -> None:
    assert decode_plan.rows_of(make_spec(heads=16, heads_kv=2, seqlen_q=16, **spec)) == rows


@pytest.mark.parametrize(
    ("tiles", "seqlen_kv", "splits"),
    [
        (8, 32768, 16),
        (32, 32768, 4),
        (128, 4096, 1),
        (512, 8192, 1),
        (10_000, 8192, 1),
        # Once would leave four of ten multiprocessors idle, twice too.
        (80, 8192, 1),
        (96, 8192, 1),
        (160, 8192, 3),
        # No fewer keys than are worth it.
        (8, 1024, 8),
        (8, 100, 1),
        (8, 1, 1),
        (0, 4096, 32),
    ],
)
def test_splits_fill_the_machine_and_are_worth_their_cost(tiles: int, seqlen_kv: int, splits: int) -> None:
    assert decode_plan.splits(SCHEDULE, tiles=tiles, seqlen_kv=seqlen_kv) == splits


_NUMBERS = MaskSpec(dense=Dense(shape=(2, 8, 1, 128), dtype="float32"), reason="an input")


@pytest.mark.parametrize(
    ("mask", "queries", "by_head", "means", "bounds_of"),
    [
        (proved(LENGTH), 1, False, "all", "batch"),
        (proved(LENGTH), 3, False, "all", "query"),
        (proved(LENGTH), 1, True, "all", "row"),
        (_NUMBERS, 1, True, "finite", "row"),
    ],
)
def test_rows_without_keys_are_means_by_their_bounds(
    mask: MaskSpec, queries: int, by_head: bool, means: str, bounds_of: str
) -> None:
    asked = dataclasses.replace(mask, means=True)
    calls = [
        DecodeCall(spec=spec_of(each, queries), schedule=dataclasses.replace(SCHEDULE, splits=1), by_head=by_head)
        for each in (mask, asked)
    ]
    plain, found = map(decode_plan.of, calls)
    assert (plain.means, found.means, found.bounds_of) == (None, means, bounds_of)
    assert plain.operands == found.operands


@pytest.mark.parametrize("splits", [None, 3])
def test_a_call_is_its_text(splits: int | None) -> None:
    call = DecodeCall(spec=spec_of(proved(LENGTH, PADDING)), schedule=dataclasses.replace(SCHEDULE, splits=splits))
    assert DecodeCall.from_text(call.to_text()) == call
    assert (
        DecodeCall(spec=call.spec, schedule=SCHEDULE).to_text()
        != DecodeCall(spec=call.spec, schedule=dataclasses.replace(SCHEDULE, warps=8)).to_text()
    )
