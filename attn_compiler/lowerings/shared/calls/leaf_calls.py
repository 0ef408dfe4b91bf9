"""Arguments of the leaf op and its backward, and the steps that every body takes around the work of its family. A body finds the data of
calls with the same layout, replays a call if it can (replaying.py), and computes it by definition if a kernel fails (by_definition.py).

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
from attn_compiler.lowerings.shared.launching.dry_run import noter, recorder
from attn_compiler.lowerings.shared.launching.on_device import new_lse, on
from attn_compiler.lowerings.shared.launching.replaying import BETWEEN, CallCache, Replay, call_cache
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_gradient, empty_outputs

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")

#: results of `ops.LEAF_SCHEMA`
Outputs = tuple[torch.Tensor, torch.Tensor]
#: results of `ops.BACKWARD_SCHEMA`
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


class ForwardArguments(NamedTuple):
    """Arguments of `ops.LEAF_SCHEMA`. text: the spec's, and all further decisions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    operands: Tensors
    text: str


class BackwardArguments(NamedTuple):
    """Arguments of `ops.BACKWARD_SCHEMA`."""

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
    """Return the tensors of ForwardArguments: q, k, v and then the operands."""
    q, k, v, operands, _ = given
    return [q, k, v, *operands]


def backward_inputs(given: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of BackwardArguments: grad_out, grad_lse, q, k, v, out, lse and then the operands."""
    grad_out, grad_lse, q, k, v, operands, out, lse, _ = given
    return [grad_out, grad_lse, q, k, v, out, lse, *operands]


def or_else(op: str, text: str, launch: Callable[[], T], instead: Callable[[], T]) -> T:
    """Return launch(), or instead() where a kernel can't be compiled or started, also in every later call of that text.

    Raises the error of `launch` where another way does not help, and KernelFailed with strict=True.
    """
    if text in FAILURES.causes:
        return instead()
    begin = time.perf_counter()
    try:
        return launch()
    except Exception as error:
        # A launch that is recorded does not happen, and memory that ran out is missing for any other way, too.
        if noter() is not None or recorder() is not None or not failures.is_ours(error):
            raise
        try:
            found = instead()
        except Exception:  # noqa: BLE001 (the arguments themselves are wrong, so the first error is the one to raise)
            raise error from None
        failures.at_launch(op, text, error, time.perf_counter() - begin)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBody(abc.ABC):
    """Body of a leaf op. op: its name."""

    op: str

    @abc.abstractmethod
    def first(self, given: ForwardArguments, same: CallCache) -> Outputs:
        """Run the first call of a layout. Stores the replay in `same`."""

    @abc.abstractmethod
    def definition(self, given: ForwardArguments) -> Attention:
        """Return the attention that a call computes."""

    def instead(self, given: ForwardArguments) -> Outputs:
        """Compute a call without a kernel."""
        out, lse = empty_outputs(given.q, given.v)
        with torch.no_grad():
            exact_out, exact_lse = by_definition.forward(self.definition(given))
        return out.copy_(exact_out), lse.copy_(exact_lse)

    def __call__(self, *given: Any) -> Outputs:
        """Return out and lse. given: as in ForwardArguments."""
        inputs = forward_inputs(given)
        same = call_cache(self.op, given[-1], inputs)
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
    """Body of a leaf op's backward. op: its name."""

    op: str

    @abc.abstractmethod
    def first(self, given: BackwardArguments, same: CallCache) -> Gradients:
        """Run the first call of a layout. Stores the replay in `same`."""

    @abc.abstractmethod
    def definition(self, given: BackwardArguments) -> Attention:
        """Return the attention that the forward of a call computes."""

    @abc.abstractmethod
    def differentiable(self, given: BackwardArguments) -> tuple[str, ...]:
        """Return the names of the operands that get a gradient, in order."""

    def unfilled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate the gradient of q, k or v."""
        return empty_gradient(tensor)

    def instead(self, given: BackwardArguments) -> Gradients:
        """Compute a call without a kernel."""
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
        """Return the gradients of q, k, v and of the operands that have one. given: as in BackwardArguments."""
        inputs = backward_inputs(given)
        same = call_cache(self.op, given[-1], inputs)
        if same.replay is None:
            arguments = BackwardArguments(*given)
            return or_else(
                self.op, arguments.text, lambda: self.first(arguments, same), lambda: self.instead(arguments)
            )
        gradients: Gradients = same.replay.run(inputs)
        return gradients


class BodySite:
    """A body at one place in compiled code, where tensors always have the same layout: later calls only check their addresses."""

    __slots__ = ("body", "replay")

    def __init__(self, body: ForwardBody | BackwardBody) -> None:
        self.body = body
        self.replay: Replay | None = None

    def by_body(self, given: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Any:
        """Call the body, at first and where an address is no multiple of a vector. Such a call does not decide the replay."""
        found = self.body(*given)
        if not any(x.data_ptr() & BETWEEN for x in inputs):
            self.replay = call_cache(self.body.op, given[-1], inputs).replay
        return found


class ForwardSite(BodySite):
    """A leaf op's body at one place in compiled code. An lse that nothing reads may be None."""

    __slots__ = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Any:
        """Return out and lse as ForwardBody does, in the fewest steps: the host's time counts here."""
        inputs = [q, k, v, *operands]
        found = None if self.replay is None else self.replay.run(inputs, BETWEEN)
        return self.by_body((q, k, v, operands, text), inputs) if found is None else found


class BackwardSite(BodySite):
    """A backward's body at one place in compiled code."""

    __slots__ = ()

    def __call__(self, *given: Any) -> Any:
        """Return the gradients as BackwardBody does, in the fewest steps."""
        grad_out, grad_lse, q, k, v, operands, out, lse, _ = given
        inputs = [grad_out, grad_lse, q, k, v, out, lse, *operands]
        found = None if self.replay is None else self.replay.run(inputs, BETWEEN)
        return self.by_body(given, inputs) if found is None else found
