from __future__ import annotations

import math
from itertools import pairwise

import pytest
import sympy
import torch
from hypothesis import given, settings, strategies as st

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import ONE, Atom, AxisError, Dim
from tests.passes.compiling import compiled, mark, mirror_of
from tests.passes.view_chains import factors, shapes

S0, S1 = sympy.symbols("s0 s1", positive=True, integer=True)


def _int(*sizes: int) -> list[axes.Size]:
    return [sympy.Integer(size) for size in sizes]


def _numbers(dim: Dim) -> list[int]:
    return [int(atom.size) for atom in axes.resolve(dim)]


# ---- sizes --------------------------------------------------------------------------------------------------------


def test_sizes_are_compared_as_expressions() -> None:
    assert axes.same_size(S0 * (S1 + 1), S0 * S1 + S0)
    assert not axes.same_size(S0, S1)
    assert not axes.same_size(S0, sympy.Integer(4))


@pytest.mark.parametrize(
    ("whole", "part", "quotient"),
    [
        (sympy.Integer(12), sympy.Integer(4), sympy.Integer(3)),
        (sympy.Integer(12), sympy.Integer(5), None),
        (sympy.Integer(12), sympy.Integer(0), None),
        (sympy.Integer(0), sympy.Integer(3), sympy.Integer(0)),
        (4 * S0, sympy.Integer(4), S0),
        (4 * S0, S0, sympy.Integer(4)),
        (S0 * S1, S0, S1),
        (S0 * S1 + S0, S1 + 1, S0),
        (S0, sympy.Integer(2), None),
        (S0, S1, None),
        (sympy.Integer(4), S0, None),
        (6 * S0, sympy.Integer(4), None),
    ],
)
def test_exact_quotient_is_whole_or_none(whole: axes.Size, part: axes.Size, quotient: axes.Size | None) -> None:
    assert axes.exact_quotient(whole, part) == quotient


def test_symbolic_size_of_a_tensor_is_its_symbol_and_adds_no_guard() -> None:
    mirror = mirror_of(lambda x: x * 2, mark(torch.zeros(5, 3), [5]))
    (x,) = (
        n.meta["val"] for n in mirror.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)
    )
    length, width = axes.shape_exprs(x)
    assert isinstance(length, sympy.Symbol)
    assert width == 3
    guards = len(x.fake_mode.shape_env.guards)
    assert not axes.same_size(length, sympy.Integer(5))
    assert len(x.fake_mode.shape_env.guards) == guards


