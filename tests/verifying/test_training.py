"""A step of training, end to end: right ones are verified, a wrong gradient raises where it arrives, and what is held when."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils.checkpoint import checkpoint

from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting import verifications as results
from tests.passes.compiling import compiled, mark
from tests.verifying import training as models
from tests.verifying.planning import LENGTH, Layers, Planned, Tensor, causal, planned
from tests.verifying.training import assert_all_verified, assert_verified, checked, found, loss, qkv, trained

BOTH = {"lowerings": ["sdpa_cpu_flash", "math"]}
REFERENCE = {"lowering": "reference"}


# ---- what is right ------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Its gradient is its own: three times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 6


def partly_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is what it holds at the site, whatever of its making the kernel reads in place of it."""
    mask = ((torch.arange(LENGTH, device=q.device)[None, :] >> 1) > 0).long()
    mask.select(1, 0).fill_(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())


def in_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`math` keeps the model's own dtype for it."""
    return (q @ k.mT * 200).softmax(-1, dtype=torch.float64).to(v.dtype) @ v


def with_rows_without_keys(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """The loss is put on them, too."""
    mask = torch.zeros(real.shape, dtype=q.dtype).masked_fill(real == 0, torch.finfo(q.dtype).min)
    return (q @ k.mT * 0.3 + mask[:, None, None, :]).softmax(-1) @ v


def cancelling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No run is wider than float64: its own roundings tell what is allowed."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    scores = q @ k.mT + torch.where(i * 2 >= j, 30000.0, 0.0).to(q.dtype)
    return (scores + torch.where(i + 1 > j, -30000.0, 0.0).to(q.dtype)).softmax(-1) @ v


KEYLESS = torch.tensor([[1] * LENGTH, [0] * LENGTH])


def _case(function: Any, more: Any = (), sites: int = 1, kv_heads: int = models.HEADS, **options: Any) -> Any:
    return pytest.param(
        function, more, sites, kv_heads, options, id=f"{getattr(function, '__name__', function)}-{options}"
    )


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", models.DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("function", "more", "sites", "kv_heads", "options"),
    [
        _case(causal),
        _case(models.softmaxed),
        _case(models.grouped, kv_heads=2),
        _case(models.softcapped, **REFERENCE),
        _case(models.with_sinks, (models.HEADS,), **REFERENCE),
        _case(models.with_table, (2 * LENGTH, models.HEADS), **REFERENCE),
        _case(models.checkpointed),
        _case(models.two_layers, sites=2),
        _case(models.autocast),
        _case(causal, lowering="math"),
        _case(in_float64, lowering="math"),
        _case(lambda q, k, v: causal(Doubled.apply(q), k, v)),
        _case(partly_written, lowerings=["triton", "math"]),
        *(_case(with_rows_without_keys, KEYLESS, lowering=x) for x in ("reference", "math", "triton")),
    ],
)
def test_right_gradients_pass(
    function: Any, more: Any, sites: int, kv_heads: int, options: Any, dtype: torch.dtype
) -> None:
    # Triton, interpreted, takes float32 alone.
    dtype = torch.float32 if more is KEYLESS else dtype
    given = [more] if isinstance(more, Tensor) else [torch.randn(more).to(dtype).requires_grad_()] if more else []
    trained(function, *qkv(dtype=dtype, kv_heads=kv_heads), *given, **options)
    if more is KEYLESS:
        assert_verified("output", "graph gradients")
    else:
        assert_all_verified(sites)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", models.DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("bert", [False, True], ids=["llama", "bert"])
def test_right_models_pass(bert: bool, dtype: torch.dtype) -> None:
    """Of the bias of BERT's keys the gradient is nothing but rounding. Hooks of others run."""
    model = models.Model(bert=bert).to(dtype)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.append(name) or g * 0)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    trained(model, models.IDS, models.PADDING, **BOTH)
    assert_all_verified(2)
    assert len(seen) == 2 * len(list(model.parameters()))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("function", [causal, models.softmaxed, models.checkpointed], ids=lambda f: f.__name__)
