"""Random expressions that read real tensors, and those tensors: not through the builders, which would simplify most of them away."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size, Test

SIZES = {"b": 2, "h": 1, "q": 3, "k": 4}
SYMBOLS = {"s0": 5}
TENSORS = {
    "flags": torch.tensor([[True, False, True, True], [False, False, True, False]]),
    "lengths": torch.tensor([2, -1, 0], dtype=torch.int32),
    "slopes": torch.tensor([0.5, -1.25, 3.0, 0.0], dtype=torch.float32),
    "length": torch.tensor(3),
}
RANKS = {"flags": (2, "bool"), "lengths": (1, "int"), "slopes": (1, "float"), "length": (0, "int")}


def _load(kind: str) -> st.SearchStrategy[Expr]:
    """Loads within the tensor; reading beyond one has tests of its own."""
    found = []
    for name, (_, own) in RANKS.items():
        if own == kind:
            fitting = [[Index(i) for i, size in SIZES.items() if size <= length] for length in TENSORS[name].shape]
            found.append(st.builds(Load, st.just(name), st.tuples(*map(st.sampled_from, fitting)), st.just(kind)))
    return st.one_of(*found)


def _apply(op: str, *args: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.builds(Apply, st.just(op), st.tuples(*args))


_small = st.integers(-4, 6)
_indices: st.SearchStrategy[Expr] = st.sampled_from([Index(name) for name in SIZES])
_divisors: st.SearchStrategy[Expr] = st.one_of(
    st.builds(Const, _small.filter(bool)), st.just(Size("s0")), _indices.map(lambda i: ix.add(i, ix.ONE))
)
ints: st.SearchStrategy[Expr] = st.deferred(
    lambda: st.one_of(
        st.builds(Const, _small),
        _indices,
        st.just(Size("s0")),
        st.builds(Linear, st.lists(st.tuples(ints, _small), max_size=3).map(tuple), _small),
        _load("int"),
        *(_apply(op, ints, ints) for op in ("mul", "add", "min", "max")),
        *(_apply(op, ints, _divisors) for op in ("floordiv", "mod")),
        _apply("abs", ints),
        _apply("int", floats),
        _apply("where", bools, ints, ints),
    )
)
floats: st.SearchStrategy[Expr] = st.deferred(
    lambda: st.one_of(
        st.builds(Const, st.sampled_from([0.0, -0.5, 2.25, 1e4])),
        _load("float"),
        _apply("float", ints),
        *(_apply(op, floats, floats) for op in ("add", "min", "max")),
        _apply("mul", floats, st.builds(Const, st.sampled_from([0.5, -1.5]))),
        _apply("div", ints, st.builds(Const, st.sampled_from([3, 0.5]))),
        _apply("abs", floats),
        _apply("where", bools, floats, floats),
    )
)
bools: st.SearchStrategy[Expr] = st.deferred(
    lambda: st.one_of(
        st.builds(Const, st.booleans()),
        st.builds(
            Test,
            st.sampled_from([">=", "==", "!="]),
            st.builds(Linear, st.lists(st.tuples(ints, _small), max_size=2).map(tuple), _small),
        ),
        _load("bool"),
        st.lists(bools, min_size=1, max_size=3).map(lambda xs: Apply("and", tuple(xs))),
        st.lists(bools, min_size=1, max_size=3).map(lambda xs: Apply("or", tuple(xs))),
        _apply("not", bools),
        _apply("xor", bools, bools),
        *(_apply(op, kind, kind) for op in ("eq", "lt") for kind in (ints, floats)),
        _apply("where", bools, bools, bools),
    )
)
