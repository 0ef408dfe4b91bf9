"""Blocks of the kernel for Hopper."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.choice import head_parts
from attn_compiler.lowerings.hopper import plan
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.spec import masks
from attn_compiler.spec.attention import SizeRange
from attn_compiler.spec.masks import MaskKind, MaskSpec
from tests.lowerings.specs import CAUSAL, make_spec


def test_unknown_head_dims_are_an_error() -> None:
    with pytest.raises(TypeError, match="unknown head dims"):
        plan.blocks_of(make_spec(head_dim="s0"))


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "is_three"),
    [(8192, 64, True), (2048, 64, False), (8192, 128, False), ("s0", 64, False)],
)
def test_long_sequences_of_narrow_heads_have_three_warpgroups(seqlen: int | str, head_dim: int, is_three: bool) -> None:
    spec = make_spec(mask=CAUSAL, seqlen_q=seqlen, seqlen_kv=seqlen, head_dim=head_dim)
    assert (plan.blocks_of(spec) == plan.THREE) is is_three


def test_a_block_has_64_queries_for_each_warpgroup() -> None:
    assert {blocks.queries for blocks in plan.BLOCKS.values()} == {128}
    assert plan.THREE.queries == 192
    assert not plan.THREE.takes_turns


def test_outputs_leave_from_the_queries_place_where_there_is_no_room() -> None:
    assert plan.leaves_from_queries(make_spec(head_dim=256))
    assert not plan.leaves_from_queries(make_spec(head_dim=128))


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums were faster wherever they are no power of two."""
    monkeypatch.setattr(head_parts, "is_faster", lambda spec: head_dim_sums(spec) != head_dim_tiles(spec))


@pytest.mark.parametrize(
    ("head_dim", "multiplied", "stages"), [(72, 80, 3), (80, 80, 3), (96, 96, 3), (112, 112, 2), (128, 128, 2)]
)
def test_a_sum_leaves_room_for_more_tiles(head_dim: int, multiplied: int, stages: int, summed: None) -> None:
    spec = make_spec(head_dim=head_dim)
    assert plan.multiplied(spec) == (multiplied, multiplied)
    assert plan.blocks_of(spec).stages == stages
    assert not plan.leaves_from_queries(spec)


def test_what_was_not_measured_has_powers_of_two() -> None:
    spec = make_spec(head_dim=80, seqlen_q=256, seqlen_kv=256)
    assert plan.multiplied(spec) == (128, 128)
    assert plan.blocks_of(spec) == plan.BLOCKS[128]


def test_of_any_length_what_guards_say_counts() -> None:
    """Three warpgroups where every call is long, cuDNN's backward where every call is short."""
    any_length = make_spec(head_dim=64, seqlen_q="s0", seqlen_kv="s0", mask=CAUSAL)
    assert plan.blocks_of(any_length) == plan.BLOCKS[64]
    long = dataclasses.replace(any_length, ranges=(SizeRange(size="s0", least=4096),))
    assert plan.blocks_of(long) == plan.THREE
    wide = make_spec(head_dim=128, seqlen_q="s0", seqlen_kv="s0", mask=CAUSAL)
    assert not plan.cudnn_is_faster(wide)
    assert plan.cudnn_is_faster(dataclasses.replace(wide, ranges=(SizeRange(size="s0", least=2, most=512),)))


@pytest.mark.parametrize(("qk", "v"), [(64, 80), (72, 72), (96, 80), (112, 112), (128, 96), (192, 128)])
def test_tiles_of_sums_fit_shared_memory(qk: int, v: int, summed: None) -> None:
    spec = make_spec(head_dim=qk, head_dim_v=v)
    blocks, (qk, v) = plan.blocks_of(spec), plan.multiplied(spec)
    queries = blocks.queries * blocks.query_stages * qk
    elements = queries + blocks.stages * blocks.keys * (qk + v)
    if plan.leaves_from_queries(spec):
        assert (qk, v) == (192, 128)
    else:
        elements += blocks.queries * v
    assert 2 * elements <= 226 * 1024


_OF_KEY = Load("of_key", (Index("b"), Index("k")), "int")


