"""The bounds that masks become, and the counters: nodes of a graph, run for several lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.decode import operands as decode_operands, plan
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.spec import masks
from attn_compiler.spec.masks import Alignment, Causal, Dense, MaskKind, MaskSpec
from tests.lowerings.bench import Bench
from tests.lowerings.specs import make_spec

B, K = Index("b"), Index("k")
SCHEDULE = Schedule(keys=32, warps=4, stages=1, programs=64, least_keys=32)

LENGTH = masks.KeyBound(side="last", bound=Load("length", (), "int"))
LENGTHS = masks.KeyBound(side="last", bound=Load("lengths", (B,), "int"))
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("padding", (B, K), "int")))
WINDOW = masks.SlidingWindow(left=3, right=None)
END = Causal(alignment=Alignment.BOTTOM_RIGHT)


def tensors(seqlen_q: int = 1, seqlen_kv: int = 20) -> dict[str, torch.Tensor]:
    padding = torch.ones(2, seqlen_kv, dtype=torch.int64)
    padding[0, :4], padding[0, 6], padding[1, -5:] = 0, 0, 0
    return {
        "q": torch.empty(2, 6, seqlen_q, 16),
        "k": torch.empty(2, 3, seqlen_kv, 16),
        "length": torch.tensor(9),
        "lengths": torch.tensor([30, -2]),
        "padding": padding,
    }


def call_of(bench: Bench, mask: MaskSpec, splits: int | None = 1) -> DecodeCall:
    (batch, heads, seqlen_q, _), (_, heads_kv, seqlen_kv, _) = bench.dims("q"), bench.dims("k")
    spec = make_spec(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=16,
        mask=mask,
        device="cpu",
        needs_grad=False,
    )
    return DecodeCall(spec=spec, schedule=dataclasses.replace(SCHEDULE, splits=splits))


def proved(*kinds: MaskKind) -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, 1, 20), dtype="bool"))


def emitted(bench: Bench, call: DecodeCall, **given: fx.Node) -> dict[str, fx.Node]:
    def emit(emitter: Emitter) -> tuple[str, list[fx.Node]]:
        nodes = bench.nodes
        operands = Operands(q=nodes["q"], k=nodes["k"], v=nodes["k"], loads=nodes, **given)
        return decode_operands.emit(emitter, call, operands)

    text, made = bench.call(emit)
    return dict(zip(plan.plan_of(DecodeCall.from_text(text)).operands, made, strict=True))


def bounds(what: MaskSpec, have: dict[str, torch.Tensor], **given: str) -> list[Any]:
    """For each batch row that has its own, for each query: the first key and the one after the last."""
    bench = Bench(**have)
    made = emitted(bench, call_of(bench, what), **{slot: bench.nodes[name] for slot, name in given.items()})
    (found,) = bench.run([made["bounds"]])
    assert found.dtype == torch.int32
    assert found.is_contiguous()
    assert found.shape[0] == 2
    return found.permute(1, 2, 0).tolist()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((LENGTH,), [[[0, 10]]]),
        ((LENGTHS,), [[[0, 20]], [[0, 0]]]),
        ((PADDING,), [[[4, 20]], [[0, 15]]]),
        ((LENGTH, PADDING), [[[4, 10]], [[0, 10]]]),
        ((Causal(),), [[[0, 1]]]),
    ],
)
def test_of_one_query(kinds: tuple[MaskKind, ...], expected: list[Any]) -> None:
    assert bounds(proved(*kinds), tensors()) == expected


def test_of_several_queries() -> None:
    assert bounds(proved(END, WINDOW), tensors(2)) == [[[0, 19], [0, 20]]]
    assert bounds(proved(END, PADDING), tensors(3)) == [[[4, 18], [4, 19], [4, 20]], [[0, 15], [0, 15], [0, 15]]]


def test_a_batch_row_without_any_key_has_an_empty_interval() -> None:
    have = tensors()
    have["padding"][1] = 0
    (_, ((first, end),)) = bounds(proved(PADDING), have)
    assert first >= end


UNREAD = MaskSpec(dense=Dense(shape=(2, 6, 2, 20), dtype="bool"), reason="an input of the graph")


def test_of_a_mask_that_could_not_be_read() -> None:
    given = torch.zeros(2, 6, 2, 20, dtype=torch.bool)
    given[0, 1, 0, 5], given[0, 4, 0, 9], given[1, 2, 1, 19] = True, True, True
    found = bounds(UNREAD, {**tensors(2), "given": given}, mask="given")
    assert found[0][0] == [5, 10]
    assert found[1][1] == [19, 20]
    assert found[0][1][0] >= found[0][1][1]


def test_of_lowest_numbers_that_are_added() -> None:
    lowest = torch.finfo(torch.float32).min
    given = torch.zeros(2, 1, 1, 20)
    given[0, ..., :3], given[0, ..., 15:], given[1] = lowest, -torch.inf, lowest
    mask = MaskSpec(dense=Dense(shape=(2, 1, 1, 20), dtype="float32"), reason="an input of the graph")
    ((some,), ((first, end),)) = bounds(mask, {**tensors(), "given": given}, mask="given")
    assert some == [3, 15]
    assert first >= end


@pytest.mark.parametrize(
    ("heads", "queries", "expected"),
    [
        (1, 1, [[[4, 10]], [[0, 0]]]),
        (6, 1, [[[4, 10], *[[0, 0]] * 5], [[0, 0]] * 6]),
        (1, 2, [[[4, 10], [4, 10]], [[0, 0], [0, 0]]]),
        (6, 2, [[[4, 10], [4, 10], *[[0, 0]] * 10], [[0, 0]] * 12]),
    ],
)
def test_of_queries_that_have_keys(heads: int, queries: int, expected: list[Any]) -> None:
    """Others have empty intervals, also where each of two masks leaves keys; of each head where heads differ in those."""
    has_keys = torch.zeros(2, heads, 1, 1, dtype=torch.bool)
    has_keys[0, 0] = True
    mask = dataclasses.replace(proved(LENGTH, PADDING), means=True)
    assert bounds(mask, {**tensors(queries), "has_keys": has_keys}, has_keys="has_keys") == expected


def test_an_empty_interval_of_one_mask_says_that_there_is_no_key() -> None:
    have = tensors()
    have["padding"][1] = 0
    mask = dataclasses.replace(proved(PADDING), means=True)
    some, ((first, end),) = bounds(
        mask, {**have, "has_keys": torch.ones(2, 1, 1, 1, dtype=torch.bool)}, has_keys="has_keys"
    )
    assert some == [[4, 20]]
    assert first >= end


def test_of_numbers_that_leave_a_head_none() -> None:
    given = torch.full((2, 6, 1, 20), torch.finfo(torch.float32).min)
    given[0, 1, 0, 5], given[0, 4, 0, 9], given[1] = 0, 0, -torch.inf
    dense = Dense(shape=(2, 6, 1, 20), dtype="float32")
    mask = MaskSpec(dense=dense, reason="an input of the graph", means=True)
    some, none = bounds(mask, {**tensors(), "given": given}, mask="given")
    assert none == [[0, 0]] * 6
    assert some == [[0, 0], [5, 10], [0, 0], [0, 0], [5, 10], [0, 0]]


def test_counters_are_for_each_batch_row_kv_head_and_tile_of_rows() -> None:
    bench = Bench(**tensors(16))
    made = emitted(bench, call_of(bench, MaskSpec(), splits=None))
    (found,) = bench.run([made["count"]])
    assert (found.dtype, found.shape) == (torch.int32, (2 * 3 * 1,))
    assert not found.any()
    assert not emitted(bench, call_of(bench, MaskSpec(), splits=1))


def test_sites_share_what_they_read() -> None:
    bench = Bench(**tensors())
    call = call_of(bench, proved(LENGTH, PADDING), splits=4)
    first = emitted(bench, call)
    count = len(bench.graph.nodes)
    assert emitted(bench, call) == first
    assert len(bench.graph.nodes) == count
    assert emitted(bench, call_of(bench, proved(LENGTH), splits=4))["count"] is first["count"]


def test_one_graph_for_every_batch_and_length() -> None:
    bench = Bench({"q": (0,), "k": (0, 2), "padding": (0, 1)}, **tensors())
    made = emitted(bench, call_of(bench, proved(PADDING), splits=None))
    for batch, seqlen_kv in ((2, 20), (5, 33)):
        padding = torch.ones(batch, seqlen_kv, dtype=torch.int64)
        padding[:, :2] = 0
        given = {"q": torch.empty(batch, 6, 1, 16), "k": torch.empty(batch, 3, seqlen_kv, 16), "padding": padding}
        count, limits = bench.run([made["count"], made["bounds"]], **given)
        assert count.numel() == batch * 3
        assert limits.tolist() == [[[2]] * batch, [[seqlen_kv]] * batch]
    assert not bench.env.guards
