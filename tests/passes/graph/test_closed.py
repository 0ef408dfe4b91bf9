"""Graphs that are closed: bodies, constants, and records that are fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler.passes.graph import bodies, closed, mirror, mutation
from tests.passes.compiling import CPU_FLASH, captured, compiled

# Tensors that wrap others.
B, H, S, D = 2, 4, 8, 16
Q, KV = (B, H, S, D), (B, 1, S, D)
sdpa = F.scaled_dot_product_attention


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def _wrapped(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _same(function: Callable[..., Tensor], *inputs: Any) -> Any:
    """The compiled function gives what the function gives, on inputs that it may write to. Returns what was compiled."""
    run = compiled(function)
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    torch.testing.assert_close(run(*copies), function(*(x.clone() if isinstance(x, Tensor) else x for x in inputs)))
    return run


# ---- what is found ------------------------------------------------------------------------------------------------


def test_a_wrapper_beside_an_attention_costs_nothing() -> None:
    def function(q: Tensor, weight: TwoTensor) -> tuple[Tensor, Tensor]:
        return sdpa(q, q, q, is_causal=True), F.linear(weight, weight)

    run = compiled(function)
    q, weight = torch.randn(Q), TwoTensor(torch.randn(D, D), torch.randn(D, D))
    got, wanted = run(q, weight), function(q, weight)
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1].a, wanted[1].a)
    torch.testing.assert_close(got[1].b, wanted[1].b)
    assert run.site.spec.mask.words == "causal"
    assert CPU_FLASH in run.calls


def test_operands_may_come_from_wrappers_and_the_output_go_to_one(mesh: DeviceMesh) -> None:
    def function(x: Tensor, weight: DTensor) -> Tensor:
        q = F.linear(_wrapped(x, mesh), weight).to_local().unflatten(-1, (H, D)).transpose(1, 2)
        positions = torch.arange(S)
        out = sdpa(q, q, q, attn_mask=positions[:, None] >= positions)
        return F.linear(_wrapped(out.transpose(1, 2).flatten(2), mesh), weight).to_local()

    weight = _wrapped(torch.randn(H * D, H * D), mesh)
    run = compiled(function)
    x = torch.randn(B, S, H * D)
    torch.testing.assert_close(run(x, weight), function(x, weight))
    assert run.site.spec.mask.words == "causal (proved)"
    assert CPU_FLASH in run.calls


@pytest.mark.parametrize("operand", ["query", "key", "value", "attn_mask"])
def test_a_wrapped_operand_is_a_miss_that_names_it(operand: str) -> None:
    tensors = {name: torch.randn(Q) for name in ("query", "key", "value")} | {"attn_mask": torch.zeros(S, S)}
    tensors[operand] = TwoTensor(tensors[operand], tensors[operand])
    run = compiled(lambda **kwargs: sdpa(**kwargs))
    run(**tensors)
    (miss,) = run.report.misses
    assert miss.reason.observed == f"{operand} is a TwoTensor"
    assert miss.anchor == "scaled_dot_product_attention"


def test_equal_misses_are_one_row() -> None:
    def function(x: Tensor) -> Tensor:
        return sdpa(x, x, x) + sdpa(x, x, x, is_causal=True)

    run = compiled(function)
    run(TwoTensor(torch.randn(Q), torch.randn(Q)))
    (miss,) = run.report.misses
    assert len(miss.modules) == 2


def test_a_fused_call_with_a_wrapped_weight_stays_as_it_is() -> None:
    attention = torch.nn.MultiheadAttention(D, 2, batch_first=True)
    weight = attention.out_proj.weight.detach()
    attention.out_proj.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()))
    run = compiled(lambda x: attention(x, x, x, need_weights=False)[0].a)
    x = torch.randn(B, S, D)
    torch.testing.assert_close(run(x), attention(x, x, x, need_weights=False)[0].a)
    assert "TwoTensor" in run.report.misses[0].reason.observed


# ---- memory -------------------------------------------------------------------------------------------------------


def _repeated(x: Tensor) -> Tensor:
    return x.expand(Q).contiguous()


def test_what_a_wrapper_writes_is_written_to_what_it_was_made_of(mesh: DeviceMesh) -> None:
    """The keys are read above their repetition as long as nothing writes to them in between."""

    def function(q: Tensor, k: Tensor) -> Tensor:
        k = k.cosh()  # what a mirror looks into
        keys, values = _repeated(k), _repeated(k)
        _wrapped(k, mesh).add_(1)
        return sdpa(q, keys, values) + k

    run = _same(function, torch.randn(Q), torch.randn(KV))
    assert run.site.spec.k.shape == Q


def test_without_the_write_keys_are_read_above_their_repetition(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        k = k.cosh()  # what a mirror looks into
        keys, values = _repeated(k), _repeated(k)
        return sdpa(q, keys, values) + _wrapped(k, mesh).add(1).to_local()

    run = _same(function, torch.randn(Q), torch.randn(KV))
    assert run.site.spec.k.shape == KV


def test_a_write_to_the_local_tensor_is_a_write_to_the_wrapper(mesh: DeviceMesh) -> None:
    """Both ways: through a wrapper that is an input of the graph, and through one that is made in it."""

    def function(q: Tensor, wrapper: DTensor) -> Tensor:
        k = wrapper.to_local()
        keys, values = _repeated(k), _repeated(k)
        _wrapped(k, mesh).to_local().mul_(2)
        return sdpa(q, keys, values) + wrapper.to_local()

    q, k = torch.randn(Q), torch.randn(KV)
    run = compiled(function)
    torch.testing.assert_close(run(q, _wrapped(k.clone(), mesh)), function(q, _wrapped(k.clone(), mesh)))
    assert run.site.spec.k.shape == Q


def test_a_mask_is_read_as_it_was_before_the_wrapper_wrote_to_it(mesh: DeviceMesh) -> None:
    def function(q: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths + 1
        mask = torch.arange(S) < lengths[:, None, None, None]
        _wrapped(lengths, mesh).add_(100)
        return sdpa(q, q, q, attn_mask=mask)

    run = _same(function, torch.randn(Q), torch.tensor([3, 5]))
    assert run.site.spec.mask.reason is None


def test_an_unknown_call_may_write_to_all_that_it_is_given(mesh: DeviceMesh) -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        k = k.cosh()  # what a mirror looks into
        keys, values = _repeated(k), _repeated(k)
        total = _adds_one(k, _wrapped(k, mesh))
        return sdpa(q, keys, values) + total + k

    run = _same(function, torch.randn(Q), torch.randn(KV))
    assert run.site.spec.k.shape == Q


@torch._dynamo.allow_in_graph
def _adds_one(x: Tensor, wrapper: DTensor) -> Tensor:
    x.add_(1)
    return wrapper.to_local().sum()


def test_what_a_mirror_knows_of_a_wrapper() -> None:
    def function(x: Tensor, two: TwoTensor) -> tuple[Tensor, Tensor]:
        return two.transpose(0, 1), two + 1

    gm, _ = captured(function, torch.randn(3, 4), TwoTensor(torch.randn(3, 4), torch.randn(3, 4)))
    found = mirror.build(gm)
    (two,) = [n for n in gm.graph.find_nodes(op="placeholder") if closed.is_closed(n)]
    (own,) = found.owned(two)
    transposed, added = (found.owned(user)[0] for user in two.users)
    assert len(mutation.storages(own)) == 2
    assert mutation.storages(transposed) == mutation.storages(own)
    assert not mutation.storages(added) & mutation.storages(own)


def test_a_graph_of_wrappers_can_be_verified(mesh: DeviceMesh) -> None:
    """The site is compared; of a graph that may communicate, the outputs are not."""

    def function(x: Tensor, weight: DTensor) -> Tensor:
        q = F.linear(_wrapped(x, mesh), weight).to_local().unflatten(-1, (H, D)).transpose(1, 2)
        return F.linear(_wrapped(sdpa(q, q, q, is_causal=True).transpose(1, 2).flatten(2), mesh), weight).to_local()

    x, weight = torch.randn(B, S, H * D), torch.nn.Parameter(_wrapped(torch.randn(H * D, H * D), mesh))
    run = compiled(function, verify=True)
    torch.testing.assert_close(run(x, weight), function(x, weight))
    found = {check.subject: check for check in attn_compiler.verifications()}
    assert found["output"].error is not None
    assert found["output"].skipped is None
    assert "communicates" in found["graph outputs"].skipped


# What a body's inputs are at its call, and which of them it may write to, told by Dynamo's nodes alone.
X = (4, 5)


def _call(function: Callable[..., Any], *inputs: Tensor) -> fx.Node:
    (call,) = (n for n in captured(function, *inputs)[0].graph.nodes if bodies.is_higher_order(n))
    return call


def _written(edit: Callable[[Tensor, Tensor], Any]) -> set[str]:
    """Which of x and y, given to a checkpoint, it may write to by `edit`."""

    def body(x: Tensor, y: Tensor) -> Tensor:
        kept = edit(x, y)
        return x + y if kept is None else x + y + kept.sum()

    def function(a: Tensor, b: Tensor) -> Tensor:
        x, y = a.sin(), b.cos()
        return checkpoint(body, x, y, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.randn(X))
    return {str(node.name) for node in bodies.written_by(call)}


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "setitem": lambda x, y: x.__setitem__(0, 1.0),
    "a method": lambda x, y: x.mul_(y),
    "an augmented assignment": lambda x, y: x.__iadd__(y),
    "a function": lambda x, y: torch.relu_(x),
    "a flag by keyword": lambda x, y: F.silu(x, inplace=True),
    "a flag by position": lambda x, y: F.dropout(x, 0.5, False, True),
    "out": lambda x, y: torch.add(y, y, out=x),
    "a view": lambda x, y: x[1:].view(-1)[2:].zero_(),
    "an operator": lambda x, y: torch.ops.aten.copy_.default(x, y),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_told(name: str) -> None:
    assert _written(WRITES[name]) == {"x"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda x, y: x.masked_fill(y > 0, 0.0).mul_(y),
        lambda x, y: F.dropout(x, 0.5, True),
        lambda x, y: torch.zeros(5).add_(x[0]),
        lambda x, y: F.scaled_dot_product_attention(x, x, x, None, 0.0, True),
        lambda x, y: torch.ops.aten.add.Tensor(x, y),
        lambda x, y: x.clone().detach_(),
    ],
    ids=["its own result", "a flag of something else", "a new tensor", "is_causal", "an operator", "no element"],
)
def test_what_is_only_read_is_not_told(edit: Callable[[Tensor, Tensor], Any]) -> None:
    assert _written(edit) == set()


def test_statistics_of_a_norm_are_written() -> None:
    def body(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True)

    def function(a: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return checkpoint(body, a.sin(), mean, var, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.zeros(5), torch.ones(5))
    assert {node.name for node in bodies.written_by(call)} == {"l_mean_", "l_var_"}


def test_a_body_in_a_body_is_looked_into() -> None:
    def inner(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(inner, y, x, use_reentrant=False)

    def function(a: Tensor, b: Tensor) -> Tensor:
        x, y = a.sin(), b.cos()
        return checkpoint(outer, x, y, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.randn(X))
    assert {node.name for node in bodies.written_by(call)} == {"y"}


def test_arguments_are_the_bodys_inputs() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return checkpoint(lambda x, y: x.sin() * y, a, b, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.randn(X))
    (body,) = bodies.bodies(call)
    first = bodies.first_argument(call, body)
    assert first == 1
    shapes = [node.meta["example_value"].shape for node in bodies.placeholders(body)]
    assert shapes == [node.meta["example_value"].shape for node in call.args[first:]]


def test_a_call_that_does_more_than_pass_on_has_no_arguments_for_its_bodies() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with torch.no_grad():
        call = _call(function, torch.randn(X))
    assert len(bodies.bodies(call)) == 2
    assert all(bodies.first_argument(call, body) is None for body in bodies.bodies(call))
    assert bodies.written_by(call) == set()
