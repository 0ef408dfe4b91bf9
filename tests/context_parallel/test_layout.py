"""Every rank's part in one process: the parts of all ranks, put together, are the sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from attn_compiler.context_parallel.layout import Layout, joined

layouts = st.builds(Layout, size=st.integers(1, 9), balanced=st.booleans())


@pytest.mark.parametrize(
    ("balanced", "expected"),
    [
        (False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (True, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ],
)
def test_positions_of_each_rank(balanced: bool, expected: list[list[int]]) -> None:
    layout = Layout(size=3, balanced=balanced)
    assert [layout.positions(4, rank).tolist() for rank in range(3)] == expected


@given(layout=layouts, chunk=st.integers(1, 5))
def test_each_position_is_on_one_rank(layout: Layout, chunk: int) -> None:
    length = chunk * layout.chunks
    found = torch.cat([layout.positions(length // layout.size, rank) for rank in range(layout.size)])
    assert sorted(found.tolist()) == list(range(length))
    assert found.dtype == torch.int64


@given(layout=layouts, chunk=st.integers(1, 5), dim=st.sampled_from([0, 1, 2, -1, -2]))
def test_parts_are_at_their_positions_and_give_the_whole_back(layout: Layout, chunk: int, dim: int) -> None:
    length = chunk * layout.chunks
    shape = [2, 3, 4]
    shape[dim] = length
    x = torch.randint(1 << 30, shape)
    parts = [layout.part(x, dim, rank) for rank in range(layout.size)]
    for rank, part in enumerate(parts):
        assert part.equal(x.index_select(dim, layout.positions(length // layout.size, rank)))
        assert part.is_contiguous()
    assert joined(torch.stack(parts), dim % 3, layout.chunks > layout.size).equal(x)


@given(layout=layouts, length=st.integers(1, 200))
def test_the_next_length_is_the_least_that_can_be_cut(layout: Layout, length: int) -> None:
    padded = layout.padded(length)
    fitting = [n for n in range(length, length + layout.chunks) if n % layout.chunks == 0]
    assert [padded] == fitting


@given(size=st.integers(2, 9), chunk=st.integers(1, 5))
def test_balanced_ranks_have_as_much_to_compute_under_a_causal_mask(size: int, chunk: int) -> None:
    layout = Layout(size=size, balanced=True)
    keys = {int((layout.positions(2 * chunk, rank) + 1).sum()) for rank in range(size)}
    assert len(keys) == 1
