"""The marks by which a checkpoint says what the backward computes once more, on the nodes of a traced graph.

They are read by what parts the forward from the backward: the same key and the same values in torch 2.11 to 2.15, on what is traced in a
checkpoint with a policy of its own and without one.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_MARK = "recompute"
#: where Dynamo puts what makes the two contexts of `torch.utils.checkpoint.checkpoint(context_fn=...)`
_POLICY = "_checkpoint_context_fn"


def has_policy(body: fx.GraphModule) -> bool:
    """Whether a user's policy decides, op by op, what is computed again in the body of a checkpoint."""
    return _POLICY in body.meta


def is_left_to_partitioner(node: fx.Node) -> bool:
    """Whether a node is made in a checkpoint whose policy would rather compute it again, and leaves it to others to decide otherwise."""
    return node.meta.get(_MARK) is CheckpointPolicy.PREFER_RECOMPUTE


def must_save(node: fx.Node) -> None:
    """Have what a node gives saved for the backward, where that reads it."""
    node.meta[_MARK] = CheckpointPolicy.MUST_SAVE
