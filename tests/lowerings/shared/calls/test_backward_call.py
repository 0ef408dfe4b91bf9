"""What a backward of our kernels allocates, hands on and copies; the kernels are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.calls.backward_call import BackwardByKernels
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.launching.on_device import KnownCalls
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, build, planned

BIASED = Case(name="backward_call", bias="hqk")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_ALIKE", KnownCalls())


class Kernels:
    """A backward whose only launch fills the gradients of q, k and v with numbers. seen: what is shared, of each run."""

    def __init__(self) -> None:
        self.seen: list[Backward] = []

    def body(self, together: int = 64) -> BackwardByKernels:
        return BackwardByKernels(
            op="op_backward",
            operands=lambda prepared: prepared.operands,
            rows_together=lambda prepared: together,
            start=self._start,
            make_room=lambda shared: None,
            run=self._run,
        )

    def _start(self, kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str) -> None:
        for i, name in enumerate(("GradQ", "GradK", "GradV")):
            tensors[name].fill_(i + 1)

    def _run(self, shared: Backward) -> list[Tensor]:
        self.seen.append(shared)
        shared.launch("kernel", lambda shared: Arguments(grid=(1, 1, 1), tensors={}, numbers={}))
        return [torch.full_like(shared.tensors["bias"], 4.0)]


def _given(problem: Problem, **changed: Tensor) -> tuple[Any, ...]:
    out = torch.zeros(problem.q.shape[:3] + problem.v.shape[3:])
    lse = torch.zeros(problem.q.shape[:3])
    given = {
        "grad_out": torch.ones_like(out),
        "grad_lse": torch.zeros_like(lse),
        "q": problem.q,
        "k": problem.k,
        "v": problem.v,
    }
    given |= changed
    return (*given.values(), problem.operands, out, lse, problem.text)


def _call(problem: Problem, kernels: Kernels, together: int = 64, **changed: Tensor) -> Any:
    with planned(problem.plan), torch.no_grad():
        return kernels.body(together)(*_given(problem, **changed))


def test_gradients_lie_as_what_they_are_of() -> None:
    problem, kernels = build(BIASED, device="cpu"), Kernels()
    *grads, further = _call(problem, kernels)
    for i, (grad, x) in enumerate(zip(grads, (problem.q, problem.k, problem.v), strict=True)):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert (grad == i + 1).all()
    assert [x.shape for x in further] == [problem.named["bias"].shape]


@pytest.mark.parametrize(
    ("queries", "together", "rows"), [(0, 64, 64), (1, 64, 64), (64, 64, 64), (65, 64, 128), (70, 48, 96)]
)
def test_row_stats_are_whole_blocks_and_one_at_least(queries: int, together: int, rows: int) -> None:
    kernels = Kernels()
    problem = build(Case(name=f"backward_call_{queries}", seqlen_q=queries, bias="hqk"), device="cpu")
    _call(problem, kernels, together)
    (shared,) = kernels.seen
    assert shared.tensors["RowStats"].shape == (2, 2, 2, rows)


@pytest.mark.parametrize("name", ["q", "grad_out"])
def test_what_kernels_can_not_read_is_copied(name: str) -> None:
    """An upstream gradient of a sum is one number that is expanded."""
    problem, kernels = build(BIASED, device="cpu"), Kernels()
    like = problem.q if name == "q" else _given(problem)[0]
    spread = torch.tensor(3.0).expand(like.shape)
    *grads, _ = _call(problem, kernels, **{name: spread})
    (shared,) = kernels.seen
    held = shared.tensors["Q" if name == "q" else "GradOut"]
    assert held.stride(-1) == 1
    assert torch.equal(held, spread)
    assert shared.tensors["K"].data_ptr() == problem.k.data_ptr()
    assert grads[0].is_contiguous() or name != "q"


def test_a_gradient_of_the_lse_that_is_no_packed_one_is_copied_and_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, kernels = build(BIASED, device="cpu"), Kernels()
    kept: list[Any] = []
    monkeypatch.setattr(replaying.Alike, "keep", lambda *given, **named: kept.append(named))
    _call(problem, kernels, grad_lse=torch.tensor(2.0).expand(problem.q.shape[:3]))
    assert kernels.seen[0].tensors["GradLse"].is_contiguous()
    assert (kernels.seen[0].tensors["GradLse"] == 2).all()
    assert kept == []
    _call(problem, kernels)
    (named,) = kept
    assert named["inputs"][:3] == ("GradOut", "GradLse", "Q")
    assert named["returned"] == ("GradQ", "GradK", "GradV", ["GradBias"])
