"""Caches of keys and values of earlier calls, which are refused: each rank would fill one with its own positions."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.context_parallel import following
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site

_ATEN = torch.ops.aten
#: ops by which caches add new keys to those that they hold, which are the first argument
_TAKE_IN = frozenset(
    {
        _ATEN.cat.default,
        _ATEN.copy_.default,
        _ATEN.index_copy.default,
        _ATEN.index_copy_.default,
        _ATEN.index_put.default,
        _ATEN.index_put_.default,
        _ATEN.slice_scatter.default,
    }
)

#: axes of keys: batch, heads, positions, width
_OF_HEADS = 4


def check_uncached(mirror: Mirror, site: Site, replicated: tuple[str, ...]) -> None:
    """Raise CannotShard if a site's keys are kept in a cache. replicated: inputs that every rank has as a whole."""
    name = _behind(mirror, site.match.k.node, replicated)
    if name is not None:
        raise CannotShard(
            "attention reads keys of this call alone: a cache would hold this rank's positions of earlier calls, and not those of others",
            f"keys that are kept in {name}",
            at=site.match.out,
            remedy="call the model with use_cache=False; to decode, give every rank the whole prompt, and past_key_values="
            "ShardedCache(...) of attn_compiler.integrations.transformers_cache",
        )


def _behind(mirror: Mirror, node: fx.Node, replicated: tuple[str, ...]) -> str | None:
    """Return the name of the tensor that holds earlier keys, if a node is a view or a copy of it and of new keys."""
    chain = [node]
    while len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    for one in chain:
        for taking in (one, *mirror.writers_into(one).nodes):
            name = _taken_into(mirror, taking, replicated)
            if name is not None:
                return name
    return None


def _taken_into(mirror: Mirror, node: fx.Node, replicated: tuple[str, ...]) -> str | None:
    if node.target not in _TAKE_IN:
        return None
    held = node.args[0]
    if node.target is _ATEN.index_copy_.default and isinstance(held, fx.Node) and not held.all_input_nodes:
        # The first call makes the cache that later calls are given.
        is_made = held.op == "call_function" and held.meta["val"].dim() == _OF_HEADS
        dynamo = mirror.dynamo_node(held) if is_made else None
        if dynamo is not None:
            return dynamo.name
    names = (_input(mirror, one, replicated) for one in (held if isinstance(held, (list, tuple)) else (held,)))
    return next((name for name in names if name is not None), None)


def _input(mirror: Mirror, node: object, replicated: tuple[str, ...]) -> str | None:
    """Return the name of the input of (batch, heads, positions, width) that a node is, or is a view of."""
    if not isinstance(node, fx.Node):
        return None
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    value, dynamo = node.meta.get("val"), mirror.dynamo_node(node)
    if node.op != "placeholder" or dynamo is None or not isinstance(value, torch.Tensor):
        return None
    is_of_heads = value.dim() == _OF_HEADS and value.is_floating_point()
    is_known = following.is_state(dynamo) or following.is_named(dynamo, replicated)
    return dynamo.name if is_of_heads and not is_known else None
