"""Check that the blocks of each FlexAttention call are those of its mask_mod, by comparing their expressions."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.spelling import Blocks, Spelling
from attn_compiler.passes.graph.unit import Unit, module_path
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.passes.spelling.flex_blocks import REMEDY, RULE
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import symbols as torch_symbols


def checked(unit: Unit, mirror: Mirror, spelling: Spelling, readers: Readers) -> Spelling:
    """Return the spelling without the calls whose blocks may differ from their mask_mod."""
    left: dict[fx.Node, Reason] = {}
    for one in spelling.calls:
        if one.blocks is None or one.allowed is None:
            continue
        reason: Reason | None = None
        with faults.confined(unit.log, "match", module_path(one.call)) as attempt:
            reason = differs(one.blocks, one.allowed, mirror, readers.of(unit))
        reason = attempt.reason or reason
        if reason is not None:
            left[one.call] = reason
    return spelling.leaving(left)


def differs(blocks: Blocks, allowed: fx.Node, mirror: Mirror, reader: Reader) -> Reason | None:
    """Return why the blocks may differ from mask_mod; None if they are equal. allowed: mask_mod of every score, a Dynamo node."""
    if blocks.dense is None:
        return None
    dense, mod = (_in_mirror(mirror, node) for node in (blocks.dense, allowed))
    if dense is None or mod is None:
        return _reason(f"{blocks.dense.name} can't be looked into")
    try:
        of_blocks, of_mod = _element(reader, dense, blocks.dense), _element(reader, mod, allowed)
    except Unreadable as unreadable:
        return _reason(str(unreadable))
    if of_blocks != of_mod:
        return _reason(f"its blocks are those of {ix.text(of_blocks)}, its mask_mod is {ix.text(of_mod)}")
    return None


def _reason(observed: str) -> Reason:
    return Reason(code=Code.FLEX_BLOCK_MASK, rule=RULE, observed=observed, remedy=REMEDY)


def _element(reader: Reader, node: fx.Node, dynamo: fx.Node) -> Expr:
    """Return the element at (b, h, q, k), with index 0 along axes of size one."""
    value: torch.Tensor = dynamo.meta["example_value"]
    at = tuple(
        Const(0) if torch_symbols.statically_known(size == 1) else Index(name)
        for name, size in zip("bhqk", value.shape, strict=True)
    )
    return reader.read_at(len(reader.mirror.graph.nodes), node, at)


def _in_mirror(mirror: Mirror, dynamo: fx.Node) -> fx.Node | None:
    return next((node for node in mirror.owned(dynamo) if mirror.dynamo_node(node) is dynamo), None)
