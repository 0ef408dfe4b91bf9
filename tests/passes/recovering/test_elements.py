"""Where the element of a score stands in a tensor whose dimensions are made of several axes, or of parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Linear, Size
from attn_compiler.passes.recovering import elements
from attn_compiler.passes.recovering.reading import Unreadable
from attn_compiler.spec.added_scores import Bias
from tests.passes.compiling import mark
from tests.passes.recovered_sites import Recovered, recover

B, H, S, D = 6, 2, 5, 8


def _only(function: Callable[..., Any], *inputs: Tensor) -> Recovered:
    (found,) = recover(function, *inputs)
    assert found.worst() < 1e-6
    return found


def _texts(found: Recovered) -> list[str]:
    (term,) = found.match.scores.additive
    return [ix.text(i) for i in elements.indices(found.match, term.operand.dims)]


def test_one_axis_a_dimension() -> None:
    found = _only(
        lambda q, m: F.scaled_dot_product_attention(q, q, q, m), torch.randn(B, H, S, D), torch.randn(H, 1, S)
    )
    assert _texts(found) == ["h", "0", "k"]


def test_batch_and_heads_in_one_dimension() -> None:
    def function(q: Tensor, bias: Tensor) -> Tensor:
        flat = q.view(B * H, S, D)
        scores = torch.baddbmm(bias.expand(B, H, S, S).reshape(B * H, S, S), flat, flat.mT)
        return F.softmax(scores.view(B, H, S, S), -1).view(B * H, S, S) @ flat

    assert _texts(_only(function, torch.randn(B, H, S, D), torch.randn(H, S, S))) == ["2·b + h", "q", "k"]


def test_a_part_of_the_batch() -> None:
    def function(q: Tensor, bias: Tensor) -> Tensor:
        scores = (q @ q.mT).view(B // 3, 3, H, S, S) + bias.unsqueeze(1).unsqueeze(0)
        return F.softmax(scores.view(B, H, S, S), -1) @ q

    found = _only(function, torch.randn(B, H, S, D), torch.randn(3, S, S))
    assert _texts(found) == ["0", "b % 3", "0", "q", "k"] or _texts(found) == ["0", "(b % 3)", "0", "q", "k"]


def test_ranges_and_shape() -> None:
    q = mark(torch.randn(B, H, S, D), [S])
    found = _only(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), q, torch.randn(H, 1, 1))
    ranges = elements.ranges(found.match, {})
    assert (ranges["b"], ranges["h"]) == (Linear((), B - 1), Linear((), H - 1))
    ((size, factor),) = ranges["q"].terms
    assert isinstance(size, Size)
    assert (factor, ranges["q"].const, ranges["k"]) == (1, -1, ranges["q"])
    (term,) = found.match.scores.additive
    assert elements.varies_along(found.match, term.operand) == "h"
    assert elements.shape(found.match, "h") == (1, H, 1, 1)
    assert elements.shape(found.match, "hq") == (1, H, size.name, 1)


def test_a_dimension_that_is_none_of_the_scores_is_unreadable() -> None:
    found = _only(
        lambda q, m: F.scaled_dot_product_attention(q, q, q, m), torch.randn(B, H, S, D), torch.randn(H, 1, S)
    )
    with pytest.raises(Unreadable):
        elements.indices(found.match, (found.match.axes.head_dim_qk,))


@pytest.mark.parametrize("sizes", [(3,), (4,), (4, 3)], ids=["inner", "outer", "both"])
def test_parts_of_the_batch_of_symbolic_sizes(sizes: tuple[int, ...]) -> None:
    """(windows · images) attentions, with a bias for each window, or for each image."""
    images, windows = 4, 3

    def function(x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        q = x.flatten(0, 1)
        scores = (q @ q.mT).view(x.shape[0], x.shape[1], H, S, S) + inner[None, :, None] + outer[:, None, None, None]
        return F.softmax(scores.flatten(0, 1), -1) @ q

    x = torch.randn(images, windows, H, S, D)
    inputs = [x, torch.randn(windows, S, S), torch.randn(images, S)]
    found = _only(function, *(mark(tensor, sizes) for tensor in inputs))
    assert {len(kind.varies_along) for kind in found.meaning.scores if isinstance(kind, Bias)} == {2, 3}
    assert [type(kind) for kind in found.meaning.scores] == [Bias, Bias]
