"""The first call is watched, and its first numbers are compared."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.nn.functional import dropout

from attn_compiler.reasons.errors import AttnCompilerWarning, CompileFailed, VerificationMismatch
from attn_compiler.verifying import first, interpreting, whole
from attn_compiler.verifying.interpreting import Noise
from attn_compiler.verifying.whole import Called, SeenBackward, fingerprint
from tests.passes.compiling import compiled
from tests.verifying.planning import (
    SHAPE as PLANNED_SHAPE,
    Planned,
    causal as planned_causal,
    planned,
    qkv as planned_qkv,
)
from tests.verifying.training import (
    BATCH,
    LENGTH,
    SHAPE,
    Tensor,
    assert_all_verified,
    assert_verified,
    causal,
    checked,
    found,
    loss,
    qkv,
    trained,
)


# When the first call and the first backward are compared, what is held until then, and what a check that fails costs.
def _broken(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


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


def _without(held: Any, method: str) -> Callable[..., Any]:
    """The compiled function, had it forgotten a write."""
    (node,) = (n for n in held.module.graph.nodes if n.target == method)
    node.replace_all_uses_with(node.args[0])
    held.module.graph.erase_node(node)
    held.module.recompile()
    return checked(held)


@pytest.mark.usefixtures("nothing_kept")
def test_two_backwards_through_one_call() -> None:
    inputs = qkv()
    out = compiled(causal, verify=True)(*inputs)
    loss(out).backward(retain_graph=True)
    (loss(out) * 2).backward()
    assert_all_verified()
    _, right = inputs[0].grad, causal(*(again := qkv()))
    loss(right).backward()
    torch.testing.assert_close(inputs[0].grad, again[0].grad * 3)


@pytest.mark.usefixtures("nothing_kept")
def test_two_calls_before_the_backward() -> None:
    model = compiled(causal, verify=True)
    one, other = qkv(), [x.detach().cos().requires_grad_() for x in qkv()]
    (loss(model(*one)) + loss(model(*other))).backward()
    assert_all_verified()


@pytest.mark.usefixtures("nothing_kept")
def test_output_written_by_the_caller() -> None:
    q, k, v = qkv()
    out = compiled(lambda q, k, v: causal(q, k, v) + 1, verify=True)(q, k, v)
    out.mul_(3)
    loss(out).backward()
    assert_all_verified()


@pytest.mark.usefixtures("nothing_kept")
def test_view_written_by_the_caller() -> None:
    """What arrives at it can't be seen then. Without AOTAutograd the write would be to what the kernel saved."""
    out = compiled(lambda q, k, v: causal(q, k, v).view(BATCH, -1), verify=True, inner="aot_eager")(*qkv())
    out.mul_(3)
    loss(out).backward()
    assert_verified("graph outputs")
    (check,) = found("graph gradients")
    assert check.skipped is None or "a view" in check.skipped


@pytest.mark.usefixtures("nothing_kept")
def test_no_gradients_then_gradients() -> None:
    model = compiled(causal, verify=True)
    with torch.no_grad():
        model(*qkv())
    assert found("graph gradients") == []
    loss(model(*qkv())).backward()
    assert_verified("graph gradients")
    with torch.no_grad():
        model(*qkv())
    assert_verified("graph gradients")


@pytest.mark.usefixtures("nothing_kept")
def test_only_the_first_backward_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    real = whole.check_gradients
    monkeypatch.setattr(whole, "check_gradients", lambda *args: runs.append(args) or real(*args))
    model = compiled(causal, verify=True)
    for _ in range(3):
        loss(model(*qkv())).backward()
    assert len(runs) == 1


@pytest.mark.usefixtures("nothing_kept")
def test_a_step_that_raised_is_no_first_step(wrong_backward: str) -> None:
    model = compiled(causal, verify=True)
    for _ in range(2):
        with pytest.raises(VerificationMismatch):
            loss(model(*qkv())).backward()


