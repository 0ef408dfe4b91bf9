"""Places in compiled code that decode: what further calls ask for, and which calls are never run again so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.decode import latent_launch, launch, replaying
from attn_compiler.lowerings.shared.launching import launch as launching, replaying as shared_replaying
from tests.lowerings.decode import latent_problems, problems
from tests.lowerings.decode.problems import Case, Problem

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
    for module in (launch, latent_launch, launching):
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
