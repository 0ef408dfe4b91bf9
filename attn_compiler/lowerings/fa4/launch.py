"""Launches of FlashAttention-4's kernels, compiled ahead of the first call. The only file that imports flash_attn.

flash_attn compiles a kernel the first time that its Python function meets a new combination of dtype, head dims, mask and so on; under a
FakeTensorMode it only compiles. Sizes and strides are no part of that combination.

A forward through those functions takes the host 84 µs on an H200 machine (190 with a softcap, whose function they make and hash anew each
time), a backward 106 or more, a launch 7. So a call with the layout of one before launches the same kernels again (replay.py). Calls that
the functions make copies for still go through them.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler.lowerings.fa4 import replay
from attn_compiler.lowerings.fa4.plan import Fa4Call, Settings
from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.leaf_calls import (
    BackwardArguments,
    BackwardBody,
    ForwardArguments,
    ForwardBody,
    Gradients,
    Outputs,
)
from attn_compiler.lowerings.shared.launching.on_device import Empty, new_outputs, on
from attn_compiler.lowerings.shared.launching.replaying import CallCache, Returned, flat, replay_of
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat

log = logging.getLogger(__name__)

#: a call's tensors by name
Named = dict[str, Tensor]
Shape = tuple[int, int, int, int]

# Stand-ins for unknown sizes: more than one block of queries and of keys.
_SOME_BATCH, _SOME_LENGTH = 2, 1024
# Addresses and strides are multiples of this many bytes.
_ALIGNMENT = 16
_ALIGNED_ELEMENTS = _ALIGNMENT // 2  # in half precision

_lock = threading.RLock()


# ---- compiling ----------------------------------------------------------------------------------------------------


def why_not_compiled(call: Fa4Call) -> list[Reason]:
    """Compile the call's kernels, once for each kind of kernel; return the error, if there is one, as a reason.

    Does nothing for a machine that is not this one: kernels are compiled where they run.
    """
    here = Target.current("cuda")
    if (here.flash_attn_4, here.sm) != (call.version, call.sm):
        return []
    found = _compiled(call, getattr(torch, call.spec.dtype))
    return [found] if isinstance(found, Reason) else []


@functools.lru_cache(maxsize=1024)
def _compiled(call: Fa4Call, sinks_dtype: torch.dtype) -> Reason | None:
    """Return None once all kernels of the call are compiled, or the reason why that failed."""
    begin = time.perf_counter()
    try:
        with _lock, FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _compile(call, sinks_dtype)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler raises is why the site goes elsewhere
        said = str(failure).strip().splitlines()
        observed = f"{type(failure).__name__}: {said[0] if said else ''}"[:240]
        return Reason(code=Code.NOT_COMPILED, rule="its kernels compile", observed=observed)
    log.info("compiled FlashAttention-4's kernels of one kind of call in %.2f s", time.perf_counter() - begin)
    return None


def _compile(call: Fa4Call, sinks_dtype: torch.dtype) -> None:
    spec, prepared = call.spec, _prepared(call.to_text())
    q, k, v = (_fake(tensor.shape, spec) for tensor in (spec.q, spec.k, spec.v))
    heads, width = q.shape[2], v.shape[3]
    given = {"q": q, "k": k, "v": v, "out": q.new_empty((*q.shape[:2], heads, width))}
    given["lse"] = q.new_empty((q.shape[0], heads, q.shape[1]), dtype=torch.float32)
    if prepared.settings.sinks:
        given["sinks"] = q.new_empty(heads, dtype=sinks_dtype)
    _flash_forward(prepared, given)
    if spec.needs_grad:
        given |= {f"grad_{name}": torch.empty_like(given[name]) for name in ("q", "k", "v", "out", "lse")}
        _flash_backward(prepared, given)


def _fake(shape: Sequence[Dim], spec: AttentionSpec) -> Tensor:
    """Return (B, S, H, D) for a logical BHSD shape, where a FakeTensorMode is on."""
    some = (_SOME_BATCH, 1, _SOME_LENGTH, 1)
    batch, heads, length, width = (
        size if isinstance(size, int) else other for size, other in zip(shape, some, strict=True)
    )
    return torch.empty((batch, length, heads, width), dtype=getattr(torch, spec.dtype), device=spec.device)


@functools.cache
def _flash() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


# ---- the leaf op's two bodies --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """Values that follow from a call's text, looked up once: hashing a spec takes longer than a launch."""

    call: Fa4Call
    settings: Settings
    window: tuple[int | None, int | None]


