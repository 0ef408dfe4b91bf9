"""Packed sequences: what a running count of the places where positions jump says of a mask.

transformers numbers the documents of a batch by such a count. Within a document positions go up by one, so two of them are as far apart as
their tokens: what compares positions is a causal mask or a window. Where the positions are an arange, they never jump, all tokens have one
number, and the comparison of numbers is not in the mask any more. That deserves a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.index_expr.building import rebuilt_of
from attn_compiler.passes.graph.site import Term
from attn_compiler.passes.recovering import kinds
from attn_compiler.passes.recovering.kinds import K, Q
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.spec.masks import Document

aten = torch.ops.aten

#: of a document, its first token's position less its first place: any number
_ORIGIN = Load("origin of a document", (), "int")


def by_places(condition: Expr, reader: Reader) -> Expr:
    """A condition with positions of a document's tokens as their places, where all that counts is how far apart they are."""
    parts = kinds.conjuncts(condition)
    for part in parts:
        kind = kinds.document(part)
        position = None if kind is None else _counted(kind, reader)
        if position is not None:
            parts = tuple(_placed(one, position) for one in parts)
    return ix.apply("and", *parts)


def _counted(kind: Document, reader: Reader) -> Load | None:
    """The position of key k, where documents are numbered by a count of the places where positions do not go up by one."""
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
        jumps = _settled(reader.read_at(reader.mirror.order(node), source, (*of_key.at[:-1], ix.add(K, ix.ONE))))
    except Unreadable:
        return None
    # A count of truth values never goes down, so equal numbers have no jump in between.
    jumps = ix.as_bool(jumps) if ix.is_truth(jumps) else jumps
    for after in ix.loads(jumps):
        before = ix.substitute(after, K, ix.add(K, Const(-1)))
        if isinstance(before, Load) and ix.compare("!=", ix.add(after, before, -1), ix.ONE) == jumps:
            return before
    return None


def _settled(x: Expr) -> Expr:
    """An expression with every comparison in it settled that holds, or fails, for all keys."""
    done: dict[Expr, Expr] = {}
    for part in ix.ordered(x):
        done[part] = ix.decide(rebuilt_of(part, done), {})
    return done[x]


def _placed(part: Expr, position: Load) -> Expr:
    """A condition with k and q for their positions, if it is the same wherever a document begins."""
    placed = part
    for at in (K, Q):
        placed = ix.substitute(placed, ix.substitute(position, K, at), ix.add(at, _ORIGIN))
    return part if _ORIGIN in set(ix.loads(placed)) else placed


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
