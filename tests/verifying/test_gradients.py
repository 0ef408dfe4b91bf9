"""The first backward, end to end: right models pass, and a gradient that is wrong raises where it arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting import verifications as results
from attn_compiler.verifying import whole
from tests.passes.compiling import compiled, mark
from tests.verifying.planning import planned
from tests.verifying.training import (
    BATCH,
    DTYPES,
    HEADS,
    IDS,
    LENGTH,
    PADDING,
    SHAPE,
    Model,
    Tensor,
    assert_all_verified,
    assert_verified,
    autocast,
    causal,
    checked,
    checkpointed,
    found,
    grouped,
    loss,
    qkv,
    softcapped,
    softmaxed,
    trained,
    two_layers,
    with_sinks,
    with_table,
)

pytestmark = pytest.mark.usefixtures("nothing_kept")


# ---- what is right ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    function: Callable[..., Tensor]
    more: tuple[int, ...] | None = None
    kv_heads: int = HEADS
    lowering: str = "sdpa_cpu_flash"
    sites: int = 1


CASES = [
    Case(causal),
    Case(softmaxed),
    Case(grouped, kv_heads=2),
    Case(softcapped, lowering="reference"),
    Case(with_sinks, (HEADS,), lowering="reference"),
    Case(with_table, (2 * LENGTH, HEADS), lowering="reference"),
    Case(checkpointed),
    Case(two_layers, sites=2),
    Case(autocast),
    Case(causal, lowering="math"),
]


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function.__name__}-{case.lowering}")
def test_right_gradients_pass(case: Case, dtype: torch.dtype) -> None:
    more = [torch.randn(case.more).to(dtype).requires_grad_()] if case.more else []
    trained(case.function, *qkv(dtype=dtype, kv_heads=case.kv_heads), *more, lowering=case.lowering)
    assert_all_verified(case.sites)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("bert", [False, True], ids=["llama", "bert"])
def test_right_models_pass(bert: bool, dtype: torch.dtype) -> None:
    """Of the bias of BERT's keys the gradient is nothing but rounding."""
    model = Model(bert=bert).to(dtype)
    trained(model, IDS, PADDING, lowerings=["sdpa_cpu_flash", "math"])
    assert_all_verified(2)
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_are_those_without_the_option() -> None:
    grads = []
    for verify in (False, True):
        inputs = qkv()
        loss(compiled(checkpointed, verify=verify)(*inputs)).backward()
        grads.append([x.grad for x in inputs])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("function", [causal, softmaxed, checkpointed], ids=lambda f: f.__name__)
def test_dynamic_sizes(function: Callable[..., Tensor]) -> None:
    trained(function, *(mark(x, (LENGTH, BATCH)) for x in qkv()))
    assert_all_verified()


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_inner_compilers(inner: str) -> None:
    trained(two_layers, *qkv(), inner=inner)
    assert_all_verified(2)


