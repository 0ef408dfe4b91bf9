"""What a ring writes into a graph, and what a rank gets of the others, with all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import collectives as torch_collectives, rank_sync
from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse
from attn_compiler.lowerings.graph_ops.merging import merged_parts, whole_of_parts
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.passes.context_parallel import ring
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.graph.unit import Unit
from tests.lowerings.emitting import GraphEmitter
from tests.meshes import fake_mesh
from tests.passes.context_parallel.compiled import BATCH, HEADS, LENGTH, WIDTH, Attend, Data, Model

#: of keys and values of one attention on a rank
BYTES = 2 * BATCH * LENGTH * WIDTH * 4


def _unit(monkeypatch: pytest.MonkeyPatch, attend: Attend | None = None, *, size: int = 3, **description: Any) -> Unit:
    """Of the graph of a model with one attention, left as the passes wrote it before kernels were chosen."""
    found: list[Unit] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        options = Options(context_parallel=cp, inner="eager", lowering="untouched")
        found.extend(rewrite(gm, options).units)
        return lambda *inputs: gm.graph.output_node().args[0] and [torch.zeros(BATCH, LENGTH, WIDTH)]

    monkeypatch.setattr(rank_sync, "agree", lambda *_, **__: None)
    torch._dynamo.reset()
    with fake_mesh(size) as mesh:
        cp = ContextParallel(mesh, **description)
        torch.compile(Model(None, attend, None), backend=backend)(torch.randn(BATCH, LENGTH, WIDTH))
    (unit,) = found
    return unit


def _count(unit: Unit, target: object) -> int:
    return sum(node.target is target for node in unit.graph.nodes)


def _full(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _window(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
    at = torch.arange(q.shape[2])
    near = (at <= at[:, None]) & (at[:, None] - at < 4)
    return scaled_dot_product_attention(q, k, v, attn_mask=near)


@pytest.mark.parametrize(
    ("attend", "order", "parts"),
    [(None, None, 3), (None, "head_tail", 6), (_full, "head_tail", 3)],
    ids=["contiguous", "head and tail", "no mask"],
)
def test_one_exchange_and_a_gather_for_each_rank(
    attend: Attend | None, order: str | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a rank that lie apart are parts of their own, where a mask tells them apart."""
    unit = _unit(monkeypatch, attend, method="ring", load_balance=order)
    assert _count(unit, torch_collectives.exchanged_pieces) == 1
    assert _count(unit, torch_collectives.gathered_piece) == 3
    assert _count(unit, attention_with_lse) == len(unit.found.sites) == parts
    assert _count(unit, merged_parts) == parts - 1
    assert _count(unit, whole_of_parts) == 1
    assert {site.spec.lse for site in unit.found.sites if site.spec is not None} == {"merged"}
    assert all("ring over 3 ranks" in site.notes[0] for site in unit.found.sites)
    # Each sends a third to two others, and two others a third of three.
    assert f"a rank sends {BYTES // 3 * 2 * 4} bytes" in unit.found.sites[0].notes[0]


def test_a_gather_begins_before_the_attention_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = _unit(monkeypatch, method="ring", load_balance=None)
    steps = [n.target for n in unit.graph.nodes if n.target in (torch_collectives.gathered_piece, attention_with_lse)]
    gather, attend = torch_collectives.gathered_piece, attention_with_lse
    assert steps == [gather, gather, attend, gather, attend, attend]


def test_auto_takes_a_ring_where_gathered_keys_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks share out no two heads."""
    assert HEADS % 3
    limit = 3 * BYTES
    assert "all_gather over" in _unit(monkeypatch, gather_limit=limit).found.sites[0].notes[0]
    (note, *_) = _unit(monkeypatch, gather_limit=limit - 1).found.sites[0].notes
    assert "ring over" in note
    assert note.endswith(f"keys and values of all ranks would be {limit} bytes, more than gather_limit")
    assert "all_to_all over" in _unit(monkeypatch, size=2, gather_limit=0).found.sites[0].notes[0]
    # Who asks for it is told no reason.
    assert "gather_limit" not in _unit(monkeypatch, method="ring", gather_limit=0).found.sites[0].notes[0]


def test_a_halo_that_is_less_takes_the_place_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = _unit(monkeypatch, _window, method="ring", load_balance=None)
    assert "halo of 3 positions before each chunk" in unit.found.sites[0].notes[0]
    assert _count(unit, torch_collectives.gathered_piece) == 0


@pytest.mark.parametrize(("dtype_v", "exchanges"), [(torch.float32, 1), (torch.float16, 2)])
@pytest.mark.parametrize("rank", [0, 2])
def test_each_step_brings_the_keys_and_values_of_one_rank(
    dtype_v: torch.dtype, exchanges: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sizes that three ranks do not divide."""
    size, calls = 3, []
    k = torch.randn(size, 1, 2, 5, 4)
    v = torch.randn(size, 1, 2, 5, 3).to(dtype_v)
    both = [torch.cat((k, v), -1)] if dtype_v == k.dtype else [k, v]
    whole = [x.flatten(1) for x in both]
    slices = [torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (size, -1)) for x in whole]

    def exchanged(pieces: Tensor, group: str) -> Tensor:
        (at,) = (i for i, x in enumerate(slices) if x[rank].shape == pieces.shape and x[rank].equal(pieces))
        calls.append(at)
        return slices[at][:, rank]

    def gathered(piece: Tensor, count: int, group: str) -> Tensor:
        found = [x[owner].flatten() for x in slices for owner in range(size) if x[owner, rank].equal(piece)]
        assert len(found) == 1
        return found[0]

    monkeypatch.setattr(torch_collectives, "exchanged_pieces", exchanged)
    monkeypatch.setattr(torch_collectives, "gathered_piece", gathered)
    builder = GraphEmitter(fx.Graph())
    nodes = []
    for x in (k[rank], v[rank]):
        node = builder.graph.placeholder("x")
        node.meta["example_value"] = x
        nodes.append(node)
    layout = GraphLayout(size=size, group="g", is_balanced=False)
    found = ring._Slices.exchanged(builder, layout, *nodes)  # type: ignore[arg-type]
    assert len(calls) == exchanges
    for owner in range(size):
        of_k, of_v = (builder.value(x) for x in found.gathered(owner))
        assert of_k.equal(k[owner])
        assert of_v.equal(v[owner])
