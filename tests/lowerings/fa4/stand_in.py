"""A stand-in for flash_attn: its functions as launch.py calls them, by definition and on any device, with a record of the calls.

As the real ones do, they compile a kernel for each new key, call it unless a FakeTensorMode is on, and allocate what a backward needs in
between: sums for each row, and accumulators in float32, of which those of k and v have to be zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from attn_compiler.lowerings.fa4 import launch
from attn_compiler.lowerings.shared.launching import replaying

Window = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Softcap:
    cap: float

    def __call__(self, scores: Tensor) -> Tensor:
        return self.cap * (scores / self.cap).tanh()


class SinkTensors(NamedTuple):
    dpsum: Tensor
    lse: Tensor
    sink: Tensor
    dsink: Tensor


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
    """flash_attn.cute.interface. forwards, backwards: keyword arguments of each call of the functions. kernels: names and keys of
    those that were compiled, launches: names of those that ran, both in order. fails, fails_backward: what compiling raises."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.backwards: list[dict[str, Any]] = []
        self.kernels: list[Any] = []
        self.launches: list[str] = []
        self.fails: Exception | None = None
        self.fails_backward: Exception | None = None
        self.utils = SimpleNamespace(create_softcap_scoremod=_softcap, create_softcap_scoremod_bwd=_softcap)
        for name in ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"):
            function = functools.partial(getattr(type(self), f"_do{name}"), self)
            function.compile_cache = Cache()  # type: ignore[attr-defined]
            setattr(self, name, function)

    def _call(self, name: str, key: Any, kernel: Callable[..., None], *arguments: Any) -> None:
        cache = getattr(self, name).compile_cache
        if key not in cache:
            failure = self.fails if name == "_flash_attn_fwd" else self.fails_backward
            if failure is not None:
                raise failure
            self.kernels.append((name, key))

            def compiled(*given: Any) -> None:
                self.launches.append(name)
                assert not any(x.requires_grad for x in given if isinstance(x, Tensor))
                with _disable_current_modes(), torch.no_grad():
                    kernel(*given)

            cache[key] = compiled
        if active_fake_mode() is None:
            cache[key](*arguments)

    def _do_flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, **further: Any) -> None:
        self.forwards.append(further)
        key, window, mod, sinks = _settings(q, k, v, further)
        given = (q.detach(), k.detach(), v.detach(), further["out"], further["lse"], further["softmax_scale"])

        def kernel(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            lse: Tensor,
            scale: float,
            window: Window,
            sinks: Tensor | None,
        ) -> None:
            found = attend(q, k, v, scale, window, mod, sinks)
            out.copy_(found[0])
            lse.copy_(found[1])

        self._call("_flash_attn_fwd", key, kernel, *given, window, sinks)

    def _do_flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **further: Any
    ) -> tuple[Tensor, ...]:
        self.backwards.append({"dout": dout} | further)
        key, window, mod, sinks = _settings(q, k, v, further)
        assert (mod is None) == (further.get("score_mod_bwd") is None)
        dq, dk, dv = further["dq"], further["dk"], further["dv"]
        dsink = None if sinks is None else torch.empty_like(sinks)
        dpsum = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
        dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        grouped = q.shape[2] > k.shape[2]
        dk_sum, dv_sum = (
            (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)) if grouped else (dk, dv)
        )
        self._call("_bwd_preprocess", q.dtype, _preprocess, out, dout, dpsum, further["dlse"], dq_sum)

        def kernel(*given: Any) -> None:
            _backward(*given, mod=mod)

        given = (q.detach(), k.detach(), v.detach(), dout, lse, dpsum, dq_sum, dk_sum, dv_sum)
        self._call("_flash_attn_bwd", key, kernel, *given, further["softmax_scale"], window, (None, None))
        tensors = None if dsink is None else SinkTensors(dpsum, lse, sinks, dsink)
        self._call("_bwd_postprocess_convert", ("q", sinks is None), _postprocess, dq_sum, dq, tensors)
        if grouped:
            self._call("_bwd_postprocess_convert", "kv", _postprocess, dk_sum, dk, None)
            self._call("_bwd_postprocess_convert", "kv", _postprocess, dv_sum, dv, None)
        return (dq, dk, dv) if dsink is None else (dq, dk, dv, dsink)

    def _do_bwd_preprocess(self) -> None:
        raise NotImplementedError

    def _do_bwd_postprocess_convert(self) -> None:
        raise NotImplementedError


