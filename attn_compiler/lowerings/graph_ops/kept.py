"""Attention outputs that a checkpoint keeps, so that the forward runs once a step (`options={"checkpoint": "keep_attention"}`).

A checkpoint marks the nodes inside it for recomputation in the backward. PyTorch partitions the traced graph by those marks, which are the
same in all its versions (`torch_private/marks.py`). The backward of an attention reads its output and its lse, and both are small.
"""

from __future__ import annotations

import operator

from torch import fx

from attn_compiler.lowerings.base import GIVEN
from attn_compiler.torch_private import marks
from attn_compiler.torch_private.op_library import NAMESPACE

#: prefix of the names of PyTorch's attention kernels
_ATEN = "_scaled_dot_product_"
_BACKWARD = "_backward"
#: names of a leaf op's outputs (ops.LEAF_SCHEMA)
_OUTPUTS = ["out", "lse"]


def keep_attention(graph: fx.Graph) -> None:
    """Mark the outputs of attentions as saved, so that the backward reads them instead of recomputing.

    graph: of the forward and the backward, before they are partitioned. A decision of a checkpoint's own policy on an attention stays.
    """
    for node in graph.nodes:
        if is_attention(node) and marks.is_left_to_partitioner(node):
            for kept in (node, *(user for user in node.users if user.target is operator.getitem)):
                marks.must_save(kept)


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is the forward of an attention: a leaf op's, or that of one of PyTorch's kernels."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    if namespace == "aten":
        return name.startswith(_ATEN) and not name.endswith(_BACKWARD)
    is_leaf = namespace == NAMESPACE and [output.name for output in schema.returns] == _OUTPUTS
    return is_leaf and not name.endswith(GIVEN)
