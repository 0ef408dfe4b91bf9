"""The word about packed sequences that a graph looks for and doesn't have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.reporting.facts import SiteReport
from tests.passes.compiling import compiled

S = 6


def _documents(positions: Tensor) -> Tensor:
    """As transformers numbers them."""
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


def _site(make: Callable[..., Tensor], *inputs: Tensor) -> SiteReport:
    def function(q: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(*inputs))

    run = compiled(function)
    q = torch.randn(2, 2, S, 8)
    torch.testing.assert_close(run(q, *inputs), function(q, *inputs))
    return run.site


def _packed(position_ids: Tensor) -> Tensor:
    documents = _documents(position_ids)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & (position_ids[:, None, None, :] <= position_ids[:, None, :, None])


def _same(documents: Tensor) -> Tensor:
    return documents[:, None, :, None] == documents[:, None, None, :]


def _apart(positions: Tensor) -> Tensor:
    """Of query and key."""
    return positions[:, None, :, None] - positions[:, None, None, :]


#: masks of positions within documents -> their words, less the documents; None: a formula of positions stays
_BY_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "causal": (lambda p: _apart(p) >= 0, "causal"),
    "strictly causal": (lambda p: _apart(p) > 0, "strictly causal"),
    "a window": (lambda p: (_apart(p) >= 0) & (_apart(p) < 2), "causal ∧ window (1 back)"),
    "a band": (lambda p: _apart(p).abs() <= 1, "window (1 back, 1 ahead)"),
    "chunks": (lambda p: _apart(p // 2) == 0, None),
    "a sum": (lambda p: p[:, None, :, None] + p[:, None, None, :] > 2, None),
    "the first tokens": (lambda p: (p < 2)[:, None, None, :] | (_apart(p) == 0), None),
}

_POSITIONS = (
    [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]],
    [[5, 6, 7, 0, 1, 0], [3, 3, 3, 2, 1, 0]],
    [[0, 2, 4, 5, 5, 6], [-3, -2, -1, 0, 9, 10]],
)


@pytest.mark.parametrize("name", _BY_PLACE)
@pytest.mark.parametrize("positions", _POSITIONS, ids=str)
def test_positions_within_documents_are_places(name: str, positions: list[list[int]]) -> None:
    make, words = _BY_PLACE[name]
    site = _site(lambda p: _same(_documents(p)) & make(p), torch.tensor(positions))
    found = [kind.words for kind in site.spec.mask.read if "document" not in kind.words]
    assert words is None or " ∧ ".join(found) == words
    assert (words is None) == (len(site.spec.mask.read) - len(found) == 2 or any("[" in kind for kind in found))


@pytest.mark.parametrize(
    "documents",
    [
        lambda p: (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 2).cumsum(-1),
        lambda p: (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) == 1).cumsum(-1),
        lambda p: (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(0),
        lambda p: (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) - 1).cumsum(-1),
        lambda p: (torch.diff(p + p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1),
        lambda p: torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1,
    ],
)
@pytest.mark.parametrize("positions", _POSITIONS, ids=str)
def test_other_numbers_of_documents_say_nothing_of_positions(
    documents: Callable[[Tensor], Tensor], positions: list[list[int]]
) -> None:
    site = _site(lambda p: _same(documents(p)) & (_apart(p) >= 0), torch.tensor(positions))
    assert not any(kind.words == "causal" for kind in site.spec.mask.read)


def test_positions_that_are_written_after_they_were_counted_are_others() -> None:
    def make(p: Tensor) -> Tensor:
        documents = _documents(p)
        p = p.clone()
        p[:, 3] += 1
        return _same(documents) & (_apart(p) >= 0)

    assert not any(kind.words == "causal" for kind in _site(make, torch.tensor(_POSITIONS[0])).spec.mask.read)


def test_positions_of_the_graph_are_one_document() -> None:
    def make() -> Tensor:
        position_ids = torch.arange(S).unsqueeze(0)
        return _packed(position_ids)

    site = _site(make)
    assert site.spec.mask.words == "causal (proved)"
    assert "document(cumsum…) ⇒ causal, because position_ids is arange" in site.notes


def test_positions_that_go_on_from_a_cache_are_too() -> None:
    def make(past: Tensor) -> Tensor:
        position_ids = (torch.arange(S) + past).unsqueeze(0)
        return _packed(position_ids)

    assert "document(cumsum…) ⇒ causal, because position_ids is arange" in _site(make, torch.tensor(3)).notes


def test_positions_of_the_user_are_not() -> None:
    site = _site(_packed, torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]))
    assert not any("arange" in note for note in site.notes)
    assert any("document" in kind.words for kind in site.spec.mask.read)


def test_another_running_count_has_no_word() -> None:
    def make() -> Tensor:
        positions = torch.ones(S, dtype=torch.int64).cumsum(0)
        return positions[None, :] <= positions[:, None]

    site = _site(make)
    assert site.spec.mask.is_causal
    assert not any("document" in note for note in site.notes)
