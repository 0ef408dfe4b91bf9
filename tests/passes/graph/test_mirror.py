"""The canonical ATen graph: few spellings, true dtypes, and which Dynamo node each value belongs to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.graph import mirror as mirror_module, mutation, relevance
from attn_compiler.passes.graph.mirror import Mirror, is_opaque, opaque
from attn_compiler.passes.graph.unit import examples, is_anchor_like
from attn_compiler.torch_private.tracing import fake_mode_of_values, tracing_in
from tests.passes.compiling import captured, mark, mirror_of

aten = torch.ops.aten
X = (2, 3, 4)


def _targets(mirror: Mirror) -> list[object]:
    return [n.target for n in mirror.graph.nodes if n.op == "call_function"]


def _only(mirror: Mirror, target: object) -> fx.Node:
    (node,) = (n for n in mirror.graph.nodes if n.target is target)
    return node


# ---- few spellings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spellings", "target"),
    [
        ([lambda x: x.softmax(-1), lambda x: torch.softmax(x, dim=-1), lambda x: F.softmax(x, -1)], aten.softmax.int),
        ([lambda x: x @ x.mT, lambda x: torch.matmul(x, x.mT), lambda x: x.matmul(x.mT)], aten.matmul.default),
        ([lambda x: x.transpose(1, 2), lambda x: torch.transpose(x, dim0=1, dim1=2)], aten.transpose.int),
        ([lambda x: x * 2, lambda x: x.mul(2), lambda x: torch.mul(x, 2), lambda x: 2 * x], aten.mul.Tensor),
        ([lambda x: F.linear(x, x[0]), lambda x: torch.nn.functional.linear(x, x[0])], aten.linear.default),
        ([lambda x: torch.einsum("bij,bkj->bik", x, x)], aten.einsum.default),
    ],
)
def test_spellings_of_one_op_are_one_op(spellings: list[Callable[[Tensor], Tensor]], target: object) -> None:
    for function in spellings:
        assert target in _targets(mirror_of(function, torch.randn(X)))


def test_composites_that_matching_starts_from_stay_whole() -> None:
    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + F.dropout(x.softmax(-1), 0.1, training=False)

    targets = _targets(mirror_of(function, torch.randn(X)))
    assert {aten.scaled_dot_product_attention.default, aten.softmax.int} <= set(targets)


# ---- provenance ---------------------------------------------------------------------------------------------------


def test_values_belong_to_dynamo_nodes_and_intermediates_to_none() -> None:
    gm, mirror = captured(lambda x: F.softmax(x * 2, -1).mT, torch.randn(X))
    of_name = {n.name: n for n in gm.graph.nodes}
    for node in mirror.graph.nodes:
        owner = mirror.owner(node)
        if node.op == "call_function":
            assert owner is not None
            assert owner.name in of_name
    softmax = _only(mirror, aten.softmax.int)
    dynamo = mirror.dynamo_node(softmax)
    assert dynamo is mirror.owner(softmax)
    assert dynamo is not None
    assert dynamo.meta["example_value"].shape == X
    assert softmax in mirror.owned(dynamo)


def test_what_exists_only_inside_one_call_has_no_dynamo_node() -> None:
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    mirror = mirror_of(lambda x: layer(x, x, x, need_weights=False)[0], torch.randn(X))
    inside = _only(mirror, aten.scaled_dot_product_attention.default)
    assert mirror.dynamo_node(inside) is None
    assert mirror.owner(inside) is not None


def test_what_an_in_place_op_returns_is_the_tensor_it_wrote_to() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[:, torch.tensor([0, 2])] = x[:, 1:]
        return y.cos()

    mirror = mirror_of(function, torch.randn(X))
    written = _only(mirror, aten.index_put_.default)
    sin = _only(mirror, aten.sin.default)
    assert mirror.dynamo_node(written) is mirror.dynamo_node(sin) is not None


def test_order_is_that_of_the_graph() -> None:
    mirror = mirror_of(lambda x: x.sin().cos(), torch.randn(X))
    assert mirror.order(_only(mirror, aten.sin.default)) < mirror.order(_only(mirror, aten.cos.default))


# ---- true values --------------------------------------------------------------------------------------------------


def test_dtypes_are_those_of_autocast() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.mT

    mirror = mirror_of(function, torch.randn(X))
    assert _only(mirror, aten.matmul.default).meta["val"].dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_around_the_graph_is_in_the_values_too() -> None:
    def function(x: Tensor) -> Tensor:
        return x @ x.mT

    with torch.autocast("cpu", torch.bfloat16):
        mirror = mirror_of(function, torch.randn(X))
    assert _only(mirror, aten.matmul.default).meta["val"].dtype == torch.bfloat16


def test_autocast_does_not_leak_out_of_a_failed_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.mT).sin()

    gm, _ = captured(function, torch.randn(X))
    run_node = mirror_module._Tracing.run_node

    def fail(self: mirror_module._Tracing, n: fx.Node) -> object:
        if "sin" in n.name:
            raise RuntimeError("no sine today")
        return run_node(self, n)

    monkeypatch.setattr(mirror_module._Tracing, "run_node", fail)
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    with pytest.raises(RuntimeError, match="no sine"), tracing_in(mode):
        mirror_module.build(gm)
    assert not torch.is_autocast_enabled("cpu")


def test_symbolic_sizes_stay_symbolic_and_get_no_guard() -> None:
    gm, mirror = captured(lambda x: x.softmax(-1).view(x.size(0), -1), mark(torch.randn(5, 3, 4), [5]))
    value = _only(mirror, aten.view.default).meta["val"]
    assert isinstance(value.shape[0], torch.SymInt)
    (x,) = (n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder" and "x" in n.name)
    assert str(x.shape[0]) == str(value.shape[0])


def test_a_constant_made_from_a_number_is_known_and_a_buffer_is_not() -> None:
    buffer = torch.tensor(2.0)
    mirror = mirror_of(lambda x: x * torch.tensor(0.25) + buffer, torch.randn(X))
    known = [c for n in mirror.graph.nodes if (c := mirror.constant(n)) is not None]
    assert [float(c) for c in known] == [0.25]


def test_item_is_a_symbol_of_dynamos() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        mirror = mirror_of(lambda x, n: x * n.item(), torch.randn(X), torch.tensor(0.5))
    assert aten.mul.Tensor in _targets(mirror)


# ---- what is not entered ------------------------------------------------------------------------------------------


def test_bodies_are_opaque_calls_shaped_like_their_results() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda y: y.sin(), x, use_reentrant=False).cos()

    mirror = mirror_of(function, torch.randn(X, requires_grad=True))
    call = _only(mirror, opaque)
    assert call.meta["val"].shape == X
    assert [n.op for n in call.all_input_nodes] == ["placeholder"]
    assert mirror.owner(call) is not None
    assert not mirror.computes_only(mirror.owner(call))


def test_skipped_nodes_are_opaque_too() -> None:
    gm, _ = captured(lambda x: x.sin().cos(), torch.randn(X))
    (sin,) = (n for n in gm.graph.nodes if n.name == "sin")
    mode = fake_mode_of_values(n.meta.get("example_value") for n in gm.graph.nodes)
    assert mode is not None
    with tracing_in(mode):
        mirror = mirror_module.build(gm, frozenset({sin}))
    assert _targets(mirror) == [opaque, aten.cos.default]
    assert mirror.dynamo_node(_only(mirror, opaque)) is sin


def test_a_mirror_is_never_run() -> None:
    with pytest.raises(NotImplementedError):
        opaque(torch.ones(1))


def test_opaque_nodes() -> None:
    graph = fx.Graph()
    assert is_opaque(graph.call_module("layer"))
    assert is_opaque(graph.call_function(torch.ops.higher_order.cond))
    assert is_opaque(graph.call_function(torch._C._functorch._vmap_increment_nesting))
    assert not is_opaque(graph.call_function(torch.sin))


# ---- readers ------------------------------------------------------------------------------------------------------


def test_readers_are_those_whose_results_matter() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.cos()
        y.tan().exp()
        return y.neg()

    mirror = mirror_of(function, torch.randn(X))
    sin = _only(mirror, aten.sin.default)
    assert [user.target for user in mirror.readers(sin)] == [aten.neg.default]


def test_a_write_matters() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = x.sin()
        y.add_(z)
        return x.cos()

    mirror = mirror_of(function, torch.randn(X), torch.randn(X))
    sin = _only(mirror, aten.sin.default)
    assert [user.target for user in mirror.readers(sin)] == [aten.add_.Tensor]
    owner = mirror.owner(_only(mirror, aten.add_.Tensor))
    assert owner is not None
    assert not mirror.computes_only(owner)


def test_what_only_computes() -> None:
    gm, mirror = captured(lambda x: x.max(dim=-1)[0] + x.softmax(-1).sum(-1), torch.randn(X))
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    assert all(mirror.computes_only(n) for n in calls)
    assert not any(mutation.writes(n) for n in mirror.graph.nodes)


def test_what_lies_among_skipped_nodes_is_not_in_the_mirror() -> None:
    """A view is never skipped, so what it looks at is known, and what that was made from is not."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), w).view(-1)

    gm, whole = captured(function, torch.randn(3, 4), torch.randn(4, 4))
    skipped = relevance.skippable(gm.graph, is_anchor_like)
    mode = fake_mode_of_values(examples(gm))
    assert mode is not None
    with tracing_in(mode):
        small = mirror_module.build(gm, skipped)
    first, gelu, second = (n for n in gm.graph.nodes if n in skipped)
    assert [len(small.owned(n)) for n in (first, gelu, second)] == [0, 0, 1]
    assert [len(whole.owned(n)) for n in (first, gelu, second)] == [1, 1, 1]


