"""Packed sequences that the graph looks for and surely doesn't have: what was left out of a mask, and why.

transformers numbers the documents of a batch by a running count of where its positions jump. Where the positions are an arange,
they never do, all tokens have one number, and the comparison of numbers is not in the mask any more. That deserves a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.passes.graph.site import Term
from attn_compiler.passes.recovering.reading import Reader, Unreadable

aten = torch.ops.aten


def notes(terms: Iterable[Term], reader: Reader, words: str) -> tuple[str, ...]:
    """One line for each count of documents in the making of these masks that is the same for all tokens. words: what is left."""
    counts = {n for term in terms for n in _made_from(term.operand.node) if n.target is aten.cumsum.default}
    lines = {
        f"document(cumsum…) ⇒ {words}, because {_name(reader, positions)} is arange": None
        for count in sorted(counts, key=lambda n: n.name)
        for positions in _made_from(count)
        if _is_one_number(count, reader)
        and _is_compared_with_its_neighbour(positions)
        and _is_arange(positions, reader)
    }
    return tuple(lines)


def _made_from(node: fx.Node) -> Iterator[fx.Node]:
    """The node and all that it is made from, in this graph."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        yield current
        new = [n for n in current.all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new


def _is_one_number(count: fx.Node, reader: Reader) -> bool:
    return isinstance(_element(count, reader), Const)


def _is_compared_with_its_neighbour(positions: fx.Node) -> bool:
    return any(user.target is aten.diff.default and user.args[0] is positions for user in positions.users)


def _is_arange(positions: fx.Node, reader: Reader) -> bool:
    """Whether an element is its own place along the last axis, plus something that is the same for all of them."""
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
    """The model's name for it, without the number that tells equal layers apart."""
    dynamo = reader.mirror.dynamo_node(node)
    return re.sub(r"_\d+$", "", node.name if dynamo is None else dynamo.name)
