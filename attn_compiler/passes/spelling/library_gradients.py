"""Check that the backward of an autograd.Function around a library's kernel is the gradient of its forward, tensor by tensor.

The forward may pad the head dim of q, k and v, and slice that of the attention. The backward must call the library's own backward with the
result's gradient, padded as the attention was sliced, and with the saved tensors. Each operand must get the gradient that this kernel wrote
for it, sliced as the operand was padded. Any other gradient belongs to an unknown function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import autograd_functions, bodies, library_ops, opaque_calls
from attn_compiler.passes.graph.calls import argument, target_name
from attn_compiler.passes.graph.library_ops import Op
from attn_compiler.torch_private import symbols as torch_symbols

#: kernel -> its backward, whose arguments have the forward's names and those in _OWN
_BACKWARDS: Mapping[str, str] = {
    "flash_attn::_flash_attn_forward": "flash_attn::_flash_attn_backward",
    "flash_attn::_flash_attn_varlen_forward": "flash_attn::_flash_attn_varlen_backward",
}
_GRADIENTS = ("dq", "dk", "dv")
_OWN = frozenset({"dout", "out", "softmax_lse", *_GRADIENTS})

#: ops that change no element
_PLAIN = ("detach", "contiguous")
_EMPTY = ("empty_like", "empty")


class _Differs(Exception):
    """A difference from the library's own gradient; the text says which."""


def differs(node: fx.Node, kernel: fx.Node, op: Op) -> str | None:
    """Return the difference between the gradient of an autograd.Function and that of its forward's kernel; None if there is none."""
    found = autograd_functions.differs(node, kernel)
    if found is not None:
        return found
    try:
        _Function(node, kernel, op).check()
    except _Differs as met:
        return str(met)
    return None


class _Function:
    def __init__(self, node: fx.Node, kernel: fx.Node, op: Op) -> None:
        self._node = node
        self._kernel = kernel
        self._op = op
        forward, backward = bodies.bodies(node)
        self._backward = autograd_functions.backward_of(node, kernel)
        self._inputs = bodies.placeholders(forward)
        self._results = _listed(backward)
        outputs_and_saved = _listed(forward)
        if len(outputs_and_saved) != 2 or len(self._results) != len(self._inputs):
            raise _Differs("its autograd.Function has another form than Dynamo's")
        self._outputs, saved = outputs_and_saved
        given = bodies.placeholders(backward)
        self._gradients, kept = given[: len(self._outputs)], given[len(self._outputs) :]
        if len(kept) != len(saved):
            raise _Differs("its autograd.Function has another form than Dynamo's")
        self._saved = {inner: _plain(outer) for inner, outer in zip(kept, saved, strict=True)}
        self._given = _bound(kernel)
        self._given_back = _bound(self._backward)
        order = list(backward.graph.nodes)
        self._after = set(order[order.index(self._backward) :])

    def check(self) -> None:
        self._require_same_attention()
        self._require_saved()
        self._require_gradient_of_result()
        self._require_results()

    def _require_same_attention(self) -> None:
        op = self._op
        if opaque_calls.qualified(self._backward) != _BACKWARDS.get(opaque_calls.name_of(self._kernel) or ""):
            raise _Differs(f"{opaque_calls.qualified(self._backward)} is not known as its backward")
        for name in (*op.qkv, *sorted(_OWN)):
            if name not in self._given_back:
                raise _Differs(f"its backward has no argument {name}")
        for name in (op.scale, *op.window, *filter(None, (op.causal, op.softcap))):
            if self._given_back.get(name) != self._given.get(name):
                raise _Differs(
                    f"{name} is {self._given.get(name)} in the forward, {self._given_back.get(name)} in the backward"
                )
        for name in (*op.off, op.dropout):
            if not library_ops.is_off(self._given_back.get(name)):
                raise _Differs(f"{name} is {self._given_back[name]} in the backward")
        other = library_ops.unknown_argument(self._backward, self._given_back, op.known() | _OWN)
        if other is not None:
            raise _Differs(f"nothing is known of the argument {other} of its backward")

    def _require_saved(self) -> None:
        """Require that the backward kernel gets the operands and the results of the forward's."""
        wanted = {name: self._given[name] for name in (*self._op.qkv, *(self._op.bounds or ()))}
        for name, x in wanted.items():
            if x is None or self._kept(name) is not _plain(x):
                raise _Differs(f"{name} of its backward is not what its forward had")
        for index, name in enumerate(("out", "softmax_lse")):
            kept = self._kept(name)
            if not isinstance(kept, fx.Node) or kept.target is not operator.getitem:
                raise _Differs(f"{name} of its backward is not what its forward gave")
            if kept.args != (self._kernel, index):
                raise _Differs(f"{name} of its backward is not what its forward gave")

    def _kept(self, name: str) -> Any:
        return self._saved.get(_plain(self._given_back.get(name)))

    def _require_gradient_of_result(self) -> None:
        attention = opaque_calls.attention_of(self._kernel)
        without: Any = self._node.kwargs.get("non_differentiable_idx") or ()
        if 0 in without:
            raise _Differs("its autograd.Function gives no gradient")
        if _above(self._outputs[0], _sliced) is not attention:
            raise _Differs("its autograd.Function gives something else than the attention, with its head dim sliced")
        dout = self._given_back["dout"]
        if _above(dout, _padded) is not self._gradients[0] or not _same_sizes(dout, attention):
            raise _Differs("its backward is given something else than the gradient of the attention")

    def _require_results(self) -> None:
        """Require that each operand gets its own gradient, and that nothing else gets one."""
        operands = [_above(self._given[name], _padded) for name in self._op.qkv]
        buffers = [self._given_back[name] for name in _GRADIENTS]
        if len(set(operands)) != len(operands) or not set(operands) <= set(self._inputs):
            raise _Differs("its operands are not three inputs of its autograd.Function, padded")
        if len(set(buffers)) != len(buffers):
            raise _Differs("its backward writes two gradients to one tensor")
        of_input = dict(zip(operands, zip(self._op.qkv, buffers, strict=True), strict=True))
        for given, result in zip(self._inputs, self._results, strict=True):
            if given not in of_input:
                if result is not None:
                    raise _Differs(f"its autograd.Function gives a gradient for {given.name}, which is no operand")
                continue
            name, buffer = of_input[given]
            if not self._is_gradient(result, buffer, given, self._given[name]):
                raise _Differs(f"the gradient that its autograd.Function gives for {name} is not that of its kernel")

    def _is_gradient(self, result: Any, buffer: Any, given: fx.Node, operand: fx.Node) -> bool:
        if not isinstance(result, fx.Node) or not isinstance(buffer, fx.Node) or target_name(buffer) not in _EMPTY:
            return False
        if _above(result, _sliced) is not buffer or not (_same_sizes(buffer, operand) and _same_sizes(result, given)):
            return False
        return all(step in self._after for step in _steps(result, _sliced)[:-1])


