"""Checkpoint marks on the nodes of a traced graph: recompute or save for the backward.

The partitioner of forward and backward reads them: the same key and the same values in torch 2.11 to 2.15, for checkpoints with and without
a policy of the user.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_MARK = "recompute"
#: Dynamo's key of the context_fn of `torch.utils.checkpoint.checkpoint(context_fn=...)`
_POLICY = "_checkpoint_context_fn"


def has_policy(body: fx.GraphModule) -> bool:
    """Return True if a user's policy decides, op by op, what the body of a checkpoint recomputes."""
    return _POLICY in body.meta


def is_left_to_partitioner(node: fx.Node) -> bool:
    """Return True if a checkpoint's policy prefers to recompute a node, and lets the partitioner decide otherwise."""
    return node.meta.get(_MARK) is CheckpointPolicy.PREFER_RECOMPUTE


def must_save(node: fx.Node) -> None:
    """Save a node's value for the backward, if that reads it."""
    node.meta[_MARK] = CheckpointPolicy.MUST_SAVE
