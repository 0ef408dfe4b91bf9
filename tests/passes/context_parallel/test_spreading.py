"""What is refused of a whole graph, or of a frame: whatever runs outside of graphs, keys of unknown origin, positions that leave."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import rank_sync
from attn_compiler.passes.graph import bodies
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.passes.context_parallel.compiled import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    Attend,
    Data,
    Model,
    causal,
    compile_and_run,
    fresh_mesh,
    kept_graphs,
)


def _broken(model: Model, x: torch.Tensor, data: Data) -> torch.Tensor:
    positions = torch.arange(x.shape[1])
    torch._dynamo.graph_break()
    return x + model.embedding(positions)


def test_a_graph_break_is_refused() -> None:
    with pytest.raises(ContextParallelUnsupported, match=r"a graph break.*fullgraph=True"):
        compile_and_run(after=_broken)


def test_a_graph_break_may_be_allowed() -> None:
    def after(model: Model, x: torch.Tensor, data: Data) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    assert compile_and_run(after=after, allow=("graph_break",)).shape == (BATCH, LENGTH, WIDTH)


@pytest.mark.parametrize("in_buckets", [True, False])
def test_the_buckets_of_ddp_are_refused_by_name(in_buckets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cut graphs of models of some MB. What to do about it makes one graph."""
    monkeypatch.setattr(rank_sync, "agree", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
    with fresh_mesh() as mesh, torch._dynamo.config.patch(optimize_ddp=in_buckets):
        options = {"context_parallel": ContextParallel(mesh), "inner": "eager"}
        wrapped = DistributedDataParallel(Model(None, None, None), bucket_cap_mb=0.001, find_unused_parameters=True)
        compiled = torch.compile(wrapped, backend="attn_compiler", options=options, dynamic=False)
        x = torch.randn(BATCH, LENGTH, WIDTH)
        if in_buckets:
            with pytest.raises(ContextParallelUnsupported, match=r"buckets of Dist.*optimize_ddp = False"):
                compiled(x)
        else:
            assert compiled(x).shape == (BATCH, LENGTH, WIDTH)


def test_local_positions_do_not_leave_a_graph() -> None:
    """DDP cuts graphs: what comes after would take them for a part of the sequence."""

    def after(model: Model, x: torch.Tensor, data: Data) -> object:
        return x, torch.arange(x.shape[1])

    with pytest.raises(ContextParallelUnsupported, match="another graph would take it for a part of the sequence"):
        compile_and_run(after=after)  # type: ignore[arg-type]


def test_the_last_recompilation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one after it would run without a compiler."""
    monkeypatch.setattr(rank_sync, "agree", lambda *_, **__: None)
    with fresh_mesh() as mesh, torch._dynamo.config.patch(recompile_limit=3):
        options = {"context_parallel": ContextParallel(mesh), "inner": "eager"}
        compiled = torch.compile(Model(None, None, None), backend="attn_compiler", options=options, dynamic=False)
        for length in (6, 8):
            compiled(torch.randn(BATCH, length, WIDTH))
        for length in (10, 12, 14):
            with pytest.raises(ContextParallelUnsupported, match="recompile_limit"):
                compiled(torch.randn(BATCH, length, WIDTH))
        compiled(torch.randn(BATCH, 6, WIDTH))


def _with_keys(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    k = x.view(-1, x.shape[-2], HEADS, WIDTH // HEADS).transpose(1, 2).expand(q.shape[0], -1, -1, -1)
    return scaled_dot_product_attention(q, k, k)


UNKNOWN_KEYS: dict[str, Attend] = {
    "of an input with heads": lambda m, q, k, v, d: scaled_dot_product_attention(q, d["keys"], d["keys"]),
    "of an input of two axes": lambda m, q, k, v, d: _with_keys(d["flat"].view(BATCH, LENGTH, WIDTH), q),
    "as many of a table as positions": lambda m, q, k, v, d: _with_keys(m.embedding.weight[:LENGTH], q),
    "of local positions": lambda m, q, k, v, d: _with_keys(m.embedding(torch.arange(LENGTH)), q),
}


def _keys() -> Data:
    return {"keys": torch.randn(BATCH, HEADS, 7, WIDTH // HEADS), "flat": torch.randn(BATCH * LENGTH, WIDTH)}


@pytest.mark.parametrize("name", UNKNOWN_KEYS)
def test_keys_of_unknown_origin_are_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=r"keys of another one, or of none.*replicated"):
        compile_and_run(attend=UNKNOWN_KEYS[name], data=_keys())


def test_keys_of_the_model_and_named_ones_are_on_all_ranks() -> None:
    compile_and_run(attend=lambda m, q, k, v, d: _with_keys(m.embedding.weight[:5], q))
    compile_and_run(attend=UNKNOWN_KEYS["of an input with heads"], data=_keys(), replicated=("keys",))


def test_a_router_is_no_attention() -> None:
    def routed(model: Model, x: torch.Tensor, data: Data) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights = model.q(flat).softmax(-1)
        return torch.matmul(weights, model.k.weight).view_as(x)

    compile_and_run(after=routed)


def _through(*checkpoints: Any) -> Attend:
    """Attention in a checkpoint, in a checkpoint ..."""

    def attend(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
        run: Any = lambda *x: causal(model, *x, data)  # noqa: E731
        for given in checkpoints:
            run = functools.partial(checkpoint, run, **given)
        found: Tensor = run(q, k, v)
        return found

    return attend


def test_attention_in_a_checkpoint_is_rewritten_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are gathered again where they are recomputed; where the rank stands in the sequence is the same."""
    graphs = kept_graphs(monkeypatch)
    compile_and_run(attend=_through({"use_reentrant": False}), method="all_gather")
    (gm,) = graphs
    (call,) = [node for node in gm.graph.nodes if bodies.is_higher_order(node)]
    (body,) = bodies.bodies(call)
    inside, outside = ({target_name(node) for node in module.graph.nodes} for module in (body, gm))
    assert "gathered_sequence" in inside
    assert "gathered_sequence" not in outside
    assert "sequence_rank" in outside
    assert "sequence_rank" not in inside


def test_a_checkpoint_in_a_checkpoint_is_refused() -> None:
    twice = ({"use_reentrant": False}, {"use_reentrant": False})
    with pytest.raises(ContextParallelUnsupported, match="a checkpoint in a checkpoint"):
        compile_and_run(attend=_through(*twice))


def test_what_mixes_positions_in_a_checkpoint_is_refused() -> None:
    def after(model: Model, x: Tensor, data: Data) -> Tensor:
        found: Tensor = checkpoint(lambda x: x.cumsum(1), x, use_reentrant=False)
        return found

    with pytest.raises(ContextParallelUnsupported, match=r"aten\.cumsum"):
        compile_and_run(after=after)
    compile_and_run(after=after, allow=("aten.cumsum.default",))


def test_a_checkpoint_without_attention_is_followed() -> None:
    def after(model: Model, x: Tensor, data: Data) -> Tensor:
        found: Tensor = checkpoint(lambda x: model.q(x).relu(), x, use_reentrant=False)
        return found

    compile_and_run(after=after)
    with torch.no_grad():
        compile_and_run(after=after, attend=_through({"use_reentrant": True}))
