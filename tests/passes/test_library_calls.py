"""Calls of libraries' kernels are attentions where their arguments say so, and kernels of ours take their place with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from attn_compiler.passes import library_calls, library_ops, opaque_calls
from tests import library_kernels
from tests.library_kernels import flash_attn_func
from tests.passes.compiling import CPU_FLASH, Compiled, compiled

Tensor = torch.Tensor
B, H, HKV, S, D = 2, 4, 2, 16, 8
TOKENS = 20
OURS = {"lowerings": ["sdpa_cpu_flash", "math"]}


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with library_kernels.installed():
        yield


def _qkv(queries: int = S, head_dim: int = D, heads_kv: int = HKV) -> list[Tensor]:
    sizes = ((queries, H), (S, heads_kv), (S, heads_kv))
    return [torch.randn(B, length, heads, head_dim) for length, heads in sizes]


def _packed() -> list[Tensor]:
    bounds = torch.tensor([0, 5, 11, TOKENS], dtype=torch.int32)
    return [torch.randn(TOKENS, H, D), torch.randn(TOKENS, HKV, D), torch.randn(TOKENS, HKV, D), bounds]


def _same(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Compiled:
    """The output is that of eager, in its strides. Returns what was compiled, with our kernels if no options are given."""
    run = compiled(function, **(options or OURS))
    got, wanted = run(*inputs), function(*inputs)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
    return run


def _trained(function: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> Compiled:
    """Output and gradients are those of eager."""
    run = compiled(function, inner="aot_eager", **(options or OURS))
    results = []
    for called in (run, function):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = called(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape))))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
    return run


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **changes: Any) -> Tensor:
    settings: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": 0.3,
        "causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_softmax": False,
    }
    out: Tensor = torch.ops.flash_attn._flash_attn_forward(q, k, v, **{**settings, **changes})[0]
    return out


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, of_keys: Tensor | None = None, **more: Any) -> Tensor:
    of_keys = bounds if of_keys is None else of_keys
    out: Tensor = torch.ops.flash_attn._flash_attn_varlen_forward(
        q, k, v, bounds, of_keys, 9, 9, 0.0, 0.3, True, **more
    )[0]
    return out


def _xformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    settings = (None, None, None, S, S, 0.0, 0.3, True, -1, -1, False, None)
    out: Tensor = torch.ops.xformers_flash.flash_fwd(q, k, v, *settings)[0]
    return out


def _refused(function: Callable[..., Any], *inputs: Tensor) -> str:
    run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs))
    (miss,) = run.report.misses
    assert not run.report.sites
    assert miss.anchor.startswith(("flash_attn::", "xformers_flash::"))
    assert "scaled_dot_product_attention" in str(miss.reason.remedy)
    return miss.reason.observed


# ---- what is taken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "queries", "words"),
    [
        ({}, S, "causal"),
        ({"causal": False}, S, "none"),
        ({"causal": False}, 10, "none"),
        ({"window_size_left": 3}, S, "causal ∧ window (3 back) (proved), as dense bool[1, 1, 16, 16]"),
        ({}, 10, "causal (bottom-right) (proved), as dense bool[1, 1, 10, 16]"),
        ({"softcap": 20.0}, S, "causal (proved)"),
        ({"softcap": 20.0}, 10, "causal (bottom-right) (proved), as dense bool[1, 1, 10, 16]"),
    ],
    ids=str,
)
def test_flash_attn_is_a_site(settings: dict[str, Any], queries: int, words: str) -> None:
    run = _same(lambda q, k, v: _flash(q, k, v, **settings) * 2, *_qkv(queries))
    assert run.site.pattern == library_calls.NAME
    assert run.site.spec.mask.words == words
    assert (run.site.spec.num_heads_q, run.site.spec.num_heads_kv) == (H, HKV)
    assert run.site.spec.score.softcap == settings.get("softcap")
    assert "_flash_attn_forward" not in run.calls


def test_a_window_on_both_sides() -> None:
    run = _same(lambda q, k, v: _flash(q, k, v, causal=False, window_size_left=3, window_size_right=2), *_qkv())
    assert "(proved)" in run.site.spec.mask.words


def test_queries_without_keys_get_zero() -> None:
    """There are more queries than keys, and they are counted from the end."""
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, 6, H, D), torch.randn(B, 6, H, D)
    run = _same(_flash, q, k, v)
    assert CPU_FLASH in run.calls
    assert not _flash(q, k, v)[:, : S - 6].any()


def test_packed_documents_are_proved() -> None:
    run = _same(lambda *x: _varlen(*x), *_packed())
    assert run.site.spec.mask.words.startswith("causal ∧ document searchsorted[q] = searchsorted[k] (proved)")
    assert run.site.spec.q.shape == (1, H, TOKENS, D)


def test_packed_documents_with_a_window_and_a_softcap() -> None:
    run = _same(lambda *x: _varlen(*x, window_size_left=2, softcap=10.0), *_packed())
    assert run.site.spec.mask.words.startswith("causal ∧ window (2 back) ∧ document")


def test_xformers_is_a_site() -> None:
    run = _same(_xformers, *_qkv())
    assert (run.site.pattern, run.site.spec.mask.words) == (library_calls.NAME, "causal")


def test_torch_s_own_varlen_attn_is_a_site() -> None:
    """PyTorch has no kernel for it on a CPU, so it is held against flash_attn's by the definition. Its gradient is PyTorch's no more."""
    q, k, _, bounds = _packed()
    k = k.repeat_interleave(H // HKV, 1)
    run = compiled(
        lambda q, k, b: varlen_attn(q, k, k, b, b, 9, 9, scale=0.3, window_size=(-1, 0)), inner="aot_eager", **OURS
    )
    q.requires_grad_()
    out = run(q, k, bounds)
    torch.testing.assert_close(out, _varlen(q.detach(), k, k, bounds))
    assert run.site.spec.mask.words.startswith("causal ∧ document searchsorted[q] = searchsorted[k] (proved)")
    out.sum().backward()
    assert q.grad is not None


def test_pytorch_s_kernels_of_this_layout_are_sites() -> None:
    """They are not for CPUs, either."""

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, None, None, S, S, 0.0, True, False, scale=0.3)[0]
        return out

    def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._efficient_attention_forward(q, k, v, None, None, None, S, S, 0.0, 2, scale=0.3)[0]
        return out

    inputs = _qkv(heads_kv=H)
    for function in (flash, efficient):
        run = compiled(function, **OURS)
        torch.testing.assert_close(run(*inputs), _flash(*inputs))
        assert (run.site.pattern, run.site.spec.mask.words) == (library_calls.NAME, "causal")


def test_it_can_be_verified() -> None:
    assert _same(lambda *x: _varlen(*x), *_packed(), verify=True, **OURS).site


# ---- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_flash_attn_func_is_trained_by_our_kernel(softcap: float) -> None:
    """The head dim is padded inside of the library's autograd.Function, so it is there that the kernel is found."""
    run = _trained(lambda q, k, v: flash_attn_func(q, k, v, causal=True, softcap=softcap), _qkv(head_dim=12))
    assert run.site.pattern == library_calls.NAME
    assert run.site.spec.mask.words.startswith("causal")
    assert run.site.spec.needs_grad
    assert "autograd_function_apply" not in run.calls


