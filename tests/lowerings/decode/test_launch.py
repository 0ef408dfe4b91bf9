"""How the decode kernel is launched, and what further calls ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.decode import latent_launch, launch, replaying
from attn_compiler.lowerings.shared.launching import launch as launching, replaying as shared_replaying
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests.lowerings.decode import latent_problems, problems
from tests.lowerings.decode.problems import BY_NAME, Case, Problem, build, planned, run

# How the decode kernel is launched.
Launch = tuple[tuple[Any, ...], tuple[int, int, int], dict[str, Any]]


def launched(problem: Problem) -> Launch:
    """Key, grid and arguments of a call that is not run."""
    found: list[Launch] = []

    def record(
        _: Any, kernel: Any, key: Any, grid: Any, tensors: Any, numbers: Any, how: Any, *__: Any, **___: Any
    ) -> None:
        found.append((key, grid, dict(zip(kernel.arg_names, (*tensors, *numbers), strict=False)) | how()._asdict()))

    with mock.patch.object(replaying, "launch", record), planned(problem.plan):
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
    with mock.patch.object(launch, "attention_decode", found), mock.patch.object(replaying, "start", found.start):
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


# Places in compiled code that decode.
CASES = (
    Case(name="lengths", bounds=((0, 9), (3, 20)), seqlen_kv=64),
    Case(name="one split", splits=1, seqlen_kv=64),
    Case(name="sinks", sinks=True, keys="left", splits=None, seqlen_kv=64),
)


class Kernel:
    """Keeps what its compiled form is launched with."""

    def __init__(self) -> None:
        self.ran: list[tuple[tuple[int, int, int], list[Any]]] = []

    def __getitem__(self, grid: Any) -> Callable[..., Kernel]:
        return lambda *_, **__: self

    def start(self, compiled: Any, grid: tuple[int, int, int], device: Any, values: Any) -> None:
        compiled.ran.append((grid, list(values)))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """As if they were compiled, on a GPU whose index a CPU's tensors have."""
    found = {name: Kernel() for name in ("attention_decode", "attention_decode_latent", "combine_latent")}
    found["attention_latent_sm90"] = Kernel()
    latent_sm90 = pytest.importorskip("attn_compiler.lowerings.decode.kernels.latent_sm90")
    monkeypatch.setattr(latent_sm90, "attention_latent_sm90", found["attention_latent_sm90"])
    monkeypatch.setattr(launch, "attention_decode", found["attention_decode"])
    monkeypatch.setattr(latent_launch, "attention_decode_latent", found["attention_decode_latent"])
    monkeypatch.setattr(latent_launch, "combine_latent", found["combine_latent"])
    for module in (replaying, launching):
        monkeypatch.setattr(module, "start", found["attention_decode"].start)
    monkeypatch.setattr(shared_replaying, "current_cuda_device", lambda: -1)
    return found


def _planned(problem: Problem) -> AbstractContextManager[None]:
    return problems.planned(problem.plan)


def decode(case: Case) -> tuple[Any, Any, Problem]:
    return launch, _planned, problems.build(case, dtype=torch.bfloat16, device="cpu")


def latent(case: Case) -> tuple[Any, Any, Problem]:
    return latent_launch, latent_problems.planned, latent_problems.of_latent(case, dtype=torch.bfloat16, device="cpu")


def on_hopper(case: Case) -> tuple[Any, Any, Problem]:
    """Without what the kernel for Hopper does not take."""
    simple = dataclasses.replace(case, heads_q=40, sinks=False, keys=None)
    schedule = dataclasses.replace(latent_problems.SMALL, rows=64, hopper=True)
    given: Any = {"dtype": torch.bfloat16, "device": "cpu", "schedule": schedule}
    return latent_launch, latent_problems.planned, latent_problems.of_latent(simple, **given)


def given(problem: Problem, module: Any) -> tuple[Any, ...]:
    k = problem.v if module is latent_launch else problem.k
    return problem.q, k, problem.v, problem.operands, problem.text


def moved(problem: Problem) -> Problem:
    """Other tensors that lie the same."""

    def copy(x: Tensor) -> Tensor:
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return room.copy_(x)

    named = {name: copy(x) for name, x in problem.named.items()}
    return dataclasses.replace(problem, q=copy(problem.q), k=copy(problem.k), v=copy(problem.v), named=named)


