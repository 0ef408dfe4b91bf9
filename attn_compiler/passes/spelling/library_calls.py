"""Attention kernels called by a library's own op, written out beside the call if its arguments describe the whole attention.

An op is known by its name and by the names of its arguments (library_ops.py), read from its schema. No library is imported, and a version
with other arguments is a miss. The call stays in the graph until a kernel replaces it (flex.give_back), so a site that no lowering serves
better is left to the library.

Queries count from the end of the keys, as in flash_attn: the last query sees up to the last key.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler.passes.graph import autograd_functions, library_ops, opaque_calls, regions, relevance, strides
from attn_compiler.passes.graph.calls import Trying, untried
from attn_compiler.passes.graph.library_ops import OPS
from attn_compiler.passes.graph.spelling import Spelled
from attn_compiler.passes.spelling import expand, library_gradients
from attn_compiler.passes.spelling.flex import Found
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import symbols as torch_symbols

NAME = "library call"


def spell_library_calls(graph_module: fx.GraphModule, trying: Trying = untried) -> Found:
    """Write out all such calls of one graph module that can be."""
    spelled: list[Spelled] = []
    left: dict[fx.Node, Reason] = {}

    def spell(call: fx.Node, where: Mapping[fx.Node, regions.Region]) -> None:
        kernel = library_ops.kernel_in(call)
        found = None if kernel is None else _taken(graph_module, call, kernel, where[call])
        if isinstance(found, Reason):
            left[call] = found
        elif found is not None:
            spelled.append(found)

    expand.each(graph_module, lambda node: library_ops.kernel_in(node) is not None, spell, trying)
    return Found(spelled=tuple(spelled), left=left)


def _taken(graph_module: fx.GraphModule, node: fx.Node, kernel: fx.Node, region: regions.Region) -> Spelled | Reason:
    try:
        return _spell_out(graph_module, _Reader(node, kernel).read(region))
    except _SaysOtherwise as met:
        reason = opaque_calls.reason(opaque_calls.name_of(kernel) or "")
        return Reason(
            code=Code.LIBRARY_ARGUMENTS,
            rule="the arguments of a library's kernel say all of the attention",
            observed=f"{reason.observed}: {met}",
            remedy=reason.remedy,
        )


# ---- reading a call -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """One call, or one autograd.Function around a call.

    node: the call in the graph.
    kernel: the call of the kernel: the same node, or a node in the body of an autograd.Function.
    own: the attention taken out of the result of `node`.
    bounds: start and end offsets of the tokens' documents.
    before, after: number of keys left and right of its own key that a query sees; None: all.
    """

    node: fx.Node
    kernel: fx.Node
    own: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    before: int | None
    after: int | None
    softcap: float
    bounds: fx.Node | None


class _SaysOtherwise(Exception):
    """Arguments that can't be expressed here; the text says why."""


