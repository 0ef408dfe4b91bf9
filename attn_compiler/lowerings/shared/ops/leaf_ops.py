"""Registration of leaf ops: one a lowering family, all of one schema, with fakes and autograd. Imports torch and the contract alone.

    attn_compiler::<family>(Tensor q, Tensor k, Tensor v, Tensor[] operands, str spec) -> (Tensor out, Tensor lse)
    attn_compiler::<family>_backward(grad_out, grad_lse, q, k, v, operands, out, lse, spec) -> (dq, dk, dv, Tensor[])
    attn_compiler::<family>_forward: the leaf op without its formula of autograd
    attn_compiler::<family>_part: the leaf op whose backward gets minus delta for the lse (merging.py); it does not save its output
    attn_compiler::<family>_given: a formula of autograd for results of other nodes (given_ops.py)

q, k, v, out: logical BHSD. out: q's dtype, BSHD in memory, which is what models transpose to next. lse: (B, Hq, Sq),
contiguous, float32 (float64 for float64), natural logarithm.
operands: tensors that masks and score changes load, in the family's own order. The backward's list holds the gradients of those that
want one, in the same order. Gradients are contiguous; a family may give those of q, k and v other strides.
spec: the spec's text, and all further decisions: the choice is spelled in the graph, and so in every cache key. Sizes and
strides in it are those that were decided on; the op itself goes by its tensors.

Ops take their inputs in the strides that the graph gives them (needs_exact_strides): layouts are nodes of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import GIVEN as GIVEN, PART as PART
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.torch_private.op_library import BODIES, LIBRARY, NAMESPACE, PLAIN, Late, define, register_fake

LEAF_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor[] operands, str spec) -> (Tensor out, Tensor lse)"
BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor[] operands, Tensor out, Tensor lse, "
    "str spec) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor[] grad_operands)"
)

_WITHOUT_AUTOGRAD = "_forward"

Tensors = Sequence[torch.Tensor]
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]]
Differentiable = Callable[[Tensors, str], list[bool]]
OfTensor = Callable[[torch.Tensor], torch.Tensor]
InGraph = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tensors, str], list[torch.Tensor | None]]


def late(module: str, function: str, *, site: str | None = None, notes: bool = False) -> Late:
    """Name a function of a module of this package, which is imported at its first call."""
    return Late(f"attn_compiler.lowerings.{module}", function, site, notes)


def empty_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a gradient of `tensor`, in the strides that families give it unless they say otherwise."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, operands: Tensors, text: str
) -> list[torch.Tensor | None]:
    return [None] * len(operands)


def register_forward(name: str, *, forward: Forward, dispatch_key: str, fake: Forward | None = None) -> None:
    """Define the leaf op `name` without a backward, for forwards that are never differentiated. Otherwise as `register_family`.

    fake: for an op whose outputs differ from those of every family.
    """
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    define(name, LEAF_SCHEMA, forward, dispatch_key)
    register_fake(name, fake_forward if fake is None else fake)


def register_family(
    name: str,
    *,
    forward: Forward,
    backward: Backward,
    differentiable: Differentiable,
    dispatch_key: str,
    gradient: OfTensor = empty_gradient,
    prepare_grad_out: OfTensor = as_it_is,
    in_graph: InGraph = _nothing,
    has_part: bool = False,
) -> None:
    """Define the leaf op `name` and its backward. Does nothing if they exist: a reloaded module keeps the first ones.

    forward, backward: implementations under the schemas above. differentiable(operands, text): which operands get a gradient.
    dispatch_key: "CompositeExplicitAutograd" for any device, or that of one ("CUDA"). gradient(tensor): an unfilled gradient of q, k or
    v. prepare_grad_out: sets the strides of grad_out; traced, in front of the backward. in_graph(grad_out, out, lse, operands, text):
    traced too: the gradients of those operands that ordinary nodes compute best; None for all others. has_part: define the op for sites
    that are merged, too, whose gradient of the lse is minus delta.
    """
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    with_autograd = (name, name + PART) if has_part else (name,)
    for op in (*with_autograd, name + _WITHOUT_AUTOGRAD):
        define(op, LEAF_SCHEMA, forward, dispatch_key)
        register_fake(op, fake_forward)
    register_backward(
        name, backward=backward, differentiable=differentiable, dispatch_key=dispatch_key, gradient=gradient
    )
    for op in with_autograd:
        is_part = op != name
        torch.library.register_autograd(
            f"{NAMESPACE}::{op}",
            _autograd_backward(f"{name}_backward", differentiable, prepare_grad_out, in_graph, is_part=is_part),
            setup_context=functools.partial(_setup_context, is_part=is_part),
            lib=LIBRARY,
        )


def leaf_op(name: str, spec: AttentionSpec) -> Any:
    """Return a family's leaf op, with the formula of autograd that a site needs."""
    return getattr(getattr(torch.ops, NAMESPACE), name + PART if spec.lse == "merged" else name).default


