"""Collectives over the ranks that share a sequence, and a rank as a run-time number: the only users of functional collectives.

Each op of ours is decomposed below autograd into PyTorch's functional collectives and views. So a compiled graph has those as nodes,
forward and backward, which Inductor may start early and wait for late. Above autograd each is one op. Mask reading stops at it, and sees
a tensor of the whole sequence there. No graph holds a rank: it is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from attn_compiler.context_parallel import slots
from attn_compiler.context_parallel.layout import joined, split
from attn_compiler.context_parallel.rank_sync import rank_of
from attn_compiler.reasons.errors import ContextParallelInput
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE, register_fake

_COLLECTIVES = torch.ops._c10d_functional


# ---- collectives ---------------------------------------------------------------------------------------------------------


def _exchanged(pieces: torch.Tensor, group: str) -> torch.Tensor:
    """Send piece i to rank i, and receive piece i from rank i."""
    sizes = [1] * pieces.shape[0]
    return sent_and_received(pieces.contiguous(), sizes, sizes, group)


def sent_and_received(x: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    """Send the first sent[0] elements of x to rank 0, and so on; return the pieces from all ranks in order. Without a gradient."""
    return _waited(_COLLECTIVES.all_to_all_single.default(x, received, sent, group))


def _waited(started: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _COLLECTIVES.wait_tensor.default(started)
    return found


def _gathered(x: torch.Tensor, axis: int, size: int, balanced: bool, group: str) -> torch.Tensor:
    sent = x.to(torch.uint8) if x.dtype == torch.bool else x
    started = _COLLECTIVES.all_gather_into_tensor.default(sent.contiguous(), size, group)
    by_rank = torch.unflatten(_waited(started), 0, (size, x.shape[0]))
    # A copy even where this is a view: an op may not return a view of its input.
    return joined(by_rank, axis, balanced).to(x.dtype).clone(memory_format=torch.contiguous_format)


def _gathered_piece(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Gather (s,) of each rank into (size · s,)."""
    return _waited(_COLLECTIVES.all_gather_into_tensor.default(x.contiguous(), size, group))


