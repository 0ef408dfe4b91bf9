"""The kernel for Hopper as it is launched, with what adds up its splits: on a GPU of Hopper, and elsewhere as Python in PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.decode import latent_launch, latent_schedule, replaying
from attn_compiler.lowerings.decode.kernels import latent_sm90
from attn_compiler.lowerings.decode.plan import Schedule
from attn_compiler.lowerings.shared.launching.launch import first_launch
from attn_compiler.spec.target import Target
from tests.lowerings.decode import problems
from tests.lowerings.decode.latent_problems import of_latent, planned, results
from tests.lowerings.decode.problems import Case, Problem
from tests.lowerings.shared.kernels import gluon_in_torch

HAS_GPU = torch.cuda.is_available()
KERNEL = latent_sm90.attention_latent_sm90
on_both = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the same cases run on the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

CASES = (
    Case(name="plain"),
    Case(name="one_split", splits=1),
    Case(name="odd_lengths", bounds=((0, 333), (0, 37)), seqlen_kv=333),
    Case(name="none_and_one_in_one_split", splits=1, bounds=((0, 1), (0, 0))),
    Case(name="none_and_one", bounds=((0, 0), (149, 150))),
    Case(name="left_padding", bounds=((90, 150), (3, 150))),
    Case(name="window", bounds=((100, 133), (149, 150))),
    Case(name="beyond_the_end", bounds=((0, 400), (-7, 160))),
    Case(name="one_bound", bounds=((0, 70),)),
    Case(name="more_splits_than_tiles", splits=9),
    Case(name="many_splits", splits=70, batch=1, seqlen_kv=321),
    Case(name="splits_unknown", splits=None),
    Case(name="one_key", seqlen_kv=1),
    Case(name="whole_tiles", seqlen_kv=256, splits=2),
    Case(name="mean", bounds=((0, 0), (0, 37)), means="all"),
    Case(name="mean_in_one_split", bounds=((9, 3), (0, 150)), splits=1, means="all"),
)


def _pointer(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    left = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return gluon_in_torch.Pointer(x.as_strided((left,), (1,)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels. Where there is no GPU, that for Hopper is run as Python, and others in Triton's interpreter."""
    found: list[Any] = []

    def first(kernel: Any, grid: Any, *given: Any, **named: Any) -> Any:
        found.append(kernel)
        if kernel is not KERNEL or HAS_GPU:
            return first_launch(kernel, grid, *given, **named)
        arguments = dict(zip(kernel.arg_names, map(_pointer, given), strict=False)) | {"HOW": named["HOW"]}
        gluon_in_torch.run(latent_sm90, "attention_latent_sm90", grid, arguments)
        return None

    monkeypatch.setattr(replaying, "first_launch", first)
    yield found
    latent_launch.prepare.cache_clear()


def _problem(case: Case, device: str, *, heads: int = 128, dtype: torch.dtype = torch.bfloat16) -> Problem:
    given: Any = {"rank": 512, "rope": 64, "dtype": dtype, "device": device}
    case = dataclasses.replace(case, heads_q=heads)
    return of_latent(case, **given, schedule=_schedule(of_latent(case, **given)))


def _schedule(problem: Problem) -> Schedule:
    """As on a GPU of Hopper, if there is none."""
    target = Target.current("cuda") if HAS_GPU else Target.fake(sm=90, processors=132)
    schedule = latent_schedule.schedule(problem.spec, target)
    assert schedule.hopper
    return dataclasses.replace(schedule, early=schedule.early and HAS_GPU)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("device", on_both)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_defined(case: Case, device: str, launched: list[Any]) -> None:
    problem = _problem(case, device)
    problems.assert_within_rule(results(problem), problem)
    assert launched[0] is KERNEL


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("device", on_both)
@pytest.mark.parametrize(("heads", "dtype"), [(33, torch.bfloat16), (100, torch.bfloat16), (64, torch.float16)])
def test_heads_that_fill_no_tile_and_the_other_dtype(
    heads: int, dtype: torch.dtype, device: str, launched: list[Any]
) -> None:
    for splits in (1, 3):
        problem = _problem(
            Case(name="heads", splits=splits, bounds=((0, 99), (0, 0))), device, heads=heads, dtype=dtype
        )
        problems.assert_within_rule(results(problem), problem)
    assert launched.count(KERNEL) == 2


def _in_one_tensor(problem: Problem) -> Problem:
    """The latent and what is beside it as parts of one tensor, of a cache that is longer."""
    latent, rope = problem.v, problem.named["rope"]
    batch, _, length, _ = latent.shape
    whole = latent.new_full((batch, 1, length + 40, 576), torch.nan)
    parts = [part[:, :, 7 : length + 7] for part in whole.split([512, 64], -1)]
    for part, x in zip(parts, (latent, rope), strict=True):
        part.copy_(x)
    return dataclasses.replace(problem, v=parts[0], named={**problem.named, "rope": parts[1]})


def _repeated(problem: Problem) -> Problem:
    """Sequences that share one cache."""

    def shared(x: Tensor) -> Tensor:
        return x[:1].expand(x.shape)

    whole = {"v": shared(problem.v), "k": shared(problem.k)}
    return dataclasses.replace(problem, **whole, named={**problem.named, "rope": shared(problem.named["rope"])})


@pytest.mark.in_turns
@pytest.mark.parametrize("device", on_both)
@pytest.mark.parametrize("lain", [_in_one_tensor, _repeated])
def test_caches_that_lie_otherwise(lain: Any, device: str, launched: list[Any]) -> None:
    problem = lain(_problem(Case(name="lies", bounds=((0, 130), (0, 130))), device))
    problems.assert_within_rule(results(problem), problem)
    assert launched[0] is KERNEL


@pytest.mark.parametrize("device", on_both)
@pytest.mark.parametrize("stride", [0, 8, 64])
def test_of_one_key_a_stride_may_lie_and_then_the_triton_kernel_reads_it(
    stride: int, device: str, launched: list[Any]
) -> None:
    problem = _problem(Case(name="one_key", seqlen_kv=1, splits=1), device, dtype=torch.float16)
    lying = problem.v.as_strided(problem.v.shape, (512, 512, stride, 1))
    problem = dataclasses.replace(problem, v=lying)
    problems.assert_within_rule(results(problem), problem)
    assert KERNEL not in launched


@pytest.mark.parametrize("device", on_both)
def test_what_begins_between_vectors_is_not_for_the_copy_engine(device: str, launched: list[Any]) -> None:
    problem = _problem(Case(name="between"), device, dtype=torch.float16)
    room = torch.empty(problem.v.numel() + 8, dtype=problem.v.dtype, device=device)
    moved = room[1 : problem.v.numel() + 1].view(problem.v.shape).copy_(problem.v)
    problem = dataclasses.replace(problem, v=moved)
    problems.assert_within_rule(results(problem), problem)
    # On a GPU it is copied first: what Triton compiled for such addresses reads the wrong elements.
    assert (KERNEL in launched) == HAS_GPU


@pytest.mark.gpu
def test_a_place_in_compiled_code_launches_both_kernels_again() -> None:
    problem = _problem(Case(name="again", bounds=((0, 130), (0, 70))), "cuda")
    with planned(problem):
        site = latent_launch.ForwardSite()
        given = (problem.q, problem.v, problem.v, problem.operands, problem.text)
        first = [x.clone() for x in site(*given)]
        assert site.replay is not None
        again = site(*given)
    for x, y in zip(first, again, strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0)
