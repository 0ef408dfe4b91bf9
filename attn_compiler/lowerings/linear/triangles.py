"""Leaf ops of the reference: products and solutions of triangles that keep numbers that are not finite on their side.

A product of matrices multiplies the zeros of a triangle, too, and 0 times NaN is NaN. So such numbers are replaced by 0, and the results
that depend on them in the recurrence by NaN. On a CPU only where a result shows that there are any. On a GPU always: asking would wait.

`linear_solve` is an op also because PyTorch's own fake gives wrong strides to the gradient of solve_triangular.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.torch_private.op_library import NAMESPACE, register_helper

_OP = "(Tensor x, Tensor y) -> Tensor"
_BACKWARD = "(Tensor grad, Tensor x, Tensor y) -> (Tensor grad_x, Tensor grad_y)"


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x (..., R, K), R / C rows for each token, by rows of y (..., C, K): (..., R, C). The gradient of a row and a later token is
    0."""
    return x @ y.mT


def dots_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both operands of `dots`."""
    return of_earlier(grad, y), _transposed_product(grad, x)


def of_earlier(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y. x (..., R, C), R / C rows for each token, is 0 at tokens after the row's own. y: (..., C, D)."""
    found = x @ y
    return found if _is_finite(found) else contained_of_earlier(x, y)


def contained_of_earlier(x: Tensor, y: Tensor) -> Tensor:
    """Return the same in plain ops, without reading a result."""
    is_bad = ~y.isfinite()
    token = _places(x) // (x.shape[-2] // y.shape[-2])
    return (x @ y.masked_fill(is_bad, 0)).masked_fill(token >= _first(is_bad), torch.nan)


def of_earlier_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both operands of `of_earlier`, for x also where it is 0."""
    return grad @ y.mT, _transposed_product(x, grad)


def _transposed_product(x: Tensor, y: Tensor) -> Tensor:
    """Return xᵀ @ y, for x as in `of_earlier` and y (..., R, D)."""
    found = x.mT @ y
    if _is_finite(found):
        return found
    is_bad = ~y.isfinite()
    last = _last(is_bad.reshape(*x.shape[:-2], x.shape[-1], -1, y.shape[-1]).any(-2))
    return (x.mT @ y.masked_fill(is_bad, 0)).masked_fill(_places(x.mT) <= last, torch.nan)


def solve(lower: Tensor, right: Tensor) -> Tensor:
    """Return (1 + the part of `lower` (..., C, C) below the diagonal)⁻¹ right."""
    found = _solution(lower, right, upper=False)
    if _is_finite(found):
        return found
    bad, of_right = ~lower.tril(-1).isfinite(), ~right.isfinite()
    found = _solution(lower.masked_fill(bad, 0), right.masked_fill(of_right, 0), upper=False)
    return found.masked_fill(_places(lower) >= _first(bad.any(-1, keepdim=True) | of_right), torch.nan)


def solve_backward(grad: Tensor, lower: Tensor, solved: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both operands of `solve`."""
    of_right = _solution(lower.mT, grad, upper=True)
    if not _is_finite(of_right):
        bad, of_grad = ~lower.mT.triu(1).isfinite(), ~grad.isfinite()
        of_right = _solution(lower.mT.masked_fill(bad, 0), grad.masked_fill(of_grad, 0), upper=True)
        of_right = of_right.masked_fill(_places(lower) <= _last(bad.any(-1, keepdim=True) | of_grad), torch.nan)
    return -(of_right @ solved.mT).tril(-1), of_right


def _solution(triangle: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    found: Tensor = torch.linalg.solve_triangular(triangle, right, upper=upper, unitriangular=True)
    return found.contiguous()


def _is_finite(found: Tensor) -> bool:
    """Return whether all numbers are known to be finite."""
    return found.device.type == "cpu" and math.isfinite(found.sum().item())


def _places(x: Tensor) -> Tensor:
    """Return 0, 1, 2 ... for the rows of x (..., C, D): (C, 1)."""
    return torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)


def _first(is_bad: Tensor) -> Tensor:
    """Return the first bad row, or the number of rows: (..., 1, D) of (..., C, D)."""
    return _places(is_bad).masked_fill(~is_bad, is_bad.shape[-2]).amin(-2, keepdim=True)


def _last(is_bad: Tensor) -> Tensor:
    """Return the last bad row, or -1."""
    return _places(is_bad).masked_fill(~is_bad, -1).amax(-2, keepdim=True)


def _fake_dots(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], y.shape[-2])


def _fake_of_earlier(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], y.shape[-1])


def _fake_solve(lower: Tensor, right: Tensor) -> Tensor:
    return right.new_empty(right.shape)


def _fake_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape)


def _keep_both(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_solved(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _grad_dots(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _OPS.linear_dots_backward(grad, *ctx.saved_tensors)
    return found


def _grad_product(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    # The incoming gradient's rows of a head are not adjacent.
    found: tuple[Tensor, Tensor] = _OPS.linear_of_earlier_backward(grad.contiguous(), *ctx.saved_tensors)
    return found


def _grad_solve(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _OPS.linear_solve_backward(grad, *ctx.saved_tensors)
    return found


_OPS: Any = getattr(torch.ops, NAMESPACE)

register_helper("linear_dots_backward", _BACKWARD, function=dots_backward, fake=_fake_backward)
register_helper("linear_dots", _OP, function=dots, fake=_fake_dots, differentiated=(_keep_both, _grad_dots))
register_helper("linear_of_earlier_backward", _BACKWARD, function=of_earlier_backward, fake=_fake_backward)
register_helper(
    "linear_of_earlier", _OP, function=of_earlier, fake=_fake_of_earlier, differentiated=(_keep_both, _grad_product)
)
register_helper("linear_solve_backward", _BACKWARD, function=solve_backward, fake=_fake_backward)
register_helper("linear_solve", _OP, function=solve, fake=_fake_solve, differentiated=(_keep_solved, _grad_solve))
