"""Private PyTorch API of DTensors: layout on the mesh, the local tensor, and conversions between both.

PyTorch's module of DTensors takes a while to load, and not every build has it. It is loaded already if a value is a DTensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import compat as torch_compat, symbols as torch_symbols, tracing as torch_tracing

RULE = "attention of DTensors is that of their local tensors"

#: reads attributes such as q.device_mesh in a graph
get_attribute: Callable[..., Any] = getattr


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """Layout of a DTensor on its mesh.

    mesh: PyTorch's object.
    dims: for each axis of the mesh the axis of the tensor that is sharded along it; None if it is replicated.
    words: the same for people.
    """

    mesh: Any
    dims: tuple[int | None, ...]
    words: str

    @property
    def cut(self) -> frozenset[int]:
        """The sharded axes of the tensor."""
        return frozenset(dim for dim in self.dims if dim is not None)


def is_dtensor(value: Any) -> bool:
    """Return True if a value is a DTensor."""
    if not torch_compat.is_wrapper_subclass(value) or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def shards(value: Any, name: str) -> Shards | Reason:
    """Return the layout of a DTensor on its mesh, or the reason why it is unknown. name: of the tensor, for people."""
    from torch.distributed.tensor import Replicate, Shard

    words = f"({', '.join(map(str, value.placements))})"
    dims = tuple(p.dim % max(value.dim(), 1) if type(p) is Shard else None for p in value.placements)
    if any(type(placement) not in (Shard, Replicate) for placement in value.placements):
        return Reason(
            code=Code.UNEQUAL_SHARES,
            rule=RULE,
            observed=f"{name} is placed {words}, which is neither whole nor a share along one axis",
            remedy=f"redistribute {name} over heads, over the batch, or to Replicate() before the attention",
        )
    sizes = [value.device_mesh.size(i) for i in range(value.device_mesh.ndim)]
    for axis, (whole, own) in enumerate(zip(value.shape, local_of(value).shape, strict=True)):
        members = math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim == axis)
        if members > 1 and not torch_symbols.statically_known(own * members == whole):
            is_known = isinstance(whole, int) and isinstance(own, int)
            return Reason(
                code=Code.UNEQUAL_SHARES,
                rule=RULE,
                observed=f"{name} has {whole} along axis {axis}, of which {members} processes "
                + ("have unequal shares" if is_known else "may have unequal shares, since the size is symbolic"),
                remedy=f"pad {name} to a multiple of {members}" if is_known else "compile with dynamic=False",
            )
    return Shards(mesh=value.device_mesh, dims=dims, words=words)


def local_of(value: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor in this process."""
    local: torch.Tensor = value._local_tensor
    return local


def _real_mesh(value: Any) -> Any:
    """Return the mesh of a DTensor. In a graph it may be a stand-in, whose attributes must not be read."""
    mesh = value.device_mesh
    return mesh.real_obj if torch_tracing.is_script_object(mesh) else mesh


def other_ranks(value: Any) -> frozenset[int]:
    """Return the ranks on a DTensor's mesh, but for this process."""
    mesh = _real_mesh(value)
    return frozenset(mesh.mesh.flatten().tolist()) - {mesh.get_rank()}


def groups(value: Any) -> list[str]:
    """Return the names of the collective groups along the axes of a DTensor's mesh that have several processes."""
    mesh = _real_mesh(value)
    return [str(mesh.get_group(i).group_name) for i in range(mesh.ndim) if mesh.size(i) > 1]


def from_local() -> Callable[..., Any] | None:
    """Return the function that Dynamo's graphs call to make a DTensor of a local tensor, its mesh and its placements. None in torch 2.11,
    which has no name for it that the code of a graph could use."""
    from torch.distributed.tensor import _api

    return getattr(_api, "from_local", None)


def of_local(local: torch.Tensor, like: Any, order: Sequence[int]) -> Any:
    """Make a DTensor of a local tensor, placed as `like` and with its sizes, but for the last axis. order: of its axes in memory."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape[:-1], local.shape[-1]))
    stride, strides = 1, [1] * len(shape)
    for axis in reversed(order):
        strides[axis] = stride
        stride = stride * shape[axis]
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=tuple(strides)
    )


def summed_to_local(value: Any, mesh_dims: Sequence[int]) -> torch.Tensor:
    """Return a DTensor's local tensor whose gradients are summed over some axes of the mesh. Each process there uses only its own share of
    the tensor, so its gradient is a part of the sum."""
    from torch.distributed.tensor import Partial

    placements = [Partial() if i in mesh_dims else p for i, p in enumerate(value.placements)]
    local: torch.Tensor = value.to_local(grad_placements=placements)
    return local


def share_of(value: Any, dims: Sequence[int | None]) -> torch.Tensor:
    """Return this process's share of a replicated DTensor, if it is sharded along `dims`. Nothing is communicated."""
    from torch.distributed.tensor import Replicate, Shard

    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    share: torch.Tensor = value.redistribute(placements=placements).to_local()
    return share


def made_of(node: fx.Node) -> fx.Node | None:
    """Return the local tensor that a node makes a DTensor of, if its call shows it and no gradient is lost. In torch 2.11 Dynamo hides the
    call of `from_local`."""
    if node.op != "call_function" or node.target != from_local() or node.kwargs.get("run_check"):
        return None
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node):
        return None
    value, local = given.meta["example_value"], local_of(node.meta["example_value"])
    return given if value.device == local.device and not value.requires_grad else None
