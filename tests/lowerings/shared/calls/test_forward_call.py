"""What a forward of our kernels hands on, keeps and copies; the kernels are stand-ins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.calls.arguments import Named, Prepared
from attn_compiler.lowerings.shared.calls.forward_call import Forward
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.on_device import KnownCalls
from attn_compiler.lowerings.shared.launching.replaying import Alike
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, build, planned

PADDED = Case(name="forward_call", keys="right", needs_grad=False)


class Kernel:
    """Writes twice v's first dims. seen: tensors of each run, by name."""

    def __init__(self) -> None:
        self.seen: list[Named] = []
        self.same: list[Alike] = []

    def __call__(self, prepared: Prepared, same: Alike, tensors: Named) -> list[None]:
        self.seen.append(dict(tensors))
        self.same.append(same)
        tensors["Out"].copy_(tensors["V"][:, :1, :1] * 2)
        tensors["Lse"].zero_()
        # A launch that is not ready: nothing is replayed.
        return [None]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_ALIKE", KnownCalls())


def _call(problem: Problem, kernel: Kernel, *, q: Tensor | None = None, **more: bool) -> tuple[Tensor, Tensor]:
    body = Forward(op="op", operands=lambda prepared: prepared.operands, run=kernel, **more)
    with planned(problem.plan):
        return body(problem.q if q is None else q, problem.k, problem.v, problem.operands, problem.text)


def test_a_kernel_gets_each_tensor_by_its_name() -> None:
    problem, kernel = build(PADDED, device="cpu"), Kernel()
    out, lse = _call(problem, kernel)
    (seen,) = kernel.seen
    assert list(seen) == ["Q", "K", "V", *problem.plan.operands, "Out", "Lse"]
    assert all(seen[name] is x for name, x in problem.named.items())
    assert seen["Out"] is out
    assert out.shape == problem.q.shape[:3] + problem.v.shape[3:]
    assert (lse.shape, lse.dtype) == (problem.q.shape[:3], torch.float32)
    assert torch.equal(out, (problem.v[:, :1, :1] * 2).expand_as(out))


def test_calls_that_lie_alike_share_what_was_found() -> None:
    problem, kernel = build(PADDED, device="cpu"), Kernel()
    for _ in range(2):
        _call(problem, kernel)
    assert kernel.same[0] is kernel.same[1]
    assert kernel.seen[0]["Out"].data_ptr() != kernel.seen[1]["Out"].data_ptr()
    assert kernel.same[0].replay is None


def _apart(x: Tensor) -> Tensor:
    """The same numbers, with a hole between any two."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def test_what_a_kernel_can_not_read_is_copied() -> None:
    problem, kernel = build(PADDED, device="cpu"), Kernel()
    q = _apart(problem.q)
    _call(problem, kernel, q=q)
    (seen,) = kernel.seen
    assert seen["Q"].stride(-1) == 1
    assert torch.equal(seen["Q"], q)
    assert seen["K"] is problem.k


def test_one_that_reads_operands_alone_copies_nothing() -> None:
    problem, kernel = build(PADDED, device="cpu"), Kernel()
    q = _apart(problem.q)
    _call(problem, kernel, q=q, restore=lambda *_: (q, problem.k, problem.v))
    assert kernel.seen[0]["Q"] is q


def test_operands_that_are_not_the_plan_s_are_an_error() -> None:
    problem, kernel = build(PADDED, device="cpu"), Kernel()
    body = Forward(op="op", operands=lambda prepared: prepared.operands, run=kernel)
    with planned(problem.plan), pytest.raises(ValueError, match="zip"):
        body(problem.q, problem.k, problem.v, [], problem.text)
    assert kernel.seen == []


def test_no_queries() -> None:
    problem, kernel = build(Case(name="forward_call_empty", seqlen_q=0, needs_grad=False), device="cpu"), Kernel()
    out, lse = _call(problem, kernel)
    assert (out.numel(), lse.numel(), out.device.type) == (0, 0, "cpu")
