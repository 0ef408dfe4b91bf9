"""Masks made by mapping a function of (b, h, q, k) over positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.recovering.reading import Unreadable, per_example
from tests.passes.compiling import compiled, mirror_of
from tests.passes.recovering.reading.evaluating import read

B, S, KEYS, D = 2, 5, 7, 8


PADDING = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _mapped(function: MaskFunction, batch: int = B, queries: int = S, keys: int = KEYS) -> Tensor:
    """bool[batch, 1, queries, keys], as transformers makes it."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=dims, out_dims=0)
    return function(torch.arange(batch), torch.arange(1), torch.arange(queries), torch.arange(keys))


def _twice(m: Tensor) -> Tensor:
    first = torch.vmap(lambda k: k + 1)(torch.arange(KEYS))
    second = torch.vmap(lambda q: q * 2)(torch.arange(S))
    return (first[None, :] <= second[:, None]) & m[0]


def _two_inside(m: Tensor) -> Tensor:
    def row(q: Tensor) -> Tensor:
        early = torch.vmap(lambda k: k <= q)(torch.arange(KEYS))
        late = torch.vmap(lambda k: k > q - 3)(torch.arange(KEYS))
        return early & late

    return torch.vmap(row)(torch.arange(S)) & m[0]


#: function of `m`, bool[B, KEYS]
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "causal and padded": lambda m: _mapped(lambda b, h, q, k: (k <= q) & m[b, k]),
    "an or of functions": lambda m: _mapped(lambda b, h, q, k: (k <= q) | (m[b, k] & (k < 2))),
    "chunks": lambda m: _mapped(lambda b, h, q, k: (q // 3 == k // 3) & m[b, k]),
    "numbers": lambda m: _mapped(lambda b, h, q, k: torch.where(m[b, k] & (q >= k), 0.0, -torch.inf)),
    "constant": lambda m: _mapped(lambda b, h, q, k: q.new_ones((), dtype=torch.bool)) & m[:, None, None, :],
    "shifted positions": lambda m: _mapped(lambda b, h, q, k: k <= q + 2) & m[:, None, None, :],
    "one vmap after another": _twice,
    "two inside of one": _two_inside,
    "over columns": lambda m: torch.vmap(lambda column: column & (torch.arange(B) == 1), in_dims=1)(m),
    "out at the end": lambda m: torch.vmap(lambda k: (torch.arange(S) >= k) & m[0, k], out_dims=1)(torch.arange(KEYS)),
    "out from the end": lambda m: torch.vmap(lambda k: (torch.arange(S) >= k) & m[0, k], out_dims=-1)(
        torch.arange(KEYS)
    ),
    "rows as they are": lambda m: torch.vmap(lambda row: row)(m),
    "rows turned around": lambda m: torch.vmap(lambda row: row, out_dims=1)(m),
    "something that does not vary": lambda m: torch.vmap(lambda row: ~m[1])(m),
    "two axes of one tensor": lambda m: torch.vmap(torch.vmap(lambda one: ~one))(m),
}


@pytest.mark.parametrize("name", READ)
def test_an_element_is_the_examples(name: str) -> None:
    found = read(READ[name], PADDING)
    assert found.equal, found.text


@pytest.mark.parametrize("keys", [4, 6])
def test_sizes_may_be_symbolic(keys: int) -> None:
    def function(m: Tensor) -> Tensor:
        return _mapped(lambda b, h, q, k: (k <= q) & m[b, k], *m.shape, m.shape[1])

    found = read(function, torch.rand(3, keys) < 0.5, dynamic_sizes=(3, keys))
    assert found.equal, found.text


@pytest.mark.parametrize(
    ("function", "words"),
    [(lambda b, h, q, k: k <= q, "causal"), (lambda b, h, q, k: (k <= q) & (k > q - 3), "causal ∧ window (2 back)")],
)
def test_kinds(function: MaskFunction, words: str) -> None:
    def attention(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=_mapped(function, 1, S, S))

    q = torch.randn(B, 1, S, D)
    run = compiled(attention)
    torch.testing.assert_close(run(q), attention(q))
    assert " ∧ ".join(kind.words for kind in run.site.spec.mask.read) == words
    assert run.site.spec.mask.is_causal == (words == "causal")


# ---- what stays closed --------------------------------------------------------------------------------------------
def _random(m: Tensor) -> Tensor:
    draw = torch.vmap(lambda q: (torch.rand(KEYS) < 0.5) & (torch.arange(KEYS) <= q), randomness="different")
    return draw(torch.arange(S)) & m[0]


def _unknown(m: Tensor) -> Tensor:
    return torch.vmap(lambda q: (torch.arange(KEYS) * 1.0).sin() <= q.sin())(torch.arange(S)) & m[0]


def _gradient(m: Tensor) -> Tensor:
    slope = torch.vmap(torch.func.grad(lambda x: (x * x).sum()))
    return (slope(torch.arange(KEYS) * 1.0) > 3) & m[0]


def _written_inside(m: Tensor) -> Tensor:
    rows = torch.zeros(B, KEYS, dtype=torch.bool)
    torch.vmap(lambda row: row.logical_or_(torch.ones(KEYS, dtype=torch.bool)))(rows)
    return rows & m


@pytest.mark.parametrize("function", [_random, _unknown, _gradient, _written_inside], ids=lambda f: f.__name__)
def test_what_is_more_than_a_map_is_not_looked_into(function: Callable[[Tensor], Tensor]) -> None:
    """Either the reading is refused, or what the map gave is a load, of a tensor that is no input."""
    try:
        found = read(function, PADDING)
    except Unreadable:
        return
    assert not found.loads <= {"m"}, found.text


def _written_through_the_result(m: Tensor) -> Tensor:
    rows = torch.zeros(B, KEYS, dtype=torch.bool)
    torch.vmap(lambda row: row)(rows)[:, 1:].logical_not_()
    return rows & m


def _written_before_it_is_used(m: Tensor) -> Tensor:
    rows = torch.zeros(B, KEYS, dtype=torch.bool)
    view = torch.vmap(lambda row: row)(rows)
    rows[:, 1:] = True
    return view & m


@pytest.mark.parametrize(
    "function", [_written_through_the_result, _written_before_it_is_used], ids=lambda f: f.__name__
)
def test_what_is_written_to_the_memory_of_a_map_is_read(function: Callable[[Tensor], Tensor]) -> None:
    found = read(function, PADDING)
    assert found.equal, found.text


def test_what_is_written_through_the_result_of_a_map_is_read() -> None:
    def function(m: Tensor) -> Tensor:
        rows = torch.zeros(B, KEYS, dtype=torch.bool)
        torch.vmap(lambda row: row)(rows).logical_not_()
        return rows & m

    found = read(function, PADDING)
    assert found.equal, found.text


def test_chunks_of_a_map_are_not_put_together() -> None:
    found = read(lambda m: torch.vmap(lambda row: ~row, chunk_size=1)(m), PADDING)
    assert not found.loads <= {"m"}, found.text


def _names(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, int]:
    """Op -> how many vmaps its result is one example of, for ops whose result is."""
    found = per_example.regions_of(mirror_of(function, *inputs))
    return {
        node.target.overloadpacket.__name__: len(regions)
        for node, regions in found.items()
        if hasattr(node.target, "overloadpacket")
    }


def test_without_a_vmap_nothing_is_one_examples() -> None:
    assert _names(lambda x: x.sin() + 1, torch.randn(3)) == {}


def test_what_is_computed_inside_is_one_examples_and_what_comes_out_is_not() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.sin())(x.exp()).cos()

    assert _names(function, torch.randn(3, 4)) == {"sin": 1}


def test_what_the_examples_share_is_one_examples_once_it_meets_one() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * y.sin())(x)

    assert _names(function, torch.randn(3, 4), torch.randn(4)) == {"mul": 1}


def test_vmaps_in_each_other() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(torch.vmap(lambda element: element.sin()))(x)

    assert _names(function, torch.randn(3, 4)) == {"sin": 2}
