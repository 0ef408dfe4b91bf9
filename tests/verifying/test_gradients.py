"""The first backward, end to end: right models pass, and a gradient that is wrong raises where it arrives."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import verifying
from attn_compiler.errors import AttnCompilerWarning, CompileFailed, VerificationMismatch
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.verifying import Verification, first, gradients, results, whole
from tests.passes.compiling import Compiled, compiled, mark
from tests.verifying.planning import planned

Tensor = torch.Tensor
BATCH, HEADS, LENGTH, DIM = 2, 4, 6, 8
SHAPE = (BATCH, HEADS, LENGTH, DIM)


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    results.forget()
    yield
    torch._dynamo.reset()


def qkv(*, dtype: torch.dtype = torch.float32, kv_heads: int = HEADS, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (SHAPE, *[(BATCH, kv_heads, LENGTH, DIM)] * 2)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def found(subject: str) -> list[Verification]:
    return [v for v in attn_compiler.verifications() if v.subject == subject]


def assert_verified(*subjects: str, sites: int = 1) -> None:
    for subject in subjects:
        checks = found(subject)
        assert [v.skipped for v in checks] == [None] * (1 if subject.startswith("graph") else sites), checks
        assert all(v.elements > 0 for v in checks)


def assert_all_verified(sites: int = 1) -> None:
    assert_verified("output", "graph outputs", "gradient", "graph gradients", sites=sites)


def trained(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Compiled, Any]:
    """One step, verified; the loss weighs every element of the output differently."""
    model = compiled(function, verify=True, **options)
    out = model(*args)
    loss(out).backward()
    return model, out


def loss(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (out.float() * torch.randn(out.shape, generator=generator)).sum()


# ---- models -------------------------------------------------------------------------------------------------------


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(q.shape[-2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=positions <= positions[:, None])


def softmaxed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmaxed(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT * 0.3 / 5).tanh() * 5).softmax(-1) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * 0.3, sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def with_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    apart = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None] + LENGTH - 1
    return (q @ k.mT + F.embedding(apart, table).permute(2, 0, 1)).softmax(-1) @ v


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(causal, q.sin(), k, v, use_reentrant=False) + 1


def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(causal(q, k, v) + q, k, v)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return softmaxed(q, k, v)


class Layer(nn.Module):
    """A pre-norm layer with rotary embedding and few heads of keys, or (bert) a post-norm one with biases."""

    def __init__(self, *, bert: bool) -> None:
        super().__init__()
        size, kv = HEADS * DIM, (HEADS if bert else 2) * DIM
        self.bert = bert
        self.q_proj, self.o_proj = nn.Linear(size, size, bias=bert), nn.Linear(size, size, bias=bert)
        self.k_proj, self.v_proj = nn.Linear(size, kv, bias=bert), nn.Linear(size, kv, bias=bert)
        self.norm = nn.LayerNorm(size) if bert else nn.RMSNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        read = x if self.bert else self.norm(x)
        q, k, v = (f(read).view(*x.shape[:2], -1, DIM).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if not self.bert:
            angles = torch.arange(x.shape[1])[:, None] * 10.0 ** -torch.linspace(0, 2, DIM // 2)
            cos, sin = (f(torch.cat([angles] * 2, -1)).to(x.dtype) for f in (torch.cos, torch.sin))
            q, k = (y * cos + torch.cat([-y[..., DIM // 2 :], y[..., : DIM // 2]], -1) * sin for y in (q, k))
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        mask = (1.0 - padding[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        if not self.bert:
            above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mask = mask.masked_fill(above, torch.finfo(x.dtype).min)
        attended = (q @ k.mT * DIM**-0.5 + mask).softmax(-1, dtype=torch.float32).to(x.dtype) @ v
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        x = self.norm(x) if self.bert else x
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, bert: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, HEADS * DIM)
        self.layers = nn.ModuleList(Layer(bert=bert) for _ in range(2))

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, padding)
        return x


IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 11
PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 1, 0, 0]])


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
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function.__name__}-{case.lowering}")
def test_right_gradients_pass(case: Case, dtype: torch.dtype) -> None:
    more = [torch.randn(case.more).to(dtype).requires_grad_()] if case.more else []
    trained(case.function, *qkv(dtype=dtype, kv_heads=case.kv_heads), *more, lowering=case.lowering)
    assert_all_verified(case.sites)


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


def test_the_same_tensor_as_query_key_and_value() -> None:
    trained(lambda x: causal(x, x, x), qkv()[0])
    assert_all_verified()


def test_some_inputs_are_frozen() -> None:
    q, k, v = qkv()
    trained(causal, q, k.detach(), v.detach())
    assert_all_verified()


def test_gradients_of_some_inputs_alone() -> None:
    inputs = qkv()
    out = compiled(causal, verify=True)(*inputs)
    torch.autograd.grad(loss(out), inputs[1:2])
    assert_all_verified()


def test_gradients_of_some_inputs_alone_without_a_compiler() -> None:
    """Its nodes make no gradient that nobody asks for."""
    inputs = qkv()
    out = compiled(causal, verify=True, inner="eager")(*inputs)
    torch.autograd.grad(loss(out), inputs[1:2])
    assert_all_verified()


def test_two_backwards_through_one_call() -> None:
    inputs = qkv()
    out = compiled(causal, verify=True)(*inputs)
    loss(out).backward(retain_graph=True)
    (loss(out) * 2).backward()
    assert_all_verified()
    _, right = inputs[0].grad, causal(*(again := qkv()))
    loss(right).backward()
    torch.testing.assert_close(inputs[0].grad, again[0].grad * 3)


def test_two_calls_before_the_backward() -> None:
    model = compiled(causal, verify=True)
    one, other = qkv(), [x.detach().cos().requires_grad_() for x in qkv()]
    (loss(model(*one)) + loss(model(*other))).backward()
    assert_all_verified()


def test_output_written_by_the_caller() -> None:
    q, k, v = qkv()
    out = compiled(lambda q, k, v: causal(q, k, v) + 1, verify=True)(q, k, v)
    out.mul_(3)
    loss(out).backward()
    assert_all_verified()


def test_view_written_by_the_caller() -> None:
    """What arrives at it can't be seen then. Without AOTAutograd the write would be to what the kernel saved."""
    out = compiled(lambda q, k, v: causal(q, k, v).view(BATCH, -1), verify=True, inner="aot_eager")(*qkv())
    out.mul_(3)
    loss(out).backward()
    assert_verified("graph outputs")
    (check,) = found("graph gradients")
    assert check.skipped is None or "a view" in check.skipped


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


