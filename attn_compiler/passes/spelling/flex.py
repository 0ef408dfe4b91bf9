"""FlexAttention's calls, written out for matching, and given back unless another kernel replaces them.

A call of the higher-order op `flex_attention` holds its score_mod and mask_mod as graphs over one score. This pass writes the attention as
ATen ops beside the call, with both evaluated at every score, and readers of the call read that. The mask and the bias are then read and
proved as in any model. The written-out form is only for analysis and is erased again. The call is erased if a kernel replaced it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import bodies, regions, relevance
from attn_compiler.passes.graph.calls import Trying, target_name, untried
from attn_compiler.passes.graph.spelling import FLEX, Blocks, Spelled
from attn_compiler.passes.spelling import expand, flex_blocks
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.torch_private import snapshots as torch_snapshots, symbols as torch_symbols, tracing as torch_tracing

NAME = FLEX
OPERATION = "flex_attention"

#: kernel options that change only Flex's own outputs for its backward, and FlexAttention's defaults
_ANY_VALUE = frozenset({"OUTPUT_LOGSUMEXP", "OUTPUT_MAX"})
_DEFAULTS: Mapping[str, object] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
}
_OUTPUTS = ("the attention", "logsumexp", "max_scores")


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """spelled: the calls that were written out. left: the others, each with the reason."""

    spelled: tuple[Spelled, ...] = ()
    left: Mapping[fx.Node, Reason]


def is_call(node: fx.Node) -> bool:
    return bodies.is_higher_order(node) and target_name(node) == OPERATION


def spell_flex(graph_module: fx.GraphModule, trying: Trying = untried) -> Found:
    """Write out every call of one graph module."""
    spelled: list[Spelled] = []
    left: dict[fx.Node, Reason] = {}

    def spell(call: fx.Node, where: Mapping[fx.Node, regions.Region]) -> None:
        found = _read(call, where[call])
        if isinstance(found, Reason):
            left[call] = found
        else:
            spelled.append(_spell_out(graph_module, found))

    expand.each(graph_module, is_call, spell, trying)
    return Found(spelled=tuple(spelled), left=left)


def give_back(graph_module: fx.GraphModule, spelled: Sequence[Spelled]) -> None:
    """For each written-out call, keep either the call or its replacement."""
    for one in spelled:
        graph = graph_module.graph
        if not torch_snapshots.is_erased(one.product):
            one.out.replace_all_uses_with(one.own)
            if one.lse is not None:
                one.lse[1].replace_all_uses_with(one.lse[0])
        else:
            _erase_with_readers(graph, one.call)
        for node in reversed((*one.replaced, *one.nodes)):
            if not torch_snapshots.is_erased(node) and not node.users:
                graph.erase_node(node)
    graph_module.recompile()


def _erase_with_readers(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        if not torch_snapshots.is_erased(user):
            _erase_with_readers(graph, user)
    graph.erase_node(node)


# ---- reading a call -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """The arguments of a call.

    own: the attention taken out of its result.
    lse: the logsumexp (base 2) taken out of its result; None if nothing reads it.
    score_others, mask_others: other tensors that the mods read.
    """

    node: fx.Node
    own: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    score_mod: fx.GraphModule
    mask_mod: fx.GraphModule
    scale: float
    score_others: tuple[Any, ...]
    mask_others: tuple[Any, ...]
    blocks: Blocks
    lse: fx.Node | None


def _read(node: fx.Node, region: regions.Region) -> _Call | Reason:
    if region.transforms:
        return Reason(
            code=Code.TRANSFORM,
            rule="the attention is not inside a transform of torch.func",
            observed="vmap, grad, vjp or jvp is applied to it in the graph",
        )
    if len(node.args) != 9 or node.kwargs:
        return Reason(
            code=Code.FLEX_CALL,
            rule="flex_attention has the arguments that are known here",
            observed=f"{len(node.args)} of them",
            remedy="install a torch that `python -m attn_compiler doctor` names; otherwise FlexAttention's own kernel runs",
        )
    arguments: Any = node.args
    q, k, v, score_mod, block_mask, scale, options, score_others, mask_others = arguments
    refused = _unusual_option(options) or _other_output(node)
    if refused is not None:
        return refused
    own = [user for user in node.users if user.args[1] == 0]
    score_graph = _body(node, score_mod)
    mask_graph = _body(node, block_mask[-1] if isinstance(block_mask, tuple) else None)
    value = scale.meta.get("example_value") if isinstance(scale, fx.Node) else scale
    number = torch_symbols.constant(value)
    if number is None:
        return Reason(
            code=Code.FLEX_CALL,
            rule="FlexAttention's scale is a number",
            observed=f"the scale is {value}, which is known at run time only",
            remedy="pass scale= as a plain number, or call torch._dynamo.mark_static(q, -1) if it is made of the head dim",
        )
    if len(own) != 1 or score_graph is None or mask_graph is None:
        return _called_otherwise(len(own), score_graph, mask_graph)
    if any(not isinstance(x, fx.Node) for x in (q, k, v)):
        return _unlike_pytorchs("q, k or v is no tensor of the graph")
    blocks = flex_blocks.find(node)
    if isinstance(blocks, Reason):
        return blocks
    return _Call(
        node=node,
        own=own[0],
        q=q,
        k=k,
        v=v,
        score_mod=score_graph,
        mask_mod=mask_graph,
        scale=number,
        score_others=tuple(score_others),
        mask_others=tuple(mask_others),
        blocks=blocks,
        lse=next((user for user in node.users if user.args[1] == 1 and not relevance.comes_to_nothing(user)), None),
    )


def _called_otherwise(taken: int, score_graph: fx.GraphModule | None, mask_graph: fx.GraphModule | None) -> Reason:
    if score_graph is None or mask_graph is None:
        name = "score_mod" if score_graph is None else "mask_mod"
        return _unlike_pytorchs(f"{name} is no graph of its own")
    return _unlike_pytorchs(
        "nothing takes the attention out of its results" if not taken else f"the attention is taken out {taken} times"
    )


def _unlike_pytorchs(observed: str) -> Reason:
    return Reason(
        code=Code.FLEX_CALL,
        rule="flex_attention is called as PyTorch's function calls it",
        observed=observed,
        remedy="call torch.nn.attention.flex_attention.flex_attention",
    )


def _body(call: fx.Node, mod: object) -> fx.GraphModule | None:
    if not isinstance(mod, fx.Node) or mod.op != "get_attr":
        return None
    body = operator.attrgetter(str(mod.target))(call.graph.owning_module)
    return body if isinstance(body, fx.GraphModule) else None


def _unusual_option(options: object) -> Reason | None:
    """Return the reason against an option of Flex's own kernel, such as its tiles, which no other kernel has."""
    rule, remedy = "FlexAttention's kernel is asked for nothing special", "leave kernel_options out"
    said = str(options)
    if isinstance(options, Mapping):
        told = (f"{name}={x}" for name, x in options.items() if name not in _ANY_VALUE and x != _DEFAULTS.get(name))
        said = ", ".join(told)
    observed = f"kernel_options {said}"
    return Reason(code=Code.FLEX_CALL, rule=rule, observed=observed, remedy=remedy) if said else None


