"""`attn_compiler::linear_call`: one call of a model's own function of linear attention, as one node of Dynamo's graph.

    out, last = function(operands);  text: the LinearForm that the function was proved to be

Dynamo records it where the model calls the function (passes/matching/linear). A step of the pipeline replaces it by a lowering.
`linear_own` computes the same by the function's own ops, for calls that no lowering replaces. Both run the model's function, so an
unchanged graph computes what the model computes.

operands: by the roles of the form. out: (B, S, H, V), contiguous. last: the state after the last token, (B, H, K, V), for state-space
models (B, H, V, K).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attn_compiler.spec.linear import LinearForm
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE, register_helper

SCHEMA = "(Tensor[] operands, str text) -> (Tensor out, Tensor last)"

Own = Callable[[LinearForm, Sequence[Tensor]], tuple[Tensor, Tensor]]

#: the models' own functions, by `LinearForm.function`
FUNCTIONS: dict[str, Own] = {}


def own(operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Run the model's function. Raises KeyError in a process where no model has called the function."""
    form = LinearForm.from_text(text)
    if form.function not in FUNCTIONS:
        raise KeyError(f"no model of this process has the function {form.function}")
    return FUNCTIONS[form.function](form, operands)


def fake(operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Return outputs without memory."""
    form = LinearForm.from_text(text)
    given = dict(zip(form.roles, operands, strict=True))
    v, k = (given["x"], given["B"]) if form.recurrence == "ssd" else (given["v"], given["k"])
    batch, _, heads, dim_v = v.shape
    state = (batch, heads, dim_v, k.shape[-1]) if form.recurrence == "ssd" else (batch, heads, k.shape[-1], dim_v)
    out = v.new_empty(v.shape, dtype=getattr(torch, form.out_dtype))
    return out, v.new_empty(state, dtype=getattr(torch, form.state_dtype))


def _without_aliases(operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Run the model's function with outputs that are contiguous, and share no memory with each other or with the inputs."""
    out, last = own([x.detach() for x in operands], text)
    return out.clone(memory_format=torch.contiguous_format), last.clone(memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    operands, ctx.text = inputs
    ctx.save_for_backward(*operands)
    ctx.wanted = [x.requires_grad for x in operands]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[list[Tensor | None], None]:
    """Run the function once more, and then its own backward."""
    with torch.enable_grad():
        operands = [x.detach().requires_grad_(wanted) for x, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)]
        outs = own(operands, ctx.text)
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
    wanted = [x for x in operands if x.requires_grad]
    found = torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
    by_operand = dict(zip(map(id, wanted), found, strict=True))
    return [by_operand.get(id(x)) for x in operands], None


register_helper("linear_call", SCHEMA, function=_without_aliases, fake=fake, differentiated=(_setup, _backward))
if not hasattr(getattr(torch.ops, NAMESPACE), "linear_own"):
    LIBRARY.define("linear_own" + SCHEMA)
    LIBRARY.impl("linear_own", own, "CompositeImplicitAutograd")

linear_call = getattr(torch.ops, NAMESPACE).linear_call.default
linear_own = getattr(torch.ops, NAMESPACE).linear_own.default


def calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of a graph, in order."""
    return graph.find_nodes(op="call_function", target=linear_call, sort=True)


def give_back(graph: fx.Graph) -> None:
    """Replace every call by the model's own function."""
    for node in calls(graph):
        node.target = linear_own
