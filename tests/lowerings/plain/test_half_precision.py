"""Half precision on a CPU: what is chosen there is at most 1.1 times as far from float64 as PyTorch's own SDPA, whatever the scores' size.

Both errors are rounding, so single elements say little: errors are compared by their mean over several draws, and the largest with
the half unit in the last place that no kernel can avoid.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.lowerings import by_name, order
from attn_compiler.spec.masks import Alignment
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import Case, Inputs
from tests.lowerings.emitting import arguments, emit

CPU = Target.current("cpu")
LOWERINGS = ("math", "reference", "sdpa_cpu_flash")
HALVES = (torch.bfloat16, torch.float16)
LIMIT = 1.1
NAMES = ("out", "dq", "dk", "dv", "dbias", "dsinks")

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": Alignment.TOP_LEFT},
    "mask": {"mask": "bhqk"},
    "numbers": {"mask": "bk", "mask_dtype": torch.float32},
    "bias": {"bias": "hqk"},
    "gqa": {"heads_kv": 2, "causal": Alignment.TOP_LEFT},
    "two head dims": {"head_dim_v": 24},
    "one query": {"seqlen_q": 1, "seqlen_kv": 200},
    "heads not adjacent": {"layout": "last_stride", "heads_kv": 2},
    "long": {"batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_q": 300, "seqlen_kv": 300},
}
#: of scores that no kernel of PyTorch's makes: beside them stands what a model writes by hand
WRITTEN: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True, "causal": Alignment.TOP_LEFT},
    "softcap": {"softcap": 20.0},
    "from the bottom right": {"causal": Alignment.BOTTOM_RIGHT, "seqlen_q": 40},
}


def scaled(inputs: Inputs, factor: float) -> Inputs:
    """q and k times the factor."""
    q, k = ((x.detach() * factor).requires_grad_() for x in (inputs.q, inputs.k))
    return dataclasses.replace(inputs, q=q, k=k)


def sdpa(inputs: Inputs) -> Tensor:
    """What PyTorch picks itself, without compiling."""
    spec = inputs.spec
    return F.scaled_dot_product_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        attn_mask=inputs.mask if inputs.bias is None else inputs.bias,
        is_causal=spec.mask.is_causal,
        scale=spec.score.scale,
        enable_gqa=spec.is_gqa,
    )


def with_gradients(function: Any, inputs: Inputs, upstream: Tensor) -> tuple[Tensor, ...]:
    """The output, then the gradients; upstream: the same numbers, in half precision, for every dtype."""
    out = function(inputs)
    return out, *torch.autograd.grad(out, inputs.differentiable, upstream.to(out.dtype))


def assert_as_exact_as(lowering: str, case: Case, factor: float, eager: Any, *, draws: int = 2) -> None:
    errors: dict[str, list[Tensor]] = {}
    for seed in range(draws):
        inputs = scaled(cases.build(case, seed=seed), factor)
        if by_name(lowering).why_not(inputs.spec, CPU):
            assert lowering == "sdpa_cpu_flash"
            return
        module = emit(by_name(lowering), inputs)
        generator = torch.Generator().manual_seed(100 + seed)
        upstream = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3], generator=generator).to(case.dtype)
        exact = with_gradients(numerics.attention, numerics.cast(inputs, torch.float64), upstream)
        usual = with_gradients(eager, inputs, upstream)
        found = with_gradients(lambda given, module=module: module(*arguments(given)), inputs, upstream)
        for name, mine, theirs, right in zip(NAMES, found, usual, exact, strict=False):
            assert not (theirs.isfinite() & ~mine.isfinite()).any(), f"{name}: not finite where eager is"
            assert mine.dtype == theirs.dtype
            usable = theirs.isfinite()
            pair = [torch.where(usable, x.double() - right, 0.0).abs().detach() for x in (mine, theirs)]
            unavoidable = torch.finfo(case.dtype).eps * right.abs().max().detach() / 2
            errors.setdefault(name, []).append(torch.stack([pair[0].mean(), pair[1].mean()]))
            assert pair[0].max() <= max(LIMIT * pair[1].max(), unavoidable) or factor > 16, name
    for name, each in errors.items():
        mine, theirs = (float(x) for x in torch.stack(each).mean(0))
        # Gradients that are all but zero cancel: what is left is float32's own rounding of terms of size one.
        noise = 2.0**-20 if name != "out" else 0.0
        assert mine <= LIMIT * theirs + noise * factor, f"{name}: off by {mine:.3g} on average, eager by {theirs:.3g}"


@pytest.mark.in_turns
@pytest.mark.parametrize("factor", [0.01, 1.0, 16.0])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_is_as_exact_as_eager(lowering: str, dtype: torch.dtype, name: str, factor: float) -> None:
    assert_as_exact_as(lowering, Case(name=name, dtype=dtype, **MASKS[name]), factor, sdpa)


@pytest.mark.in_turns
@pytest.mark.parametrize("head_dim", [1, 2, 7, 16, 40, 96, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_is_as_exact_as_eager_for_every_head_dim(lowering: str, dtype: torch.dtype, head_dim: int) -> None:
    for factor in (0.01, 1.0, 8.0):
        case = Case(name="x", dtype=dtype, head_dim=head_dim, causal=Alignment.TOP_LEFT)
        assert_as_exact_as(lowering, case, factor, sdpa)


@pytest.mark.in_turns
@pytest.mark.parametrize("factor", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("lowering", ["math", "reference"])
def test_is_as_exact_as_what_models_write(lowering: str, dtype: torch.dtype, name: str, factor: float) -> None:
    assert_as_exact_as(lowering, Case(name=name, dtype=dtype, **WRITTEN[name]), factor, numerics.attention)


@pytest.mark.further
def test_is_as_exact_as_eager_over_random_scales() -> None:
    """Shapes, masks and scales drawn at random, those of q and k apart."""
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice(list(MASKS))
        sizes = {"head_dim": draw.choice([1, 3, 8, 17, 32, 64, 80, 128, 192, 256]), "dtype": draw.choice(HALVES)}
        case = Case(name=name, **{**sizes, **MASKS[name], "scale": draw.choice([None, 1.0, 0.01, 0.37])})  # type: ignore[arg-type]
        product = draw.uniform(0.0, 60.0 if case.scale is None else 8.0)
        assert_as_exact_as(draw.choice(LOWERINGS), case, math.sqrt(product), sdpa)


@pytest.mark.in_turns
@pytest.mark.parametrize("factor", [32.0, 250.0, 4000.0])
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_scores_beyond_the_dtype_stay_finite(lowering: str, dtype: torch.dtype, factor: float) -> None:
    """Unscaled scores of up to 4e9, where float16 ends at 65504."""
    for name in ("full", "causal", "mask", "gqa"):
        assert_as_exact_as(lowering, Case(name=name, dtype=dtype, **MASKS[name]), factor, sdpa, draws=4)


def test_the_compiled_choice_is_as_exact_as_eager() -> None:
    """As Inductor compiles it, which may fuse casts away, by default options."""
    case = Case(name="x", dtype=torch.float16, causal=Alignment.TOP_LEFT, seqlen_q=96, seqlen_kv=96)
    inputs = scaled(cases.build(case), 24.0)
    chosen = order(inputs.spec, CPU)[0]
    upstream = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(100)).to(case.dtype)
    exact = with_gradients(numerics.attention, numerics.cast(inputs, torch.float64), upstream)
    usual = with_gradients(sdpa, inputs, upstream)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    function: Any = torch.compile(attend, backend="attn_compiler", options={"lowering": chosen, "strict": True})
    found = with_gradients(lambda given: function(given.q, given.k, given.v), inputs, upstream)
    for mine, theirs, right in zip(found, usual, exact, strict=True):
        assert mine.isfinite().all()
        assert (mine - right).abs().mean() <= LIMIT * (theirs - right).abs().mean()
