"""Mask tensors as nodes, and those that are the kernels' own flag."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.parts import mask_nodes
from attn_compiler.lowerings.shared.parts.flags import as_flag
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.added_scores import Alibi
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Alignment, Causal, Dense, Document, Flag, MaskSpec, SlidingWindow
from attn_compiler.spec.target import Target
from tests.lowerings import bench
from tests.lowerings.emitting import calls
from tests.lowerings.specs import bias, make_spec, words
from tests.passes.compiling import CPU_FLASH, compiled

# A mask tensor that was proved to be a diagonal is the kernels' own flag, where they start it from the same corner.
START, END = Causal(), Causal(alignment=Alignment.BOTTOM_RIGHT)
A100, H200 = Target.fake(sm=80), Target.fake()
PREFILL: dict[str, Any] = {"seqlen_q": 128, "seqlen_kv": 512}


def proved(*kinds: Any, seqlen_q: Any = 128, seqlen_kv: Any = 512, **spec: Any) -> AttentionSpec:
    tensor = Dense(shape=(2, 1, seqlen_q, seqlen_kv), dtype="bool")
    mask = MaskSpec(kinds=kinds, dense=tensor)
    return make_spec(mask=mask, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, **spec)


@pytest.mark.parametrize("corner", [START, END])
def test_a_diagonal_is_a_flag(corner: Causal) -> None:
    flagged = as_flag(proved(corner))
    assert flagged is not None
    assert flagged.mask == MaskSpec(kinds=(corner,), flag=Flag.READ)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(),
        make_spec(mask=MaskSpec(kinds=(END,), flag=Flag.CALLED), **PREFILL),
        proved(),
        proved(SlidingWindow(left=31, right=0)),
        proved(END, SlidingWindow(left=31, right=None)),
        proved(START, END),
        proved(END, Document(of_key=Load("ids", (Index("b"), Index("k")), "int"))),
        proved(END, changes=(bias(1, 8, 128, 512),)),
        dataclasses.replace(
            proved(END),
            score=dataclasses.replace(
                make_spec().score, proved=(Alibi(slopes=Load("slopes", (Index("h"),), "float"), position=Index("k")),)
            ),
        ),
    ],
    ids=["none", "a flag", "not read", "window", "two bands", "both corners", "documents", "a bias", "slopes"],
)
def test_nothing_else_is(spec: AttentionSpec) -> None:
    assert as_flag(spec) is None


def test_flash_starts_from_the_end() -> None:
    flash = by_name("sdpa_flash")
    assert flash.why_not(proved(END), A100) == []
    assert "no mask tensor" in words(flash.why_not(proved(START), A100))
    assert "no mask tensor" in words(flash.why_not(proved(END, seqlen_q=512, seqlen_kv=128), A100))
    assert "no mask tensor" in words(flash.why_not(proved(END, seqlen_q="s0", seqlen_kv="s1"), A100))


def test_a_prefill_of_a_cache_gets_flash_where_it_is_first() -> None:
    assert select.decide(proved(END), A100, Options()).lowering == "sdpa_flash"
    assert select.decide(proved(END), H200, Options()).lowering == "sdpa_cudnn", (
        "with the tensor: its flag starts at the top left"
    )


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient", "sdpa_cpu_flash"])
def test_the_others_start_at_the_top_left_and_keep_the_tensor_for_the_end(name: str) -> None:
    target = Target.fake(device="cpu") if name == "sdpa_cpu_flash" else H200
    lowering: Any = by_name(name)
    for corner, keeps in ((START, False), (END, True)):
        spec = dataclasses.replace(proved(corner, head_dim=64), device=target.device)
        assert lowering.why_not(spec, target) == []
        assert (lowering.with_flag(spec, target).mask.dense is not None) is keeps


# ---- in the graph, and right ------------------------------------------------------------------------------------------


def from_start(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(k.shape[2])[None, :] <= torch.arange(q.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def from_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2])[None, :] <= at)


@pytest.mark.parametrize(("function", "has_flag"), [(from_start, True), (from_end, False)])
@pytest.mark.parametrize("seqlens", [(7, 19), (19, 7)])
def test_on_the_cpu(function: Any, has_flag: bool, seqlens: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, requires_grad=True) for n in (seqlens[0], seqlens[1], seqlens[1]))
    run = compiled(function)
    out, right = run(q, k, v), function(q, k, v)
    assert CPU_FLASH in run.calls
    assert ("attn_mask = None" in run.text) is has_flag
    torch.testing.assert_close(out, right)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad(right.square().sum(), (q, k, v)))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 2, 75, 128])
def test_flash_from_the_end_on_a_gpu(seqlen_q: int) -> None:
    torch.manual_seed(0)
    sizes = (seqlen_q, 201, 201)
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in sizes)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
        mask = torch.arange(k.shape[2], device=q.device)[None, :] <= at
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    run = compiled(function, lowerings=["sdpa_flash"])
    out = run(q, k, v)
    assert "_scaled_dot_product_flash_attention" in run.calls
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    right = function(*exact)
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=2e-2)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    for got, wanted in zip(grads, torch.autograd.grad(right.sum(), exact), strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=5e-2, rtol=5e-2)


aten = torch.ops.aten


class Bench(bench.Bench):
    """A graph with a bias, q and k of which some axes are symbolic, each a symbol of its own."""

    SYMBOLS = DimDynamic.DYNAMIC

    def module(self, out: fx.Node) -> fx.GraphModule:
        self.graph.output(out)
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def value(self, node: fx.Node) -> torch.Tensor:
        return node.meta["example_value"]


def tensors(seqlen_q: int, seqlen_kv: int, batch: int = 2) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(batch, 4, seqlen_q, 8),
        "k": torch.randn(batch, 2, seqlen_kv, 8),
        "bias": torch.randn(batch, 1, 1, seqlen_kv),
    }


def test_a_symbolic_bias_is_aligned_for_every_size() -> None:
    case = Bench({"q": (2,), "k": (2,), "bias": (3,)}, **tensors(9, 13))
    module = case.module(case.call(mask_nodes.for_efficient, case.nodes["bias"], case.nodes["q"], case.nodes["k"]))
    # What was asked of the sizes on the way holds for each of them: no size is tied down.
    for guard in case.env.guards:
        for size in range(2, 40):
            assert guard.expr.subs({symbol: size + shift for shift, symbol in enumerate(guard.expr.free_symbols)}), (
                guard
            )
    for lengths in ((9, 13), (5, 16), (7, 23)):
        given = tensors(*lengths)
        got = module(*(given[name] for name in case.nodes))
        assert torch.equal(got, given["bias"].expand(2, 4, *lengths))
        assert all(stride % 8 == 0 for stride in got.stride()[:3])
        assert got.stride(3) == 1


def test_sites_share_one_aligned_bias() -> None:
    case = Bench(**tensors(9, 13))
    for _ in range(2):
        out = case.call(mask_nodes.for_efficient, case.nodes["bias"], case.nodes["q"], case.nodes["k"])
    assert calls(case.module(out)).count(aten.slice_scatter.default) == 1


def test_an_aligned_static_bias_is_only_expanded() -> None:
    case = Bench(**tensors(9, 16))
    out = case.call(mask_nodes.for_efficient, case.nodes["bias"], case.nodes["q"], case.nodes["k"])
    assert calls(case.module(out)) == [aten.expand.default]
    assert case.value(out).shape == (2, 4, 9, 16)


def test_triton_is_given_rows_that_vectors_are_loaded_from() -> None:
    """Once for all sites, also of a bias that was expanded over the batch."""
    bias = torch.randn(1, 4, 9, 133).expand(2, -1, -1, -1)
    case = Bench(**tensors(9, 133) | {"bias": bias})
    for _ in range(2):
        out = case.call(mask_nodes.in_vectors, case.nodes["bias"], case.nodes["q"])
    module = case.module(out)
    assert calls(module).count(aten.slice_scatter.default) == 1
    got = module(*(({**tensors(9, 133), "bias": bias})[name] for name in case.nodes))
    assert torch.equal(got, bias[:1])
    assert got.stride() == (4 * 9 * 144, 9 * 144, 144, 1)


@pytest.mark.parametrize(
    "bias",
    [
        torch.randn(2, 4, 9, 133),
        torch.randn(1, 4, 9, 144),
        torch.randn(1, 4, 1, 133),
        torch.randn(1, 4, 9, 1),
        torch.randn(1, 4, 9, 49),
    ],
    ids=["read once", "aligned", "one row", "one key", "few keys"],
)
def test_other_biases_are_not_copied_for_triton(bias: torch.Tensor) -> None:
    case = Bench(**tensors(9, bias.shape[3]) | {"bias": bias})
    assert case.call(mask_nodes.in_vectors, case.nodes["bias"], case.nodes["q"]) is case.nodes["bias"]


@pytest.mark.parametrize(
    ("mask", "targets"),
    [
        (torch.ones(2, 1, 9, 13), []),
        (torch.ones(2, 1, 9, 1), [aten.expand.default, aten.clone.default]),
        (torch.ones(2, 1, 13, 9).transpose(2, 3), [aten.clone.default]),
        (torch.ones(1).expand(2, 1, 9, 13), [aten.clone.default]),
    ],
)
def test_adjacent_keys(mask: torch.Tensor, targets: list[Any]) -> None:
    case = Bench(**{**tensors(9, 13), "bias": mask})
    out = case.call(mask_nodes.with_adjacent_keys, case.nodes["bias"], case.nodes["k"])
    assert calls(case.module(out)) == targets
    assert case.value(out).shape == (2, 1, 9, 13)
    assert case.value(out).stride(3) == 1


@pytest.mark.parametrize(
    ("mask", "keep", "dtype"),
    [
        (torch.ones(9, 13, dtype=torch.bool), (), torch.bfloat16),
        (torch.ones(9, 13, dtype=torch.float32), (), torch.bfloat16),
        (torch.ones(9, 13, dtype=torch.float32), (torch.float32,), torch.float32),
        (torch.ones(9, 13, dtype=torch.bfloat16), (), torch.bfloat16),
    ],
)
def test_additive_is_four_dimensional_and_of_the_dtype(
    mask: torch.Tensor, keep: tuple[torch.dtype, ...], dtype: torch.dtype
) -> None:
    case = Bench(bias=mask)
    out = case.call(mask_nodes.additive, case.nodes["bias"], torch.bfloat16, keep=keep)
    assert (case.value(out).shape, case.value(out).dtype) == ((1, 1, 9, 13), dtype)


def test_sites_share_one_converted_mask() -> None:
    case = Bench(bias=torch.ones(2, 1, 9, 13, dtype=torch.bool))
    first, second = (case.call(mask_nodes.additive, case.nodes["bias"], torch.bfloat16) for _ in range(2))
    assert first is second
