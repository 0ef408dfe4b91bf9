"""Forwards of our kernels: what they are told and read where it is, what they hand on, keep and copy, and who is told of failures."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attn_compiler.lowerings.shared.calls import arguments, failures
from attn_compiler.lowerings.shared.calls.arguments import (
    Named,
    Prepared,
    alignment,
    along,
    check_lengths,
    head_dim_parts,
    is_far,
    is_unreadable,
    readable,
)
from attn_compiler.lowerings.shared.calls.failures import Caller, Failures
from attn_compiler.lowerings.shared.calls.forward_call import Forward
from attn_compiler.lowerings.shared.launching.dry_tensors import Addresses
from attn_compiler.lowerings.shared.launching.replaying import CallCache
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning, KernelFailed
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, build, planned
from tests.lowerings.specs import CAUSAL, make_spec

pytest.importorskip("triton", reason="the kernels' arguments are made with Triton: pip install triton")


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (17, (32, 0)),
        (40, (32, 16)),
        (64, (64, 0)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (112, (128, 0)),
        (160, (128, 32)),
        (192, (128, 64)),
        (256, (256, 0)),
        (257, (256, 16)),
        (320, (256, 64)),
        (384, (256, 128)),
        (385, (256, 256)),
        (512, (256, 256)),
    ],
)
def test_a_head_dim_is_computed_in_powers_of_two(head_dim: int, parts: tuple[int, int]) -> None:
    assert head_dim_parts(head_dim) == parts


def test_parts_cover_the_head_dim_and_no_more_than_the_next_power() -> None:
    for head_dim in range(1, 513):
        first, second = head_dim_parts(head_dim)
        assert head_dim <= first + second <= max(16, 2 * head_dim), head_dim
        assert all(part == 0 or (256 >= part >= 16 and part & (part - 1) == 0) for part in (first, second)), head_dim


def test_vectors_are_loaded_where_everything_begins_at_one() -> None:
    x = torch.empty(2, 30, 4, 72, dtype=torch.bfloat16).transpose(1, 2)
    assert alignment(x) == 8
    assert alignment(x.float()) == 4
    # A head dim of 36 elements of 2 bytes, and a slice that begins at an odd element.
    assert alignment(torch.empty(2, 4, 30, 36, dtype=torch.bfloat16)) == 1
    assert alignment(torch.empty(2, 30, 4, 73, dtype=torch.bfloat16)[..., 1:]) == 1
    assert alignment(x, torch.empty(2, 4, 30, 36, dtype=torch.bfloat16)) == 1


def test_the_stride_of_an_axis_of_size_one_says_nothing() -> None:
    x = torch.empty(1, 4, 30, 64, dtype=torch.bfloat16)
    assert alignment(x.as_strided(x.shape, (3, *x.stride()[1:]))) == 8


def _symbolic(*shape: int) -> torch.Tensor:
    """Of bfloat16, all sizes but those of heads symbolic, at the start of its memory."""
    env = ShapeEnv()
    dims = [DimDynamic.DYNAMIC if dim in (0, 2) else DimDynamic.STATIC for dim in range(4)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    x = torch.empty(shape, dtype=torch.bfloat16)
    return FakeTensorMode(shape_env=env).from_tensor(
        x, static_shapes=False, symbolic_context=context, source=ConstantSource("x")
    )


def test_symbolic_sizes_are_what_all_of_them_are_and_add_no_guard() -> None:
    x = _symbolic(2, 3, 48, 24)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    with Addresses():
        # A head of s · 24 elements begins at a multiple of 8 of them; one of s · 3 · 12 does not for an odd s.
        assert alignment(x, turned) == 8
        assert alignment(_symbolic(2, 3, 48, 12)) == 1
    assert isinstance(along(x, 1), torch.SymInt)
    assert not is_far(x)
    # Positions are as far apart as there are sequences.
    assert is_far(x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))
    check_lengths(x, x)
    assert not x.shape[0].node.shape_env.guards  # type: ignore[attr-defined]


def test_a_size_that_may_be_one_has_a_stride() -> None:
    assert along(torch.empty(1, 4, 3, 8), 0) == 0
    assert along(torch.empty(2, 4, 3, 8), 0) == 96
    assert isinstance(along(_symbolic(2, 3, 48, 24), 0), torch.SymInt)


# What a forward of our kernels hands on, keeps and copies.
PADDED = Case(name="forward_call", keys="right", needs_grad=False)


class Kernel:
    """Writes twice v's first dims. seen: tensors of each run, by name."""

    def __init__(self) -> None:
        self.seen: list[Named] = []
        self.same: list[CallCache] = []

    def __call__(self, prepared: Prepared, same: CallCache, tensors: Named) -> list[None]:
        self.seen.append(dict(tensors))
        self.same.append(same)
        tensors["Out"].copy_(tensors["V"][:, :1, :1] * 2)
        tensors["Lse"].zero_()
        # A launch that is not ready: nothing is replayed.
        return [None]


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


