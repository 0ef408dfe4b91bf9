"""Fallback if this package can't be imported with a torch newer than the tried ones: Inductor alone, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.reasons.errors import AttnCompilerWarning, described
from attn_compiler.spec.tried import not_tried


def or_raise(error: ImportError | AttributeError) -> Callable[..., Callable[..., Any]]:
    """Return a backend without us, and warn why. Raises the error if the installed torch was tried."""
    said = not_tried("torch", str(torch.__version__))
    if said is None:
        raise error
    lacks = f"{said}, and it lacks something that this version needs ({described(error)})"
    warnings.warn(f"{lacks}: models are compiled by Inductor alone", AttnCompilerWarning, stacklevel=2)
    return compiled_by_inductor


def compiled_by_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Callable[..., Any]:
    """Compile as a backend that takes Inductor's options only."""
    known = torch._inductor.list_options()
    given = {name: value for name, value in (options or {}).items() if name in known}
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **given}
    compiled: Callable[..., Any] = torch._inductor.compile(gm, list(example_inputs), options=patches)
    return compiled
