"""PyTorch's own attention kernels, called by a model: `aten._scaled_dot_product_flash_attention` and its relatives.

They are SDPA calls with a chosen kernel. Their first output is the attention. The others (logsumexp, seeds) are for their own backward, and
no lowering provides them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import fx

from attn_compiler.passes.graph import axes, relevance, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Refused
from attn_compiler.passes.matching.patterns import sdpa_call
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten
NAME = "sdpa kernel call"

_REMEDY = "call torch.nn.functional.scaled_dot_product_attention"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Properties of an op that its schema does not tell.

    mask: name of its mask argument.
    top_left: with unequal numbers of queries and keys, its causal mask begins at the first key, as in SDPA. Otherwise it ends at the last
    key, or is unspecified.
    gqa: it accepts fewer heads of k and v.
    """

    mask: str = "attn_bias"
    top_left: bool = False
    gqa: bool = False


KERNELS: Mapping[object, Kernel] = {
    aten._scaled_dot_product_flash_attention.default: Kernel(gqa=True),
    aten._scaled_dot_product_efficient_attention.default: Kernel(top_left=True),
    aten._scaled_dot_product_cudnn_attention.default: Kernel(),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Kernel(mask="attn_mask", top_left=True),
    aten._scaled_dot_product_fused_attention_overrideable.default: Kernel(),
}
ANCHORS = frozenset(KERNELS)


def match(mirror: Mirror, anchor: fx.Node) -> Match:
    """Match a call. Raises Refused if a further output is read, and for arguments with another meaning in SDPA."""
    kernel = KERNELS[anchor.target]
    out = _output(mirror, anchor)
    _require_plain(anchor, kernel)
    call = sdpa_call.SdpaCall(pattern=NAME, anchor=anchor, out=out, mask=kernel.mask, gqa=kernel.gqa)
    return sdpa_call.match_call(mirror, call)


def _output(mirror: Mirror, anchor: fx.Node) -> fx.Node:
    outputs = [node for node in anchor.users if node.target is operator.getitem]
    names = [x.name for x in _schema(anchor).returns]
    for node in outputs:
        index, readers = node.args[1], _readers(mirror, node)
        if index != 0 and readers:
            name = names[index] if isinstance(index, int) else ""
            rule = "of the kernel's outputs only the attention's is used"
            observed = f"{name or f'output {index}'} is used by {readers[0].name}"
            raise Refused(Code.OTHER_OUTPUT, rule, observed, at=node, progress=4)
    found = [node for node in outputs if node.args[1] == 0]
    if len(found) != 1:
        rule = "the attention's output is taken out of the call once"
        raise Refused(Code.OTHER_OUTPUT, rule, f"it is taken out {len(found)} times", at=anchor, progress=1)
    return found[0]


def _readers(mirror: Mirror, node: fx.Node) -> list[fx.Node]:
    dynamo = mirror.dynamo_node(node)
    return [] if dynamo is not None and relevance.comes_to_nothing(dynamo) else mirror.readers(node)


def _schema(anchor: fx.Node) -> torch._C.FunctionSchema:
    if not isinstance(anchor.target, torch._ops.OpOverload):
        raise TypeError(f"{anchor.target} is no op")
    return anchor.target._schema


def _require_plain(anchor: fx.Node, kernel: Kernel) -> None:
    """Require equal shapes and no bool mask: these ops broadcast nothing, take no bool mask, and some lack SDPA's causal mask."""
    q, k, v = (_value(anchor, name) for name in ("query", "key", "value"))
    for own, other in ((q.shape[0], k.shape[0]), (k.shape[0], v.shape[0]), (k.shape[2], v.shape[2])):
        axes.unify(own, other)
    of_q, of_k, of_v = (axes.shape_exprs(x) for x in (q, k, v))
    same = of_k[:-1] == of_v[:-1] and of_q[0] == of_k[0] and (kernel.gqa or of_q[1] == of_k[1])
    if not same:
        _refuse(anchor, "the batch sizes and heads of q, k and v go together", f"{of_q}, {of_k} and {of_v}")
    if views.argument(anchor, "is_causal") and not kernel.top_left and not axes.same_size(of_q[-2], of_k[-2]):
        _refuse(anchor, "a causal mask is on as many queries as keys", f"{of_q[-2]} queries and {of_k[-2]} keys")
    mask = views.argument(anchor, kernel.mask)
    if isinstance(mask, fx.Node) and not views.value(mask).is_floating_point():
        _refuse(anchor, "the kernel's mask is added to the scores", f"{kernel.mask} is {views.value(mask).dtype}")


def _value(anchor: fx.Node, name: str) -> torch.Tensor:
    node = views.argument(anchor, name)
    if not isinstance(node, fx.Node) or views.value(node).dim() != 4:
        _refuse(anchor, "q, k and v have 4 dimensions", f"{name} is {node}")
    return views.value(node)


def _refuse(anchor: fx.Node, rule: str, observed: str) -> NoReturn:
    raise Refused(Code.ARGUMENTS, rule, observed, at=anchor, progress=2, remedy=_REMEDY)
