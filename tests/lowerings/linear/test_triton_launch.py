"""How the Triton kernels of linear attention are launched, in which passes, and what they keep."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_op, triton_ops, triton_passes
from attn_compiler.lowerings.linear.triton_passes import Pieces
from attn_compiler.lowerings.linear.triton_sizes import LinearSizes
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from attn_compiler.lowerings.shared.launching.dry_run import noting
from tests.lowerings.linear.kernels.bounds import within_bounds
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS, furthest, problem
from tests.thinned import further

pytest.importorskip("triton")

# The forward kernels compute the recurrence.
_FORMS = pytest.mark.parametrize("name", list(FORMS))
_FLOAT = 5e-6


@_FORMS
@pytest.mark.parametrize("length", [1, 70])
def test_a_state_and_a_skip_may_be_absent(name: str, length: int) -> None:
    form = FORMS[name]
    roles = tuple(role for role in form.roles if role not in ("state", "D"))
    given = dict(zip(form.roles, problem(form, (length, 2, 2, 16, 16)), strict=True))
    short = dataclasses.replace(form, roles=roles)
    assert max(furthest(short, [given[role] for role in roles]).values()) < _FLOAT


@_FORMS
def test_no_tokens_leave_the_state(name: str) -> None:
    form = FORMS[name]
    given = dict(zip(form.roles, problem(form, (0, 2, 2, 16, 16)), strict=True))
    out, last = triton_op.run(list(given.values()), form.text)
    assert out.numel() == 0
    assert torch.equal(last, given["state"] if "state" in given else torch.zeros_like(last))


@_FORMS
def test_dtypes_are_the_function_own(name: str) -> None:
    form = dataclasses.replace(FORMS[name], out_dtype="float16", state_dtype="float16")
    given = problem(form, (40, 2, 2, 16, 16), dtypes=dict.fromkeys(("q", "k", "v", "x", "B", "C"), torch.float16))
    out, last = triton_op.run(given, form.text)
    assert (out.dtype, last.dtype) == (torch.float16, torch.float16)
    found = furthest(form, given)
    assert max(found.values()) < 2e-3, found


@_FORMS
@pytest.mark.parametrize("length", [1, 70])
def test_what_lies_beside_an_operand_is_not_read(name: str, length: int) -> None:
    """Operands are parts of larger tensors, whose other numbers are no numbers."""
    form = FORMS[name]
    given = problem(form, (length, 2, 4, 16, 24))
    apart = []
    for x in given:
        if x.dim() < 2:
            apart.append(x.detach().clone().requires_grad_())
            continue
        around = x.new_full([size + 3 for size in x.shape], math.nan)
        inner = around[tuple(slice(1, 1 + size) for size in x.shape)]
        inner.copy_(x.detach())
        apart.append(inner.detach().requires_grad_())
    found = furthest(form, apart)
    assert max(found.values()) < _FLOAT, found


@_FORMS
@pytest.mark.parametrize("length", [1, 70])
def test_rows_of_channels_may_lie_apart(name: str, length: int) -> None:
    form = FORMS[name]
    given = problem(form, (length, 2, 2, 16, 16))
    turned = [x.detach().mT.contiguous().mT if x.dim() > 2 else x.detach() for x in given]
    outs, wanted = triton_op.run(turned, form.text), definition(form, [x.detach() for x in given])
    torch.testing.assert_close(outs, wanted, rtol=1e-4, atol=1e-5)


def test_nothing_of_a_row_reaches_another() -> None:
    form = FORMS["delta"]
    given = [x.detach() for x in problem(form, (70, 2, 2, 16, 16))]
    spoiled = [x.clone() for x in given]
    for x in spoiled:
        x[1] = math.nan
    out, last = triton_op.run(spoiled, form.text)
    wanted = triton_op.run(given, form.text)
    assert torch.equal(out[0], wanted[0][0])
    assert torch.equal(last[0], wanted[1][0])
    assert bool(out[1].isnan().any())


# A long sequence of few heads goes in pieces, with the states, results and gradients that it has as one.
_HALF = dict.fromkeys(("q", "k", "v", "x", "B", "C", "beta"), torch.bfloat16)


def _sizes(length: int, heads: int, dim_k: int = 128, batch: int = 1) -> LinearSizes:
    q, v = (
        torch.empty(batch, length, heads, dim_k, device="meta"),
        torch.empty(batch, length, heads, 128, device="meta"),
    )
    return LinearSizes.of(q, v, is_half=True)


@pytest.mark.parametrize(
    ("sizes", "is_delta", "many"),
    [
        (_sizes(32768, 32), True, 1),
        (_sizes(32768, 16), True, 1),
        (_sizes(32768, 8), True, 4),
        (_sizes(32768, 4), True, 8),
        (_sizes(32768, 8), False, 8),
        (_sizes(32768, 1), False, 64),
        (_sizes(2048, 1), True, 4),
        (_sizes(1024, 1), True, 1),
        (_sizes(32768, 1, batch=8), True, 4),
        (_sizes(32768, 1, dim_k=256), True, 1),
        (_sizes(0, 1), True, 1),
        (dataclasses.replace(_sizes(1024, 1), batch=0), True, 1),
    ],
)
def test_there_are_pieces_where_processors_would_be_idle(sizes: LinearSizes, is_delta: bool, many: int) -> None:
    found = Pieces.of(sizes, 132, is_delta=is_delta)
    assert found.many == many
    assert (found.many - 1) * found.chunks < max(sizes.chunks, 1)
    assert found.many * found.chunks >= sizes.chunks


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_passes, "_SHORTEST", 1)
    monkeypatch.setattr(triton_passes, "_FEWEST", 2)


@pytest.mark.in_turns
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    ("name", "has_state"), [("delta", True), ("channel", False), ("ssd", True), ("delta", False), ("ssd", False)]
)
@pytest.mark.parametrize(("length", "batch", "processors"), [(330, 2, 1000), (600, 1, 30), (450, 1, 24)])
def test_pieces_give_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, name: str, length: int, batch: int, processors: int, has_state: bool
) -> None:
    monkeypatch.setattr(triton_passes, "_PROCESSORS", processors)
    form = FORMS[name]
    given = problem(form, (length, 1, 2, 16, 24), batch=batch)
    if not has_state:
        given = [x for role, x in zip(form.roles, given, strict=True) if role != "state"]
        form = dataclasses.replace(form, roles=tuple(role for role in form.roles if role != "state"))
    with within_bounds():
        found = furthest(form, given)
    assert max(found.values()) < 2e-5, found


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("name", further(list(FORMS), daily=["delta", "ssd"]))
def test_pieces_give_what_the_whole_gives_in_bfloat16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    form = FORMS[name] if name == "ssd" else dataclasses.replace(FORMS[name], out_dtype="bfloat16")
    given = problem(form, (330, 1, 1, 16, 24), dtypes=_HALF, batch=1)
    every = []
    for processors in (1, 1000):
        monkeypatch.setattr(triton_passes, "_PROCESSORS", processors)
        with with_bfloat16():
            outs = triton_op.run(given, form.text)
            noise = [torch.ones_like(x) for x in outs]
            every.append([*outs, *torch.autograd.grad(outs, given, noise)])
    for one, other in zip(*every, strict=True):
        within = 1e-6 if one.dtype == torch.float32 else 1e-3
        assert float((one.double() - other.double()).norm() / one.double().norm()) < within


# `linear_chunks` as torch.compile sees it.
_OPS: Any = triton_ops._OPS


def _given(name: str, length: int, *, with_state: bool) -> tuple[Any, ...]:
    x = dict(zip(FORMS[name].roles, problem(FORMS[name], (length, 2, 4, 16, 24)), strict=True))
    state = x.get("state") if with_state else None
    if name != "ssd":
        return x["q"], x["k"], x["v"], x["g"], x["beta"], None, state, FORMS[name].text
    steps = x["dt"].detach().abs().requires_grad_()
    decay = (-steps.detach()).requires_grad_()
    return x["C"], x["B"], x["x"], decay, steps, x["D"], state, FORMS[name].text


@pytest.mark.parametrize(
    ("batch", "is_noted", "expected"),
    [
        (1, False, ["other after now", "states on now", "reverse on other", "now after other"]),
        (2, False, ["states on now", "reverse on now"]),
        (1, True, ["states on now", "reverse on now"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_passes_of_a_backward_run_at_once(
    monkeypatch: pytest.MonkeyPatch, batch: int, is_noted: bool, expected: list[str], fails: bool
) -> None:
    """The streams join even if the second pass can't be launched."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} after {other.name}")

    current = [Stream("now")]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    def run(name: str) -> None:
        log.append(f"{name} on {current[-1].name}")
        if fails and name == "reverse":
            raise RuntimeError("a launch failed")

    monkeypatch.setattr(triton_passes, "processors", lambda device: 132)
    monkeypatch.setattr(triton_passes, "_stream", lambda device, thread: Stream("other"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    for name in ("states", "reverse"):
        monkeypatch.setattr(triton_passes, name, lambda *_, name=name: run(name))
    sizes = LinearSizes.of(torch.empty(batch, 700, 16, 128), torch.empty(batch, 700, 32, 128), is_half=True)
    call = SimpleNamespace(same=SimpleNamespace(device=torch.device("cuda", 0)), sizes=sizes, is_delta=True)
    with (
        noting(lambda *_: None) if is_noted else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match="a launch failed") if fails else contextlib.nullcontext(),
    ):
        triton_passes.passes(cast(LinearTensors, call))
    assert log == expected


@_FORMS
@pytest.mark.parametrize("case", further([(20, True), (1, True), (70, False)], daily=[(20, True)]), ids=str)
def test_the_op_is_as_pytorch_wants_ops(name: str, case: tuple[int, bool]) -> None:
    length, with_state = case
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_OPS.linear_chunks.default, _given(name, length, with_state=with_state), test_utils=checks)


