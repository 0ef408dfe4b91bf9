"""Masks that a module creates in its constructor, such as a `tril` buffer. They are read once, and known from then on.

The values of a tensor are no fact of a graph. So they are treated as outputs of another graph (known_masks.py): a guard checks at each call
that the tensor is the same one, and unwritten. After a write, such as loading a checkpoint, a tensor is read once more, and never again.
A tensor that is written more often gets code that relies on no values.
"""

from __future__ import annotations

import math
import weakref

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.graph.aliasing import Aliases
from attn_compiler.passes.graph.mirroring import may_be_of_mask
from attn_compiler.torch_private import frames as torch_frames, known_masks
from attn_compiler.torch_private.known_masks import Known

#: the most times that one tensor is read
_MOST_LOOKS = 2
#: the most elements of a tensor that is read: 8192 queries and keys
_MOST = 2**26

_looks: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}


def look(reach: Aliases) -> None:
    """Remember tensors of a graph's modules that mask by the distance of query and key, if the graph does not write to them."""
    if torch_frames.is_cut_into_buckets():
        # DistributedDataParallel writes to buffers before each call.
        return
    for place, node in enumerate(reach.graph.find_nodes(op="placeholder")):
        if not node.users or reach.inputs[place] & reach.written or not may_be_of_mask(node.meta.get("example_value")):
            continue
        tensor = torch_frames.given_tensor(node)
        if tensor is None or not torch_frames.is_of_module(node) or not _is_readable(tensor) or not _is_next(tensor):
            continue
        element = band_of(tensor)
        if element is not None:
            known_masks.remember(tensor, Known(element=element, dims=tensor.dim()))


def _is_readable(tensor: torch.Tensor) -> bool:
    """True if a tensor has the shape of a mask for all heads, and its memory can be read."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"
    if not is_plain or tensor.dim() < 2 or math.prod(tensor.shape[:-2]) != 1 or not 1 < tensor.numel() <= _MOST:
        return False
    return min(tensor.shape[-2:]) > 1 and not tensor.is_complex() and known_masks.recall(tensor) is None


def _is_next(tensor: torch.Tensor) -> bool:
    """Count a read of a tensor. Return whether it is one of the first _MOST_LOOKS."""
    seen, count = _looks.get(id(tensor), (None, 0))
    count = count if seen is not None and seen() is tensor else 0
    _looks[id(tensor)] = (weakref.ref(tensor, _forget), count + 1)
    return count < _MOST_LOOKS


def _forget(dead: weakref.ref[torch.Tensor]) -> None:
    for key in [key for key, (seen, _) in _looks.items() if seen is dead]:
        del _looks[key]


def band_of(tensor: torch.Tensor) -> Expr | None:
    """Return the element over known_masks.indices, if the distance of query and key selects one of two numbers; else None."""
    with torch.no_grad():
        numbers = tensor.detach().reshape(tensor.shape[-2:])
        inside = numbers[0, 0].item()
        ahead, back = _run(numbers[0], inside), _run(numbers[:, 0], inside)
        others = [row[n].item() for row, n in ((numbers[0], ahead), (numbers[:, 0], back)) if n < row.numel()]
        if not others:
            return None
        # Only truth values have the size of the tensor: distances would take 8 bytes per element.
        query, key = _positions(numbers, 0), _positions(numbers, 1)
        is_inside = (key < query + ahead) & (key > query - back)
        if not bool(torch.where(is_inside, numbers == inside, numbers == others[0]).all()):
            return None
    band = _band(tensor, ahead, back)
    if isinstance(inside, bool):
        return band if inside else ix.invert(band)
    return ix.where(band, Const(inside), Const(others[0]))


def _run(row: torch.Tensor, number: float) -> int:
    """Count the leading elements that equal a number."""
    differs = (row != number).nonzero()
    return int(differs[0]) if differs.numel() else row.numel()


def _positions(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    found = torch.arange(numbers.shape[axis], device=numbers.device)
    return found[None, :] if axis else found[:, None]


def _band(tensor: torch.Tensor, ahead: int, back: int) -> Expr:
    """Return the condition that a key is less than `ahead` after and `back` before the query. Ends that no pair reaches drop out."""
    query, key = known_masks.indices(tensor.dim())[-2:]
    ends = [ix.compare("<", key, ix.add(query, Const(ahead)))] if ahead < tensor.shape[-1] else []
    ends += [ix.compare("<", query, ix.add(key, Const(back)))] if back < tensor.shape[-2] else []
    return ix.apply("and", *ends)
