"""Expressions as graph nodes against the same expressions evaluated on tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size, on_nodes
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.lowerings.base import Emitter
from tests.index_expr.tensor_expressions import SIZES, SYMBOLS, TENSORS, bools, floats, ints
from tests.lowerings.bench import Bench

CPU = torch.device("cpu")
INDICES = {
    name: torch.arange(size).view(*(size if other == name else 1 for other in SIZES)) for name, size in SIZES.items()
}


def _emitted(x: Expr, real: torch.dtype = torch.float64) -> torch.Tensor:
    bench = Bench(**{**INDICES, **TENSORS})
    indices, tensors = ({name: bench.nodes[name] for name in names} for names in (INDICES, TENSORS))
    names = Names(device=CPU, indices=indices, sizes=SYMBOLS, tensors=tensors)
    (value,) = bench.run([bench.call(on_nodes.emit, x, names, real=real)])
    return value


# The first graph takes as long as a hundred later ones.
@settings(deadline=None)
@given(st.one_of(ints, bools, floats))
def test_equals_evaluate_on_at_every_index(x: Expr) -> None:
    expected = evaluate_on(x, {**SYMBOLS, **INDICES}, TENSORS)
    found = _emitted(x)
    shapes = torch.broadcast_shapes(found.shape, expected.shape)
    assert found.dtype == expected.dtype, ix.text(x)
    assert torch.equal(found.expand(shapes).nan_to_num(7.25), expected.expand(shapes).nan_to_num(7.25)), ix.text(x)


@pytest.mark.parametrize("op", ["div", "log", "exp", "pow"])
def test_reals_are_of_the_dtype_that_is_asked_for(op: str) -> None:
    args = (ix.add(Index("k"), ix.ONE), Const(3)) if op in ("div", "pow") else (ix.add(Index("k"), ix.ONE),)
    x = Apply(op, args)
    exact = evaluate_on(x, {**SYMBOLS, **INDICES}, TENSORS)
    for real in (torch.float32, torch.float64):
        found = _emitted(x, real)
        assert found.dtype == real
        assert torch.allclose(found.double(), exact.double(), rtol=1e-6)


def test_nothing_is_read_beyond_a_tensor() -> None:
    beyond = Load("lengths", (Linear(((Index("k"), 1000),), -2000),), "int")
    guarded = ix.where(ix.compare("==", Index("k"), Const(2)), beyond, Const(7))
    assert _emitted(guarded).flatten().tolist() == [7, 7, TENSORS["lengths"][0].item(), 7]


def test_an_index_below_zero_counts_from_the_end() -> None:
    x = Load("slopes", (Linear(((Index("k"), 1),), -4),), "float")
    assert torch.equal(_emitted(x), evaluate_on(x, INDICES, TENSORS).expand(1, 1, 1, 4))


def test_nothing_is_divided_by_zero() -> None:
    x = Apply("where", (ix.compare("==", Index("k"), ix.ZERO), Const(0), Apply("floordiv", (Const(6), Index("k")))))
    assert _emitted(x).flatten().tolist() == [0, 6, 3, 2]


def test_parts_that_occur_twice_are_emitted_once() -> None:
    load = Load("flags", (Index("b"), Index("k")), "bool")
    bench = Bench(**{**INDICES, **TENSORS})
    names = Names(device=CPU, indices={n: bench.nodes[n] for n in INDICES}, tensors={"flags": bench.nodes["flags"]})
    bench.call(on_nodes.emit, Apply("and", (load, Apply("xor", (load, Const(True))))), names)
    assert [n.target for n in bench.graph.nodes].count(torch.ops.aten.index.Tensor) == 1


def test_a_tensor_without_a_node_is_an_error() -> None:
    bench = Bench(k=INDICES["k"])
    names = Names(device=CPU, indices={"k": bench.nodes["k"]})
    with pytest.raises(KeyError, match="flags"):
        bench.call(on_nodes.emit, Load("flags", (Index("k"),), "bool"), names)


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'cosine'"):
        _emitted(Apply("cosine", (Index("q"),)))


def test_a_symbolic_size_is_the_size_at_run_time() -> None:
    bench = Bench({"x": (0,)}, x=torch.arange(10))
    x = ix.add(ix.mul(Size("s"), Const(2)), Load("x", (Index("k"),), "int"))

    def emit(emitter: Emitter) -> fx.Node:
        size = on_nodes.size_of(emitter, bench.nodes["x"], 0)
        index = emitter.call(torch.arange, size)
        names = Names(device=CPU, indices={"k": index}, sizes={"s": size}, tensors={"x": bench.nodes["x"]})
        return on_nodes.emit(emitter, x, names)

    node = bench.call(partial(emit))
    for length in (3, 10, 33):
        assert bench.run([node], x=torch.arange(length) * 5)[0].tolist() == [2 * length + 5 * k for k in range(length)]
    assert not bench.env.guards


@pytest.mark.parametrize("at", [(Index("k"), Const(0)), (Const(0), Index("k")), (Const(1), Const(0))])
def test_a_compiler_knows_the_shape_of_what_is_read(at: tuple[Expr, ...]) -> None:
    """Of an index without axes behind another one PyTorch's fake tensors say that the result has none."""
    table = torch.arange(12.0).view(6, 2)
    bench = Bench(k=torch.arange(2)[None], table=table)
    names = Names(device=CPU, indices={"k": bench.nodes["k"]}, sizes={}, tensors={"table": bench.nodes["table"]})
    value = bench.call(on_nodes.emit, Load("table", at, "float"), names, real=torch.float32)
    (found,) = bench.run([value])
    assert value.meta["example_value"].shape == found.shape
    k = torch.arange(2)[None]
    assert torch.equal(found, table[tuple(k if isinstance(i, Index) else i.value for i in at)])  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "clamps"), [(8, False), (7, True)], ids=["of the dimension", "another"])
def test_an_index_that_counts_a_dimension_is_within_it(size: int, clamps: bool) -> None:
    bench = Bench(k=torch.arange(size), x=torch.arange(8.0))
    nodes = {"k": bench.nodes["k"]}
    names = Names(device=CPU, indices=nodes, tensors={"x": bench.nodes["x"]}, counted={"k": size})
    (value,) = bench.run([bench.call(on_nodes.emit, Load("x", (Index("k"),), "float"), names)])
    assert value.tolist() == list(range(size))
    assert any(node.target is torch.clamp for node in bench.nodes["k"].graph.nodes) == clamps
