"""What the mirror may leave out: never a view, a write, or anything that an attention is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from attn_compiler.passes.graph import relevance
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.unit import is_anchor_like
from tests.passes.compiling import captured, compiled

B, H, S, D = 2, 4, 6, 8
Tensor = torch.Tensor
sdpa = F.scaled_dot_product_attention


def _skipped(function: Callable[..., object], *args: Tensor) -> tuple[set[str], set[str]]:
    """(names of what is skipped, names of what is kept), of calls."""
    gm, _ = captured(function, *args)
    skipped = relevance.skippable(gm.graph, is_anchor_like)
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    names = ({target_name(n) for n in calls if (n in skipped) == wanted} for wanted in (True, False))
    return next(names), next(names)


def _block(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = F.linear(F.layer_norm(x, (H * D,)), w).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    x = x + sdpa(q * 2, k, v).transpose(1, 2).flatten(2)
    return x + F.gelu(x).sigmoid()


def test_projections_and_what_surrounds_the_attention_is_skipped() -> None:
    skipped, kept = _skipped(_block, torch.randn(B, S, H * D), torch.randn(3 * H * D, H * D))
    assert {"layer_norm", "linear", "gelu", "sigmoid", "add"} <= skipped
    assert {"scaled_dot_product_attention", "mul", "unflatten", "permute"} <= kept


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("queries", [1, S])
def test_in_decoding_the_projections_of_k_and_v_are_kept(queries: int, fused: bool) -> None:
    """What k and v are made of is asked for where there are more keys than queries."""

    def function(q: Tensor, cache: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
        v = F.linear(cache.cos(), weight).view(B, S, H, D).transpose(1, 2)
        k = torch.cat((v, shared.expand(-1, H, -1, -1)), -1)
        return sdpa(q, k, v) if fused else torch.softmax(q @ k.mT, -1) @ v

    given = (torch.randn(B, H, queries, 2 * D), torch.randn(B, S, D), torch.randn(H * D, D), torch.randn(B, 1, S, D))
    skipped, kept = _skipped(function, *given)
    assert {"linear", "cat"} <= (kept if queries == 1 else skipped)
    assert "cos" in skipped


def test_scores_masks_and_products_are_kept() -> None:
    def function(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        bias = (mask.exp() - 1).neg()
        weights = F.softmax((q @ k.mT) / 2 + bias.sigmoid(), -1)
        return (weights.to(q.dtype) @ k).sin()

    skipped, kept = _skipped(function, torch.randn(B, H, S, D), torch.randn(B, H, S, D), torch.randn(S, S))
    assert {"exp", "sub", "neg", "sigmoid", "truediv", "add", "softmax", "matmul"} <= kept
    assert "sin" not in kept or "sin" not in skipped


@pytest.mark.parametrize(
    "write",
    [
        lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(x, True),
        lambda x: nn.SiLU(inplace=True)(x),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.add_(1),
        lambda x: x.mul_(2),
        lambda x: torch.sigmoid(x, out=x),
    ],
)
def test_writes_are_never_skipped(write: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor, q: Tensor) -> Tensor:
        write(x)
        return sdpa(q, q, q)

    gm, _ = captured(function, torch.randn(B, H, S, D), torch.randn(B, H, S, D))
    skipped = relevance.skippable(gm.graph, is_anchor_like)
    (x,) = (n for n in gm.graph.nodes if n.op == "placeholder" and "x" in n.name)
    assert not skipped.intersection(x.users)


def test_an_op_of_somebody_else_with_a_familiar_name_is_not_skipped() -> None:
    library = torch.library.Library("relevance_test", "DEF")
    library.define("linear(Tensor(a!) x) -> Tensor")
    op = torch.ops.relevance_test.linear.default
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    node = graph.call_function(op, (x,))
    node.meta["example_value"] = torch.ones(2)
    assert target_name(node) == "linear"
    assert relevance.skippable(graph, is_anchor_like) == frozenset()
    library._destroy()


def test_views_are_never_skipped() -> None:
    def function(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return sdpa(q, q, q), x.view(-1).unsqueeze(0).expand(2, -1).t()

    skipped, _ = _skipped(function, torch.randn(B, H, S, D), torch.randn(B, H, S, D))
    assert skipped == set()


def test_a_write_into_a_skipped_nodes_result_is_still_seen() -> None:
    """k comes out of a projection that the mirror does not look into, and is written before the second product."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        k = F.linear(x, w).view(B, S, H, D).transpose(1, 2)
        weights = F.softmax(k @ k.mT, -1)
        k.add_(1.0)
        return weights @ k

    x, w = torch.randn(B, S, H * D), torch.randn(H * D, H * D) / 6
    run = compiled(function)
    torch.testing.assert_close(run(x, w), function(x, w))


def test_what_is_written_into_a_mask_is_kept() -> None:
    """Nothing that comes after takes the write as an argument."""

    def function(q: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        mask = mask.clone()
        mask[:, 1:] = padding.exp() - 1
        mask[:, :1].mul_(padding.sin()[:, :1])
        return sdpa(q, q, q, mask)

    skipped, kept = _skipped(function, torch.randn(B, H, S, D), torch.randn(S, S), torch.randn(S, S - 1))
    assert {"exp", "sub", "sin", "setitem"} <= kept
    assert not skipped


def test_what_comes_to_nothing() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dead, alive, written = x.exp(), x.cos(), x.sin()
        _ = (dead * 2).to(torch.float16)
        _ = written.mul_(2)
        return alive * 2, x

    gm, _ = captured(function, torch.randn(3))
    by_name = {target_name(node): node for node in gm.graph.nodes if node.op != "output"}
    assert {name: relevance.comes_to_nothing(by_name[name]) for name in ("exp", "cos", "sin")} == {
        "exp": True,
        "cos": False,
        "sin": False,
    }
