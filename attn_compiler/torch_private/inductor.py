"""Private PyTorch API of Inductor, and of compilers beside it: options, compiling, our pass and its key, and how its code calls an op."""

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

# Private names come after the check, so that an unsupported torch is named before one of them is found missing.
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402

CompiledFn = Callable[..., Any]
GraphPass = Callable[[fx.Graph], None]


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


#: calls in a row that Inductor lets Python make, from the first graph that it generates code for on
_DEEPEST = 2000


def deepen_stack() -> None:
    """Raise Python's recursion limit to the one that Inductor sets, for good, when it first generates code.

    The limit is in the key of a rewrite. A graph's key must not depend on whether an earlier graph's code was generated in this process.
    """
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
    """Inductor's compile_fx. It takes ownership of `gm`. region: torch.compile's `name=`, where this torch has it.

    joint_pass: runs on the graph of the forward or, in training, of both, once autograd was traced; has to be covered by the key. With
    neither, the graph is compiled as Inductor alone would. last_pass: runs on the forward and on the backward, each by itself, before
    Inductor looks for its own patterns.
    The patches also hold for the backward, which is compiled later, outside of this call. cache_key: what decides the
    compiled code besides the graph and the config; it enters the keys of the AOTAutograd and FX graph caches.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    if cache_key is not None and joint_pass is not None:
        users = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
        patches = {**patches, "joint_custom_pre_pass": JointPass(cache_key, joint_pass, before=_as_passes(users))}
    if cache_key is not None and last_pass is not None:
        users = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
        patches = {**patches, "post_grad_custom_pre_pass": JointPass(cache_key, last_pass, before=_as_passes(users))}
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
    if not hasattr(config, switch) or has_own_backward(gm):
        yield
        return
    with config.patch({switch: False}):
        yield


def has_own_backward(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's, or one nested in it, asks for gradients itself."""
    return any(node.target in _BACKWARDS for module in torch_compat.graph_modules(gm) for node in module.graph.nodes)


#: how a graph asks for gradients itself
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, "backward")


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


def records_cuda_graphs(patches: dict[str, Any]) -> bool:
    """Whether Inductor has code for a GPU recorded as a CUDA graph under these config patches."""
    from torch._inductor import config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


def forget_cuda_graphs() -> None:
    """Free what CUDA graphs hold, as torch._dynamo.reset() does for backend="inductor"."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def cache_folder() -> Path:
    """Where Inductor keeps what it compiled (TORCHINDUCTOR_CACHE_DIR). It exists, unless it can't be made: OSError."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@contextlib.contextmanager
def nothing_on_disk(folder: str) -> Iterator[None]:
    """What is compiled within the block finds nothing on disk from before, and leaves in `folder` what it makes."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=folder, delete=False):
        yield


def kernel_cache_folder(device: int) -> str:
    """Where Triton keeps what it compiled for a GPU: where Inductor will have it, unless TRITON_CACHE_DIR says another folder."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return os.environ.get("TRITON_CACHE_DIR") or triton_cache_dir(device)


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor finds (CXX), as it would call it; None: none of those that it looks for runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None


def compile_threads() -> int:
    """How many kernels Inductor compiles at a time (TORCHINDUCTOR_COMPILE_THREADS); 1: one after the other."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


def start_workers() -> None:
    """Start the processes that Inductor compiles kernels with, where it has any. They take seconds to come, and until then it compiles one
    kernel after the other. compile_fx starts them, too, and in torch.compile(backend="inductor") nothing comes before that; here the
    passes do, and the import of compile_fx."""
    from torch._inductor import async_compile

    start = getattr(async_compile, "maybe_warm_pool", None)
    if start is not None:
        start()


def share_kernel_cache(device: int) -> None:
    """Triton keeps compiled kernels where Inductor will have it keep them, which it says when it loads the first of its own."""
    os.environ.setdefault("TRITON_CACHE_DIR", kernel_cache_folder(device))


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