@functools.lru_cache(maxsize=1024)
def _prepared(text: str) -> _Prepared:
    call = Fa4Call.from_text(text)
    settings = call.settings
    return _Prepared(call=call, settings=settings, window=settings.window)


def _definition(q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], text: str) -> Attention:
    prepared = _prepared(text)
    settings = prepared.settings
    return Attention(
        q=q,
        k=k,
        v=v,
        tensors=_sinks(operands),
        scale=settings.scale,
        band=Band(left=settings.left, right=settings.right, from_end=True),
        change=prepared.call.spec.score.pointwise,
    )


class FlashForward(ForwardBody):
    """The forward. Outputs have the layout that `ops` describes. Sizes are those of the tensors, not the spec's."""

    __slots__ = ()

    def first(self, given: ForwardArguments, same: CallCache) -> Outputs:
        q, k, v, operands, text = given
        with on(q.device):
            named = {"q": q, "k": k, "v": v} | _sinks(operands)
            outputs = dict(zip(("out", "lse"), new_outputs(q, v), strict=True))
            is_plain = _is_plain(q) and _is_plain(k) and _is_plain(v)
            _first(_flash_forward, text, named, outputs, ("out", "lse") if is_plain else None, same)
        return outputs["out"], outputs["lse"]

    def definition(self, given: ForwardArguments) -> Attention:
        return _definition(given.q, given.k, given.v, given.operands, given.text)


class FlashBackward(BackwardBody):
    """The backward: gradients of q, k and v, and of the sinks if they are learned."""

    __slots__ = ()

    def first(self, given: BackwardArguments, same: CallCache) -> Gradients:
        grad_out, grad_lse, q, k, v, operands, out, lse, text = given
        if 0 in grad_out.stride():
            # A stride of 0 has kernels of its own, which were not compiled ahead. contiguous() keeps it on an axis of one element.
            return self(*given._replace(grad_out=grad_out.clone(memory_format=torch.contiguous_format)))
        further = ["grad_sinks"] if _prepared(text).settings.sinks_grad else []
        with on(q.device):
            named = {"grad_out": grad_out, "grad_lse": grad_lse, "q": q, "k": k, "v": v, "out": out, "lse": lse}
            named |= _sinks(operands)
            grads = {f"grad_{name}": _empty(cast(Shape, named[name].shape), named[name]) for name in "qkv"}
            is_plain = (
                all(map(_is_plain, (q, k, v, out, grad_out))) and lse.is_contiguous() and grad_lse.is_contiguous()
            )
            returned = ("grad_q", "grad_k", "grad_v", further) if is_plain else None
            results = _first(_flash_backward, text, named, grads, returned, same)
        return grads["grad_q"], grads["grad_k"], grads["grad_v"], [results[name] for name in further]

    def definition(self, given: BackwardArguments) -> Attention:
        return _definition(given.q, given.k, given.v, given.operands, given.text)

    def differentiable(self, given: BackwardArguments) -> tuple[str, ...]:
        return ("sinks",) if _prepared(given.text).settings.sinks_grad else ()


forward = FlashForward(op="fa4")
gradients = FlashBackward(op="fa4_backward")

#: `forward` for one place in compiled code
ForwardSite = functools.partial(leaf_calls.ForwardSite, forward)

#: `gradients` for one place in compiled code
BackwardSite = functools.partial(leaf_calls.BackwardSite, gradients)


