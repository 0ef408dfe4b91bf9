"""Private PyTorch API of several subjects: tensors, graphs, errors, CUDA, names. It refuses an unsupported torch.

Importing it on an unsupported torch raises UnsupportedTorch. Versions are told apart by features (a parameter, a type), not by their
number, wherever that is possible.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.reasons.errors import AttnCompilerError, UnsupportedTorch
from attn_compiler.spec.tried import OLDEST

log = logging.getLogger(__name__)


def require_supported_torch(version: str) -> None:
    """Raise UnsupportedTorch before `OLDEST` (spec/tried.py). A release newer than the tried ones is reported, and runs. version: e.g.
    "2.13.0+cpu"."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < OLDEST["torch"]:
        raise UnsupportedTorch(found=version, minimum=".".join(map(str, OLDEST["torch"])))


require_supported_torch(str(torch.__version__))

# Private imports come after the check, so that an unsupported torch is reported before a missing name.
from torch._guards import CompileContext  # noqa: E402
from torch._library import simple_registry  # noqa: E402
from torch._logging import trace_structured  # type: ignore[attr-defined]  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

# ---- tensors --------------------------------------------------------------------------------------------------------


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Allocate an unfilled tensor on the current device of that type.

    On a GPU it uses the function of Inductor's own code: it takes the host a fraction of the 2 µs of torch.empty. It ignores modes, such as
    fake tensors'.
    """
    if device == "cuda":
        return torch._C._dynamo.guards._empty_strided_cuda(size, stride, dtype)  # type: ignore[attr-defined,no-any-return]
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def allocator(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str
) -> Callable[[], torch.Tensor]:
    """Bind `empty_strided` to these arguments for repeated calls. Under a mode, bind torch's own function, which respects it."""
    if device == "cuda" and not torch._C._len_torch_dispatch_stack():
        return functools.partial(torch._C._dynamo.guards._empty_strided_cuda, size, stride, dtype)  # type: ignore[attr-defined]
    return functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Run calls in the block on real tensors, without gradients: no fake, tracing or other mode of a compilation is active."""
    with _disable_current_modes(), torch.no_grad():
        yield


def is_view(x: torch.Tensor) -> bool:
    """Return True if autograd treats a tensor as a view of another one."""
    return x._is_view()


def writes_counted(x: torch.Tensor) -> int:
    """Return the number of writes to a tensor's memory that autograd has seen."""
    return x._version


def backward_run() -> int:
    """Return a unique number of the running backward. For hooks of autograd."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], None]) -> None:
    """Call it once the running backward is done; the backward raises its errors. For hooks of autograd."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- errors through Dynamo ----------------------------------------------------------------------------------------


def unwrapped(error: AttnCompilerError) -> AttnCompilerError:
    """Copy an error into a class that Dynamo passes to the user unchanged, instead of inside a BackendCompilerFailed.

    It is still an instance of its own class, so `except UnknownOption` works. Raise it from the caller's frame: Dynamo cuts its own frames
    above that from the traceback. It also drops the cause, whose traceback goes along as a note.
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


def starts_over(error: Exception) -> bool:
    """Return True if an error is no failure, but tells Dynamo to trace the frame again, or to leave it. A compiler that found a float to be
    fixed, for example, has the graph made anew without it."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return isinstance(error, (RestartAnalysis, SkipFrame))


# ---- graphs and fake values -----------------------------------------------------------------------------------------


def fake_value(node: fx.Node) -> Any:
    """Return the node's value as Dynamo recorded it: fake tensors, symbolic numbers, or nests of them; None if nothing."""
    return node.meta.get("example_value")


def graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield `gm` and every graph nested in it (bodies of checkpoint and other higher-order operators)."""
    return (module for module in gm.modules() if isinstance(module, fx.GraphModule))


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph together with Dynamo's source of each input, which fx leaves out and a compiler needs."""
    copied = copy.deepcopy(graph)
    for node, original in zip(copied.nodes, graph.nodes, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    return copied


def add_buffer(gm: fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Add a buffer of ours to Dynamo's graph. AOTAutograd lifts it to an input with a fixed address, and asks each for its source."""
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
    """Return every device of the graph's values, sorted."""
    nodes = (node for module in graph_modules(gm) for node in module.graph.nodes)
    leaves = (leaf for node in nodes for leaf in pytree.tree_leaves(fake_value(node)))
    return tuple(sorted({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}, key=str))


def is_wrapper_subclass(value: Any) -> bool:
    """Return True if `value` is a tensor that wraps others (DTensor, nested ...): its ops are not those of a plain tensor."""
    return bool(is_traceable_wrapper_subclass(value))


def names_inside(value: Any) -> list[str]:
    """Return the attributes of a wrapping tensor that hold the tensors inside."""
    names: list[str] = value.__tensor_flatten__()[0]
    return names


def wraps_plain(value: Any) -> bool:
    """Return True if a tensor wraps plain ones, and is no DTensor and no nested tensor: those say how rows lie."""
    if not is_wrapper_subclass(value) or value.is_nested or type(value).__module__.startswith("torch.distributed"):
        return False
    inside = [getattr(value, name) for name in names_inside(value)]
    return not any(is_wrapper_subclass(x) for x in inside)


def wrapped(like: Any, inside: Sequence[Any]) -> Any:
    """Wrap tensors as another tensor does, in the order of `names_inside`."""
    names, context = like.__tensor_flatten__()
    return type(like).__tensor_unflatten__(dict(zip(names, inside, strict=True)), context, like.shape, like.stride())


# ---- ops ------------------------------------------------------------------------------------------------------------


def register_fake(library: Any, op: str, fake: Callable[..., Any]) -> None:
    """Register a fake as torch.library.register_fake does, for an op of the library, by its name.

    PyTorch's function searches all modules of the process for the caller's file, to name the source of a fake. That was a quarter of this
    package's import time beside transformers.
    """
    kept = simple_registry.singleton.find(f"{library.ns}::{op}").fake_impl
    library._registration_handles.append(kept.register(fake, "attn_compiler", lib=library))


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def _no_cuda(device: int) -> int:
    raise RuntimeError(f"this torch was built without CUDA, so cuda:{device} has no stream")


#: the address of a device's current stream, by its index. torch.cuda.current_stream wraps it in an object first.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)


def _no_device() -> int:
    raise RuntimeError("this torch was built without CUDA, so no device is the current one")


#: the index of the current device, once CUDA is initialised. torch.cuda.current_device checks that each time.
current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_device)


# ---- names and traces ---------------------------------------------------------------------------------------------


def line_of_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return the model's code at a graph break, and "model.py:12"; None if the graph ends with its function."""
    found = getattr(gm, "compile_subgraph_reason", None)
    frames = getattr(found, "user_stack", None) or []
    if not getattr(found, "graph_break", False) or not frames:
        return None
    return frames[-1].line or "", f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"


def graph_name() -> str:
    """Return the current compilation's name as in logs and tlparse ("0/0": frame 0, first compile); "-" outside of one."""
    compile_id = CompileContext.current_compile_id()
    return "-" if compile_id is None else str(compile_id)


def trace_artifact(name: str, payload: Callable[[], str], *, encoding: str = "string") -> None:
    """Put a file into TORCH_TRACE, under the current compilation, for tlparse to show. encoding: "string" or "json". payload is not called
    when PyTorch knows that no trace is being written."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def without_transforms(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of torch.func's transforms (vmap, grad ...): a wrapper has no storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def process_group(name: str) -> Any:
    """Return the process group of that name."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def default_store() -> Any:
    """Return the store that the ranks of all groups share."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_default_store()
