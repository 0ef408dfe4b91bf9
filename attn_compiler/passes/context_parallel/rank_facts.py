"""A rank's facts for the ranks that share its sequence: its options, which have to be the same, and the properties of its call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.options.options import Options
from attn_compiler.passes.context_parallel.following import is_state
from attn_compiler.passes.graph import closed
from attn_compiler.torch_private import frames as torch_frames

#: options that change neither code nor what ranks exchange
_OWN = frozenset({"strict", "dump_dir", "check_invariants", "cache_rewrites"})


def option_facts(options: Options) -> list[str]:
    """Return a line for each option that all ranks have to set alike."""
    found = []
    for name in (field.name for field in dataclasses.fields(options) if field.name not in _OWN):
        value = getattr(options, name)
        found += _of_description(value) if isinstance(value, ContextParallel) else [f"{name}: {value!r}"]
    return found


def _of_description(cp: ContextParallel) -> list[str]:
    order = "head_tail" if cp.is_balanced else None
    alike = {"replicated": sorted(set(cp.replicated)), "allow": sorted(set(cp.allow))}
    given = {"method": cp.method, "load_balance": order, **alike, "packed": cp.packed, "gather_limit": cp.gather_limit}
    return [f"{name}: {value!r}" for name, value in given.items()]


def call_facts(graph: fx.Graph) -> list[str]:
    """Return a line for each property that tells this call from others of the graph, and why it was compiled if there was other code."""
    found = [f"with gradients: {torch.is_grad_enabled()}", *_of_inputs(graph)]
    why = torch_frames.recompilation_reason()
    return found if why is None else [*found, f"the code that was there did not serve: {why}"]


def _of_inputs(graph: fx.Graph) -> Iterator[str]:
    for node in graph.find_nodes(op="placeholder"):
        x = node.meta.get("example_value")
        if is_state(node) or not isinstance(x, torch.Tensor):
            continue
        if closed.holds_closed(x):
            yield f"{node.name}: {type(x).__name__} {tuple(x.shape)}"
            continue
        gradient = ", requires a gradient" if x.requires_grad else ""
        yield f"{node.name}: {x.dtype} {tuple(x.shape)}, strides {x.stride()}{gradient}"
