"""Tensors made for one attention alone, which reads them through views and writes into fresh memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match


def made_for(mirror: Mirror, match: Match, first: Iterable[fx.Node]) -> frozenset[fx.Node] | None:
    """Return the Dynamo nodes that depend on these mirror nodes and that only the site needs. None: something else needs one of them.

    Writers into memory that was made in between, and all nodes that share it, are among them. first: nodes that only make new tensors.
    """
    site = {mirror.owner(node) for node in (*match.covered, match.out)}
    own = {owner for node in first if (owner := mirror.owner(node)) is not None}
    found: set[fx.Node] = set()

    def further(node: fx.Node) -> list[fx.Node]:
        written = (mutation.storages(memory) for writer in mirror.owned(node) for memory in mutation.writes(writer))
        return [x for x in (*node.users, *_holders(mirror, set().union(*written))) if x not in site]

    for node in reached(own - site, further):
        if node.op not in ("call_function", "call_method") or not (node in own or _is_plain(mirror, node)):
            return None
        found.add(node)
    return frozenset(found)


def _is_plain(mirror: Mirror, node: fx.Node) -> bool:
    """Return whether a node consists of ops that are fully understood."""
    return all(isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem for n in mirror.owned(node))


def _holders(mirror: Mirror, memory: set[StorageWeakRef]) -> list[fx.Node]:
    if not memory:
        return []
    owners = (mirror.owner(node) for node in mirror.graph.nodes if mutation.storages(node) & memory)
    return [owner for owner in dict.fromkeys(owners) if owner is not None]
