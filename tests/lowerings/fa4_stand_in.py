"""A stand-in for flash_attn: its functions as fa4_launch.py calls them, by definition and on any device, with a record of the calls.

As the real ones do, they compile a kernel for each new key, under a FakeTensorMode nothing else, and call it else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._guards import active_fake_mode

from attn_compiler.lowerings import fa4_launch


@dataclass(frozen=True, kw_only=True)
class Softcapped:
    cap: float

    def __call__(self, scores: Tensor) -> Tensor:
        return self.cap * (scores / self.cap).tanh()


Mod = Softcapped


class Cache:
    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cache[key] = value


class StandIn:
    """flash_attn.cute.interface. functions: keyword arguments of each call of its functions. kernels: keys that were compiled, in
    order. launches: arguments of each call of a compiled forward. fails: what compiling a forward raises."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.backwards: list[dict[str, Any]] = []
        self.kernels: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        self.fails_backward: Exception | None = None
        self.utils = SimpleNamespace(create_softcap_scoremod=_softcap, create_softcap_scoremod_bwd=_softcap)
        self.AuxData = lambda: "no aux data"

        def forward(q: Tensor, k: Tensor, v: Tensor, **further: Any) -> None:
            self._forward(q, k, v, **further)

        self._flash_attn_fwd: Any = forward
        self._flash_attn_fwd.compile_cache = Cache()

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, **further: Any) -> None:
        self.forwards.append(further)
        cache, sinks = self._flash_attn_fwd.compile_cache, further["learnable_sink"]
        mod = further.get("score_mod")
        key = (q.dtype, q.shape[3], v.shape[3], q.shape[2] // k.shape[2], further["causal"], mod)
        key += (*(further[f"window_size_{side}"] is not None for side in ("left", "right")), sinks is not None)
        if key not in cache:
            if self.fails is not None:
                raise self.fails
            self.kernels.append(key)
            cache[key] = self._kernel(causal=further["causal"], mod=mod)
        if active_fake_mode() is None:
            left, right = further["window_size_left"], further["window_size_right"]
            out, lse, scale = further["out"], further["lse"], further["softmax_scale"]
            given = (q.detach(), k.detach(), v.detach(), out, lse, scale, *(None,) * 5, left, right, sinks)
            cache[key](*given, None, "no aux data", None, None)

    def _kernel(self, *, causal: bool, mod: Mod | None) -> Callable[..., None]:
        def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *rest: Any) -> None:
            self.launches.append((q, k, v, out, lse, scale, *rest))
            assert rest[:5] == (None,) * 5
            left, right, sinks, blocks, aux, *totals = rest[5:]
            assert (blocks, aux, totals) == (None, "no aux data", [None, None])
            assert not any(x.requires_grad for x in (q, k, v, sinks) if x is not None)
            window = (None, 0) if causal else (left, right)
            found = attend(q, k, v, scale, window, mod, sinks)
            out.copy_(found[0])
            lse.copy_(found[1])

        return kernel

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **further: Any
    ) -> tuple[Tensor, ...]:
        self.backwards.append({"dout": dout} | further)
        if self.fails_backward is not None:
            raise self.fails_backward
        sinks = further["learnable_sink"]
        results = (further["dq"], further["dk"], further["dv"], *([] if sinks is None else [torch.empty_like(sinks)]))
        if active_fake_mode() is not None:
            return results
        window = (None, 0) if further["causal"] else (further["window_size_left"], further["window_size_right"])
        mod = further.get("score_mod")
        assert (mod is None) == (further.get("score_mod_bwd") is None)
        grads = gradients(q, k, v, dout, lse, further["dlse"], further["softmax_scale"], window, mod, sinks)
        for result, grad in zip(results, grads, strict=True):
            result.copy_(grad)
        return results


Window = tuple[int | None, int | None]


def _scores(q: Tensor, k: Tensor, scale: float, window: Window, mod: Mod | None) -> tuple[Tensor, Tensor]:
    """After the softcap, and which pairs are allowed; windows are counted from the end."""
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    scores = q.float().transpose(1, 2) @ keys.mT * scale
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1]) - rows
    left, right = window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    return scores if mod is None else mod(scores), allowed


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, mod: Mod | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (B, S, H, D) and lse (B, H, S) in float32."""
    scores, allowed = _scores(q, k, scale, window, mod)
    scores = scores.masked_fill(~allowed, -torch.inf)
    joined = scores
    if sinks is not None:
        joined = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = joined.logsumexp(-1)
    values = v.float().repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    weights = (scores - lse[..., None]).exp().where(allowed, 0.0)
    return (weights @ values).transpose(1, 2), lse


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    grad_lse: Tensor,
    scale: float,
    window: Window,
    mod: Mod | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Of q, k, v (B, S, H, D), and of the sinks if there are some. The lse knows of sinks in any case."""
    scores, allowed = _scores(q, k, scale, window, mod)
    keys, values = (x.float().repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
    weights = (scores - lse[..., None]).exp().where(allowed, 0.0)
    upstream = grad_out.float().transpose(1, 2)
    grad_weights = upstream @ values.mT
    row = grad_lse[..., None] - (weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights + row) * scale
    if mod is not None:
        grad_scores = grad_scores * (1 - (scores / mod.cap).square())
    grad_q = grad_scores @ keys
    grad_k, grad_v = grad_scores.mT @ q.float().transpose(1, 2), weights.mT @ upstream
    grads = [
        grad_q.transpose(1, 2),
        *(x.transpose(1, 2).unflatten(2, (k.shape[2], -1)).sum(3) for x in (grad_k, grad_v)),
    ]
    if sinks is None:
        return grads
    share = (sinks.float().view(1, -1, 1) - lse).exp()
    return [*grads, (share * row[..., 0]).sum((0, 2))]


def _softcap(cap: float) -> Mod:
    return Softcapped(cap=cap)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """In flash_attn's place; what was looked up before and after is forgotten."""
    stand_in = StandIn()
    monkeypatch.setattr(fa4_launch, "_flash", lambda: stand_in)
    forget()
    yield stand_in
    forget()


def forget() -> None:
    for name in ("_compiled", "_prepared", "_kernel", "_no_aux_data", "_softcap_mod", "_softcap_mod_backward"):
        getattr(fa4_launch, name).cache_clear()
