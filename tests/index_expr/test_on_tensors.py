"""Expressions computed on tensors and made into nodes of a graph."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size, Test, junctions, on_nodes
from attn_compiler.index_expr.on_nodes import Names
from attn_compiler.index_expr.on_tensors import ON_TENSORS, evaluate_on
from attn_compiler.lowerings.base import Emitter
from tests.index_expr.tensor_expressions import SIZES, SYMBOLS, TENSORS, bools, floats, ints
from tests.lowerings.bench import Bench

# Expressions on index tensors against the same expressions on numbers, element by element.

# ---- the two evaluations ------------------------------------------------------------------------------------------


def _element(name: str, at: tuple[int, ...]) -> Any:
    return TENSORS[name][at].item()


def _one_by_one(x: Expr) -> list[Any]:
    places = itertools.product(*(range(size) for size in SIZES.values()))
    return [ix.evaluate(x, {**SYMBOLS, **dict(zip(SIZES, place, strict=True))}, _element) for place in places]


def _at_once(x: Expr) -> list[Any]:
    grids = torch.meshgrid(*(torch.arange(size) for size in SIZES.values()), indexing="ij")
    values = {**SYMBOLS, **dict(zip(SIZES, grids, strict=True))}
    return evaluate_on(x, values, TENSORS).expand(*SIZES.values()).flatten().tolist()


def _same(a: Any, b: Any) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@given(st.one_of(ints, bools, floats))
def test_equals_evaluate_at_every_index(x: Expr) -> None:
    assert all(map(_same, _at_once(x), _one_by_one(x))), ix.text(x)


#: whole numbers of both signs, other numbers, and truth values, all different at different indices
_WHOLE = (Linear(((Index("k"), 1),), -2), Linear(((Index("q"), 2),), -3))
_REAL = (Load("slopes", (Index("k"),), "float"), Apply("div", (_WHOLE[1], Const(4))))
_TRUTH = (Load("flags", (Index("b"), Index("k")), "bool"), Test(">=", Linear(((Index("q"), 1),), -1)))
_OPERANDS: dict[str, list[tuple[Expr, ...]]] = {
    **{op: [_TRUTH] for op in ("and", "or", "xor")},
    "not": [_TRUTH[:1], _WHOLE[:1]],
    "where": [(_TRUTH[0], *_WHOLE), (_TRUTH[0], *_REAL), (_TRUTH[1], _WHOLE[0], _REAL[0]), (_WHOLE[0], *_TRUTH)],
    **{op: [(_WHOLE[0], Const(3)), (_WHOLE[0], Const(-2)), _WHOLE] for op in ("floordiv", "mod", "div")},
    **{op: [_WHOLE, _REAL, _TRUTH, (_WHOLE[0], _REAL[0]), (_WHOLE[0], _TRUTH[1])] for op in ("mul", "add")},
    **{op: [_WHOLE, _REAL, (_WHOLE[0], _REAL[0])] for op in ("min", "max", "eq", "lt")},
    **{op: [_WHOLE[:1], _REAL[:1]] for op in ("abs", "float", "int", "rounded")},
    **{op: [(Apply("abs", (Apply("add", (_REAL[0], Const(0.125))),)),)] for op in ("log", "exp")},
}


@pytest.mark.parametrize("op", [op for op in ix.OPS if op in _OPERANDS])
def test_each_op(op: str) -> None:
    for args in _OPERANDS[op]:
        x = Apply(op, args)
        assert _at_once(x) == pytest.approx(_one_by_one(x)), ix.text(x)


def test_every_op_has_a_meaning() -> None:
    assert {*ON_TENSORS, "where", "and", "or"} == set(ix.OPS)


def test_unknown_op_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'cosine'"):
        _at_once(Apply("cosine", (Index("q"),)))


# ---- what only counts in the branch that is taken -----------------------------------------------------------------

_BEYOND = Load("lengths", (Index("k"),), "int")


def test_reading_beyond_a_tensor_is_an_error() -> None:
    with pytest.raises(IndexError, match="lengths has size 3 in dimension 0"):
        _at_once(_BEYOND)


def test_reading_beyond_a_tensor_in_the_branch_not_taken_is_none() -> None:
    x = Apply("where", (ix.compare("<", Index("k"), Const(3)), _BEYOND, Const(7)))
    assert _at_once(x) == _one_by_one(x)


def test_an_index_below_zero_counts_from_the_end() -> None:
    x = Load("slopes", (Linear(((Index("k"), 1),), -4),), "float")
    assert _at_once(x) == _one_by_one(x)


def test_dividing_by_zero_in_the_branch_not_taken_is_none() -> None:
    quotient = Apply("floordiv", (Const(6), Index("q")))
    x = Apply("where", (ix.compare(">", Index("q"), ix.ZERO), quotient, ix.ZERO))
    assert _at_once(x) == _one_by_one(x)
    with pytest.raises(ZeroDivisionError):
        _at_once(quotient)


def test_missing_names() -> None:
    with pytest.raises(KeyError, match="s9"):
        _at_once(Size("s9"))
    with pytest.raises(KeyError, match="nothing"):
        _at_once(Load("nothing", (), "int"))


def test_index_tensors_may_broadcast_and_loads_of_any_dtype_are_exact() -> None:
    values = {"q": torch.arange(3)[:, None], "k": torch.arange(4)}
    tensors = {"x": torch.tensor([1.5, 2.0, -3.0, 0.1], dtype=torch.bfloat16)}
    got = evaluate_on(Apply("add", (Load("x", (Index("k"),), "float"), Index("q"))), values, tensors)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, tensors["x"].double() + torch.arange(3)[:, None], rtol=0, atol=0)


@pytest.mark.parametrize("nudge", [1e-6, -1e-6])
def test_a_nudge_moves_what_is_cut_off_at_a_boundary(nudge: float) -> None:
    """log(8) / log(2) is 3 up to rounding."""
    whole = ix.apply("int", ix.apply("div", ix.apply("log", ix.as_float(Index("k"))), Const(math.log(2.0))))
    at = {"k": torch.tensor([8, 9, 15])}
    cut = evaluate_on(whole, at, {}, nudge=nudge).tolist()
    assert cut == [3 if nudge > 0 else 2, 3, 3]


@pytest.mark.parametrize("op", ["and", "or"])
def test_reading_beyond_a_tensor_beside_what_decides_is_none(op: str) -> None:
    """A padding mask that is shorter than the keys."""
    k, tensors = Index("k"), {"m": torch.tensor([True, False])}
    beyond = ix.compare(">=", k, Const(2))
    condition = ix.apply(op, beyond if op == "or" else ix.invert(beyond), Load("m", (k,), "bool"))
    wanted = [True, False, op == "or", op == "or"]
    assert evaluate_on(condition, {"k": torch.arange(4)}, tensors).tolist() == wanted
    assert [ix.evaluate(condition, {"k": i}, lambda _, at: tensors["m"][at].item()) for i in range(4)] == wanted
    unguarded = ix.apply(op, Load("m", (k,), "bool"), ix.compare("==", k, Const(3)))
    with pytest.raises(IndexError):
        evaluate_on(unguarded, {"k": torch.arange(4)}, tensors)


# Expressions as graph nodes against the same expressions evaluated on tensors.
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


def test_an_index_below_zero_counts_from_the_end_on_nodes() -> None:
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


# What follows from other parts of a junction, and what all of its parts have in them.
Q, K = Index("q"), Index("k")
A, B_, C = (Load(name, (Q, K), "bool") for name in "abc")


@pytest.mark.parametrize(("op", "offset"), [("and", 1), ("or", 3)])
def test_the_bound_that_decides_stays(op: str, offset: int) -> None:
    bounds = [ix.compare("<=", K, ix.add(Q, Const(n))) for n in (3, 1, 2)]
    assert junctions.strongest(op, [*bounds, A]) == [A, ix.compare("<=", K, ix.add(Q, Const(offset)))]


@pytest.mark.parametrize("op", ["and", "or"])
def test_a_part_that_another_one_implies_goes(op: str) -> None:
    other = Apply(junctions.OTHER[op], (A, B_))
    assert junctions.without_implied(op, [A, other, C]) == [A, C]
    assert junctions.without_implied(op, [other, C]) == [other, C]


@pytest.mark.parametrize("op", ["and", "or"])
def test_what_each_part_has(op: str) -> None:
    other = junctions.OTHER[op]
    assert junctions.in_each(op, [Apply(other, (A, B_)), Apply(other, (B_, C))]) == [B_]
    assert junctions.in_each(op, [Apply(other, (A, B_)), B_]) == [B_]
    assert junctions.in_each(op, [Apply(other, (A, B_)), C]) == []
    assert junctions.in_each(op, [Apply(other, (A, B_))]) == []
    assert junctions.joined(op, Apply(op, (A, B_))) == (Apply(op, (A, B_)),)


_AHEAD = ix.add(Index("q"), Index("k"), -1)


@pytest.mark.parametrize(
    ("op", "parts", "left"),
    [
        ("or", ((">", 0), ("==", 0)), (">=", 0)),
        ("or", ((">=", 0), ("==", 0)), (">=", 0)),
        ("or", ((">=", 0), ("==", -1)), (">=", -1)),
        ("or", (("<=", 0), ("==", 1)), ("<=", 1)),
        ("and", ((">=", 0), ("!=", 0)), (">", 0)),
        ("and", ((">=", 0), ("!=", -3)), (">=", 0)),
        ("and", (("<", 4), ("!=", 3)), ("<", 3)),
        ("or", ((">=", 0), ("==", -2)), None),
        ("and", ((">=", 0), ("!=", 2)), None),
        ("and", ((">=", 0), ("==", 2)), None),
        ("or", ((">=", 0), ("!=", -2)), None),
    ],
)
def test_a_single_value_beside_a_bound(
    op: str, parts: tuple[tuple[str, int], ...], left: tuple[str, int] | None
) -> None:
    """In either order, and where one comes to a junction that is there."""
    own = [ix.compare(relation, _AHEAD, Const(number)) for relation, number in parts]
    wanted = None if left is None else ix.compare(left[0], _AHEAD, Const(left[1]))
    other = ix.compare("<", Index("h"), Const(2))
    for one, two in (own, own[::-1]):
        joined = ix.apply(op, one, two)
        assert joined == wanted if wanted is not None else isinstance(joined, Apply)
        assert ix.apply(op, ix.apply(op, other, one), two) == ix.apply(op, other, joined)
