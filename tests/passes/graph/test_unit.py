"""Which graphs are worked on: the one handed over, and the bodies nested in it (checkpoint, autograd.Function, cond ...)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import unit
from attn_compiler.passes.recovering import recover
from attn_compiler.torch_private import compat as torch_compat
from tests.passes.compiling import CPU_FLASH, Compiled, captured, compiled

B, H, HKV, S, D = 2, 4, 2, 6, 8
sdpa = F.scaled_dot_product_attention


def _check(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Compiled:
    """Output and gradients equal eager's."""
    generator = torch.Generator().manual_seed(0)
    eager = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    own = [t.detach().clone().requires_grad_() for t in eager]
    run = compiled(function)
    wanted, got = function(*eager), run(*own)
    torch.testing.assert_close(got, wanted)
    wanted.sin().sum().backward()
    got.sin().sum().backward()
    torch.testing.assert_close([t.grad for t in own], [t.grad for t in eager])
    return run


Q, KV = (B, H, S, D), (B, HKV, S, D)


# ---- checkpoint ---------------------------------------------------------------------------------------------------


def _written_out(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    k = kv.repeat_interleave(2, 1)
    return F.softmax(q @ k.mT * 0.25 + mask, -1) @ k


def _fused(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    k = kv.repeat_interleave(2, 1)
    return sdpa(q, k, k, attn_mask=mask)


@pytest.mark.parametrize("attention", [_written_out, _fused])
def test_checkpointed_layer_with_the_mask_of_outside(attention: Callable[..., Tensor]) -> None:
    mask = torch.randn(B, 1, S, S)

    def function(q: Tensor, kv: Tensor) -> Tensor:
        return checkpoint(attention, q, kv, mask.exp(), use_reentrant=False)

    run = _check(function, Q, KV)
    assert run.site.spec.k.shape == KV
    assert run.site.spec.mask.dense is not None
    assert run.calls.count(CPU_FLASH) == 1


def test_checkpointed_layers_share_one_spec_with_one_outside() -> None:
    mask = torch.randn(B, 1, S, S)

    def function(q: Tensor, kv: Tensor) -> Tensor:
        # Made in the graph: outside of the checkpoints, what is repeated from an input is copied.
        kv = kv.sin()
        q = checkpoint(_fused, q, kv, mask, use_reentrant=False)
        q = checkpoint(_fused, q, kv, mask, use_reentrant=False)
        return _fused(q, kv, mask)

    run = _check(function, Q, KV)
    assert len(run.site.modules) == 3
    assert run.site.notes.count(recover.COMES_IN) == 1
    assert run.calls.count(CPU_FLASH) == 3


def test_nested_checkpoints() -> None:
    mask = torch.randn(B, 1, S, S)

    def layer(q: Tensor, kv: Tensor) -> Tensor:
        return checkpoint(_fused, q, kv, mask, use_reentrant=False).sin()

    def function(q: Tensor, kv: Tensor) -> Tensor:
        return checkpoint(layer, q, kv, use_reentrant=False)

    run = _check(function, Q, KV)
    assert run.report.num_sites == 1
    assert run.calls.count(CPU_FLASH) == 1


def test_checkpoint_in_autocast() -> None:
    """The region is entered outside of the body that is traced on its own."""

    def function(q: Tensor, kv: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(_fused, q, kv, torch.zeros(S, S), use_reentrant=False)

    q, kv = torch.randn(Q, requires_grad=True), torch.randn(KV)
    run = compiled(function)
    torch.testing.assert_close(run(q, kv), function(q, kv), atol=2e-2, rtol=2e-2)
    assert run.site.spec.dtype == "bfloat16"


def test_checkpointed_module_has_its_path() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(H * D, 3 * H * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.projection(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            return sdpa(q, k, v).transpose(1, 2).flatten(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Model()
    run = compiled(model)
    x = torch.randn(B, S, H * D, requires_grad=True)
    torch.testing.assert_close(run(x), model(x))
    assert run.site.modules == ("blocks.0", "blocks.1")


# ---- other bodies -------------------------------------------------------------------------------------------------


class _Doubled(torch.autograd.Function):
    """A backward of its own, which no matcher may look through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream * 3


def test_autograd_function_before_and_after_the_attention() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        return _Doubled.apply(sdpa(_Doubled.apply(q), k, k))

    run = _check(function, Q, Q)
    assert run.calls.count(CPU_FLASH) == 1


class _OwnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return F.softmax(q @ k.mT, -1) @ k

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        return upstream * q, upstream * k


def test_autograd_function_around_an_attention_keeps_its_own_backward() -> None:
    _check(lambda q, k: _OwnAttention.apply(q, k), Q, Q)


def test_branches_of_cond() -> None:
    def function(q: Tensor) -> Tensor:
        return torch.cond(q.sum() > 0, lambda x: sdpa(x, x, x), lambda x: sdpa(x, x, x, is_causal=True), (q,))

    run = compiled(function)
    for q in (torch.ones(Q), -torch.ones(Q)):
        torch.testing.assert_close(run(q), function(q))
    assert run.report.num_sites == 2


# ---- which graphs at all ------------------------------------------------------------------------------------------


def _units(function: Callable[..., Any], *args: Any) -> list[unit.Unit]:
    gm, _ = captured(function, *args)
    return unit.units(gm, Options())


def test_a_graph_without_attention_is_no_unit() -> None:
    x = torch.randn(2, 3)
    assert _units(lambda x: F.log_softmax(x.relu(), -1) + F.gumbel_softmax(x, dim=-1).detach() * 0, x) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: torch.softmax(x, -1),
        lambda x: F.softmax(x, dim=-1),
        lambda x: nn.Softmax(dim=-1)(x),
        lambda x: torch.special.softmax(x, -1),
        lambda x: sdpa(x, x, x),
    ],
    ids=["method", "torch", "functional", "module", "special", "sdpa"],
)
def test_every_spelling_of_an_anchor_makes_a_unit(function: Callable[[Tensor], Tensor]) -> None:
    (found,) = _units(function, torch.randn(2, 3, 4))
    assert found.name == ""
    assert found.graph is found.graph_module.graph


def test_bodies_are_named_by_their_path_and_come_once() -> None:
    def function(q: Tensor) -> Tensor:
        return checkpoint(lambda x: sdpa(x, x, x), q, use_reentrant=False) + sdpa(q, q, q)

    found = _units(function, torch.randn(Q, requires_grad=True))
    assert [u.name for u in found] == ["", "wrap_body_0"]


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("L['self']._modules['model'].layers._modules['3'].self_attn", "model.layers.3.self_attn"),
        ("L['fn'].blocks[0].attn", "blocks.0.attn"),
        ("L['self']", "(root)"),
        ("L['args'][0]._modules['model'].layers[3].self_attn", "model.layers.3.self_attn"),
        ("L['self'].args[0].attn", "args.0.attn"),
        # diffusers' models and sentence-transformers' modules look attributes up by a __getattr__ of their own
        ("L['self'].__dict__['_modules']['mid_block'].attentions._modules['0']", "mid_block.attentions.0"),
        ("L['self'].my_modules[0].attn", "my_modules.0.attn"),
        ("model.layers.slice(None, 2, None)", "model.layers.slice(None, 2, None)"),
    ],
)
def test_module_paths_read_as_the_model_names_them(path: str, clean: str) -> None:
    assert unit.clean_path(path) == clean


# ---- tensors that are more than plain -----------------------------------------------------------------------------


def test_plain_tensors_have_no_kind() -> None:
    assert unit.tensor_kind(torch.ones(2)) is None
    assert unit.tensor_kind(nn.Parameter(torch.ones(2))) is None


def test_kinds_of_tensors() -> None:
    assert unit.tensor_kind(torch.eye(2).to_sparse()) == "a sparse_coo tensor"
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    assert unit.tensor_kind(nested) == "a nested tensor"


def _left_alone(run: Compiled) -> str:
    (miss,) = run.report.misses
    assert miss.reason.rule == "q, k, v and what joins the scores are plain strided tensors"
    assert CPU_FLASH not in run.calls
    return miss.reason.observed


def test_nested_input_is_left_alone() -> None:
    nested = torch.nested.nested_tensor([torch.randn(5, D), torch.randn(3, D)], layout=torch.jagged)
    run = compiled(lambda x: F.softmax(x, dim=-1))
    for mine, right in zip(run(nested).unbind(), F.softmax(nested, dim=-1).unbind(), strict=True):
        torch.testing.assert_close(mine, right)
    assert "nested tensor" in _left_alone(run)


def test_sparse_input_is_left_alone() -> None:
    def function(x: Tensor, sparse: Tensor) -> Tensor:
        return sdpa(x, x, x) + torch.sparse.mm(sparse, x[0, 0])

    x, sparse = torch.randn(Q), torch.eye(S).to_sparse()
    run = compiled(function)
    torch.testing.assert_close(run(x, sparse), function(x, sparse))
    assert all("sparse" in miss.reason.observed for report in run.reports for miss in report.misses)
    assert CPU_FLASH not in run.calls


def test_wrapper_subclass_is_left_alone() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(Q), torch.randn(Q))
    run = compiled(lambda x: sdpa(x, x, x))
    got = run(x)
    torch.testing.assert_close(got.a, sdpa(x.a, x.a, x.a))
    torch.testing.assert_close(got.b, sdpa(x.b, x.b, x.b))
    assert "TwoTensor" in _left_alone(run)
    assert torch_compat.is_wrapper_subclass(x)


# ---- distributed --------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class _Stack(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.usefixtures("one_process")
def test_data_parallel_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP splits the graph into buckets, each of which the backend gets on its own."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    torch.manual_seed(0)
    plain = _Stack(_Attention() for _ in range(3))
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.001)
    run = compiled(wrapped)
    x = torch.randn(B, S, H * D)
    got, wanted = run(x), plain(x)
    torch.testing.assert_close(got, wanted)
    got.sin().sum().backward()
    wanted.sin().sum().backward()
    for (name, mine), right in zip(wrapped.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert sum(report.num_sites for report in run.reports) == 3
    assert run.calls.count(CPU_FLASH) == 3
    assert len(run.reports) > 1


@pytest.mark.usefixtures("one_process")
def test_a_dtensor_of_a_sharded_sequence_is_left_alone() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.randn(Q), mesh, [Shard(2)])
    run = compiled(lambda x: F.softmax(x @ x.mT, dim=-1) @ x)
    local = x.to_local()
    torch.testing.assert_close(run(x).to_local(), F.softmax(local @ local.mT, dim=-1) @ local)
    (miss,) = run.report.misses
    assert "sharded along a sequence" in miss.reason.observed


# ---- who calls what -----------------------------------------------------------------------------------------------


def _units(function: Callable[..., Tensor], *inputs: Tensor) -> list[unit.Unit]:
    gm, _ = captured(function, *inputs)
    return unit.units(gm, Options())


def test_a_body_knows_its_call_and_the_caller_is_no_unit_without_attention() -> None:
    def function(q: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(lambda q, m: sdpa(q, q, q, attn_mask=m), q.sin(), mask > 0, use_reentrant=False)

    (body,) = _units(function, torch.randn(Q, requires_grad=True), torch.randn(S, S))
    (call,) = body.place.calls
    assert call.unit.name == ""
    assert call.unit.mirror is None
    assert [target for _, target in call.unit.place.callees] == [body]
    assert call.node.args[call.first].meta["example_value"].shape in (Q, (S, S))


def test_a_body_that_is_called_in_a_way_not_looked_into_has_no_calls() -> None:
    def function(q: Tensor) -> Tensor:
        return torch.cond(q.sum() > 0, lambda q: sdpa(q, q, q), lambda q: sdpa(q, q, q, is_causal=True), (q,))

    with torch.no_grad():
        bodies = _units(function, torch.randn(Q))
    assert len(bodies) == 2
    assert all(body.place.calls == [] for body in bodies)


def test_callers_come_before_what_they_call() -> None:
    def layer(q: Tensor) -> Tensor:
        return checkpoint(lambda q: sdpa(q, q, q), sdpa(q, q, q), use_reentrant=False)

    def function(q: Tensor) -> Tensor:
        return sdpa(q, q, checkpoint(layer, q, use_reentrant=False))

    found = _units(function, torch.randn(Q, requires_grad=True))
    assert [len(body.place.calls) for body in found] == [0, 1, 1]
    for body in found:
        assert all(found.index(call.unit) < found.index(body) for call in body.place.calls)


def test_what_is_asked_of_a_graph_without_a_mirror_is_an_error() -> None:
    (found,) = _units(lambda x: sdpa(x, x, x), torch.randn(Q))
    with pytest.raises(ValueError, match="the graph has no mirror"):
        _ = found.mirrored