def test_dynamic_sizes(function: Callable[..., Tensor]) -> None:
    trained(function, *(mark(x, (LENGTH, models.BATCH)) for x in qkv()))
    assert_all_verified()


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_inner_compilers_give_the_gradients_without_the_option(inner: str) -> None:
    grads = []
    for verify in (False, True):
        inputs = qkv()
        loss(compiled(models.two_layers, verify=verify, inner=inner)(*inputs)).backward()
        grads.append([x.grad for x in inputs])
    assert_all_verified(2)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def _results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Some are made from each other, and some are no results of the attention."""
    x = causal(q, k, v)
    return (
        x,
        x.sin() @ k.mT,
        x.view(models.BATCH, -1),
        x.sum(),
        x,
        q,
        q.view(models.BATCH, -1),
        k.transpose(0, 1),
        x.detach(),
        x.shape[0],
    )


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2, 3, 4), (0, 5, 6, 7)])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_some_outputs_are_used(inner: str, used: tuple[int, ...]) -> None:
    outs = compiled(_results, verify=True, inner=inner)(*qkv())
    sum(loss(outs[i]) for i in used).backward()  # type: ignore[union-attr]
    assert_all_verified()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_gradients_of_some_inputs_alone(inner: str) -> None:
    """Without a compiler the nodes make no gradient that nobody asks for."""
    inputs = qkv()
    torch.autograd.grad(loss(compiled(causal, verify=True, inner=inner)(*inputs)), inputs[1:2])
    assert_all_verified()
    results.forget()
    q, k, v = qkv()
    trained(causal, q, k.detach(), v.detach())
    assert_all_verified()
    results.forget()
    trained(lambda x: causal(x, x, x), qkv()[0])
    assert_all_verified()


def test_uses_beside_the_graph_do_not_count() -> None:
    """The inputs have gradients from elsewhere too, and one is no leaf."""
    q, k, v = qkv()
    scaled = q * 2
    out = compiled(causal, verify=True)(scaled, k, v)
    (loss(out) + loss(k.square()) + loss(scaled.sin()) + loss(causal(scaled, k, v))).backward()
    assert_all_verified()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_the_caller(use_reentrant: bool) -> None:
    loss(checkpoint(compiled(causal, verify=True), *qkv(), use_reentrant=use_reentrant)).backward()
    assert_verified("graph gradients")


def test_autocast_of_the_caller() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(models.softmaxed, verify=True)(*qkv())
    assert out.dtype == torch.bfloat16
    loss(out).backward()
    assert_all_verified()


def test_numbers_of_thousands_that_cancel_in_float64() -> None:
    compiled(cancelling, verify=True, lowerings=["reference"])(*qkv(dtype=torch.float64, grad=False))
    assert_verified("output", "graph outputs")


# ---- what the caller writes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "written", "write"),
    [
        # The backward of `sin` reads its input again, and so does eager's.
        (lambda q, k, v: causal(q.sin() * 2, k.sin(), v.sin()), "input", lambda x: x.data.add_(1)),
        (lambda q, k, v: causal(q, k, v).sigmoid(), "output", lambda x: x.data.mul_(0.5)),
        (lambda q, k, v: causal(q, k, v) + 1, "output", lambda x: x.mul_(3)),
    ],
)
def test_what_the_caller_writes_is_written_for_the_model_too(function: Any, written: str, write: Any) -> None:
    q, k, v = qkv()
    x = q * 1
    out = compiled(function, verify=True)(x, k, v)
    write(x if written == "input" else out)
    loss(out).backward()
    assert_all_verified()


def _views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without AOTAutograd the write would be to what the kernel saved."""
    return causal(q, k, v).view(models.BATCH, -1)


def _viewed_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (causal(q, k, v) + 1).view(models.BATCH, -1)


def _zeroed_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1
    out = causal(q, k, v)
    k.data.zero_()
    return out


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eager's backward reads the written values, which no gradient is made of; a kernel that saved a copy is not wrong."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.einsum("bhqk,bhkd->bhqd", (q @ k.mT).softmax(-1), v)


def _writes_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q.mul_(2)
    return causal(q, k, v)


@pytest.mark.parametrize(
    ("function", "inner", "write", "why"),
    [
        (_views, "aot_eager", lambda out, v: out.mul_(3), "a view"),
        (_viewed_sum, "eager", lambda out, v: out.mul_(3), "a view"),
        (_heads_first, "aot_eager", lambda out, v: v.data.mul_(2), ".data"),
        (_zeroed_k, "aot_eager", lambda out, v: None, ".data"),
        (_writes_q, "eager", lambda out, v: None, "after it wrote to it"),
        (_writes_q, "aot_eager", lambda out, v: None, None),
    ],
)
def test_gradients_that_can_not_be_told_are_said_to_be_so(
    function: Any, inner: str, write: Any, why: str | None
) -> None:
    q, k, v = qkv()
    x = q * 1
    if function is _heads_first:
        x, k, v = (y.transpose(0, 1).contiguous().detach().requires_grad_() for y in (x, k, v))
    lowerings = ["reference"] if function is _zeroed_k else ["sdpa_cpu_flash"]
    out = compiled(function, verify=True, inner=inner, lowerings=lowerings)(x, k, v)
    write(out, v)
    loss(out).backward()
    assert_verified("graph outputs")
    (check,) = found("graph gradients")
    assert check.skipped is None or (why is not None and why in check.skipped)
    if function is _viewed_sum:
        assert check.skipped is not None


