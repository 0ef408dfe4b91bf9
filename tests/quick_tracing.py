"""Graphs of symbolic sizes are traced in two thirds of the time: what fake tensors keep of each op for the next one is not made for these.

PyTorch keeps what an op makes of fake tensors, so that the same op need not be worked out again. Of symbolic sizes it keeps that for
one graph alone. Hardly an op comes twice there, and to keep a result it is made a second time, with all its strides in symbols.

Nothing else changes: PyTorch works the op out, as it does for ops that it keeps nothing of.

Settings, which are asked for millions of times, are looked up in half the time: most are neither another's name nor the environment's.

make_fx leaves the methods of `nn.Module` alone, which its tracer would only call: to put others there and back costs a look at each class
of modules. And no text is made for logs that are off (`say_nothing`). A release of PyTorch that has other names for these functions is left
as it is, only slower.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.utils import _config_module

#: what an entry of PyTorch's settings has
_ENTRY = set(
    "default value_type user_override justknob env_value_force env_value_default hide alias deprecated deprecation_message "
    "_deprecation_warned".split()
)
_KNOWN = ("_cached_dispatch_impl", "_make_cache_entry", "_dispatch_impl")


@functools.cache
def install() -> None:
    """In this process, and once."""
    _keep_nothing_of_symbols()
    _leave_modules_alone()
    _look_settings_up_at_once()


def _look_settings_up_at_once() -> None:
    settings, unset = _config_module.ConfigModule, getattr(_config_module, "_UNSET_SENTINEL", None)
    plain = getattr(_config_module, "_IMMUTABLE_CONFIG_TYPES", None)
    entry = getattr(_config_module, "_ConfigEntry", None)
    if unset is None or plain is None or set(getattr(entry, "__annotations__", ())) != _ENTRY:
        return
    look_up = settings.__getattr__

    @functools.wraps(look_up)
    def found(self: Any, name: str) -> Any:
        entry = self._config.get(name)
        if entry is None or entry.hide or entry.deprecated or entry.alias is not None:
            return look_up(self, name)
        if entry.env_value_force is unset:
            value = entry.user_override.get()
            if value is not unset:
                return value
            if entry.env_value_default is unset and entry.justknob is None and isinstance(entry.default, plain):
                return entry.default
        return look_up(self, name)

    settings.__getattr__ = found  # type: ignore[method-assign]


def _leave_modules_alone() -> None:
    tracer, patcher = proxy_tensor.PythonKeyTracer, getattr(_symbolic_trace, "_Patcher", None)
    if patcher is None or not {"call_module", "getattr"} <= vars(tracer).keys():
        return
    trace, patch_method = _symbolic_trace.Tracer.trace, patcher.patch_method
    tracing: list[type] = []

    @functools.wraps(trace)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracing.append(type(self))
        try:
            return trace(self, *args, **kwargs)
        finally:
            tracing.pop()

    @functools.wraps(patch_method)
    def patch(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        if cls is not torch.nn.Module or tracing[-1:] != [tracer]:
            patch_method(self, cls, *args, **kwargs)

    _symbolic_trace.Tracer.trace, patcher.patch_method = traced, patch  # type: ignore[method-assign]


def _keep_nothing_of_symbols() -> None:
    mode = fake_tensor.FakeTensorMode
    if not (all(hasattr(mode, name) for name in _KNOWN) and hasattr(fake_tensor, "_BypassDispatchCache")):
        return
    cached, make = mode._cached_dispatch_impl, mode._make_cache_entry

    @functools.wraps(cached)
    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, torch._ops.OpOverload) and any(map(_is_symbolic, args)):
            return self._dispatch_impl(func, types, args, kwargs)
        return cached(self, func, types, args, kwargs)

    @functools.wraps(make)
    def entry(self: Any, state: Any, key: Any, func: Any, *rest: Any) -> Any:
        """Symbols may be in lists of tensors and of sizes, too."""
        if isinstance(func, torch._ops.OpOverload) and state.cache_on_shape_env():
            raise fake_tensor._BypassDispatchCache("symbolic sizes")
        return make(self, state, key, func, *rest)

    mode._cached_dispatch_impl, mode._make_cache_entry = dispatch, entry  # type: ignore[method-assign]


#: module -> function or method of it that makes a text for PyTorch's logs alone, and what it gives instead
_TEXTS: dict[str, dict[str, Any]] = {
    # It empties the CPU's caches and times the guards, 50 ms a compilation.
    "torch._dynamo.guards": {"profile_guard_manager": 0.0},
    "torch._dynamo.utils": {
        "_compiler_config_for_logging": None,
        "_functorch_config_for_logging": None,
        "_get_dynamo_config_for_logging": None,
        "_scrubbed_inductor_config_for_logging": None,
    },
    "torch._dynamo.side_effects": {"SideEffects._format_side_effect_message": ""},
    "torch._dynamo.symbolic_convert": {"InstructionTranslatorBase.get_line_of_code_header": ""},
    "torch._functorch._aot_autograd.graph_compile": {
        "_log_fw_bw_graphs": ("", ""),
        "_log_inference_graph": "",
        "_log_joint_graph": "",
    },
}


def say_nothing() -> None:
    """Of the modules that are imported by now. TORCH_LOGS brings the texts back."""
    if "TORCH_LOGS" in os.environ:
        return
    for module in _TEXTS.keys() & sys.modules.keys():
        for name, instead in _TEXTS.pop(module).items():
            *path, last = name.split(".")
            owner = functools.reduce(lambda thing, part: getattr(thing, part, None), path, sys.modules[module])
            if hasattr(owner, last):
                setattr(owner, last, lambda *_, instead=instead, **__: instead)


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, fake_tensor.FakeTensor) and bool(x._has_symbolic_sizes_strides)
