from __future__ import annotations

import dataclasses
import itertools

import pytest

from attn_compiler.lowerings.shared import parts, tile_table
from attn_compiler.lowerings.shared.tiles import UNIT
from attn_compiler.lowerings.triton.candidates import ROWS, candidates
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import dense, make_spec


def padded(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(spec, mask=dense(spec.batch, 1, 1, spec.seqlen_kv))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_every_shape_has_several_the_tables_first(dtype: str, sm: int) -> None:
    target = Target.fake(sm=sm)
    for qk, v, seqlen, masked in itertools.product((16, 64, 128, 192, 256), (64, 256), (1, 4096, "s0"), (False, True)):
        spec = make_spec(head_dim=qk, head_dim_v=v, seqlen_q=seqlen, seqlen_kv=seqlen, dtype=dtype)
        spec = padded(spec) if masked else spec
        found, table = candidates(spec, target), tile_table.tiles(spec, target)
        for kernel in ("forward", "grad_q", "grad_kv"):
            tiles = getattr(found, kernel)
            assert tiles[0] == getattr(table, kernel)
            assert 2 <= len(tiles) == len(set(tiles)) <= 10
            assert all(tile.queries % UNIT == tile.keys % UNIT == 0 for tile in tiles)


def test_where_there_are_lists_dq_visits_those_of_some_forward() -> None:
    target = Target.fake()
    open_, listed = (make(make_spec(head_dim=128, seqlen_q=4096, seqlen_kv=4096)) for make in (lambda s: s, padded))
    assert parts.of(listed).tiles
    found = candidates(listed, target)
    assert {(t.queries, t.keys) for t in found.grad_q} <= {(t.queries, t.keys) for t in found.forward}
    assert {(t.queries, t.keys) for t in found.forward} == {(t.queries, t.keys) for t in found.grad_q}
    assert candidates(open_, target).grad_q != found.grad_q


def test_every_forward_of_a_row_can_be_one_whose_lists_dq_visits() -> None:
    for row in ROWS:
        reachable = {(t.queries, t.keys) for t in (*row.grad_q, *row.listed_grad_q)}
        missing = {(t.queries, t.keys) for t in row.forward} - reachable
        assert not missing or row.seqlen_q is not None, (row, missing)


def test_few_queries_are_measured_with_small_tiles() -> None:
    found = candidates(make_spec(seqlen_q=1, seqlen_kv=4096), Target.fake())
    assert {tile.queries for tile in found.forward} == {32}


def test_there_are_none_for_other_dtypes() -> None:
    with pytest.raises(LookupError, match="float64"):
        candidates(make_spec(dtype="float64"), Target.fake())


def test_no_row_is_hidden_by_one_before_it() -> None:
    for index, row in enumerate(ROWS):
        for before in ROWS[:index]:
            hidden = before.bytes >= row.bytes and before.head_dim >= row.head_dim and before.first_sm <= row.first_sm
            assert not hidden or before.seqlen_q is not None, row