def _settings(q: Tensor, k: Tensor, v: Tensor, further: dict[str, Any]) -> tuple[Any, Window, Softcap | None, Any]:
    sinks, mod = further["learnable_sink"], further.get("score_mod")
    left, right = further["window_size_left"], further["window_size_right"]
    window = (None, 0) if further["causal"] else (left, right)
    key = (q.dtype, q.shape[3], v.shape[3], q.shape[2] // k.shape[2], further["causal"], mod)
    broadcast = tuple(0 in x.stride() for x in (q, k, v))
    return (*key, left is not None, right is not None, sinks is not None, broadcast), window, mod, sinks


# ---- kernels: q, k, v, out and their gradients are (B, S, H, D), sums for each row (B, H, S) -------------------------


def _scores(q: Tensor, k: Tensor, scale: float, window: Window, mod: Softcap | None) -> tuple[Tensor, Tensor]:
    """After the softcap, and which pairs are allowed; windows are counted from the end."""
    scores = q.float().transpose(1, 2) @ _repeated(k, q).mT * scale
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1]) - rows
    left, right = window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    return scores if mod is None else mod(scores), allowed


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, mod: Softcap | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse."""
    scores, allowed = _scores(q, k, scale, window, mod)
    scores = scores.masked_fill(~allowed, -torch.inf)
    joined = scores
    if sinks is not None:
        joined = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = joined.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().where(allowed, 0.0)
    return (weights @ _repeated(v, q)).transpose(1, 2), lse


def _preprocess(out: Tensor, dout: Tensor, dpsum: Tensor, dlse: Tensor, dq_sum: Tensor) -> None:
    dpsum.copy_((out.float() * dout.float()).sum(-1).transpose(1, 2) - dlse)
    dq_sum.zero_()


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    dpsum: Tensor,
    dq_sum: Tensor,
    dk_sum: Tensor,
    dv_sum: Tensor,
    scale: float,
    window: Window,
    aux: tuple[None, None],
    *,
    mod: Softcap | None,
) -> None:
    """Adds to the sums that are in float32, else writes. The lse knows of sinks."""
    assert aux == (None, None)
    scores, allowed = _scores(q, k, scale, window, mod)
    weights = (scores - lse[..., None]).exp().where(allowed, 0.0)
    upstream = dout.float().transpose(1, 2)
    grad = weights * (upstream @ _repeated(v, q).mT - dpsum[..., None]) * scale
    if mod is not None:
        grad = grad * (1 - (scores / mod.cap).square())
    dq_sum += (grad @ _repeated(k, q)).transpose(1, 2)
    for total, found in ((dk_sum, grad.mT @ q.float().transpose(1, 2)), (dv_sum, weights.mT @ upstream)):
        added = found.transpose(1, 2).unflatten(2, (k.shape[2], -1)).sum(3)
        if total.dtype == torch.float32:
            total += added
        else:
            total.copy_(added)


def _postprocess(total: Tensor, result: Tensor, sinks: SinkTensors | None) -> None:
    result.copy_(total)
    if sinks is not None:
        share = (sinks.sink.float().view(1, -1, 1) - sinks.lse).exp()
        sinks.dsink.copy_(-(share * sinks.dpsum).sum((0, 2)))


def _softcap(cap: float) -> Softcap:
    return Softcap(cap=cap)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """In flash_attn's place; what was looked up before and after is forgotten."""
    stand_in = StandIn()
    monkeypatch.setattr(launch, "_flash", lambda: stand_in)
    monkeypatch.setattr(replaying, "current_cuda_device", lambda: -1)
    forget()
    yield stand_in
    forget()


def forget() -> None:
    for name in ("_compiled", "_prepared", "_softcap_mod"):
        getattr(launch, name).cache_clear()