def _scattered_piece(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return _waited(_COLLECTIVES.reduce_scatter_tensor.default(x.contiguous(), "sum", size, group))


def _scattered_sum(x: torch.Tensor, axis: int, size: int, balanced: bool, group: str) -> torch.Tensor:
    """Return each rank's part of the sum over ranks. The sum has at least float32, and is rounded once.

    After an exchange, each rank adds up what it got: as many bytes as a reduce-scatter. NCCL took 473 µs for that where an exchange
    of more bytes took 267 (two H100, 32 MiB sent, `docs/context_parallel.md`).
    """
    theirs = _exchanged(split(x, axis, size, balanced), group)
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    return theirs.sum(0, dtype=wide).to(x.dtype)


def _summed(x: torch.Tensor, group: str) -> torch.Tensor:
    return _waited(_COLLECTIVES.all_reduce.default(x.contiguous(), "sum", group))


def _to_heads(x: torch.Tensor, size: int, balanced: bool, group: str) -> torch.Tensor:
    """Exchange (B, H, n, D), n of the rank, for (B, H / size, N, D), N of the whole sequence."""
    pieces = torch.unflatten(x, 1, (size, x.shape[1] // size)).movedim(1, 0)
    return joined(_exchanged(pieces, group), 2, balanced).clone(memory_format=torch.contiguous_format)


def _to_positions(x: torch.Tensor, size: int, balanced: bool, group: str) -> torch.Tensor:
    """Invert `_to_heads`."""
    by_heads = _exchanged(split(x, 2, size, balanced), group)
    return by_heads.movedim(0, 1).flatten(1, 2).clone(memory_format=torch.contiguous_format)


def _of_slots(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Gather (B, H, slots, D) into (B, H, slots · size, D), in the order of positions (context_parallel/slots.py)."""
    return slots.joined(parts(x, size, group)).clone(memory_format=torch.contiguous_format)


def _same_on_ranks(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return a copy of x, which all ranks have to have alike. Each rank raises where one differs."""
    # A few numbers of each position tell whether ranks were given one sequence. Kernels may round in other ways on other machines.
    by_rank = parts(x[..., :4], size, group).double()
    is_same = torch.isclose(by_rank, by_rank[:1], rtol=2e-2, atol=1e-3, equal_nan=True).all()
    if not bool(is_same):
        raise ContextParallelInput(
            call="cache",
            names=("past_key_values",),
            rule="ranks that share a cache are given the same tokens, each of them the whole prompt",
            observed=f"new keys of {tuple(x.shape)} that differ between ranks",
            remedy="Give every rank what rank 0 has, not a part of ContextParallel.shard; seed every rank alike before it samples",
        )
    return x.clone()


def _with_gradient(
    name: str, forward: Callable[..., torch.Tensor], backward: Callable[..., torch.Tensor]
) -> type[torch.autograd.Function]:
    """Return an autograd.Function of a collective whose gradient is another collective with the same arguments."""

    def _forward(ctx: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        ctx.given = given
        return forward(x, *given)

    def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return backward(grads[0], *ctx.given), *(None for _ in ctx.given)

    body = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    return type(name, (torch.autograd.Function,), body)


_GATHER, _WAIT = _COLLECTIVES.all_gather_into_tensor.default, _COLLECTIVES.wait_tensor.default
_ATEN = torch.ops.aten
#: ops of a trace of `joined`, and of splitting into keys and values
MOVES = frozenset(
    {_WAIT, _ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.permute.default}
    | {_ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.slice.Tensor, _ATEN.select.int}
    | {_ATEN.cat.default, _ATEN.flip.default, _ATEN.clone.default, _ATEN.alias.default, _ATEN.expand.default}
)


def gather_again(graph: fx.Graph, group: str) -> None:
    """Let the backward gather keys and values once more instead of keeping them: a rank would hold the whole sequence, of every layer.

    graph: of the forward and the backward, before they are partitioned.
    """
    again: set[fx.Node] = set()
    for node in graph.nodes:
        is_gather = node.target is _GATHER and group in node.args and node.meta["val"].is_floating_point()
        if is_gather or (node.target in MOVES and any(x in again for x in node.all_input_nodes)):
            again.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0


# ---- ranks ---------------------------------------------------------------------------------------------------------------


def _number(rank: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), rank, dtype=torch.int32, device=like.device)


def parts(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return every rank's x, (size, *shape of x), without a gradient. x has one shape on all ranks of the group."""
    sent = x.detach().to(torch.uint8) if x.dtype == torch.bool else x.detach()
    found: torch.Tensor = _WAIT(_GATHER(sent.contiguous()[None], size, group))
    return found.to(x.dtype)


# ---- ops -----------------------------------------------------------------------------------------------------------------

#: name -> (arguments besides the tensor, function, function of its gradient)
_OPS: dict[str, tuple[str, Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "gathered_sequence": ("int axis, int size, bool balanced, str group", _gathered, _scattered_sum),
    # The sum of all ranks' losses is differentiated.
    "summed_over_ranks": ("str group", _summed, _summed),
    "heads_for_positions": ("int size, bool balanced, str group", _to_heads, _to_positions),
    "exchanged_pieces": ("str group", _exchanged, _exchanged),
    "gathered_piece": ("int size, str group", _gathered_piece, _scattered_piece),
    "positions_for_heads": ("int size, bool balanced, str group", _to_positions, _to_heads),
}

if not hasattr(getattr(torch.ops, NAMESPACE), "gathered_sequence"):
    for name, (arguments, forward, backward) in _OPS.items():
        LIBRARY.define(f"{name}(Tensor x, {arguments}) -> Tensor")
        LIBRARY.impl(name, _with_gradient(name, forward, backward).apply, "Autograd")
        LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    LIBRARY.define("sequence_rank(Tensor like, str group) -> Tensor")
    LIBRARY.impl("sequence_rank", lambda like, group: _number(rank_of(group), like), "CompositeExplicitAutograd")
    register_fake("sequence_rank", lambda like, group: _number(0, like))
    # Caches have no gradients.
    LIBRARY.define("keys_of_slots(Tensor x, int size, str group) -> Tensor")
    LIBRARY.impl("keys_of_slots", _of_slots, "Autograd")
    LIBRARY.impl("keys_of_slots", _of_slots, "CompositeExplicitAutograd")
    LIBRARY.define("same_on_ranks(Tensor x, int size, str group) -> Tensor")
    LIBRARY.impl("same_on_ranks", _same_on_ranks, "CompositeExplicitAutograd")
    register_fake("same_on_ranks", lambda x, size, group: x.clone())

gathered_sequence = getattr(torch.ops, NAMESPACE).gathered_sequence.default
summed_over_ranks = getattr(torch.ops, NAMESPACE).summed_over_ranks.default
heads_for_positions = getattr(torch.ops, NAMESPACE).heads_for_positions.default
positions_for_heads = getattr(torch.ops, NAMESPACE).positions_for_heads.default
exchanged_pieces = getattr(torch.ops, NAMESPACE).exchanged_pieces.default
gathered_piece = getattr(torch.ops, NAMESPACE).gathered_piece.default
keys_of_slots = getattr(torch.ops, NAMESPACE).keys_of_slots.default
same_on_ranks = getattr(torch.ops, NAMESPACE).same_on_ranks.default
sequence_rank = getattr(torch.ops, NAMESPACE).sequence_rank.default
