"""Run of the model's own graph, op by op: in its own numbers, in wider ones, or with noise at each rounding.

Wider: every floating dtype of the graph is replaced and no autocast applies, so that the result is exact. Noise: each result is multiplied
by 1 + e, |e| at most the rounding of its dtype. Its effect on the results shows the possible error of other roundings of the same math,
through cancellations and branches on the way. Autograd multiplies the gradients by the same factor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.verifying.numbers import Noise, shares_memory

Record = Callable[[fx.Node, Any], Any]

_CHECKPOINT = "tag_activation_checkpoint"
_ENTER_AUTOCAST = "_enter_autocast"
_CASTS = frozenset({"float", "half", "bfloat16", "double"})
_SDPA = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """dtype: replaces every floating one; None: the model's own. noise: on every result, if any; needs a dtype."""

    dtype: torch.dtype | None = None
    noise: Noise | None = None

    def number(self, x: Any) -> Any:
        """Convert an argument of a call, or a tensor attribute of the graph."""
        if self.dtype is None:
            return x
        if isinstance(x, torch.dtype):
            return self.dtype if x.is_floating_point else _COMPLEX[self.dtype] if x.is_complex else x
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.to(self.dtype)
        return x

    def result(self, node: fx.Node, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """Convert a node's result. A tensor that shares memory with an input stays."""
        if self.dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if any(shares_memory(value, x) for x in inputs):
            return value
        wide = value.to(self.dtype)
        return wide if self.noise is None else self.noise.on_step(wide, node.meta.get("example_value"), ())


AS_IT_IS = Arithmetic()


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """The autocast state of a graph's call, by device type."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def current(devices: Sequence[torch.device]) -> Autocast:
        types = sorted({device.type for device in devices if torch.amp.is_autocast_available(device.type)})
        return Autocast(states=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types))

    @contextlib.contextmanager
    def enter(self, *, none: bool = False) -> Iterator[None]:
        """Enter the same autocast; none: disable autocast."""
        with contextlib.ExitStack() as stack:
            for device_type, enabled, dtype in self.states:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled and not none))
            yield


def interpret(
    module: fx.GraphModule, args: Sequence[Any], arithmetic: Arithmetic = AS_IT_IS, record: Record | None = None
) -> Any:
    """Run a graph and the bodies of its higher-order calls. record: called with each node and its value; its result replaces the value."""
    bodies = [body for body in torch_compat.graph_modules(module) if body is not module]

    def runner(body: fx.GraphModule) -> Callable[..., Any]:
        return lambda *inputs: _Interpreter(body, arithmetic, record).run(*inputs, enable_io_processing=False)

    try:
        for body in bodies:
            body.forward = runner(body)
        return runner(module)(*map(arithmetic.number, args))
    finally:
        for body in bodies:
            # The attribute set above hides the class's method.
            body.__dict__.pop("forward", None)


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, arithmetic: Arithmetic, record: Record | None) -> None:
        super().__init__(module)
        self._arithmetic = arithmetic
        self._record = record

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op in ("call_function", "call_method"):
            known = [self.env[x] for x in n.all_input_nodes if isinstance(self.env.get(x), torch.Tensor)]
            value = self._arithmetic.result(n, value, known)
        return value if self._record is None else self._record(n, value)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ == _CHECKPOINT:
            # A checkpoint returns its body's results, and PyTorch would run that with another interpreter.
            body, *inputs = args
            return body(*inputs)
        if self._arithmetic.dtype is not None and getattr(target, "__name__", None) == _ENTER_AUTOCAST:
            return super().call_function(target, (args[0], None, False, None), {})
        args, kwargs = with_rows(target, args, kwargs)
        with _exactly(target, wider=self._arithmetic.dtype is not None):
            return super().call_function(target, self._numbers(args), self._numbers(kwargs))

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._arithmetic.dtype is not None and target in _CASTS:
            return args[0].to(self._arithmetic.dtype)
        return super().call_method(target, self._numbers(args), self._numbers(kwargs))

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._arithmetic.number(super().get_attr(target, args, kwargs))

    def _numbers(self, x: Any) -> Any:
        if self._arithmetic.dtype is None:
            return x
        return fx.node.map_aggregate(
            x, lambda leaf: self._arithmetic.number(leaf) if isinstance(leaf, torch.dtype) else leaf
        )


# ---- SDPA called again on real tensors without gradients ------------------------------------------------------------


def _exactly(target: Callable[..., Any] | str, *, wider: bool) -> AbstractContextManager[Any]:
    """Use SDPA's definition for calls in a wider dtype, in which its kernels have other limits than in the model's dtype."""
    return sdpa_kernel(SDPBackend.MATH) if wider and target in _SDPA else contextlib.nullcontext()


def with_rows(
    target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, for SDPA with a mask of at least two axes. PyTorch's kernels can't read a mask of one axis. The
    model's own call may have had gradients, for which SDPA uses none of these kernels."""
    if target not in _SDPA:
        return args, dict(kwargs)
    if "attn_mask" in kwargs:
        return args, {**kwargs, "attn_mask": _rows(kwargs["attn_mask"])}
    return (*args[:3], *map(_rows, args[3:4]), *args[4:]), dict(kwargs)


def _rows(mask: Any) -> Any:
    return mask[None] if isinstance(mask, torch.Tensor) and mask.dim() == 1 else mask
