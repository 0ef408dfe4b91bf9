"""PyTorch's kernels called by their own ops. Most of them run on GPUs alone: there F.scaled_dot_product_attention says what is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.matching.patterns import sdpa_kernel_call
from attn_compiler.spec.masks import Causal, Flag, MaskSpec, SlidingWindow
from tests.passes.compiling import CPU_FLASH, Compiled, compiled, mark
from tests.passes.matching.patterns.forms import HKV, KEYS, B, D, H, S

Function = Callable[..., Any]
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, **scale)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, bias: Tensor | None = None, **scale: float
) -> Any:
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, **scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, bias: Tensor | None = None, **scale: float) -> Any:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, **scale)


def _other(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, bias: Tensor | None = None, **scale: float) -> Any:
    return aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias, 0.0, causal, **scale)


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, bias: Tensor | None = None, **scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, **scale)


CALLS = pytest.mark.parametrize("call", [_flash, _efficient, _cudnn, _other, _cpu])
WITH_BIAS = pytest.mark.parametrize("call", [_efficient, _cudnn, _other, _cpu])


def _qkv(keys: int = S, heads: int = H, *, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, n, s, D, requires_grad=grad) for n, s in ((H, S), (heads, keys), (heads, keys))]


def _check(function: Function, like: Function, inputs: list[Tensor]) -> Compiled:
    """Outputs and gradients of the compiled function are those of `like` in float64."""
    run = compiled(function)
    got, wanted = run(*inputs), like(*(x.double() for x in inputs))
    torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=2e-5)
    leaves = [x for x in inputs if x.requires_grad]
    if leaves:
        for mine, right in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (got, wanted)), strict=True):
            torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)
    return run


def test_every_op_of_the_kind_is_known() -> None:
    """Less those that run on other devices, have other arguments, or are made of other ops in the mirror."""
    names = {name for name in dir(aten) if name.startswith("_scaled_dot_product")}
    known = {anchor.overloadpacket.__name__ for anchor in sdpa_kernel_call.ANCHORS}  # type: ignore[attr-defined]
    assert known <= {f"_scaled_dot_product_{x}" for x in _NAMES}
    assert not {name for name in names if "backward" not in name} - known - _LEFT


_NAMES = (
    "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable".split()
)
_LEFT = {"_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"}


@pytest.mark.in_turns
@CALLS
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_first_output_is_a_site(call: Function, dynamic: bool, grad: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v)[0].transpose(1, 2).flatten(2) * 2  # type: ignore[no-any-return]

    def like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v).transpose(1, 2).flatten(2) * 2

    inputs = _qkv(grad=grad)
    run = _check(function, like, [mark(x, [B, S]) for x in inputs] if dynamic else inputs)
    assert run.site.pattern == "sdpa kernel call"
    assert run.site.decision.lowering == "sdpa_cpu_flash"
    assert [name for name in run.calls if name.startswith("_scaled_dot")] == [CPU_FLASH]


@CALLS
def test_causal_and_a_scale(call: Function) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, True, scale=0.1)[0]  # type: ignore[no-any-return]

    run = _check(function, partial(sdpa, is_causal=True, scale=0.1), _qkv(grad=True))
    assert run.site.spec.mask == MaskSpec(kinds=(Causal(),), flag=Flag.CALLED)
    assert run.site.spec.score.scale == 0.1


@WITH_BIAS
def test_a_bias_is_read(call: Function) -> None:
    """A mask that the model makes in floats is proved as that of any call."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(S, S, dtype=torch.bool).triu(1)
        bias = torch.zeros(S, S).masked_fill(later, -torch.inf).expand(B, H, S, S)
        return call(q, k, v, bias=bias)[0]  # type: ignore[no-any-return]

    run = _check(function, partial(sdpa, is_causal=True), _qkv(grad=True))
    assert run.site.spec.mask.words == "causal (proved)"


@pytest.mark.parametrize("call", [_efficient, _cpu])
def test_a_flag_stands_beside_what_a_bias_means(call: Function) -> None:
    def window(q: Tensor) -> Tensor:
        far = torch.ones(S, S, dtype=torch.bool).tril(-3)
        return torch.zeros(S, S, dtype=q.dtype).masked_fill(far, -torch.inf).expand(B, H, S, S)

    def like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.full((S, S), -torch.inf, dtype=q.dtype).triu(1)
        return sdpa(q, k, v, attn_mask=window(q) + later)

    run = _check(lambda q, k, v: call(q, k, v, True, window(q))[0], like, _qkv())
    mask = run.site.spec.mask
    assert (mask.kinds, mask.flag) == ((Causal(), SlidingWindow(left=2, right=None)), Flag.CALLED)
    assert mask.words == "window (2 back) (proved)"


def test_fewer_heads_of_keys_where_the_kernel_takes_them() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _flash(q, k, v)[0]  # type: ignore[no-any-return]

    run = _check(function, partial(sdpa, enable_gqa=True), _qkv(heads=HKV))
    assert run.site.spec.k.shape == (B, HKV, S, D)


@pytest.mark.parametrize("call", [_efficient, _cpu])
def test_causal_with_more_keys_where_it_begins_at_the_first(call: Function) -> None:
    _check(lambda q, k, v: call(q, k, v, True)[0], partial(sdpa, is_causal=True), _qkv(keys=KEYS))
