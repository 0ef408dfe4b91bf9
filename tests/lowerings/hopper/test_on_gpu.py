"""The kernel for Hopper on one: by its definition, through the whole backend with gradients, for tensors and lengths as they please."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import attn_compiler
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.target import Target
from tests.lowerings import any_length, kernel_problems
from tests.lowerings.any_length import FORMS, Form
from tests.lowerings.hopper import problems
from tests.lowerings.hopper.test_backward_launch import CASES as GRADIENT_CASES, WIDE as WIDE_GRADIENTS
from tests.lowerings.hopper.test_launch import ADDED, CASES, MASKED, SUMMED, WIDE
from tests.lowerings.kernel_cases import Case

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# The kernel for Hopper on one.
_TIMES = 4


@pytest.fixture(scope="module")
def hopper() -> Target:
    target = Target.current("cuda")
    reasons = by_name("hopper").unavailable(target)
    if reasons:
        pytest.skip(str(reasons[0]))
    return target


def _results(case: Case, target: Target, dtype: torch.dtype) -> None:
    problem = problems.build(case, dtype=dtype, device="cuda", target=target)
    # The second call is replayed.
    for _ in range(2):
        kernel_problems.assert_within_rule(problems.by_ops(problem), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.head_dim % 8 == 0], ids=lambda case: case.name)
def test_attention_by_its_definition(case: Case, hopper: Target) -> None:
    _results(case, hopper, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ADDED, *MASKED], ids=lambda case: case.name)
def test_what_is_added_by_its_definition(case: Case, hopper: Target) -> None:
    # Tiles that the copy engine wrote over too early were wrong in one call of four, or of a hundred.
    for _ in range(_TIMES):
        _results(case, hopper, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_wide_heads_by_their_definition(case: Case, hopper: Target) -> None:
    for _ in range(_TIMES):
        _results(case, hopper, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_learned_bias_and_its_gradients(head_dim: int, hopper: Target) -> None:
    """The forward is this family's, the backward the Triton kernels'."""

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    options = {"lowering": "hopper", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    given = [torch.randn(2, 4, 320, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    given.append(torch.randn(1, 4, 320, 320, device="cuda").bfloat16().requires_grad_())
    exact = [x.detach().double().requires_grad_() for x in given]
    out, right = compiled(*given), attention(*exact)
    upstream = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, given, upstream)]
    wanted = [right, *torch.autograd.grad(right, exact, upstream.double())]
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "length", "needs_grad"),
    [
        *((head_dim, 4500, False) for head_dim in (64, 128, 256)),
        *((head_dim, 3100, True) for head_dim in (64, 128, 384)),
    ],
)
def test_long_sequences_in_float16(head_dim: int, length: int, needs_grad: bool, hopper: Target) -> None:
    sizes: Any = {"batch": 3, "heads_q": 8, "heads_kv": 2, "seqlen_q": length, "seqlen_kv": length}
    for case in (GRADIENT_CASES if needs_grad else CASES)[:2]:
        further = {"name": f"{case.name} {head_dim}", "head_dim": head_dim, "needs_grad": needs_grad}
        _results(dataclasses.replace(case, **sizes, **further), hopper, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SUMMED, ids=lambda case: case.name)
def test_head_dims_that_are_sums(case: Case, hopper: Target) -> None:
    with problems.summed():
        _results(case, hopper, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80, 96, 112])
def test_long_sequences_with_head_dims_that_are_sums(head_dim: int, hopper: Target) -> None:
    """More blocks than programs, of odd lengths."""
    sizes: Any = {"batch": 3, "heads_q": 8, "heads_kv": 2, "seqlen_q": 3100, "seqlen_kv": 3100, "needs_grad": False}
    masks: dict[str, Any] = {
        "full": {},
        "causal": {"band": Band(right=0)},
        "window": {"band": Band(left=300, right=0)},
        "padding": {"keys": "left", "band": Band(right=0)},
        "documents": {"documents": True, "band": Band(right=0)},
        "softcap": {"softcap": 20.0, "band": Band(right=0)},
    }
    with problems.summed():
        for name, mask in masks.items():
            case = Case(name=f"hopper summed long {name} {head_dim}", head_dim=head_dim, **sizes, **mask)
            _results(case, hopper, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.name)
def test_gradients_by_their_definition(case: Case, hopper: Target) -> None:
    _results(case, hopper, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*WIDE_GRADIENTS, *GRADIENT_CASES], ids=lambda case: case.name)
def test_gradients_are_the_same_in_every_run(case: Case, hopper: Target) -> None:
    """Those of wide heads always, others in one order."""
    problem, in_order = problems.build(case, dtype=torch.bfloat16, device="cuda", target=hopper), case in GRADIENT_CASES
    first = problems.by_ops(problem, in_order=in_order)
    kernel_problems.assert_within_rule(first, problem)
    for _ in range(_TIMES):
        again = problems.by_ops(problem, in_order=in_order)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [GRADIENT_CASES[1], GRADIENT_CASES[7]], ids=lambda case: case.name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_in_one_order_of_many_blocks_do_not_wait_for_ever(case: Case, head_dim: int, hopper: Target) -> None:
    """More blocks than programs, of odd lengths, in several rounds of heads."""
    sizes: Any = {"batch": 5, "heads_q": 32, "heads_kv": 8, "seqlen_q": 1111, "seqlen_kv": 1111, "head_dim": head_dim}
    many = dataclasses.replace(case, name=f"{case.name} {head_dim}, many blocks", **sizes)
    problem = problems.build(many, dtype=torch.bfloat16, device="cuda", target=hopper)
    first = problems.by_ops(problem, in_order=True)
    for _ in range(_TIMES):
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(first, problems.by_ops(problem, in_order=True), strict=True)
        )
    free = problems.by_ops(problem)
    for mine, other in zip(first, free, strict=True):
        difference = (mine.float() - other.float()).nan_to_num(0.0, 0.0, 0.0)
        assert float(difference.norm()) <= 0.01 * float(other.float().nan_to_num(0.0, 0.0, 0.0).norm())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _backwards() -> list[str]:
    """What the last report says of backwards."""
    return [note for site in attn_compiler.reports()[-1].sites for note in site.notes if note.startswith("backward: ")]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "note"),
    [
        ((8, 16, 2048, 128), "backward: hopper_in_order"),
        ((2, 16, 512, 128), "backward: triton; hopper_in_order: the backward"),
    ],
    ids=["in one order", "by Triton's kernels"],
)
def test_a_deterministic_session_has_the_same_bits_in_every_step(
    shape: tuple[int, ...], note: str, hopper: Target, deterministic: None
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    options = {"lowering": "hopper", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(*given), given, upstream)

    first = gradients()
    (said,) = _backwards()
    assert said.startswith(note)
    for _ in range(_TIMES):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    # Who switches it off afterwards has another graph, and who switches it on again the first one.
    torch.use_deterministic_algorithms(False)
    gradients()
    assert _backwards() != [said]
    exact = [x.detach()[-1:].double().requires_grad_() for x in given]
    right = torch.autograd.grad(attention(*exact), exact, upstream[-1:].double())
    for mine, theirs in zip(first, right, strict=True):
        assert float((mine[-1:].double() - theirs).norm() / theirs.norm()) < 0.01
    torch.use_deterministic_algorithms(True)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def _padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    allowed = (at <= at[:, None]) & padding[:, None, None, :]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("dynamic", [False, None])
def test_a_padded_batch_and_its_gradients(head_dim: int, dynamic: bool | None, hopper: Target) -> None:
    """Left padding, which holds NaN: rows without keys give 0, and nothing leaks."""
    options = {"lowering": "hopper", "strict": True}
    compiled = torch.compile(_padded, backend="attn_compiler", options=options, dynamic=dynamic)
    # With None the second length has a graph for any.
    for seqlen in (640,) if dynamic is False else (640, 900, 700):
        shapes = ((3, seqlen, 8, head_dim), (3, seqlen, 2, head_dim), (3, seqlen, 2, head_dim))
        given = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for shape in shapes]
        padding = torch.arange(seqlen, device="cuda") >= torch.tensor([0, 100, 300], device="cuda")[:, None]
        exact = [x.detach().float().requires_grad_() for x in given]
        right = _padded(*exact, padding)
        seen = padding[:, None, :, None]
        with torch.no_grad():
            for x in given[1:]:
                x.masked_fill_(~seen, torch.nan)
        out = compiled(*given, padding)
        assert "hopper" in str(attn_compiler.reports()[-1])
        upstream = torch.randn_like(out) * seen
        found = [out, *torch.autograd.grad(out, given, upstream)]
        wanted = [right, *torch.autograd.grad(right, exact, upstream.float())]
        for mine, theirs in zip(found, wanted, strict=True):
            assert not mine.isnan().any()
            error = (torch.where(seen, mine.float() - theirs.nan_to_num(), 0.0)).norm()
            assert float(error / torch.where(seen, theirs.nan_to_num(), 0.0).norm()) < 0.02


@pytest.mark.gpu
def test_tensors_that_begin_between_vectors(hopper: Target) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    options = {"lowering": "hopper", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    memory = torch.randn(3, 2 * 4 * 300 * 64 + 1, device="cuda").bfloat16()
    given = [x[1:].view(2, 4, 300, 64).requires_grad_() for x in memory]
    exact = [x.detach().float().requires_grad_() for x in given]
    right = attention(*exact)
    upstream = torch.randn_like(right)
    wanted = [right, *torch.autograd.grad(right, exact, upstream)]
    for _ in range(2):
        out = compiled(*given)
        found = [out, *torch.autograd.grad(out, given, upstream.to(out.dtype))]
        for mine, theirs in zip(found, wanted, strict=True):
            assert float((mine.float() - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.gpu
def test_a_bias_that_begins_between_vectors(hopper: Target) -> None:
    def attention(q: Tensor, bias: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    compiled = torch.compile(
        attention, backend="attn_compiler", options={"lowering": "hopper", "strict": True}, dynamic=False
    )
    q = torch.randn(2, 4, 256, 64, device="cuda").bfloat16().requires_grad_()
    bias = torch.randn(4 * 256 * 256 + 1, device="cuda").bfloat16()[1:].view(1, 4, 256, 256)
    exact = q.detach().double().requires_grad_()
    right = attention(exact, bias.double())
    (wanted,) = torch.autograd.grad(right.sum(), exact)
    for _ in range(2):
        out = compiled(q, bias)
        (found,) = torch.autograd.grad(out.sum(), q)
        assert float((out.double() - right).norm() / right.norm()) < 0.02
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.gpu
def test_whoever_told_triton_where_to_get_memory_keeps_that(hopper: Target) -> None:
    from triton.runtime import _allocation

    def own(size: int, alignment: int, stream: int | None) -> Tensor:
        raise AssertionError("this kernel is none of mine")

    before = _allocation._allocator.set(own)
    try:
        _results(dataclasses.replace(CASES[1], name="hopper allocator"), hopper, torch.bfloat16)
        assert _allocation._allocator.get() is own
    finally:
        _allocation._allocator.reset(before)


# On a GPU.

#: odd, shorter than a tile, multiples of tiles; the second one makes the graph for all
LENGTHS = (640, 333, 1024, 77, 2111)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("lowering", ["hopper", "triton", None])
def test_one_graph_serves_every_length_after_the_first(lowering: str | None, form: Form, head_dim: int) -> None:
    target = Target.current("cuda")
    reasons = by_name(lowering or "triton").unavailable(target)
    if reasons:
        pytest.skip(str(reasons[0]))
    torch._dynamo.reset()
    attn_compiler.reset()
    options: dict[str, Any] = {"strict": True} | ({} if lowering is None else {"lowering": lowering})

    def compile_(function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend="attn_compiler", options=options)

    any_length.check(
        form, compile_, device="cuda", dtype=torch.bfloat16, head_dim=head_dim, within=0.03, lengths=LENGTHS
    )
    first, others = (report.sites for report in attn_compiler.reports())
    assert [len(first), len(others)] == [1, 1]
    assert isinstance(first[0].spec.seqlen_q, int)
    assert isinstance(others[0].spec.seqlen_q, str)
    chosen = others[0].decision.lowering
    if lowering is not None:
        assert chosen == lowering
        return
    assert others[0].evidence is not None
    assert others[0].evidence.length.startswith("any, chosen as for 4096")
    # No kernel of PyTorch's: they would read a mask for each pair, and take no sinks and no softcap.
    assert chosen != "untouched"
    assert form.name == "causal" or not chosen.startswith("sdpa_")
