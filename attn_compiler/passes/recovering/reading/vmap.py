"""Rules that read through vmap: an element of its result is the example's, with the mapped index for the bound variable.

Inside a plain vmap every op works on one example, and the mirror has the example's shapes. So only the calls
that hide and restore an axis need a rule. All other transforms of functorch stay unread.
"""

from __future__ import annotations

from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index
from attn_compiler.passes.graph.mirror import opaque
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, Unreadable
from attn_compiler.passes.recovering.reading.nodes import fake


def _axis(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    axis = reader.mirror.vmap_axes.get(node)
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if axis is None or not axis.is_plain or source is None:
        return None
    larger, smaller = (source, node) if axis.added else (node, source)
    if fake(larger).dim() != fake(smaller).dim() + 1:
        return None
    dim, variable = axis.dim % fake(larger).dim(), Index(f"v{axis.region}")
    if axis.added:
        return reader.read(source, (*at[:dim], variable, *at[dim:]))
    try:
        element = reader.read(source, (*at[:dim], *at[dim + 1 :]))
    except Unreadable:
        if reader.varies(node):
            raise
        return None
    return ix.substitute(element, variable, at[dim])


READERS: dict[object, ReadOp] = {opaque: _axis}
