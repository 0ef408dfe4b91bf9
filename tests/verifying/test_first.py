"""The first call and the first backward: what the graph gives, when it is compared, what is held, and the model's run."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.reasons.errors import AttnCompilerWarning, CompileFailed, VerificationMismatch
from attn_compiler.verifying import first, interpreting, whole
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.watching import Arrived
from attn_compiler.verifying.whole import Called, fingerprint
from tests.passes.compiling import compiled
from tests.verifying import training as models
from tests.verifying.planning import LENGTH, SHAPE, Tensor, causal, planned
from tests.verifying.training import assert_all_verified, assert_verified, checked, found, loss, qkv, trained


def _writes_out(q: Tensor, k: Tensor, v: Tensor, length: Tensor, total: Tensor) -> Tensor:
    out = causal(q, k, v)
    kept = out * 2
    out.mul_(3)
    return out + kept


def _writes_inputs(q: Tensor, k: Tensor, v: Tensor, length: Tensor, total: Tensor) -> Tensor:
    mask = torch.arange(LENGTH) < length
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, :].expand(LENGTH, LENGTH))
    length.add_(1)
    total.copy_(out)
    return out


def _writes_mask(q: Tensor, k: Tensor, v: Tensor, length: Tensor, mask: Tensor) -> Tensor:
    """The site reads what the mask held before; a compiled graph that moved the write up does not."""
    x = q.sin()
    out = F.scaled_dot_product_attention(x, k, v, attn_mask=mask[0, 0, :, :LENGTH])
    mask.zero_()
    return out


@pytest.mark.parametrize(
    ("function", "forgotten", "what"),
    [
        (_writes_out, "mul_", "output 0 of the graph"),
        (_writes_inputs, "add_", "length as the graph left it"),
        (_writes_inputs, "copy_", "total as the graph left it"),
        (_writes_mask, "zero_", "output 0 of the graph"),
    ],
)
def test_writes_that_the_compiled_graph_forgets_are_found(function: Any, forgotten: str, what: str) -> None:
    held = planned(function, *qkv(grad=False), torch.tensor(4), torch.randn(SHAPE))
    (node,) = (n for n in held.module.graph.nodes if n.target == forgotten)
    if function is _writes_mask:
        next(n for n in held.module.graph.nodes if n.target == "sin").append(node)
    else:
        node.replace_all_uses_with(node.args[0])
        held.module.graph.erase_node(node)
    held.module.recompile()
    function = checked(held)
    for _ in range(2):
        # Planning has run the graph, and so has the call before.
        for x in held.args:
            x.normal_() if x.is_floating_point() else x.fill_(4)
        with pytest.raises(VerificationMismatch) as caught:
            function(*held.args)
        assert caught.value.what == what


# ---- when, and what is held -----------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    seen: list[weakref.ref[Tensor]] = []
    real = interpreting.isolated

    def isolated(args: Any, shared: Any) -> list[Any]:
        made = real(args, shared)
        seen.extend(weakref.ref(x) for x in made if isinstance(x, Tensor))
        return made

    monkeypatch.setattr(interpreting, "isolated", isolated)
    return seen


def test_two_backwards_and_two_calls() -> None:
    model, inputs = compiled(causal, verify=True), qkv()
    out = model(*inputs)
    other = model(*(x.detach().cos().requires_grad_() for x in inputs))
    loss(out).backward(retain_graph=True)
    (loss(out) * 2 + loss(other)).backward()
    assert_all_verified()
    loss(causal(*(again := qkv()))).backward()
    torch.testing.assert_close(inputs[0].grad, again[0].grad * 3)


@pytest.mark.parametrize("grad", [False, True])
def test_the_first_backward_is_compared_whenever_it_comes(monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    runs: list[Any] = []
    real = whole.check_gradients
    monkeypatch.setattr(whole, "check_gradients", lambda *args: runs.append(args) or real(*args))
    model = compiled(causal, verify=True)
    with torch.set_grad_enabled(grad):
        for _ in range(3 if grad else 1):
            model(*qkv())
    assert found("graph gradients") == []
    for _ in range(3):
        loss(model(*qkv())).backward()
    assert_verified("graph gradients")
    assert len(runs) == 1


def test_a_backward_is_not_waited_for_without_end(copies: list[weakref.ref[Tensor]]) -> None:
    model = compiled(causal, verify=True)
    for _ in range(first.CALLS_WITHOUT_BACKWARD + 1):
        model(*qkv())
    (check,) = found("graph gradients")
    assert check.skipped == "none of the first 8 calls was followed by a backward"
    before = len(copies)
    model(*qkv())
    assert len(copies) == before


@pytest.mark.in_turns
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_nothing_is_held_afterwards(copies: list[weakref.ref[Tensor]], inner: str, backward: bool) -> None:
    out = compiled(causal, verify=True, inner=inner)(*qkv())
    gc.collect()
    assert any(ref() is not None for ref in copies)
    if backward:
        loss(out).backward()
    else:
        del out
    gc.collect()
    assert [ref() for ref in copies] == [None] * len(copies)


@pytest.mark.parametrize("where", ["run", "check"])
def test_a_check_that_fails_itself_is_a_warning_and_raises_if_strict(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    place = (first, "run_checks") if where == "run" else (whole, "check_gradients")
    monkeypatch.setattr(*place, broken)
    inputs, again = qkv(), qkv()
    model = compiled(causal, verify=True, strict=False)
    with pytest.warns(AttnCompilerWarning, match="failed to run the check.*no memory.*is not verified. To reproduce"):
        loss(model(*inputs)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnCompilerWarning)
        loss(model(*inputs)).backward()
    (loss(causal(*again)) * 2).backward()
    torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in again])
    with pytest.raises(CompileFailed, match="OutOfMemoryError: no memory"):
        trained(causal, *qkv())


# ---- the model's own graph again ------------------------------------------------------------------------------------

SIGNS = torch.tensor([1.0, -1.0, 2.0, -2.0])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (SIGNS, SIGNS.flip(0), False),
        (SIGNS, -SIGNS, False),
        (SIGNS, SIGNS.roll(1), False),
        (SIGNS, SIGNS.index_fill(0, torch.tensor(2), torch.nan), False),
        (SIGNS, SIGNS + torch.tensor([0.0, 0.0, 1e-3, 0.0]), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), False),
        (torch.tensor([True, False]), torch.tensor([False, True]), False),
        (SIGNS, SIGNS.clone(), True),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), True),
        (torch.empty(0, 3), torch.ones(2).to_sparse(), True),
    ],
)
def test_fingerprints(one: Tensor, other: Tensor, equal: bool) -> None:
    """Sums alone do not tell a write."""
    assert (fingerprint(one) == fingerprint(other)) == equal


def _counted(q: Tensor, k: Tensor, v: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return causal(q, k, v) * counter


def test_a_run_leaves_the_inputs_alone_and_tells_how_it_left_them() -> None:
    inputs = [*qkv(grad=False), torch.tensor(3.0)]
    held = planned(_counted, *inputs)
    place, called = held.plan.may_write.index(True), Called.copied(held.plan, held.args)
    start = float(held.args[place])
    for _ in range(2):
        ran = whole.run_model(called)
        assert float(ran.inputs[place]) == start + 1
        torch.testing.assert_close(ran.outs[0], causal(*inputs[:3]) * (start + 1))
    assert float(held.args[place]) == start
    assert called.apart(ran) is None
    out, left = whole.results(held.plan, ran.outs, ran.inputs)
    assert out is ran.outs[0]
    assert left is ran.inputs[place]


def test_gradients_are_those_of_what_an_input_held_before_and_what_was_written_is_not_written_twice() -> None:
    """The gradient goes wrong in every arithmetic alike otherwise: each run starts from the inputs of the call."""
    inputs, gradient = qkv(), torch.randn(SHAPE)
    held = planned(lambda q, k, v: causal(q.sin(), k, v), *inputs)
    called = Called.copied(held.plan, held.args)
    plain = Arrived(outputs={0: gradient}, inputs={})
    expected = torch.autograd.grad(causal(inputs[0].sin(), *inputs[1:]), inputs, gradient)
    torch.testing.assert_close(list(whole.run_model(called, backward=plain).gradients), list(expected))
    written = Arrived(outputs={0: gradient}, inputs={}, written={1: torch.zeros(SHAPE)})
    one, other = (whole.run_model(called, backward=written) for _ in range(2))
    assert torch.equal(one.outs[0], other.outs[0])
    assert whole.overwrites_saved(called, written)
    assert not whole.overwrites_saved(called, plain)


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("function", [causal, models.autocast])
def test_an_exact_run_is_twice_as_wide_and_without_autocast(
    function: Any, dtype: torch.dtype, wide: torch.dtype
) -> None:
    inputs = qkv(dtype=dtype, grad=False)
    held = planned(function, *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        called = Called.copied(held.plan, held.args)
    ((out,), (noisy,)) = (whole.rerun(called, noise) for noise in (None, Noise(seed=1)))
    assert out.dtype == wide
    exact = causal if function is causal else models.softmaxed
    torch.testing.assert_close(out, exact(*(x.to(wide) for x in inputs)), rtol=1e-5, atol=1e-6)
    assert 0 < float((noisy - out).abs().max()) < 0.1
