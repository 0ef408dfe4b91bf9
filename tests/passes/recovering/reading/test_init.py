"""Elements read off a graph as expressions, by all rules together: evaluated at every index against the tensor itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.recovering.reading.evaluating import evaluated, joined

B, S, KEYS = 2, 5, 7
LOWEST = torch.finfo(torch.float32).min
RUNS = torch.tensor([[3, 1, 0, 2], [0, 5, 1, 1]])

q_rows, k_columns = (lambda n=S: torch.arange(n)[:, None]), (lambda n=KEYS: torch.arange(n)[None, :])

#: masks and biases that need nothing but positions
POSITIONS: dict[str, Callable[[], Tensor]] = {
    "tril": lambda: torch.ones(S, KEYS, dtype=torch.bool).tril(),
    "tril of a diagonal": lambda: torch.ones(S, KEYS, dtype=torch.bool).tril(diagonal=2),
    "triu inverted": lambda: ~torch.ones(S, KEYS, dtype=torch.bool).triu(1),
    "triu of numbers": lambda: torch.full((S, S), LOWEST).triu(diagonal=1),
    "tril of numbers": lambda: torch.tril(torch.ones(S, KEYS)) * 3,
    "compared positions": lambda: k_columns() <= q_rows() + 2,
    "strictly compared": lambda: k_columns() < q_rows(),
    "a window": lambda: (k_columns() > q_rows() - 3) & (k_columns() <= q_rows()),
    "a band": lambda: (q_rows() - k_columns()).abs() <= 2,
    "chunks": lambda: q_rows() // 2 == torch.div(k_columns(), 2, rounding_mode="floor"),
    "every other key": lambda: (k_columns() + q_rows()) % 2 == 0,
    "an or": lambda: (k_columns() <= q_rows()) | (k_columns() < 3),
    "exclusive or": lambda: torch.logical_xor(k_columns() <= q_rows(), k_columns() < 3),
    "nested not": lambda: ~(~(k_columns() <= q_rows()) & (k_columns() != 4)),
    "where of numbers": lambda: torch.where(k_columns() <= q_rows(), 0.0, LOWEST),
    "masked_fill": lambda: torch.zeros(S, KEYS).masked_fill(k_columns() > q_rows(), -torch.inf),
    "inverted floats": lambda: (1.0 - (k_columns() <= q_rows()).float()) * LOWEST,
    "unsqueezed and expanded": lambda: (k_columns() <= q_rows())[None, None].expand(B, 3, S, KEYS),
    "sliced": lambda: (torch.arange(12)[None, :] <= torch.arange(12)[:, None])[3 : 3 + S, :KEYS],
    "repeated": lambda: (torch.arange(S)[:, None] * torch.ones(1, 1, dtype=torch.int64)).repeat(1, KEYS) >= k_columns(),
    "repeated along a new axis": lambda: torch.arange(KEYS).repeat(S, 1) <= q_rows(),
    "repeated in whole": lambda: torch.arange(3).repeat(3)[:KEYS].expand(S, -1) <= q_rows(),
    "tiled": lambda: torch.tile(torch.arange(S)[:, None], (KEYS,)) > k_columns(),
    "repeated number": lambda: torch.full((), 2).repeat(KEYS).expand(S, -1) > k_columns(),
    "tiled in part": lambda: torch.arange(4).tile(2, 3, 2)[1, 0, :KEYS] <= q_rows(),
    "interleaved": lambda: torch.arange(4).repeat_interleave(2, 0)[:KEYS].expand(S, -1),
    "interleaved from one": lambda: torch.arange(S)[:, None].repeat_interleave(KEYS, dim=-1) >= k_columns(),
    "selected": lambda: torch.ones(3, S, KEYS, dtype=torch.bool).tril(1)[1],
    "transposed": lambda: (torch.arange(S)[None, :] >= torch.arange(KEYS)[:, None]).transpose(0, 1),
    "permuted": lambda: (k_columns() <= q_rows()).view(S, KEYS, 1).permute(2, 0, 1),
    "minimum": lambda: torch.minimum(q_rows(), k_columns()) < 3,
    "maximum": lambda: torch.maximum(q_rows(), torch.tensor(2)) >= k_columns(),
    "negative positions": lambda: -q_rows() + 4 >= k_columns() - 1,
    "multiplied positions": lambda: 2 * k_columns() - 3 <= q_rows() * 3,
    "distances": lambda: (k_columns() - q_rows()).float() * 0.5,
    "gathered rows": lambda: (torch.arange(9)[:, None] >= torch.arange(KEYS))[torch.arange(S) + 2],
    "false everywhere": lambda: torch.zeros(S, KEYS, dtype=torch.bool) & (k_columns() < 3),
    "integers of a condition": lambda: (k_columns() <= q_rows()).int() + 1 == 2,
    "rsub": lambda: 1 - torch.ones(S, KEYS).tril(),
    "not equal": lambda: k_columns() - 1 != q_rows(),
    "a difference of positions": lambda: torch.diff(torch.arange(KEYS) * 3)[None, :] + q_rows(),
    "cumulative": lambda: torch.ones(KEYS, dtype=torch.int64).cumsum(0)[None, :] <= q_rows(),
    "arange of a step": lambda: torch.arange(0, 2 * KEYS, 2)[None, :] <= torch.arange(3, S + 3)[:, None],
    "cast around": lambda: (k_columns() <= q_rows()).float().to(torch.int64).bool(),
    "a constant": lambda: torch.full((S, KEYS), 3.5),
    "like another": lambda: torch.zeros_like(torch.ones(S, KEYS)).masked_fill(k_columns() >= 3, LOWEST),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_only_positions_say_is_read_in_full(name: str) -> None:
    reading = evaluated(lambda x: POSITIONS[name]() if x is None else joined(POSITIONS[name](), x), torch.zeros(()))
    assert reading.equal, reading.text
    assert reading.loads <= {"x"}, reading.text


#: masks that load from a tensor given at run time: (function, inputs)
LOADS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "padding": (lambda m: m[:, None, None, :] != 0, (torch.tensor([[1, 1, 0], [1, 0, 0]]),)),
    "padding as numbers": (
        lambda m: (1.0 - m[:, None, None, :].float()) * LOWEST,
        (torch.tensor([[1, 1, 0], [1, 0, 0]]),),
    ),
    "padding and causal": (
        lambda m: m[:, None, None, :].bool() & torch.ones(3, 3, dtype=torch.bool).tril(),
        (torch.tensor([[1, 1, 0], [1, 0, 0]]),),
    ),
    "lengths": (lambda n: torch.arange(KEYS)[None, :] < n[:, None], (torch.tensor([3, 5]),)),
    "a cache position": (lambda p: torch.arange(KEYS)[None, :] <= p[:, None], (torch.tensor([2, 3, 4]),)),
    "documents": (lambda d: d[:, None, :, None] == d[:, None, None, :], (torch.tensor([[0, 0, 1], [0, 1, 1]]),)),
    "negative ids": (lambda d: (d[:, :, None] == d[:, None, :]) & (d[:, None, :] >= 0), (torch.tensor([[0, -1, 1]]),)),
    "a bias looked up": (lambda t: t[(q_rows() - k_columns()).abs()], (torch.randn(9),)),
    "an embedding": (lambda t: F.embedding((q_rows() - k_columns()).clamp(0, 3).abs(), t), (torch.randn(4, 3),)),
    "slopes": (lambda s: s[:, None, None] * (k_columns() - q_rows()), (torch.tensor([0.5, 0.25]),)),
    "an element": (lambda t: k_columns() <= q_rows() + t[1], (torch.tensor([1, 2]),)),
    "a comparison of floats": (lambda t: t[:, None] > t[None, :], (torch.tensor([0.5, float("nan"), 1.5]),)),
    "bools of floats": (lambda t: t.bool()[None, :], (torch.tensor([0.0, -0.5, 2.0]),)),
    "running count": (lambda t: (t != 0).cumsum(-1), (torch.tensor([[1, 0, 1], [1, 1, 0]]),)),
    "starts of documents": (
        lambda t: torch.diff(t, prepend=t[:, :1], dim=-1) != 0,
        (torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]),),
    ),
    "a difference of differences": (lambda t: torch.diff(t, n=2) + 0, (RUNS,)),
    "a difference appended to": (lambda t: torch.diff(t, append=t[:, :1]) + 0, (RUNS,)),
    "a difference prepended with several": (lambda t: torch.diff(t, prepend=t[:, :2]) + 0, (RUNS,)),
    "a difference of bytes that wrap": (lambda t: torch.diff(t.to(torch.uint8)) + 0, (RUNS,)),
    "a sum of what is not constant": (lambda t: t.cumsum(0) + 0, (RUNS,)),
    "a sum that wraps": (lambda t: torch.full_like(t, 100).cumsum(1, dtype=torch.int8) + 0, (RUNS,)),
    "opaque": (lambda t: t.sin().cos()[None, :] > 0, (torch.randn(4),)),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_a_tensor_says_is_a_load(name: str) -> None:
    function, inputs = LOADS[name]
    reading = evaluated(function, *inputs)
    assert reading.equal, reading.text
    assert reading.loads


@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.arange(300)[:S, None] * 100).to(torch.uint8) <= torch.arange(S),
        lambda: torch.full((S, S), LOWEST) * 2 > torch.arange(S),
    ],
    ids=["out of uint8's range", "out of float32's range"],
)
def test_numbers_that_a_dtype_does_not_hold_are_never_misread(make: Callable[[], Tensor]) -> None:
    """Wrapping and overflow: either read right, or not looked into."""
    reading = evaluated(lambda x: joined(make(), x), torch.zeros(()))
    assert reading.equal, reading.text