class _Reader:
    def __init__(self, node: fx.Node, kernel: fx.Node) -> None:
        self._node = node
        self._kernel = kernel
        self._op = OPS[opaque_calls.name_of(kernel) or ""]
        given = library_ops.given_arguments(kernel)
        if isinstance(given, str):
            raise _SaysOtherwise(given)
        self._given = given

    def read(self, region: regions.Region) -> _Call:
        if region.transforms:
            raise _SaysOtherwise("vmap, grad, vjp or jvp is applied to it in the graph")
        call = self._read()
        if self._node is not self._kernel:
            differs = library_gradients.differs(self._node, self._kernel, self._op)
            if differs is not None:
                raise _SaysOtherwise(differs)
        return call

    def _read(self) -> _Call:
        op = self._op
        for name in (*op.qkv, op.scale, *op.window, *filter(None, (op.causal, op.softcap, op.mask_type))):
            if name not in self._given:
                raise _SaysOtherwise(f"it has no argument {name}")
        q, k, v = (self._tensor(name) for name in op.qkv)
        for name in (*op.off, *filter(None, (op.dropout,))):
            if not library_ops.is_off(self._given.get(name)):
                is_tensor = isinstance(self._given[name], fx.Node)
                raise _SaysOtherwise(f"{name} is {'a tensor' if is_tensor else self._given[name]}")
        other = library_ops.unknown_argument(self._kernel, self._given, op.known())
        if other is not None:
            raise _SaysOtherwise(f"nothing is known of its argument {other}")
        before, after = self._window(q, k)
        softcap = self._number(op.softcap) if op.softcap is not None else 0.0
        if softcap < 0:
            raise _SaysOtherwise(f"{op.softcap} is {softcap}")
        call = _Call(
            node=self._node,
            kernel=self._kernel,
            own=self._own(),
            q=q,
            k=k,
            v=v,
            scale=self._scale(q),
            before=before,
            after=after,
            softcap=softcap,
            bounds=self._bounds(),
        )
        self._require_sizes(call)
        _require_dtype(call)
        return call

    def _tensor(self, name: str) -> fx.Node:
        node = self._given[name]
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("example_value"), torch.Tensor):
            raise _SaysOtherwise(f"{name} is {node}")
        return node

    def _number(self, name: str) -> float:
        number = self._given[name]
        if not isinstance(number, (bool, int, float)):
            raise _SaysOtherwise(f"{name} is {number}, which is not known while compiling")
        return float(number)

    def _scale(self, q: fx.Node) -> float:
        if self._given[self._op.scale] is not None:
            return float(self._number(self._op.scale))
        head_dim = q.meta["example_value"].shape[-1]
        if not isinstance(head_dim, int):
            raise _SaysOtherwise("the head dim is symbolic, and no scale is given")
        return 1.0 / math.sqrt(head_dim)

    def _window(self, q: fx.Node, k: fx.Node) -> tuple[int | None, int | None]:
        op = self._op
        if op.mask_type is not None:
            kind = self._number(op.mask_type)
            if kind == 1 and not _same_length(q, k):
                raise _SaysOtherwise("it is causal from the first query on, and there may be more keys than queries")
            return None, (0 if kind else None)
        sizes = self._sizes()
        before, after = (None if size < 0 else size for size in sizes)
        return before, (0 if op.causal is not None and self._number(op.causal) else after)

    def _sizes(self) -> tuple[int, int]:
        names = self._op.window
        given = [self._given[name] for name in names] if len(names) > 1 else self._given[names[0]]
        given = [-1, -1] if given is None else [-1 if size is None else size for size in given]
        if len(given) != 2 or not all(isinstance(size, int) for size in given):
            raise _SaysOtherwise(f"{', '.join(names)} is {given}, which is not known while compiling")
        return given[0], given[1]

    def _bounds(self) -> fx.Node | None:
        if self._op.bounds is None:
            return None
        of_q, of_k = (self._given.get(name) for name in self._op.bounds)
        if of_q is not of_k:
            raise _SaysOtherwise(f"{self._op.bounds[0]} and {self._op.bounds[1]} are two tensors, which may differ")
        return of_q if isinstance(of_q, fx.Node) else None

    def _own(self) -> fx.Node:
        own = [user for user in self._node.users if user.target is operator.getitem and user.args[1] == 0]
        for user in self._node.users:
            if user not in own and not (user.target is operator.getitem and relevance.comes_to_nothing(user)):
                raise _SaysOtherwise("more than the attention of what it gives is used, such as the sums of a backward")
        if len(own) != 1:
            raise _SaysOtherwise("its attention is not taken out of what it gives")
        return own[0]

    def _require_sizes(self, call: _Call) -> None:
        q, k, v = (node.meta["example_value"] for node in (call.q, call.k, call.v))
        rank = 4 if call.bounds is None else 3
        if not q.dim() == k.dim() == v.dim() == rank:
            raise _SaysOtherwise(f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} axes, not {rank}")
        if not all(isinstance(x.shape[-2], int) for x in (q, k, v)):
            raise _SaysOtherwise("how many heads there are is symbolic")
        if call.bounds is not None and not _same_length(call.q, call.k):
            raise _SaysOtherwise("there may be more keys than queries")
        out = opaque_calls.attention_of(call.kernel).meta["example_value"]
        if (*q.shape[:-1], v.shape[-1]) != tuple(out.shape):
            raise _SaysOtherwise(f"it gives {tuple(out.shape)} for q of {tuple(q.shape)}")
        # Written out, a query without keys gives NaN; a library's kernel gives 0.
        sees_all = call.before is None and call.after is None
        if call.softcap and not sees_all and not torch_symbols.statically_known(q.shape[-3] <= k.shape[-3]):
            raise _SaysOtherwise("queries may have no keys, beside a softcap")


