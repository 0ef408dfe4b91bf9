"""Copies: only where a kernel can't read the strides, in the graph, and in the report with bytes and reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.lowerings.base import LayoutDemand
from attn_compiler.passes.writing import layout
from attn_compiler.spec.attention import Dim, TensorSpec
from tests.passes.compiling import Compiled, compiled

B, H, S, D = 2, 4, 6, 8
sdpa = F.scaled_dot_product_attention


def _tensor(shape: tuple[Dim, ...], strides: tuple[Dim, ...], dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape=shape, strides=strides, dtype=dtype)


BHSD = _tensor((2, 4, 6, 8), (192, 48, 8, 1))
BSHD = _tensor((2, 4, 6, 8), (192, 8, 32, 1))
KEYS_FIRST = _tensor((2, 4, 6, 8), (192, 48, 1, 6))
REPEATED = _tensor((2, 4, 6, 8), (48, 0, 8, 1))
ODD = _tensor((2, 4, 6, 7), (168, 42, 7, 1))


@pytest.mark.parametrize("tensor", [BHSD, BSHD])
@pytest.mark.parametrize("demand", [LayoutDemand(), LayoutDemand(alignment=16, zero_strides=False)])
def test_usual_layouts_are_readable(tensor: TensorSpec, demand: LayoutDemand) -> None:
    assert demand.broken_by(tensor) is None


@pytest.mark.parametrize(
    ("tensor", "demand", "why"),
    [
        (KEYS_FIRST, LayoutDemand(), "side by side; their stride is 6"),
        (REPEATED, LayoutDemand(zero_strides=False), "repeated (stride 0) axis"),
        (ODD, LayoutDemand(alignment=16), "multiples of 16 bytes; one is"),
        (_tensor((2, 4, "s0", 8), ("32*s0", "8*s0", 8, "s1")), LayoutDemand(), "their stride is s1"),
        (_tensor((2, 4, "s0", 8), ("32*s0", "s0", 8, 1)), LayoutDemand(alignment=16), "one is"),
    ],
)
def test_what_a_kernel_cannot_read_is_said(tensor: TensorSpec, demand: LayoutDemand, why: str) -> None:
    broken = demand.broken_by(tensor)
    assert broken is not None
    assert why in broken


@pytest.mark.parametrize("tensor", [KEYS_FIRST, REPEATED, ODD])
def test_a_kernel_that_reads_anything_copies_nothing(tensor: TensorSpec) -> None:
    assert LayoutDemand(last_stride_one=False).broken_by(tensor) is None


def test_the_stride_of_an_axis_of_size_one_does_not_count() -> None:
    one_key = _tensor((2, 4, 6, 1), (24, 6, 1, 99))
    one_head = _tensor((2, 1, 6, 8), (48, 3, 8, 1))
    demand = LayoutDemand(alignment=16, zero_strides=False)
    assert demand.broken_by(one_head) is None
    assert LayoutDemand().broken_by(one_key) is None


def test_alignment_is_in_bytes() -> None:
    four_elements = (2, 4, 6, 4), (96, 24, 4, 1)
    demand = LayoutDemand(alignment=16)
    assert demand.broken_by(_tensor(*four_elements, dtype="float32")) is None
    assert demand.broken_by(_tensor(*four_elements, dtype="bfloat16")) is not None


def test_bytes_of_a_copy() -> None:
    assert layout.num_bytes(BHSD) == 2 * 4 * 6 * 8 * 2
    assert layout.num_bytes(_tensor((2, 4, 6, 8), (192, 48, 8, 1), dtype="float64")) == 2 * 4 * 6 * 8 * 8
    assert layout.num_bytes(_tensor((2, 4, "s0", 8), (1, 1, 1, 1))) is None


# ---- in the graph -------------------------------------------------------------------------------------------------


def _check(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Compiled:
    inputs = [torch.randn(shape) for shape in shapes]
    run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs))
    return run


def test_last_stride_other_than_one_is_copied_and_said() -> None:
    run = _check(lambda q, k, v: sdpa(q.mT, k, v), (B, H, D, S), (B, H, S, D), (B, H, S, D))
    (copy,) = run.site.copies
    assert (copy.operand, copy.bytes) == ("q", B * H * S * D * 4)
    assert "side by side" in copy.why
    assert run.calls.count("contiguous") == 1


def test_strides_of_heads_are_read_as_they_are() -> None:
    """(B, S, H, D) memory, as every model has it after its projections."""
    run = _check(lambda x: sdpa(*[x.transpose(1, 2)] * 3).transpose(1, 2), (B, S, H, D))
    assert run.site.copies == ()
    assert run.site.spec.q.strides == (S * H * D, D, H * D, 1)
    assert "contiguous" not in run.calls


def test_parts_of_one_tensor_that_holds_heads_of_queries_and_keys() -> None:
    """sb(h+2hg)d with one key head: q, k and v are views with offsets into it, at strides of their own."""

    def function(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(1, 2, 0, 3).split([H, 1, 1], dim=1)
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    run = _check(function, (S, B, H + 2, D))
    spec = run.site.spec
    assert spec.q.strides == ((H + 2) * D, D, B * (H + 2) * D, 1)
    assert spec.k.shape == (B, 1, S, D)
    assert run.site.copies == ()


def test_copies_are_made_for_lowered_sites_only() -> None:
    run = _check(lambda q, k, v: sdpa(q.mT, k, v[..., :4]), (B, H, D, S), (B, H, S, D), (B, H, S, D))
    assert run.site.decision.lowering == "untouched"
    assert run.site.copies == ()


def test_a_model_that_copies_by_itself_is_read_from_above_its_copy() -> None:
    """Its output then has other strides, and is copied only because the caller gets it as it is."""
    run = _check(lambda x: sdpa(*[x.transpose(1, 2).contiguous()] * 3).sum(), (B, S, H, D))
    assert run.site.spec.q.strides == (S * H * D, D, H * D, 1)
    assert run.site.copies == ()
    assert "contiguous" not in run.calls


@pytest.mark.parametrize("moved", [lambda x: x.roll(1, 2), lambda x: F.channel_shuffle(x, 2)], ids=["roll", "shuffle"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_strides_that_tracing_tells_wrong_are_not_relied_on(moved: Callable[[Tensor], Tensor], inner: str) -> None:
    """On a CPU the ops keep their input's strides, and flash reads elements that lie side by side."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, moved(k.permute(0, 3, 1, 2)), v)

    q, k, v = torch.randn(B, H, S, D), torch.randn(B, S, D, H), torch.randn(B, H, S, D)
    run = compiled(function, lowering="sdpa_cpu_flash", inner=inner)
    torch.testing.assert_close(run(q, k, v), function(q, k, v))
    assert [copy.operand for copy in run.site.copies] == ([] if inner == "inductor" else ["k"])


def test_a_symbolic_head_dim_gets_no_zeros() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v.roll(1, 2)

    run = compiled(function, lowering="reference", inner="aot_eager", dynamic=True)
    for dim in (5, 7, 8):
        q, k, v = (torch.randn(B, H, S, dim) for _ in range(3))
        torch.testing.assert_close(run(q, k, v), function(q, k, v))
    assert [(copy.operand, run.site.spec.v.shape[-1]) for copy in run.site.copies] == [("v", "s89")]
