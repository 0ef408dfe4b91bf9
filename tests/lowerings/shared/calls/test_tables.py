"""Elements of a learned table: their gradients are summed up in float32, the same in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.lowerings.shared.ops.leaf_ops import without_autograd

GATHERED: Any = torch.ops.attn_compiler.gathered
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _numbers(*shape: int, below: int, least: int = 0) -> Tensor:
    return torch.randint(least, below, shape, generator=torch.Generator().manual_seed(len(shape)))


#: the table's shape, and its indices
CASES: dict[str, tuple[tuple[int, ...], list[Tensor]]] = {
    "rows": ((7, 3), [_numbers(50, below=7)]),
    "rows of pairs": ((7, 3), [_numbers(9, 11, below=7)]),
    "elements": ((7, 3), [_numbers(1, 50, below=7), torch.arange(3)[:, None]]),
    "no further axis": ((9,), [_numbers(5, 4, below=9)]),
    "two further axes": ((5, 2, 3), [_numbers(60, below=5)]),
    "from the end": ((7, 3), [_numbers(50, below=7, least=-7), torch.tensor([-1])]),
    "int32": ((7, 3), [_numbers(50, below=7).int()]),
    "none": ((7, 3), [torch.zeros(0, dtype=torch.int64)]),
    "many": ((6, 4), [_numbers(5000, below=6)]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    shape, indices = CASES[name]
    at = [index.to(DEVICE) for index in indices]
    table = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype).requires_grad_()
    found = GATHERED(table, at)
    assert torch.equal(found, table[tuple(at)])
    grad = torch.randn(found.shape, device=DEVICE).to(dtype)
    exact = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    exact.index_put_(tuple(at), grad.double(), accumulate=True)
    first, second = (torch.autograd.grad(GATHERED(table, at), table, grad)[0] for _ in range(2))
    assert torch.equal(first, second)
    # The last rounding alone is that of the table.
    eps, sums = torch.finfo(dtype).eps, torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert (first.double() - exact).abs().max() <= eps * exact.abs().max() / 2 + 100 * sums * exact.abs().max() + 1e-30


def test_compiled_code_gathers_by_pytorchs_own_op() -> None:
    """Which Inductor fuses. The sums alone are an op of ours."""
    graph = fx.Graph()
    table, at = graph.placeholder("table"), graph.placeholder("at")
    node = graph.call_function(GATHERED.default, (table, [at]))
    graph.output(node)
    without_autograd(graph)
    given = torch.randn(5, 2), torch.tensor([3, 0, 3])
    assert node.target is torch.ops.aten.index.Tensor
    assert torch.equal(fx.GraphModule({}, graph)(*given), given[0][given[1]])
