from __future__ import annotations

import sympy
from torch import fx

from attn_compiler.passes.graph.axes import Atom
from attn_compiler.passes.graph.site import Operand, Refused, Term
from attn_compiler.reasons.codes import Code


def _operand(*own: Atom, reads: dict[Atom, Atom]) -> Operand:
    node = fx.Graph().placeholder("x")
    return Operand(node=node, used=node, dims=(), root=node, root_dims=tuple((atom,) for atom in own), reads=reads)


def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


def test_an_operand_varies_along_what_it_has_an_axis_for() -> None:
    heads, keys, repeated, own_heads, own_keys = map(_atom, (4, 6, 2, 4, 6))
    operand = _operand(own_heads, own_keys, reads={heads: own_heads, keys: own_keys})
    assert operand.varies_along(heads)
    assert operand.varies_along(keys)
    assert not operand.varies_along(repeated)


def test_an_axis_that_was_read_above_is_none_of_the_operands() -> None:
    """A head axis that was repeated into being: the root has no atom for it."""
    heads, gone = _atom(4), _atom(4)
    assert not _operand(_atom(6), reads={heads: gone}).varies_along(heads)


def test_an_axis_that_was_split_is_known_by_its_parts() -> None:
    whole = _atom(6)
    operand = _operand(whole, reads={})
    whole.split(sympy.Integer(2))
    assert whole.parts is not None
    inner, site = whole.parts[1], _atom(3)
    operand.reads[site] = inner
    assert operand.varies_along(site)


def test_a_term_may_depend_on_everything_until_it_is_proved_not_to() -> None:
    assert Term(operand=_operand(reads={})).along == "bhqk"


def test_a_refusal_says_why_and_where() -> None:
    node = fx.Graph().placeholder("x")
    refused = Refused(
        code=Code.SOFTMAX_AXIS,
        rule="the softmax is over the keys",
        observed="the queries",
        at=node,
        progress=2,
        remedy="none",
    )
    assert (refused.reason.rule, refused.reason.observed) == ("the softmax is over the keys", "the queries")
    assert refused.at is node