@pytest.mark.parametrize("family", [decode, latent, on_hopper])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_further_call_launches_what_the_body_does(
    family: Callable[[Case], Any], case: Case, kernels: dict[str, Kernel]
) -> None:
    module, planned, problem = family(case)
    other, site = moved(problem), module.ForwardSite()
    with planned(problem):
        site(*given(problem, module))
        assert not any(kernel.ran for kernel in kernels.values()), "the first call's are launched by Triton's own way"
        with mock.patch.object(type(site), "body", side_effect=AssertionError("the body is called again")):
            out, lse = site(*given(other, module))
        replayed = {name: list(kernel.ran) for name, kernel in kernels.items()}
        for kernel in kernels.values():
            kernel.ran.clear()
        expected = module.forward(*given(other, module))
    for ours, theirs in zip((out, lse), expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert (family is on_hopper) == bool(replayed["attention_latent_sm90"])
    known = {x.data_ptr() for x in (other.q, other.k, other.v, *other.operands)}
    for name, kernel in kernels.items():
        assert len(replayed[name]) == len(kernel.ran)
        for (grid, values), (wanted_grid, wanted) in zip(replayed[name], kernel.ran, strict=True):
            assert grid == wanted_grid
            assert len(values) == len(wanted)
            for ours, theirs in zip(values, wanted, strict=True):
                # What is allocated lies elsewhere in each call; all else is the same.
                assert ours == theirs or (isinstance(ours, int) and not {ours, theirs} & known)
    addresses = [value for ran in replayed.values() for _, values in ran for value in values]
    assert {out.data_ptr(), lse.data_ptr(), other.q.data_ptr()} <= set(filter(lambda x: isinstance(x, int), addresses))


@pytest.mark.parametrize("family", [decode, latent, on_hopper])
def test_tensors_between_vectors_go_to_the_body_each_time(
    family: Callable[[Case], Any], kernels: dict[str, Kernel]
) -> None:
    module, planned, problem = family(CASES[0])
    room = torch.empty(problem.q.numel() + 1, dtype=problem.q.dtype)[1:]
    between = dataclasses.replace(problem, q=room.view(problem.q.shape).copy_(problem.q))
    site = module.ForwardSite()
    with planned(problem), mock.patch.object(type(site), "body", side_effect=module.forward) as body:
        for each, calls in ((between, 1), (between, 2), (problem, 3), (between, 4), (moved(problem), 4)):
            site(*given(each, module))
            assert body.call_count == calls


def test_copies_are_never_taken_for_what_is_allocated(kernels: dict[str, Kernel]) -> None:
    """Rows of an odd length are copied by the body each time."""
    problem = problems.build(
        Case(name="odd rows", head_dim=20, layout="odd", seqlen_kv=64), dtype=torch.bfloat16, device="cpu"
    )
    site = launch.ForwardSite()
    with _planned(problem), mock.patch.object(type(site), "body", side_effect=launch.forward) as body:
        for calls in (1, 2):
            site(*given(problem, launch))
            assert body.call_count == calls


def test_one_tensor_in_two_roles_is_no_two_tensors_later(kernels: dict[str, Kernel]) -> None:
    problem = problems.build(Case(name="k is v", seqlen_kv=64), dtype=torch.bfloat16, device="cpu")
    same, site = dataclasses.replace(problem, v=problem.k), launch.ForwardSite()
    with _planned(problem):
        site(*given(same, launch))
        kernels["attention_decode"].ran.clear()
        site(*given(problem, launch))
    ((_, values),) = kernels["attention_decode"].ran
    assert values[1:3] == [problem.k.data_ptr(), problem.v.data_ptr()]


def test_what_is_no_input_is_allocated_anew(kernels: dict[str, Kernel]) -> None:
    q, out, lse, partial = torch.empty(8), torch.empty(8), torch.empty(2), torch.empty(3, 4)
    kernel = Kernel()
    one = replaying.Launched(compiled=kernel, grid=(1, 1, 1), tensors=(q, None, out, lse, partial), values=(7,))
    found = replaying.replay((q,), (out, lse), [one])
    assert found is not None
    tensors = [q]
    assert found.run(tensors) == (tensors[1], tensors[2])
    assert [tuple(x.shape) for x in tensors[1:]] == [(8,), (2,), (3, 4)]
    addresses = [x.data_ptr() for x in tensors]
    assert kernel.ran == [((1, 1, 1), [addresses[0], None, *addresses[1:], 7])]


@pytest.mark.gpu
@pytest.mark.parametrize("family", [decode, latent])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_places_give_what_the_bodies_give_on_a_gpu(family: Callable[[Case], Any], case: Case) -> None:
    module, planned, problem = family(case)
    on_gpu = dataclasses.replace(
        problem,
        q=problem.q.cuda(),
        k=problem.k.cuda(),
        v=problem.v.cuda(),
        named={name: x.cuda() for name, x in problem.named.items()},
    )
    site = module.ForwardSite()
    with planned(problem):
        expected = module.forward(*given(on_gpu, module))
        for _ in range(3):
            for ours, theirs in zip(site(*given(on_gpu, module)), expected, strict=True):
                assert torch.equal(ours, theirs)
        assert site.replay is not None
