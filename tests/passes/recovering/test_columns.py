"""What the head dims of k and v are made of: runs of one tensor each, through views and writes, and None for the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.recovering import columns
from attn_compiler.passes.recovering.columns import ColumnRun, Columns
from tests.passes.compiling import mark
from tests.passes.matched_sites import matched

B, H, S, D = 2, 3, 5, 4
Make = Callable[[Tensor, Tensor], Tensor]


def _runs(make: Make, width: int, *, dynamic: bool = False) -> tuple[list[ColumnRun] | None, Columns]:
    """Of k, which is made of x (B, S, H · D) and of what the heads share (B, 1, S, D)."""

    def function(q: Tensor, x: Tensor, shared: Tensor) -> Tensor:
        k = make(x, shared)
        return scaled_dot_product_attention(q, k, k)

    keys = [torch.randn(B, S, H * D), torch.randn(B, 1, S, D)]
    if dynamic:
        keys = [mark(x, [S]) for x in keys]
    mirror, match = matched(function, torch.randn(B, H, 1, width), *keys)
    found = Columns(mirror)
    return found.runs(match, match.k, match.axes.head_dim_qk), found


def _heads(x: Tensor) -> Tensor:
    return x.view(B, x.shape[1], H, D).transpose(1, 2)


def _joined(x: Tensor, shared: Tensor) -> Tensor:
    return torch.cat((_heads(x.sin()), shared.expand(-1, H, -1, -1)), -1)


def _written(x: Tensor, shared: Tensor) -> Tensor:
    k = x.new_empty(B, H, x.shape[1], 2 * D)
    k[..., :D].copy_(_heads(x.sin()))
    k[..., D:] = shared
    return k


def _split(x: Tensor, shared: Tensor) -> Tensor:
    first, _, last = torch.split(_heads(x.sin()), [1, D - 2, 1], -1)
    return torch.cat((last, shared.expand(-1, H, -1, -1), first), -1)


@pytest.mark.parametrize("make", [_joined, _written], ids=lambda make: make.__name__)
def test_two_parts_are_two_runs(make: Make) -> None:
    runs, _ = _runs(make, 2 * D)
    assert runs is not None
    own, shared = runs
    assert [(run.first, run.size) for run in runs] == [(0, D), (D, D)]
    assert own.of.node.target is torch.ops.aten.sin.default
    assert shared.of.node.op == "placeholder"
    h, d = Index("h"), Index("d")
    assert own.at[:2] == (Index("b"), Index("k"))
    assert own.at[2] == ix.add(ix.mul(h, ix.Const(D)), d) or own.at[2:] == (h, d)
    assert shared.at == (Index("b"), ix.ZERO, Index("k"), d)


def test_pieces_begin_where_they_were_cut() -> None:
    runs, _ = _runs(_split, D + 2)
    assert runs is not None
    assert [(run.first, run.size) for run in runs] == [(0, 1), (1, D), (D + 1, 1)]
    last, _, first = (run.at[-1] for run in runs)
    # Of one head dim, d is 0: the last one of the head and the first.
    of_head = ix.mul(Index("h"), ix.Const(D))
    assert {str(first), str(last)} in (
        {str(of_head), str(ix.add(of_head, ix.Const(D - 1)))},
        {str(ix.ZERO), str(ix.Const(D - 1))},
    )


def test_a_length_may_be_a_symbol() -> None:
    runs, _ = _runs(_joined, 2 * D, dynamic=True)
    assert runs is not None
    assert [(run.first, run.size) for run in runs] == [(0, D), (D, D)]


def _by_condition(x: Tensor, shared: Tensor) -> Tensor:
    return torch.where(torch.arange(D) < 2, _heads(x), shared)


def _partly_written(x: Tensor, shared: Tensor) -> Tensor:
    k = x.new_empty(B, H, x.shape[1], 2 * D)
    k[..., :D] = _heads(x)
    return k


def _cast(x: Tensor, shared: Tensor) -> Tensor:
    return torch.cat((_heads(x).double().float(), shared.expand(-1, H, -1, -1)), -1)


def _by_keys(x: Tensor, shared: Tensor) -> Tensor:
    return torch.cat((_heads(x)[:, :, :2], shared.expand(-1, H, -1, -1)[:, :, 2:]), 2)


def test_what_nothing_was_written_to_is_of_no_tensor() -> None:
    assert _runs(_partly_written, 2 * D)[0] is None


@pytest.mark.parametrize("make", [_by_condition, _by_keys], ids=lambda make: make.__name__)
def test_what_is_chosen_or_joined_otherwise_is_one_tensor(make: Make) -> None:
    """Elements are traced to what holds them, and no further."""
    runs, _ = _runs(make, D)
    assert runs is not None
    (run,) = runs
    assert (run.first, run.size) == (0, D)
    assert run.of.node.target not in (torch.ops.aten.view.default, torch.ops.aten.transpose.int)


def test_a_cast_makes_another_tensor() -> None:
    runs, _ = _runs(_cast, 2 * D)
    assert runs is not None
    assert "to" in str(runs[0].of.node.target)


def test_what_made_a_tensor_is_a_node_only_while_nothing_writes_to_it() -> None:
    def function(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        k = linear(x, weight)
        v = linear(x, weight)
        v.add_(1.0)
        return scaled_dot_product_attention(q, k, v), v

    mirror, match = matched(function, torch.randn(B, H, 1, D), torch.randn(B, H, S, 6), torch.randn(D, 6))
    reader = Columns(mirror)
    of_k, of_v = reader.runs(match, match.k, match.axes.head_dim_qk), reader.runs(match, match.v, match.axes.head_dim_v)
    assert of_k is not None
    assert of_v is not None
    made = columns.made_by(mirror, of_k[0].of)
    assert made is not None
    assert (made.name, made.op) == ("k", "call_function")
    assert columns.made_by(mirror, of_v[0].of) is None
