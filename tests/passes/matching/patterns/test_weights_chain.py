"""What may stand between the softmax and the product with v. Whole programs are in tests/near_miss/test_weights.py and test_scores.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.graph.site import Refused
from attn_compiler.passes.matching.patterns import weights_chain
from attn_compiler.passes.matching.patterns.weights_chain import Way
from tests.passes.compiling import mirror_of

SCORES, V = (2, 4, 5, 6), (2, 4, 6, 8)
KEPT = torch.ones(2, 1, 5, 6, dtype=torch.bool)


def _way(change: Callable[..., Tensor], *others: Tensor, v: tuple[int, ...] = V) -> Way:
    """The way down from the softmax of softmax(scores) → change → @ v."""
    mirror = mirror_of(
        lambda scores, v, *rest: change(scores.softmax(-1), *rest) @ v, torch.randn(SCORES), torch.randn(v), *others
    )
    (anchor,) = (n for n in mirror.graph.nodes if n.target is torch.ops.aten.softmax.int)
    way = weights_chain.to_values(mirror, anchor)
    assert weights_chain.carries_weights(mirror, way.product.lhs, anchor)
    assert not weights_chain.carries_weights(mirror, way.product.rhs, anchor)
    return way


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda w: w, 0),
        (lambda w: w.double().float(), 2),
        (lambda w: w.flatten(0, 1).unflatten(0, (2, 4)), 2),
        (lambda w: torch.dropout(w, 0.25, True), 1),
    ],
    ids=["nothing", "casts", "views", "dropout"],
)
def test_what_moves_or_drops_weights_is_on_the_way(change: Callable[..., Tensor], count: int) -> None:
    way = _way(change)
    assert len(way.nodes) == count
    assert not way.is_read


def test_the_share_that_is_dropped() -> None:
    assert weights_chain.dropout(_way(lambda w: torch.dropout(w, 0.25, True))) == 0.25
    assert weights_chain.dropout(_way(lambda w: w)) == 0.0


@pytest.mark.parametrize(
    "change",
    [
        lambda w, c: w.masked_fill(~c, 0.0),
        lambda w, c: torch.where(c, w, 0.0),
        lambda w, c: torch.where(c, w, torch.zeros_like(w)),
        lambda w, c: w * c,
        lambda w, c: c.to(w.dtype) * w,
    ],
)
def test_masks_on_the_weights(change: Callable[..., Tensor]) -> None:
    assert len(_way(change, KEPT).nodes) in (1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.nan_to_num(),
        lambda w: w.nan_to_num(0.0, 1.0, 0.0),
        lambda w: w.masked_fill(w.isnan(), 0),
        lambda w: torch.where(torch.isnan(w), 0.0, w),
    ],
)
def test_zeros_for_what_is_not_a_number_are_no_mask(change: Callable[..., Tensor]) -> None:
    way = _way(change)
    assert len(way.nodes) == 1
    assert not way.is_read


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[..., 1:],
        lambda w: w.narrow(-1, 1, 5),
        lambda w: w.split([1, 5], dim=-1)[1],
        lambda w: torch.split_with_sizes(w, [1, 5], -1)[1],
    ],
    ids=["slice", "narrow", "split", "split_with_sizes"],
)
def test_parts_of_the_last_axis_begin_where_they_do(change: Callable[..., Tensor]) -> None:
    way = _way(change, v=(2, 4, 5, 8))
    (part,) = (found for node in way.nodes if (found := weights_chain._part(node)) is not None)
    whole, start = part
    assert whole.target is torch.ops.aten.softmax.int
    assert start == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.relu(),
        lambda w: w + 1,
        lambda w: w.masked_fill(w < 0.1, 0.5),
        lambda w: w * w.new_ones(6),
        lambda w: w.nan_to_num(nan=1.0),
    ],
    ids=["a function", "a sum", "another fill", "numbers", "another number for NaN"],
)
def test_what_changes_the_weights_ends_the_way(change: Callable[..., Tensor]) -> None:
    with pytest.raises(Refused, match="the softmax is followed by a product with v"):
        _way(change)


def test_another_reader_of_the_weights_is_told() -> None:
    def function(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = scores.softmax(-1)
        return weights @ v, weights

    mirror = mirror_of(function, torch.randn(SCORES), torch.randn(V))
    (anchor,) = (n for n in mirror.graph.nodes if n.target is torch.ops.aten.softmax.int)
    assert weights_chain.to_values(mirror, anchor).is_read


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda w: w * 2.0, "multiply the output"),
        (lambda w: w * torch.ones(5, 1), "multiply the output"),
        (lambda w: w * torch.ones(6), "multiply v"),
        (lambda w: w * w, None),
    ],
    ids=["a number", "of queries", "of keys", "itself"],
)
def test_what_to_write_instead(change: Callable[..., Tensor], remedy: str | None) -> None:
    with pytest.raises(Refused) as refused:
        _way(change)
    told = refused.value.reason.remedy
    assert told is None if remedy is None else remedy in str(told)