def _require_dtype(call: _Call) -> None:
    """Require dtypes that autocast keeps. It changes no dtype of a library's op, but does so for the ops written in its place."""
    q, k, v = (node.meta["example_value"] for node in (call.q, call.k, call.v))
    if not q.dtype == k.dtype == v.dtype:
        raise _SaysOtherwise(f"q, k and v are of {q.dtype}, {k.dtype} and {v.dtype}")
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.get_autocast_dtype(kind):
        raise _SaysOtherwise(f"autocast to {torch.get_autocast_dtype(kind)} is on, and q is of {q.dtype}")


def _same_length(q: fx.Node, k: fx.Node) -> bool:
    of_q, of_k = (node.meta["example_value"].shape[-3] for node in (q, k))
    return torch_symbols.statically_known(of_q == of_k)


# ---- spelling it out ------------------------------------------------------------------------------------------------


def _spell_out(graph_module: fx.GraphModule, call: _Call) -> Spelled:
    given = [call.q, call.k, call.v, *([call.bounds] if call.bounds is not None else [])]
    is_square = _same_length(call.q, call.k)
    inside = autograd_functions.Inside(call.node, call.kernel) if call.node is not call.kernel else None
    inputs = list(dict.fromkeys(given)) if inside is None else inside.inputs

    def function(*tensors: Any) -> Any:
        of_node = dict(zip(inputs, tensors, strict=True))
        if inside is None:
            return _attention(call, [of_node[node] for node in given], is_square=is_square)
        product, own = _attention(call, inside.values(given, of_node), is_square=is_square)
        return product, inside.result(own, of_node)

    def check(result: Any) -> None:
        _require_same(result[1].meta["example_value"], call.own.meta["example_value"])

    (product, out), made = expand.beside(graph_module, call.own, function, inputs, check)
    call.own.replace_all_uses_with(out)
    return Spelled(call=call.node, own=call.own, product=product, out=out, nodes=made, pattern=NAME, kernel=call.kernel)


def _attention(call: _Call, given: Sequence[torch.Tensor], *, is_square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention as (B, H, Sq, D), and in the call's own layout."""
    documents = _documents(given[3], given[0].shape[0]) if call.bounds is not None else None
    q, k, v = ((x.unsqueeze(0) if documents is not None else x).transpose(1, 2) for x in given[:3])
    allowed = _allowed(call, q.shape[2], k.shape[2], documents, q.device)
    causal_alone = is_square and documents is None and call.before is None and call.after == 0
    if call.softcap:
        product = _capped(call, q, k, v, allowed)
    else:
        product = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if causal_alone else allowed,
            is_causal=causal_alone,
            scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    out = product.transpose(1, 2)
    own = opaque_calls.attention_of(call.kernel).meta["example_value"]
    return product, expand.lying_as(out.squeeze(0) if documents is not None else out, own)


def _require_same(made: torch.Tensor, own: torch.Tensor) -> None:
    """Require that the written-out result has the dtype and the strides of the call's result."""
    if made.dtype != own.dtype:
        raise _SaysOtherwise(f"it gives {own.dtype} for q of {made.dtype}")
    if not strides.same(made, own):
        raise _SaysOtherwise(f"it gives strides of {tuple(own.stride())}, not {tuple(made.stride())}")


def _documents(bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the document of each token. Tokens before the first bound have document 0; those after the last bound share one of their own.

    The library computes neither.
    """
    positions = torch.arange(tokens, dtype=bounds.dtype, device=bounds.device)
    return torch.searchsorted(bounds, positions, right=True)


def _allowed(
    call: _Call, queries: int, keys: int, documents: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    query = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    parts = []
    if call.after is not None:
        parts.append(key <= query + call.after)
    if call.before is not None:
        parts.append(key >= query - call.before)
    if documents is not None:
        parts.append(documents[:, None] == documents[None, :])
    allowed = None
    for part in parts:
        allowed = part if allowed is None else allowed & part
    return allowed


def _capped(
    call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups != 1 else x for x in (k, v))
    scores = (q @ k.transpose(-2, -1)).float() * call.scale
    scores = torch.tanh(scores / call.softcap) * call.softcap
    if allowed is not None:
        scores = torch.where(allowed, scores, -math.inf)
    return scores.softmax(-1).to(q.dtype) @ v
