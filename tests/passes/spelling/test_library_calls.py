"""Calls of libraries' kernels are attentions where their arguments say so, and kernels of ours take their place with the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from attn_compiler.passes.graph import library_ops
from attn_compiler.passes.spelling import library_calls
from tests import library_kernels
from tests.passes.compiling import CPU_FLASH, Compiled, compiled
from tests.passes.library_inputs import HKV, OURS, TOKENS, B, D, H, S, packed, qkv


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with library_kernels.installed():
        yield


def _same(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Compiled:
    """The output is that of eager, in its strides. Returns what was compiled, with our kernels if no options are given."""
    run = compiled(function, **(options or OURS))
    got, wanted = run(*inputs), function(*inputs)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
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
        ({"window_size_left": 3}, S, "causal ∧ window (3 back) (proved)"),
        ({}, 10, "causal (bottom-right) (proved)"),
        ({"softcap": 20.0}, S, "causal (proved)"),
        ({"softcap": 20.0}, 10, "causal (bottom-right) (proved)"),
    ],
    ids=str,
)
def test_flash_attn_is_a_site(settings: dict[str, Any], queries: int, words: str) -> None:
    run = _same(lambda q, k, v: _flash(q, k, v, **settings) * 2, *qkv(queries))
    assert run.site.pattern == library_calls.NAME
    assert run.site.spec.mask.words == words
    assert (run.site.spec.num_heads_q, run.site.spec.num_heads_kv) == (H, HKV)
    assert run.site.spec.score.softcap == settings.get("softcap")
    assert "_flash_attn_forward" not in run.calls


def test_a_window_on_both_sides() -> None:
    run = _same(lambda q, k, v: _flash(q, k, v, causal=False, window_size_left=3, window_size_right=2), *qkv())
    assert "(proved)" in run.site.spec.mask.words


def test_queries_without_keys_get_zero() -> None:
    """There are more queries than keys, and they are counted from the end."""
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, 6, H, D), torch.randn(B, 6, H, D)
    run = _same(_flash, q, k, v)
    assert CPU_FLASH in run.calls
    assert not _flash(q, k, v)[:, : S - 6].any()


def test_packed_documents_are_proved() -> None:
    run = _same(lambda *x: _varlen(*x), *packed())
    assert run.site.spec.mask.words.startswith("causal ∧ document x_3.searchsorted[q] = x_3.searchsorted[k] (proved)")
    assert run.site.spec.q.shape == (1, H, TOKENS, D)


def test_packed_documents_with_a_window_and_a_softcap() -> None:
    run = _same(lambda *x: _varlen(*x, window_size_left=2, softcap=10.0), *packed())
    assert run.site.spec.mask.words.startswith("causal ∧ window (2 back) ∧ document")


def test_xformers_is_a_site() -> None:
    run = _same(_xformers, *qkv())
    assert (run.site.pattern, run.site.spec.mask.words) == (library_calls.NAME, "causal")


def test_torch_s_own_varlen_attn_is_a_site() -> None:
    """PyTorch has no kernel for it on a CPU, so it is held against flash_attn's by the definition. Its gradient is PyTorch's no more."""
    q, k, _, bounds = packed()
    k = k.repeat_interleave(H // HKV, 1)
    run = compiled(
        lambda q, k, b: varlen_attn(q, k, k, b, b, 9, 9, scale=0.3, window_size=(-1, 0)), inner="aot_eager", **OURS
    )
    q.requires_grad_()
    out = run(q, k, bounds)
    torch.testing.assert_close(out, _varlen(q.detach(), k, k, bounds))
    assert run.site.spec.mask.words.startswith("causal ∧ document b.searchsorted[q] = b.searchsorted[k] (proved)")
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

    inputs = qkv(heads_kv=H)
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

    inputs = [x.transpose(1, 2).contiguous() for x in qkv()]
    for function in (viewed, lying):
        assert CPU_FLASH in _same(function, *inputs).calls


@pytest.mark.in_turns
@pytest.mark.parametrize("bounds", [[4, 9, TOKENS], [0, 0, 5, 5, TOKENS], [3, 3, 9, 12]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_bounds_that_leave_tokens_out(bounds: list[int], causal: bool) -> None:
    """What the library gives for tokens of no document is anything. They are no keys of the others."""
    *inputs_of, _ = packed()
    inputs = (*inputs_of, torch.tensor(bounds, dtype=torch.int32))

    def function(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        out: Tensor = torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, bounds, bounds, 9, 9, 0.0, 0.3, causal)[
            0
        ]
        return out

    run = compiled(function, **OURS)
    within = slice(bounds[0], bounds[-1])
    torch.testing.assert_close(run(*inputs)[within], function(*inputs)[within])
    assert "document bounds.searchsorted[q] = bounds.searchsorted[k] (proved)" in run.site.spec.mask.words


def test_it_can_be_verified() -> None:
    assert _same(lambda *x: _varlen(*x), *packed(), verify=True, **OURS).site


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
    observed = _refused(lambda q, k, v: _flash(q, k, v, **changes), *qkv())
    assert observed == f"flash_attn::_flash_attn_forward, a kernel of flash_attn: {told}"


def test_what_else_the_kernel_gives() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False)[:2]

    assert "more than the attention" in _refused(function, *qkv())


def test_documents_that_may_differ() -> None:
    inputs = packed()
    assert "are two tensors, which may differ" in _refused(lambda *x: _varlen(*x), *inputs, inputs[-1].clone())


def test_a_softcap_where_queries_have_no_keys() -> None:
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, 6, H, D), torch.randn(B, 6, H, D)
    assert "queries may have no keys, beside a softcap" in _refused(lambda *x: _flash(*x, softcap=9.0), q, k, v)


def test_a_softcap_below_zero() -> None:
    assert "softcap is -5.0" in _refused(lambda *x: _flash(*x, softcap=-5.0), *qkv())


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("within", [True, False], ids=["in the graph", "around it"])
def test_autocast_to_another_dtype(within: bool, softcap: float) -> None:
    """The library's op is of its q's dtype all the same."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within or torch.is_autocast_enabled("cpu")):
            return _flash(q, k, v, softcap=softcap)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not within):
        assert "autocast to torch.bfloat16 is on, and q is of torch.float32" in _refused(function, *qkv())


