"""Calls FlashAttention-4's kernels, and compiles them ahead of the first call. The only file that imports flash_attn.

flash_attn compiles a kernel the first time that its Python function meets a new combination of dtype, head dims, mask and so on;
under a FakeTensorMode it compiles alone. Sizes and strides are no part of that combination.

On sm90 a forward calls the compiled kernel itself: flash_attn's function takes 25 µs to find it (146 with a softcap, whose
function it makes and hashes anew each time). What that function would have to copy, or to compile anew, still goes through it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler.lowerings import ops
from attn_compiler.lowerings.fa4_plan import Call, Settings
from attn_compiler.report import Reason
from attn_compiler.spec import AttentionSpec, Dim
from attn_compiler.target import Target

Kernel = Callable[..., Any]

# In place of sizes that are not known: more than one block of queries and of keys.
_SOME_BATCH, _SOME_LENGTH = 2, 1024
_DIRECT_SM = 90
_ALIGNMENT = 16
# What sm90's kernel also takes: lengths of batch rows and where they begin, pages; numbers of blocks.
_NO_LENGTHS = (None,) * 5
_NO_TOTALS = (None,) * 2

_lock = threading.RLock()


# ---- compiling ----------------------------------------------------------------------------------------------------


def why_not_compiled(call: Call) -> list[Reason]:
    """Compile what the call needs, once for each kind of kernel; the error, if there is one, as a reason.

    Does nothing for a machine that is not this one: kernels are compiled where they run.
    """
    if not _is_here(call):
        return []
    found = _compiled(call, getattr(torch, call.spec.dtype))
    return [found] if isinstance(found, Reason) else []


def _is_here(call: Call) -> bool:
    here = Target.current("cuda")
    return (here.flash_attn_4, here.sm) == (call.version, call.sm)


@functools.lru_cache(maxsize=1024)
def _compiled(call: Call, sinks_dtype: torch.dtype) -> Kernel | Reason:
    """The forward's kernel, once everything that the call needs is compiled; or why that failed."""
    try:
        with _lock, FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compile(call, sinks_dtype)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler raises is why the site goes elsewhere
        said = str(failure).strip().splitlines()
        observed = f"{type(failure).__name__}: {said[0] if said else ''}"[:240]
        return Reason(rule="its kernels compile", observed=observed)


def _compile(call: Call, sinks_dtype: torch.dtype) -> Kernel:
    spec, prepared = call.spec, _prepared(call.to_text())
    q, k, v = (_fake(tensor.shape, spec) for tensor in (spec.q, spec.k, spec.v))
    sinks = torch.empty(q.shape[1], dtype=sinks_dtype, device=spec.device) if prepared.settings.sinks else None
    out, lse = ops.empty_outputs(q, v)
    with _noting_keys(_flash()._flash_attn_fwd) as noted:
        _flash_forward(prepared, q, k, v, sinks, out, lse)
    if spec.needs_grad:
        _flash_backward(prepared, out, lse, q, k, v, sinks, out, lse)
    kernel: Kernel = noted.kept[noted.key]
    return kernel


def _fake(shape: Sequence[Dim], spec: AttentionSpec) -> Tensor:
    """A tensor of that shape, BHSD in BSHD memory, where a FakeTensorMode is on."""
    some = (_SOME_BATCH, 1, _SOME_LENGTH, 1)
    batch, heads, length, width = (
        size if isinstance(size, int) else other for size, other in zip(shape, some, strict=True)
    )
    dtype = getattr(torch, spec.dtype)
    return torch.empty((batch, length, heads, width), dtype=dtype, device=spec.device).transpose(1, 2)


class _Noting:
    """A cache of flash_attn's kernels that remembers what was last asked for. kept: flash_attn's own."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.key: Any = None

    def __contains__(self, key: Any) -> bool:
        self.key = key
        return key in self.kept

    def __getitem__(self, key: Any) -> Kernel:
        kernel: Kernel = self.kept[key]
        return kernel

    def __setitem__(self, key: Any, kernel: Kernel) -> None:
        self.kept[key] = kernel


@contextlib.contextmanager
def _noting_keys(function: Any) -> Iterator[_Noting]:
    """While it lasts, a function of flash_attn's notes the key of the kernel that it was called for."""
    noting = _Noting(function.compile_cache)
    function.compile_cache = noting
    try:
        yield noting
    finally:
        function.compile_cache = noting.kept


@functools.cache
def _flash() -> Any:
    """flash_attn's functions."""
    return importlib.import_module("flash_attn.cute.interface")


# ---- the leaf op's two bodies --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What a call text comes to, looked up once: hashing a spec takes longer than a launch."""

    call: Call
    settings: Settings
    window: tuple[int | None, int | None]

    @property
    def is_direct(self) -> bool:
        """Whether the forward's kernel is called without flash_attn's function."""
        return self.call.sm == _DIRECT_SM


