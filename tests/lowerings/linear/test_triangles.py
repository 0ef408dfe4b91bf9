"""Products and solutions of triangles are what they are token by token, and what is not finite stays on its side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.linear import triangles

_OPS: Any = torch.ops.attn_compiler
_C, _ROWS = 7, 2
_OF_BACKWARD = {"dots": triangles.dots_backward, "of_earlier": triangles.of_earlier_backward}


def _earlier(x: Tensor, y: Tensor) -> Tensor:
    """Of each row, its own token and those before it."""
    many = x.shape[1] // _C
    each = ((x[:, r, : r // many + 1, None] * y[:, : r // many + 1]).sum(1) for r in range(x.shape[1]))
    return torch.stack(list(each), 1)


def _later(x: Tensor, y: Tensor) -> Tensor:
    """Of each token, the rows of its own and of later ones."""
    many = x.shape[1] // _C
    each = ((x[:, j * many :, j, None] * y[:, j * many :]).sum(1) for j in range(_C))
    return torch.stack(list(each), 1)


def _solved(lower: Tensor, right: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for i in range(_C):
        before = [lower[:, i, j, None] * row for j, row in enumerate(rows)]
        rows.append(right[:, i] - sum(before, torch.zeros_like(right[:, i])))
    return torch.stack(rows, 1)


def _solved_backwards(lower: Tensor, grad: Tensor) -> Tensor:
    return _solved(lower.mT.flip(-1, -2), grad.flip(-2)).flip(-2)


_Product = Callable[[Tensor, Tensor], Tensor]
#: what is found, how it is token by token, and rows for each token of both operands
_PRODUCTS: dict[str, tuple[_Product, _Product, int, int]] = {
    "of_earlier": (triangles.of_earlier, _earlier, _ROWS, 1),
    "contained": (triangles.contained_of_earlier, _earlier, _ROWS, 1),
    "gradient of rows": (
        lambda x, y: triangles.dots_backward(x, torch.zeros(3, _ROWS * _C, 5), y)[0],
        _earlier,
        _ROWS,
        1,
    ),
    "gradient of keys": (lambda x, y: triangles.dots_backward(x, y, torch.zeros(3, _C, 5))[1], _later, _ROWS, _ROWS),
    "gradient of values": (lambda x, y: triangles.of_earlier_backward(y, x, torch.zeros(3, _C, 5))[1], _later, 1, 1),
    "solved": (triangles.solve, _solved, 1, 1),
    "gradient of solved": (
        lambda x, y: triangles.solve_backward(y, x, torch.zeros(3, _C, 5))[1],
        _solved_backwards,
        1,
        1,
    ),
}


def _given(name: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    _, _, many, of_other = _PRODUCTS[name]
    triangle = torch.randn(3, _C, many, _C) * torch.ones(_C, _C).tril()[:, None]
    return triangle.flatten(1, 2), torch.randn(3, of_other * _C, 5)


def _spoiled(name: str, bad: float) -> Iterator[tuple[Tensor, Tensor]]:
    """With one number of the other operand that is not finite; and with all of a token's in the triangle, as of a key."""
    for token in range(_C):
        triangle, other = _given(name)
        other[1, token * other.shape[1] // _C, 2] = bad
        yield triangle, other
        triangle, other = _given(name)
        rows = triangle.unflatten(1, (_C, -1))
        rows[1, token, :, : token + 1] = bad
        rows[1, token:, :, token] = bad
        yield triangle, other


@pytest.mark.parametrize("name", list(_PRODUCTS))
def test_they_are_what_they_are_token_by_token(name: str) -> None:
    found, wanted, *_ = _PRODUCTS[name]
    torch.testing.assert_close(found(*_given(name)), wanted(*_given(name)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("name", list(_PRODUCTS))
def test_a_number_that_is_not_finite_stays_on_its_side(
    name: str, is_asked: bool, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are finite where they are so token by token, also where nothing is asked of them, as on a GPU."""
    found, wanted, *_ = _PRODUCTS[name]
    if not is_asked:
        monkeypatch.setattr(triangles, "_is_finite", lambda _: False)
    for given in _spoiled(name, bad):
        outs, expected = found(*given), wanted(*given)
        kept = expected.isfinite()
        assert outs.isfinite().equal(kept)
        torch.testing.assert_close(outs[kept], expected[kept], rtol=1e-4, atol=1e-4)


def test_a_sum_that_overflows_is_no_bad_number() -> None:
    """The sum of a result is what is asked."""
    y = torch.full((3, _C, 5), 3e38)
    torch.testing.assert_close(triangles.of_earlier(torch.eye(_C).expand(3, _C, _C), y), y)


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def test_formulas_are_gradients() -> None:
    triangle = torch.ones(5, 5, dtype=torch.float64).tril()
    assert torch.autograd.gradcheck(
        lambda x, y: _OPS.linear_dots(x, y) * triangle, (_double(2, 5, 3), _double(2, 5, 3))
    )
    assert torch.autograd.gradcheck(
        lambda x, y: _OPS.linear_of_earlier(x.tril(), y), (_double(2, 5, 5), _double(2, 5, 3))
    )
    assert torch.autograd.gradcheck(_OPS.linear_solve, (_double(2, 5, 5), _double(2, 5, 3)))


def test_fakes_are_as_what_is_given() -> None:
    rows = torch.randn(2, 10, 3)
    torch.library.opcheck(_OPS.linear_dots.default, (rows, torch.randn(2, 5, 3)))
    torch.library.opcheck(_OPS.linear_of_earlier.default, (torch.randn(2, 10, 5), torch.randn(2, 5, 3)))
    torch.library.opcheck(_OPS.linear_solve.default, (torch.randn(2, 5, 5), torch.randn(2, 5, 3)))