def test_operand_written_by_the_caller_through_data() -> None:
    """Eager's backward reads the written values, which no gradient is made of; a kernel that saved a copy is not wrong."""
    q, k, v = (x.transpose(0, 1).contiguous().detach().requires_grad_() for x in qkv())

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.einsum("bhqk,bhkd->bhqd", (q @ k.mT).softmax(-1), v)

    out = compiled(function, verify=True, inner="aot_eager")(q, k, v)
    v.data.mul_(2)
    loss(out).backward()
    (check,) = found("graph gradients")
    assert check.skipped is None or ".data" in check.skipped


def test_operand_written_in_the_graph_through_data() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k * 1
        out = causal(q, k, v)
        k.data.zero_()
        return out

    trained(function, *qkv(), lowerings=["reference"])
    (check,) = found("graph gradients")
    assert check.skipped is None or ".data" in check.skipped


def test_what_the_caller_wrote_is_not_written_twice() -> None:
    """The gradient goes wrong in every arithmetic alike otherwise: each run starts from the inputs of the call."""
    held = planned(lambda q, k, v: causal(q.sin(), k, v), *qkv())
    called = whole.Called.now(held.plan, held.args)
    backward = whole.SeenBackward(arrived={0: torch.ones(SHAPE)}, written={1: torch.zeros(SHAPE)})
    one, other = (whole.run(called, backward=backward) for _ in range(2))
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


def test_no_gradients_then_gradients() -> None:
    model = compiled(causal, verify=True)
    with torch.no_grad():
        model(*qkv())
    assert found("graph gradients") == []
    loss(model(*qkv())).backward()
    assert_verified("graph gradients", "gradient")
    with torch.no_grad():
        model(*qkv())
    assert_verified("graph gradients", "gradient")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_the_caller(use_reentrant: bool) -> None:
    model = compiled(causal, verify=True)
    q, k, v = qkv()
    loss(checkpoint(model, q, k, v, use_reentrant=use_reentrant)).backward()
    assert_verified("graph gradients", "gradient")


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


def test_only_the_first_backward_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    real = gradients.check
    monkeypatch.setattr(gradients, "check", lambda *args: runs.append(args) or real(*args))
    model = compiled(causal, verify=True)
    for _ in range(3):
        loss(model(*qkv())).backward()
    assert len(runs) == 1


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
        factor = 1.1 if spec.dtype == "bfloat16" else 1.05
        scaled = emitter.call(scaled_gradient, getattr(operands, name), factor)
        return emit(self, emitter, spec, type(operands)(**{**vars_of(operands), name: scaled}))

    monkeypatch.setattr(SdpaCpuFlash, "emit", wrong)
    return name


def vars_of(x: Any) -> dict[str, Any]:
    return {field: getattr(x, field) for field in x.__dataclass_fields__}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("function", [causal, softmaxed, checkpointed], ids=lambda f: f.__name__)
