from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.passes.matching import contraction
from attn_compiler.passes.matching.contraction import Contraction

Function = Callable[..., torch.Tensor]
LETTERS = string.ascii_lowercase


PRODUCTS = {
    getattr(torch.ops.aten, name).default for name in ("matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "tensordot")
}


def _parsed(function: Function, *tensors: torch.Tensor) -> Contraction | None:
    """The product in a trace of `function`, whatever else is in it."""
    graph = make_fx(function, pre_dispatch=True, tracing_mode="fake")(*tensors).graph
    (node,) = (n for n in graph.nodes if n.target in PRODUCTS)
    return contraction.parse(node)


def _recomputed(parsed: Contraction, lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """The product by its labels alone, element for element: every label an axis, then a sum over the contracted ones."""
    order = [*parsed.out_labels, *parsed.contracted]
    spread = [_spread(t, labels, order) for t, labels in ((lhs, parsed.lhs_labels), (rhs, parsed.rhs_labels))]
    product = parsed.alpha * spread[0] * spread[1]
    return product.flatten(len(parsed.out_labels)).sum(-1) if parsed.contracted else product


def _spread(tensor: torch.Tensor, labels: tuple[int, ...], order: list[int]) -> torch.Tensor:
    """`tensor` with its axes where `order` has their labels, and size one for the others."""
    known = [label for label in order if label in labels]
    moved = tensor.permute([labels.index(label) for label in known])
    for position, label in enumerate(order):
        if label not in labels:
            moved = moved.unsqueeze(position)
    return moved


def _assert_same(function: Function, lhs: torch.Tensor, rhs: torch.Tensor) -> Contraction:
    parsed = _parsed(function, lhs, rhs)
    assert parsed is not None
    torch.testing.assert_close(_recomputed(parsed, lhs, rhs), function(lhs, rhs))
    return parsed


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


# ---- matmul and its kin -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 5), (5, 4)),
        ((2, 3, 5), (2, 5, 4)),
        ((2, 6, 3, 5), (2, 6, 5, 4)),
        ((2, 6, 3, 5), (2, 1, 5, 4)),
        ((2, 6, 3, 5), (6, 5, 4)),
        ((3, 5), (2, 6, 5, 4)),
        ((1, 6, 3, 5), (2, 1, 5, 4)),
    ],
)
def test_matmul_labels_its_axes_and_broadcasts(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    parsed = _assert_same(torch.matmul, _random(*left), _random(*right))
    assert len(parsed.contracted) == 1
    assert parsed.lhs_free[-1] == parsed.out_labels[-2]
    assert parsed.rhs_free[-1] == parsed.out_labels[-1]


def test_bmm() -> None:
    parsed = _assert_same(torch.bmm, _random(2, 3, 5), _random(2, 5, 4))
    assert len(parsed.batch) == 1


def test_mm_has_no_batch() -> None:
    assert _assert_same(torch.mm, _random(3, 5), _random(5, 4)).batch == ()


def test_vectors_are_no_contraction_of_ours() -> None:
    assert _parsed(torch.matmul, _random(3, 5), _random(5)) is None


@pytest.mark.parametrize(("op", "batch"), [(torch.addmm, ()), (torch.baddbmm, (2,))])
def test_a_product_with_an_addend_keeps_its_factors_and_its_addend(op: Any, batch: tuple[int, ...]) -> None:
    def function(lhs: torch.Tensor, rhs: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = op(addend, lhs, rhs, beta=0.5, alpha=2)
        return found

    tensors = _random(*batch, 3, 5), _random(*batch, 5, 4), _random(*(1 for _ in batch), 3, 4)
    parsed = _parsed(function, *tensors)
    assert parsed is not None
    assert parsed.addend is not None
    assert (parsed.alpha, parsed.beta) == (2.0, 0.5)
    torch.testing.assert_close(parsed.beta * tensors[2] + _recomputed(parsed, *tensors[:2]), function(*tensors))


def test_baddbmm_with_beta_zero_reads_no_addend() -> None:
    """It may hold anything, NaN included: torch.empty is the usual thing there."""

    def function(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(lhs.new_full((2, 3, 4), torch.nan), lhs, rhs, beta=0)

    assert _assert_same(function, _random(2, 3, 5), _random(2, 5, 4)).addend is None


# ---- einsum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("bqhd,bkhd->bhqk", (2, 4, 3, 5), (2, 6, 3, 5)),
        ("bhqk,bkhd->bqhd", (2, 3, 4, 6), (2, 6, 3, 5)),
        ("b h q d, b h k d -> b h k q", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("...qd,...kd->...qk", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("...qd,kd->...qk", (2, 3, 4, 5), (6, 5)),
        ("q...d,k...d->qk...", (4, 2, 3, 5), (6, 2, 3, 5)),
        ("...d,...d->...", (2, 3, 5), (3, 5)),
        ("ab,cd->abcd", (2, 3), (4, 5)),
        ("BnTS,BSnh->BTnh", (2, 3, 4, 6), (2, 6, 3, 5)),
    ],
)
def test_einsum_labels(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    _assert_same(lambda a, b: torch.einsum(equation, a, b), _random(*left), _random(*right))


@st.composite
def _equations(draw: st.DrawFn) -> tuple[str, str, str, str]:
    """(left, right, output, leading axes under an ellipsis): batch, free and contracted letters in any order."""
    names = iter(draw(st.permutations(LETTERS)))
    batch, left, right, summed = ([next(names) for _ in range(draw(st.integers(0, 2)))] for _ in range(4))
    terms = [draw(st.permutations(letters)) for letters in (batch + left + summed, batch + right + summed)]
    output = draw(st.permutations(batch + left + right))
    dots = draw(st.sampled_from(["", "...", "..."]))
    return dots + "".join(terms[0]), dots + "".join(terms[1]), dots + "".join(output), dots


@settings(max_examples=60, deadline=None)
@given(_equations())
def test_random_einsums(equation: tuple[str, str, str, str]) -> None:
    left, right, output, dots = equation
    sizes = {letter: 2 + LETTERS.index(letter) % 3 for letter in LETTERS}
    shapes = [[sizes[c] for c in term.removeprefix("...")] for term in (left, right)]
    leading = [[2, 3], [3]] if dots else [[], []]
    tensors = [_random(*lead, *shape) for lead, shape in zip(leading, shapes, strict=True)]
    _assert_same(lambda a, b: torch.einsum(f"{left},{right}->{output}", a, b), *tensors)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ii,ij->ij", [(3, 3), (3, 4)]),
        ("ij->ji", [(2, 3)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("bij,jk->ik", [(2, 3, 4), (4, 5)]),
    ],
    ids=["diagonal", "one tensor", "three tensors", "summed in one tensor only"],
)
def test_einsum_that_is_no_product_of_two_tensors(equation: str, shapes: list[tuple[int, ...]]) -> None:
    assert _parsed(lambda *tensors: torch.einsum(equation, *tensors), *(_random(*shape) for shape in shapes)) is None


@pytest.mark.parametrize("equation", ["ij,jk", "ji,jk", "ca,ab", "...ij,jk"])
def test_an_einsum_without_an_arrow_sorts_its_letters(equation: str) -> None:
    left, right = _random(3, 3), _random(3, 3)
    left = _random(2, 3, 3) if "..." in equation else left
    _assert_same(lambda a, b: torch.einsum(equation, a, b), left, right)


@pytest.mark.parametrize("dims", [1, ([1], [0]), ([0], [1]), ([-1, 0], [0, 1])], ids=str)
def test_tensordot(dims: object) -> None:
    _assert_same(
        lambda a, b: torch.tensordot(a, b, dims), _random(3, 4), _random(4, 3) if dims != ([0], [1]) else _random(5, 3)
    )


def test_other_nodes_are_no_contraction() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("a"), graph.placeholder("b")))
    assert contraction.parse(node) is None
