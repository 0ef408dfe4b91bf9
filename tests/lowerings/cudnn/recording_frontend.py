"""A stand-in for NVIDIA's cuDNN frontend that records what it is told: graphs, handles, streams and launches; no GPU, no cuDNN."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any


class DataType(Enum):
    BFLOAT16 = 1
    HALF = 2
    FLOAT = 3
    INT32 = 4
    INT64 = 5
    FP8_E4M3 = 6
    FP8_E5M2 = 7


class Alignment(Enum):
    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class Heuristics(Enum):
    A = 0
    FALLBACK = 1


class NotSupported(Exception):
    pass


@dataclass
class Tensor:
    name: str = ""
    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: DataType | None = None
    uid: int = 0
    is_output: bool = False

    def set_output(self, value: bool) -> Tensor:
        self.is_output = value
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def set_data_type(self, data_type: DataType) -> Tensor:
        self.data_type = data_type
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self


class Graph:
    """steps: the names of the methods that were called. told: the arguments of sdpa, sdpa_backward or those in FP8. largest: what
    those give besides, and nobody asks for."""

    def __init__(self, frontend: Frontend, **machine: Any) -> None:
        self._frontend = frontend
        self.machine = machine
        self.steps: list[str] = []
        self.told: dict[str, Any] = {}
        self.tensors: list[Tensor] = []
        self.largest: list[Tensor] = []
        self.launches: list[tuple[list[int], int, int]] = []
        self._prepared = False

    def tensor(self, **fields: Any) -> Tensor:
        self.tensors.append(Tensor(**fields))
        return self.tensors[-1]

    def sdpa(self, **told: Any) -> list[Tensor]:
        self.told = told
        outputs = [Tensor(), Tensor()]
        self.tensors += outputs if told["generate_stats"] else outputs[:1]
        return outputs

    def sdpa_backward(self, **told: Any) -> list[Tensor]:
        self.told = told
        outputs = [Tensor() for _ in range(3)]
        self.tensors += outputs
        return outputs

    def sdpa_fp8(self, **told: Any) -> list[Tensor | None]:
        self.told = told
        out, lse, *largest = (Tensor() for _ in range(4))
        self.tensors += [out, lse] if told["generate_stats"] else [out]
        self.largest = largest
        return [out, lse if told["generate_stats"] else None, *largest]

    def sdpa_fp8_backward(self, **told: Any) -> list[Tensor | None]:
        self.told = told
        outputs = [Tensor() for _ in range(3)]
        self.tensors += outputs
        self.largest = [Tensor() for _ in range(4)]
        return [*outputs, *self.largest, None]

    def __getattr__(self, step: str) -> Any:
        if step not in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            raise AttributeError(step)

        def do(*_: Any) -> None:
            self.steps.append(step)
            error = self._frontend.errors.get(step)
            if error is not None and self._frontend.refuses(self):
                raise error

        return do

    def get_plan_name_at_index(self, index: int) -> str:
        return f"engine{index}"

    def get_workspace_size(self) -> int:
        return self._frontend.workspace

    def _prepare_variant_pack_template(self) -> None:
        self._prepared = True

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        """As from 1.27 on: none before they are asked for."""
        return sorted(tensor.uid for tensor in self.tensors) if self._prepared else []

    def _execute_with_ptrs(self, addresses: list[int], workspace: int, handle: int) -> None:
        self.launches.append((list(addresses), workspace, handle))

    def named(self, uids: dict[str, int]) -> dict[str, Tensor]:
        names = {uid: name for name, uid in uids.items()}
        return {names[tensor.uid]: tensor for tensor in self.tensors}


class NewerGraph(Graph):
    """A graph of C++ in a frontend from 1.28 on: addresses come as where an array of them begins."""

    _execute_with_ptrs = property()  # type: ignore[assignment]  # hasattr finds none

    def _execute_with_raw_ptrs(
        self, user_ptrs_array: int, n_user: int, workspace: int, handle: int, plan_index: int = -1
    ) -> None:
        held = (ctypes.c_uint64 * n_user).from_address(user_ptrs_array)
        self.launches.append((list(held), workspace, handle))


@dataclass
class Frontend:
    """errors: what a step of a graph raises, by its name. only_backward: the forward's steps raise nothing."""

    errors: dict[str, Exception] = field(default_factory=dict)
    only_backward: bool = False
    workspace: int = 256
    graphs: list[Graph] = field(default_factory=list)
    streams: list[tuple[int, int]] = field(default_factory=list)
    version: int = 91900

    data_type = DataType
    diagonal_alignment = Alignment
    heur_mode = Heuristics
    cudnnGraphNotSupportedError = NotSupported

    def __post_init__(self) -> None:
        self._handles = itertools.count(1000)

    def pygraph(self, **machine: Any) -> Graph:
        self.graphs.append(Graph(self, **machine))
        return self.graphs[-1]

    def refuses(self, graph: Graph) -> bool:
        return not self.only_backward or "dO" in graph.told

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> int:
        return next(self._handles)

    def set_stream(self, *, handle: int, stream: int) -> None:
        self.streams.append((handle, stream))


class NewerFrontend:
    """The module from 1.28 on: graphs and handles in Python, which are not for us, around C++ under other names."""

    def __init__(self) -> None:
        self.inner = Frontend()
        self._pybind_module = SimpleNamespace(
            **{name: getattr(self.inner, name) for name in ("data_type", "diagonal_alignment", "heur_mode")},
            cudnnGraphNotSupportedError=NotSupported,
            create_handle=self.inner.create_handle,
            backend_graph=self._graph,
            _raw_set_stream=self.inner.set_stream,
        )

    def _graph(self, **machine: Any) -> NewerGraph:
        self.inner.graphs.append(NewerGraph(self.inner, **machine))
        return self.inner.graphs[-1]

    def backend_version(self) -> int:
        return self.inner.version