# Which tensors our Triton kernels read where they are, and which are copied.
SHAPE = (2, 3, 5, 16)


def test_what_can_be_read_is_handed_on() -> None:
    x = torch.randn(SHAPE)
    for as_it_is in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x[:, :, 1:], x[:1].expand(2, 3, 5, 16)):
        assert not is_unreadable(as_it_is)
        assert readable(as_it_is) is as_it_is


@pytest.mark.parametrize(
    "x", [torch.randn(2, 3, 16, 5).mT, torch.randn(2, 3, 5, 32)[..., ::2], torch.ones(()).expand(SHAPE)]
)
def test_a_head_whose_elements_are_apart_is_copied(x: torch.Tensor) -> None:
    """An upstream gradient of a sum is one number that is expanded."""
    assert is_unreadable(x)
    copied = readable(x)
    assert torch.equal(copied, x)
    assert copied.is_contiguous()
    assert copied.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("apart", "positions", "far"), [(FARTHEST, 2, False), (FARTHEST + 1, 2, True), (FARTHEST + 1, 1, False)]
)
def test_positions_too_far_apart_for_32_bits_are_unreadable(apart: int, positions: int, far: bool) -> None:
    x = torch.empty((), device="meta").as_strided((1, 1, positions, 16), (1, 1, apart, 1))
    assert is_unreadable(x) is far


def test_one_of_several_is_enough() -> None:
    fine, apart = torch.randn(SHAPE), torch.randn(2, 3, 16, 5).mT
    assert is_unreadable(fine, apart)
    assert not is_unreadable(fine, fine)


def test_an_odd_beginning_is_read_off_a_gpu() -> None:
    """Only there do compiled kernels read wrong elements (tests/lowerings/test_far.py and the GPU's own tests)."""
    x = torch.randn(2 * 3 * 5 * 16 + 1).half()[1:].view(SHAPE)
    assert not is_unreadable(x)


def test_what_no_copy_makes_readable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_misaligned", lambda *tensors: True)
    with pytest.raises(ValueError, match="multiples of 8 in half precision, got 12"):
        readable(torch.randn(1, 1, 4, 12).half())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "copied"), [(torch.float16, True), (torch.bfloat16, True), (torch.float32, False)])
def test_an_odd_beginning_in_half_precision_is_copied_on_a_gpu(dtype: torch.dtype, copied: bool) -> None:
    x = torch.randn(2 * 3 * 5 * 16 + 1, device="cuda").to(dtype)[1:].view(SHAPE)
    assert is_unreadable(x) is copied
    assert torch.equal(readable(x), x)
    assert not is_unreadable(readable(x))


# What is known of kernels that failed, and who is told.
SPEC, OTHER = make_spec(), make_spec(mask=CAUSAL)


def test_a_failure_speaks_against_the_lowering_for_the_sites_of_its_text_alone() -> None:
    known = Failures()
    caller = Caller(lowering="triton", spec=SPEC)
    known.watch(["a text", "a helper"], caller)
    known.watch(["another text"], Caller(lowering="triton", spec=OTHER))
    assert known.fail("a text", "RuntimeError: no") == [caller]
    (reason,) = known.reasons("triton", SPEC)
    assert reason.code is Code.NOT_COMPILED
    assert reason.observed == "RuntimeError: no"
    assert reason.remedy is not None
    assert known.reasons("triton", OTHER) == known.reasons("hopper", SPEC) == []
    known.forget()
    assert known.reasons("triton", SPEC) == []
    assert known.fail("a text", "again") == []


def test_equal_callers_are_told_once() -> None:
    known = Failures()
    for _ in range(2):
        known.watch(["a text"], Caller(lowering="triton", spec=SPEC))
    assert len(known.fail("a text", "no")) == 1


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Failures:
    made = Failures()
    monkeypatch.setattr(failures, "FAILURES", made)
    return made


def test_code_that_launched_it_starts_over(here: Failures) -> None:
    started: list[str] = []
    here.watch(["a text"], Caller(lowering="triton", spec=SPEC, start_over=lambda: started.append("over")))
    with pytest.warns(AttnCompilerWarning, match="'triton' did not start: RuntimeError: no"):
        failures.at_launch("triton", "a text", RuntimeError("no"), 0.1)
    assert started == ["over"]


def test_strict_code_raises_and_what_raised_is_its_cause(here: Failures) -> None:
    here.watch(["a text"], Caller(lowering="triton", spec=SPEC, strict=True))
    error = RuntimeError("no")
    with pytest.raises(KernelFailed) as raised:
        failures.at_launch("triton", "a text", error, 0.1)
    assert raised.value.__cause__ is error


def test_what_does_not_compile_and_concerns_nobody_is_no_warning(here: Failures) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not failures.at_compilation("triton", "a text", RuntimeError("no"))
        assert not failures.at_compilation("tile_lists", "", RuntimeError("no"))


def test_memory_that_ran_out_is_not_made_good_another_way() -> None:
    assert not failures.is_ours(torch.OutOfMemoryError("no"))
    assert failures.is_ours(RuntimeError("no"))
