"""How the decode kernel is launched: grids, room for partial results, kernels that were compiled before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from attn_compiler.lowerings.decode import launch
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests.lowerings.decode.problems import BY_NAME, Case, Problem, build, planned, run

Launch = tuple[tuple[Any, ...], tuple[int, int, int], dict[str, Any]]


def launched(problem: Problem) -> Launch:
    """Key, grid and arguments of a call that is not run."""
    found: list[Launch] = []

    def record(prepared: Any, key: Any, grid: Any, tensors: Any, numbers: Any) -> None:
        names = launch.attention_decode.arg_names
        found.append((key, grid, {**dict(zip(names, (*tensors, *numbers), strict=False)), **prepared.constants}))

    with mock.patch.object(launch, "_launch", record), planned(problem.plan):
        run(problem)
    return found[0]


@pytest.mark.parametrize(
    ("case", "grid"),
    [
        (Case(name="grid", splits=5), (5, 2, 2)),
        (Case(name="grid_mha", heads_q=4, heads_kv=4, batch=3, splits=1), (1, 4, 3)),
        (Case(name="grid_blocks", heads_q=6, heads_kv=1, seqlen_q=16), (3, 6, 2)),
        # Of 64 programs 16 are for each tile, and none takes fewer than 32 of 150 keys.
        (Case(name="grid_unknown", splits=None), (5, 2, 2)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_grids(case: Case, grid: tuple[int, int, int]) -> None:
    assert launched(build(case))[1] == grid


@pytest.mark.parametrize("name", ["plain", "rows_beyond_a_tile", "head_dims_80_48"])
def test_there_is_room_for_each_row_of_each_split(name: str) -> None:
    problem = build(BY_NAME[name])
    _, (splits, places, batch), given = launched(problem)
    rows = splits * places * batch * given["KEPT"]
    assert given["KEPT"] * places >= problem.q.shape[1] * problem.q.shape[2]
    assert given["lse_at"] == rows * problem.v.shape[3]
    assert given["Partial"].numel() == rows * (problem.v.shape[3] + 1)
    assert problem.named["count"].numel() >= places * batch


def test_one_split_needs_no_room_and_no_counters() -> None:
    _, _, given = launched(build(BY_NAME["one_split"]))
    assert given["Partial"] is given["Count"] is None


@pytest.mark.parametrize(
    ("layout", "align"), [("cache", 4), ("bshd", 4), ("wide", 4), ("joined", 4), ("odd", 1), ("one_batch", 4)]
)
def test_whole_vectors_are_loaded_only_where_all_are_aligned(layout: str, align: int) -> None:
    key, _, _ = launched(build(Case(name=f"align_{layout}", layout=layout)))
    assert key[1] == align


def test_an_axis_of_one_says_nothing_of_alignment() -> None:
    problem = build(Case(name="one_row", batch=1, bounds=None))
    k = problem.k.as_strided(problem.k.shape, (7, *problem.k.stride()[1:]))
    assert launched(dataclasses.replace(problem, k=k))[0][1] == 4


def test_out_lies_as_that_of_every_family() -> None:
    problem = build(BY_NAME["several_queries"])
    with planned(problem.plan):
        found = run(problem)
    for mine, other in zip(found, ops.empty_outputs(problem.q, problem.v), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)


def test_an_empty_batch_is_not_launched() -> None:
    problem = build(Case(name="empty"))
    with planned(problem.plan):
        out, lse = run(dataclasses.replace(problem, q=problem.q[:0], k=problem.k[:0], v=problem.v[:0]))
    assert (out.numel(), lse.numel()) == (0, 0)


# ---- kernels that were compiled before -----------------------------------------------------------------------------


class _Kernel:
    """Keeps what it is compiled for, and what is launched of that."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.started: list[tuple[Any, tuple[int, int, int], Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Callable[..., int]:
        def compile_and_run(*given: Any, **constants: Any) -> int:
            self.compiled.append(constants)
            return len(self.compiled)

        return compile_and_run

    def start(self, compiled: Any, grid: tuple[int, int, int], device: Any, values: tuple[Any, ...]) -> None:
        self.started.append((compiled, grid, device, values))


@pytest.fixture
def kernel() -> Iterator[_Kernel]:
    found = _Kernel()
    with (
        mock.patch.object(launch, "attention_decode", found),
        mock.patch.object(launch, "start", found.start),
    ):
        yield found


def test_a_cache_that_grows_takes_the_kernel_of_its_first_length(kernel: _Kernel) -> None:
    problem = build(Case(name="grows", splits=None))
    with planned(problem.plan):
        for length in (140, 150, 149, 97):
            run(dataclasses.replace(problem, k=problem.k[:, :, :length], v=problem.v[:, :, :length].clone()))
    assert len(kernel.compiled) == 1
    assert [grid[0] for _, grid, _, _ in kernel.started] == [5, 5, 4]
    for compiled, _, _, values in kernel.started:
        assert compiled == 1
        assert values[-1] == kernel.compiled[0]["HOW"]
    lengths = [values[-4] for _, _, _, values in kernel.started]
    assert lengths == [150, 149, 97]


def test_addresses_are_those_of_the_call(kernel: _Kernel) -> None:
    case = Case(name="addresses", bounds=((0, 9), (3, 20)), sinks=True)
    problems = [build(case, seed=seed) for seed in (0, 1)]
    with planned(problems[0].plan):
        for problem in problems:
            run(problem)
    ((_, _, _, values),) = kernel.started
    second = problems[1]
    assert values[:3] == tuple(x.data_ptr() for x in (second.q, second.k, second.v))
    assert values[6:13] == (
        *(second.named[name].data_ptr() for name in ("count", "bounds")),
        *(None, None, None, None),
        second.named["sinks"].data_ptr(),
    )


def test_alignment_the_number_of_splits_and_what_is_added_make_another_kernel(kernel: _Kernel) -> None:
    problem = build(Case(name="others", splits=None, sinks=True))
    odd = build(Case(name="others", splits=None, sinks=True, layout="odd"))
    halves = {**problem.named, "sinks": problem.named["sinks"].half()}
    with planned(problem.plan):
        for changed in (
            problem,
            dataclasses.replace(odd, text=problem.text),
            dataclasses.replace(problem, k=problem.k[:, :, :20], v=problem.v[:, :, :20]),
            dataclasses.replace(problem, named=halves),
            problem,
        ):
            run(changed)
    assert len(kernel.compiled) == 4
    assert len(kernel.started) == 1
