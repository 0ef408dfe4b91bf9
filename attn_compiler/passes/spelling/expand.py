"""Expansion of calls that hide an attention inside one node, so that matching and rewriting see its parts.

Each call in EXPANSIONS is replaced in the Dynamo graph by the ATen ops of its expansion, with example values. The mathematics is the same.
PyTorch's inference fast paths (`_transformer_encoder_layer_fwd`) are opaque to Inductor otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import closed, regions, strides
from attn_compiler.passes.graph.calls import Trying, untried
from attn_compiler.torch_private import snapshots as torch_snapshots, tracing as torch_tracing


def _heads(x_BSE: torch.Tensor, num_heads: int) -> torch.Tensor:
    return torch.unflatten(x_BSE, -1, (num_heads, -1)).transpose(1, 2)


def _allowed(mask: torch.Tensor | None, mask_type: int | None) -> torch.Tensor | None:
    """SDPA's mask from the fast paths' (True or nonzero: masked out; type 0 [S, S], 1 padding [B, S], 2 [B, H, S, S])."""
    if mask is None:
        return None
    allowed = mask.to(torch.bool).logical_not()
    return allowed[:, None, None, :] if mask_type == 1 else allowed


def _project_qkv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
    return tuple(F.linear(x, w, b) for x, w, b in parts)


def native_multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """aten::_native_multi_head_attention (inference fast path of nn.MultiheadAttention) in plain ops. query: (B, S, E)."""
    q, k, v = (_heads(x, num_head) for x in _project_qkv(query, key, value, qkv_weight, qkv_bias))
    allowed = _allowed(mask, mask_type)
    weights = None
    if need_weights:
        scores = (q @ k.transpose(-2, -1)) * (embed_dim // num_head) ** -0.5
        if allowed is not None:
            scores = scores.masked_fill(allowed.logical_not(), float("-inf"))
        weights = scores.softmax(-1)
        out = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def transformer_encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """aten::_transformer_encoder_layer_fwd (inference fast path of nn.TransformerEncoderLayer) in plain ops. src: (B, S, E)."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        operands = (x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(*operands, mask=mask, need_weights=False, mask_type=mask_type)[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attention(norm(src, norm_weight_1, norm_bias_1))
        return src + feed_forward(norm(src, norm_weight_2, norm_bias_2))
    src = norm(src + attention(src), norm_weight_1, norm_bias_1)
    return norm(src + feed_forward(src), norm_weight_2, norm_bias_2)


#: call in a Dynamo graph -> a function with the same arguments, traced into ATen ops in its place
EXPANSIONS: dict[object, Callable[..., Any]] = {
    F.multi_head_attention_forward: F.multi_head_attention_forward,
    torch._native_multi_head_attention: native_multi_head_attention,
    torch._transformer_encoder_layer_fwd: transformer_encoder_layer,
}


def each(
    graph_module: fx.GraphModule,
    is_wanted: Callable[[fx.Node], bool],
    spell: Callable[[fx.Node, Mapping[fx.Node, regions.Region]], object],
    trying: Trying = untried,
) -> None:
    """Run `spell` on each such node of one graph module that a mirror can look into, in its autocast region. where: of all nodes."""
    graph = graph_module.graph
    found = [node for node in graph.nodes if is_wanted(node) and not closed.is_closed(node)]
    where = regions.by_node(graph) if found else {}
    for node in found:
        with trying(node), where[node].active():
            spell(node, where)
    if found:
        graph_module.recompile()


def expand_calls(graph_module: fx.GraphModule, trying: Trying = untried) -> list[str]:
    """Expand all such calls of one graph module in place. Return the names of the expanded calls."""
    expanded = []

    def spell(call: fx.Node, where: Mapping[fx.Node, regions.Region]) -> None:
        # Inside vmap a value has fewer axes than its tensor. No attention is rewritten there.
        if not where[call].transforms:
            spell_out(graph_module, call, EXPANSIONS[call.target])
            expanded.append(call.name)

    each(graph_module, lambda node: node.op == "call_function" and node.target in EXPANSIONS, spell, trying)
    return expanded