def _first(
    function: Callable[[_Prepared, Named], Named],
    text: str,
    inputs: Named,
    outputs: Named,
    returned: Returned | None,
    same: CallCache,
) -> Named:
    """Call a function that fills in the outputs, and keep its replay. Returns the function's other tensors.

    inputs: in the order of the leaf op's. returned: by the leaf op; None where kernels can't read the inputs in place: the function's
    copies could not be replayed.
    """
    prepared, given = _prepared(text), {name: replay.as_read(x) for name, x in (inputs | outputs).items()}
    is_captured = inputs["q"].is_cuda and torch.cuda.is_current_stream_capturing()
    # While a CUDA graph is captured, a first call's result can't be waited for.
    if returned is None or is_captured or "is_tried" in same.facts:
        return function(prepared, given)
    with replay.watching(_launching()) as watch:
        results = function(prepared, given)
    same.facts["is_tried"] = True
    recording = watch.recording(given, results)
    if recording is not None and {*outputs, *recording.made} >= set(flat(returned)):
        empties = {name: Empty.like(x) for name, x in outputs.items()} | recording.empties
        again = replay_of(inputs["q"].device, [recording], empties, inputs=inputs, returned=returned)
        ours, named = again.run(list(inputs.values())), outputs | results
        if replay.gives(flat(ours), [named[name] for name in flat(returned)]):
            same.replay = again
    return results


def _launching() -> tuple[Any, ...]:
    """Return the functions of flash_attn that have kernels."""
    flash = _flash()
    return flash._flash_attn_fwd, flash._bwd_preprocess, flash._flash_attn_bwd, flash._bwd_postprocess_convert


def _flash_forward(prepared: _Prepared, given: Named) -> Named:
    """Fill in out and lse. q, k, v, out: (B, S, H, D)."""
    settings, (left, right) = prepared.settings, prepared.window
    _flash()._flash_attn_fwd(
        *(given[name] for name in ("q", "k", "v")),
        softmax_scale=settings.scale,
        causal=settings.causal,
        window_size_left=left,
        window_size_right=right,
        learnable_sink=given.get("sinks"),
        out=given["out"],
        lse=given["lse"],
        _arch=prepared.call.sm,
        **_softcap(settings, backward=False),
    )
    return {}


def _flash_backward(prepared: _Prepared, given: Named) -> Named:
    """Fill in the gradients of q, k and v; return that of the sinks if they are learned."""
    settings, (left, right) = prepared.settings, prepared.window
    found = _flash()._flash_attn_bwd(
        *(given[name] for name in ("q", "k", "v", "out", "grad_out", "lse")),
        softmax_scale=settings.scale,
        causal=settings.causal,
        window_size_left=left,
        window_size_right=right,
        deterministic=prepared.call.deterministic,
        dq=given["grad_q"],
        dk=given["grad_k"],
        dv=given["grad_v"],
        dlse=given["grad_lse"],
        learnable_sink=given["sinks"] if settings.sinks_grad else None,
        **_softcap(settings, backward=True),
    )
    return {"grad_sinks": found[3]} if settings.sinks_grad else {}


def _softcap(settings: Settings, *, backward: bool) -> dict[str, Any]:
    """Return the softcap's functions, the same objects in every call: flash_attn hashes the source of new ones."""
    if settings.softcap is None:
        return {}
    mods = {"score_mod": _softcap_mod(settings.softcap, "create_softcap_scoremod")}
    of_backward = {"score_mod_bwd": _softcap_mod(settings.softcap, "create_softcap_scoremod_bwd")} if backward else {}
    return mods | of_backward


@functools.cache
def _softcap_mod(cap: float, maker: str) -> Any:
    return getattr(_flash().utils, maker)(cap)


def _empty(shape: Shape, like: Tensor) -> Tensor:
    """Allocate a contiguous tensor on the current device."""
    batch, rows, columns, width = shape
    strides = (rows * columns * width, columns * width, width, 1)
    return torch_compat.empty_strided((batch, rows, columns, width), strides, like.dtype, like.device.type)


def _sinks(operands: Sequence[Tensor]) -> Named:
    return {"sinks": operands[0]} if operands else {}


def _is_plain(x: Tensor) -> bool:
    """Return whether kernels read the tensor in place: TMA wants addresses and strides of 16 bytes, and a stride of 0 has kernels of its
    own."""
    batch, heads, length, width = x.stride()
    return (
        width == 1
        and (batch | heads | length) % _ALIGNED_ELEMENTS == 0
        and 0 not in (batch, heads, length)
        and x.data_ptr() % _ALIGNMENT == 0
    )
