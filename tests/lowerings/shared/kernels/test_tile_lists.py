"""The kernels that make lists of tiles against PyTorch's ops, and against a search through all pairs where there is a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_compiler.lowerings.shared.ops.listing import SURPLUS, TAIL, listed
from tests.lowerings.shared.listed_masks import BANDS, PARTS, TILES, arguments, asked, masks
from tests.lowerings.shared.searched_tiles import Mask, read, tensors

launch = pytest.importorskip("attn_compiler.lowerings.shared.calls.listing_launch")

Tensor = torch.Tensor


@settings(deadline=None, max_examples=30)
@given(masks(), st.sampled_from(TILES), st.booleans())
def test_the_kernel_against_ops(mask: Mask, tile: tuple[int, int], by_key: bool) -> None:
    given_ = arguments(asked(mask, tile, by_key=by_key))
    ours, theirs = launch.lists(*given_), listed(*given_)
    assert read(ours) == read(theirs)
    assert torch.equal(ours[:, :, :-SURPLUS, -TAIL:], theirs[:, :, :-SURPLUS, -TAIL:])


@pytest.mark.in_turns
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", ["keys", "rows"])
def test_the_kernel_takes_many_blocks_in_several_steps(by_key: bool, name: str) -> None:
    length = 32 * 301 - 5
    have = tensors(*((length, 40) if by_key else (40, length)), (name,), seed=3)
    mask = Mask(seqlen_q=length if by_key else 40, seqlen_kv=40 if by_key else length, band=None, have=have)
    given_ = arguments(asked(mask, (32, 32), by_key=by_key))
    ours, theirs = launch.lists(*given_), listed(*given_)
    assert read(ours) == read(theirs)
    assert torch.equal(ours[:, :, :-SURPLUS, -TAIL:], theirs[:, :, :-SURPLUS, -TAIL:])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 1), (70, 150), (513, 4100), (4100, 513)])
@pytest.mark.parametrize("names", [*PARTS, tuple(itertools.chain(*PARTS))])
@pytest.mark.parametrize("by_key", [False, True])
def test_the_kernel_on_a_gpu(sizes: tuple[int, int], names: tuple[str, ...], by_key: bool) -> None:
    for band, tile in itertools.product(BANDS, TILES):
        mask = Mask(seqlen_q=sizes[0], seqlen_kv=sizes[1], band=band, have=tensors(*sizes, names))
        given_ = arguments(asked(mask, tile, by_key=by_key))
        found = torch.ops.attn_compiler.tile_lists(*[x.cuda() if isinstance(x, Tensor) else x for x in given_])
        assert read(found.cpu()) == read(listed(*given_))
