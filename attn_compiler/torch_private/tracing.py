"""Private PyTorch API of pre-dispatch tracing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._thunk import Thunk


def fake_mode_of_values(values: Iterable[Any]) -> FakeTensorMode | None:
    """Return the mode of Dynamo's example values. The tracing context may already hold another one, for the compiler."""
    tensors = (plain for leaf in pytree.tree_leaves(list(values)) for plain in plain_tensors(leaf))
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a tensor that wraps others (DTensor, nested ...), else the value itself if it is a tensor."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def wrapped_by_transform(x: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
    """Return the tensor inside a wrapper of torch.func (vmap, grad ...), the wrapper's level and the axis that vmap removed. None for any
    other tensor."""
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(x):
        return None
    return functorch.get_unwrapped(x), functorch.maybe_get_level(x), functorch.maybe_get_bdim(x)


def schemas(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> tuple[str, ...] | None:
    """Return the schemas of an op's overloads; None if tracing decomposes one of them."""
    overloads = [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads = [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]
    for overload in overloads:
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        if is_composite or overload.py_kernels:
            return None
    return tuple(str(overload._schema) for overload in overloads)


def is_script_object(value: Any) -> bool:
    """Return True if a value is an object that Dynamo only passes on, such as a DeviceMesh."""
    return isinstance(value, (FakeScriptObject, torch.ScriptObject))


@contextlib.contextmanager
def tracing_in(mode: FakeTensorMode) -> Iterator[None]:
    """Make `mode` the fake mode of this compilation within the block, and hide saved tensors from hooks. A checkpoint around compiled code
    counts the tensors that a call saves, and tracing is no part of that."""
    tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with contextlib.nullcontext() if TracingContext.try_get() is None else TracingContext.patch(fake_mode=mode):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)


@contextlib.contextmanager
def running_in(mode: FakeTensorMode) -> Iterator[None]:
    """Allow ops on fake values within the block. Composite ops run in Python, as Dynamo runs them: matmul in C++ makes numbers of symbolic
    sizes in torch 2.11."""
    with enable_python_dispatcher(), mode:
        yield


def saved_for_backward(run: Callable[[], object]) -> list[torch.Tensor]:
    """Return every tensor that autograd saves while `run` runs, hidden from other hooks."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            run()
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)
    return saved


def trace_pre_dispatch(
    function: Callable[..., Any],
    args: Sequence[Any],
    mode: FakeTensorMode | None = None,
    definitions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Run make_fx above autograd and autocast, inside the fake mode of `args`, or `mode`. definitions: decompositions of ops."""
    traced = make_fx(
        function,
        decomposition_table=dict(definitions or {}),
        pre_dispatch=True,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    with mode or detect_fake_mode(list(args)) or FakeTensorMode(allow_non_fake_inputs=True):
        return traced(*args)


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that is traced without writes in place, and with composite ops taken apart."""
    return dispatch_functionalize(function, FunctionalTensorMode(pre_dispatch=True))


#: ops that make and join masks, which PyTorch decomposes; its other names of ops
_BY_DEFINITION = (
    "atleast_1d atleast_2d hstack vstack dstack column_stack kron outer ger block_diag diag diag_embed eye fliplr flipud rot90 "
    "__xor__ __ixor__ absolute absolute_ clip clip_ divide divide_ fix fix_ greater greater_ greater_equal greater_equal_ less less_ "
    "less_equal less_equal_ multiply multiply_ negative negative_ not_equal not_equal_ subtract subtract_ true_divide true_divide_"
)


@functools.cache
def definitions() -> Mapping[Any, Callable[..., Any]]:
    """Return PyTorch's decompositions of ops that make and join masks. Ops without one in this release are left out."""
    found: dict[Any, Callable[..., Any]] = {}
    packets = [getattr(torch.ops.aten, name) for name in _BY_DEFINITION.split()]
    for op in (getattr(packet, name) for packet in packets for name in packet.overloads() if "out" not in name):
        if not all("Tensor" in str(one.type) for one in op._schema.returns):
            continue
        own = decomposition_table.get(op)
        if own is not None:
            found[op] = own
        elif op._can_decompose():
            found[op] = op.decompose
    return found


def trace_score_function(
    function: Callable[..., Any], scores: torch.Tensor, others: Sequence[Any], *, of_score: bool
) -> fx.GraphModule:
    """Trace FlexAttention's score_mod (`of_score`) or mask_mod for all scores (B, H, Sq, Skv) to ATen ops.

    The result is a function of the scores and `others`, the mod's further inputs. PyTorch's own unfused FlexAttention calls a mod in the
    same way.
    """

    # Both imports load Dynamo.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    def for_all(scores: torch.Tensor, *others: Any) -> Any:
        mapped = _vmap_for_bhqkv(function, prefix=(0,) if of_score else (), suffix=(None,) * len(others))
        indices = [torch.arange(0, size, device=scores.device) for size in scores.shape]
        with TransformGetItemToIndex():
            return mapped(*((scores,) if of_score else ()), *indices, *others)

    # Not above autograd as in `trace_pre_dispatch`: there vmap would not be resolved.
    with detect_fake_mode([scores]) or FakeTensorMode(allow_non_fake_inputs=True):
        traced = make_fx(for_all, tracing_mode="fake", _allow_non_fake_inputs=True)(scores, *others)
    _plain_numbers(traced)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _plain_numbers(traced: fx.GraphModule) -> None:
    """Replace tensors by numbers: vmap makes a tensor of each number, by `_to_copy(20, dtype=…)` or as an attribute."""
    for node in list(traced.graph.nodes):
        is_copy = node.op == "call_function" and node.target is torch.ops.aten._to_copy.default
        if (
            is_copy
            and isinstance(node.args[0], (int, float))
            and isinstance(dtype := node.kwargs.get("dtype"), torch.dtype)
        ):
            _replace(node, torch.tensor(node.args[0], dtype=dtype).item())
        if node.op == "get_attr":
            held = getattr(traced, str(node.target))
            if not isinstance(held, torch.Tensor) or held.numel() != 1:
                raise ValueError(f"the function holds {type(held).__name__} {node.target}")
            with traced.graph.inserting_before(node):
                as_it_is: dict[str, Any] = {"dtype": held.dtype, "device": held.device}
                made = traced.graph.call_function(
                    torch.ops.aten.full.default, (list(held.shape), held.item()), as_it_is
                )
            node.replace_all_uses_with(made)


def _replace(node: fx.Node, number: complex) -> None:
    def replaced(x: fx.Node) -> Any:
        return number if x is node else x

    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(user.args, replaced), fx.map_arg(user.kwargs, replaced)


def current_tracer() -> Any:
    """Return the tracer of the active make_fx call."""
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("no make_fx tracing is active")
    return mode.tracer


def current_fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a fake tensor of the active fake mode."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return tensor if mode is None else mode.from_tensor(tensor)


def is_in_autocast() -> bool:
    """Return True if autocast is on for any device."""
    return bool(torch._C._is_any_autocast_enabled())


def untraced(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Make a fake tensor, or a view of one, without tracing it."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return make()


def in_memory_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Make a fake tensor in the memory of `tensor` with dtype, shape, strides and offset of `like`."""
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(tensor.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def track(tensor: torch.Tensor, proxy: fx.Proxy, tracer: Any) -> torch.Tensor:
    """Let `proxy` stand for `tensor` in the trace; return the tensor."""
    track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
    return tensor


def track_node(value: torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool, node: fx.Node, tracer: Any) -> None:
    """Do `track` for a node, with a faster way for a fake tensor."""
    if type(value) is not FakeTensor or not _is_strided(value):
        track_tensor_tree(value, fx.Proxy(node, tracer), constant=None, tracer=tracer)
        return
    with beside_modes(value.fake_mode):
        # Like PyTorch's own value of a node: without a gradient, and unchanged if the tensor is transposed in place.
        node.meta["val"] = fake(value.fake_mode, value, value.fake_device).requires_grad_(False)
        track_sizes(value, node, tracer)
    stand_for(value, node, tracer)


def _is_strided(tensor: torch.Tensor) -> bool:
    with unseen():
        return tensor.layout is torch.strided


def track_sizes(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """Let nodes that read a tensor's symbolic sizes stand for them, created on demand. To be called within `beside_modes`."""
    aten = torch.ops.aten
    sizes: list[tuple[Any, tuple[Any, ...], int | torch.SymInt]]
    sizes = [(aten.sym_size.int, (node, i), size) for i, size in enumerate(tensor.shape)]
    sizes += [(aten.sym_stride.int, (node, i), stride) for i, stride in enumerate(tensor.stride())]
    sizes.append((aten.sym_storage_offset.default, (node,), tensor.storage_offset()))
    for op, args, size in sizes:
        if isinstance(size, torch.SymInt):
            set_proxy_slot(size, tracer, Thunk(functools.partial(_number, tracer, op, args, size)))


def _number(tracer: Any, op: Any, args: tuple[Any, ...], size: torch.SymInt) -> fx.Proxy:
    node = add_node(tracer, op, args, {}, name_of(op, tracer))
    node.meta["val"] = size
    return fx.Proxy(node, tracer)


def traced_node(value: torch.Tensor | torch.SymInt | torch.SymFloat, tracer: Any) -> fx.Node | None:
    """Return the node that stands for a tensor or a symbolic number in the trace, if one does."""
    slot = get_proxy_slot(value, tracer, None)
    if slot is None:
        return None
    held: Any = slot
    node: fx.Node = held.proxy.node if isinstance(value, torch.Tensor) else held.force().node
    return node


def traced_constant(tensor: torch.Tensor, tracer: Any) -> torch.Tensor | None:
    """Return the real tensor that a traced one is known to equal, if any."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    constant: torch.Tensor | None = None if slot is None else slot.constant
    return constant


@contextlib.contextmanager
def beside_modes(mode: FakeTensorMode) -> Iterator[None]:
    """Leave calls in the block on meta tensors, and on fake ones as meta, untraced. No symbolic size may be computed."""
    with torch._C.DisableTorchFunction(), in_kernel_invocation_manager(mode):
        yield


def in_new_memory(meta: torch.Tensor) -> torch.Tensor:
    """Copy a meta tensor into separate memory. To be called within `beside_modes`."""
    return torch._lazy_clone(meta)


def unseen() -> Any:
    """Bypass the tracing modes within the block: they see every read of an attribute."""
    return torch._C.DisableTorchFunction()


def fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """Make a fake tensor in the memory of a meta tensor. To be called within `beside_modes`."""
    return FakeTensor(mode, meta, device)


def add_node(tracer: Any, target: Any, args: Any, kwargs: Any, name: str | None) -> fx.Node:
    """Add a call to the trace, without running it. name: None for the target's own."""
    node: fx.Node = tracer.graph.create_node("call_function", target, args, kwargs, name=name)
    return node


def name_of(target: Any, tracer: Any) -> str | None:
    """Return tracing's suggested name for an op's node; None for the target's own."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name: str = tracer.graph._target_to_str(target.overloadpacket.__name__)
    return name


def stand_for(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """Let `node` stand for `tensor` in the trace, if its symbolic sizes are known already."""
    tracer.tensor_tracker[tensor] = _ProxyTensor(fx.Proxy(node, tracer), None)


@contextlib.contextmanager
def for_real() -> Iterator[None]:
    """Run ops in the block on real tensors, inside a compilation: no mode sees them, and none is traced."""
    with (
        tracing(None),
        unset_fake_temporarily(),
        disable_proxy_modes_tracing(),
        torch._C.DisableTorchFunction(),
    ):
        yield
