"""Twins of the ops that launch Triton kernels, for programs that are compiled ahead: `attn_compiler::<op>_packaged`.

A twin computes as its op does. It is decomposed where a graph is traced to be compiled: PyTorch's ops allocate tensors, and each launch
is a call of `triton_kernel_wrapper_functional`. Inductor compiles that call into code that needs no Python, as for every Triton kernel
that a model calls. The body of the op determines the launches (dry_run.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attn_compiler.lowerings.shared.launching.dry_run import recording
from attn_compiler.lowerings.shared.launching.dry_tensors import Addresses
from attn_compiler.torch_private import export as torch_export
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE, launching_body
from attn_compiler.torch_private.symbols import statically_known

_TWIN = "_packaged"


def twin(op: Any) -> Any:
    """Return the op that replaces it in a program that is compiled ahead; None where it can't be decomposed."""
    body = launching_body(op)
    if body is None:
        return None
    name = op.name().partition("::")[2] + _TWIN
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        _define(name, op, body)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define(name: str, op: Any, body: Callable[..., Any]) -> None:
    arguments = str(op._schema).partition("(")[2]
    LIBRARY.define(f"{name}({arguments}", tags=tuple(op.tags))
    LIBRARY.impl(name, op, "CompositeExplicitAutograd")
    # On fake tensors the op does what its own fake does.
    torch.library.register_fake(f"{NAMESPACE}::{name}", op, lib=LIBRARY)
    torch_export.take_apart(f"{NAMESPACE}::{name}", functools.partial(apart, body), LIBRARY)


def apart(body: Callable[..., Any], *arguments: Any) -> Any:
    """Run a body on values of a trace, with calls of PyTorch in place of launches."""
    launches = _Launches()
    given = pytree.tree_map_only(torch.Tensor, _bytes, arguments)
    with Addresses(), recording(launches):
        made = body(*given)
    return pytree.tree_map_only(torch.Tensor, launches.written, made)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Convert truth values to bytes, which kernels read. An axis that is repeated in memory stays repeated."""
    if tensor.dtype != torch.bool:
        return tensor
    repeated = [dim for dim, stride in enumerate(tensor.stride()) if statically_known(stride == 0)]
    once = functools.reduce(lambda x, dim: x.narrow(dim, 0, 1), repeated, tensor).to(torch.uint8)
    return once.expand(tensor.shape) if repeated else once


class _Launches:
    """Recorder of launches in a trace. A launch writes into tensors that the body allocated; a traced launch returns new tensors instead,
    which replace the allocated ones afterwards."""

    def __init__(self) -> None:
        #: tensors that the body made, by their identity, each with the traced tensor that replaces it now
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor that holds all writes to `tensor` so far; `tensor` itself if the body did not allocate it."""
        return self._made.get(id(tensor), (tensor, tensor))[1]

    def allocated(self, tensor: torch.Tensor) -> None:
        self._made[id(tensor)] = (tensor, tensor)

    def launched(self, kernel: Any, tensors: Mapping[str, torch.Tensor], arguments: Any) -> None:
        from attn_compiler.lowerings.shared.launching.flat_kernels import flat

        launch = flat(kernel, arguments)
        given = {name: self.written(tensors[source]) for name, source in launch.tensors.items()}
        may_be_written = [name for name, source in launch.tensors.items() if id(tensors[source]) in self._made]
        outputs = torch_export.launched(launch.kernel, arguments.grid, {**given, **launch.numbers}, may_be_written)
        for name, output in outputs.items():
            tensor = tensors[launch.tensors[name]]
            self._made[id(tensor)] = (tensor, output)
