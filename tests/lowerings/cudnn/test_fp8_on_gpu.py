"""cuDNN's FP8 on a GPU, compiled: out and gradients against float32 from the same rounded tensors, by what FP8 itself rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend
from attn_compiler.spec.target import Target

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RECIPE = Fp8Recipe(scaling=CurrentScaling(granularity="tensor"))
BACKWARD = dataclasses.replace(RECIPE, backward=True)


@pytest.fixture(autouse=True)
def usable() -> None:
    pytest.importorskip("cudnn", reason="needs the extra: pip install -e '.[cudnn]'")
    reasons = by_name("cudnn_fp8").unavailable(Target.current(DEVICE))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def tensors(batch: int, heads: int, heads_kv: int, seqlen: int, head_dim: int) -> list[Tensor]:
    """q, k and v, BSHD in memory."""
    torch.manual_seed(0)
    sizes = (heads, heads_kv, heads_kv)
    made = (torch.randn(batch, seqlen, n, head_dim, device=DEVICE).bfloat16().transpose(1, 2) for n in sizes)
    return [x.requires_grad_() for x in made]


def attention(mask: str) -> Callable[..., Tensor]:
    """The model's: a function of q, k, v and the number of keys of each batch row."""

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        if mask == "full":
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        if mask == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if mask == "window":
            near = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 100)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=near[None, None], enable_gqa=True)
        used = at[None, None, None] < lengths[:, None, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=used, enable_gqa=True)

    return run


def results(function: Callable[..., Tensor], given: list[Tensor], lengths: Tensor, upstream: Tensor) -> list[Tensor]:
    out = function(*given, lengths)
    return [out.detach().float(), *(x.float() for x in torch.autograd.grad(out, given, upstream.to(out.dtype)))]


def compiled(mask: str, recipe: Fp8Recipe, **options: Any) -> Callable[..., Tensor]:
    options = {"lowering": "cudnn_fp8", "fp8_recipe": recipe, "strict": True, **options}
    function: Callable[..., Tensor] = torch.compile(attention(mask), backend="attn_compiler", options=options)
    return function


def assert_near(
    mask: str, recipe: Fp8Recipe, sizes: tuple[int, int, int, int, int], lengths: list[int] | None = None
) -> None:
    given, counted = tensors(*sizes), torch.tensor(lengths or [0], device=DEVICE)
    upstream = torch.randn(sizes[0], sizes[1], sizes[3], sizes[4], device=DEVICE).bfloat16()
    found = results(compiled(mask, recipe), given, counted, upstream)
    (report,) = attn_compiler.reports()[-1:]
    assert [site.decision.lowering for site in report.sites] == ["cudnn_fp8"]
    exact = [x.detach().float().requires_grad_() for x in given]
    right = results(attention(mask), exact, counted, upstream)
    for label, mine, wanted in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
        assert mine.isfinite().all(), label
        off = ((mine - wanted).norm() / wanted.norm()).item()
        assert off < (0.13 if recipe.backward and label != "out" else 0.08), f"{label}: off by {off:.3f} of the norm"
    if lengths is not None and 0 in lengths:
        assert all(x[lengths.index(0)].abs().max() == 0 for x in found)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
def test_head_dims(head_dim: int, mask: str) -> None:
    assert_near(mask, RECIPE, (2, 4, 4, 512, head_dim))


MULTIPLES: list[tuple[str, tuple[int, int, int, int, int], list[int] | None]] = [
    ("full", (2, 4, 4, 1024, 128), None),
    ("causal", (1, 4, 4, 4096, 128), None),
    ("causal", (2, 8, 2, 512, 128), None),
    ("window", (1, 4, 4, 1024, 128), None),
    ("lengths", (2, 4, 4, 512, 128), [512, 100]),
    ("lengths", (3, 8, 2, 512, 128), [0, 1, 300]),
    ("full", (2, 8, 1, 208, 128), None),
    ("causal", (2, 8, 2, 2000, 128), None),
    ("window", (1, 4, 4, 1008, 128), None),
    ("lengths", (2, 8, 1, 336, 128), [336, 100]),
]
OTHERS: list[tuple[str, tuple[int, int, int, int, int], list[int] | None]] = [
    ("causal", (2, 4, 4, 500, 128), None),
    ("full", (2, 8, 1, 201, 128), None),
    ("full", (2, 4, 4, 192, 128), None),
    ("window", (1, 4, 4, 1000, 128), None),
]


@pytest.mark.parametrize(
    ("recipe", "mask", "sizes", "lengths"),
    [*((RECIPE, *case) for case in (*MULTIPLES, *OTHERS)), *((BACKWARD, *case) for case in MULTIPLES)],
)
def test_masks_and_sizes(
    recipe: Fp8Recipe, mask: str, sizes: tuple[int, int, int, int, int], lengths: list[int] | None
) -> None:
    assert_near(mask, recipe, sizes, lengths)


@pytest.mark.parametrize(
    "recipe",
    [
        dataclasses.replace(RECIPE, smooth_k=True),
        dataclasses.replace(RECIPE, hadamard=True),
        dataclasses.replace(BACKWARD, smooth_k=True, hadamard=True),
        Fp8Recipe(scaling=StaticScaling(q=6.0, k=6.0, v=6.0), backward=True),
    ],
    ids=lambda recipe: recipe.words,
)
def test_recipes(recipe: Fp8Recipe) -> None:
    assert_near("causal", recipe, (2, 4, 4, 512, 128))


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}])
@pytest.mark.parametrize("backward", [False, True])
def test_steps_with_delayed_scaling_build_no_plan_and_compile_nothing(backward: bool, options: dict[str, Any]) -> None:
    recipe = Fp8Recipe(scaling=DelayedScaling(amax_history_len=4), backward=backward)
    function = compiled("causal", recipe, **options)
    unused = torch.tensor([0], device=DEVICE)
    before = builds = 0
    for step in range(12):
        given = [(x.detach() * (1 + step % 3 / 10)).requires_grad_() for x in tensors(1, 4, 4, 512, 128)]
        upstream = torch.randn(1, 4, 512, 128, device=DEVICE)
        found = [x.clone() for x in results(function, given, unused, upstream)]
        if step == 3:
            before, builds = len(attn_compiler.reports()), frontend.PLANS.counts.builds
    assert (len(attn_compiler.reports()), frontend.PLANS.counts.builds) == (before, builds)
    right = results(attention("causal"), [x.detach().float().requires_grad_() for x in given], unused, upstream)
    off = [((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]
    assert max(off) < 0.15, f"off by {off} of the norm"