def test_unify_makes_two_symbols_one_and_leaves_numbers_alone() -> None:
    seen: list[tuple[axes.Size, ...]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        values = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        x, y = (v for v in values if isinstance(v, torch.Tensor))
        before = axes.shape_exprs(x)[0], axes.shape_exprs(y)[0]
        axes.unify(x.shape[0], 5)
        still = axes.shape_exprs(x)[0]
        axes.unify(x.shape[0], y.shape[0])
        seen.append((*before, still, axes.shape_exprs(x)[0], axes.shape_exprs(y)[0]))
        return gm

    torch.compile(lambda x, y: (x + 1, y + 1), backend=backend)(mark(torch.zeros(5), [5]), mark(torch.zeros(5), [5]))
    ((first, second, still, x, y),) = seen
    assert first != second
    assert still == first
    assert x == y


# ---- atoms --------------------------------------------------------------------------------------------------------


def test_split_replaces_an_atom_for_everyone_outer_part_first() -> None:
    atom = Atom(sympy.Integer(12), broadcast=True)
    holders: list[Dim] = [(atom,), (Atom(ONE), atom)]
    atom.split(sympy.Integer(3))
    assert [_numbers(dim) for dim in holders] == [[3, 4], [1, 3, 4]]
    assert all(part.broadcast for part in axes.resolve((atom,)))


def test_split_at_what_does_not_divide_is_refused() -> None:
    with pytest.raises(AxisError, match="an axis of size 12 is split at 5"):
        Atom(sympy.Integer(12)).split(sympy.Integer(5))


def test_dim_of_no_atoms_has_size_one() -> None:
    assert axes.is_unit(())
    assert axes.is_unit((Atom(ONE), Atom(ONE)))
    assert not axes.is_unit((Atom(S0),))


# ---- reshape ------------------------------------------------------------------------------------------------------


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before = draw(shapes)
    return before, draw(factors(math.prod(before)))


@settings(max_examples=300, deadline=None)
@given(_reshapes())
def test_regroup_keeps_the_order_of_the_axes(reshape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """A reshape moves no element in row-major order, so the axes have to come out in the order they went in."""
    before, after = reshape
    dims = axes.fresh(_int(*before))
    try:
        regrouped = axes.regroup(dims, _int(*after))
    except AxisError:
        # Only a boundary that cuts an axis at no divisor of it may be refused.
        assert _cuts_across(before, after)
        return
    assert [int(axes.dim_size(dim)) for dim in regrouped] == list(after)
    ordered = [a for a in axes.flat(regrouped) if a.size != ONE]
    assert ordered == [a for a in axes.flat(dims) if a.size != ONE]


def _cuts_across(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether two boundaries of the shapes, as products of what lies before them, do not divide one another."""
    ends = sorted({math.prod(shape[:i]) for shape in (before, after) for i in range(len(shape) + 1)})
    return any(later % earlier for earlier, later in pairwise(ends))


def test_regroup_splits_where_a_boundary_falls() -> None:
    (heads,) = axes.fresh(_int(12))
    assert [_numbers(dim) for dim in axes.regroup((heads,), _int(3, 4))] == [[3], [4]]
    assert _numbers(heads) == [3, 4]


def test_regroup_merges_without_forgetting_the_parts() -> None:
    batch, heads, length = axes.fresh(_int(2, 3, 5))
    merged = axes.regroup((batch, heads, length), _int(6, 5))
    assert merged == ((*batch, *heads), length)


def test_regroup_takes_and_gives_unit_dimensions() -> None:
    a, b = axes.fresh(_int(2, 3))
    sizes = [axes.dim_size(d) for d in axes.regroup((a, (), b), _int(1, 2, 1, 3, 1))]
    assert sizes == _int(1, 2, 1, 3, 1)


def test_regroup_in_symbolic_sizes() -> None:
    batch, length, width = axes.fresh([S0, S1, sympy.Integer(12)])
    heads = axes.regroup((batch, length, width), [S0, S1, sympy.Integer(3), sympy.Integer(4)])
    assert heads[:2] == (batch, length)
    flat = axes.regroup(heads, [S0 * S1, sympy.Integer(12)])
    assert [axes.dim_size(dim) for dim in flat] == [S0 * S1, 12]
    assert axes.regroup(flat, [S0, S1, sympy.Integer(12)])[0] == batch


def test_regroup_of_a_symbolic_axis_by_a_number_is_refused() -> None:
    with pytest.raises(AxisError):
        axes.regroup(axes.fresh([S0, sympy.Integer(3)]), [sympy.Integer(3), S0])


def test_regroup_with_something_left_over_is_refused() -> None:
    with pytest.raises(AxisError, match="leaves"):
        axes.regroup(axes.fresh(_int(2, 3)), _int(2))
    with pytest.raises(AxisError, match="no axes left"):
        axes.regroup(axes.fresh(_int(2)), _int(2, 3))


# ---- expand and align ---------------------------------------------------------------------------------------------


def test_expand_marks_what_repeats() -> None:
    a, b = axes.fresh(_int(1, 3))
    leading, grown, same = axes.expand((a, b), _int(2, 4, 3))
    assert [(int(x.size), x.broadcast) for x in (*leading, *grown)] == [(2, True), (4, True)]
    assert same == b


def test_align_pairs_atoms_and_splits_either_side() -> None:
    mine: Dim = (Atom(sympy.Integer(2)), Atom(sympy.Integer(6)))
    theirs: Dim = (Atom(sympy.Integer(4)), Atom(ONE), Atom(sympy.Integer(3)))
    pairs = axes.align(mine, theirs)
    assert [(int(a.size), int(b.size)) for a, b in pairs] == [(2, 2), (2, 2), (3, 3)]
    assert _numbers(mine) == [2, 2, 3]
    assert _numbers(theirs) == [2, 2, 1, 3]


def test_align_of_symbolic_axes() -> None:
    mine: Dim = (Atom(4 * S0),)
    theirs: Dim = (Atom(sympy.Integer(4)), Atom(S0))
    assert [(a.size, b.size) for a, b in axes.align(mine, theirs)] == [(4, 4), (S0, S0)]


@pytest.mark.parametrize(
    ("one", "other", "settled"),
    [
        (64 - sympy.Max(0, 64 - S0), S0, S0),
        (S0, sympy.Integer(9), sympy.Integer(9)),
        (S0 // 3 * 3, sympy.Integer(9), sympy.Integer(9)),
        (S0, S1, S0),
    ],
)
def test_the_last_of_two_equal_axes_are_one_size_however_it_is_spelled(
    one: axes.Size, other: axes.Size, settled: axes.Size
) -> None:
    two = sympy.Integer(2)
    mine, theirs = (Atom(two), Atom(one)), (Atom(two), Atom(other))
    assert [(a.size, b.size) for a, b in axes.align(mine, theirs)] == [(two, two), (settled, settled)]


def test_two_spellings_are_told_apart_while_more_axes_follow() -> None:
    with pytest.raises(AxisError):
        axes.align((Atom(S0), Atom(S1)), (Atom(S1), Atom(S0)))


def test_a_mask_whose_length_stands_in_a_guard_only_is_followed() -> None:
    slopes = torch.randn(4, 1, 64)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) + slopes[:, :, 64 - k.shape[-2] :]
        return scores.softmax(-1) @ v

    run = compiled(attention, dynamic=True)
    for length in (16, 23):
        qkv = [torch.randn(2, 4, length, 8) for _ in range(3)]
        torch.testing.assert_close(run(*qkv), attention(*qkv))
    assert run.report.num_sites == 1


@pytest.mark.parametrize(("mine", "theirs"), [((6,), (4,)), ((2, 3), (2,)), ((2,), (2, 3))])
def test_align_of_different_sizes_is_refused(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    with pytest.raises(AxisError):
        axes.align(*(tuple(Atom(size) for size in _int(*sizes)) for sizes in (mine, theirs)))


def test_an_empty_axis_is_refused_not_followed() -> None:
    run = compiled(torch.nn.functional.scaled_dot_product_attention)
    q, empty = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 0, 8)
    assert run(q, empty, empty).shape == (2, 4, 5, 8)
    assert run.site.decision.lowering == "untouched"