def test_parameter_written_between_forward_and_backward() -> None:
    model = models.Model()
    out = compiled(model, verify=True, **BOTH)(models.IDS, models.PADDING)
    model.layers[0].norm.weight.data.mul_(2)
    loss(out).backward()
    (check,) = found("graph gradients")
    assert check.skipped == "written to between forward and backward: layers.0.norm.weight"


@pytest.mark.parametrize(
    ("function", "options", "why", "of_outputs"),
    [
        (causal, {"lowering": "untouched"}, "every attention is as the model made it", True),
        (lambda q, k, v: causal(F.dropout(q, 0.5), k, v), {}, "the graph draws random numbers", True),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), REFERENCE, "", False),
    ],
)
def test_graphs_that_are_set_apart(function: Any, options: Any, why: str, of_outputs: bool) -> None:
    trained(function, *qkv(), **options)
    for check in (*found("graph outputs"), *found("graph gradients")):
        assert check.skipped is not None
        assert why in check.skipped
    assert [x.skipped is None for x in found("output")] == [of_outputs and not options]


# ---- what is wrong ------------------------------------------------------------------------------------------------


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is off by a factor."""
    return x.detach() + (x - x.detach()) * factor


@pytest.fixture(params=["q", "k", "v"])
def wrong_backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    emit = SdpaCpuFlash.emit
    name: str = request.param

    def wrong(self: Any, emitter: Any, spec: Any, operands: Any) -> Any:
        # bfloat16 has steps of 0.8%, and the rule allows for twice what the model's own is off by.
        scaled = emitter.call(scaled_gradient, getattr(operands, name), 1.1 if spec.dtype == "bfloat16" else 1.05)
        return emit(self, emitter, spec, dataclasses.replace(operands, **{name: scaled}))

    monkeypatch.setattr(SdpaCpuFlash, "emit", wrong)
    return name


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", models.DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    "function", [causal, models.softmaxed, models.checkpointed, Layers()], ids=lambda f: type(f).__name__
)
def test_a_backward_that_is_off_by_a_factor(function: Any, dtype: torch.dtype, wrong_backward: str) -> None:
    """A step that raised is no first step."""
    model = compiled(function, verify=True)
    for _ in range(2):
        with pytest.raises(VerificationMismatch) as caught:
            loss(model(*qkv(dtype=dtype))).backward()
        assert caught.value.what == f"gradient of {wrong_backward}" or function is not causal
        assert "attention at" in caught.value.formula
        assert caught.value.site.startswith("graph ")
    assert found("graph gradients") == []
    assert {x.skipped for x in found("graph outputs")} == {None}


def _rewritten(found: Planned, of_k: Callable[[fx.Graph, fx.Node], fx.Node | None]) -> Any:
    """What the call gives, had the compiled graph changed what it makes of k."""
    graph = found.module.graph
    (root,) = (node for node in graph.nodes if node.name.startswith("cos") and str(node.args[0]) == "l_k_")
    new = of_k(graph, root)
    if new is not None:
        root.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    found.module.recompile()
    (out,) = checked(found)(*found.args)
    return out


def _written_at_last(graph: fx.Graph, root: fx.Node) -> None:
    """The output is right: the backward reads other numbers than the forward."""
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        graph.call_method("add_", (graph.call_function(torch._C._autograd._get_data_attr, (root,)), 1.0))


def _detached(graph: fx.Graph, root: fx.Node) -> fx.Node:
    with graph.inserting_after(root):
        return graph.call_method("detach", (root,))


@pytest.mark.parametrize(("change", "what"), [(_written_at_last, "gradient of q"), (_detached, "gradient of k")])
def test_gradients_of_another_graph_are_found(change: Any, what: str) -> None:
    out = _rewritten(planned(lambda q, k, v: causal(q.sin(), k.cos(), v.cos()) + 1, *qkv()), change)
    with pytest.raises(VerificationMismatch) as caught:
        loss(out).backward()
    assert caught.value.what in (what, "gradient of k")
    assert (caught.value.__notes__ != []) if change is _written_at_last else True
