"""Autocast, grad mode and sdpa_kernel scopes around, inside and across the attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler.passes.graph import regions
from tests import numerics
from tests.passes.compiling import captured, compiled

B, H, S, D = 2, 4, 6, 8
sdpa = F.scaled_dot_product_attention


def _q(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(0)).to(dtype)


# ---- autocast -----------------------------------------------------------------------------------------------------


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25, -1) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, scale=0.25)


BOTH = pytest.mark.parametrize("attention", [_written_out, _fused])


def _assert_as_good_as_eager(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    assert got.dtype == plain.dtype
    allowed = numerics.FACTOR * numerics.worst(plain, exact) + numerics.floor(exact, torch.bfloat16)
    assert numerics.worst(got, exact) <= allowed


def _check_autocast(
    function: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    *,
    around: bool = False,
    lowering: str = "sdpa_cpu_flash",
) -> None:
    """Output and gradient as good as eager's in bfloat16, in the same dtypes. around: autocast is on outside of the graph."""
    q, own, right = (_q().requires_grad_() for _ in range(3))
    run = compiled(function, lowering=lowering)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        plain, got = function(q), run(own)
    wanted = exact(right)
    _assert_as_good_as_eager(got, plain, wanted)
    for out, x in ((plain, q), (got, own), (wanted, right)):
        out.float().sin().sum().backward()
        assert x.grad is not None
    assert q.grad is not None
    assert own.grad is not None
    assert right.grad is not None
    _assert_as_good_as_eager(own.grad, q.grad, right.grad)
    assert run.site.spec.dtype == "bfloat16"
    assert run.site.decision.lowering == lowering


@BOTH
def test_autocast_inside_the_graph(attention: Callable[..., Tensor]) -> None:
    def function(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, q, q)

    _check_autocast(function, lambda q: attention(q, q, q))


@BOTH
def test_autocast_around_the_graph(attention: Callable[..., Tensor]) -> None:
    _check_autocast(lambda q: attention(q, q, q), lambda q: attention(q, q, q), around=True)


@BOTH
def test_autocast_with_mixed_dtypes_and_a_mask(attention: Callable[..., Tensor]) -> None:
    """k comes in bfloat16 already, q and v are cast by autocast, and the mask is float32."""
    mask = torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9)

    def function(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if attention is _fused:
                return sdpa(q, q.bfloat16(), q, attn_mask=mask, scale=0.25)
            return F.softmax(q @ q.bfloat16().mT * 0.25 + mask, -1) @ q

    # CPU flash refuses numbers that may leave a query no key, where a call of SDPA did not choose a kernel itself.
    lowering = "sdpa_cpu_flash" if attention is _fused else "math"
    _check_autocast(function, lambda q: sdpa(q, q, q, attn_mask=mask, scale=0.25), lowering=lowering)


def test_autocast_switched_off_inside() -> None:
    def function(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            low = _fused(q, q, q)
            with torch.autocast("cpu", enabled=False):
                high = _fused(q, q, q)
            return low.float() + high

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()), atol=2e-2, rtol=2e-2)
    assert [site.spec.dtype for site in run.report.sites] == ["bfloat16", "float32"]


def test_autocast_in_one_module_only() -> None:
    """The projections run in bfloat16, the attention after them outside of autocast."""
    layer = torch.nn.Linear(H * D, 3 * H * D)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            qkv = layer(x)
        q, k, v = qkv.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return sdpa(q, k, v)

    x = torch.randn(B, S, H * D)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x), atol=2e-2, rtol=2e-2)
    assert run.site.spec.dtype == "bfloat16"


# ---- sdpa_kernel --------------------------------------------------------------------------------------------------


_ALL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize(
    ("backends", "scope", "is_flash"),
    [
        (SDPBackend.MATH, ("MATH",), False),
        (SDPBackend.FLASH_ATTENTION, ("FLASH_ATTENTION",), True),
        ([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ("EFFICIENT_ATTENTION", "MATH"), True),
        ([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION], ("CUDNN_ATTENTION", "MATH"), False),
        (_ALL, None, True),
    ],
)
def test_an_sdpa_kernel_scope_leaves_kernels_out_and_ends(
    backends: SDPBackend | list[SDPBackend], scope: tuple[str, ...] | None, is_flash: bool
) -> None:
    def function(q: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            q = sdpa(q, q, q)
        return sdpa(q, q, q, is_causal=True)

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()))
    for report in run.reports:
        by_mask = {site.spec.mask.words: site for site in report.sites}
        assert (by_mask["none"].spec.scope, by_mask["causal"].spec.scope) == (scope, None)
        assert (by_mask["none"].decision.lowering == "sdpa_cpu_flash") == is_flash
        assert by_mask["causal"].decision.lowering == "sdpa_cpu_flash"
        assert report.misses == ()


def test_a_scope_in_a_scope_ends_with_the_outer_one() -> None:
    def function(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                q = sdpa(q, q, q)
            return sdpa(q, q, q, is_causal=True)

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()))
    for report in run.reports:
        scopes = {site.spec.mask.words: site.spec.scope for site in report.sites}
        assert scopes == {"none": ("FLASH_ATTENTION",), "causal": ("MATH",)}


def test_kernels_that_are_switched_one_by_one_are_the_users_choice() -> None:
    def function(q: Tensor) -> Tensor:
        torch.backends.cuda.enable_math_sdp(True)
        return sdpa(q, q, q)

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()))
    assert {site.decision.lowering for report in run.reports for site in report.sites} <= {
        "untouched",
        "sdpa_cpu_flash",
    }


def test_sdpa_kernel_around_the_graph_switches_kernels_off() -> None:
    run = compiled(lambda q: sdpa(q, q, q))
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(run(_q()), sdpa(_q(), _q(), _q()))
    assert run.site.decision.lowering == "untouched"
    (refusal,) = run.site.decision.refusals
    assert "flash attention is enabled" in str(refusal.reasons[0])


# ---- the regions themselves ---------------------------------------------------------------------------------------


def test_regions_are_entered_and_left() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.sin()
        with torch.autocast("cpu", torch.bfloat16):
            b = a.cos()
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                c = b.tan()
            d = c.exp()
        return d.neg()

    gm, _ = captured(function, torch.ones(2))
    where = regions.by_node(gm.graph)
    depth = {str(n.target): len(where[n].autocast) for n in gm.graph.nodes if n.op in ("call_function", "call_method")}
    calls = {name: depth[name] for name in ("sin", "cos", "tan", "exp", "neg")}
    assert calls == {"sin": 0, "cos": 1, "tan": 2, "exp": 1, "neg": 0}
    (inner,) = (region for node, region in where.items() if node.target == "tan")
    assert [args[:2] for args in inner.autocast] == [("cpu", torch.bfloat16), ("cpu", torch.float16)]


def test_an_active_region_is_really_entered_and_left() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x.cos()

    gm, _ = captured(function, torch.ones(2))
    (region,) = (r for node, r in regions.by_node(gm.graph).items() if node.target == "cos")
    with region.active():
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_without_anything_switched_on_changes_nothing() -> None:
    with regions.Region().active():
        assert not torch.is_autocast_enabled("cpu")
