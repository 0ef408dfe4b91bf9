"""Private PyTorch API of Inductor, and of other compilers: options, compiling, our pass and its key, and direct calls of ops."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from attn_compiler.torch_private import compat as torch_compat

torch_compat.require_supported_torch(str(torch.__version__))

# Private imports come after the check, so that an unsupported torch is reported before a missing name.
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402

CompiledFn = Callable[..., Any]
GraphPass = Callable[[fx.Graph], None]


def inductor_modes() -> tuple[str, ...]:
    """Return every value that torch.compile's `mode` takes."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def inductor_option_names() -> frozenset[str]:
    """Return every config name that Inductor takes in torch.compile's `options`."""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_option_type(name: str) -> type | None:
    """Return the type that Inductor checks the option's value against; None if it checks nothing (`int | None` ...)."""
    from torch._inductor import config

    declared = config.get_type(name)  # type: ignore[attr-defined]
    return declared if isinstance(declared, type) and typing.get_origin(declared) is None else None


def inductor_patches(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the config patches that backend="inductor" would use for the same mode and (already checked) options. PyTorch's own wrapper
    makes them. It also prepares the process for CUDA graphs and honours the compiler bisector."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)  # type: ignore[no-untyped-call]


#: Python's recursion limit from Inductor's first code generation on
_DEEPEST = 2000


def deepen_stack() -> None:
    """Raise Python's recursion limit for good to the one that Inductor sets when it first generates code. The limit is in the key of a
    rewrite. A graph's key must not depend on whether an earlier graph's code was generated in this process."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _DEEPEST))


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    patches: dict[str, Any],
    cache_key: str | None,
    joint_pass: GraphPass | None,
    last_pass: GraphPass | None = None,
    region: str | None = None,
) -> CompiledFn:
    """Compile with Inductor's compile_fx. It takes ownership of `gm`. region: torch.compile's `name=`, if this torch has it.

    joint_pass: runs on the graph of the forward or, in training, of both, once autograd was traced; has to be covered by the key.
    last_pass: runs on the forward and on the backward, each by itself, before Inductor's own pattern matching. With neither pass, the graph
    is compiled as Inductor alone would.

    The patches also hold for the backward, which is compiled later, outside of this call. cache_key: everything that decides the compiled
    code besides the graph and the config; it enters the keys of the AOTAutograd and FX graph caches.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    for place, own in (("joint_custom_pre_pass", joint_pass), ("post_grad_custom_pre_pass", last_pass)):
        if cache_key is not None and own is not None:
            users = patches.get(place, getattr(config, place))
            patches = {**patches, place: JointPass(cache_key, own, before=_as_passes(users))}
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
    """Skip AOTAutograd's search for recomputation in a graph without its own backward.

    AOTAutograd searches graphs without gradients, too, for a backward that Dynamo put into them. If a checkpoint holds an op that may draw
    random numbers, as PyTorch's attention kernels are marked even without dropout, it raises before it looks for that backward. Without a
    backward, nothing is recomputed.
    """
    from torch._functorch import config

    switch = "remat_using_tags_for_fwd_loss_bwd_graph"
    if not hasattr(config, switch) or has_own_backward(gm):
        yield
        return
    with config.patch({switch: False}):
        yield


def has_own_backward(gm: fx.GraphModule) -> bool:
    """Return True if a graph of Dynamo's, or one nested in it, asks for gradients itself."""
    calls = (torch.autograd.grad, torch.autograd.backward, "backward")
    return any(node.target in calls for module in torch_compat.graph_modules(gm) for node in module.graph.nodes)


class JointPass(CustomGraphPass):
    """Run our pass, and put `key` into the keys of both compile caches, which include the uuid of every custom pass.

    Without that an artifact of another version or other options is reused, backward included. key: covers `own`. before: the user's passes
    in the same place; they run, and count in the key, as they would without us.
    """

    def __init__(self, key: str, own: GraphPass, before: tuple[GraphPass, ...] = ()) -> None:
        self.key = key
        self.own = own
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in (*self.before, self.own):
            graph_pass(graph)

    def uuid(self) -> Any | None:
        """Return None, which means "do not cache", if a pass of the user has no uuid, as PyTorch does."""
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        return None if None in uuids else ("attn_compiler", self.key, *uuids)


def _as_passes(value: Any) -> tuple[GraphPass, ...]:
    """Normalise Inductor's setting of a custom pass: nothing, one, or (since 2.13) several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def records_cuda_graphs(patches: dict[str, Any]) -> bool:
    """Return True if Inductor records GPU code as a CUDA graph under these config patches."""
    from torch._inductor import config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


def freezes_in_vain(patches: dict[str, Any]) -> bool:
    """Return True if these patches alone ask for frozen weights. Dynamo sees no patches, and hands weights over as inputs."""
    from torch._inductor import config

    return bool(patches.get("freezing")) and not config.freezing


def forget_cuda_graphs() -> None:
    """Free the memory of CUDA graphs, as torch._dynamo.reset() does for backend="inductor"."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def cache_folder() -> Path:
    """Return Inductor's cache folder (TORCHINDUCTOR_CACHE_DIR), created if missing. Raises OSError if that fails."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@contextlib.contextmanager
def nothing_on_disk(folder: str) -> Iterator[None]:
    """Compile within the block with an empty disk cache, kept in `folder`."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=folder, delete=False):
        yield


def kernel_cache_folder(device: int) -> str:
    """Return Triton's cache folder for a GPU: the one that Inductor will set, unless TRITON_CACHE_DIR is set."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return os.environ.get("TRITON_CACHE_DIR") or triton_cache_dir(device)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor finds (CXX), as it would call it; None if none runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None


def compile_threads() -> int:
    """Return how many kernels Inductor compiles at a time (TORCHINDUCTOR_COMPILE_THREADS); 1: one after the other."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


def start_workers() -> None:
    """Start Inductor's compile worker processes, if it has any.

    They take seconds to start, and until then it compiles one kernel after the other. compile_fx starts them, too, but after our passes.
    A process that finds its code on disk has no use for them: they took a warm first step of BERT on an H200 0.3 s.
    """
    from torch._inductor import async_compile

    getattr(async_compile, "maybe_warm_pool", object)()


def share_kernels() -> None:
    """Set Triton's cache folder, assembler and libdevice as Inductor does before its first kernel, if CUDA is in use. A later process, in
    which Inductor's kernels come first, would else look for ours under other keys: T5 compiled all of its kernels twice."""
    from torch._inductor.runtime import compile_tasks

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault("TRITON_CACHE_DIR", kernel_cache_folder(torch.cuda.current_device()))
        for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
            getattr(compile_tasks, name, object)()


def call_directly(op: str, module: str, function: str, *, site: str | None = None) -> None:
    """Let Inductor's code call a function of a module for the op ("namespace::name"), which does the same.

    The dispatcher takes the host some 5 µs a call. The rest of PyTorch goes on calling the op. site: a class of the module, called without
    arguments. If the layout of the op's tensors is the same in every call, an instance of it is called instead of the function.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

    alias = f"{op.replace('::', '_')}_directly"

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
        from torch._inductor.virtualized import V

        wrapper = V.graph.wrapper_code
        called = alias
        if site is None or not _lies_the_same(node):
            wrapper.add_import_once(f"from {module} import {function} as {alias}")
        else:
            # The name is unique in the code, subgraphs included.
            called = f"{alias}_{node.get_name()}"
            wrapper.add_import_once(f"from {module} import {site} as {alias}_class")
            wrapper.add_import_once(f"{called} = {alias}_class()")
        wrapper.add_import_once("from attn_compiler.torch_private.op_library import profiler, ranged")
        node.python_kernel_name = f"(ranged({op!r}, {called}) if profiler._is_profiler_enabled else {called})"
        writeline(ExternKernelAllocLine(wrapper, node))

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op.replace('::', '.')}.default"] = CustomCodegen(python=write)


def _lies_the_same(node: Any) -> bool:
    """Return True if the inputs of an Inductor node have the same sizes and strides in every call. Guards ensure that for a graph's inputs,
    and Inductor's own code for all others."""
    numbers = (number for tensor in node.inputs for number in (*tensor.get_size(), *tensor.get_stride()))
    return all(isinstance(number, (int, sympy.Integer)) for number in numbers)
