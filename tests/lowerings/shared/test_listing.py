"""Lists of tiles: PyTorch's ops against a search through all pairs, and the kernel against PyTorch's ops."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_compiler.lowerings.shared.kernel_plan import Band
from attn_compiler.lowerings.shared.listing import HEAD, HOLES, OPEN, SOME, SURPLUS, TAIL, UNIT, ListAsked, listed
from tests.lowerings.shared.searched_tiles import Mask, read, searched, tensors

launch = pytest.importorskip("attn_compiler.lowerings.shared.listing_launch")

Tensor = torch.Tensor

PARTS = (("rows",), ("keys",), ("documents_q", "documents_k"), ("mask",))
BANDS = [None, Band(right=0), Band(left=40, right=3), Band(right=0, left=90, from_end=True), Band(left=-5)]
TILES = [(32, 32), (128, 64), (64, 256)]


def units_of(mask: Tensor) -> Tensor:
    """What each 32 × 32 pairs of a dense mask hold."""
    rows = []
    for i in range(0, mask.shape[2], UNIT):
        blocks = [mask[:, :, i : i + UNIT, j : j + UNIT] for j in range(0, mask.shape[3], UNIT)]
        rows.append(torch.stack([x.any((2, 3)) * SOME + (~x).any((2, 3)) * HOLES for x in blocks], -1))
    return torch.stack(rows, 2).to(torch.uint8)


def asked(mask: Mask, tile: tuple[int, int], *, by_key: bool) -> ListAsked:
    band = Band() if mask.band is None else mask.band
    left, right = (OPEN if side is None else side for side in (band.left, band.right))
    return ListAsked(
        rows=mask.have.get("rows"),
        keys=mask.have.get("keys"),
        documents_q=mask.have.get("documents_q"),
        documents_k=mask.have.get("documents_k"),
        units=units_of(mask.have["mask"]) if "mask" in mask.have else None,
        seqlen_q=mask.seqlen_q,
        seqlen_kv=mask.seqlen_kv,
        left=left,
        right=right,
        from_end=band.from_end,
        queries=tile[0],
        keys_of=tile[1],
        by_key=by_key,
        ordered=True,
    )


def arguments(one: ListAsked) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in ListAsked.__slots__)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    seqlen_q, seqlen_kv = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    chosen = draw(st.lists(st.sampled_from(PARTS), min_size=1, unique=True))
    have = tensors(seqlen_q, seqlen_kv, tuple(itertools.chain(*chosen)), draw(st.integers(0, 99)))
    return Mask(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, band=draw(st.sampled_from(BANDS)), have=have)


@settings(deadline=None, max_examples=60)
@given(masks(), st.sampled_from(TILES), st.booleans())
def test_ops_against_a_search(mask: Mask, tile: tuple[int, int], by_key: bool) -> None:
    one = asked(mask, tile, by_key=by_key)
    found = listed(*arguments(one))
    assert read(found) == searched(mask, tile, by_key=by_key)
    rows, length = reversed(one.blocks) if by_key else one.blocks
    assert found.shape[2:] == (rows + SURPLUS, length + HEAD + TAIL)


@settings(deadline=None, max_examples=40)
@given(masks(), st.sampled_from(TILES), st.booleans())
def test_no_allowed_pair_is_left_out_and_none_shut_out_is_taken(
    mask: Mask, tile: tuple[int, int], by_key: bool
) -> None:
    found = read(listed(*arguments(asked(mask, tile, by_key=by_key))))
    exact = searched(mask, tile, by_key=by_key, exactly=True)
    for ours, theirs in zip(itertools.chain(*itertools.chain(*found)), itertools.chain(*itertools.chain(*exact)), strict=True):  # fmt: skip
        assert ours[1] == theirs[1]
        assert set(ours[0]) >= set(theirs[0])


@settings(deadline=None, max_examples=30)
@given(masks(), st.sampled_from(TILES), st.booleans())
def test_the_kernel_against_ops(mask: Mask, tile: tuple[int, int], by_key: bool) -> None:
    given_ = arguments(asked(mask, tile, by_key=by_key))
    ours, theirs = launch.lists(*given_), listed(*given_)
    assert read(ours) == read(theirs)
    assert torch.equal(ours[:, :, :-SURPLUS, -TAIL:], theirs[:, :, :-SURPLUS, -TAIL:])


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


@settings(deadline=None, max_examples=20)
@given(masks(), st.sampled_from(TILES), st.booleans())
def test_blocks_are_in_the_order_of_their_tiles(mask: Mask, tile: tuple[int, int], by_key: bool) -> None:
    found = listed(*arguments(asked(mask, tile, by_key=by_key)))[:, :, :-SURPLUS]
    tiles, order = found[..., 0] + found[..., 2] - found[..., 1], found[..., -1]
    assert torch.equal(order.sort(-1).values, torch.arange(order.shape[-1]).expand(order.shape).int())
    assert bool((tiles.gather(-1, order.long()).diff(dim=-1) >= 0).all())


def usual(name: str, seqlen: int) -> Mask:
    """Masks as models have them."""
    at = torch.arange(seqlen)
    lengths = torch.tensor([seqlen, seqlen // 3, 1])[:, None]
    have: dict[str, Tensor] = {}
    match name:
        case "padded right":
            have["keys"] = at < lengths
        case "padded left":
            have["keys"] = at >= seqlen - lengths
        case "packed":
            have["documents_q"] = have["documents_k"] = ((at > 70).int() + (at > 75).int() + (at > 190).int())[None]
        case "lengths":
            ends = lengths.expand(3, seqlen).int()
            have["rows"] = torch.stack([torch.zeros_like(ends), ends])
    return Mask(seqlen_q=seqlen, seqlen_kv=seqlen, band=Band(right=0), have=have)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", ["padded right", "packed", "lengths"])
def test_usual_masks_visit_no_tile_in_vain(name: str, by_key: bool) -> None:
    mask = usual(name, 300)
    found = read(listed(*arguments(asked(mask, (64, 32), by_key=by_key))))
    assert found == searched(mask, (64, 32), by_key=by_key, exactly=True)


def test_what_is_visited_in_vain() -> None:
    """On the diagonal, where the first key that a row may use stands later: one tile a list at most."""
    mask = usual("padded left", 300)
    found, exact = (
        read(listed(*arguments(asked(mask, (32, 32), by_key=False)))),
        searched(mask, (32, 32), by_key=False, exactly=True),
    )
    surplus = [
        len(a[0]) - len(b[0])
        for a, b in zip(itertools.chain(*itertools.chain(*found)), itertools.chain(*itertools.chain(*exact)), strict=True)
    ]  # fmt: skip
    assert set(surplus) <= {0, 1}
    assert sum(surplus) <= 1


def test_one_unit_stands_for_all() -> None:
    """A dense mask without an axis."""
    mask = torch.rand(2, 1, 1, 200) > 0.02
    whole = Mask(seqlen_q=100, seqlen_kv=200, band=None, have={"mask": mask.expand(2, 1, 100, 200)})
    one = asked(whole, (64, 32), by_key=False)
    few = dataclasses.replace(one, units=units_of(mask))
    assert few.units is not None
    assert few.units.shape[2] == 1
    for function in (listed, launch.lists):
        assert read(function(*arguments(few))) == read(listed(*arguments(one)))


def test_units_of_any_strides_and_some_too_many() -> None:
    have = tensors(100, 200, ("mask",))
    one = asked(Mask(seqlen_q=100, seqlen_kv=200, band=None, have=have), (64, 32), by_key=True)
    assert one.units is not None
    wider = torch.nn.functional.pad(one.units, (0, 1, 0, 1), value=SOME | HOLES).permute(3, 1, 0, 2).contiguous()
    other = dataclasses.replace(one, units=wider.permute(2, 1, 3, 0))
    for function in (listed, launch.lists):
        assert read(function(*arguments(other))) == read(listed(*arguments(one)))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("by_key", [False, True])
def test_without_queries_or_keys(sizes: tuple[int, int], by_key: bool) -> None:
    seqlen_q, seqlen_kv = sizes
    keys = torch.ones(1, seqlen_kv, dtype=torch.bool)
    one = asked(Mask(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, band=None, have={"keys": keys}), (32, 32), by_key=by_key)
    for function in (listed, launch.lists):
        found = read(function(*arguments(one)))
        assert all(row == ([], []) for row in found[0][0])
        assert len(found[0][0]) == (seqlen_kv if by_key else seqlen_q) // 5


@pytest.mark.parametrize("by_key", [False, True])
def test_fake_is_as_the_real_one(by_key: bool) -> None:
    have = tensors(70, 150, ("rows", "keys", "documents_q", "documents_k", "mask"))
    given_ = arguments(asked(Mask(seqlen_q=70, seqlen_kv=150, band=None, have=have), (64, 32), by_key=by_key))
    real = torch.ops.attn_compiler.tile_lists(*given_)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.attn_compiler.tile_lists(
            *[mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given_]
        )
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


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