@pytest.mark.usefixtures("nothing_kept")
def test_an_output_that_is_not_written_to_again() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = causal(q, k, v)
        kept = out * 2
        out.mul_(3)
        return out + kept

    held = planned(function, *qkv(grad=False))
    with pytest.raises(VerificationMismatch) as caught:
        _without(held, "mul_")(*held.args)
    assert caught.value.what == "output 0 of the graph"


@pytest.mark.usefixtures("nothing_kept")
def test_an_input_that_is_not_left_as_the_model_leaves_it() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, length: Tensor, total: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) < length
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, :].expand(LENGTH, LENGTH))
        length.add_(1)
        total.copy_(out)
        return out

    for method, name in (("add_", "length"), ("copy_", "total")):
        held = planned(function, *qkv(grad=False), torch.tensor(4), torch.zeros(SHAPE))
        with pytest.raises(VerificationMismatch) as caught:
            _without(held, method)(*held.args)
        assert caught.value.what == f"{name} as the graph left it"


@pytest.mark.usefixtures("nothing_kept")
def test_a_mask_that_is_read_after_it_was_written() -> None:
    """The site reads what the mask held before; a compiled graph that moved the write up does not."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        x = q.sin()
        out = F.scaled_dot_product_attention(x, k, v, attn_mask=mask)
        mask.zero_()
        return out

    held = planned(function, *qkv(grad=False), torch.randn(LENGTH, LENGTH))
    (write,) = (n for n in held.module.graph.nodes if n.target == "zero_")
    (sin,) = (n for n in held.module.graph.nodes if n.target == "sin")
    sin.append(write)
    held.module.recompile()
    # Planning has run the graph.
    held.args[3].normal_()
    with pytest.raises(VerificationMismatch) as caught:
        checked(held)(*held.args)
    assert caught.value.what == "output 0 of the graph"


@pytest.mark.usefixtures("nothing_kept")
def test_an_untouched_site_is_said() -> None:
    trained(causal, *qkv(), lowering="untouched")
    for subject in ("graph outputs", "graph gradients"):
        (check,) = found(subject)
        assert check.skipped == "every attention is as the model made it"


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("where", ["run", "check"])
def test_a_check_that_fails_itself_is_a_warning(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(
        *((first.running, "run_checks", _broken) if where == "run" else (whole, "check_gradients", _broken))
    )
    inputs = qkv()
    model = compiled(causal, verify=True, strict=False)
    with pytest.warns(
        AttnCompilerWarning,
        match="failed to run the check.*no memory.*is not verified. To reproduce",
    ):
        loss(model(*inputs)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnCompilerWarning)
        loss(model(*inputs)).backward()
    again = qkv()
    (loss(causal(*again)) * 2).backward()
    torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in again])


@pytest.mark.usefixtures("nothing_kept")
def test_strict_raises_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "check_gradients", _broken)
    with pytest.raises(CompileFailed, match="OutOfMemoryError: no memory"):
        trained(causal, *qkv())


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.in_turns
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_nothing_is_held_afterwards(copies: list[weakref.ref[Tensor]], inner: str, backward: bool) -> None:
    inputs = qkv()
    model = compiled(causal, verify=True, inner=inner)
    out = model(*inputs)
    gc.collect()
    assert any(ref() is not None for ref in copies)
    if backward:
        loss(out).backward()
    else:
        del out
    gc.collect()
    assert [ref() for ref in copies] == [None] * len(copies)


@pytest.mark.usefixtures("nothing_kept")
def test_a_call_without_a_backward_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(causal, verify=True)
    for _ in range(3):
        model(*qkv())
    loss(model(*qkv())).backward()
    assert_all_verified()


@pytest.mark.usefixtures("nothing_kept")
def test_a_backward_is_not_waited_for_without_end(copies: list[weakref.ref[Tensor]]) -> None:
    model = compiled(causal, verify=True)
    for _ in range(first.CALLS_WITHOUT_BACKWARD + 1):
        model(*qkv())
    (check,) = found("graph gradients")
    assert check.skipped == "none of the first 8 calls was followed by a backward"
    before = len(copies)
    model(*qkv())
    assert len(copies) == before


# The model's own graph run again.
def test_a_write_changes_a_fingerprint() -> None:
    x = torch.randn(3, 4)
    before = fingerprint(x)
    assert fingerprint(x.clone()) == before
    x.data[2, 1] += 1e-3
    assert fingerprint(x) != before


@pytest.mark.parametrize(
    "change",
    [lambda x: x.flip(0), lambda x: -x, lambda x: x.roll(1), lambda x: x.index_fill(0, torch.tensor(2), torch.nan)],
    ids=["order", "sign", "moved", "nan"],
)
def test_sums_alone_do_not_tell_it(change: object) -> None:
    x = torch.tensor([1.0, -1.0, 2.0, -2.0])
    assert callable(change)
    assert fingerprint(change(x)) != fingerprint(x)


def test_what_is_not_finite_is_the_same_as_itself() -> None:
    x = torch.tensor([torch.nan, torch.inf])
    assert fingerprint(x) == fingerprint(x.clone())


def test_tensors_of_any_kind_have_one() -> None:
    assert fingerprint(torch.empty(0, 3)) == ()
    assert fingerprint(torch.ones(2).to_sparse()) == ()
    assert fingerprint(torch.tensor([1 + 2j]).conj()) != fingerprint(torch.tensor([1 + 2j]))
    assert fingerprint(torch.tensor([True, False])) != fingerprint(torch.tensor([False, True]))


def _written(q: Tensor, k: Tensor, v: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return planned_causal(q, k, v) * counter


def _called(found: Planned) -> Called:
    return Called.copied(found.plan, found.args)


def test_a_run_leaves_the_inputs_alone_and_tells_how_it_left_them() -> None:
    inputs = [*planned_qkv(), torch.tensor(3.0)]
    found = planned(_written, *inputs)
    place = next(i for i, may_write in enumerate(found.plan.may_write) if may_write)
    start = float(found.args[place])
    called = _called(found)
    for _ in range(2):
        ran = whole.run_model(called)
        assert float(ran.inputs[place]) == start + 1
        torch.testing.assert_close(ran.outs[0], planned_causal(*inputs[:3]) * (start + 1))
    assert float(found.args[place]) == start
    out, left = whole.results(found.plan, ran.outs, ran.inputs)
    assert out is ran.outs[0]
    assert left is ran.inputs[place]


def test_gradients_are_those_of_what_an_input_held_before() -> None:
    q, k, v = (x.requires_grad_() for x in planned_qkv())
    found = planned(planned_causal, q, k, v)
    gradient = torch.randn(PLANNED_SHAPE)
    ran = whole.run_model(_called(found), backward=SeenBackward(arrived={0: gradient}))
    expected = torch.autograd.grad(planned_causal(q, k, v), (q, k, v), gradient)
    for mine, theirs in zip(ran.gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_random_numbers_and_shared_memory_set_results_apart() -> None:
    found = planned(lambda q, k, v: planned_causal(dropout(q, 0.5), k, v), *planned_qkv())
    called = _called(found)
    assert "random numbers" in str(called.apart(whole.run_model(called)))
    found = planned(_written, *planned_qkv(), torch.tensor(3.0))
    called = _called(found)
    assert called.apart(whole.run_model(called)) is None


def test_a_parameter_that_is_written_since_is_seen() -> None:
    weight = Parameter(torch.ones(PLANNED_SHAPE[-1]))
    q, k, v = planned_qkv()
    found = planned(lambda q, k, v: planned_causal(q * weight, k, v), q, k, v)
    called = _called(found)
    assert called.changed == []
    weight.data[3] = 2.0
    (place,) = called.changed
    assert called.args[place].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_an_exact_run_is_twice_as_wide(dtype: torch.dtype, wide: torch.dtype) -> None:
    called = _called(planned(planned_causal, *planned_qkv(dtype=dtype)))
    (out,) = whole.rerun(called, None)
    assert out.dtype == wide
    (noisy,) = whole.rerun(called, Noise(seed=1))
    assert 0 < float((noisy - out).abs().max()) < 0.05