def test_a_backward_that_is_off_by_a_factor(
    function: Callable[..., Tensor], dtype: torch.dtype, wrong_backward: str
) -> None:
    with pytest.raises(VerificationMismatch) as caught:
        trained(function, *qkv(dtype=dtype))
    assert caught.value.what.startswith(f"gradient of sdpa_cpu_flash with respect to {wrong_backward} (")
    assert found("gradient") == []
    assert_verified("output", "graph outputs")


def test_a_wrong_backward_is_located_in_its_layer(wrong_backward: str) -> None:
    with pytest.raises(VerificationMismatch) as caught:
        trained(Model(), IDS, PADDING)
    assert caught.value.site == "layers.0"
    assert any("layers.1" in note for note in caught.value.__notes__)


def test_a_step_that_raised_is_no_first_step(wrong_backward: str) -> None:
    model = compiled(causal, verify=True)
    for _ in range(2):
        with pytest.raises(VerificationMismatch):
            loss(model(*qkv())).backward()


def _checked(found: Any) -> Callable[..., Any]:
    return verifying.checked(found.module.forward, found.plan)


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
    (out,) = _checked(held)(*held.args)
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
    (out,) = _checked(held)(*held.args)
    with pytest.raises(VerificationMismatch, match="gradient of k"):
        loss(out).backward()


def _without(held: Any, method: str) -> Callable[..., Any]:
    """The compiled function, had it forgotten a write."""
    (node,) = (n for n in held.module.graph.nodes if n.target == method)
    node.replace_all_uses_with(node.args[0])
    held.module.graph.erase_node(node)
    held.module.recompile()
    return _checked(held)


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
        _checked(held)(*held.args)
    assert caught.value.what == "output 0 of the graph"


def test_a_mask_that_is_partly_written_after_it_was_made() -> None:
    """The mask is what it holds at the site, whatever of its making the kernel reads in place of it."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ((torch.arange(LENGTH, device=q.device)[None, :] >> 1) > 0).long()
        mask.select(1, 0).fill_(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())

    trained(function, *qkv(), lowerings=["triton", "math"])
    assert_verified("gradient")


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


# ---- what can't be compared ---------------------------------------------------------------------------------------


def test_random_numbers_leave_the_sites() -> None:
    trained(lambda q, k, v: causal(F.dropout(q, 0.5), k, v), *qkv())
    assert_verified("gradient")
    for subject in ("graph outputs", "graph gradients"):
        (check,) = found(subject)
        assert check.skipped == "the graph draws random numbers, others in every compiler"


def test_dropout_in_a_site_is_said() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    trained(function, *qkv(), lowerings=["reference"])
    (check,) = found("gradient")
    assert check.skipped is not None
    assert all(v.skipped is not None for v in found("graph gradients"))


def test_an_untouched_site_is_said() -> None:
    trained(causal, *qkv(), lowering="untouched")
    for subject in ("graph outputs", "graph gradients"):
        (check,) = found(subject)
        assert check.skipped == "every attention is as the model made it"


def test_rows_without_keys_are_said() -> None:
    """The loss is put on rows in which the kernel may rightly give something else."""

    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        mask = torch.zeros(real.shape).masked_fill(real == 0, torch.finfo(torch.float32).min)
        return (q @ k.mT * 0.3 + mask[:, None, None, :]).softmax(-1) @ v

    real = torch.tensor([[1] * LENGTH, [0] * LENGTH])
    for lowering in ("reference", "math", "triton"):
        results.forget()
        trained(function, *qkv(), real, lowering=lowering)
        assert_verified("output", "gradient")
        assert all(v.skipped is None or "rows without any key" in v.skipped for v in found("graph gradients"))


# ---- the check itself ---------------------------------------------------------------------------------------------


def _broken(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("where", ["run", "check"])
def test_a_check_that_fails_itself_is_a_warning(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(*((first.running, "run", _broken) if where == "run" else (gradients, "check", _broken)))
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


def test_strict_raises_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "check", _broken)
    with pytest.raises(CompileFailed, match="OutOfMemoryError: no memory"):
        trained(causal, *qkv())


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    seen: list[weakref.ref[Tensor]] = []
    real = whole.isolated

    def isolated(args: Any, shared: Any) -> list[Any]:
        made = real(args, shared)
        seen.extend(weakref.ref(x) for x in made if isinstance(x, Tensor))
        return made

    monkeypatch.setattr(whole, "isolated", isolated)
    return seen


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


def test_a_call_without_a_backward_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(causal, verify=True)
    for _ in range(3):
        model(*qkv())
    loss(model(*qkv())).backward()
    assert_all_verified()


def test_a_backward_is_not_waited_for_without_end(copies: list[weakref.ref[Tensor]]) -> None:
    model = compiled(causal, verify=True)
    for _ in range(first.CALLS_WITHOUT_BACKWARD + 1):
        model(*qkv())
    (check,) = found("graph gradients")
    assert check.skipped == "none of the first 8 calls was followed by a backward"
    before = len(copies)
    model(*qkv())
    assert len(copies) == before