@pytest.mark.parametrize(
    ("kind", "is_ordered"),
    [
        (masks.Document(of_key=_OF_KEY), True),
        (masks.Chunked(size=300), True),
        (masks.KeyPadding(condition=ix.as_bool(_OF_KEY)), False),
        (masks.Causal(), False),
    ],
)
def test_blocks_of_any_length_come_long_ones_first(kind: MaskKind, is_ordered: bool) -> None:
    dense = masks.Dense(shape=(2, 1, 1024, 1024), dtype="bool")
    mask = masks.MaskSpec(kinds=(kind,), dense=dense)
    assert plan.is_ordered(make_spec(mask=mask, seqlen_q=1024, seqlen_kv=1024)) is is_ordered
    # For so few queries no lists are made.
    assert not plan.is_ordered(make_spec(mask=mask, seqlen_q=16, seqlen_kv=1024))


@pytest.mark.parametrize(
    ("qk", "v", "multiplied", "part", "stages"),
    [
        (512, 512, 512, 256, 3),
        (264, 264, 384, 128, 8),
        (384, 320, 384, 128, 8),
        (192, 512, 256, 256, 5),
        (512, 128, 512, 256, 3),
    ],
)
def test_wide_heads_have_a_ring_of_as_many_parts_as_there_is_room_for(
    qk: int, v: int, multiplied: int, part: int, stages: int
) -> None:
    spec = make_spec(head_dim=qk, head_dim_v=v)
    assert plan.is_wide(spec)
    assert plan.multiplied(spec) == (multiplied, plan.WIDE_PASS)
    blocks = plan.blocks_of(spec)
    assert blocks.part == part
    assert blocks.stages == stages >= (multiplied + plan.WIDE_PASS) // part
    assert not blocks.takes_turns
    assert not plan.leaves_from_queries(spec)
    assert not plan.has_backward(spec)


@pytest.mark.parametrize("mask", [CAUSAL, MaskSpec()], ids=["causal", "none"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (384, 320), (264, 264), (200, 512), (512, 64)])
def test_passes_of_wide_heads_fit_into_shared_memory(head_dim: int, head_dim_v: int, mask: MaskSpec) -> None:
    spec = make_spec(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim_v, mask=mask)
    assert plan.has_wide_backward(spec)
    qk, v = plan.wide_head_dims(spec)
    for grad in "qk":
        blocks = plan.wide_blocks_of(spec, grad)
        assert head_dim <= qk < head_dim + blocks.part
        assert head_dim_v <= v < head_dim_v + blocks.part_v
        assert qk % blocks.part == v % blocks.part_v == 0
        # A whole tile is there at once: its scores and its sums read the same.
        assert blocks.stages >= qk // blocks.part
        numbers = plan.ROWS * (qk + v + blocks.tile)
        numbers += blocks.tile * (blocks.stages * blocks.part + blocks.stages_v * blocks.part_v)
        assert 200 * 1024 <= 2 * numbers <= 226 * 1024
    assert plan.wide_blocks_of(spec, "v").rows == 2 * plan.ROWS


def _of(*kinds: MaskKind) -> MaskSpec:
    """A tensor that was read as those."""
    return MaskSpec(kinds=kinds, dense=masks.Dense(shape=(2, 1, 2048, 2048), dtype="bool"))


_LONG: Any = {"dtype": "bfloat16", "seqlen_q": 2048, "seqlen_kv": 2048, "head_dim": 512}


@pytest.mark.parametrize(
    ("given", "is_faster"),
    [
        ({"mask": CAUSAL}, True),
        ({}, True),
        ({"mask": CAUSAL, "head_dim": 320}, True),
        ({"mask": CAUSAL, "head_dim": 312}, False),
        ({"mask": CAUSAL, "head_dim": 512, "head_dim_v": 320}, False),
        ({"mask": CAUSAL, "seqlen_q": 1023}, False),
        ({"mask": CAUSAL, "seqlen_kv": "s0"}, True),
        ({"mask": _of(masks.SlidingWindow(left=100, right=0))}, False),
        ({"mask": _of(masks.Causal(), masks.Document(of_key=_OF_KEY))}, False),
        ({"mask": _of(masks.Causal(), masks.KeyPadding(condition=ix.as_bool(_OF_KEY)))}, True),
    ],
)
def test_the_passes_of_wide_heads_are_faster_where_that_was_measured(given: dict[str, Any], is_faster: bool) -> None:
    assert plan.wide_is_faster(make_spec(**_LONG | given)) is is_faster
