"""Anchors to sites and misses, each with the pattern that came furthest and the place where it stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.matching.patterns import PATTERNS
from attn_compiler.reporting.facts import MissReport
from tests.passes.compiling import CPU_FLASH, compiled

B, H, S, D = 2, 4, 6, 8
sdpa = F.scaled_dot_product_attention


def _miss(function: Callable[[Tensor], object]) -> MissReport:
    """The one miss; results equal eager's."""
    x = torch.randn(B, H, S, D)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x))
    (miss,) = run.report.misses
    assert CPU_FLASH not in run.calls
    return miss


def test_patterns_have_names_of_their_own_and_share_no_anchor() -> None:
    assert len({p.name for p in PATTERNS}) == len(PATTERNS)
    anchors = [anchor for p in PATTERNS for anchor in p.anchors]
    assert len(anchors) == len(set(anchors))
    assert all(isinstance(anchor, torch._ops.OpOverload) for anchor in anchors)


def test_a_classifier_is_a_miss_that_says_how_far_it_came() -> None:
    miss = _miss(lambda x: F.softmax(x.exp(), -1).argmax(-1))
    assert miss.nearest == "softmax chain"
    assert "exp" in miss.reason.observed
    assert miss.stopped_at.startswith("exp")


def test_softmax_of_a_product_that_no_product_follows() -> None:
    miss = _miss(lambda x: F.softmax(x @ x.mT, -1).sum(-1))
    assert miss.reason.rule.startswith("the softmax is followed by a product with v, after views, casts, dropout and")


def test_softmax_that_a_product_follows_but_none_precedes() -> None:
    """A mixture of experts, say."""
    miss = _miss(lambda x: F.softmax(x, -1) @ x.mT)
    assert "between the product" in miss.reason.rule


def test_a_softmax_whose_result_nobody_reads_is_no_miss() -> None:
    """SAM 2 has one beside each of its attentions."""

    def dead(x: Tensor) -> Tensor:
        _ = F.softmax(x @ x.mT, -1, dtype=torch.float32).to(x.dtype)
        return sdpa(x, x, x)

    run = compiled(dead)
    run(torch.randn(B, H, S, D))
    assert (run.report.num_sites, run.report.misses) == (1, ())


def test_a_softmax_that_only_a_write_reads_is_a_miss() -> None:
    def written(x: Tensor, kept: Tensor) -> Tensor:
        kept.copy_(F.softmax(x @ x.mT, -1))
        return sdpa(x, x, x)

    run = compiled(written)
    run(torch.randn(B, H, S, D), torch.empty(B, H, S, S))
    assert (run.report.num_sites, run.report.num_misses) == (1, 1)


def test_miss_says_the_models_line() -> None:
    miss = _miss(lambda x: F.softmax(x.exp(), -1).argmax(-1))
    assert "test_match.py" in miss.stopped_at


def test_equal_misses_of_three_layers_are_counted_three_times_in_one_row() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.softmax(x.exp(), -1)
        return x

    x = torch.randn(B, H, S, D)
    run = compiled(function)
    run(x)
    assert run.report.num_misses == 3
    # The first reads the input, the others the softmax before them.
    assert len(run.report.misses) <= 2


def test_sites_and_misses_of_one_graph() -> None:
    def function(x: Tensor) -> Tensor:
        return F.softmax(sdpa(x, x, x).exp(), -1)

    x = torch.randn(B, H, S, D)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x))
    assert (run.report.num_sites, run.report.num_misses) == (1, 1)
    assert CPU_FLASH in run.calls


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_inside_a_transform_of_torch_func_it_is_left_alone() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda y: sdpa(y, y, y))(x)

    x = torch.randn(B, 3, H, S, D)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x))
    (miss,) = run.report.misses
    assert miss.reason.rule == "the attention is not inside a transform of torch.func"


def test_gradient_inside_the_graph_is_left_alone() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: sdpa(y, y, y).sum())(x)

    x = torch.randn(B, H, S, D)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x))
    assert CPU_FLASH not in run.calls


@pytest.mark.parametrize("change", [lambda t: t.transpose_(1, 2), lambda t: t.unsqueeze_(0).squeeze_(0)])
def test_tensor_that_changes_its_shape_in_place(change: Callable[[Tensor], Tensor]) -> None:
    """What Dynamo knows of it is its last state, so that nothing earlier can be told."""

    def function(x: Tensor) -> Tensor:
        k = x.clone()
        out = F.softmax(x @ k.mT, -1) @ x
        change(k)
        return out

    x = torch.randn(B, H, S, D)
    torch.testing.assert_close(compiled(function)(x), function(x))