def register_backward(
    name: str,
    *,
    backward: Backward,
    differentiable: Differentiable,
    dispatch_key: str,
    gradient: OfTensor = empty_gradient,
) -> None:
    """Define the backward of a family, or of an op without a leaf op of its own (given_ops.py). As `register_family`."""
    op = f"{name}_backward"
    if hasattr(getattr(torch.ops, NAMESPACE), op):
        return
    define(op, BACKWARD_SCHEMA, backward, dispatch_key)
    register_fake(op, _fake_backward(differentiable, gradient))


def without_autograd(graph: fx.Graph) -> None:
    """Replace calls of leaf ops, in a graph that autograd was traced through, by the ops without their formula, whose bodies Inductor
    calls.

    Ops that only carry a formula are removed. The formula, which has nothing left to do, would take the host 10 of 34 µs of a call on an
    H200 machine.
    """
    from attn_compiler.torch_private.inductor import call_directly

    for node in list(graph.nodes):
        if node.op == "call_function" and getattr(node.target, "namespace", None) == NAMESPACE:
            _, _, name = node.target.name().partition("::")
            if name.endswith(GIVEN):
                _leave_out(node)
                continue
            bare = getattr(getattr(torch.ops, NAMESPACE), name.removesuffix(PART) + _WITHOUT_AUTOGRAD, None)
            node.target = PLAIN.get(name, node.target) if bare is None else bare.default
            _, _, called = node.target.name().partition("::")
            if called in BODIES:
                body = BODIES[called]
                call_directly(node.target.name(), body.module, body.function, site=body.site)


def _leave_out(given: fx.Node) -> None:
    """Replace its outputs by its operands."""
    handed_on: Any = given.args[3]
    for output in list(given.users):
        output.replace_all_uses_with(handed_on[output.args[1]])
        output.graph.erase_node(output)
    given.graph.erase_node(given)


def output_strides(heads: int, seqlen_q: int, head_dim: int) -> tuple[int, int, int, int]:
    """Return the strides of out, logical BHSD: BSHD in memory."""
    return (seqlen_q * heads * head_dim, head_dim, heads * head_dim, 1)


def like_output(grad_out: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the output, BSHD in memory. Traced: no node at all where it already is."""
    return grad_out.transpose(1, 2).contiguous().transpose(1, 2)


def empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate out and lse, in the strides that every family gives them."""
    batch, heads, seqlen_q, _ = q.shape
    out = torch.empty((batch, seqlen_q, heads, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    return out, torch.empty((batch, heads, seqlen_q), dtype=computed_in(q.dtype), device=q.device)


def fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_outputs(q, v)


def _fake_backward(differentiable: Differentiable, gradient: OfTensor) -> Backward:
    def fake(
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        operands: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        spec: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        wanted = differentiable(operands, spec)
        grads = [empty_gradient(tensor) for tensor, is_wanted in zip(operands, wanted, strict=True) if is_wanted]
        return gradient(q), gradient(k), gradient(v), grads

    return fake


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor], *, is_part: bool
) -> None:
    q, k, v, operands, ctx.spec = inputs
    ctx.save_for_backward(q, k, v, *output[int(is_part) :], *operands)


def _autograd_backward(
    op: str, differentiable: Differentiable, prepare_grad_out: OfTensor, in_graph: InGraph, *, is_part: bool
) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
        grad_out = prepare_grad_out(grad_out)
        q, k, v, *kept = ctx.saved_tensors
        out, lse, *operands = (out_for_minus_delta(grad_out), *kept) if is_part else kept
        leaf = getattr(getattr(torch.ops, NAMESPACE), op).default
        *grads, grad_operands = leaf(grad_out, grad_lse, q, k, v, operands, out, lse, ctx.spec)
        found = iter(grad_operands)
        wanted = differentiable(operands, ctx.spec)
        by_nodes = in_graph(grad_out, out, lse, operands, ctx.spec)
        pairs = zip(wanted, by_nodes, strict=True)
        return *grads, [next(found) if is_wanted else by_node for is_wanted, by_node in pairs], None

    return backward


def out_for_minus_delta(grad_out: torch.Tensor) -> torch.Tensor:
    """Return zeros, the out that a backward gets where its gradient of the lse is minus delta: it then computes that delta itself."""
    return torch.zeros_like(grad_out)


# ---- copies of tensors that are written to -----------------------------------------------------------------------------


def _held(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


#: Copy of a tensor that is written to later, such as a buffer. It is an op of its own because the partitioner would recompute a clone in
#: the backward, from the values written by then.
if not hasattr(getattr(torch.ops, NAMESPACE), "held"):
    for op in ("held", "held" + _WITHOUT_AUTOGRAD):
        LIBRARY.define(f"{op}(Tensor x) -> Tensor")
        LIBRARY.impl(op, _held, "CompositeExplicitAutograd")
        register_fake(op, _held)
    torch.library.register_autograd(f"{NAMESPACE}::held", lambda ctx, grad: grad, lib=LIBRARY)