def test_autocast_to_the_same_dtype() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _flash(q, k, v)

    run = compiled(function, **OURS)
    inputs = [x.bfloat16() for x in qkv()]
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
        assert told in _refused(lambda *x: _of_later(*x), *qkv())


def test_an_argument_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with _later(monkeypatch, ", Tensor? sink=None, int parts=1", torch.empty_like):
        assert "nothing is known of its argument sink" in _refused(
            lambda *x: _of_later(*x[:3], x[3]), *qkv(), torch.ones(H)
        )
        assert "nothing is known of its argument parts" in _refused(lambda *x: _of_later(*x, None, 2), *qkv())
        assert _same(lambda *x: _of_later(*x, None, 1), *qkv()).site


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
    assert "zero_tensors is True" in _refused(lambda *x: _varlen(*x, zero_tensors=True), *packed())


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
        run(*qkv(heads_kv=H), torch.ones(B, H))
    (miss,) = run.report.misses
    assert not run.report.sites
    assert "overload" in miss.reason.observed


def test_symbolic_numbers_of_heads() -> None:
    run = compiled(_flash, dynamic=True)
    inputs = qkv()
    torch.testing.assert_close(run(*inputs), _flash(*inputs))
    (miss,) = run.report.misses
    assert "how many heads there are is symbolic" in miss.reason.observed


def test_equal_refusals_are_one_row() -> None:
    run = compiled(lambda q, k, v: _flash(_flash(q, k, v, dropout_p=0.5), k, v, dropout_p=0.5))
    run(*qkv())
    (miss,) = run.report.misses
    assert len(miss.modules) == 2