def test_one_of_two_outputs_is_used() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        x = causal(q, k, v)
        return x, x.sin() @ k.mT

    for used in (0, 1):
        results.forget()
        loss(compiled(function, verify=True)(*qkv())[used]).backward()
        assert_all_verified()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_outputs_that_are_made_from_each_other(inner: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        x = causal(q, k, v)
        return x, x.view(BATCH, -1), x.sum(), x

    outs = compiled(function, verify=True, inner=inner)(*qkv())
    sum(loss(out) for out in outs).backward()  # type: ignore[union-attr]
    assert_all_verified()


def test_uses_beside_the_graph_do_not_count() -> None:
    """The inputs have gradients from elsewhere too, and one is no leaf."""
    q, k, v = qkv()
    scaled = q * 2
    out = compiled(causal, verify=True)(scaled, k, v)
    (loss(out) + loss(k.square()) + loss(scaled.sin()) + loss(causal(scaled, k, v))).backward()
    assert_all_verified()


def test_outputs_that_are_no_results_of_the_attention() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        x = causal(q, k, v)
        return x, q, q.view(BATCH, -1), x.detach(), x.shape[0], x.argmax(-1), k.transpose(0, 1)

    outs = compiled(function, verify=True)(*qkv())
    sum(loss(outs[i]) for i in (0, 1, 2, 6)).backward()  # type: ignore[union-attr]
    assert_all_verified()


class Doubled(torch.autograd.Function):
    """Its gradient is its own: three times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 6


def test_gradients_that_the_model_defines() -> None:
    trained(lambda q, k, v: causal(Doubled.apply(q), k, v), *qkv())
    assert_all_verified()


def test_input_written_by_the_caller_through_data() -> None:
    """The backward of `sin` reads its input again, and so does eager's."""
    q, k, v = qkv()
    x = q * 1
    out = compiled(lambda q, k, v: causal(q.sin() * 2, k.sin(), v.sin()), verify=True)(x, k, v)
    x.data.add_(1)
    loss(out).backward()
    assert_all_verified()


def test_output_written_by_the_caller_through_data() -> None:
    out = compiled(lambda q, k, v: causal(q, k, v).sigmoid(), verify=True)(*qkv())
    out.data.mul_(0.5)
    loss(out).backward()
    assert_all_verified()


def test_what_the_caller_wrote_is_not_written_twice() -> None:
    """The gradient goes wrong in every arithmetic alike otherwise: each run starts from the inputs of the call."""
    held = planned(lambda q, k, v: causal(q.sin(), k, v), *qkv())
    called = whole.Called.copied(held.plan, held.args)
    backward = whole.SeenBackward(arrived={0: torch.ones(SHAPE)}, written={1: torch.zeros(SHAPE)})
    one, other = (whole.run_model(called, backward=backward) for _ in range(2))
    assert torch.equal(one.outs[0], other.outs[0])
    assert whole.overwrites_saved(called, backward)
    assert not whole.overwrites_saved(called, whole.SeenBackward(arrived=backward.arrived))


def test_parameter_written_between_forward_and_backward() -> None:
    model = Model()
    out = compiled(model, verify=True, lowerings=["sdpa_cpu_flash", "math"])(IDS, PADDING)
    model.layers[0].norm.weight.data.mul_(2)
    loss(out).backward()
    (check,) = found("graph gradients")
    assert check.skipped is not None
    assert "layers.0.norm.weight" in check.skipped


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_inputs_that_the_graph_writes_to(inner: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q.mul_(2)
        return causal(q, k, v)

    q, k, v = qkv()
    x = q * 1
    out = compiled(function, verify=True, inner=inner)(x, k, v)
    (loss(out) + loss(x)).backward()
    assert_verified("output", "graph outputs")
    (check,) = found("graph gradients")
    assert check.skipped is None or "after it wrote to it" in check.skipped
    assert inner == "eager" or check.skipped is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_the_caller(use_reentrant: bool) -> None:
    model = compiled(causal, verify=True)
    q, k, v = qkv()
    loss(checkpoint(model, q, k, v, use_reentrant=use_reentrant)).backward()
    assert_verified("graph gradients")


def test_autocast_of_the_caller() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(softmaxed, verify=True)(*qkv())
    assert out.dtype == torch.bfloat16
    loss(out).backward()
    assert_all_verified()


def test_hooks_of_others_run() -> None:
    model = Model()
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.append(name) or g * 0)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    trained(model, IDS, PADDING, lowerings=["sdpa_cpu_flash", "math"])
    assert_all_verified(2)
    assert len(seen) == 2 * len(list(model.parameters()))
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


# ---- what is wrong ------------------------------------------------------------------------------------------------


def test_an_operand_that_is_written_after_the_kernel_has_read_it() -> None:
    """The output is right: the backward reads other numbers than the forward."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q.sin(), k.cos(), v.cos()) + 1

    held = planned(function, *qkv())
    graph = held.module.graph
    (root,) = (node for node in graph.nodes if node.name.startswith("cos") and str(node.args[0]) == "l_k_")
    last = next(iter(graph.find_nodes(op="output")))
    with graph.inserting_before(last):
        data = graph.call_function(torch._C._autograd._get_data_attr, (root,))
        graph.call_method("add_", (data, 1.0))
    held.module.recompile()
    (out,) = checked(held)(*held.args)
    with pytest.raises(VerificationMismatch) as caught:
        loss(out).backward()
    assert caught.value.what in ("gradient of l_q", "gradient of q", "gradient of k")
    assert caught.value.site.startswith("graph ")
    assert "attention at" in caught.value.formula
    assert caught.value.__notes__


def test_a_gradient_that_is_lost() -> None:
    held = planned(lambda q, k, v: causal(q, k.cos(), v), *qkv())
    (root,) = (node for node in held.module.graph.nodes if node.name.startswith("cos"))
    with held.module.graph.inserting_after(root):
        detached = held.module.graph.call_method("detach", (root,))
    root.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    held.module.recompile()
    (out,) = checked(held)(*held.args)
    with pytest.raises(VerificationMismatch, match="gradient of k"):
        loss(out).backward()


def test_a_softmax_in_float64_below_float32() -> None:
    """`math` keeps the model's own dtype for it."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 200).softmax(-1, dtype=torch.float64).to(v.dtype) @ v

    trained(function, *qkv(), lowerings=["math"])
    assert_all_verified()


def test_numbers_of_thousands_that_cancel_in_float64() -> None:
    """No run is wider than float64: its own roundings tell what is allowed."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
        scores = q @ k.mT + torch.where(i * 2 >= j, 30000.0, 0.0).to(q.dtype)
        return (scores + torch.where(i + 1 > j, -30000.0, 0.0).to(q.dtype)).softmax(-1) @ v

    compiled(function, verify=True, lowerings=["reference"])(*(x.detach().double() for x in qkv()))
    assert_verified("output", "graph outputs")


def test_rows_without_keys() -> None:
    """The loss is put on them, too."""

    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        mask = torch.zeros(real.shape).masked_fill(real == 0, torch.finfo(torch.float32).min)
        return (q @ k.mT * 0.3 + mask[:, None, None, :]).softmax(-1) @ v

    real = torch.tensor([[1] * LENGTH, [0] * LENGTH])
    for lowering in ("reference", "math", "triton"):
        results.forget()
        trained(function, *qkv(), real, lowering=lowering)
        assert_verified("output", "graph gradients")


# ---- what can't be compared ---------------------------------------------------------------------------------------
