"""Which axes are batch, which are heads, and which heads share one key/value head."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, Dim
from attn_compiler.passes.graph.site import Match, Operand, SiteScores
from attn_compiler.passes.matching.patterns import assembly
from tests.passes.compiling import captured

S0 = sympy.Symbol("s0", positive=True, integer=True)


def _operand(dims: tuple[Dim, ...], varies: list[Atom], repeated: tuple[Atom, ...] = ()) -> Operand:
    """An operand of which each site atom in `varies` has an axis of its own; one in `repeated` is a broadcast of the model's."""
    _, mirror = captured(lambda x: x + 1, torch.ones(1))
    node = next(iter(mirror.graph.nodes))
    own = {a: Atom(a.size) for a in varies}
    reads = {**own, **{a: Atom(a.size, broadcast=True) for a in repeated}}
    return Operand(node=node, used=node, dims=dims, root=node, root_dims=tuple((o,) for o in own.values()), reads=reads)


def _assemble(
    batch: list[Atom], shared: list[Atom], repeated: tuple[Atom, ...] = (), repeated_in_k: tuple[Atom, ...] = ()
) -> Match:
    """A match with these batch axes, of which K and V do not vary along `shared`."""
    query, key, d_qk, d_v = (Atom(sympy.Integer(n)) for n in (5, 7, 8, 8))
    own = [a for a in batch if a not in shared]
    dims: tuple[Dim, ...] = tuple((a,) for a in batch)
    node = _operand((), []).node
    return assembly.assemble(
        batch_dims=dims,
        q=_operand((*dims, (query,), (d_qk,)), [*batch, query, d_qk]),
        k=_operand((*dims, (key,), (d_qk,)), [*own, key, d_qk], (*repeated, *repeated_in_k)),
        v=_operand((*dims, (key,), (d_v,)), [*own, key, d_v], repeated),
        **_of_node(node, query, key, d_qk, d_v),
    )


def _of_node(node: fx.Node, query: Atom, key: Atom, d_qk: Atom, d_v: Atom) -> dict[str, Any]:
    """What else is told of a match that is all one node."""
    axes_of = {"query": (query,), "key": (key,), "head_dim_qk": (d_qk,), "head_dim_v": (d_v,)}
    return {
        "pattern": "test",
        "anchor": node,
        "first": node,
        "out": node,
        "out_dims": (),
        "scores": SiteScores(),
        **axes_of,
    }


def _sizes(dim: Dim) -> list[axes.Size]:
    return [atom.size for atom in dim]


@pytest.mark.parametrize(
    ("sizes", "shared", "batch", "heads", "heads_kv"),
    [
        ((2, 4), (), [2], [4], [4]),
        ((8,), (), [], [8], [8]),
        ((), (), [], [], []),
        ((2, 2, 3), (2,), [2], [2, 3], [2]),
        ((2, 4), (1,), [2], [4], []),
        ((2, 2, 4), (1, 2), [2], [2, 4], []),
        ((3, 2, 4), (), [3, 2], [4], [4]),
        ((S0, 4), (), [S0], [4], [4]),
        ((S0,), (), [S0], [], []),
        ((S0, 4), (1,), [S0], [4], []),
        ((2, S0, 4), (2,), [2, S0], [4], []),
    ],
)
def test_roles_of_the_batch_axes(
    sizes: tuple[int, ...], shared: tuple[int, ...], batch: list[int], heads: list[int], heads_kv: list[int]
) -> None:
    atoms = [Atom(sympy.sympify(size)) for size in sizes]
    match = _assemble(atoms, [atoms[i] for i in shared])
    assert _sizes(match.axes.batch) == batch
    assert _sizes(match.axes.heads) == heads
    assert _sizes(match.axes.heads_kv) == heads_kv


def test_repetition_that_is_left_out_is_noted() -> None:
    batch, heads, group = (Atom(sympy.Integer(n)) for n in (2, 3, 4))
    match = _assemble([batch, heads, group], [group], repeated=(group,))
    assert match.notes == ("K/V read without their 4-fold repetition",)


def test_nothing_is_noted_where_nothing_was_repeated() -> None:
    batch, heads, group = (Atom(sympy.Integer(n)) for n in (2, 3, 4))
    assert _assemble([batch, heads, group], [group]).notes == ()


def test_repetition_that_has_to_stay_is_not_claimed_to_be_gone() -> None:
    """Only K is repeated: V varies along every head, so that K is repeated again."""
    batch, heads = (Atom(sympy.Integer(n)) for n in (2, 4))
    assert _assemble([batch, heads], [], repeated_in_k=(heads,)).notes == ()


def test_a_split_that_one_operand_brings_reaches_all() -> None:
    batch, heads = Atom(sympy.Integer(2)), Atom(sympy.Integer(6))
    query, key, d = (Atom(sympy.Integer(n)) for n in (5, 7, 8))
    group_of_k, shared_of_k = Atom(sympy.Integer(2)), Atom(sympy.Integer(3), broadcast=True)
    dims: tuple[Dim, ...] = ((batch,), (heads,))
    node = _operand((), []).node
    k_dims = (*dims, (key,), (d,))
    own = {a: Atom(a.size) for a in (batch, key, d)}
    reads = {**own, **{site: mine for mine, site in axes.align((group_of_k, shared_of_k), (heads,))}}
    root_dims = ((own[batch],), (group_of_k,), (own[key],), (own[d],))
    k = Operand(node=node, used=node, dims=k_dims, root=node, root_dims=root_dims, reads=reads)
    match = assembly.assemble(
        batch_dims=dims,
        q=_operand((*dims, (query,), (d,)), [batch, heads, query, d]),
        k=k,
        v=Operand(node=node, used=node, dims=k_dims, root=node, root_dims=root_dims, reads=dict(reads)),
        **_of_node(node, query, key, d, d),
    )
    assert _sizes(match.axes.heads) == [2, 3]
    assert _sizes(match.axes.heads_kv) == [2]
    assert all(match.q.varies_along(atom) for atom in match.axes.heads)
