"""Whether two mirrors of one Dynamo graph are the same graph, and the mirror that is traced node by node without making anything again.

Which node gives a symbolic number goes by who was first to ask. So such nodes are no part of a mirror here, and where one is an argument it
is the number's expression that counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import mirror as mirror_module
from attn_compiler.passes.graph.fragments import Fragments
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.torch_private import tracing as torch_tracing


def plain(graph_module: fx.GraphModule, skipped: frozenset[fx.Node] = frozenset()) -> Mirror:
    """As `mirror.build`, with PyTorch's own tracing of every node."""
    with _plainly():
        return mirror_module.build(graph_module, skipped)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    def track(value: Any, node: fx.Node, tracer: Any) -> None:
        torch_tracing.track(value, fx.Proxy(node, tracer), tracer)

    with mock.patch.object(Fragments, "call", return_value=None), mock.patch.object(torch_tracing, "track_node", track):
        yield


def difference(one: Mirror, other: Mirror) -> str | None:
    """The first thing that two mirrors do not have in common; None if they are the same."""
    told = _described(one), _described(other)
    for at, (a, b) in enumerate(zip(*told, strict=False)):
        if a != b:
            return f"node {at}:\n  {a}\n  {b}"
    numbers = len(told[0]), len(told[1])
    return None if numbers[0] == numbers[1] else f"{numbers[0]} nodes and {numbers[1]}"


def _is_number(node: fx.Node) -> bool:
    """Whether a node gives a symbolic number that nothing else gives: no input, and no result of an opaque call."""
    is_symbolic = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    return is_symbolic and node.op == "call_function" and node.target is not mirror_module.opaque


def _described(mirror: Mirror) -> list[dict[str, Any]]:
    memory: dict[int, int] = {}
    symbols: dict[str, str] = {}
    written = {writer: len(storages) for writer, storages in mirror.writers}
    constants = {n: mirror.constant(n) for n in mirror.graph.nodes}
    nodes = [n for n in mirror.graph.nodes if not _is_number(n)]
    # Numbers take names, too.
    is_named = len(nodes) == len(mirror.graph.nodes)
    names = {n: n.name if is_named else str(at) for at, n in enumerate(nodes)}

    def argument(node: fx.Node) -> str:
        return f"%{names[node]}" if node in names else f"number {_symbolic(node.meta['val'], symbols)}"

    return [
        {
            "name": names[n],
            "op": n.op,
            "target": n.target,
            "args": _text(n.args, argument),
            "kwargs": _text(n.kwargs, argument),
            "value": pytree.tree_map(lambda x: _value(x, memory, symbols), n.meta.get("val")),
            "owner": mirror.owner(n),
            "dynamo node": mirror.dynamo_node(n),
            "writes": written.get(n),
            "constant": None if constants[n] is None else (constants[n].dtype, constants[n].tolist()),
            "axis": mirror.vmap_axes.get(n),
            "live": [names[user] for user in mirror.readers(n) if user in names],
        }
        for n in nodes
    ]


def _text(arguments: Any, argument: Callable[[fx.Node], str]) -> str:
    """Every number with its type: 1, 1.0 and True are different arguments."""
    leaves, spec = pytree.tree_flatten(fx.node.map_arg(arguments, argument))
    return f"{spec} {[(type(x).__name__, str(x)) for x in leaves]}"


def _value(x: Any, memory: dict[int, int], symbols: dict[str, str]) -> Any:
    if not isinstance(x, torch.Tensor):
        return _symbolic(x, symbols)
    sizes = [_symbolic(s, symbols) for s in (*x.shape, *x.stride(), x.storage_offset())]
    # Of symbolic sizes PyTorch writes it in several ways, from one tracing to the next.
    length = x.untyped_storage().nbytes()
    sizes += [length] if isinstance(length, int) else []
    where = memory.setdefault(x.untyped_storage()._cdata, len(memory))
    return type(x).__name__, x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg(), sizes, f"memory {where}"


def _symbolic(x: Any, symbols: dict[str, str]) -> Any:
    """Numbers that tracing invents (u0, u1) are told apart by when they are first seen."""
    if not isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x
    expression = x.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        if str(symbol).startswith(("u", "zuf")):
            expression = expression.subs(symbol, symbols.setdefault(str(symbol), f"invented{len(symbols)}"))
    return str(expression)
