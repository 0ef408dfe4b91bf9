"""What the leaf op and its backward are called with, and what every body of one does around the work of its family. It finds calls that lie
alike, replays those that can be (replaying.py), and computes by its definition what a kernel fails at (by_definition.py).

The arguments are described once, by the two tuples here. Their order is the schemas' (ops.py).
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from attn_compiler.lowerings.shared.calls import by_definition, failures
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.launching.noting import noter
from attn_compiler.lowerings.shared.launching.on_device import new_lse, on
from attn_compiler.lowerings.shared.launching.recording import recorder
from attn_compiler.lowerings.shared.launching.replaying import BETWEEN, Alike, Replay, alike
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_gradient, empty_outputs

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")

#: what `ops.LEAF_SCHEMA` returns
Outputs = tuple[torch.Tensor, torch.Tensor]
#: what `ops.BACKWARD_SCHEMA` returns
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


class ForwardArguments(NamedTuple):
    """Of `ops.LEAF_SCHEMA`. text: the spec's, and whatever else was decided."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    operands: Tensors
    text: str


class BackwardArguments(NamedTuple):
    """Of `ops.BACKWARD_SCHEMA`."""

    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    operands: Tensors
    out: torch.Tensor
    lse: torch.Tensor
    text: str


def forward_inputs(given: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of ForwardArguments: q, k, v and then the operands."""
    q, k, v, operands, _ = given
    return [q, k, v, *operands]


def backward_inputs(given: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of BackwardArguments: grad_out, grad_lse, q, k, v, out, lse and then the operands."""
    grad_out, grad_lse, q, k, v, operands, out, lse, _ = given
    return [grad_out, grad_lse, q, k, v, out, lse, *operands]


def or_else(op: str, text: str, launch: Callable[[], T], instead: Callable[[], T]) -> T:
    """What `launch` gives. What `instead` gives where a kernel can't be compiled or started, in every call of that text.

    Raises what `launch` raised where another way does not help, and KernelFailed with strict=True.
    """
    if text in FAILURES.causes:
        return instead()
    begin = time.perf_counter()
    try:
        return launch()
    except Exception as error:
        # A launch that is noted or recorded does not happen, and memory that ran out is gone for any other way.
        if noter() is not None or recorder() is not None or not failures.is_ours(error):
            raise
        try:
            found = instead()
        except Exception:  # noqa: BLE001 (what the call was given serves no way of computing it)
            raise error from None
        failures.at_launch(op, text, error, time.perf_counter() - begin)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBody(abc.ABC):
    """What a leaf op does. op: its name."""

    op: str

    @abc.abstractmethod
    def first(self, given: ForwardArguments, same: Alike) -> Outputs:
        """The first call of those that lie alike. Leaves in `same` what is replayed."""

    @abc.abstractmethod
    def definition(self, given: ForwardArguments) -> Attention:
        """What a call computes."""

    def instead(self, given: ForwardArguments) -> Outputs:
        """What a call gives, without a kernel."""
        out, lse = empty_outputs(given.q, given.v)
        with torch.no_grad():
            exact_out, exact_lse = by_definition.forward(self.definition(given))
        return out.copy_(exact_out), lse.copy_(exact_lse)

    def __call__(self, *given: Any) -> Outputs:
        """out and lse. given: as in ForwardArguments."""
        inputs = forward_inputs(given)
        same = alike(self.op, given[-1], inputs)
        if same.replay is None:
            arguments = ForwardArguments(*given)
            return or_else(
                self.op, arguments.text, lambda: self.first(arguments, same), lambda: self.instead(arguments)
            )
        out, lse = same.replay.run(inputs)
        if lse is None:
            with on(out.device):
                lse = new_lse(out)
        return out, lse


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardBody(abc.ABC):
    """What a leaf op's backward does. op: its name."""

    op: str

    @abc.abstractmethod
    def first(self, given: BackwardArguments, same: Alike) -> Gradients:
        """As `ForwardBody.first`."""

    @abc.abstractmethod
    def definition(self, given: BackwardArguments) -> Attention:
        """As `ForwardBody.definition`."""

    @abc.abstractmethod
    def differentiable(self, given: BackwardArguments) -> tuple[str, ...]:
        """Names of the operands that get a gradient, in order."""

    def unfilled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for the gradient of q, k or v."""
        return empty_gradient(tensor)

    def instead(self, given: BackwardArguments) -> Gradients:
        """As `ForwardBody.instead`."""
        with torch.no_grad():
            attention = self.definition(given)
            grads = by_definition.backward(attention, given.grad_out, given.grad_lse, given.out, given.lse)
            grad_q, grad_k, grad_v = (
                self.unfilled(x).copy_(grad) for x, grad in ((given.q, grads.q), (given.k, grads.k), (given.v, grads.v))
            )
            names = self.differentiable(given)
            further = [empty_gradient(attention.tensors[name]).copy_(grads.further[name]) for name in names]
        return grad_q, grad_k, grad_v, further

    def __call__(self, *given: Any) -> Gradients:
        """The gradients of q, k, v and of the operands that have one. given: as in BackwardArguments."""
        inputs = backward_inputs(given)
        same = alike(self.op, given[-1], inputs)
        if same.replay is None:
            arguments = BackwardArguments(*given)
            return or_else(
                self.op, arguments.text, lambda: self.first(arguments, same), lambda: self.instead(arguments)
            )
        gradients: Gradients = same.replay.run(inputs)
        return gradients


class BodySite:
    """A body for one place in compiled code, where tensors lie the same in every call: after the first one their addresses are all that
    is asked.
    """

    __slots__ = ("body", "replay")

    def __init__(self, body: ForwardBody | BackwardBody) -> None:
        self.body = body
        self.replay: Replay | None = None

    def by_body(self, given: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Any:
        """At first, and where an address is no multiple of a vector: such a call says nothing of others."""
        found = self.body(*given)
        if not any(x.data_ptr() & BETWEEN for x in inputs):
            self.replay = alike(self.body.op, given[-1], inputs).replay
        return found


class ForwardSite(BodySite):
    """Of a leaf op. An lse that nothing reads may be None."""

    __slots__ = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Any:
        """As ForwardBody's, in the fewest steps: the host's time counts here."""
        inputs = [q, k, v, *operands]
        found = None if self.replay is None else self.replay.run(inputs, BETWEEN)
        return self.by_body((q, k, v, operands, text), inputs) if found is None else found


class BackwardSite(BodySite):
    """Of a leaf op's backward."""

    __slots__ = ()

    def __call__(self, *given: Any) -> Any:
        """As BackwardBody's, in the fewest steps."""
        grad_out, grad_lse, q, k, v, operands, out, lse, _ = given
        inputs = [grad_out, grad_lse, q, k, v, out, lse, *operands]
        found = None if self.replay is None else self.replay.run(inputs, BETWEEN)
        return self.by_body(given, inputs) if found is None else found
