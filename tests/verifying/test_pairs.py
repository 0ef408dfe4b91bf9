from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.graph.site import Operand, Term
from attn_compiler.verifying import pairs, running
from attn_compiler.verifying.pairs import (
    ALLOWED,
    BIASED_MASKED_BELOW,
    MASKED,
    NEITHER,
    Own,
    effects,
    sliced,
    slices,
    together,
    varying,
)
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, Tensor, planned, qkv

LOWEST = torch.finfo(torch.float32).min
PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 0, 0, 1]])


def _own(x: Tensor, *, adds: bool = True, weight: float = 1.0, inverted: bool = False) -> Own:
    node = torch.fx.Graph().placeholder("mask")
    operand = Operand(node=node, used=node, dims=(), root=node, root_dims=(), reads={})
    return Own(x=x, term=Term(operand=operand, weight=weight, inverted=inverted), adds=adds)


def test_truth_values() -> None:
    x = torch.tensor([True, False])
    assert effects(_own(x, adds=False)).tolist() == [ALLOWED, MASKED]
    assert effects(_own(x, adds=False, inverted=True)).tolist() == [MASKED, ALLOWED]


def test_truth_values_that_are_added_mask_nothing() -> None:
    assert effects(_own(torch.tensor([True, False]))).tolist() == [NEITHER, ALLOWED]


def test_a_mask_that_a_bias_was_added_to_still_masks() -> None:
    x = torch.tensor([torch.finfo(torch.float16).min, 40.0], dtype=torch.float16).sum().reshape(1)
    assert effects(_own(x)).tolist() == [NEITHER]
    assert effects(_own(torch.cat([x, torch.tensor([-1e4])])), BIASED_MASKED_BELOW).tolist() == [MASKED, NEITHER]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_added_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, torch.finfo(dtype).min, -torch.inf, -1.0, 3.0, torch.nan, -1e4], dtype=dtype)
    expected = [ALLOWED, ALLOWED, MASKED, MASKED, NEITHER, NEITHER, NEITHER, NEITHER]
    assert effects(_own(x)).tolist() == expected


def test_a_weight_may_take_the_masking_away() -> None:
    x = torch.tensor([-65504.0, LOWEST])
    assert effects(_own(x, weight=1e-3)).tolist() == [NEITHER, MASKED]


def test_one_that_masks_is_enough() -> None:
    a = torch.tensor([MASKED, MASKED, ALLOWED, ALLOWED, NEITHER, NEITHER], dtype=torch.int8)
    b = torch.tensor([ALLOWED, NEITHER, ALLOWED, NEITHER, MASKED, NEITHER], dtype=torch.int8)
    assert together([a, b]).tolist() == [MASKED, MASKED, ALLOWED, NEITHER, MASKED, NEITHER]


# ---- slices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 12, 2**24])
def test_slices_cover_every_pair_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    x = torch.zeros(2, 3, 5, 4)
    for at in slices(tuple(x.shape)):
        part = sliced(x, at)
        assert part.numel() <= max(most, 4)
        part.add_(1)
        assert x[at.place(0, 3)] == 1
    assert bool((x == 1).all())


def test_axes_that_change_neither_side_have_one_index() -> None:
    x = _own(torch.zeros(1, 1, 5, 1))
    assert varying([], [x], (2, 3, 5, 4)) == (1, 1, 5, 1)
    assert varying([ix.as_float(Index("h"))], [x], (2, 3, 5, 4)) == (1, 3, 5, 1)


def test_elements_are_those_of_a_broadcast_tensor() -> None:
    own = _own(torch.arange(4.0).reshape(1, 1, 1, 4))
    assert own.element((1, 2, 3, 3)) == 3.0
    assert pairs.elements([own], (0, 0, 0, 1)) == "mask holds 1.0"
    assert pairs.index((0, 1, 2, 3)) == "b=0, h=1, q=2, k=3"


def test_rows_with_keys() -> None:
    """They are asked for where the model gives no number."""

    def of_infinity(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(real[:, None, None, :] == 0, -torch.inf).softmax(-1) @ v

    found = planned(of_infinity, *qkv(), PADDING * torch.tensor([[1], [0]]))
    seen: list[Tensor | None] = []
    check = found.check("output")
    real = pairs.rows_with_keys

    def rows(site: Any, values: Values) -> Tensor | None:
        seen.append(real(site, values))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "rows_with_keys", rows)
        running.run_checks(found.plan, found.args)
    assert check.skipped is None
    assert seen[0] is not None
    assert seen[0].expand(2, 1, 1, 1).flatten().tolist() == [True, False]


def test_rows_of_a_site_without_a_mask() -> None:
    found = planned(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv())
    values = Values(bodies=found.plan.mirrors)
    assert pairs.rows_with_keys(found.check("output").site, values) is None


def test_a_call_without_queries_is_verified() -> None:
    """A slice of no rows, beside a bias that all rows share."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT + slope * torch.arange(k.shape[2])).softmax(-1) @ v

    options = {"verify": True, "strict": True, "inner": "aot_eager"}
    compiled = torch.compile(attention, backend="attn_compiler", dynamic=True, options=options)
    for queries, keys in ((2, 3), (0, 7)):
        q, k, v = (torch.randn(2, 1, n, 4) for n in (queries, keys, keys))
        given = (q, k, v, torch.tensor(0.5))
        torch.testing.assert_close(compiled(*given), attention(*given))
