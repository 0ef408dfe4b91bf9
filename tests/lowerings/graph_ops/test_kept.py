"""Under `options={"checkpoint": "keep_attention"}` each attention's forward runs once a step, and nothing else changes.

Calls are counted in the graphs that Inductor would be given; its own code is asked where that says more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_compiler.lowerings.graph_ops import kept
from attn_compiler.spec.fp8_recipe import DelayedScaling, Fp8Recipe
from tests.lowerings.graph_ops.parting import FORWARD, graphs

B, H, S, D, LAYERS = 2, 2, 36, 16, 3
WIDTH = H * D
Checkpoint = Callable[..., Tensor]
aten = torch.ops.aten
non_reentrant: Checkpoint = functools.partial(checkpoint, use_reentrant=False)
reentrant: Checkpoint = functools.partial(checkpoint, use_reentrant=True)


class Layer(nn.Module):
    def __init__(self, mask: str, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, H, D).permute(2, 0, 3, 1, 4)
        is_causal = self.mask == "causal"
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=is_causal)
        given: Tensor = x + self.out(out.transpose(1, 2).reshape(batch, length, WIDTH))
        return given


class Model(nn.Module):
    """Layers in checkpoints, and a mask that is made once for all of them."""

    def __init__(self, checkpointed: Checkpoint = non_reentrant, mask: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(mask, dropout) for _ in range(LAYERS))
        self.mask, self.checkpointed = mask, checkpointed

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        apart = places[:, None] - places
        mask = None
        if self.mask == "padding":
            mask = real[:, None, None]
        if self.mask == "window":
            mask = ((apart >= 0) & (apart < 5))[None, None]
        for layer in self.layers:
            x = self.checkpointed(layer, x, mask)
        return x.square().sum()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(S) < torch.tensor([[S], [S - 4]])
    return torch.randn(B, S, WIDTH, generator=generator).requires_grad_(), real


def step(model: nn.Module, function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> list[Tensor]:
    """What a training step gives: the loss and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    loss = function(x, *more)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad for p in (x, *model.parameters()) if p.grad is not None)]


def compiled(model: nn.Module, how: str, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    given = {"checkpoint": how, "strict": True, **options}
    function: Callable[..., Tensor] = torch.compile(model, backend="attn_compiler", options=given, fullgraph=True)
    return function


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["reference", "rows", "sdpa_cpu_flash"])
@pytest.mark.parametrize("checkpointed", [non_reentrant, reentrant], ids=["non_reentrant", "reentrant"])
def test_the_forward_runs_once_a_step(lowering: str, checkpointed: Checkpoint) -> None:
    model = Model(checkpointed, mask="causal")
    expected = step(model, model, *inputs())
    for how, again in (("recompute", LAYERS), ("keep_attention", 0)):
        with graphs() as found:
            got = step(model, compiled(model, how, lowering=lowering), *inputs())
        assert found.calls(lowering) == [LAYERS, again]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["reference", "sdpa_cpu_flash"])
@pytest.mark.parametrize("mask", ["none", "padding", "window"])
def test_masks_that_are_made_for_all_layers(mask: str, lowering: str) -> None:
    model = Model(mask=mask)
    with graphs() as found:
        got = step(model, compiled(model, "keep_attention", lowering=lowering), *inputs())
    assert found.calls(lowering) == [LAYERS, 0]
    torch.testing.assert_close(got, step(model, model, *inputs()), atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before")
def test_dropout_is_the_same_in_the_backward() -> None:
    """In Triton's interpreter: what was drawn for the forward, whether that is run again or not."""
    model, found = Model(mask="padding", dropout=0.3), []
    for how, again in (("recompute", LAYERS), ("keep_attention", 0)):
        with graphs() as made:
            found.append(step(model, compiled(model, how, lowering="triton"), *inputs()))
        assert made.calls("triton") == [LAYERS, again]
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    plain = Model(mask="padding")
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(found[0][0], step(plain, plain, *inputs())[0], atol=1e-3)


@pytest.mark.parametrize("recipe", [Fp8Recipe(), Fp8Recipe(scaling=DelayedScaling())], ids=["current", "delayed"])
def test_a_forward_that_gets_its_backward_from_another_op(recipe: Fp8Recipe) -> None:
    model, found = Model(mask="causal").bfloat16(), []
    x, real = inputs()
    for how, again in (("recompute", LAYERS), ("keep_attention", 0)):
        with graphs() as made:
            function = compiled(model, how, lowering="reference_fp8", fp8_recipe=recipe)
            found.append([step(model, function, x.bfloat16(), real) for _ in range(3)])
        assert made.calls("reference_fp8") == [LAYERS, again]
    torch.testing.assert_close(found[1], found[0])


def test_lengths_that_are_symbols() -> None:
    model = Model(mask="padding")
    with graphs() as found:
        function = compiled(model, "keep_attention", lowering="reference")
        for length in (S, S - 1, S - 3):
            x, real = inputs()
            given = x[:, :length], real[:, :length]
            torch.testing.assert_close(step(model, function, *given), step(model, model, *given), atol=2e-4, rtol=1e-4)
    assert found.calls("reference") == [LAYERS, 0] * 2


def test_a_checkpoint_in_a_checkpoint() -> None:
    model = Model(mask="causal")

    def outer(x: Tensor, real: Tensor) -> Tensor:
        loss: Tensor = non_reentrant(model, x, real)
        return loss

    with graphs() as found:
        got = step(model, compiled(outer, "keep_attention", lowering="reference"), *inputs())  # type: ignore[arg-type]
    assert found.calls("reference") == [LAYERS, 0]
    torch.testing.assert_close(got, step(model, model, *inputs()), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (CheckpointPolicy.PREFER_RECOMPUTE, 0),
        (CheckpointPolicy.MUST_RECOMPUTE, LAYERS),
        (CheckpointPolicy.MUST_SAVE, 0),
    ],
)
def test_a_policy_of_the_users_own_that_has_to_be_followed_is(policy: CheckpointPolicy, again: int) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    model = Model(functools.partial(non_reentrant, context_fn=contexts))
    with graphs() as found:
        got = step(model, compiled(model, "keep_attention", lowering="reference"), *inputs())
    assert found.calls("reference") == [LAYERS, again]
    plain = Model()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(got, step(plain, plain, *inputs()), atol=2e-4, rtol=1e-4)