def test_equal_layers_are_one_site() -> None:
    run = _trained(lambda q, k, v: flash_attn_func(q, k, v).sin() + flash_attn_func(q, k, v).cos(), _qkv())
    assert len(run.site.modules) == 2


def test_a_function_that_is_no_better_served_stays_the_library_s() -> None:
    """No kernel for CPUs leaves out blocks, and a dense mask is none that the library needs."""
    run = _trained(lambda q, k, v: flash_attn_func(q, k, v, window_size=(3, 0)), _qkv(), lowerings=None)
    assert run.site.decision.lowering == "untouched"
    assert "autograd_function_apply" in run.calls


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (library_kernels.TwiceTheGradient, "its autograd.Function also calls mul"),
        (library_kernels.AnotherScaleBackward, "softmax_scale is 0.35"),
    ],
)
def test_another_gradient_is_not_ours_to_change(function: Any, told: str) -> None:
    run = _trained(lambda q, k, v: flash_attn_func(q, k, v, function=function), _qkv())
    (miss,) = run.report.misses
    assert told in miss.reason.observed
    assert "autograd_function_apply" in run.calls


# ---- what is not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1"),
        ({"return_softmax": True}, "return_softmax is True"),
        ({"alibi_slopes": True}, "alibi_slopes is a tensor"),
    ],
    ids=str,
)
def test_arguments_that_ask_for_more(settings: dict[str, Any], told: str) -> None:
    slopes = torch.ones(H)
    changes = {name: slopes if name == "alibi_slopes" else x for name, x in settings.items()}
    observed = _refused(lambda q, k, v: _flash(q, k, v, **changes), *_qkv())
    assert observed == f"flash_attn::_flash_attn_forward, a kernel of flash_attn: {told}"


def test_what_else_the_kernel_gives() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False)[:2]

    assert "more than the attention" in _refused(function, *_qkv())


def test_documents_that_may_differ() -> None:
    *qkv, bounds = _packed()
    assert "are two tensors, which may differ" in _refused(lambda *x: _varlen(*x), *qkv, bounds, bounds.clone())


def test_a_softcap_where_queries_have_no_keys() -> None:
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, 6, H, D), torch.randn(B, 6, H, D)
    assert "queries may have no keys, beside a softcap" in _refused(lambda *x: _flash(*x, softcap=9.0), q, k, v)


def test_equal_refusals_are_one_row() -> None:
    run = compiled(lambda q, k, v: _flash(_flash(q, k, v, dropout_p=0.5), k, v, dropout_p=0.5))
    run(*_qkv())
    (miss,) = run.report.misses
    assert len(miss.modules) == 2


def test_every_op_is_one_of_a_known_library() -> None:
    for name in library_ops.OPS:
        assert "an op of its own" not in opaque_calls.reason(name).observed
