"""Private PyTorch API of watching a compilation: counters, the structured trace, and compiling without side effects."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config, convert_frame, pgo
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import tls
from torch._dynamo.utils import counters, graph_break_reasons
from torch._guards import TracingContext
from torch._logging._internal import trace_log

# Since 2.13 a torch.compile call can have separate cache entries, which do not count towards other recompile limits.
HAS_ISOLATION = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def add_to_counters(counts: Mapping[str, int]) -> None:
    """Add to torch._dynamo.utils.counters["attn_compiler"]."""
    for name, count in counts.items():
        counters["attn_compiler"][name] += count


def is_traced() -> bool:
    """Return True if TORCH_TRACE is being written, so a `trace_artifact` is kept. Exact once a compilation has begun."""
    return bool(trace_log.handlers)


def compile_apart(
    model: Callable[..., Any],
    backend: Callable[..., Any] | str,
    dynamic: bool | None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Call torch.compile, isolated from other compilations of the same code if this torch can do so."""
    extra: dict[str, Any] = {"isolate_recompiles": True} if HAS_ISOLATION else {}
    if options:
        extra["options"] = dict(options)
    return torch.compile(model, backend=backend, dynamic=dynamic, **extra)


def compile_calls(
    module: nn.Module, backend: str, dynamic: bool | None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return what `module.compile()` would have the module called by, for `called_as`."""
    return compile_apart(module._call_impl, backend, dynamic, options)


@contextlib.contextmanager
def called_as(module: nn.Module, call: Callable[..., Any] | None) -> Iterator[None]:
    """Let `module(...)` call `call` within the block; None: the module as it was written."""
    before = module._compiled_call_impl
    module._compiled_call_impl = call
    try:
        yield
    finally:
        module._compiled_call_impl = before


def original_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the module that torch.compile was given, if `model` is its result; else `model`. (torch.compile unwraps functions itself.)"""
    return getattr(model, "_orig_mod", model)


def settings_of(model: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return options=, mode= and dynamic= of a module compiled for the backend called `name`; nothing for anything else."""
    backend = _wrapped(getattr(getattr(model, "dynamo_ctx", None), "callback", None))
    if getattr(backend, "compiler_name", None) != name:
        return {}
    return {**options_of(backend), "dynamic": backend.dynamic}


def options_of(backend: Any) -> dict[str, Any]:
    """Return options= and mode= of a backend wrapped by torch.compile."""
    return {key: value for key, value in getattr(_wrapped(backend), "kwargs", {}).items() if key in ("options", "mode")}


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
def nothing_left_behind(backend: Callable[..., Any] | None = None) -> Iterator[None]:
    """Let Dynamo forget after the block what `backend` compiled in it: the code, and the sizes it has seen.

    Without this, the entries would count towards the recompile limit of the user's own torch.compile of the same model, and the sizes seen
    here would make that compile dynamic shapes at its first call. backend: None for everything compiled in the block.
    """
    # Entries keep their identity for as long as one of their lists is held.
    before: dict[CodeType, list[Any]] = {}

    def remember(code: CodeType, new_code: CodeType) -> None:
        before.setdefault(code, _debug_get_cache_entry_list(code))

    hook = register_bytecode_hook(remember)
    try:
        with sizes_forgotten():
            yield
    finally:
        hook.remove()
        for code, known in before.items():
            entries = _debug_get_cache_entry_list(code)
            new = [entry for entry in entries if not any(entry is one for one in known)]
            _forget(code, entries, [one for one in new if backend is None or innermost(one.backend) is backend])


@contextlib.contextmanager
def sizes_forgotten() -> Iterator[None]:
    """Let Dynamo forget after the block the sizes it has seen in it."""
    sizes_seen = copy.deepcopy(pgo.get_code_state())
    try:
        yield
    finally:
        state = pgo.get_code_state()
        state.clear()
        state.update(sizes_seen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Break:
    """A place where Dynamo ended a graph, or gave a frame up.

    graph: the compilation ("3/0"). reason: Dynamo's words. stack: the model's frames there, the first compiled one first. modules: the
    frame's module arguments, by name. settings: the options= and mode= of torch.compile.
    """

    graph: str
    reason: str
    stack: tuple[traceback.FrameSummary, ...]
    modules: Mapping[str, nn.Module]
    settings: Mapping[str, Any]


def watch_breaks(backend: Callable[..., Any], tell: Callable[[Break], None]) -> None:
    """Report each break in code compiled for this very backend, also if Dynamo had no graph for it. torch._dynamo.reset() ends that.
    Repeated calls for the same backend are cheap."""
    of_others = callback_handler.end_callbacks
    if any(isinstance(one, _AtEnd) and one.of.backend is backend for one in of_others):
        return
    _watch(_Breaks(backend, tell))


@contextlib.contextmanager
def breaks_told(backend: Callable[..., Any], tell: Callable[[Break], None]) -> Iterator[None]:
    """Do `watch_breaks` within the block alone."""
    at_start, at_end = _watch(_Breaks(backend, tell))
    try:
        yield
    finally:
        # Code in the block may reset Dynamo.
        for registered, one in ((callback_handler.start_callbacks, at_start), (callback_handler.end_callbacks, at_end)):
            if one in registered:
                registered.remove(one)


def _watch(breaks: _Breaks) -> tuple[_AtStart, _AtEnd]:
    at_start, at_end = _AtStart(breaks), _AtEnd(breaks)
    callback_handler.register_start_callback(at_start)
    callback_handler.register_end_callback(at_end)
    return at_start, at_end


class _Breaks:
    """seen: the number of breaks at the beginning of the current compilation."""

    def __init__(self, backend: Callable[..., Any], tell: Callable[[Break], None]) -> None:
        self.backend = backend
        self.tell = tell
        self.seen = 0

    def told(self, compilation: str) -> None:
        given = given_to_compilation()
        if given is None or given["one_graph"] or innermost(given["compiler_fn"]) is not self.backend:
            return
        found = [(one.reason, tuple(one.user_stack)) for one in graph_break_reasons[self.seen :]]
        failed = sys.exc_info()[1]
        if isinstance(failed, Unsupported):
            found.append((str(failed), tuple(failed.real_stack)))
        modules = {name: value for name, value in given["locals"].items() if isinstance(value, nn.Module)}
        settings = options_of(given["compiler_fn"])
        # A restarted attempt breaks at the same place again.
        once = {tuple((frame.filename, frame.lineno) for frame in stack): (reason, stack) for reason, stack in found}
        for reason, stack in once.values():
            self.tell(Break(graph=compilation, reason=reason, stack=stack, modules=modules, settings=settings))


@dataclass(frozen=True)
class _AtStart:
    of: _Breaks

    def __call__(self, _: CallbackArgs) -> None:
        self.of.seen = len(graph_break_reasons)


@dataclass(frozen=True)
class _AtEnd:
    of: _Breaks

    def __call__(self, args: CallbackArgs) -> None:
        self.of.told(args.compile_id)


def given_to_compilation() -> dict[str, Any] | None:
    """Return the arguments of Dynamo's function that compiles a frame, while it runs; None in another kind of compilation."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not convert_frame._compile.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def _forget(code: CodeType, entries: Sequence[Any], ours: Sequence[Any]) -> None:
    if not ours:
        return
    if len(ours) == len(entries) or not HAS_ISOLATION:
        # This frees all entries of the code. Without isolation, other entries have to be compiled again.
        reset_code(code)
        return
    deleted = DeletedGuardManagerWrapper("it was compiled to be explained or timed")
    for entry in ours:
        if (state := entry.guard_manager.extra_state) is not None:
            state.invalidate(entry, deleted)


def innermost(backend: Any) -> Any:
    backend = _wrapped(backend)
    return getattr(backend, "compiler_fn", backend)


def _wrapped(backend: Any) -> Any:
    """Remove Dynamo's own wrappers: return torch.compile's wrapper of the backend and its options, or a callable."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def is_ahead_of_time() -> bool:
    """Return True if the graph is compiled for another process (`aot_compile`, `caching_precompile`). PyTorch keeps no guard there on an
    object of this process, so nothing may rest on one."""
    is_kept = getattr(config, "caching_precompile", False) or getattr(tls, "current_tx", None) is None
    return TracingContext.try_get() is not None and is_kept


def is_in_frame() -> bool:
    """Return True while code of a frame of this process is compiled, which guards can watch."""
    return TracingContext.try_get() is not None and not is_ahead_of_time()


#: the name of a function that goes on behind a graph break
_RESUMED = re.compile(rf"{TORCH_DYNAMO_RESUME_IN_PREFIX}_(?P<name>.+)_at_\d+$")


def model_name() -> str | None:
    """Return the class of the module that the compiled function was called with, or else the function's name; None outside of a
    compilation."""
    frame = getattr(tls, "current_tx", None) if is_in_frame() else None
    if frame is None:
        return None
    root = frame.output.root_tx
    given = (x for value in root.f_locals.values() for x in (value if isinstance(value, tuple) else (value,)))
    module = next((x for x in given if isinstance(x, nn.Module)), None)
    name = root.f_code.co_qualname.rpartition("<locals>.")[2] if module is None else type(module).__name__
    return _RESUMED.sub(r"\g<name>", name)
