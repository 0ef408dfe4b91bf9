"""Run of the model's own graph, op by op: in its own numbers, in wider ones, or with noise at each rounding. Copies for it.

Wider: every floating dtype of the graph is replaced and no autocast applies, so that the result is exact. Noise: each result is multiplied
by 1 + e, |e| at most the rounding of its dtype, as are gradients. It shows how far other roundings of the same math may lie apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from attn_compiler.spec.dtypes import HALVES
from attn_compiler.spec.numerics import FLOOR_ULPS
from attn_compiler.torch_private import compat as torch_compat

Record = Callable[[fx.Node, Any], Any]

#: divided by a dtype's eps: added to numbers this low, a score of 16 loses all digits
_MASKS = -64.0
#: A half is rounded once, to the nearest. A wider output of a kernel has the error of its own sum.
_KERNEL_ULPS = {**FLOOR_ULPS, **dict.fromkeys(HALVES, 0.5)}
_SDPA = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def shares_memory(x: torch.Tensor, other: Any) -> bool:
    """Return True if two tensors may have elements in common: of one storage, or without a storage."""
    if not isinstance(other, torch.Tensor):
        return False
    if not x.layout == other.layout == torch.strided:
        return True
    return x.numel() > 0 and x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Numbers between -1 and 1, the same ones for the same seed."""

    seed: int
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        return torch.rand(x.shape, generator=self._generators[x.device], device=x.device, dtype=x.dtype) * 2 - 1

    def on_step(self, value: Any, own: Any, inputs: Iterable[Any] = ()) -> Any:
        """Return a step's result as another rounding might have made it. own: the step's value in the model, whose dtype it is rounded to.
        Integers, and values that share memory with an input, stay."""
        if not is_floating(value) or not isinstance(own, torch.Tensor) or own.dtype not in FLOOR_ULPS:
            return value
        return value if any(shares_memory(value, x) for x in inputs) else self.on(value, own.dtype)

    def on(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as another rounding to the dtype might have made it. Masking numbers stay: each is the same for all keys. If they
        mask all keys of a query, noise would give one key all the weight."""
        eps = torch.finfo(dtype).eps
        return torch.where(x <= _MASKS / eps, x, x * (1 + FLOOR_ULPS[dtype] * eps * self.like(x)))


@contextlib.contextmanager
def fused_noise(noise: Noise | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Disturb the sum of every softmax's backward in the block as a fused kernel's rounding does, which the model's operations do not have.

    A softmax's backward is `w * (dw - sum(w * dw))`. The model sums over its own weights. A fused kernel computes `sum(do * o)` from a
    rounded output. If one key has all the weight, the model's difference is exactly zero, and the kernel's is that rounding. dtype: of the
    output. SDPA runs as two products and a softmax in the block. Without noise or a dtype nothing changes.
    """
    if noise is None or dtype not in _KERNEL_ULPS:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), _Disturbed(noise, _KERNEL_ULPS[dtype] * torch.finfo(dtype).eps):
        yield


class _Disturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, noise: Noise, rounding: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noise, self._rounding = noise, rounding

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._softmax_backward_data.default or not result.numel():
            return result
        upstream, weights, dim = args[:3]
        largest = upstream.abs().amax(dim, keepdim=True)
        return result + self._rounding * weights * largest * self._noise.like(largest)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """dtype: replaces every floating one; None: the model's own. noise: on every result, if any; needs a dtype."""

    dtype: torch.dtype | None = None
    noise: Noise | None = None

    def number(self, x: Any) -> Any:
        """Convert a dtype, an argument of the graph, or a tensor attribute of it."""
        if self.dtype is None:
            return x
        if isinstance(x, torch.dtype):
            return self.dtype if x.is_floating_point else _COMPLEX[self.dtype] if x.is_complex else x
        return x.to(self.dtype) if is_floating(x) else x


def current_autocast(devices: Sequence[torch.device]) -> Callable[[bool], AbstractContextManager[Any]]:
    """Return a function that enters the autocast state of now again, or with False none, for all types of the devices."""
    types = sorted({device.type for device in devices if torch.amp.is_autocast_available(device.type)})
    states = [(t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t)) for t in types]

    def enter(applies: bool) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for device_type, dtype, enabled in states:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled and applies))
        return stack

    return enter


