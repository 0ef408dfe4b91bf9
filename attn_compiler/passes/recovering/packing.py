"""Masks of packed sequences, whose documents are numbered by a running count of the places where positions jump.

transformers numbers the documents of a batch by such a count. Within a document positions go up by one, so they are as far apart as their
tokens: a comparison of positions is a causal mask or a window. Positions that are an arange never jump. All tokens then have one document
number, and its comparison drops out of the mask. A note reports that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.index_expr.changing import throughout
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.site import Term
from attn_compiler.passes.recovering import kinds
from attn_compiler.passes.recovering.kinds import K, Q
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.spec.masks import Document

aten = torch.ops.aten

#: the position of a document's first token minus the index of that token: any number
_ORIGIN = Load("origin of a document", (), "int")


def by_places(condition: Expr, reader: Reader) -> Expr:
    """Replace positions within a document by token indices, in parts that depend only on how far apart they are."""
    parts = kinds.conjuncts(condition)
    for part in parts:
        kind = kinds.document(part)
        position = None if kind is None else _counted(kind, reader)
        if position is not None:
            parts = tuple(_placed(one, position) for one in parts)
    return ix.apply("and", *parts)


def _counted(kind: Document, reader: Reader) -> Load | None:
    """Return the position of key k, if a key's document is the number of earlier places where positions do not go up by one; else None."""
    of_key = kind.of_key
    if not isinstance(of_key, Load) or of_key.at[-1:] != (K,) or of_key.tensor not in reader.tensors:
        return None
    version = reader.tensors[of_key.tensor]
    node = version.node
    if version.since not in (None, node) or node.graph is not reader.mirror.graph:
        return None
    if node.target is not aten.cumsum.default or node.args[1] not in (-1, len(of_key.at) - 1):
        return None
    (source,) = node.all_input_nodes
    try:
        jumps = reader.read_at(reader.mirror.order(node), source, (*of_key.at[:-1], ix.add(K, ix.ONE)))
    except Unreadable:
        return None
    # Comparisons that hold, or fail, for all keys drop out.
    jumps = throughout(jumps, lambda part: ix.decide(part, {}))
    # A count of truth values never goes down, so equal numbers have no jump in between.
    jumps = ix.as_bool(jumps) if ix.is_truth(jumps) else jumps
    for after in ix.loads(jumps):
        before = ix.substitute(after, K, ix.add(K, Const(-1)))
        if isinstance(before, Load) and ix.compare("!=", ix.add(after, before, -1), ix.ONE) == jumps:
            return before
    return None


def _placed(part: Expr, position: Load) -> Expr:
    """Replace positions by k and q, if the condition is the same wherever a document begins."""
    placed = part
    for at in (K, Q):
        placed = ix.substitute(placed, ix.substitute(position, K, at), ix.add(at, _ORIGIN))
    return part if _ORIGIN in set(ix.loads(placed)) else placed


def notes(terms: Iterable[Term], reader: Reader, words: str) -> tuple[str, ...]:
    """Return a line for each document count behind these masks that is the same for all tokens. words: the remaining mask."""
    counts = {n for term in terms for n in reached([term.operand.node]) if n.target is aten.cumsum.default}
    lines = {
        f"document(cumsum…) ⇒ {words}, because {_name(reader, positions)} is arange": None
        for count in sorted(counts, key=lambda n: n.name)
        for positions in reached([count])
        if isinstance(_element(count, reader), Const)
        and any(user.target is aten.diff.default and user.args[0] is positions for user in positions.users)
        and _is_arange(positions, reader)
    }
    return tuple(lines)


def _is_arange(positions: fx.Node, reader: Reader) -> bool:
    """True if an element is its index along the last axis, plus a term that is the same for all of them."""
    element = _element(positions, reader)
    if element is None or ix.kind_of(element) != "int":
        return False
    return not ix.mentions(ix.add(element, Index("k"), -1), Index("k"))


def _element(node: fx.Node, reader: Reader) -> Expr | None:
    rank = node.meta["val"].dim()
    at = (*(Index(f"i{axis}") for axis in range(rank - 1)), Index("k"))[-rank:] if rank else ()
    try:
        return reader.read(node, at)
    except Unreadable:
        return None


def _name(reader: Reader, node: fx.Node) -> str:
    """Return the model's name of a node, without the number that distinguishes equal layers."""
    dynamo = reader.mirror.dynamo_node(node)
    return re.sub(r"_\d+$", "", node.name if dynamo is None else dynamo.name)
