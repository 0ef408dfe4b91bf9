"""Blocks of the kernel for Hopper."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings.hopper import plan
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