def beside(
    graph_module: fx.GraphModule,
    place: fx.Node,
    function: Callable[..., Any],
    inputs: list[fx.Node],
    check: Callable[[Any], object] = lambda result: None,
) -> tuple[Any, tuple[fx.Node, ...]]:
    """Write a function of nodes as ATen ops before `place`. Return its result, and the new nodes. An error of `check` takes them back."""
    traced = torch_tracing.trace_pre_dispatch(function, [node.meta["example_value"] for node in inputs])
    before = set(graph_module.graph.nodes)
    with torch_snapshots.taken_back_on_error(graph_module):
        result = inline(graph_module.graph, place, traced.graph, inputs)
        check(result)
    return result, tuple(node for node in graph_module.graph.nodes if node not in before)


def lying_as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Order the axes in memory as those of `like`. Models take views that depend on it."""
    order = strides.order(like)
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.dim())])


def spell_out(
    graph_module: fx.GraphModule,
    call: fx.Node,
    called: Callable[..., Any],
    mode: FakeTensorMode | None = None,
) -> dict[fx.Node, Any]:
    """Replace a call by the ATen ops of a function of its arguments.
    Return the replacement of the call, or of each item taken out of its result. mode: of the values, if no argument may be a tensor."""
    graph = graph_module.graph
    flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    nodes = [x for x in flat if isinstance(x, fx.Node)]
    inputs = list(dict.fromkeys(nodes))

    def function(*values: Any) -> Any:
        of_node = dict(zip(inputs, values, strict=True))
        args, kwargs = pytree.tree_unflatten([of_node[x] if isinstance(x, fx.Node) else x for x in flat], spec)
        return called(*args, **kwargs)

    traced = torch_tracing.trace_pre_dispatch(function, [n.meta["example_value"] for n in inputs], mode)
    # Everything that may fail only makes new nodes.
    with torch_snapshots.taken_back_on_error(graph_module):
        result = inline(graph, call, traced.graph, inputs)
        parts = _parts(call, result)
    _replace(graph, call, parts)
    return parts


def inline(graph: fx.Graph, call: fx.Node, body: fx.Graph, inputs: list[fx.Node]) -> Any:
    """Copy a traced body in front of a call, with the call's meta. Return the body's result."""
    copies: dict[fx.Node, Any] = {}
    placeholders = iter(inputs)
    with graph.inserting_before(call):
        for node in body.nodes:
            if node.op == "placeholder":
                copies[node] = next(placeholders)
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: copies[n])
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
                _describe(copies[node], node, call)
    return None


def _describe(copy: fx.Node, traced: fx.Node, call: fx.Node) -> None:
    """Give a copied node its value and its origin. Traced values lose requires_grad, so it is copied from the inputs."""
    copy.meta = {k: v for k, v in call.meta.items() if k != "example_value"}
    value = traced.meta.get("val")
    if value is None:
        return
    if isinstance(value, torch.Tensor) and value.is_floating_point() and _wants_grad(call):
        value.requires_grad_(any(_wants_grad(n) for n in copy.all_input_nodes))
    copy.meta["example_value"] = value


def _wants_grad(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _parts(call: fx.Node, result: Any) -> dict[fx.Node, Any]:
    """Return the replacement of the call, or of each item taken out of its result."""
    if isinstance(result, fx.Node):
        return {call: result}
    return {user: result[user.args[1]] if user.target is operator.getitem else None for user in call.users}


def _replace(graph: fx.Graph, call: fx.Node, parts: dict[fx.Node, Any]) -> None:
    for node, part in parts.items():
        if part is not None:
            node.replace_all_uses_with(part)
        if node is not call:
            graph.erase_node(node)
    graph.erase_node(call)
