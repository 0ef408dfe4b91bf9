"""Which kernels make the lists of a mask, and what they are told; what they write is kernels/test_tile_lists.py's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.shared.calls import listing_launch
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.ops.listing import OF_KEYS, OF_QUERIES, OPEN, ListAsked
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings.shared.listed_masks import arguments, asked
from tests.lowerings.shared.searched_tiles import Mask, tensors


def _launched(monkeypatch: pytest.MonkeyPatch, one: ListAsked) -> dict[str, tuple[Arguments, dict[str, Any]]]:
    """What each kernel would be launched with; none runs."""
    found: dict[str, tuple[Arguments, dict[str, Any]]] = {}

    def record(kernel: Any, same: Any, have: dict[str, Any], made: Callable[[], Arguments]) -> None:
        found[kernel.fn.__name__] = made(), have

    monkeypatch.setattr(listing_launch, "launch", record)
    listing_launch.lists(*arguments(one))
    return found


def _asked(names: tuple[str, ...], *, by_key: bool = False, band: Band | None = None) -> ListAsked:
    mask = Mask(seqlen_q=70, seqlen_kv=150, band=band, have=tensors(70, 150, names))
    return asked(mask, (64, 32), by_key=by_key)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("keys",), ["tile_bounds", "tile_lists", "tile_order"]),
        (("rows", "documents_q", "documents_k"), ["tile_bounds", "tile_lists", "tile_order"]),
        # What 32 x 32 pairs hold needs no sums.
        (("mask",), ["tile_lists", "tile_order"]),
    ],
)
def test_only_what_has_work_is_launched(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], expected: list[str]
) -> None:
    one = _asked(names)
    assert list(_launched(monkeypatch, one)) == expected
    assert list(_launched(monkeypatch, dataclasses.replace(one, ordered=False))) == expected[:-1]


def test_what_a_mask_does_not_have_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _launched(monkeypatch, _asked(("keys",)))
    bounds, have = found["tile_bounds"]
    assert bounds.tensors == {
        "Rows": None, "Keys": "keys", "DocumentsQ": None, "DocumentsK": None, "OfQueries": "of_queries", "OfKeys": "of_keys"
    }  # fmt: skip
    assert (bounds.numbers["rows_side"], bounds.numbers["documents_qb"]) == (0, 0)
    lists, _ = found["tile_lists"]
    assert lists.tensors["Units"] is None
    assert [lists.numbers[f"HAS_{part}"] for part in ("ROWS", "KEYS", "DOCUMENTS")] == [False, True, False]
    assert (have["of_queries"].shape[1:], have["of_keys"].shape[1:]) == ((OF_QUERIES, 2), (OF_KEYS, 5))


@pytest.mark.parametrize(("by_key", "lists"), [(False, 2), (True, 5)])
def test_there_is_a_program_for_each_block_and_for_each_list(
    monkeypatch: pytest.MonkeyPatch, by_key: bool, lists: int
) -> None:
    found = _launched(monkeypatch, _asked(("keys", "mask"), by_key=by_key))
    batch, heads = found["tile_lists"][1]["lists"].shape[:2]
    assert found["tile_bounds"][0].grid == (2 + 5, batch, 1)
    assert found["tile_lists"][0].grid == (lists, heads, batch)
    assert found["tile_order"][0].grid == (1, batch * heads, 1)


def test_an_axis_of_one_element_has_no_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _asked(("keys",))
    assert one.keys is not None
    shared = dataclasses.replace(one, keys=one.keys[:1])
    assert _launched(monkeypatch, one)["tile_bounds"][0].numbers["keys_b"] == 150
    assert _launched(monkeypatch, shared)["tile_bounds"][0].numbers["keys_b"] == 0


def test_an_open_side_reaches_beyond_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = _launched(monkeypatch, _asked(("keys",), band=Band(right=3)))["tile_lists"][0].numbers
    assert (numbers["band_left"], numbers["band_right"]) == (OPEN, 3)
    numbers = _launched(monkeypatch, _asked(("keys",), band=Band(left=9, right=0, from_end=True)))["tile_lists"][
        0
    ].numbers
    assert (numbers["band_left"], numbers["band_right"]) == (9 - 80, 80)


@pytest.mark.parametrize(("tile", "blocks"), [((32, 32), 128), ((128, 64), 128), ((256, 256), 32), ((2048, 2048), 1)])
def test_a_program_reads_fewer_blocks_that_have_many_units(tile: tuple[int, int], blocks: int) -> None:
    one = dataclasses.replace(_asked(("mask",)), queries=tile[0], keys_of=tile[1])
    assert listing_launch._block(one) == blocks
    assert listing_launch._block(dataclasses.replace(one, units=None, keys=torch.ones(1, 150).bool())) == 128
