"""DTensors of tensor parallelism between attentions: what leaves each position to itself is followed, and what does not is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.context_parallel import rank_sync
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests import dtensor_kernels
from tests.meshes import fake_mesh
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, Data, Model

#: what a model does with its hidden states. It is given meshes by name, hidden states, and the rest of the batch by name
OnMesh = Callable[..., Any]


def _wrapped(x: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return DTensor.from_local(x, mesh, placements or [Replicate()], run_check=False)


def _run(after: OnMesh, data: Data | None = None, **description: Any) -> Any:
    """One call on one of four ranks, whose collectives do nothing. What it computes means nothing, what is refused does."""
    dtensor_kernels.install()
    torch._dynamo.reset()
    attn_compiler.reset()
    with fake_mesh(2, 2, names=("cp", "tp")) as mesh:
        return _run_on(mesh, after, data or {}, **description)


def _run_on(mesh: DeviceMesh, after: OnMesh, data: Data, **description: Any) -> Any:
    # Slices of a mesh are made outside: Dynamo takes the objects.
    meshes = {"cp": mesh["cp"], "tp": mesh["tp"], "both": mesh}

    def last(model: Model, x: Tensor, given: Data) -> Any:
        return after(meshes, x, **given)

    with pytest.MonkeyPatch.context() as patch:
        # The other ranks are not there.
        patch.setattr(rank_sync, "agree", lambda *_, **__: None)
        options = {"context_parallel": ContextParallel(mesh["cp"], **description), "inner": "eager"}
        compiled = torch.compile(Model(None, None, last), backend="attn_compiler", options=options, fullgraph=True)
        return compiled(torch.randn(BATCH, LENGTH, WIDTH), **data)


WEIGHT = torch.randn(2 * WIDTH, WIDTH)


def _along_the_sequence(m: Any, x: Tensor) -> Tensor:
    """Sequence parallelism as it should be: norms on shares, and whole hidden states afterwards."""
    shared = _wrapped(x, m["tp"]).redistribute(placements=[Shard(1)])
    return layer_norm(shared, (WIDTH,)).redistribute(placements=[Replicate()]).to_local()


def _chunks(m: Any, x: Tensor) -> Tensor:
    a, b = linear(_wrapped(x, m["tp"]), _wrapped(WEIGHT, m["tp"])).chunk(2, -1)
    return (a * b.tanh()).to_local()


FOLLOWED: dict[str, OnMesh] = {
    "sequence parallelism": _along_the_sequence,
    "several results": _chunks,
    "columns and rows": lambda m, x: (
        linear(_wrapped(x, m["tp"]), _wrapped(WEIGHT, m["tp"], Shard(0)))
        .redistribute(placements=[Replicate()])
        .to_local()
    ),
    "the whole of it": lambda m, x: _wrapped(x, m["tp"]).full_tensor() + x,
    "a DTensor given back": lambda m, x: _wrapped(x, m["tp"]) + 1,
    "shares of features": lambda m, x: _wrapped(x, m["tp"], Shard(2)).to_local() + x,
    "a mesh of one more axis": lambda m, x: _wrapped(WEIGHT, m["both"], Replicate(), Shard(0)).to_local().sum() + x,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_tensor_parallelism_is_followed(name: str) -> None:
    _run(FOLLOWED[name])


def _counted(m: Any, x: Tensor) -> Tensor:
    at = torch.arange(LENGTH, dtype=x.dtype)[None, :, None].expand_as(x).contiguous()
    return (_wrapped(x, m["tp"]) + _wrapped(at, m["tp"])).to_local()


def _written(m: Any, x: Tensor) -> Tensor:
    wrapped = _wrapped(x + 1, m["tp"])
    wrapped.add_(1)
    return wrapped.to_local()


REFUSED: dict[str, tuple[OnMesh, str]] = {
    "a share of positions as a local tensor": (
        lambda m, x: _wrapped(x, m["tp"]).redistribute(placements=[Shard(1)]).to_local().exp(),
        "cuts the rank's positions once more",
    ),
    "a share of positions made a DTensor": (
        lambda m, x: _wrapped(x, m["tp"], Shard(1)).redistribute(placements=[Replicate()]).to_local(),
        "cuts the rank's positions once more",
    ),
    "the mesh of the sequence": (lambda m, x: _wrapped(x, m["cp"]).to_local(), "ranks that have other parts"),
    "the sequence gathered by DTensors": (
        lambda m, x: _wrapped(x, m["both"], Shard(2), Replicate()).redistribute(
            placements=[Replicate(), Replicate()]
        ).to_local(),
        "ranks that have other parts",
    ),
    "a sum along the sequence": (lambda m, x: _wrapped(x, m["tp"]).cumsum(1).to_local(), r"aten\.cumsum"),
    "a mean over positions": (lambda m, x: _wrapped(x, m["tp"]).mean(1, keepdim=True).to_local() + x, r"aten\.mean"),
    "a part of the positions": (lambda m, x: _wrapped(x, m["tp"])[:, 1:].to_local(), r"aten\.slice"),
    "a factor of the length": (
        lambda m, x: (_wrapped(x, m["tp"]) * (1 / LENGTH)).to_local(),
        "may come from the length of a part",
    ),
    "positions counted by the model": (_counted, "positions that are not those of the sequence"),
    "a write in place": (_written, "add_"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_positions_is_refused(name: str) -> None:
    function, word = REFUSED[name]
    with pytest.raises(ContextParallelUnsupported, match=f"outside of attention, each position.*{word}"):
        _run(function)


def test_an_op_on_dtensors_is_named_as_on_plain_tensors_and_may_be_allowed() -> None:
    _run(REFUSED["a sum along the sequence"][0], allow=("aten.cumsum.default",))


def test_local_positions_do_not_leave_a_graph_as_a_dtensor() -> None:
    def after(m: Any, x: Tensor) -> Any:
        at = torch.arange(LENGTH)[None].expand(BATCH, -1).contiguous()
        return x, _wrapped(at, m["tp"])

    with pytest.raises(ContextParallelUnsupported, match="another graph would take it for a part of the sequence"):
        _run(after)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def test_queries_that_are_cut_along_the_sequence_are_refused() -> None:
    def after(m: Any, x: Tensor) -> Any:
        q, k, v = (_wrapped(_heads(x), m["tp"], Shard(2)) for _ in range(3))
        return scaled_dot_product_attention(q, k, v).to_local()

    with pytest.raises(ContextParallelUnsupported, match="every attention of the graph is understood"):
        _run(after)


def test_a_mask_of_a_dtensor_is_refused() -> None:
    def after(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        q = _heads(x)
        mask = _wrapped(keep, m["tp"]).to_local()[:, None, None, :]
        return scaled_dot_product_attention(q, q, q, attn_mask=mask)

    with pytest.raises(ContextParallelUnsupported, match=r"an attention over parts|a mask or bias reads"):
        _run(after, data={"keep": torch.ones(BATCH, LENGTH, dtype=torch.bool)})


def test_a_mask_that_comes_in_as_a_dtensor_is_refused() -> None:
    def after(m: Any, x: Tensor, keep: DTensor) -> Tensor:
        q = _heads(x)
        return scaled_dot_product_attention(q, q, q, attn_mask=keep.to_local()[:, None, None, :])

    with fake_mesh(2, 2, names=("cp", "tp")) as mesh:
        keep = _wrapped(torch.ones(BATCH, LENGTH, dtype=torch.bool), mesh["tp"])
        with pytest.raises(ContextParallelUnsupported, match=r"an attention over parts|a mask or bias reads"):
            _run_on(mesh, after, {"keep": keep})
