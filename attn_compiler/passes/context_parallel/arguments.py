"""Arguments of ops that are known to leave each position to itself. Any other argument is refused, unless it has its default.

The op's rule in ops.py checks tensors among them. compared.py checks that numbers are the same for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.context_parallel.places import Mixes

aten = torch.ops.aten

_ALONG = frozenset({"self", "dim", "dims", "keepdim", "dtype"})

#: op -> names of its arguments
TAKEN: Mapping[object, frozenset[str]] = {
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int, aten.cumsum.default), _ALONG),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _ALONG),
    **dict.fromkeys((aten.argmax.default, aten.max.dim, aten.min.dim, aten.flip.default, aten.glu.default), _ALONG),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _ALONG | {"correction"}),
    aten.var_mean.correction: _ALONG | {"correction"},
    **dict.fromkeys((aten.var_mean.dim, aten.var.dim, aten.std.dim), _ALONG | {"unbiased"}),
    aten.linalg_vector_norm.default: _ALONG | {"ord"},
    aten.norm.ScalarOpt_dim: _ALONG | {"p"},
    aten.select.int: frozenset({"self", "dim", "index"}),
    aten.narrow.default: frozenset({"self", "dim", "start", "length"}),
    aten.slice.Tensor: frozenset({"self", "dim", "start", "end", "step"}),
    aten.split.Tensor: frozenset({"self", "split_size", "dim"}),
    aten.split_with_sizes.default: frozenset({"self", "split_sizes", "dim"}),
    aten.chunk.default: frozenset({"self", "chunks", "dim"}),
    aten.unbind.int: frozenset({"self", "dim"}),
    aten.topk.default: frozenset({"self", "k", "dim", "largest", "sorted"}),
    aten.sort.default: frozenset({"self", "dim", "descending"}),
    aten.masked_fill_.Scalar: frozenset({"self", "mask", "value"}),
    aten.masked_fill_.Tensor: frozenset({"self", "mask", "value"}),
    aten.fill_.Scalar: frozenset({"self", "value"}),
    aten.copy_.default: frozenset({"self", "src", "non_blocking"}),
    aten.floor_divide.default: frozenset({"self", "other"}),
    **dict.fromkeys(
        (aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), frozenset({"condition", "self", "other"})
    ),
    aten.bucketize.Tensor: frozenset({"self", "boundaries", "out_int32", "right"}),
    aten.index.Tensor: frozenset({"self", "indices"}),
    aten.index_select.default: frozenset({"self", "dim", "index"}),
    aten.gather.default: frozenset({"self", "dim", "index", "sparse_grad"}),
    aten.einsum.default: frozenset({"equation", "tensors"}),
    # scale_grad_by_freq is refused: it would count the tokens of one rank.
    aten.embedding.default: frozenset({"weight", "indices", "padding_idx", "sparse"}),
    aten.linear.default: frozenset({"input", "weight", "bias"}),
    aten.matmul.default: frozenset({"self", "other"}),
    aten.mm.default: frozenset({"self", "mat2"}),
    aten.bmm.default: frozenset({"self", "mat2"}),
    aten.addmm.default: frozenset({"self", "mat1", "mat2", "beta", "alpha"}),
    aten.baddbmm.default: frozenset({"self", "batch1", "batch2", "beta", "alpha"}),
    aten.layer_norm.default: frozenset({"input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"}),
    aten.rms_norm.default: frozenset({"input", "normalized_shape", "weight", "eps"}),
    aten.cat.default: frozenset({"tensors", "dim"}),
    aten.stack.default: frozenset({"tensors", "dim"}),
    # `weight` has one number for each class.
    aten.cross_entropy_loss.default: frozenset(
        {"self", "target", "weight", "reduction", "ignore_index", "label_smoothing"}
    ),
}

#: types of arguments that do not make a pointwise op mix elements
_OF_ELEMENTS = ("Tensor", "number", "float", "int", "bool", "str", "ScalarType", "MemoryFormat", "Device", "Layout")


def unknown(node: fx.Node) -> Mixes | None:
    """Return the first argument of an op that is not known to leave each position to itself."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    taken = TAKEN.get(node.target)
    for at, argument in enumerate(schema.arguments):
        given: Any = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        is_default = argument.has_default_value() and given == argument.default_value
        if not is_default and not (_is_of_elements(argument) if taken is None else argument.name in taken):
            return Mixes(at=node, why=f"nothing is known of what {argument.name}={given} does with positions")
    return None


def _is_of_elements(argument: Any) -> bool:
    return str(argument.type).removeprefix("Optional[").removesuffix("]").removesuffix("?") in _OF_ELEMENTS
