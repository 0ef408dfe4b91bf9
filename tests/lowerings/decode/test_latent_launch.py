"""How the kernels over a latent are launched, with kernels that run nothing. Their numbers are in kernels/test_decode_latent.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.decode import latent_launch, replaying
from attn_compiler.lowerings.decode.kernels.decode_latent import attention_decode_latent, combine_latent
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.lowerings.shared.launching.dry_run import noting
from tests.lowerings.decode.latent_problems import SMALL, of_latent, planned
from tests.lowerings.decode.problems import Case, Problem

Launched = list[tuple[Any, Any, tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Kernels, grids and arguments: of first launches the tensors, of further ones their addresses."""
    found: Launched = []

    def first(kernel: Any, grid: Any, *given: Any, **named: Any) -> Any:
        found.append((kernel, grid, given))
        return kernel

    monkeypatch.setattr(replaying, "first_launch", first)
    monkeypatch.setattr(
        replaying, "start", lambda compiled, grid, device, values: found.append((compiled, grid, values))
    )
    latent_launch.prepare.cache_clear()
    yield found
    latent_launch.prepare.cache_clear()


def problem(*, splits: int = 3, **given: Any) -> Problem:
    return of_latent(Case(name="launched", batch=2, heads_q=5, seqlen_kv=200, splits=splits), **given)


def run(given: Problem, seqlen_kv: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    latent = given.v[:, :, :seqlen_kv]
    return latent_launch.forward(given.q, latent, latent, given.operands, given.text)


def test_several_splits_are_put_together_by_a_second_kernel(launched: Launched) -> None:
    given = problem(splits=3)
    with planned(given):
        out, lse = run(given)
    (kernel, grid, first), (combine, parts, second) = launched
    assert (kernel, grid) == (attention_decode_latent, (3, 1, 2))
    assert (combine, parts) == (combine_latent, (5, 1, 2))
    partial = first[5]
    assert partial.numel() == 2 * 3 * 5 * (32 + 1)
    assert second[2] is partial
    assert (out.shape, out.dtype, lse.shape) == ((2, 5, 1, 32), torch.float32, (2, 5, 1))


def test_one_split_writes_the_result_itself(launched: Launched) -> None:
    given = problem(splits=1)
    with planned(given):
        out, _ = run(given)
    ((kernel, _, first),) = launched
    assert kernel is attention_decode_latent
    assert first[3] is out
    assert first[5] is None


def test_a_cache_of_another_length_is_launched_by_addresses(launched: Launched) -> None:
    given = problem(splits=1)
    with planned(given):
        run(given, 100)
        out, lse = run(given, 150)
    (_, _, first), (kernel, _, again) = launched
    assert kernel is attention_decode_latent
    assert isinstance(first[0], torch.Tensor)
    assert again[0] == given.q.data_ptr()
    assert again[3:5] == (out.data_ptr(), lse.data_ptr())
    assert [100 in [x for x in values if isinstance(x, int)] for values in (first, again)] == [True, False]
    assert 150 in again


def test_what_begins_between_vectors_has_a_kernel_of_its_own(launched: Launched) -> None:
    whole, between = problem(splits=1), problem(splits=1, unaligned=True)
    assert whole.text != between.text
    with planned(whole):
        run(whole)
        text = dataclasses.replace(between, text=whole.text)
        run(text)
    assert [isinstance(values[0], torch.Tensor) for _, _, values in launched] == [True, True]


def test_no_sequences_launch_nothing(launched: Launched) -> None:
    given = problem()
    with planned(given):
        empty = [x[:0] for x in (given.q, given.v, given.v)]
        out, lse = latent_launch.forward(*empty, [x[:0] for x in given.operands], given.text)
    assert launched == []
    assert (out.shape, lse.shape) == ((0, 5, 1, 32), (0, 5, 1))


def test_nothing_is_kept_of_stand_ins(launched: Launched) -> None:
    given = problem(splits=1)
    with planned(given):
        with noting(lambda *_: None):
            run(given)
        run(given)
        assert [isinstance(values[0], torch.Tensor) for _, _, values in launched] == [True, True]


def test_a_text_without_rows_of_a_tile_is_none_of_a_latent() -> None:
    given = problem()
    call = DecodeCall.from_text(given.text)
    text = dataclasses.replace(call, schedule=dataclasses.replace(call.schedule, rows=None)).to_text()
    with pytest.raises(ValueError, match="names the latent, and the rows of a tile"):
        latent_launch.prepare(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            Case(name="sinks", heads_q=40, sinks=True),
            "bounds of keys, and a part beside the latent; got 1 queries, and sinks, rope",
        ),
        (Case(name="queries", heads_q=40, seqlen_q=2), "got 2 queries, and rope"),
    ],
)
def test_a_text_that_gives_the_kernel_for_hopper_what_it_does_not_take(given: Case, said: str) -> None:
    schedule = dataclasses.replace(SMALL, rows=64, hopper=True)
    contradictory = of_latent(given, schedule=schedule)
    with planned(contradictory), pytest.raises(ValueError, match=said):
        latent_launch.prepare(contradictory.text)


def test_a_cache_that_grows_needs_no_further_kernel_to_add_up(launched: Launched) -> None:
    """Splits are as many as the keys are worth, and the kernel is compiled for as many as there may ever be."""
    given = problem(splits=None)
    with planned(given):
        run(given, 64)
        run(given, 200)
    (_, _, first), (kernel, _, again) = [each for each in launched if each[0] is combine_latent]
    assert kernel is combine_latent
    assert isinstance(first[2], torch.Tensor)
    assert isinstance(again[2], int)
    assert (first[5], again[5]) == (2, 7)
