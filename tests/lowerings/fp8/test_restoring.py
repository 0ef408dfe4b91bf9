from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.fp8 import quantise, restoring
from attn_compiler.lowerings.fp8.restoring import Kept
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe, StaticScaling
from attn_compiler.spec.scores import ScoreChange, Softcap
from tests.lowerings.fp8.problems import Eager
from tests.lowerings.specs import CAUSAL, make_spec

B, H, HKV, S, D = 2, 4, 2, 300, 32
RECIPES = {
    "block": Fp8Recipe(),
    "head, int8": Fp8Recipe(scaling=CurrentScaling(granularity="head"), qk_format="int8"),
    "static": Fp8Recipe(scaling=StaticScaling(q=5, k=15, v=5)),
    "smooth_k": Fp8Recipe(smooth_k=True),
    "smooth_k, hadamard": Fp8Recipe(smooth_k=True, hadamard=True),
}


def spec_of(recipe: Fp8Recipe, **given: Any) -> Any:
    sizes: dict[str, Any] = {"mask": CAUSAL, "dtype": "bfloat16"} | given
    spec = make_spec(batch=B, heads=H, heads_kv=HKV, seqlen_q=S, seqlen_kv=S, head_dim=D, **sizes)
    return dataclasses.replace(spec, fp8=recipe)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(B, heads, S, D, generator=generator).bfloat16() for heads in (H, HKV, HKV)]
    # What is not rotated back, or has no mean again, is far off.
    found[1] += 2 * torch.randn(1, HKV, 1, D, generator=generator).bfloat16()
    return found


@pytest.mark.parametrize("changes", [(), (Softcap(cap=30.0),)])
@pytest.mark.parametrize("positions_last", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_restored_is_near_what_was_rounded(
    name: str, positions_last: bool, changes: tuple[ScoreChange, ...]
) -> None:
    given, spec, emitter = tensors(), spec_of(RECIPES[name], changes=changes), Eager()
    nodes: Any = dict(zip("qkv", given, strict=True))
    asked: Any = emitter
    made: Any = quantise.emit(asked, spec, Operands(**nodes), positions_last=positions_last)
    if not positions_last and quantise.scales_of(spec).block:
        pytest.skip("who wants v as it lies has one scale for a tensor")
    kept = restoring.kept_of(spec, "text", positions_last=positions_last)
    read = restoring._read(made.kept, kept.to_text())
    assert read.text == "text"
    if RECIPES[name].smooth_k and not changes:
        # A softmax alone does not miss its mean.
        given[1] = given[1] - given[1].float().mean(2, keepdim=True)
    for mine, own in zip((read.q, read.k, read.v), given, strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine - own).float().norm() / own.float().norm()) < 0.04


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_an_outlier_comes_back_in_float16(form: Any) -> None:
    """Turned, it is the format's largest number in all places: of e5m2 the sum of those is beyond float16."""
    q, k, v = (x.half() for x in tensors())
    q[..., 3], k[..., 5] = 300.0, -200.0
    spec = spec_of(Fp8Recipe(forward_format=form, hadamard=True), dtype="float16")
    nodes: Any = {"q": q, "k": k, "v": v}
    asked: Any = Eager()
    made: Any = quantise.emit(asked, spec, Operands(**nodes))
    read = restoring._read(made.kept, restoring.kept_of(spec, "text").to_text())
    for mine, own in ((read.q, q), (read.k, k)):
        assert float((mine - own).float().norm() / own.float().norm()) < 0.1


def test_the_text_comes_back() -> None:
    spec = spec_of(Fp8Recipe(smooth_k=True), changes=(Softcap(cap=30.0),))
    kept = restoring.kept_of(spec, '{"a": 1}')
    assert Kept.from_text(kept.to_text()) == kept
    assert kept.names[-1] == "mean"


def test_compiled_code_keeps_numbers_of_eight_bits_and_attaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward writes no q or k for the backward, which makes them by nodes."""
    seen = list[list[fx.Node]]()
    without_autograd = ops.without_autograd

    def noted(graph: fx.Graph) -> None:
        without_autograd(graph)
        seen.append(list(graph.nodes))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q * 2, k * 2, v * 1, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(ops, "without_autograd", noted)
    options = {"fp8_recipe": Fp8Recipe(), "lowering": "reference_fp8", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    leaves = [x.requires_grad_() for x in tensors()]
    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        compiled(*leaves).float().sum().backward()
    (nodes,) = seen
    names = [str(node.target).split(".")[1] for node in nodes if "attn_compiler" in str(node.target)]
    assert names == ["round_fp8", "reference_fp8", "reference_backward"]
    (backward,) = (node for node in nodes if "reference_backward" in str(node.target))
    q, k, v = (x for x in backward.args[2:5] if isinstance(x, fx.Node))
    assert [x.target for x in (q, k)] == [torch.ops.prims.convert_element_type.default] * 2
    assert v.target is operator.getitem
