"""Calls of libraries' kernels are attentions where their arguments say so, and kernels of ours take their place with the same numbers."""

from __future__ import annotations

import contextlib
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
        given = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out, *torch.autograd.grad(out, leaves, given, allow_unused=True)))
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
    got, wanted = run(*inputs), function(*inputs)
    torch.testing.assert_close(got, wanted)
    (miss,) = run.report.misses
    assert not run.report.sites
    assert miss.anchor.startswith(("flash_attn", "xformers_flash::"))
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


def test_the_result_lies_as_the_library_s_does() -> None:
    """In q's order in memory, of which models take views."""

    def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _flash(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).view(B, H, S * D) * 2

    def lying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _flash(*(x.transpose(1, 2) for x in (q, k, v)))

    inputs = [x.transpose(1, 2).contiguous() for x in _qkv()]
    for function in (viewed, lying):
        assert CPU_FLASH in _same(function, *inputs).calls


@pytest.mark.parametrize("bounds", [[4, 9, TOKENS], [0, 0, 5, 5, TOKENS], [3, 3, 9, 12]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_bounds_that_leave_tokens_out(bounds: list[int], causal: bool) -> None:
    """What the library gives for tokens of no document is anything. They are no keys of the others."""
    *qkv, _ = _packed()
    inputs = (*qkv, torch.tensor(bounds, dtype=torch.int32))

    def function(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        out: Tensor = torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, bounds, bounds, 9, 9, 0.0, 0.3, causal)[
            0
        ]
        return out

    run = compiled(function, **OURS)
    within = slice(bounds[0], bounds[-1])
    torch.testing.assert_close(run(*inputs)[within], function(*inputs)[within])
    assert "document searchsorted[q] = searchsorted[k] (proved)" in run.site.spec.mask.words


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


def test_documents_are_trained_by_our_kernel() -> None:
    *qkv, bounds = _packed()
    run = _trained(lambda q, k, v: library_kernels.FlashAttnVarlenFunc.apply(q, k, v, bounds, 0.3), qkv)
    assert run.site.spec.mask.words.startswith("causal ∧ document")
    assert "autograd_function_apply" not in run.calls


_NOT_Q = "the gradient that its autograd.Function gives for q is not that of its kernel"
_NOT_K = "the gradient that its autograd.Function gives for k is not that of its kernel"
_NOT_OUT = "its backward is given something else than the gradient of the attention"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (library_kernels.TwiceTheGradient, "its autograd.Function also calls mul"),
        (library_kernels.AnotherScaleBackward, "softmax_scale is 0.28"),
        (library_kernels.NoGradientOfQ, _NOT_Q),
        (library_kernels.SwappedGradients, _NOT_K),
        (library_kernels.HalfOfTheGradient, _NOT_Q),
        (library_kernels.HalfOfTheGradientOfOut, _NOT_OUT),
        (library_kernels.ShiftedPadding, _NOT_OUT),
        (library_kernels.FirstKeys, "its operands are not three inputs of its autograd.Function, padded"),
        (library_kernels.SavesAnother, "v of its backward is not what its forward had"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_another_gradient_is_not_ours_to_change(function: Any, told: str) -> None:
    run = _trained(lambda q, k, v: flash_attn_func(q, k, v, function=function), _qkv(head_dim=12))
    (miss,) = run.report.misses
    assert told in miss.reason.observed
    assert "autograd_function_apply" in run.calls


def test_another_result_is_not_the_attention() -> None:
    inputs = [x.requires_grad_() for x in _qkv()]
    run = compiled(lambda *x: flash_attn_func(*x, function=library_kernels.GivesTheSums), inner="aot_eager", **OURS)
    assert run(*inputs).shape == (1,)
    (miss,) = run.report.misses
    assert "gives something else than the attention" in miss.reason.observed


def test_the_documents_of_the_backward_may_be_others() -> None:
    *qkv, bounds = _packed()
    others = torch.tensor([0, 9, TOKENS], dtype=torch.int32)
    run = _trained(lambda q, k, v: library_kernels.OtherDocuments.apply(q, k, v, bounds, 0.3, others), qkv)
    (miss,) = run.report.misses
    assert "cu_seqlens_q of its backward is not what its forward had" in miss.reason.observed


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


def test_a_softcap_below_zero() -> None:
    assert "softcap is -5.0" in _refused(lambda *x: _flash(*x, softcap=-5.0), *_qkv())


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("within", [True, False], ids=["in the graph", "around it"])
def test_autocast_to_another_dtype(within: bool, softcap: float) -> None:
    """The library's op is of its q's dtype all the same."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within or torch.is_autocast_enabled("cpu")):
            return _flash(q, k, v, softcap=softcap)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not within):
        assert "autocast to torch.bfloat16 is on, and q is of torch.float32" in _refused(function, *_qkv())


def test_autocast_to_the_same_dtype() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _flash(q, k, v)

    run = compiled(function, **OURS)
    inputs = [x.bfloat16() for x in _qkv()]
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=0.01, rtol=0.02)
    assert run.site


@pytest.mark.parametrize(
    ("of_q", "told"),
    [
        (lambda q: q.new_empty(q.shape, dtype=torch.float64), "it gives torch.float64 for q of torch.float32"),
        (lambda q: q.new_empty((*q.shape[:-1], 2 * D))[..., :D], "it gives strides of"),
    ],
    ids=["dtype", "strides"],
)
def test_a_result_that_is_not_q_s(monkeypatch: pytest.MonkeyPatch, of_q: Callable[[Tensor], Tensor], told: str) -> None:
    with _later(monkeypatch, "", of_q):
        assert told in _refused(lambda *x: _of_later(*x), *_qkv())


def test_an_argument_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with _later(monkeypatch, ", Tensor? sink=None, int parts=1", torch.empty_like):
        assert "nothing is known of its argument sink" in _refused(
            lambda *x: _of_later(*x[:3], x[3]), *_qkv(), torch.ones(H)
        )
        assert "nothing is known of its argument parts" in _refused(lambda *x: _of_later(*x, None, 2), *_qkv())
        assert _same(lambda *x: _of_later(*x, None, 1), *_qkv()).site


@contextlib.contextmanager
def _later(monkeypatch: pytest.MonkeyPatch, more: str, of_q: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A later version of flash_attn's op, with more arguments, or with results as `of_q` makes them."""
    schema = library_kernels.FORWARD.removesuffix(") -> (Tensor, Tensor, Tensor, Tensor)")
    name = "_flash_attn_forward"
    library = torch.library.Library("flash_attn_later", "FRAGMENT")
    library.define(f"{schema}{more}) -> (Tensor, Tensor, Tensor, Tensor)")

    def result(
        q: Tensor, k: Tensor, v: Tensor, _: float, scale: float, causal: bool, *others: Any
    ) -> tuple[Tensor, ...]:
        out = library_kernels.attention(q, k, v, scale, causal, *others[:3])
        return of_q(q).copy_(out), *(q.new_zeros(i) for i in range(3))

    def fake(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return of_q(q), *(q.new_zeros(i) for i in range(3))

    library.impl(name, result, "CPU")
    torch.library.register_fake(f"flash_attn_later::{name}", fake, lib=library)
    monkeypatch.setitem(library_ops.OPS, f"flash_attn_later::{name}", library_ops.OPS[f"flash_attn::{name}"])
    try:
        yield
    finally:
        library._destroy()


def _of_later(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
    settings = (0.0, 0.3, True, -1, -1, 0.0, None, False, *more)
    out: Tensor = torch.ops.flash_attn_later._flash_attn_forward(q, k, v, *settings)[0]
    return out


def test_zeros_for_tokens_of_no_document() -> None:
    assert "zero_tensors is True" in _refused(lambda *x: _varlen(*x, zero_tensors=True), *_packed())


@pytest.mark.parametrize("by_name", [True, False])
def test_another_overload_is_another_attention(by_name: bool) -> None:
    """PyTorch's of quantised q, k and v scales them, too. It is not for CPUs."""
    op = torch.ops.aten._flash_attention_forward
    called = op.quantized if by_name else op

    def function(q: Tensor, k: Tensor, v: Tensor, scales: Tensor) -> Tensor:
        out: Tensor = called(q, k, v, None, None, S, S, 0.0, True, False, scales, scales, scales, scale=0.3)[0]
        return out

    run = compiled(function)
    with pytest.raises(NotImplementedError):
        run(*_qkv(heads_kv=H), torch.ones(B, H))
    (miss,) = run.report.misses
    assert not run.report.sites
    assert "overload" in miss.reason.observed


def test_symbolic_numbers_of_heads() -> None:
    run = compiled(_flash, dynamic=True)
    inputs = _qkv()
    torch.testing.assert_close(run(*inputs), _flash(*inputs))
    (miss,) = run.report.misses
    assert "how many heads there are is symbolic" in miss.reason.observed


def test_equal_refusals_are_one_row() -> None:
    run = compiled(lambda q, k, v: _flash(_flash(q, k, v, dropout_p=0.5), k, v, dropout_p=0.5))
    run(*_qkv())
    (miss,) = run.report.misses
    assert len(miss.modules) == 2


def test_every_op_is_one_of_a_known_library() -> None:
    for name in library_ops.OPS:
        assert "an op of its own" not in opaque_calls.reason(name).observed
