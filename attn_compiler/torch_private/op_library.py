"""Ops of this package in torch.ops: their registration and their bodies. It knows nothing of attention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd import profiler

from attn_compiler.torch_private import compat as torch_compat

#: the namespace of this package's ops in torch.ops
NAMESPACE = "attn_compiler"

# Holds the registrations, which end when it is collected. A reload has to keep it: torch 2.11 crashes in an op that was
# called, deregistered and defined again.
LIBRARY: Any = globals().get("LIBRARY") or torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Late:
    """A function whose module is imported at its first call: a dump or a fake needs no triton.

    site: a class of the module, whose instances do the same for one place in compiled code: the layout of tensors is the same there in
    every call, and an unused output may be None. notes: it launches kernels only by `launching`, so that its launches can be noted instead
    (dry_run.py).
    """

    module: str
    function: str
    site: str | None = None
    notes: bool = False

    def __call__(self, *arguments: Any) -> Any:
        return self.found(*arguments)

    @functools.cached_property
    def found(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return found


#: bodies of leaf ops that compiled code may call directly, by the op's name
BODIES: dict[str, Late] = globals().get("BODIES") or {}
#: bodies whose launches can be noted, by the op's name
NOTING: dict[str, Callable[..., Any]] = globals().get("NOTING") or {}
#: functions that compiled code calls instead of an op that exists only for its autograd formula, with the same arguments, by the op's name
PLAIN: dict[str, Any] = globals().get("PLAIN") or {}


def define(op: str, schema: str, body: Callable[..., Any], dispatch_key: str) -> None:
    """Define an op of the namespace, for one device or all of them."""
    LIBRARY.define(op + schema, tags=(torch.Tag.needs_exact_strides,))
    LIBRARY.impl(op, body, dispatch_key)
    if isinstance(body, Late):
        BODIES[op] = body
        if body.notes:
            NOTING[op] = body


def register_fake(op: str, fake: Callable[..., Any]) -> None:
    """Register the fake of an op of the namespace, for tensors without memory."""
    torch_compat.register_fake(LIBRARY, op, fake)


def ranged(op: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of an op with a range in profiles, as the dispatcher makes one. Compiled code asks for it while a profiler runs."""

    def call(*arguments: Any) -> Any:
        with profiler.record_function(op):
            return body(*arguments)

    return call


def launching_body(target: Any) -> Callable[..., Any] | None:
    """Return the body of an op whose launches can be noted; None for other ops, and if it is no op of ours."""
    if getattr(target, "namespace", None) != NAMESPACE:
        return None
    return NOTING.get(target.name().partition("::")[2])


def texts(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Return `text_of` all calls of this package's ops among nodes."""
    ours = (node for node in nodes if getattr(node.target, "namespace", None) == NAMESPACE)
    found = (text_of(node.target.name().partition("::")[2], node.args) for node in ours)  # type: ignore[union-attr]
    return tuple(dict.fromkeys(filter(None, found)))


def text_of(op: str, arguments: Sequence[Any]) -> str:
    """Return the key of failures of a call's kernels: the decision's text, which is the last argument of leaf ops. For a helper that
    launches kernels, its name; "" if it launches none."""
    if op in NOTING and op not in BODIES:
        return op
    last = arguments[-1] if arguments else ""
    return last if isinstance(last, str) else ""


def register_helper(
    name: str,
    schema: str,
    *,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    on_gpu: Callable[..., Any] | None = None,
    notes: bool = False,
    differentiated: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    exact_strides: bool = False,
    plain: Any = None,
) -> None:
    """Define an op that makes operands of leaf ops, on any device.

    function: runs on fake tensors, too, unless there is a `fake`, and on a GPU, unless there is an `on_gpu`. notes: the launches of the GPU
    function can be noted. differentiated: the save function and the formula of autograd (torch.library.register_autograd). plain: compiled
    code calls it instead.

    For values that every site of a graph reads: Inductor would recompute them for each, since it fuses pointwise ops into a separate copy
    before every op unknown to it.
    """
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    tag = torch.Tag.needs_exact_strides if exact_strides else torch.Tag.flexible_layout
    LIBRARY.define(name + schema, tags=(tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if on_gpu is not None:
        LIBRARY.impl(name, on_gpu, "CUDA")
    if notes:
        NOTING[name] = on_gpu or function
    if plain is not None:
        PLAIN[name] = plain
    register_fake(name, function if fake is None else fake)
    if differentiated is not None:
        setup_context, backward = differentiated
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)