@_FORMS
def test_the_fake_of_the_gradient_is_what_it_gives(name: str) -> None:
    given = _given(name, 70, with_state=True)
    operands = [x.detach() if isinstance(x, Tensor) else x for x in given]
    out, last = _OPS.linear_chunks(*operands)
    found = _OPS.linear_chunks_backward(torch.ones_like(out), torch.ones_like(last), *operands)
    fakes = triton_ops._fake_backward(out, last, *operands)
    for one, fake in zip(found, fakes, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (fake.shape, fake.dtype, fake.stride())


@_FORMS
def test_a_state_that_q_alone_wants_gradients_of_has_none(name: str) -> None:
    """As in eager mode: the last state is made of all operands but q and the skip."""
    given = [x.detach() if isinstance(x, Tensor) else x for x in _given(name, 20, with_state=True)]
    for at, wants in ((0, False), (1, True)):
        mine = [x.clone().requires_grad_(i == at) if isinstance(x, Tensor) else x for i, x in enumerate(given)]
        out, last = _OPS.linear_chunks(*mine)
        assert (out.requires_grad, last.requires_grad) == (True, wants)
        (found,) = torch.autograd.grad(out.float().sum(), [mine[at]])
        assert bool(found.any())


# Gradients of what has no tokens, and of results whose gradients lie in any way.
def test_no_tokens_have_the_gradient_of_the_state() -> None:
    form = FORMS["delta"]
    given = dict(zip(form.roles, problem(form, (0, 2, 2, 16, 16)), strict=True))
    _, last = triton_op.run(list(given.values()), form.text)
    noise = torch.randn_like(last)
    (found,) = torch.autograd.grad(last, [given["state"]], noise)
    assert torch.equal(found, noise)


def test_the_gradient_of_a_result_may_lie_in_any_way() -> None:
    form = FORMS["delta"]
    given = problem(form, (70, 2, 2, 16, 16))
    out, _ = triton_op.run(given, form.text)
    noise = torch.randn_like(out)
    plain = torch.autograd.grad(out, given, noise, retain_graph=True)
    turned = torch.autograd.grad(out, given, noise.mT.contiguous().mT)
    for one, other in zip(plain, turned, strict=True):
        assert torch.equal(one, other)


# A call's tensors by name, and calls that differ from it in some of them.
def _call(name: str = "delta") -> LinearTensors:
    form = FORMS[name]
    given = dict(zip(form.roles, [x.detach() for x in problem(form, (70, 2, 4, 16, 24))], strict=True))
    operands = {key: given[key] for key in ("q", "k", "v", "g", "beta")}
    return LinearTensors.of("linear_chunks", {**operands, "skip": None, "first": given["state"]}, form.text)


def test_absent_tensors_have_no_name() -> None:
    assert set(_call().named) == {"q", "k", "v", "g", "beta", "first"}


def test_numbers_say_that_a_sequence_is_one_piece() -> None:
    numbers = _call().numbers
    assert (numbers["pieces"], numbers["of_piece"], numbers["WIDE"]) == (1, 2, 32)
    assert (numbers["OF_OUT"], numbers["DELTA"], numbers["scale"]) == (0, True, 0.25)


def test_a_call_with_other_tensors_leaves_the_first_as_it_is() -> None:
    call, other = _call(), torch.zeros(1)
    assert call.having(first=other).named["first"] is other
    assert "first" not in call.without("first", "never").named
    assert call.named["first"] is not other
