"""Lists of tiles by PyTorch's ops, against a search through all pairs; the kernels' are kernels/test_tiles.py's. Numbers of documents."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from attn_compiler.lowerings.shared.ops import documents
from attn_compiler.lowerings.shared.ops.listing import HEAD, HOLES, SOME, SURPLUS, TAIL, listed
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings.shared.listed_masks import TILES, arguments, asked, masks, units_of
from tests.lowerings.shared.searched_tiles import Mask, read, searched, tensors

launch = pytest.importorskip("attn_compiler.lowerings.shared.calls.listing_launch")
document_launch = pytest.importorskip("attn_compiler.lowerings.shared.calls.document_launch")


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


# Documents are numbered in 32 bits, whatever numbers the model gives them.
def _row(kind: str, length: int) -> Tensor:
    made = torch.randint(0, max(length // 7, 1), (2, length))
    return {
        "sorted": made.sort(1).values,
        "again": made,
        "beyond": made * 2**32 + 5,
        "one beyond": torch.where(torch.arange(length) == length // 2, 2**31, made),
        "negative": -made - 2**33,
    }[kind]


@pytest.mark.parametrize("kind", ["sorted", "again", "beyond", "one beyond", "negative"])
@pytest.mark.parametrize("sizes", [(0, 5), (1, 1), (37, 37), (700, 513), (3, 1500)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_same", [False, True])
def test_numbers_are_equal_where_documents_are(kind: str, sizes: tuple[int, int], device: str, is_same: bool) -> None:
    """By the kernel and by PyTorch's ops; rows of the batch are unlike, and what lies between them is read by neither."""
    whole = _row(kind, sum(sizes) + 3)
    queries = whole[:, : sizes[0]].to(device)
    keys = None if is_same else whole[:, sizes[0] : sum(sizes)].to(device)
    of_keys = queries if keys is None else keys
    wanted = queries[:, :, None] == of_keys[:, None]
    for function in (documents.numbered, document_launch.numbers):
        mine, others = function(queries, keys)
        assert mine.dtype == others.dtype == torch.int32
        others = mine if keys is None else others
        assert torch.equal(mine[:, :, None] == others[:, None], wanted)


def test_numbering_is_as_pytorch_wants_ops() -> None:
    queries, keys = _row("beyond", 9), _row("again", 5)
    for operands in ((queries, keys), (queries, None)):
        torch.library.opcheck(documents.OP, operands)
