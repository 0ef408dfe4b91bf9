"""An autograd.Function around a kernel of a library, and the ops that it calls besides the kernel.

Libraries write the gradient of a kernel as the backward of such a function. Dynamo has it as one higher-order call with two bodies. It
means no more than the kernel and its gradient if the forward only pads and slices around the kernel, and the backward around the kernel's
own backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import bodies, opaque_calls
from attn_compiler.passes.graph.calls import run, target_name

_BODIES = 2

#: calls that are allowed around a kernel; the function's gradient passes its own `detach`
_AROUND = frozenset({"pad", "getitem", "detach", "contiguous", "_set_grad_enabled"})
_AROUND_BACKWARD = _AROUND | {"empty_like", "empty"}


def kernel_of(node: fx.Node) -> fx.Node | None:
    """Return the call of a library's attention in the forward of an autograd.Function; None for any other node."""
    if not bodies.is_higher_order(node) or target_name(node) != "autograd_function_apply":
        return None
    found = bodies.bodies(node)
    calls = [n for n in found[0].graph.nodes if opaque_calls.name_of(n) is not None] if found else []
    return calls[0] if len(calls) == 1 else None


def differs(node: fx.Node, kernel: fx.Node) -> str | None:
    """Name an op that an autograd.Function calls besides its kernel and the kernel's own backward; None if there is none.

    kernel: the call in the forward. library_gradients.py checks the arguments of those two calls, and the use of their results.
    """
    found = bodies.bodies(node)
    if len(found) != _BODIES:
        return "its autograd.Function has another form than Dynamo's"
    forward, backward = found
    given: Any = forward.graph.output_node().args[0]
    if not (isinstance(given, tuple) and given and isinstance(given[0], tuple) and isinstance(given[0][0], fx.Node)):
        return "its autograd.Function has another form than Dynamo's"
    backwards = _backward_kernels(backward, kernel)
    if len(backwards) != 1:
        return f"the backward of its autograd.Function calls {len(backwards)} kernels of the library, not one"
    for body, own, around in ((forward, kernel, _AROUND), (backward, backwards[0], _AROUND_BACKWARD)):
        calls = (n for n in body.graph.nodes if n.op not in ("placeholder", "output") and n is not own)
        other = next((n for n in calls if target_name(n) not in around), None)
        if other is not None:
            return f"its autograd.Function also calls {target_name(other)} ({other.name})"
    return None


def backward_of(node: fx.Node, kernel: fx.Node) -> fx.Node:
    """Return the call of the kernel's own backward, for a function of which `differs` is None."""
    return _backward_kernels(bodies.bodies(node)[1], kernel)[0]


def _backward_kernels(backward: fx.GraphModule, kernel: fx.Node) -> list[fx.Node]:
    """Return the calls of ops of the kernel's library. A library has no other op in a backward than the backward of this kernel."""
    namespace = opaque_calls.namespace_of(kernel)
    return [n for n in backward.graph.nodes if namespace is not None and opaque_calls.namespace_of(n) == namespace]


class Inside:
    """The forward of an autograd.Function with its kernel taken out: the kernel's inputs, and what is computed from its output."""

    def __init__(self, node: fx.Node, kernel: fx.Node) -> None:
        body = bodies.bodies(node)[0]
        self._kernel = kernel
        placeholders = bodies.placeholders(body)
        given = node.args[_BODIES : _BODIES + len(placeholders)]
        self._given = dict(zip(placeholders, given, strict=True))
        self._output: Any = body.graph.output_node().args[0]
        self.inputs = list(dict.fromkeys(x for x in given if isinstance(x, fx.Node)))

    def values(self, nodes: Sequence[fx.Node], of_node: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
        """Return the kernel's inputs, with gradients. nodes: of the body. of_node: the values of `inputs`."""
        known = self._known(of_node)
        return [_value(n, known) for n in nodes]

    def result(self, attention: torch.Tensor, of_node: Mapping[fx.Node, Any]) -> torch.Tensor:
        """Return the function's output. attention: a value in place of the kernel's output."""
        known = self._known(of_node) | {opaque_calls.attention_of(self._kernel): attention}
        out = self._output[0][0]
        found: torch.Tensor = _value(out, known)
        return found

    def _known(self, of_node: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        return {inner: of_node.get(x, x) if isinstance(x, fx.Node) else x for inner, x in self._given.items()}


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Evaluate a node and all that it depends on, down to the known nodes."""
    if node not in known:
        is_detached = target_name(node) == "detach"
        known[node] = _value(node.all_input_nodes[0], known) if is_detached else run(node, lambda n: _value(n, known))
    return known[node]
