"""The block mask of a FlexAttention call: the dense mask from which its blocks were made.

Flex's kernel skips blocks that the block mask does not list, and applies mask_mod only in those listed as partial. So it computes
mask_mod's attention only if the lists were made from mask_mod. This holds if PyTorch's `create_block_mask` ran in the same graph on a dense
mask that reads as mask_mod does (recovering/block_masks.py). Lists from outside the graph could be any. The lists of queries, read only by
the backward, are not examined: PyTorch makes them from the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.calls import argument, target_name
from attn_compiler.passes.graph.spelling import Blocks
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import symbols as torch_symbols

RULE = "the block mask is shown to be made of its mask_mod"
REMEDY = (
    "call create_block_mask inside of the compiled function, with the sizes of q and k; load a transformers model with "
    "attn_implementation='sdpa', or compile it by attn_compiler.integrations.transformers.compile_model"
)

#: positions of the block sizes and of the lists in a block mask
_BLOCK_SIZES = slice(-3, -1)
_LISTS = slice(2, 6)


class _OtherwiseError(Exception):
    """Lists that PyTorch did not make in its way; the text names the difference."""


def find(call: fx.Node) -> Blocks | Reason:
    """Return the blocks of a call of flex_attention, or the reason against them."""
    block_mask: Any = call.args[4]
    sizes, lists = block_mask[_BLOCK_SIZES], block_mask[_LISTS]
    q, k = (_value(x) for x in call.args[:2] if isinstance(x, fx.Node))
    try:
        if _is_one_block(lists, sizes, q, k):
            return Blocks()
        dense = _made_of(lists, sizes)
    except _OtherwiseError as met:
        return Reason(code=Code.FLEX_BLOCK_MASK, rule=RULE, observed=str(met), remedy=REMEDY)
    wanted, found = (q.shape[2], k.shape[2]), _value(dense).shape[2:]
    if not all(torch_symbols.statically_known(a == b) for a, b in zip(wanted, found, strict=True)):
        return Reason(
            code=Code.FLEX_BLOCK_MASK,
            rule=RULE,
            observed=f"it was made for {tuple(found)} and is used for {wanted}",
            remedy=REMEDY,
        )
    return Blocks(dense=dense)


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        raise _OtherwiseError(f"{node.name} is no tensor")
    return value


# ---- one block ------------------------------------------------------------------------------------------------------


def _is_one_block(lists: tuple[Any, ...], sizes: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether it is FlexAttention's default without a block mask: a list of the first block, which holds every score."""
    number, indices, full_number, full_indices = lists
    if full_number is not None or full_indices is not None:
        return False
    ones = _is_filled(number, "ones") and _is_filled(indices, "zeros") and _value(indices).numel() == 1
    lengths = (q.shape[2], k.shape[2])
    # No length unknown at compile time reaches the size of such a block.
    large = all(
        isinstance(size, int) and (size >= 1 << 30 or torch_symbols.statically_known(length <= size))
        for size, length in zip(sizes, lengths, strict=True)
    )
    return ones and large


def _is_filled(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and target_name(node) == name


# ---- blocks of a dense mask -----------------------------------------------------------------------------------------


def _made_of(lists: tuple[Any, ...], sizes: tuple[Any, ...]) -> fx.Node:
    """Return the dense mask from which `_convert_mask_to_block_mask` made the lists, by its own ops."""
    partial, full = _listed(*lists[:2]), _listed(*lists[2:])
    counts = _counts(partial, sizes, "partial")
    if _counts(full, sizes, "full") is not counts:
        raise _OtherwiseError("its full blocks and its partial ones are of two masks")
    blocks = _called(_first(_called(counts, "sum", dim=[-2, -1])), "permute")
    if tuple(blocks.args[1:]) != (0, 1, 2, 4, 3, 5):
        raise _OtherwiseError(f"{blocks.name} puts the axes into another order")
    tiles = _called(_first(blocks), "view")
    shape = _value(tiles).shape
    if len(shape) != 6 or (shape[3], shape[5]) != tuple(sizes):
        raise _OtherwiseError(f"{tiles.name} makes other blocks than those of {tuple(sizes)}")
    dense = _first(tiles)
    if target_name(dense) == "pad":
        _check_padding(dense)
        dense = _first(dense)
    if _value(dense).dtype != torch.bool or _value(dense).dim() != 4:
        raise _OtherwiseError(f"{dense.name} is no mask over (b, h, q, k)")
    return dense


def _first(node: fx.Node) -> fx.Node:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        raise _OtherwiseError(f"{node.name} reads no tensor")
    return source


def _called(node: object, name: str, **kwargs: object) -> fx.Node:
    """Return `node` if it is a call of that name with these keywords; raise _OtherwiseError if not."""
    if not isinstance(node, fx.Node):
        raise _OtherwiseError("it has no lists")
    if node.op == "placeholder":
        raise _OtherwiseError(f"its lists come in from outside of this graph, as {node.name}")
    if target_name(node).strip("_") != name:
        raise _OtherwiseError(f"{node.name} is where {name} is expected")
    if any(node.kwargs.get(key) != x for key, x in kwargs.items()):
        raise _OtherwiseError(f"{node.name} is another {name} than PyTorch's")
    return node


def _listed(number: object, indices: object) -> fx.Node:
    """Return the blocks, as 0 and 1, from which `_dense_to_ordered` made a list."""
    ordered = _called(_first(_called(indices, "to")), "argsort", dim=-1, descending=True, stable=True)
    counted = _called(_first(_called(number, "to")), "sum", dim=-1)
    blocks = _first(ordered)
    if _first(counted) is not blocks:
        raise _OtherwiseError(f"{ordered.name} and {counted.name} are of two masks")
    for node in (number, indices, blocks):
        if isinstance(node, fx.Node) and _value(node).dtype != torch.int32:
            raise _OtherwiseError(f"{node.name} is {_value(node).dtype}")
    small = _called(_first(_called(blocks, "to")), "to")
    return _first(small)


def _counts(blocks: fx.Node, sizes: tuple[Any, ...], kind: str) -> fx.Node:
    """Return the number of allowed scores in each block. `blocks`: those with some but not all allowed, or with all."""
    everything = sizes[0] * sizes[1]
    if kind == "full":
        return _compared(blocks, "eq", everything)
    both = _called(blocks, "and")
    some, not_all = (argument(both, i, name) for i, name in enumerate(("input", "other")))
    counts = _compared(some, "gt", 0)
    if _compared(not_all, "lt", everything) is not counts:
        raise _OtherwiseError(f"{both.name} is of two masks")
    return counts


def _compared(node: object, name: str, number: int) -> fx.Node:
    call = _called(node, name)
    if argument(call, 1, "other") != number:
        raise _OtherwiseError(f"{call.name} compares with {argument(call, 1, 'other')}, not with {number}")
    return _first(call)


def _check_padding(node: fx.Node) -> None:
    """Require padding with False behind the end, so that rows and keys there are masked."""
    added, mode, value = (argument(node, i, name) for i, name in ((1, "pad"), (2, "mode"), (3, "value")))
    behind = isinstance(added, (tuple, list)) and len(added) == 4 and tuple(added[::2]) == (0, 0)
    if not behind or mode not in ("constant", None) or value not in (None, 0, False):
        raise _OtherwiseError(f"{node.name} pads otherwise than PyTorch does")