# ---- bodies -------------------------------------------------------------------------------------------------------


def test_what_a_body_writes_to_is_an_effect_on_it_alone() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        return x * y

    def function(x: Tensor) -> Tensor:
        y = x.cos()
        return checkpoint(body, x.sin(), y, use_reentrant=False) + y

    mirror = mirror_of(function, torch.randn(X))
    effect = _only(mirror, mutation.effect)
    assert effect.all_input_nodes == [_only(mirror, aten.cos.default)]
    ((writer, memory),) = mirror.writers
    assert writer is effect
    assert memory == mutation.storages(_only(mirror, aten.cos.default))


def test_what_a_body_gives_back_is_in_the_memory_that_it_is_a_view_of() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.cos()
        new, view = checkpoint(lambda y: (y.sin(), y[1:, None]), y, use_reentrant=False)
        return new.sum() + view.sum()

    mirror = mirror_of(function, torch.randn(X))
    cos = _only(mirror, aten.cos.default)
    new, view = (n for n in mirror.graph.nodes if n.target is opaque)
    assert mutation.storages(view) == mutation.storages(cos)
    assert mutation.storages(new) != mutation.storages(cos)
    assert view.meta["val"].shape == (1, 1, 3, 4)
    assert view.meta["val"].storage_offset() == 12


def test_the_arguments_of_a_call_are_what_it_was_given_then() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.cos()
        y.mul_(2)
        return checkpoint(lambda y: y.sin(), y, use_reentrant=False)

    gm, mirror = captured(function, torch.randn(X))
    (call,) = (n for n in gm.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator))
    assert mirror.arguments(call) == (None, _only(mirror, aten.mul_.Tensor))
    assert mirror.arguments(next(iter(gm.graph.nodes))) == ()
