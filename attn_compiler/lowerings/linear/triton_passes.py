"""The passes over states, forwards and backwards. Imports triton, so it is imported late.

A pass goes from chunk to chunk, so it has a program for each head and some columns of v. Where those are few beside the GPU's processors,
a long sequence is cut into pieces: each runs by itself first, the states between them are joined, and then all run at once.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.linear.kernels import backward as backward_kernels, forward as kernels, pieces as joining
from attn_compiler.lowerings.linear.triton_sizes import LinearSizes, empty, state_strides, wide
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from attn_compiler.lowerings.shared.launching.dry_run import noter, recorder

#: processors assumed without a GPU: those of an H100
_PROCESSORS = 132
#: fewest pieces: each chunk is computed twice, so fewer gain nothing
_FEWEST = 4
#: fewest chunks of a piece; most channels of k, so that one product joins states
_SHORTEST, _WIDEST = 8, 128
#: most registers of a thread, so that a processor holds two programs
_HALF = 128


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of each sequence. many: their number. chunks: of one piece; the last one may have fewer."""

    many: int
    chunks: int

    @staticmethod
    def of(sizes: LinearSizes, processors: int, *, is_delta: bool) -> Pieces:
        """Return as many pieces as keep all processors busy, or one."""
        programs = max(sizes.rows * (_columns(sizes, is_delta=is_delta) // sizes.columns), 1)
        many = min(processors // programs, sizes.chunks // _SHORTEST)
        if many < _FEWEST or wide(sizes.dim_k) > _WIDEST:
            return Pieces(many=1, chunks=sizes.chunks)
        chunks = -(-sizes.chunks // many)
        return Pieces(many=-(-sizes.chunks // chunks), chunks=chunks)

    @property
    def numbers(self) -> dict[str, int]:
        """Arguments of kernels."""
        return {"pieces": self.many, "of_piece": self.chunks}


def passes(call: LinearTensors) -> None:
    """Run both passes of a backward, which share no results. They run at once where one pass leaves processors idle."""
    device, sizes = call.same.device, call.sizes
    is_cut = Pieces.of(sizes, processors(device), is_delta=call.is_delta).many > 1
    # A processor holds two programs of the state space, whose states are half as large.
    is_full = (2 if call.is_delta else 1) * sizes.rows * sizes.blocks > processors(device)
    # Launches that are only noted have no streams.
    if is_cut or is_full or device.type != "cuda" or noter() is not None or recorder() is not None:
        reverse(call, states(call))
        return
    now, other = torch.cuda.current_stream(device), _stream(device, threading.get_ident())
    other.wait_stream(now)
    pieces = states(call)
    try:
        with torch.cuda.stream(other):
            reverse(call, pieces)
    finally:
        # After an error, too: the caller frees tensors that a kernel on the other stream may still read.
        now.wait_stream(other)


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Return the thread's second stream. One for all would put another thread's kernels into a CUDA graph that this one captures."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def states(call: LinearTensors) -> Pieces:
    """Run the pass over the states. With pieces, `wholes` is left among the call's tensors."""
    sizes = call.sizes
    pieces = Pieces.of(sizes, processors(call.same.device), is_delta=call.is_delta)
    if pieces.many == 1:
        _run(call, kernels.state_pass, sizes.rows * sizes.blocks, **edge_strides(call))
        return pieces
    columns = _columns(sizes, is_delta=call.is_delta)
    many = (sizes.batch, sizes.heads, pieces.many)
    call.named["wholes"] = empty((*many, wide(sizes.dim_k), columns), call.named["q"])
    alone = call.without("out", "last", "states", "values", "skip").having(locals=call.named["wholes"])
    programs = sizes.rows * pieces.many * (columns // sizes.columns)
    numbers = {"WIDE": columns, **pieces.numbers, **edge_strides(call)}
    _run(alone, kernels.state_pass, programs, part="alone", **numbers)
    between = empty((*many, sizes.dim_k, sizes.dim_v), call.named["q"])
    edge = call.named.get("first")
    joined = call.having(locals=call.named["wholes"], between=between, **({} if edge is None else {"edge": edge}))
    order = state_strides(call.form, edge, "edge")
    _join(joined, pieces, columns, is_reversed=False, columns=columns, order=order)
    after = call.having(first=between)
    numbers = {**edge_strides(call), **_piece_strides(between, "first"), **pieces.numbers}
    _run(after, kernels.state_pass, sizes.rows * pieces.many * sizes.blocks, part="pieces", **numbers)
    return pieces


def reverse(call: LinearTensors, pieces: Pieces) -> None:
    """Run the pass backwards over the gradients of states, in the pieces of `states`."""
    sizes, last = call.sizes, call.named["grad_last"]
    strides: dict[str, Any] = state_strides(call.form, last, "last") | state_strides(
        call.form, call.named.get("grad_first"), "first"
    )
    kernel, programs = backward_kernels.reverse_pass, sizes.rows * pieces.many * sizes.blocks
    if pieces.many == 1:
        _run(call, kernel, programs, **strides)
        return
    many, width = (sizes.batch, sizes.heads, pieces.many), wide(sizes.dim_v)
    part = empty((*many, wide(sizes.dim_k), width), last)
    alone = call.without("grad_first", "afters", "grad_values").having(locals=part)
    _run(alone, kernel, programs, part="alone", **strides, **pieces.numbers)
    between = empty((*many, sizes.dim_k, sizes.dim_v), last)
    joined = call.having(locals=part, between=between, edge=last)
    columns = call.named["wholes"].shape[-1]
    order = state_strides(call.form, last, "edge")
    _join(joined, pieces, width, is_reversed=True, columns=columns, order=order)
    numbers = {**strides, **_piece_strides(between, "last"), **pieces.numbers}
    _run(call.having(grad_last=between), kernel, programs, part="pieces", **numbers)


def _columns(sizes: LinearSizes, *, is_delta: bool) -> int:
    """Return the columns of v, and with the delta rule of the identity, from which a piece makes a matrix."""
    columns = wide(sizes.dim_v) + (wide(sizes.dim_k) if is_delta else 0)
    return -(-columns // sizes.columns) * sizes.columns


def _join(
    call: LinearTensors, pieces: Pieces, local: int, *, is_reversed: bool, columns: int, order: dict[str, int]
) -> None:
    """Join the pieces. local, columns: columns of `locals` and of `wholes`. order: strides of `edge`."""
    sizes = call.sizes
    numbers = {"LOCAL": local, "WIDE": columns, "REVERSED": is_reversed, **pieces.numbers, **order}
    part = "reversed" if is_reversed else "forwards"
    call.run(joining.join_pieces, sizes.rows * sizes.blocks, stages=1, part=part, **numbers)


def _piece_strides(between: torch.Tensor, name: str) -> dict[str, int]:
    """Return strides of states (B, H, pieces, K, V)."""
    return {f"{name}_{letter}": between.stride(at) for at, letter in enumerate("bhpkv")}


def _run(call: LinearTensors, kernel: Any, programs: int, part: str = "", **numbers: Any) -> None:
    """Launch a pass, for Hopper where that serves. The next chunk's tiles are prefetched where shared memory has room for two chunks."""
    if "locals" in call.named or not call.on_hopper:
        stages = 1 if (call.form.channel and call.sizes.fills_memory) or not call.sizes.parts else 2
        call.run(kernel, programs, call.sizes.warps, stages, part=part, **numbers)
        return
    # Imported late: releases of Triton without Gluon's instructions for Hopper run the other kernels.
    from attn_compiler.lowerings.linear.kernels.forward_sm90 import state_pass_sm90 as of_hopper

    is_reversed, is_bare = kernel is not kernels.state_pass, "states" in call.named and not call.is_delta
    if is_reversed and call.is_delta:
        from attn_compiler.lowerings.linear.kernels.reverse_sm90 import reverse_pass_sm90 as of_hopper
    elif is_reversed:
        # Gradients of states are states of q and do, backwards.
        names = {"k": "q", "v": "grad", "states": "afters", "first": "grad_last", "last": "grad_first"}
        call = call.having(**{to: call.named[name] for to, name in names.items() if name in call.named})
        edges = {"first": "last", "last": "first"}
        numbers = {edges[name[:-2]] + name[-2:] if name[:-2] in edges else name: x for name, x in numbers.items()}
        part += "reversed"
    if is_bare:
        numbers["registers"] = _HALF
    few = 2 if call.sizes.parts == 1 else 3
    how = switches(call, few if is_bare else None, is_reversed=is_reversed)
    call.run(of_hopper, programs, part=part, HOW=how, **numbers)


def switches(call: LinearTensors, stages: int | None = None, *, is_reversed: bool = False) -> Any:
    """Return the constants of kernels for Hopper. Shared memory usually has room for three chunks of q and k where products are of one
    part."""
    from attn_compiler.lowerings.linear.kernels.tiles_sm90 import Switches

    usual = 3 if call.sizes.parts == 1 and not call.form.channel else 2
    given = {**call.numbers, "STAGES": stages or usual, "KEEPS": "states" in call.named, "REVERSED": is_reversed}
    return Switches(**{name: given[name] for name in Switches._fields})


def edge_strides(call: LinearTensors) -> dict[str, Any]:
    """Return strides of the first and of the last state."""
    named, form = call.named, call.form
    return {**state_strides(form, named.get("first"), "first"), **state_strides(form, named.get("last"), "last")}


def processors(device: torch.device) -> int:
    """Return the processors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _PROCESSORS