def _other_output(call: fx.Node) -> Reason | None:
    for user in call.users:
        if user.target is not operator.getitem:
            return Reason(
                code=Code.OTHER_OUTPUT,
                rule="the attention is taken out of what flex_attention returns",
                observed=f"{user.name} reads all of it",
            )
        index = user.args[1]
        if index not in (0, 1) and not relevance.comes_to_nothing(user):
            return Reason(
                code=Code.OTHER_OUTPUT,
                rule="of FlexAttention's outputs only the attention and its logsumexp are used",
                observed=f"{_OUTPUTS[index] if isinstance(index, int) else index} is used",
                remedy="ask return_aux for no max_scores",
            )
    return None


# ---- spelling it out ------------------------------------------------------------------------------------------------


def _spell_out(graph_module: fx.GraphModule, call: _Call) -> Spelled:
    others = [*call.score_others, *call.mask_others]
    inputs = list(dict.fromkeys(x for x in (call.q, call.k, call.v, *others) if isinstance(x, fx.Node)))
    values = {node: node.meta["example_value"] for node in inputs}
    q, k = values[call.q], values[call.k]
    scores = torch_tracing.untraced(lambda: q.new_empty((*q.shape[:3], k.shape[2]), dtype=computed_in(q.dtype)))
    mods = [
        torch_tracing.trace_score_function(mod, scores, [values.get(x, x) for x in own], of_score=of_score)
        for mod, own, of_score in ((call.score_mod, call.score_others, True), (call.mask_mod, call.mask_others, False))
    ]

    def function(*tensors: Any) -> Any:
        of_node = dict(zip(inputs, tensors, strict=True))
        q, k, v = (of_node[x] for x in (call.q, call.k, call.v))
        score_others, mask_others = ([of_node.get(x, x) for x in own] for own in (call.score_others, call.mask_others))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) if groups != 1 else x for x in (k, v))
        scores = (q @ k.transpose(-2, -1)).to(computed_in(q.dtype)) * call.scale
        allowed = mods[1](scores, *mask_others)
        masked = torch.where(allowed, mods[0](scores, *score_others), -math.inf)
        product = masked.softmax(-1).to(q.dtype) @ v
        lse = () if call.lse is None else (masked.logsumexp(-1) / math.log(2),)
        return product, expand.lying_as(product, call.own.meta["example_value"]), allowed, *lse

    # Insert after the first output taken out of the call: both are read below it.
    taken = min(x for x in (call.own, call.lse) if x is not None)
    (product, out, allowed, *lse), made = expand.beside(graph_module, taken, function, inputs)
    call.own.replace_all_uses_with(out)
    if call.lse is not None:
        call.lse.replace_all_uses_with(lse[0])
    return Spelled(
        call=call.node,
        own=call.own,
        product=product,
        out=out,
        lse=None if call.lse is None else (call.lse, lse[0]),
        allowed=allowed,
        nodes=made,
        blocks=call.blocks,
    )
