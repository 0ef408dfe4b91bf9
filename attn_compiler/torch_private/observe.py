"""Private PyTorch API of watching a compilation: counters, the structured trace, and compiling without leaving a trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import pgo
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters
from torch._logging._internal import trace_log

# Since 2.13 a torch.compile call can have cache entries of its own, which count towards nobody else's recompile limit.
HAS_ISOLATION = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def add_to_counters(counts: Mapping[str, int]) -> None:
    """Add to torch._dynamo.utils.counters["attn_compiler"]."""
    for name, count in counts.items():
        counters["attn_compiler"][name] += count


def is_traced() -> bool:
    """Whether TORCH_TRACE is being written, so that a `trace_artifact` would not be lost. Exact once a compilation has begun."""
    return bool(trace_log.handlers)


def compile_apart(model: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """torch.compile, apart from other compilations of the same code where this torch can keep them apart."""
    extra: dict[str, Any] = {"isolate_recompiles": True} if HAS_ISOLATION else {}
    return torch.compile(model, backend=backend, dynamic=dynamic, **extra)


def original_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module that torch.compile was given, if `model` is what it returned; else `model`. (Functions it unwraps itself.)"""
    return getattr(model, "_orig_mod", model)


def settings_of(model: Callable[..., Any], name: str) -> dict[str, Any]:
    """The options=, mode= and dynamic= of a module that torch.compile returned for the backend called `name`; none of anything else."""
    backend = _wrapped(getattr(getattr(model, "dynamo_ctx", None), "callback", None))
    if getattr(backend, "compiler_name", None) != name:
        return {}
    given = {key: value for key, value in backend.kwargs.items() if key in ("options", "mode")}
    return {**given, "dynamic": backend.dynamic}


@contextlib.contextmanager
def uncompiled_modules(model: Callable[..., Any]) -> Iterator[None]:
    """Undo `module.compile()` within the block, for `model` and every module in it."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    compiled = [(module, module._compiled_call_impl) for module in modules if module._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled:
            module._compiled_call_impl = implementation


@contextlib.contextmanager
def nothing_left_behind(backend: Callable[..., Any]) -> Iterator[None]:
    """What `backend` compiles within the block, Dynamo forgets after it: the code, and which sizes it has seen.

    Without this, the entries would count towards the recompile limit of the user's own torch.compile of the same model, and
    the sizes seen here would make that compile dynamic shapes at its first call.
    """
    sizes_seen = copy.deepcopy(pgo.get_code_state())
    codes: dict[CodeType, None] = {}
    hook = register_bytecode_hook(lambda code, _: codes.update({code: None}))
    try:
        yield
    finally:
        hook.remove()
        for code in codes:
            _forget(code, backend)
        state = pgo.get_code_state()
        state.clear()
        state.update(sizes_seen)


def _forget(code: CodeType, backend: Callable[..., Any]) -> None:
    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if _innermost(entry.backend) is backend]
    if not ours:
        return
    if len(ours) == len(entries) or not HAS_ISOLATION:
        # Also frees the entries' places. If there are others and no isolation, they have to be compiled again.
        reset_code(code)
        return
    deleted = DeletedGuardManagerWrapper("it was compiled to be explained, not to be run")
    for entry in ours:
        if (state := entry.guard_manager.extra_state) is not None:
            state.invalidate(entry, deleted)


def _innermost(backend: Any) -> Any:
    backend = _wrapped(backend)
    return getattr(backend, "compiler_fn", backend)


def _wrapped(backend: Any) -> Any:
    """What is beneath Dynamo's own wrappers: what torch.compile made of the backend and its options, or a callable."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend
