"""The only place that uses PyTorch's private API. Importing it on an unsupported torch raises UnsupportedTorch.

Versions are told apart by what they have (a parameter, a type), not by their number, wherever that is possible.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from attn_compiler.errors import AttnCompilerError, UnsupportedTorch

log = logging.getLogger(__name__)

MINIMUM_TORCH = (2, 11)
TORCH_LIMIT = (2, 16)


def require_supported_torch(version: str) -> None:
    """Raise UnsupportedTorch unless MINIMUM_TORCH <= version < TORCH_LIMIT. version: e.g. "2.13.0+cpu"."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if not MINIMUM_TORCH <= release < TORCH_LIMIT:
        minimum, limit = (".".join(map(str, bound)) for bound in (MINIMUM_TORCH, TORCH_LIMIT))
        raise UnsupportedTorch(found=version, minimum=minimum, limit=limit)


require_supported_torch(str(torch.__version__))

# Private names come after the check, so that an unsupported torch is named before one of them is found missing.
from torch._guards import CompileContext  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch._logging import trace_structured  # type: ignore[attr-defined]  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental import symbolic_shapes  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._sympy import functions as sympy_functions  # noqa: E402
from torch.utils._sympy.symbol import SymT, symbol_is_type  # noqa: E402

CompiledFn = Callable[..., Any]
GraphPass = Callable[[fx.Graph], None]


# ---- Inductor's options -------------------------------------------------------------------------------------------


def inductor_modes() -> tuple[str, ...]:
    """Every value that torch.compile's `mode` takes."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def inductor_option_names() -> frozenset[str]:
    """Every config name that Inductor takes in torch.compile's `options`."""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_option_type(name: str) -> type | None:
    """The type that Inductor checks the option's value against; None where it checks nothing (`int | None` ...)."""
    from torch._inductor import config

    declared = config.get_type(name)  # type: ignore[attr-defined]
    return declared if isinstance(declared, type) and typing.get_origin(declared) is None else None


def inductor_patches(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """The config patches that backend="inductor" would use for the same mode and (already checked) options.

    Made by PyTorch's own wrapper, which also prepares the process for CUDA graphs and honours the compiler bisector.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)  # type: ignore[no-untyped-call]


# ---- compiling ----------------------------------------------------------------------------------------------------


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    patches: dict[str, Any],
    cache_key: str | None,
    joint_pass: GraphPass | None,
    region: str | None = None,
) -> CompiledFn:
    """Inductor's compile_fx. It takes ownership of `gm`. region: torch.compile's `name=`, where this torch has it.

    joint_pass: runs on the graph of the forward or, in training, of both, once autograd was traced; has to be covered by the key. With
    neither, the graph is compiled as Inductor alone would.
    The patches also hold for the backward, which is compiled later, outside of this call. cache_key: what decides the
    compiled code besides the graph and the config; it enters the keys of the AOTAutograd and FX graph caches.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    if cache_key is not None and joint_pass is not None:
        users = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
        patches = {**patches, "joint_custom_pre_pass": JointPass(cache_key, joint_pass, before=_as_passes(users))}
    extra: dict[str, Any] = {}
    if region is not None and "compile_region_name" in inspect.signature(compile_fx).parameters:
        extra["compile_region_name"] = region
    with _recomputing_only_for_a_backward(gm):
        return typing.cast(CompiledFn, compile_fx(gm, example_inputs, config_patches=patches, **extra))


def compile_with_backend(name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
    """Compile with another registered backend ("eager", "aot_eager")."""
    from torch._dynamo.backends.registry import lookup_backend

    with _recomputing_only_for_a_backward(gm):
        return lookup_backend(name)(gm, list(example_inputs))


@contextlib.contextmanager
def _recomputing_only_for_a_backward(gm: fx.GraphModule) -> Iterator[None]:
    """AOTAutograd looks for what a checkpoint recomputes in a graph without gradients, too: for a backward that Dynamo put into it. Where a
    checkpoint holds an op that may draw random numbers, as PyTorch's attention kernels are marked even without dropout, it raises before
    it looks for that backward. Where there is none, nothing is recomputed.
    """
    from torch._functorch import config

    switch = "remat_using_tags_for_fwd_loss_bwd_graph"
    nodes = (node for module in graph_modules(gm) for node in module.graph.nodes)
    if not hasattr(config, switch) or any(node.target in _BACKWARDS for node in nodes):
        yield
        return
    with config.patch({switch: False}):
        yield


#: how a graph asks for gradients itself
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, "backward")


def starts_over(error: Exception) -> bool:
    """Whether it tells Dynamo what to do next: trace the frame again (a compiler that found a float to be fixed has the graph made anew
    without it), or leave it. No failure, then."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return isinstance(error, (RestartAnalysis, SkipFrame))


class JointPass(CustomGraphPass):
    """Runs our pass, and puts `key` into the keys of both compile caches, which take in the uuid of every custom pass.

    Without that an artifact of another version or other options is reused, backward included. key: covers `own`. before: the passes
    that the user had set in the same place; they run, and count in the key, as they would without us.
    """

    def __init__(self, key: str, own: GraphPass, before: tuple[GraphPass, ...] = ()) -> None:
        self.key = key
        self.own = own
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in (*self.before, self.own):
            graph_pass(graph)

    def uuid(self) -> Any | None:
        """None, which means "do not cache", if a pass of the user has no uuid: what PyTorch does with such a pass."""
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        return None if None in uuids else ("attn_compiler", self.key, *uuids)


def _as_passes(value: Any) -> tuple[GraphPass, ...]:
    """Inductor's setting of a custom pass: nothing, one, or (since 2.13) several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def forget_cuda_graphs() -> None:
    """Free what CUDA graphs hold, as torch._dynamo.reset() does for backend="inductor"."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def cache_folder() -> Path:
    """Where Inductor keeps what it compiled (TORCHINDUCTOR_CACHE_DIR). It exists, unless it can't be made: OSError."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """An unfilled tensor on the current device of that type, by the function that Inductor's own code allocates with on a GPU: it
    takes the host a fraction of the 2 µs of torch.empty. It knows of no modes, such as fake tensors'."""
    if device == "cuda":
        return torch._C._dynamo.guards._empty_strided_cuda(size, stride, dtype)  # type: ignore[attr-defined,no-any-return]
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def allocator(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str
) -> Callable[[], torch.Tensor]:
    """`empty_strided` of these, for those who call it again and again. Under a mode, torch's own, which knows of it."""
    if device == "cuda" and not torch._C._len_torch_dispatch_stack():
        return functools.partial(torch._C._dynamo.guards._empty_strided_cuda, size, stride, dtype)  # type: ignore[attr-defined]
    return functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


def compile_threads() -> int:
    """How many kernels Inductor compiles at a time (TORCHINDUCTOR_COMPILE_THREADS); 1: one, where it is needed."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


def share_kernel_cache(device: int) -> None:
    """Triton keeps compiled kernels where Inductor will have it keep them, which it says when it loads the first of its own."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device))


def call_directly(op: str, module: str, function: str, *, site: str | None = None) -> None:
    """Code that Inductor writes from now on calls a function of a module for the op ("namespace::name"), which does the same: to
    come by the dispatcher takes the host some 5 µs a call. The rest of PyTorch goes on calling the op.

    site: a class of the module, called without arguments. Where the op's tensors lie the same in every call, an instance of its own is
    called in place of the function.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

    alias = f"{op.replace('::', '_')}_directly"

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
        from torch._inductor.virtualized import V

        wrapper = V.graph.wrapper_code
        if site is None or not _lies_the_same(node):
            node.python_kernel_name = alias
            wrapper.add_import_once(f"from {module} import {function} as {alias}")
        else:
            # No other node of the code has its name, those of subgraphs included.
            node.python_kernel_name = f"{alias}_{node.get_name()}"
            wrapper.add_import_once(f"from {module} import {site} as {alias}_class")
            wrapper.add_import_once(f"{node.python_kernel_name} = {alias}_class()")
        writeline(ExternKernelAllocLine(wrapper, node))

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op.replace('::', '.')}.default"] = CustomCodegen(python=write)


def _lies_the_same(node: Any) -> bool:
    """Whether the tensors that an Inductor node reads have the same sizes and strides in every call: guards see to those of a graph's
    inputs, and Inductor's own code to all others."""
    numbers = (number for tensor in node.inputs for number in (*tensor.get_size(), *tensor.get_stride()))
    return all(isinstance(number, (int, sympy.Integer)) for number in numbers)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Within the block, calls run on real tensors, without gradients: no fake, tracing or other mode of a compilation is active."""
    with _disable_current_modes(), torch.no_grad():
        yield


def is_view(x: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another one."""
    return x._is_view()


def writes_counted(x: torch.Tensor) -> int:
    """How often autograd has seen a tensor's memory being written to."""
    return x._version


def backward_run() -> int:
    """Which backward is running: a number that no other one has. For hooks of autograd."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], None]) -> None:
    """Call it once the backward that is running is done; what it raises, the backward raises. For hooks of autograd."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- errors through Dynamo ----------------------------------------------------------------------------------------


def unwrapped(error: AttnCompilerError) -> AttnCompilerError:
    """The same error in a class that Dynamo hands to the user as it is, instead of inside a BackendCompilerFailed.

    It is still an instance of its own class, so `except UnknownOption` works. Raise it from the caller's frame: Dynamo
    cuts its own frames above that from the traceback. It also drops the cause, whose traceback goes along as a note.
    """
    from torch._dynamo.exc import ShortenTraceback

    frame = inspect.currentframe()
    copy = _unwrapped_class(type(error))(**error.fields())
    ShortenTraceback.__init__(copy, *error.args, first_useful_frame=frame.f_back if frame else None)  # type: ignore[arg-type]
    if error.__cause__ is not None:
        copy.add_note("".join(traceback.format_exception(error.__cause__)))
    return copy


def _unwrapped_class(cls: type[AttnCompilerError]) -> type[AttnCompilerError]:
    from torch._dynamo.exc import ShortenTraceback

    return type(cls.__name__, (cls, ShortenTraceback), {"__module__": cls.__module__, "__doc__": cls.__doc__})


# ---- graphs, fake values, symbolic sizes --------------------------------------------------------------------------


def fake_value(node: fx.Node) -> Any:
    """What Dynamo recorded as the node's value: fake tensors, symbolic numbers, or nests of them; None if nothing."""
    return node.meta.get("example_value")


def graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`gm` and every graph nested in it (bodies of checkpoint and other higher-order operators)."""
    return (module for module in gm.modules() if isinstance(module, fx.GraphModule))


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """A copy that a compiler takes for the graph itself: fx leaves out where Dynamo has each input from."""
    copied = copy.deepcopy(graph)
    for node, original in zip(copied.nodes, graph.nodes, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    return copied


def add_buffer(gm: fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Give Dynamo's graph a buffer of ours. AOTAutograd lifts it to an input with a fixed address, and wants to know where each is from."""
    from torch._dynamo.source import ConstantSource

    gm.register_buffer(name, tensor)
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        sources[name] = ConstantSource(name)


def remove_buffer(gm: fx.GraphModule, name: str) -> None:
    """Undo `add_buffer`, if it was done."""
    gm._buffers.pop(name, None)
    getattr(gm, "_param_name_to_source", {}).pop(name, None)


def graph_devices(gm: fx.GraphModule) -> tuple[torch.device, ...]:
    """Every device that a value of the graph lives on, sorted."""
    nodes = (node for module in graph_modules(gm) for node in module.graph.nodes)
    leaves = (leaf for node in nodes for leaf in pytree.tree_leaves(fake_value(node)))
    return tuple(sorted({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}, key=str))


def is_wrapper_subclass(value: Any) -> bool:
    """Whether `value` is a tensor that wraps others (DTensor, nested ...): its ops are not those of a plain tensor."""
    return bool(is_traceable_wrapper_subclass(value))


def statically_known(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` always holds. Adds no guard: a symbolic condition that can't be proved is False."""
    return bool(symbolic_shapes.statically_known_true(condition))


def example(number: Any) -> Any:
    """A number that may be symbolic as this call has it; None where that is not known while compiling. Adds no guard."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    return number.node.hint if number.node.has_hint() else None


def example_of(number: Any, size_of: Callable[[int], int]) -> Any:
    """A number that may be symbolic, as a call would have it whose sizes are others. size_of: from a size of this call. None where it is
    not known while compiling. Adds no guard."""
    if not isinstance(number, torch.SymInt):
        return example(number)
    sizes = number.node.shape_env.backed_var_to_val
    symbols = number.node.expr.free_symbols
    if not symbols <= sizes.keys():
        return None
    found = number.node.expr.xreplace({symbol: sympy.Integer(size_of(int(sizes[symbol]))) for symbol in symbols})
    return int(found) if found.is_Integer else None


def dim_of(size: int | torch.SymInt) -> int | str:
    """A size as a spec has it: the int if it is one always, else its symbolic expression ("s0"). Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    constant = size.node.maybe_as_int()
    return str(size.node.expr) if constant is None else int(constant)


def decided(size: int | torch.SymInt) -> sympy.Expr:
    """A size as an expression; where it is the larger or smaller of two, and guards of by now say which: that one. Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    env = size.node.shape_env

    def surely_above(a: sympy.Expr, b: sympy.Expr) -> bool:
        return bool(env.bound_sympy(a - b).lower >= 0)

    def chosen(largest: bool, *args: sympy.Expr) -> sympy.Expr | None:
        at_end = (a for a in args if all(surely_above(*((a, b) if largest else (b, a))) for b in args))
        return next(at_end, None)

    expr = size.node.expr
    for choice in expr.atoms(sympy_functions.Max, sympy_functions.Min):
        found = chosen(isinstance(choice, sympy_functions.Max), *choice.args)
        expr = expr if found is None else expr.xreplace({choice: found})
    return expr


def fixed(number: torch.SymFloat) -> float | None:
    """What a float that Dynamo made symbolic is in this call, which a guard asks of every later one: another number compiles anew. None,
    and no guard, where it is computed from sizes, too, or is not known while compiling."""
    is_of_floats = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in number.node.expr.free_symbols)
    return float(symbolic_shapes.guard_scalar(number)) if is_of_floats and number.node.has_hint() else None


def largest(value: torch.Tensor, size: sympy.Expr, most: int) -> int | None:
    """The largest that a size can be. Of symbols without a known end, guards ask from here on that they are at most `most`, if they are
    in this call. None where it is not known. value: a fake tensor of the same graph."""
    env = _shape_env(value)
    if env is None or size.is_Integer:
        return int(size) if size.is_Integer else most
    known = {str(symbol): symbol for symbol in env.var_to_range}
    size = size.xreplace({symbol: known[str(symbol)] for symbol in size.free_symbols if str(symbol) in known})
    for symbol in size.free_symbols:
        _hold(env, symbol, lambda number: number <= most, unless=env.bound_sympy(symbol).upper.is_Integer)
    upper = env.bound_sympy(size).upper
    return int(upper) if upper.is_Integer else None


def is_of_positive(number: torch.SymInt) -> bool:
    """Whether all symbols in a number are at least 1, as sizes are: known, or asked by guards from here on if they are in this call."""
    env = number.node.shape_env
    for symbol in number.node.expr.free_symbols:
        _hold(env, symbol, lambda symbolic: symbolic >= 1, unless=bool(env.bound_sympy(symbol).lower >= 1))
    return all(env.bound_sympy(symbol).lower >= 1 for symbol in number.node.expr.free_symbols)


def _shape_env(value: torch.Tensor) -> symbolic_shapes.ShapeEnv | None:
    mode = getattr(value, "fake_mode", None)
    return None if mode is None else mode.shape_env


def _hold(
    env: symbolic_shapes.ShapeEnv,
    symbol: sympy.Symbol,
    condition: Callable[[torch.SymInt], torch.SymBool | bool],
    *,
    unless: bool,
) -> None:
    """A guard that the condition is what it is in this call, where that is known while compiling."""
    number = env.create_symintnode(symbol, hint=None)
    if not unless and isinstance(number, torch.SymInt) and number.node.has_hint():
        bool(condition(number))


def simplified(mode: FakeTensorMode, size: sympy.Expr) -> sympy.Expr:
    """A size as the guards of by now have it: a symbol that some op fixed in the meantime is a number."""
    return size if mode.shape_env is None else mode.shape_env.replace(size)


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def _no_cuda(device: int) -> int:
    raise RuntimeError(f"this torch was built without CUDA, so cuda:{device} has no stream")


#: the address of the stream that is current on a device, by its index. torch.cuda.current_stream makes an object of it first.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)


def _no_device() -> int:
    raise RuntimeError("this torch was built without CUDA, so no device is the current one")


#: the index of the current device, once CUDA is in use. torch.cuda.current_device sees to that first, each time.
current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_device)


# ---- names and traces ---------------------------------------------------------------------------------------------


def graph_name() -> str:
    """The compilation under way as logs and tlparse show it ("0/0": frame 0, first compile); "-" outside of one."""
    compile_id = CompileContext.current_compile_id()
    return "-" if compile_id is None else str(compile_id)


def trace_artifact(name: str, payload: Callable[[], str], *, encoding: str = "string") -> None:
    """Put a file into TORCH_TRACE, under the compilation under way, for tlparse to show. encoding: "string" or "json".

    payload is not called when PyTorch knows that no trace is being written.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def without_transforms(x: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers that torch.func's transforms (vmap, grad ...) put around it: a wrapper has no storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
