"""Which nodes count: those that are read by one reader, equal, or spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from attn_compiler.passes.graph import relevance
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.equal import are_equal
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.passes.graph.unit import is_anchor_like
from attn_compiler.passes.recovering import latent
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from tests.passes.compiling import captured, compiled, mirror_of
from tests.passes.matched_sites import matched

# What the mirror may leave out.
B, H, S, D = 2, 4, 6, 8
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


# What is made for an attention alone, and what something else needs.
SOLE_B, SOLE_H, SOLE_S, SOLE_D = 2, 2, 5, 4
Model = Callable[[Tensor, Tensor, Tensor], Any]


def _made_for(model: Model) -> set[str] | None:
    """Names of the Dynamo nodes that are made for the attention, from the projection on."""
    given = (torch.randn(SOLE_B, SOLE_H, 1, SOLE_D), torch.randn(SOLE_B, SOLE_H, SOLE_S, 6), torch.randn(SOLE_D, 6))
    mirror, match = matched(model, *given)
    projections = [node for node in mirror.graph.nodes if node.target is torch.ops.aten.linear.default]
    found = latent.nodes_made_for(mirror, match, projections)
    return None if found is None else {node.name for node in found}


def _attend(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k)


def _plain(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _attend(q, linear(x, weight).transpose(2, 3).mT * 2)


def _into_fresh_memory(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    k = torch.empty(SOLE_B, SOLE_H, SOLE_S, 2 * SOLE_D)
    k[..., :SOLE_D].copy_(linear(x, weight))
    k[..., SOLE_D:] = x[..., :SOLE_D]
    return _attend(torch.cat((q, q), -1), k)


def test_all_from_the_first_tensor_to_the_attention_is_made_for_it() -> None:
    found = _made_for(_plain)
    assert found is not None
    assert len(found) == 4
    assert not any("scaled_dot_product_attention" in name or name.startswith("l_") for name in found)


def test_fresh_memory_that_is_written_belongs_to_it() -> None:
    found = _made_for(_into_fresh_memory)
    assert found is not None
    assert "k" in found
    assert any("setitem" in name for name in found)
    assert not any(name.startswith("cat") for name in found)


def _returned(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k = linear(x, weight)
    return _attend(q, k), k


def _read_before(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k = linear(x, weight)
    return _attend(q, k.mT.mT), k.mT.sum()


def _written_into_an_input(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    cache = x[..., :SOLE_D]
    cache.copy_(linear(x, weight))
    return _attend(q, cache)


def _memory_read_elsewhere(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.zeros(SOLE_B, SOLE_H, SOLE_S, SOLE_D)
    other = k[0]
    k.copy_(linear(x, weight))
    return _attend(q, k), other


@pytest.mark.parametrize(
    "model", [_returned, _read_before, _written_into_an_input, _memory_read_elsewhere], ids=lambda model: model.__name__
)
def test_another_reader_is_seen(model: Model) -> None:
    assert _made_for(model) is None


def test_a_number_of_it_is_another_reader() -> None:
    def model(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        k = linear(x, weight)
        return _attend(q, k) * k.mean()

    assert _made_for(model) is None


# Which nodes hold equal elements because they are made alike.
LENGTHS = torch.tensor([2, 3])


def _are_equal(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> bool:
    """Of the two tensors that `function` gives."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = function(x)
        return one.cos(), other.sin()

    mirror = mirror_of(run, LENGTHS.clone())
    (one,) = (n.args[0] for n in mirror.graph.nodes if n.target is torch.ops.aten.cos.default)
    (other,) = (n.args[0] for n in mirror.graph.nodes if n.target is torch.ops.aten.sin.default)
    return are_equal(mirror, one, other)


def _mask(x: Tensor, more: int = 0) -> Tensor:
    return torch.arange(5)[None, :] < x[:, None] + more


def test_what_is_made_alike_is_equal() -> None:
    assert _are_equal(lambda x: (_mask(x), _mask(x)))
    assert _are_equal(lambda x: (x.split([1, 1])[1], x.split([1, 1])[1]))


def _written(x: Tensor) -> tuple[Tensor, Tensor]:
    one = _mask(x)
    x.add_(1)
    return one, _mask(x)


def _written_afterwards(x: Tensor) -> tuple[Tensor, Tensor]:
    one, other = _mask(x), _mask(x)
    other[0] = True
    return one, other


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (_mask(x), _mask(x, 1)),
        lambda x: (_mask(x), ~_mask(x)),
        lambda x: (_mask(x), _mask(x)[:, :4]),
        lambda x: (x.split([1, 1])[0], x.split([1, 1])[1]),
        lambda x: (x.float() * 1, x.float() * 1.0 + 0),
        lambda x: (torch.rand_like(x.float()), torch.rand_like(x.float())),
        lambda x: (x < torch.rand(2), x < torch.rand(2)),
        _written,
        _written_afterwards,
    ],
)
def test_what_is_made_otherwise_or_written_is_not(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert not _are_equal(function)


# What a graph's calls were spelled out as, added up step by step.
REASON = Reason(code=Code.FAULT, rule="a rule", observed="something else")


def test_calls_that_are_left_come_after_those_before() -> None:
    first, second = fx.Graph().placeholder("first"), fx.Graph().placeholder("second")
    one = Spelling(moved=("softmax",)).leaving({first: REASON})
    both = one.leaving({second: REASON})
    assert list(one.left) == [first]
    assert list(both.left) == [first, second]
    assert both.moved == ("softmax",)
    assert both.leaving({}) is both


def test_a_graph_is_as_it_came_until_something_was_spelled_out() -> None:
    assert not Spelling().is_any
    assert not Spelling(left={fx.Graph().placeholder("x"): REASON}).is_any
    assert Spelling(expanded=("multi_head_attention_forward",)).is_any
    assert Spelling(local={fx.Graph().placeholder("x"): "said"}).is_any
