"""What ranks have is put in the order of the sequence, and all raise what one of them found."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.torch_private import meetings as torch_meetings
from attn_compiler.torch_private.meetings import RanksDisagree
from attn_compiler.verifying.ranks import Ranks


def _ranks(*, balanced: bool = False, rank: int = 0, size: int = 3) -> Ranks:
    return Ranks(layout=Layout(size=size, balanced=balanced), rank=rank, group="of nobody")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_parts_come_back_in_the_order_of_the_sequence(
    monkeypatch: pytest.MonkeyPatch, balanced: bool, axis: int, dtype: torch.dtype
) -> None:
    ranks = _ranks(balanced=balanced)
    shape = [2, 3, 4]
    shape[axis] = 12
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    parts = [ranks.layout.part(whole, axis, rank) for rank in range(3)]
    monkeypatch.setattr(torch_collectives, "parts", lambda x, size, group: torch.stack(parts))
    found = ranks.whole(parts[0], axis)
    assert found.dtype == dtype
    assert torch.equal(found, whole)
    assert torch.equal(whole.index_select(axis, ranks.positions(4, whole.device)), parts[0])


def _mismatch(what: str) -> VerificationMismatch:
    texts = {"formula": "k <= q", "expected": "1", "observed": "2", "allowed": "0", "differing": "1 of 2"}
    return VerificationMismatch(site="layers.0", what=what, index="[0, 1]", **texts)


def _said(*found: tuple[int, str], rank: int = 0) -> str:
    own = _ranks(rank=rank)
    said: list[str] = []

    def answers(group: str, subject: str, text: str, *, seconds: float) -> list[str]:
        said.append(text)
        return ["[]"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_meetings, "answers", answers)
        own.raise_first([(place, _mismatch(what)) for place, what in found])
    return said[0]


def _answered(monkeypatch: pytest.MonkeyPatch, *by_rank: str) -> None:
    def answers(*_: Any, **__: Any) -> list[str]:
        return list(by_rank)

    monkeypatch.setattr(torch_meetings, "answers", answers)


def test_the_first_check_of_the_lowest_rank_is_what_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    _answered(monkeypatch, "[]", _said((3, "c"), (1, "b"), rank=1), _said((1, "d"), rank=2))
    with pytest.raises(VerificationMismatch) as error:
        _ranks().raise_first([])
    assert (error.value.what, error.value.index) == ("b", "[0, 1] on rank 1")
    assert "compile without context_parallel" in str(error.value)
    assert error.value.__notes__ == [
        "also: the d at layers.0, [0, 1] on rank 2",
        "also: the c at layers.0, [0, 1] on rank 1",
    ]


def test_nothing_is_raised_where_no_rank_found_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(_said()) == []
    _answered(monkeypatch, "[]", "[]")
    _ranks().raise_first([])


def test_a_rank_whose_check_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _answered(monkeypatch, "[]", "failed: MemoryError")
    with pytest.raises(RanksDisagree, match="rank 1: failed: MemoryError"):
        _ranks().raise_first([])


def test_what_another_rank_failed_by_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch_meetings, "say", lambda group, text: said.append(f"{group}: {text}"))
    ranks = dataclasses.replace(_ranks(), beside=("heads",))
    ranks.failed(RanksDisagree("rank 1: failed"))
    # Those that share heads did not meet that rank.
    assert [text.split(":")[0] for text in said] == ["heads"]
    said.clear()
    ranks.failed(MemoryError("none left"))
    assert [text.split(":")[0] for text in said] == ["of nobody", "heads"]
    assert all("none left" in text for text in said)


def test_what_one_share_of_the_heads_found_is_raised_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    by_group = {"of nobody": ["[]", "[]"], "heads": ["[]", _said((2, "e"), rank=1)]}
    monkeypatch.setattr(torch_meetings, "answers", lambda group, *_, **__: by_group[group])
    with pytest.raises(VerificationMismatch, match="the e is not"):
        dataclasses.replace(_ranks(), beside=("heads",)).raise_first([])
