"""What FP8 asks of a site, and the nodes that it adds."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.fp8 import quantise, restoring
from attn_compiler.lowerings.fp8.restoring import Kept
from attn_compiler.lowerings.fp8.rounding import How, Rounding
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe, StaticScaling
from attn_compiler.spec.scores import ScoreChange, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.fp8.problems import Eager
from tests.lowerings.specs import CAUSAL, make_spec, words

BLOCKS = Fp8Recipe(scaling=CurrentScaling(granularity="block"))
H100 = Target.fake(sm=90)


def refusals(recipe: Fp8Recipe | None = Fp8Recipe(), target: Target = H100, **given: Any) -> str:  # noqa: B008
    """Of Hopper's lowering."""
    return words(by_name("hopper_fp8").why_not(dataclasses.replace(make_spec(**given), fp8=recipe), target))


@pytest.mark.parametrize("given", [{}, {"dtype": "float16"}, {"seqlen_q": "s0", "seqlen_kv": "s0"}, {"head_dim": 80}])
def test_nothing_is_in_the_way(given: Any) -> None:
    assert refusals(**given) == ""


def test_no_recipe() -> None:
    assert "no recipe for this site" in refusals(None)
    assert "options={'fp8_recipe'" in refusals(None)


@pytest.mark.parametrize("name", ["hopper_fp8", "cudnn_fp8", "reference_fp8"])
def test_nothing_in_fp8_gives_the_logsumexp(name: str) -> None:
    spec = dataclasses.replace(make_spec(lse="read", needs_grad=False), fp8=Fp8Recipe())
    assert "nothing reads the logsumexp" in words(by_name(name).why_not(spec, H100))


def test_a_model_in_float32() -> None:
    found = refusals(dtype="float32")
    assert "the attention runs in fp32, FP8 is ignored" in found
    assert "call model.bfloat16()" in found


def test_gpus_without_fp8() -> None:
    assert "sm80" in refusals(target=Target.fake(sm=80))
    assert "sm86" in refusals(target=Target.fake(sm=86))
    assert "sm89" in refusals(target=Target.fake(sm=89))
    assert "cpu" in refusals(target=Target.fake(device="cpu", sm=0), device="cpu")


@pytest.mark.parametrize(("size", "allowed"), [(72, False), (80, True), (128, True), (144, False)])
def test_head_dims(size: int, allowed: bool) -> None:
    assert (refusals(head_dim=size) == "") is allowed


def test_a_hadamard_rotation_needs_a_power_of_two() -> None:
    recipe = Fp8Recipe(hadamard=True)
    assert "hadamard=False" in refusals(recipe, head_dim=80)
    assert refusals(recipe, head_dim=64) == ""


def test_blocks_need_no_lengths() -> None:
    assert refusals(BLOCKS, seqlen_kv="s0") == ""


def test_few_queries() -> None:
    assert "more than 32 queries" in refusals(seqlen_q=1)
    assert refusals(seqlen_q=33) == ""


@pytest.mark.parametrize("name", ["hopper_fp8", "reference_fp8"])
@pytest.mark.parametrize("size", ["batch", "seqlen_kv"])
def test_nothing_to_attend_to(size: str, name: str) -> None:
    """There is no largest of no numbers, and no scale to be read."""
    sizes: dict[str, Any] = {size: 0}
    spec = dataclasses.replace(make_spec(**sizes), fp8=Fp8Recipe())
    refused = words(by_name(name).why_not(spec, H100))
    assert "no axis can be empty" in refused
    assert f"{size} 0" in refused


def test_a_backward_in_fp8_is_cudnns_alone() -> None:
    recipe = Fp8Recipe(backward=True)
    assert "backward=False" in refusals(recipe)
    assert refusals(recipe, needs_grad=False) == ""
    assert "forward=False" in refusals(Fp8Recipe(forward=False, backward=True))


@pytest.mark.parametrize("name", ["hopper_fp8", "reference_fp8"])
def test_what_the_family_refuses_is_refused(name: str) -> None:
    spec = dataclasses.replace(make_spec(returns_weights=True), fp8=Fp8Recipe())
    assert "weights" in words(by_name(name).why_not(spec, H100))


B, H, S, D = 2, 3, 40, 32


def nodes(x: torch.Tensor, how: How) -> Any:
    emitter: Any = Eager()
    given: Any = x
    return quantise.round_by_nodes(emitter, given, how)


@pytest.mark.parametrize("form", ["e4m3", "e5m2", "int8"])
def test_they_give_what_the_op_gives(form: str) -> None:
    """Also of what is not finite, and of what exceeds the scale."""
    torch.manual_seed(0)
    x, how = torch.randn(B, H, S, D).bfloat16(), How(format=form, magnitude=1.75)
    x[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rounded, descale = nodes(x, how)
    of_op = torch.ops.attn_compiler.round_fp8([x], None, [], Rounding(each=(how,), block=128).to_text())
    assert rounded.dtype == of_op[0].dtype
    torch.testing.assert_close(rounded.float(), of_op[0].float(), equal_nan=True)
    torch.testing.assert_close(descale, of_op[1])


def test_rounded_numbers_lie_as_they_did() -> None:
    x = torch.ones(B, S, H, D).transpose(1, 2)
    assert nodes(x, How(format="e4m3", magnitude=1.0))[0].stride() == x.stride()


def test_without_a_magnitude_it_is_the_op_s() -> None:
    with pytest.raises(ValueError, match="known beforehand"):
        nodes(torch.ones(B, H, S, D), How(format="e4m3"))


STORED_B, STORED_H, HKV, STORED_S, STORED_D = 2, 4, 2, 300, 32
RECIPES = {
    "block": Fp8Recipe(),
    "head, int8": Fp8Recipe(scaling=CurrentScaling(granularity="head"), qk_format="int8"),
    "static": Fp8Recipe(scaling=StaticScaling(q=5, k=15, v=5)),
    "smooth_k": Fp8Recipe(smooth_k=True),
    "smooth_k, hadamard": Fp8Recipe(smooth_k=True, hadamard=True),
}


def spec_of(recipe: Fp8Recipe, **given: Any) -> Any:
    sizes: dict[str, Any] = {"mask": CAUSAL, "dtype": "bfloat16"} | given
    spec = make_spec(
        batch=STORED_B, heads=STORED_H, heads_kv=HKV, seqlen_q=STORED_S, seqlen_kv=STORED_S, head_dim=STORED_D, **sizes
    )
    return dataclasses.replace(spec, fp8=recipe)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [
        torch.randn(STORED_B, heads, STORED_S, STORED_D, generator=generator).bfloat16()
        for heads in (STORED_H, HKV, HKV)
    ]
    # What is not rotated back, or has no mean again, is far off.
    found[1] += 2 * torch.randn(1, HKV, 1, STORED_D, generator=generator).bfloat16()
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