def _listed(body: fx.GraphModule) -> tuple[Any, ...]:
    given: Any = body.graph.output_node().args[0]
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _bound(node: fx.Node) -> dict[str, Any]:
    given = library_ops.given_arguments(node)
    if isinstance(given, str):
        raise _Differs(given)
    return given


def _plain(node: Any) -> Any:
    return _above(node, lambda _: False)


def _above(node: Any, passes: Callable[[fx.Node], bool]) -> Any:
    """Return the node above, through ops that change no element and ops that pass."""
    return _steps(node, passes)[-1]


def _steps(node: Any, passes: Callable[[fx.Node], bool]) -> list[Any]:
    """Return the node with all nodes above it on that way, from below."""
    steps = [node]
    while isinstance(node, fx.Node) and (target_name(node) in _PLAIN or passes(node)):
        node = argument(node, 0, "input")
        steps.append(node)
    return steps


def _padded(node: fx.Node) -> bool:
    """Return whether a node appends zeros to the last axis."""
    if target_name(node) != "pad":
        return False
    sizes, mode, value = argument(node, 1, "pad"), argument(node, 2, "mode"), argument(node, 3, "value")
    lengths = tuple(sizes) if isinstance(sizes, tuple | list) else ()
    at_end = len(lengths) == 2 and lengths[0] == 0 and isinstance(lengths[1], int) and lengths[1] >= 0
    return at_end and mode in (None, "constant") and library_ops.is_off(value)


def _sliced(node: fx.Node) -> bool:
    """Return whether a node takes the beginning of the last axis."""
    index: Any = node.args[1] if node.target is operator.getitem else None
    if not isinstance(index, tuple) or len(index) != 2:
        return False
    rest, of_last = index
    return rest is Ellipsis and isinstance(of_last, slice) and of_last.start in (None, 0) and of_last.step in (None, 1)


def _same_sizes(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes have known tensors of equal sizes and dtype."""
    left, right = (node.meta.get("example_value") for node in (a, b))
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    known = left.dim() == right.dim() and left.dtype == right.dtype
    return known and all(torch_symbols.statically_known(x == y) for x, y in zip(left.shape, right.shape, strict=True))