def test_attention_in_no_checkpoint_is_as_before() -> None:
    model = Model(lambda layer, *given: layer(*given))
    traced = []
    for how in ("recompute", "keep_attention"):
        with graphs() as found:
            step(model, compiled(model, how, lowering="reference"), *inputs())
        assert found.calls("reference") == [LAYERS, 0]
        traced.append([part.print_readable(print_output=False) for part in found.parts])
    assert traced[0] == traced[1]


def _saved(model: nn.Module, function: Callable[..., Tensor]) -> int:
    """Bytes that are kept for the backward, besides parameters, inputs and the states of random numbers."""
    x, real = inputs()
    own = {p.untyped_storage().data_ptr() for p in (x, real, *model.parameters())}
    found: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if saved.is_floating_point() and storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return saved

    function(x, real).backward()  # type: ignore[no-untyped-call]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = function(x, real)
    loss.backward()  # type: ignore[no-untyped-call]
    return sum(found.values())


@pytest.mark.parametrize("lowering", ["reference", "sdpa_cpu_flash"])
def test_what_is_kept_is_the_output_and_the_lse(lowering: str) -> None:
    model = Model(mask="causal")
    with graphs():
        saved = [_saved(model, compiled(model, how, lowering=lowering)) for how in ("recompute", "keep_attention")]
    out, lse = B * S * WIDTH * 4, B * H * S * 4
    assert saved[1] - saved[0] == LAYERS * (out + lse)


def _calls(function: Callable[[], object]) -> dict[str, int]:
    """Of all forwards of attention, as they run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return {event.key: event.count for event in profiler.key_averages() if event.key in FORWARD.values()}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("lowering", ["sdpa_cpu_flash", "reference"])
def test_code_of_inductor_runs_it_once(lowering: str) -> None:
    model = Model(mask="padding")
    expected = step(model, model, *inputs())
    function = compiled(model, "keep_attention", lowering=lowering)
    torch.testing.assert_close(step(model, function, *inputs()), expected, atol=2e-4, rtol=1e-4)
    assert _calls(lambda: step(model, function, *inputs())) == {FORWARD[lowering]: LAYERS}


KERNELS: dict[str, Callable[..., Any]] = {
    "efficient": lambda *x: aten._scaled_dot_product_efficient_attention(*x, None, True, 0.1, True),
    "flash": lambda *x: aten._scaled_dot_product_flash_attention(*x, 0.1, True),
    "cudnn": lambda *x: aten._scaled_dot_product_cudnn_attention(*x, None, True, 0.1, True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_pytorchs_kernels_for_gpus_are_kept_with_what_dropout_drew(name: str) -> None:
    """Of a traced step in a checkpoint, on tensors without memory: PyTorch without CUDA can run none of them."""

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        (x,) = (given.requires_grad_() for given in primals)
        out = KERNELS[name](x.sin(), x.cos(), x.exp())[0].tanh()
        return [out, *torch.autograd.grad(out, x, tangents)]

    with torch._functorch.config.patch(fake_tensor_allow_meta=True), FakeTensorMode():
        x = torch.empty(2, 4, 64, 64, device="meta", dtype=torch.bfloat16)
        gm = make_fx(joint)([x], [torch.empty_like(x)])
    of_backward = {node for node in gm.graph.nodes if node.name.startswith("tangents")}
    for node in gm.graph.nodes:
        if any(given in of_backward for given in node.all_input_nodes):
            of_backward.add(node)
        elif node.op == "call_function":
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}
    kept.keep_attention(gm.graph)
    forward, backward = min_cut_rematerialization_partition(gm, [x, x], num_fwd_outputs=1)
    assert [sum(map(kept.is_attention, part.graph.nodes)) for part in (forward, backward)] == [1, 0]
    _, given, *saved = forward.graph.output_node().args[0]
    assert given.op == "placeholder"
    assert {node.args[0].target for node in saved} == {
        node.target for node in forward.graph.nodes if kept.is_attention(node)
    }
    # The output, the lse, and the two numbers that dropout goes by.
    assert len(saved) == 4


@pytest.mark.parametrize("lowering", ["reference", "sdpa_cpu_flash"])
def test_an_output_that_is_kept_may_be_written_to(lowering: str) -> None:
    """By whoever gets it, before the backward: a checkpoint of the model's own would not have saved it."""

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.sin(), x.cos(), x)

    def function(x: Tensor) -> Tensor:
        return non_reentrant(attend, x)

    generator, found = torch.Generator().manual_seed(2), []
    given = torch.randn(B, H, S, D, generator=generator)
    options = {"checkpoint": "keep_attention", "lowering": lowering, "strict": True}
    for run in (function, torch.compile(function, backend="attn_compiler", options=options)):
        x = given.clone().requires_grad_()
        torch._dynamo.reset()
        with graphs() as made:
            out = run(x)
            out.mul_(3)
            out.sum().backward()
        found.append((out.detach(), x.grad))
    assert made.calls(lowering) == [1, 0]
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
