"""The rewritten Dynamo graph: a kernel in the place of the site, nothing left of it, everything else as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.options.options import Options
from attn_compiler.passes import run_pipeline
from tests.passes.compiling import CPU_FLASH, captured, compiled

B, H, HKV, S, D = 2, 4, 2, 6, 8
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention


def _inputs(*heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, S, D, generator=generator) for h in heads]


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25, -1) @ v


def test_nothing_of_the_site_is_left() -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        k = kv[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, H, S, D)
        return _written_out(q.contiguous(), k, k)

    run = compiled(function)
    inputs = _inputs(H, HKV)
    torch.testing.assert_close(run(*inputs), function(*inputs))
    assert set(run.calls) <= {CPU_FLASH, "getitem"}


def test_what_somebody_else_reads_stays() -> None:
    def function(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        k = kv.repeat_interleave(2, 1)
        return _written_out(q, k, k), k

    run = compiled(function)
    inputs = _inputs(H, HKV)
    torch.testing.assert_close(run(*inputs), function(*inputs))
    assert run.calls.count("repeat_interleave") == 1
    assert run.site.spec.k.shape == (B, HKV, S, D)


def test_writes_and_random_numbers_above_a_site_are_kept() -> None:
    """A node without a reader may still do something."""

    def function(q: Tensor, kv: Tensor) -> Tensor:
        noise = torch.randn(B, HKV, S, D)
        kv.add_(noise)
        k = kv.repeat_interleave(2, 1)
        return sdpa(q, k, k)

    run = compiled(function)
    eager, own = (_inputs(H, HKV) for _ in range(2))
    torch.manual_seed(0)
    got = run(*own)
    torch.manual_seed(0)
    torch.testing.assert_close(got, function(*eager))
    torch.testing.assert_close(own, eager)
    assert "add_" in run.calls


def test_dead_attention_is_no_error() -> None:
    def function(q: Tensor) -> Tensor:
        _written_out(q, q, q)
        return q + 1

    run = compiled(function)
    (q,) = _inputs(H)
    torch.testing.assert_close(run(q), q + 1)


def test_sites_whose_softmaxes_and_outputs_are_in_another_order() -> None:
    """The mask that both share is combined before the first output, which belongs to the second softmax."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        first = F.softmax(q @ k.mT + mask + bias, -1)
        second = F.softmax(k @ q.mT + mask + bias, -1)
        last = second @ v
        return first @ v, last

    inputs = [*_inputs(H, H, H), torch.randn(B, 1, S, S), torch.randn(1, H, S, S)]
    run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=2e-5, rtol=2e-5)
    assert run.calls.count(CPU_FLASH) == 2


def test_an_attention_inside_the_operands_of_another() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _written_out(_written_out(q, k, v), k, _written_out(v, k, q))

    inputs = _inputs(H, H, H)
    run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=2e-5, rtol=2e-5)
    assert run.calls.count(CPU_FLASH) == 3


def test_an_attention_whose_mask_is_made_from_another() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = _written_out(q, k, v).sum(-1, keepdim=True).mT
        return F.softmax(q @ k.mT * 0.25 + bias, -1) @ v

    inputs = _inputs(H, H, H)
    run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=2e-5, rtol=2e-5)
    assert run.calls.count(CPU_FLASH) == 2


def test_weights_used_twice_are_one_attention_too_many() -> None:
    """Talking heads and the like: both products read the weights, so none may do without them."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(q @ k.mT, -1)
        return weights @ v + weights @ k

    inputs = _inputs(H, H, H)
    run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs))
    assert run.site.spec.returns_weights
    assert CPU_FLASH not in run.calls


def test_new_nodes_say_where_they_are_from_and_what_they_hold() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _written_out(q, k, v)

    layers = torch.nn.ModuleList([Layer()])
    gm, _ = captured(lambda q, k, v: layers[0](q, k, v), *_inputs(H, H, H))
    run_pipeline(gm, Options(strict=True))
    (kernel,) = (n for n in gm.graph.nodes if CPU_FLASH in str(n.target))
    assert "_written_out" in kernel.meta["stack_trace"]
    assert kernel.meta["nn_module_stack"]
    values = [n.meta["example_value"] for n in gm.graph.nodes if n.op not in ("output", "placeholder")]
    assert all(v is not None for v in values)
    assert next(iter(kernel.users)).meta["example_value"].shape == (B, H, S, D)


def test_output_dtype_of_the_model_is_kept() -> None:
    """Products in bfloat16, weights and output in float32: the kernel answers in q's dtype."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.bfloat16(), k.bfloat16()
        return (F.softmax((q @ k.mT).float(), -1) @ v.bfloat16().float()).double()

    inputs = _inputs(H, H, H)
    run = compiled(function)
    got = run(*inputs)
    torch.testing.assert_close(got, function(*inputs), atol=2e-2, rtol=2e-2)
    assert got.dtype == torch.float64


def test_float64_stays_exact() -> None:
    inputs = [t.double() for t in _inputs(H, H, H)]
    run = compiled(_written_out)
    torch.testing.assert_close(run(*inputs), _written_out(*inputs), atol=1e-12, rtol=1e-12)


def _on_reference(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    run = compiled(function, lowering="reference")
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=2e-5, rtol=2e-5)
    assert run.site.decision.lowering == "reference"
    assert run.calls.count("reference") == 1


def test_a_leaf_op_of_ours_stands_in_the_graph() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(torch.tanh(q @ k.mT / 3.0) * 3.0 + mask, -1) @ v

    _on_reference(function, *_inputs(H, H, H), torch.randn(B, 1, S, S))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_autocast_does_not_reach_into_a_lowering(inner: str) -> None:
    """`math` multiplies in float32, and is as near as SDPA in the dtype that autocast gives."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) * 2

    torch.manual_seed(0)
    given = [torch.randn(2, 2, 16, 16, requires_grad=True) for _ in range(3)]
    mask = torch.rand(16, 16) > 0.3
    options = {"lowering": "math", "inner": inner, "strict": True}
    out = torch.compile(attention, backend="attn_compiler", fullgraph=True, options=options)(*given, mask)
    halves = [x.bfloat16() for x in given]
    exact = F.scaled_dot_product_attention(*(x.double() for x in halves), attn_mask=mask) * 2
    own = F.scaled_dot_product_attention(*halves, attn_mask=mask) * 2
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 1.1 * (own - exact).abs().max()
    assert not torch.is_autocast_enabled("cpu")
    torch.autograd.grad(out.float().sum(), given)
