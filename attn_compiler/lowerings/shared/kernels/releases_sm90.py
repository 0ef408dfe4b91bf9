"""Code that differs from one release of Triton to the next, in Gluon for Hopper (see releases.py)."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

#: the name in Triton 3.7, else that in 3.6
barrier_of_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Have the copy engine fetch a tile, (descriptor, place, barrier, tile). Triton 3.8 has both names, 3.9 the newer one alone.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

#: Have it write one, (descriptor, place, tile); `tma.store_wait` waits until it has been read. In the same releases.
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_REINTERPRET = "reinterpret" if hasattr(shared_memory_descriptor, "reinterpret") else "_reinterpret"


@builtin
def reinterpret(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """View a tile in shared memory with another dtype, shape and layout. Triton 3.9 has it as a public method."""
    return getattr(tile, _REINTERPRET)(dtype, shape, layout, _semantic=_semantic)


@builtin
def add_from_shared(descriptor: Any, at: Any, source: Any, _semantic: Any = None) -> None:
    """Have the copy engine add a tile in shared memory to a tensor; `tma.store_wait` waits for it. Triton 3.8 has it in Gluon
    (https://github.com/triton-lang/triton/pull/10040), 3.6 and 3.7 only in their builder."""
    if hasattr(tma, "async_atomic_add"):
        tma.async_atomic_add(descriptor, at, source, _semantic=_semantic)
        return
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, source.handle)
