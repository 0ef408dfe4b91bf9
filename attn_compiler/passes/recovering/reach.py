"""Tensors and symbolic sizes of proved kinds that a lowering can read at the kernel: those that have a Dynamo node.

A mask may be read through the inside of one call, whose tensors are out of reach. A tensor's value before a write is in reach, as a copy.
So is a tensor of the graph that calls this one, as an extra input, if this graph can have one (body_inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch._subclasses import FakeTensor

from attn_compiler.lowerings.base import SizeOf
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.emit import GraphBuilder, copied_before, example
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering import body_inputs
from attn_compiler.spec import reads
from attn_compiler.spec.added_scores import Bias, ProvedScore
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import MaskKind
from attn_compiler.torch_private import symbols as torch_symbols

Kinds = Iterable[MaskKind | ProvedScore | Chosen]


def missing(unit: Unit, mirror: Mirror, match: Match, loads: Mapping[str, Version], kinds: Kinds) -> tuple[str, ...]:
    """Return the names of tensors and sizes that the kinds read but a lowering can't get. loads: the tensor behind each name."""
    kinds = _evaluated(kinds)
    tensors = {name for kind in kinds for name in reads.tensors(kind)}
    lost = {name for name in tensors if name not in loads or not _is_at_hand(unit, mirror, match, loads[name])}
    wanted = {name for kind in kinds for name in reads.sizes(kind)}
    return tuple(sorted(lost | (wanted - sizes(mirror, match, kinds).keys())))


def tensors(
    builder: GraphBuilder, loads: Mapping[str, Version], kinds: Kinds, lost: Iterable[str]
) -> dict[str, fx.Node]:
    """Return the Dynamo node behind each name that the kinds load from. lost: the result of `missing`."""
    found = {name for kind in _evaluated(kinds) for name in reads.tensors(kind)} - set(lost)
    return {name: builder.loaded(loads[name], name) for name in sorted(found)}


def sizes(mirror: Mirror, match: Match, kinds: Kinds) -> dict[str, SizeOf]:
    """Map each symbolic size in the kinds to the first graph input that has it. Sizes that no input has are left out."""
    wanted = {name for kind in _evaluated(kinds) for name in reads.sizes(kind)}
    out = mirror.dynamo_node(match.out)
    found: dict[str, SizeOf] = {}
    for node in out.graph.find_nodes(op="placeholder") if wanted and out is not None else ():
        for name, axis in _named(node.meta.get("example_value")):
            if name in wanted:
                found.setdefault(name, SizeOf(node=node, axis=axis))
    return found


def _evaluated(kinds: Kinds) -> tuple[MaskKind | ProvedScore | Chosen, ...]:
    """Return the kinds that a lowering may recompute. A Bias is not one: its tensor is an operand of the site anyway."""
    return tuple(kind for kind in kinds if not isinstance(kind, Bias))


def _named(value: object) -> Iterable[tuple[str, int | None]]:
    if isinstance(value, torch.SymInt):
        return [(str(torch_symbols.dim_of(value)), None)]
    if not isinstance(value, FakeTensor):
        return []
    return [(str(torch_symbols.dim_of(size)), axis) for axis, size in enumerate(value.shape)]


def _is_at_hand(unit: Unit, mirror: Mirror, match: Match, version: Version) -> bool:
    try:
        value = _at_hand(unit, mirror, match, version)
    except AxisError:
        return False
    if not isinstance(value, FakeTensor) or axes.shape_exprs(value) != axes.shape_exprs(version.node.meta["val"]):
        return False
    return bool(value.device == example(mirror, match.out).device)


def _at_hand(unit: Unit, mirror: Mirror, match: Match, version: Version) -> object:
    """Return the fake value of a tensor. Raises AxisError if the site can't read it."""
    if version.node.graph is not mirror.graph:
        return body_inputs.of_caller(unit, version).meta["example_value"]
    copied_before(mirror, version, match.out)
    return example(mirror, version.node)
