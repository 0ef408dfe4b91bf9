"""Stand-ins for the attention kernels of libraries that are not installed: ops of the same names and arguments, for CPUs.

Each computes its attention by the definition, with the gradient by the formula, and gives it in q's order in memory. Around
flash_attn's stand autograd.Functions that do what the library's do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FORWARD = (
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, int window_size_left, "
    "int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_VARLEN = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
    "int max_seqlen_k, float dropout_p, float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
    "Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv, float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)
_VARLEN_BACKWARD = (
    "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, "
    "Tensor(b!)? dk, Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float dropout_p, "
    "float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, "
    "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)
_XFORMERS = (
    "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "int max_seqlen_q, int max_seqlen_k, float p, float softmax_scale, bool is_causal, int window_left, int window_right, "
    "bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)"
)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within the block the ops are there."""
    flash, xformers = (torch.library.Library(name, "FRAGMENT") for name in ("flash_attn", "xformers_flash"))
    for library, schema, function, fake in (
        (flash, FORWARD, _forward, _four),
        (flash, _VARLEN, _varlen, _four),
        (flash, _BACKWARD, _backward, _sums),
        (flash, _VARLEN_BACKWARD, _varlen_backward, _sums),
        (xformers, _XFORMERS, _xformers, _three),
    ):
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    try:
        yield
    finally:
        for library in (flash, xformers):
            library._destroy()


# ---- by the definition ----------------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float
) -> Tensor:
    """Of (B, S, H, D)."""
    _, weights, values, _ = _steps(q, k, v, scale, causal, left, right, softcap)
    return torch.empty_like(q).copy_((weights @ values).transpose(1, 2))


def _steps(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The keys, the weights and the values, (B, H, S, ...), and what the scores changed by for each change of the products."""
    queries, keys, values = (x.transpose(1, 2).double() for x in (q, k, v))
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    scores = queries @ keys.transpose(-1, -2) * scale
    slope = torch.ones_like(scores)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    query = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])
    right = 0 if causal else right
    shut = (key > query + right) & (right >= 0) | (key < query - left) & (left >= 0)
    weights = torch.nan_to_num(scores.masked_fill(shut, -math.inf).softmax(-1))
    return keys, weights, values, slope


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float, causal: bool, *more: Any
) -> tuple[Tensor, ...]:
    left, right, softcap = more[:3]
    return attention(q, k, v, scale, causal, left, right, softcap), *_others(q)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    *_: Any,
) -> tuple[Tensor, ...]:
    out = torch.empty_like(q)
    of_q, of_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(of_q[:-1], of_q[1:], of_k[:-1], of_k[1:], strict=True):
        one = (q[None, a:b], k[None, c:d], v[None, c:d])
        out[a:b] = attention(*one, softmax_scale, causal, window_size_left, window_size_right, softcap)[0]
    return out, *_others(q)


def _xformers(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, ...]:
    scale, causal, left, right = more[6:10]
    return attention(query, key, value, scale, causal, left, right, 0.0), *_others(query)[:2]


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    *_: Any,
) -> Tensor:
    keys, weights, values, slope = _steps(q, k, v, scale, causal, left, right, softcap)
    gradient, queries = dout.transpose(1, 2).double(), q.transpose(1, 2).double()
    of_weights = gradient @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * slope * scale
    found = (of_scores @ keys, of_scores.transpose(-1, -2) @ queries, weights.transpose(-1, -2) @ gradient)
    for into, x in zip((dq, dk, dv), found, strict=True):
        groups = x.unflatten(1, (into.shape[2], -1)).sum(2)
        into.copy_(groups.transpose(1, 2))
    return torch.zeros_like(lse)


def _varlen_backward(dout: Tensor, *given: Any) -> Tensor:
    q, k, v, out, lse, dq, dk, dv, of_q, of_k, _, _, *settings = given
    for into in (dq, dk, dv):
        into.zero_()
    bounds = of_q.tolist(), of_k.tolist()
    for a, b, c, d in zip(bounds[0][:-1], bounds[0][1:], bounds[1][:-1], bounds[1][1:], strict=True):
        parts = (dout[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse, dq[a:b], dk[c:d], dv[c:d])
        _backward(*(x if x is lse else x[None] for x in parts), *settings)
    return torch.zeros_like(lse)


def _others(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(1), q.new_zeros(0), q.new_zeros(2)


def _four(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), *_others(q)


def _three(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _four(query)[:3]


def _sums(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(lse)


# ---- flash_attn's functions --------------------------------------------------------------------------------------------


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, [0, missing]) if missing else x


class FlashAttnFunc(torch.autograd.Function):
    """Head dims that are no multiple of 8 are padded."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Any, softcap: float
    ) -> Tensor:
        head_dim = q.shape[-1]
        q, k, v = (_padded(x) for x in (q, k, v))
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(
            q,
            k,
            v,
            0.0,
            scale,
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=softcap,
            alibi_slopes=None,
            return_softmax=False,
        )
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.scale, ctx.causal, ctx.window, ctx.softcap = scale, causal, window, softcap
        return out[..., :head_dim]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gradients(ctx, dout)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, state = ctx.saved_tensors
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    settings = (0.0, ctx.scale, ctx.causal, *ctx.window, ctx.softcap, None, False)
    torch.ops.flash_attn._flash_attn_backward(_padded(dout), q, k, v, out, lse, dq, dk, dv, *settings, rng_state=state)
    return *(x[..., : dout.shape[-1]] for x in (dq, dk, dv)), None, None, None, None


