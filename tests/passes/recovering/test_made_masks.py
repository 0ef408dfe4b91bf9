"""Masks are what their formula says, however the tensor was made, joined or moved; and what is nearly one is another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler.spec.attention import AttentionSpec

_OPTIONS = {"inner": "eager", "cache_rewrites": False}
_LOW = -1e9


def _ones(n: int, m: int | None = None) -> Tensor:
    return torch.ones(n, n if m is None else m, dtype=torch.bool)


def _by_blocks(n: int) -> Tensor:
    """Two halves, by block_diag."""
    return torch.block_diag(torch.ones(2, 2), torch.ones(n - 2, n - 2)).bool()


def _written(n: int, q: Tensor, k: Tensor) -> Tensor:
    x = _ones(n)
    x[q, k] = False
    return x


def _filled(n: int, kept: Tensor) -> Tensor:
    x = torch.zeros(n, n)
    x[kept] = -torch.inf
    return x


def _one_hot(n: int) -> Tensor:
    return (torch.arange(n)[:, None] // 2 == torch.arange(n)).float()


def _looped(n: int, keys: Callable[[int], tuple[int, int]]) -> Tensor:
    x = torch.full((n, n), -torch.inf)
    for i in range(n):
        x[i, slice(*keys(i))] = 0.0
    return x


CAUSAL = "causal"
#: how a mask of n queries and keys is made -> its words
MADE: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "flip both axes": (lambda n: _ones(n).triu().flip(-1).flip(-2), CAUSAL),
    "flip at once": (lambda n: _ones(n).triu().flip((0, 1)), CAUSAL),
    "fliplr, flipud": (lambda n: torch.flipud(torch.fliplr(_ones(n).triu())), CAUSAL),
    "rot90 twice": (lambda n: torch.rot90(_ones(n).triu(), 2), CAUSAL),
    "xor": (lambda n: _ones(n).triu(1) ^ _ones(n), CAUSAL),
    "bitwise_xor": (lambda n: torch.bitwise_xor(_ones(n).triu(1), _ones(n)), CAUSAL),
    "xor in place": (lambda n: _ones(n).triu(1).bitwise_xor_(_ones(n)), CAUSAL),
    "pad in front": (lambda n: F.pad(_ones(n - 1).tril(), (1, 0, 1, 0), value=False) | _ones(n).tril(), CAUSAL),
    "pad of nothing": (lambda n: F.pad(_ones(n).tril(), (0, 0)), CAUSAL),
    "a cut pad": (lambda n: F.pad(_ones(n + 2).tril(), (0, -2, 0, -2)), CAUSAL),
    "hstack": (lambda n: torch.hstack((_ones(n, 2), _ones(n, n - 2).tril(-2))) & _ones(n).tril(), CAUSAL),
    "vstack": (lambda n: torch.vstack((_ones(2, n).tril(), _ones(n - 2, n).tril(2))), CAUSAL),
    "stack of heads": (lambda n: torch.stack((_ones(n).tril(), _ones(n).tril()))[None], CAUSAL),
    "stack and reshape": (lambda n: torch.stack((_ones(n).tril(), _ones(n)), 2)[..., 0], CAUSAL),
    "products of truth values": (
        lambda n: (_ones(n).tril().float() * _ones(n).triu(-2).float()).bool(),
        "causal ∧ window (2 back)",
    ),
    "products in half precision": (
        lambda n: _ones(n).tril().half() * _ones(n).triu(-2).half() > 0,
        "causal ∧ window (2 back)",
    ),
    "outer": (lambda n: torch.outer(torch.arange(n) < 3, torch.arange(n) < 2), "keys up to 1 ∧ q <= 2"),
    "einsum": (
        lambda n: torch.einsum("q,k->qk", (torch.arange(n) < 3).float(), (torch.arange(n) < 2).float()) > 0,
        "keys up to 1 ∧ q <= 2",
    ),
    "matmul over one": (
        lambda n: ((torch.arange(n) < 3)[:, None].float() @ (torch.arange(n) < 2)[None].float()).bool(),
        "keys up to 1 ∧ q <= 2",
    ),
    "eye": (lambda n: torch.eye(n, dtype=torch.bool), "k = q"),
    "eye, added": (lambda n: (1 - torch.eye(n)) * _LOW, "k = q"),
    "eye of two sizes": (lambda n: torch.eye(n, n).bool() | _ones(n).tril(), CAUSAL),
    "diag_embed": (lambda n: torch.diag_embed(torch.ones(n)).bool() | _ones(n).tril(-1), CAUSAL),
    "diag": (lambda n: torch.diag(torch.ones(n)).bool() | _ones(n).tril(-1), CAUSAL),
    "fill_diagonal_": (lambda n: _ones(n).tril(-1).fill_diagonal_(True), CAUSAL),
    "minimum, maximum": (lambda n: ~torch.maximum(torch.minimum(_ones(n).triu(1), _ones(n)), _ones(n).triu(2)), CAUSAL),
    "cumsum of ones": (lambda n: torch.ones(n, n).cumsum(0) >= torch.ones(n, n).cumsum(1), CAUSAL),
    "written at triu_indices": (lambda n: _written(n, *torch.triu_indices(n, n, 1)), CAUSAL),
    "written at tril_indices": (lambda n: ~_written(n, *torch.tril_indices(n, n)), CAUSAL),
    "written at places": (lambda n: _written(n, torch.arange(n - 1), torch.arange(n - 1) + 1), "k ≠ q + 1"),
    "written by truth values": (lambda n: _filled(n, _ones(n).triu(1)), CAUSAL),
    "written at a grid": (
        lambda n: (
            _ones(n).index_put((torch.arange(n)[:, None], torch.arange(n)[None]), torch.tensor(False)) | _ones(n).tril()
        ),
        CAUSAL,
    ),
    "scatter of positions": (
        lambda n: ~_ones(n).scatter(1, torch.arange(2)[None].expand(n, 2), False) & _ones(n).tril(),
        "causal ∧ keys up to 1",
    ),
    "index_fill": (
        lambda n: _ones(n).tril() & ~_ones(n).index_fill(1, torch.arange(2), False),
        "causal ∧ keys up to 1",
    ),
    "a list of keys": (lambda n: _ones(n).tril().index_fill_(1, torch.tensor([1, 4]), False), "causal ∧ k ≠ 1 ∧ k ≠ 4"),
    "a prefix that causal holds": (lambda n: F.pad(_ones(n).tril(), (2, 0), value=True)[:, :n], "causal from 2"),
}
#: the same, where sizes are numbers alone
WITH_NUMBERS: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "kron of chunks": (lambda n: torch.kron(torch.eye(n // 2), torch.ones(2, 2)).bool(), "chunks of 2"),
    "roll of rows": (lambda n: _ones(n).tril().roll(1, 0), ""),
    "block_diag": (_by_blocks, ""),
    "documents as one-hot rows": (lambda n: _one_hot(n) @ _one_hot(n).mT > 0, "chunks of 2"),
    "einsum of one-hot rows": (
        lambda n: torch.einsum("qc,kc->qk", _one_hot(n), _one_hot(n)).bool() & _ones(n).tril(),
        "causal ∧ chunks of 2",
    ),
    "rows of a window in a loop": (lambda n: _looped(n, lambda i: (max(0, i - 2), i + 1)), "causal ∧ window (2 back)"),
    "rows of frames in a loop": (lambda n: _looped(n, lambda i: (0, i // 2 * 2 + 2)), "k <= 2·(q // 2) + 1"),
    "rows up to the last key": (lambda n: _looped(n, lambda i: (i, n)), "window (0 back)"),
}
#: nearly causal: off by one, or another number
NOT_CAUSAL: dict[str, Callable[[int], Tensor]] = {
    "flipped once": lambda n: _ones(n).tril().flip(-1),
    "a pad that lets through": lambda n: F.pad(_ones(n - 1).tril(), (0, 1, 1, 0), value=True),
    "a pad that reflects": lambda n: F.pad(_ones(n - 1).tril()[None].float(), (0, 1, 1, 0), mode="reflect")[0] > 0,
    "a pad at another side": lambda n: (
        F.pad(_ones(n - 1).tril(), (1, 0, 0, 1), value=False) | torch.eye(n, dtype=torch.bool)
    ),
    "stacked in another order": lambda n: torch.stack((_ones(n), _ones(n).tril()), 2)[..., 0],
    "hstack, one key less": lambda n: torch.hstack((_ones(n, 1), _ones(n, n - 1).tril(-2))) & _ones(n).tril(),
    "xor of what overlaps": lambda n: _ones(n).triu() ^ _ones(n),
    "a diagonal that is shut": lambda n: _ones(n).tril().fill_diagonal_(False) | (torch.arange(n) == 0),
    "a product over more than one": lambda n: (
        (_ones(n).tril().float() @ _ones(n).tril().float() > 1) | (torch.arange(n) == 0)
    ),
    "written at one place less": lambda n: _written(n, *torch.triu_indices(n, n - 1, 1)),
    "written a diagonal too far": lambda n: _written(n, *torch.triu_indices(n, n, 2)),
    "written at places that are counted from the end": lambda n: _written(n, torch.arange(n) - n, torch.arange(n)),
    "one row of a loop is another": lambda n: _looped(n, lambda i: (0, i + 1 + (i == 3))),
    "a sum of more than one": lambda n: (_one_hot(n) @ (_one_hot(n).mT + _one_hot(n).mT) == 1) | (torch.arange(n) == 0),
    "rolled along keys": lambda n: _ones(n).tril().roll(1, 1),
}


def _specs(make: Callable[[int], Tensor], *lengths: int) -> list[AttentionSpec]:
    """Of compiled calls at these lengths, each held against eager."""

    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(q.shape[2]))

    torch._dynamo.reset()
    attn_compiler.reset()
    compiled = torch.compile(function, backend="attn_compiler", options=_OPTIONS)
    for length in lengths:
        q = torch.randn(1, 2, length, 8, dtype=torch.float64)
        q = q.float() if make(length).is_floating_point() else q
        with torch.no_grad():
            torch.testing.assert_close(compiled(q), function(q), atol=1e-5, rtol=1e-5)
    return [site.spec for report in attn_compiler.reports() for site in report.sites]


def _words(spec: AttentionSpec) -> str:
    return " ∧ ".join(kind.words for kind in spec.mask.read)


@pytest.mark.parametrize("name", MADE)
def test_a_mask_is_what_its_formula_says(name: str) -> None:
    make, words = MADE[name]
    specs = _specs(make, 6, 9, 7)
    assert {(_words(spec), spec.mask.reason) for spec in specs} == {(words, None)}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_mask_of_a_known_size_is_what_its_formula_says(name: str) -> None:
    make, words = WITH_NUMBERS[name]
    (spec,) = _specs(make, 6)
    assert (spec.mask.reason, words in _words(spec)) == (None, True)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_what_is_nearly_causal_is_not(name: str) -> None:
    for spec in _specs(NOT_CAUSAL[name], 6, 9):
        assert _words(spec) != CAUSAL
