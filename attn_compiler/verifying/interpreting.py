"""The model's own graph, run op by op: in its own numbers, in wider ones, or with noise where it rounds.

Wider: every floating dtype that the graph asks for is replaced and no autocast applies, so that the result is exact. Noise: each
result is multiplied by 1 + e, |e| at most the rounding that its dtype allows for. What that does to the results shows how far
other roundings of the same math may be off, through whatever cancels out or is decided on the way; autograd multiplies the
gradients by the same.
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
    """dtype: takes the place of every floating one; None: the model's own. noise: on every result, if any; needs a dtype."""

    dtype: torch.dtype | None = None
    noise: Noise | None = None

    def number(self, x: Any) -> Any:
        """An argument of a call, or a tensor that the graph holds."""
        if self.dtype is None:
            return x
        if isinstance(x, torch.dtype):
            return self.dtype if x.is_floating_point else _COMPLEX[self.dtype] if x.is_complex else x
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.to(self.dtype)
        return x

    def result(self, node: fx.Node, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """What a node gives. A tensor that others share memory with is what it is."""
        if self.dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if any(shares_memory(value, x) for x in inputs):
            return value
        wide = value.to(self.dtype)
        return wide if self.noise is None else self.noise.on_step(wide, node.meta.get("example_value"), ())


AS_IT_IS = Arithmetic()


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """The autocast that a graph is called in, for each device type of it."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now(devices: Sequence[torch.device]) -> Autocast:
        types = sorted({device.type for device in devices if torch.amp.is_autocast_available(device.type)})
        return Autocast(states=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types))

    @contextlib.contextmanager
    def again(self, *, none: bool = False) -> Iterator[None]:
        """In the same autocast; none: in none at all."""
        with contextlib.ExitStack() as stack:
            for device_type, enabled, dtype in self.states:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled and not none))
            yield


def interpret(
    module: fx.GraphModule, args: Sequence[Any], arithmetic: Arithmetic = AS_IT_IS, record: Record | None = None
) -> Any:
    """Run a graph; the bodies of its higher-order calls run in the same way.

    record: is told each node with its value, and says what takes its place.
    """
    bodies = [body for body in torch_compat.graph_modules(module) if body is not module]

    def runner(body: fx.GraphModule) -> Callable[..., Any]:
        return lambda *inputs: _Interpreter(body, arithmetic, record).run(*inputs, enable_io_processing=False)

    try:
        for body in bodies:
            body.forward = runner(body)
        return runner(module)(*map(arithmetic.number, args))
    finally:
        for body in bodies:
            # What was set above hides the method of the class.
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
            # A checkpoint gives what its body gives, which PyTorch would run with an interpreter of its own.
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


# ---- SDPA called again on real tensors, which need no gradients ------------------------------------------------------


def _exactly(target: Callable[..., Any] | str, *, wider: bool) -> AbstractContextManager[Any]:
    """Inside, a call of SDPA in a wider dtype is what SDPA is defined as. Its kernels have other limits there than in the model's dtype."""
    return sdpa_kernel(SDPBackend.MATH) if wider and target in _SDPA else contextlib.nullcontext()


def with_rows(
    target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; of SDPA with a mask of two axes or more.

    PyTorch's kernels can't read a mask of one axis. The model's own call may have had gradients, for which SDPA took none of them.
    """
    if target not in _SDPA:
        return args, dict(kwargs)
    if "attn_mask" in kwargs:
        return args, {**kwargs, "attn_mask": _rows(kwargs["attn_mask"])}
    return (*args[:3], *map(_rows, args[3:4]), *args[4:]), dict(kwargs)


def _rows(mask: Any) -> Any:
    return mask[None] if isinstance(mask, torch.Tensor) and mask.dim() == 1 else mask
