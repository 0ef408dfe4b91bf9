"""Products of two tensors in a Dynamo graph, and their sums: `a @ b`, bmm, and an einsum over named axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.calls import is_pytorchs, target_name

_MATMULS = frozenset({"matmul", "__matmul__", "bmm"})
_SUMS = frozenset({"add", "iadd", "add_"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """left · right, with the axes named by `equation`; None for a product of matrices.

    All axes are counted from the last. free: the axis of the right tensor that is the last of the result. summed: the right tensor's axis
    summed over the last of the left one. left_summed: the axis of the left tensor that is summed over. None: there is none.
    """

    node: fx.Node
    left: fx.Node
    right: fx.Node
    equation: str | None = None
    free: int | None = -1
    summed: int | None = -2
    left_summed: int | None = -1

    def of(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Compute the same product of other tensors."""
        return left @ right if self.equation is None else torch.einsum(self.equation, left, right)


def read(node: object) -> Product | None:
    """Return the product that a node computes; None if it computes none, or in an unsupported form."""
    if not isinstance(node, fx.Node) or node.kwargs or not is_pytorchs(node):
        return None
    name, args = target_name(node), node.args
    if name in _MATMULS and len(args) == 2:
        equation, (left, right) = None, args
    elif name == "einsum" and len(args) == 3 and isinstance(args[0], str):
        equation, left, right = args
    else:
        return None
    if not _is_matrix(left) or not _is_matrix(right) or left is right:
        return None
    product = Product(node=node, left=left, right=right)  # type: ignore[arg-type]
    return product if equation is None else _named(product, str(equation).replace(" ", ""))


def _named(product: Product, equation: str) -> Product | None:
    terms, arrow, out = equation.partition("->")
    left, comma, right = terms.partition(",")
    letters = (left, right, out)
    if not arrow or not comma or any(not x.isalpha() or len(set(x)) != len(x) for x in letters):
        return None
    summed = [x for x in left if x in right and x not in out]
    if len(summed) != 1 or set(left + right) - set(summed) != set(out):
        return None
    return Product(
        node=product.node,
        left=product.left,
        right=product.right,
        equation=equation,
        free=right.index(out[-1]) - len(right) if out[-1] in right and out[-1] not in left else None,
        summed=right.index(left[-1]) - len(right) if left[-1] == summed[0] else None,
        left_summed=left.index(summed[0]) - len(left),
    )


def _is_matrix(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() >= 2


def summed_up(nodes: Sequence[fx.Node]) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return (the sum of all nodes, the partial sums in it). Each partial sum has only the next one as its reader."""
    waiting = set(nodes)
    sums: list[fx.Node] = []
    while len(waiting) > 1:
        one = next(
            (
                user
                for node in waiting
                for user in node.users
                if _is_sum(user) and len(user.args) == 2 and not user.kwargs and waiting.issuperset(user.args)
            ),
            None,
        )
        if one is None or one.args[0] is one.args[1] or any(len(x.users) != 1 for x in one.all_input_nodes):
            return None, []
        waiting -= set(one.all_input_nodes)
        waiting.add(one)
        sums.append(one)
    return sums[-1], sums[:-1]


def _is_sum(node: fx.Node) -> bool:
    return target_name(node) in _SUMS and is_pytorchs(node)