class FlashAttnVarlenFunc(torch.autograd.Function):
    """Of packed documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
        out, lse, _, state = torch.ops.flash_attn._flash_attn_varlen_forward(
            q, k, v, bounds, bounds, 9, 9, 0.0, scale, True
        )
        ctx.save_for_backward(q, k, v, out, lse, bounds, state)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return *_varlen_gradients(ctx, dout), None, None


def _varlen_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse, bounds, state = ctx.saved_tensors
    given = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    settings = (bounds, bounds, 9, 9, 0.0, ctx.scale, True, -1, -1, 0.0, None, False)
    torch.ops.flash_attn._flash_attn_varlen_backward(dout, q, k, v, out, lse, *given, *settings, rng_state=state)
    return given


class OtherDocuments(torch.autograd.Function):
    """Somebody's own function, whose backward has the documents of another tensor."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, others: Tensor) -> Tensor:
        given = (q, k, v, bounds, bounds, 9, 9, 0.0, scale, True)
        out, lse, _, state = torch.ops.flash_attn._flash_attn_varlen_forward(*given)
        ctx.save_for_backward(q, k, v, out, lse, others, state)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return *_varlen_gradients(ctx, dout), None, None, None


class TwiceTheGradient(FlashAttnFunc):
    """Somebody's own function around the same kernel."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gradients(ctx, dout * 2)


class AnotherScaleBackward(FlashAttnFunc):
    """Somebody's own function, whose backward is that of another attention."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.scale = 1.0
        return _gradients(ctx, dout)


class NoGradientOfQ(FlashAttnFunc):
    """Somebody's own function, which trains k and v alone."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, *_gradients(ctx, dout)[1:]


class SwappedGradients(FlashAttnFunc):
    """Somebody's own function, which gives k the gradient of v."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dq, dk, dv, *others = _gradients(ctx, dout)
        return dq, dv, dk, *others


class HalfOfTheGradient(FlashAttnFunc):
    """Somebody's own function, which leaves out a part of q's gradient."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dq, *others = _gradients(ctx, dout)
        return torch.nn.functional.pad(dq[..., :4], [0, dq.shape[-1] - 4]), *others


class HalfOfTheGradientOfOut(FlashAttnFunc):
    """Somebody's own function, which leaves out a part of the result's gradient."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gradients(ctx, torch.nn.functional.pad(dout[..., :4], [0, dout.shape[-1] - 4]))


class ShiftedPadding(FlashAttnFunc):
    """Somebody's own function, whose backward pads at the other end."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        head_dim = dout.shape[-1]
        dq, dk, dv, *others = _gradients(ctx, torch.nn.functional.pad(dout, [-head_dim % 8, 0]))
        return *(x[..., :head_dim] for x in (dq, dk, dv)), *others


class FirstKeys(FlashAttnFunc):
    """Somebody's own function, which looks at the first keys only."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Any, softcap: float
    ) -> Tensor:
        out: Tensor = FlashAttnFunc.forward(ctx, q, k[:, :8], v[:, :8], scale, causal, window, softcap)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dq, dk, dv, *others = _gradients(ctx, dout)
        return dq, *(torch.nn.functional.pad(x, [0, 0, 0, 0, 0, 8]) for x in (dk, dv)), *others


class SavesAnother(FlashAttnFunc):
    """Somebody's own function, whose backward has k for v."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, _, out, lse, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
        settings = (0.0, ctx.scale, ctx.causal, *ctx.window, ctx.softcap, None, False)
        torch.ops.flash_attn._flash_attn_backward(
            _padded(dout), q, k, k, out, lse, dq, dk, dv, *settings, rng_state=state
        )
        return *(x[..., : dout.shape[-1]] for x in (dq, dk, dv)), None, None, None, None


class GivesTheSums(torch.autograd.Function):
    """Somebody's own function, which gives another result of the kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        settings = (0.0, 0.3, True, -1, -1, 0.0, None, False)
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.scale, ctx.causal, ctx.window, ctx.softcap = 0.3, True, (-1, -1), 0.0
        sums: Tensor = lse.contiguous()
        return sums

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gradients(ctx, ctx.saved_tensors[3])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    function: Any = FlashAttnFunc,
) -> Tensor:
    """As flash_attn's."""
    out: Tensor = function.apply(q, k, v, q.shape[-1] ** -0.5, causal, window_size, softcap)
    return out