@functools.lru_cache(maxsize=1024)
def _prepared(text: str) -> _Prepared:
    call = Call.from_text(text)
    settings = call.settings
    return _Prepared(call=call, settings=settings, window=settings.window)


@functools.lru_cache(maxsize=1024)
def _kernel(text: str, sinks_dtype: torch.dtype) -> Kernel:
    """The forward's. Raises RuntimeError where it does not compile: it did when the site was decided."""
    found = _compiled(Call.from_text(text), sinks_dtype)
    if isinstance(found, Reason):
        raise RuntimeError(str(found))
    return found


def forward(q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """out and lse: see `ops`. Sizes are those of the tensors, not the spec's."""
    prepared = _prepared(text)
    sinks = operands[0].detach() if operands else None
    out, lse = ops.empty_outputs(q, v)
    with _on(q.device):
        if prepared.is_direct and _is_plain(q) and _is_plain(k) and _is_plain(v):
            _launch(_kernel(text, q.dtype if sinks is None else sinks.dtype), prepared, q, k, v, sinks, out, lse)
        else:
            _flash_forward(prepared, q, k, v, sinks, out, lse)
    return out, lse


def gradients(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k and v, and of the sinks if they are learned."""
    sinks = operands[0].detach() if operands else None
    with _on(q.device):
        return _flash_backward(_prepared(text), grad_out, grad_lse, q, k, v, sinks, out, lse)


def _launch(
    kernel: Kernel,
    prepared: _Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The kernel of sm90, with the arguments that `_flash_attn_fwd` gives it."""
    left, right = prepared.window
    kernel(
        _without_gradient(q).transpose(1, 2),
        _without_gradient(k).transpose(1, 2),
        _without_gradient(v).transpose(1, 2),
        out.transpose(1, 2),
        lse,
        prepared.settings.scale,
        *_NO_LENGTHS,
        left,
        right,
        sinks,
        None,  # blocks to visit
        _no_aux_data(),
        *_NO_TOTALS,
    )


def _without_gradient(x: Tensor) -> Tensor:
    """DLPack refuses a tensor that requires a gradient."""
    return x.detach() if x.requires_grad else x


@functools.cache
def _no_aux_data() -> Any:
    return _flash().AuxData()


def _flash_forward(
    prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    settings, (left, right) = prepared.settings, prepared.window
    _flash()._flash_attn_fwd(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=settings.scale,
        causal=settings.causal,
        window_size_left=left,
        window_size_right=right,
        learnable_sink=sinks,
        out=out.transpose(1, 2),
        lse=lse,
        _arch=prepared.call.sm,
        **_softcap(settings, backward=False),
    )


def _flash_backward(
    prepared: _Prepared,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    settings, (left, right) = prepared.settings, prepared.window
    grads = [ops.empty_gradient(x) for x in (q, k, v)]
    # A stride of 0 has kernels of its own, which were not compiled ahead.
    grad_out = grad_out.contiguous() if 0 in grad_out.stride() else grad_out
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    found = _flash()._flash_attn_bwd(
        *(x.transpose(1, 2) for x in (q, k, v, out, grad_out)),
        lse,
        softmax_scale=settings.scale,
        causal=settings.causal,
        window_size_left=left,
        window_size_right=right,
        deterministic=prepared.call.deterministic,
        dq=grad_q,
        dk=grad_k,
        dv=grad_v,
        dlse=grad_lse,
        learnable_sink=sinks if settings.sinks_grad else None,
        **_softcap(settings, backward=True),
    )
    return grads[0], grads[1], grads[2], [found[3]] if settings.sinks_grad else []


def _softcap(settings: Settings, *, backward: bool) -> dict[str, Any]:
    """The softcap's own functions, which are the same objects in every call: flash_attn hashes the source of new ones."""
    if settings.softcap is None:
        return {}
    mods = {"score_mod": _softcap_mod(settings.softcap)}
    return mods | {"score_mod_bwd": _softcap_mod_backward(settings.softcap)} if backward else mods


@functools.cache
def _softcap_mod(cap: float) -> Any:
    return _flash().utils.create_softcap_scoremod(cap)


@functools.cache
def _softcap_mod_backward(cap: float) -> Any:
    return _flash().utils.create_softcap_scoremod_bwd(cap)


def _is_plain(x: Tensor) -> bool:
    """Whether the compiled kernel reads it as it is: TMA wants addresses of 16 bytes, and a stride of 0 has kernels of its own."""
    return 0 not in x.stride() and x.data_ptr() % _ALIGNMENT == 0


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels run on the current device and its stream."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