def interpret(module: fx.GraphModule, args: Sequence[Any], arithmetic: Arithmetic, record: Record | None = None) -> Any:
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
        self._arithmetic, self._record, self._wide = arithmetic, record, arithmetic.dtype

    def _numbers(self, x: Any) -> Any:
        return fx.node.map_aggregate(x, lambda y: self._arithmetic.number(y) if isinstance(y, torch.dtype) else y)

    def run_node(self, n: fx.Node) -> Any:
        value, noise = super().run_node(n), self._arithmetic.noise
        inputs = [self.env.get(x) for x in n.all_input_nodes]
        is_made = self._wide is not None and n.op in ("call_function", "call_method") and is_floating(value)
        # A tensor that shares memory with an input stays.
        if is_made and not any(shares_memory(value, x) for x in inputs):
            value = value.to(self._wide)
            value = value if noise is None else noise.on_step(value, n.meta.get("example_value"))
        return value if self._record is None else self._record(n, value)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(target, "__name__", None)
        if isinstance(target, torch._ops.HigherOrderOperator) and name == "tag_activation_checkpoint":
            # A checkpoint returns its body's results, and PyTorch would run that with another interpreter.
            body, *inputs = args
            return body(*inputs)
        if self._wide is not None and name == "_enter_autocast":
            return super().call_function(target, (args[0], None, False, None), {})
        args, kwargs = with_rows(target, args, kwargs)
        # In a wider dtype SDPA's kernels have other limits than in the model's, and its definition has none.
        exactly = self._wide is not None and target in _SDPA
        with sdpa_kernel(SDPBackend.MATH) if exactly else contextlib.nullcontext():
            return super().call_function(target, self._numbers(args), self._numbers(kwargs))

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._wide is not None and target in ("float", "half", "bfloat16", "double"):
            return args[0].to(self._wide)
        return super().call_method(target, self._numbers(args), self._numbers(kwargs))

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._arithmetic.number(super().get_attr(target, args, kwargs))


def with_rows(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, for SDPA with a mask of at least two axes. PyTorch's kernels can't read a mask of one axis. The
    model's own call may have had gradients, for which SDPA uses none of these kernels."""
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if target not in _SDPA or not isinstance(mask, torch.Tensor) or mask.dim() != 1:
        return args, dict(kwargs)
    if "attn_mask" in kwargs:
        return args, {**kwargs, "attn_mask": mask[None]}
    return (*args[:3], mask[None], *args[4:]), dict(kwargs)


# ---- copies, for a run without side effects -------------------------------------------------------------------------


def copied_module(module: fx.GraphModule, graphs: Mapping[fx.GraphModule, fx.Graph]) -> fx.GraphModule:
    """Copy a graph module with its graph in `graphs`, else with a copy of its own; nested bodies likewise."""
    graph = graphs.get(module)
    copy = fx.GraphModule(module, graph if graph is not None else torch_compat.copied_graph(module.graph))
    copy.meta.update(module.meta)
    for target in {str(n.target) for n in copy.graph.nodes if n.op == "get_attr"}:
        body = getattr(copy, target, None)
        if isinstance(body, fx.GraphModule):
            setattr(copy, target, copied_module(body, graphs))
    return copy


def isolated(args: Sequence[Any], shared: Sequence[bool]) -> list[Any]:
    """Copy tensors with the same elements, strides and aliasing as those of `args`, in separate memory.

    shared: True for an input to leave in its memory, because nothing writes to it. Other values stay. No result requires grad.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(x: torch.Tensor) -> torch.Tensor:
        if x.layout != torch.strided or torch_compat.is_wrapper_subclass(x) or x.is_conj() or x.is_neg():
            return x.clone()
        old = x.untyped_storage()
        # Two tensors alias each other if their storages start at one address, even as separate objects.
        key = old.data_ptr() if old.nbytes() else id(x)
        if key not in storages:
            storages[key] = old.clone()  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        return empty.set_(storages[key], x.storage_offset(), x.shape, x.stride())

    return [
        (x.detach() if keep else copied(x.detach())) if isinstance(x, torch.Tensor) else x
        for x, keep in zip(args, shared, strict=True)
    ]


def share_memory(args: Sequence[Any], written: Sequence[bool]) -> bool:
    """Return True if a floating tensor that may be written to aliases another one: in a wider dtype it would not."""
    seen: dict[int, bool] = {}
    for x, is_written in zip(args, written, strict=True):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or torch_compat.is_wrapper_subclass(x):
            continue
        if (x.is_floating_point() or x.is_complex()) and (memory := x.untyped_storage().data_ptr()):
            if memory in seen and (is_written or seen[memory]):
                return True
            seen[memory] = seen.get(memory, False) or is_written
    return False


@contextlib.contextmanager
def leaving_no_trace(
    args: Sequence[Any], devices: Sequence[torch.device], *, gradients: bool = False
) -> Iterator[Callable[[], bool]]:
    """Run with or without gradients, and restore the random state afterwards. That covers the default generators of the CPU and of
    `devices`, and the generators among `args`. Yield a function that says if any random numbers were drawn so far."""
    generators = [x for x in args if isinstance(x, torch.Generator)]
    others = [device for device in devices if device.type not in ("cpu", "meta")]

    def states() -> list[torch.Tensor]:
        of_devices = [torch.get_device_module(device).get_rng_state(device) for device in others]
        return [*(generator.get_state() for generator in generators), torch.get_rng_state(), *of_devices]

    before = states()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for kind in {device.type for device in others}:
                own = [device for device in others if device.type == kind]
                stack.enter_context(torch.random.fork_rng(devices=own, device_type=kind))
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield lambda: not all(map(torch.equal, before, states()))
    finally:
        for generator, state in zip(generators, before, strict=False):
            generator.set_state(state)
