"""NVIDIA's cuDNN frontend and its device state: handles, streams, addresses. Everything else about cuDNN is tested without a device.

`nvidia-cudnn-frontend` opens whichever libcudnn it finds. Two copies of cuDNN in one process would be two states, so it is used only if it
opened the version that torch runs with: torch's own is loaded by then, and dlopen returns it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from attn_compiler.lowerings.cudnn import graphs
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan, PlanKey, Plans
from attn_compiler.lowerings.shared.launching.replaying import Start
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.spec.target import cudnn_version, cudnn_words
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe

log = logging.getLogger(__name__)

_handles = threading.local()


#: names of graphs' arguments and of handles, the same in all releases
_IN_EACH = ("data_type", "diagonal_alignment", "heur_mode", "cudnnGraphNotSupportedError", "create_handle")


@functools.cache
def load() -> Any:
    """Return the frontend's names. Raises CudnnRefused with the reason where it can't be imported or opened another cuDNN than torch's."""
    torch_version = cudnn_version()
    try:
        module = importlib.import_module("cudnn")
        opened = int(module.backend_version())
    # The site falls back on any error of a broken installation (OSError of a missing library, RuntimeError of the loader).
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise CudnnRefused(said=f"import cudnn: {graphs.in_one_line(str(error))}") from error
    if opened != torch_version:
        raise CudnnRefused(
            said=f"the frontend opened cuDNN {cudnn_words(opened)}, torch runs with {cudnn_words(torch_version)}"
        )
    return _names(module)


def _names(module: Any) -> Any:
    """Return graphs and handles of C++, under the names of 1.26. From 1.27 on the module's own are Python wrappers of these."""
    inner: Any = getattr(module, "_pybind_module", None)
    if not hasattr(inner, "backend_graph"):
        return module
    set_stream = getattr(inner, "_raw_set_stream", None) or inner.set_stream
    return SimpleNamespace(
        **{name: getattr(inner, name) for name in _IN_EACH}, pygraph=inner.backend_graph, set_stream=set_stream
    )


def build(key: PlanKey) -> BuiltPlan:
    """Build a plan on the key's device, which is the current one meanwhile. Raises CudnnRefused."""
    fe = load()
    with torch.cuda.device(key.device):
        return graphs.build(fe, key, time.perf_counter, handle=handle(key.device))


def tell(key: PlanKey, plan: BuiltPlan, is_late: bool) -> None:
    """Count a plan among PyTorch's own counters ("cudnn_plans", "cudnn_plans_late") and log it; a late one as a warning."""
    torch_observe.add_to_counters(Counter({"cudnn_plans": 1, "cudnn_plans_late": int(is_late)}))
    kind, shapes = (
        "backward" if key.backward else "forward",
        ", ".join(f"{n} {laid.words}" for n, laid in key.tensors[:3]),
    )
    text = "cuDNN plan built in %.0f ms (%s, %s): %s; %s"
    when = "in the middle of a step: its strides are not those that were compiled for" if is_late else "while compiling"
    log.log(logging.WARNING if is_late else logging.INFO, text, plan.milliseconds, kind, plan.engine, when, shapes)


#: the plans of this process
PLANS = Plans(build, tell)


def handle(device: int) -> int:
    """Return cuDNN's handle of this thread and device, set to the device's current stream. Raises CudnnRefused where none can be made."""
    stream = torch_compat.current_raw_stream(device)
    try:
        held = _handles.by_device
    except AttributeError:
        held = _handles.by_device = {}
    found: _Handle | None = held.get(device)
    if found is None:
        found = held[device] = _Handle(device)
    if found.stream != stream:
        found.use(stream)
    return found.number


class _Handle:
    """A cuDNN handle, and the stream that it was last set to: setting it takes microseconds, so it is set only when the stream changes."""

    __slots__ = ("number", "stream", "_fe")

    number: int
    stream: int

    def __init__(self, device: int) -> None:
        self._fe: Any = load()
        try:
            with torch.cuda.device(device):
                self.number = int(self._fe.create_handle())
        except RuntimeError as error:
            raise CudnnRefused(said=graphs.in_one_line(str(error))) from error
        self.stream = -1

    def use(self, stream: int) -> None:
        self._fe.set_stream(handle=self.number, stream=stream)
        self.stream = stream


def launcher(plan: BuiltPlan, device: torch.device, pick: Callable[[list[int]], Sequence[int]]) -> Start:
    """Return a function that launches the plan on the current stream. The caller has made `device` the current one.

    pick: selects the plan's addresses from a call's, in the plan's order.
    The workspace is the caching allocator's, so it is safe to free at once and to capture.
    """
    execute, index = _executor(plan.graph), device.index
    workspace = torch_compat.allocator((plan.workspace,), (1,), torch.uint8, device.type)

    def launch(tensors: list[torch.Tensor], addresses: list[int]) -> None:
        space = workspace()
        execute(pick(addresses), space.data_ptr(), handle(index))

    return launch


def _executor(graph: Any) -> Callable[[Sequence[int], int, int], None]:
    """Return a function of addresses, a workspace and a handle. Up to 1.27 graphs take a list of addresses, from 1.28 on an array's
    address."""
    if hasattr(graph, "_execute_with_ptrs"):
        of_list: Callable[[Sequence[int], int, int], None] = graph._execute_with_ptrs
        return of_list
    of_array = graph._execute_with_raw_ptrs

    def execute(addresses: Sequence[int], workspace: int, handle: int) -> None:
        held = array("Q", addresses)
        begin, count = held.buffer_info()
        of_array(begin, count, workspace, handle)

    return execute
