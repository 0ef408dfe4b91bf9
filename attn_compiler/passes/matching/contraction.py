"""One form for matmul, bmm, baddbmm, addmm, einsum and tensordot: a product of two tensors with a label on every axis.

A label of both operands is a batch axis if the output has it, and a contracted axis if not. Any other label is a free axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import constants
from attn_compiler.passes.graph.views import argument, value

aten = torch.ops.aten
Labels = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """out = beta · addend + alpha · (lhs · rhs). A batch axis of size one broadcasts, as in matmul."""

    node: fx.Node
    lhs: fx.Node
    rhs: fx.Node
    lhs_labels: Labels
    rhs_labels: Labels
    out_labels: Labels
    addend: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def contracted(self) -> Labels:
        return tuple(x for x in self.lhs_labels if x in self.rhs_labels and x not in self.out_labels)

    @property
    def batch(self) -> Labels:
        return tuple(x for x in self.out_labels if x in self.lhs_labels and x in self.rhs_labels)

    @property
    def lhs_free(self) -> Labels:
        return tuple(x for x in self.out_labels if x not in self.rhs_labels)

    @property
    def rhs_free(self) -> Labels:
        return tuple(x for x in self.out_labels if x not in self.lhs_labels)


def parse(node: fx.Node) -> Contraction | None:
    """Return the contraction that this node computes, or None.

    None: no product, not of two tensors, an axis used twice in one operand, or an axis summed without the other operand.
    """
    reader = _READERS.get(node.target)
    return None if reader is None else reader(node)


def _product(node: fx.Node) -> Contraction | None:
    lhs, rhs = node.args[0], node.args[1]
    if not isinstance(lhs, fx.Node) or not isinstance(rhs, fx.Node):
        return None
    return _matmul(node, lhs, rhs)


def _matmul(node: fx.Node, lhs: fx.Node, rhs: fx.Node) -> Contraction | None:
    left, right = value(lhs).dim(), value(rhs).dim()
    if left < 2 or right < 2:
        return None
    rank = max(left, right)
    batch = tuple(range(rank - 2))
    m, n, d = rank, rank + 1, rank + 2
    return Contraction(
        node=node,
        lhs=lhs,
        rhs=rhs,
        lhs_labels=(*batch[rank - left :], m, d),
        rhs_labels=(*batch[rank - right :], d, n),
        out_labels=(*batch, m, n),
    )


def _with_addend(node: fx.Node) -> Contraction | None:
    addend, lhs, rhs = node.args[:3]
    if not (isinstance(addend, fx.Node) and isinstance(lhs, fx.Node) and isinstance(rhs, fx.Node)):
        return None
    plain = _matmul(node, lhs, rhs)
    alpha, beta = (_number(argument(node, name)) for name in ("alpha", "beta"))
    if plain is None or alpha is None or beta is None:
        return None
    return replace(plain, addend=addend if beta != 0 else None, alpha=alpha, beta=beta)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else constants.fixed(value)


def _einsum(node: fx.Node) -> Contraction | None:
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)) or len(operands) != 2:
        return None
    lhs, rhs = operands
    if not isinstance(lhs, fx.Node) or not isinstance(rhs, fx.Node):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    output = output if arrow else _implicit_output(inputs)
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    ranks = [value(lhs).dim(), value(rhs).dim()]
    dots = max(
        (rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True) if "..." in t), default=0
    )
    left, right = (_labels(t, rank - len(t.replace("...", "")), dots) for t, rank in zip(terms, ranks, strict=True))
    out = _labels(output, dots, dots)
    if any(len(set(labels)) != len(labels) for labels in (left, right, out)):
        return None
    if (set(left) ^ set(right)) - set(out):
        return None
    return Contraction(node=node, lhs=lhs, rhs=rhs, lhs_labels=left, rhs_labels=right, out_labels=out)


def _implicit_output(inputs: str) -> str:
    """Return einsum's default output: the axes of the ellipsis, then every letter that occurs once, sorted."""
    letters = [c for c in inputs if c.isalpha()]
    once = sorted(c for c in set(letters) if letters.count(c) == 1)
    return "".join(["..." if "..." in inputs else "", *once])


def _tensordot(node: fx.Node) -> Contraction | None:
    lhs, rhs, of_lhs, of_rhs = node.args[:4]
    if not isinstance(lhs, fx.Node) or not isinstance(rhs, fx.Node):
        return None
    if not isinstance(of_lhs, (list, tuple)) or not isinstance(of_rhs, (list, tuple)):
        return None
    left, right = value(lhs).dim(), value(rhs).dim()
    lhs_labels, rhs_labels = list(range(left)), list(range(left, left + right))
    for i, j in zip(of_lhs, of_rhs, strict=True):
        rhs_labels[int(j) % right] = int(i) % left
    out = [x for x in lhs_labels if x not in rhs_labels] + [x for x in rhs_labels if x not in lhs_labels]
    return Contraction(
        node=node, lhs=lhs, rhs=rhs, lhs_labels=tuple(lhs_labels), rhs_labels=tuple(rhs_labels), out_labels=tuple(out)
    )


def _labels(term: str, own_dots: int, all_dots: int) -> Labels:
    """Labels of one einsum term. Axes of an ellipsis are numbered from the right, so they align as in matmul."""
    before, ellipsis, after = term.partition("...")
    dots = tuple(range(all_dots - own_dots, all_dots)) if ellipsis else ()
    return (*(all_dots + ord(c) for c in before), *dots, *(all_dots + ord(c) for c in after))


_READERS: dict[object, Callable[[fx.Node], Contraction | None]] = {
    **dict.fromkeys((aten.matmul.default, aten.bmm.default, aten.mm.default), _product),
    **dict.fromkeys((aten.baddbmm.default, aten.addmm.default), _with_addend),
    aten.einsum.default: _einsum,
    aten.tensordot.default: _tensordot,
}
