"""Training with a recipe, on the CPU and so with FP8 emulated: what is decided once, and what is kept.

What becomes of the loss: test_fp8_accuracy.py."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.passes.writing import select
from tests.attention_layer import Attention
from tests.inductor_caches import no_graphs
from tests.thinned import in_full

RECIPES = {
    "current": Fp8Recipe(),
    "block, accurate": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
    "delayed": Fp8Recipe(scaling=DelayedScaling(amax_history_len=4)),
    "delayed per head": Fp8Recipe(
        scaling=DelayedScaling(granularity="head", amax_compute_algo="most_recent", margin=1)
    ),
    "static": Fp8Recipe(scaling=StaticScaling(q=8, k=8, v=8)),
}
HEADS, HEAD_DIM, LENGTH = 2, 16, 40


class Layers(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(HEADS, HEAD_DIM) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


pytestmark = pytest.mark.usefixtures("little_to_look_through")


@pytest.fixture(autouse=True)
def no_reports() -> None:
    attn_compiler.reset()


def compiled(model: Callable[..., Any], recipe: Fp8Recipe | None, **options: Any) -> Any:
    chosen = {"lowering": "reference_fp8", "inner": "aot_eager", "strict": True, "fp8_recipe": recipe, **options}
    return torch.compile(model, backend="attn_compiler", options=chosen, fullgraph=True)


def inputs(step: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(2, LENGTH, HEADS * HEAD_DIM, generator=generator) * scale).bfloat16()


def decisions() -> Any:
    return mock.patch.object(select, "decide", wraps=select.decide)


# ---- what is decided once -------------------------------------------------------------------------------------------


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_two_hundred_steps_select_once_and_compile_once(name: str) -> None:
    """The values that scales come from grow all the time, and are no part of any key."""
    model = Layers().bfloat16()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    function = compiled(model, RECIPES[name])
    with decisions() as decide:
        for step in range(200):
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                function(inputs(step, 1 + step / 50)).float().square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
    # One decision, which both layers share.
    assert decide.call_count == 1
    (report,) = attn_compiler.reports()
    (site,) = report.sites
    assert (len(site.modules), site.decision.lowering) == (2, "reference_fp8")


def test_a_changed_recipe_compiles_exactly_once_more_and_an_equal_one_never() -> None:
    model, x = Layers().bfloat16(), inputs(0)
    compiled(model, RECIPES["current"])(x)
    compiled(model, copy.deepcopy(RECIPES["current"]))(x)
    assert len(attn_compiler.reports()) == 1
    changed = compiled(model, dataclasses.replace(RECIPES["current"], smooth_k=True))
    for step in range(3):
        changed(inputs(step))
    assert len(attn_compiler.reports()) == 2


def test_a_recipe_that_is_rebound_afterwards_is_not_looked_at() -> None:
    model, x = Layers().bfloat16(), inputs(0)
    options: dict[str, Any] = {"lowering": "reference_fp8", "inner": "aot_eager", "fp8_recipe": RECIPES["current"]}
    function = torch.compile(model, backend="attn_compiler", options=options)
    before = function(x)
    options["fp8_recipe"] = RECIPES["static"]
    assert torch.equal(function(x), before)
    assert [report.sites[0].spec.fp8 for report in attn_compiler.reports()] == [RECIPES["current"]]


def test_no_step_waits_for_the_device() -> None:
    """A tensor that becomes a number would have to arrive first."""
    with mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("a tensor was read")):
        compiled(Layers().bfloat16(), RECIPES["delayed"])(inputs(0)).sum().backward()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", in_full(RECIPES, daily=("delayed", "block, accurate")))
def test_what_was_compiled_comes_out_of_the_cache_and_learns_the_same(name: str) -> None:
    """With histories that begin anew."""
    found, hits = [], []
    with no_graphs():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            model = Layers().bfloat16()
            function = compiled(model, RECIPES[name], inner="inductor")
            for step in range(3):
                function(inputs(step, 4.0**step)).float().square().mean().backward()
            found.append([p.grad for p in model.parameters()])
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1]
    assert all(map(torch.equal, *found))


# ---- the history ----------------------------------------------------------------------------------------------------


def amax_of(model: Layers, x: Tensor) -> Tensor:
    """Of the first layer's q."""
    layer = model.layers[0]
    with torch.no_grad():
        return layer.qkv(x).view(*x.shape[:2], 3, HEADS, HEAD_DIM)[:, :, 0].abs().amax().float()


def last_history(name: str) -> Tensor:
    """The newest of that name: those of earlier tests may not have been collected yet."""
    found = [tensor for label, tensor in attn_compiler.fp8_state_dict().items() if label.partition("#")[0] == name]
    return found[-1]


def test_the_history_holds_the_last_steps_newest_first() -> None:
    model = Layers().bfloat16()
    function = compiled(model, RECIPES["delayed"])
    for step in range(6):
        function(inputs(step))
    expected = torch.stack([amax_of(model, inputs(step)) for step in (5, 4, 3, 2)])
    assert torch.equal(last_history("layers.0/amax")[:, 0], expected)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_recomputation_under_checkpoint_moves_the_history_on_once_and_sees_what_the_forward_saw(inner: str) -> None:
    found = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model = Layers(checkpointed=checkpointed).bfloat16()
        function = compiled(model, RECIPES["delayed"], inner=inner)
        for step in range(3):
            model.zero_grad()
            # Were the scales of the recomputation those of the next step, gradients would be others.
            function(inputs(step, 10.0**step)).float().square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        names = [f"layers.{layer}/amax" for layer in range(2)]
        found.append((gradients, [last_history(name) for name in names]))
    (plain, kept), (recomputed, kept_too) = found
    assert all(map(torch.equal, kept, kept_too))
    assert ((kept[0] > 0).sum(0) == 3).all()
    for a, b in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3 * float(a.abs().max()))


@pytest.mark.parametrize("anew", [False, True], ids=["same code", "compiled anew"])
def test_a_saved_history_goes_on_where_it_was(anew: bool) -> None:
    torch._dynamo.reset()
    model = Layers().bfloat16()
    function = compiled(model, RECIPES["delayed"])
    for step in range(3):
        function(inputs(step))
    saved = attn_compiler.fp8_state_dict()
    expected = function(inputs(3, 4.0))
    if anew:
        torch._dynamo.reset()
        function = compiled(model, RECIPES["delayed"])
        assert not torch.equal(function(inputs(3, 4.0)), expected)
    attn_compiler.load_fp8_state_dict(saved)
    assert torch.equal(function(inputs(3, 4.0)), expected)
    assert len(attn_compiler.reports()) == 1 + anew


def one_by_one(model: Layers, **options: Any) -> None:
    """Compile each layer by itself, of which all are of one class."""
    chosen = {"lowering": "reference_fp8", "inner": "aot_eager", "strict": True, "fp8_recipe": RECIPES["delayed"]}
    for layer in model.layers:
        layer.compile(backend="attn_compiler", options={**chosen, **options}, fullgraph=True)


def test_layers_that_are_compiled_one_by_one_have_histories_of_their_own() -> None:
    """Their values may be far apart: with the scale of another one they would saturate."""
    model, whole = Layers().bfloat16(), Layers().bfloat16()
    for layers in (model.layers, whole.layers):
        with torch.no_grad():
            layers[1].qkv.weight.mul_(100)  # type: ignore[union-attr, operator]
    one_by_one(model)
    function = compiled(whole, RECIPES["delayed"])
    with torch.no_grad():
        for step in range(3):
            assert torch.equal(model(inputs(step)), function(inputs(step)))
    assert len(attn_compiler.reports()) == len(model.layers) + 1


def test_two_models_of_one_class_have_histories_of_their_own() -> None:
    one, other = Layers().bfloat16(), Layers().bfloat16()
    functions = [compiled(model, RECIPES["delayed"]) for model in (one, other)]
    for step in range(3):
        functions[0](inputs(step))
        functions[1](inputs(step, 50.0))
    assert len(attn_compiler.reports()) == 2
    of_other = torch.stack([amax_of(other, inputs(step, 50.0)) for step in (2, 1, 0)])
    assert torch.equal(last_history("layers.0/amax")[:3, 0], of_other)


@pytest.mark.parametrize("name", ["current", "static"])
def test_without_a_history_layers_share_their_code(name: str) -> None:
    model = Layers().bfloat16()
    one_by_one(model, fp8_recipe=RECIPES[name])
    with torch.no_grad():
        model(inputs(0))
    assert len(attn_compiler.reports()) == 1


# ---- whose history it is --------------------------------------------------------------------------------------------


def histories(model: nn.Module | None = None) -> dict[str, list[float]]:
    """The newest magnitude of q first."""
    return {name: history[:, 0].tolist() for name, history in attn_compiler.fp8_state_dict(model).items()}


def test_resuming_by_a_step_without_gradients_goes_on_with_the_training_histories() -> None:
    """The graph of the first call is not the one that the histories come from."""
    torch._dynamo.reset()
    model = Layers().bfloat16()
    function = compiled(model, RECIPES["delayed"])
    for step in range(3):
        function(inputs(step, 3.0)).sum().backward()
    saved = attn_compiler.fp8_state_dict()
    expected = function(inputs(3, 3.0))

    torch._dynamo.reset()
    function = compiled(model, RECIPES["delayed"])
    with torch.no_grad():
        function(inputs(0))
    assert set(attn_compiler.load_fp8_state_dict(saved)) == {"layers.0/amax", "layers.1/amax"}
    with torch.enable_grad():
        found = function(inputs(3, 3.0))
    assert torch.equal(found, expected)
    assert all(newest > 0 for newest, *_ in histories().values())


@pytest.mark.in_turns
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", ["training", "inference"])
def test_graphs_of_one_module_share_its_histories(first: str, mode: Any, checkpointed: bool) -> None:
    torch._dynamo.reset()
    model = Layers(checkpointed=checkpointed).bfloat16()
    function = compiled(model, RECIPES["delayed"])
    for step in range(4):
        if (step % 2 == 0) == (first == "training"):
            function(inputs(step)).sum().backward()
        else:
            with mode():
                function(inputs(step))
    assert len(attn_compiler.reports()) == 2
    assert list(histories()) == ["layers.0/amax", "layers.1/amax"]
    expected = [float(amax_of(model, inputs(step))) for step in (3, 2, 1, 0)]
    assert histories()["layers.0/amax"] == expected


def test_another_shape_goes_on_with_the_histories_of_the_module() -> None:
    torch._dynamo.reset()
    model = Layers().bfloat16()
    function = compiled(model, RECIPES["delayed"])
    for step in range(4):
        function(inputs(step)[:, : LENGTH - 8 * step])
    assert list(histories()) == ["layers.0/amax", "layers.1/amax"]
    assert all(min(history) > 0 for history in histories().values())


def test_another_recipe_has_histories_of_its_own_and_the_report_says_so() -> None:
    torch._dynamo.reset()
    model = Layers().bfloat16()
    compiled(model, RECIPES["delayed"])(inputs(0)).sum().backward()
    with torch.no_grad():
        compiled(model, dataclasses.replace(RECIPES["delayed"], hadamard=True))(inputs(0))
    first, second = attn_compiler.reports()
    assert not any("histories" in note for note in first.sites[0].notes)
    (note,) = (note for note in second.sites[0].notes if "histories" in note)
    assert "a step without gradients by this graph has histories of its own" in note
    assert "another recipe" in note
    assert len(histories()) == 4


class OtherLine(nn.Module):
    """Its attention stands twice in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(HEADS, HEAD_DIM)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.weight).view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)
        if self.training:
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_code_that_evaluates_elsewhere_has_histories_of_its_own_and_the_report_says_so() -> None:
    torch._dynamo.reset()
    model = OtherLine().bfloat16()
    function = compiled(model, RECIPES["delayed"])
    function(inputs(0)).sum().backward()
    model.eval()
    with torch.no_grad():
        function(inputs(0))
    _, report = attn_compiler.reports()
    assert any("another place in the module's code" in note for note in report.sites[0].notes)


class Shared(nn.Module):
    """One layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(HEADS, HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x) * 10)
        return out


def test_a_layer_that_runs_twice_has_a_history_for_each_time_in_every_graph() -> None:
    torch._dynamo.reset()
    model = Shared().bfloat16()
    function = compiled(model, RECIPES["delayed"])
    function(inputs(0)).sum().backward()
    first = histories()
    assert list(first) == ["layer/amax", "layer/amax#2"]
    assert first["layer/amax"][0] != first["layer/amax#2"][0]
    with torch.no_grad():
        function(inputs(0))
    for name, (newest, before, *_) in histories().items():
        assert before == first[name][0]
        assert newest > 0


def test_a_model_that_breaks_has_a_history_for_each_part() -> None:
    class Broken(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            out: Tensor = self.layers[1](x)
            return out

    torch._dynamo.reset()
    model = Broken().bfloat16()
    options = {"lowering": "reference_fp8", "inner": "aot_eager", "strict": True, "fp8_recipe": RECIPES["delayed"]}
    function = torch.compile(model, backend="attn_compiler", options=options)
    function(inputs(0)).sum().backward()
    with torch.no_grad():
        function(inputs(1))
    assert set(histories(model)) == {"layers.0/amax", "layers.1/amax"}
    assert all(history[1] > 0 and history[2] == 0 for history in histories(model).values())


def test_layers_that_are_compiled_one_by_one_are_saved_by_their_paths_in_the_model() -> None:
    """Whichever of them ran first."""
    torch._dynamo.reset()
    model = Layers().bfloat16()
    one_by_one(model)
    for layer in reversed(model.layers):
        with torch.no_grad():
            layer(inputs(0))
    model(inputs(1)).sum().backward()
    saved = attn_compiler.fp8_state_dict(model)
    assert saved["layers.0/amax"][0, 0] == amax_of(model, inputs(1))
    expected = model(inputs(2))

    torch._dynamo.reset()
    with torch.no_grad():
        model(inputs(0))
    attn_compiler.load_fp8_state_dict(saved, model)
    assert torch.equal(model(inputs(2)), expected)


def test_models_that_one_function_closes_over_are_told_apart() -> None:
    torch._dynamo.reset()
    models = [Layers().bfloat16() for _ in range(2)]

    def step_of(model: Layers) -> Any:
        return compiled(lambda x: model(x), RECIPES["delayed"])

    for i, model in enumerate(models):
        step_of(model)(inputs(i, 1.0 + i))
    for i, model in enumerate(models):
        assert histories(model)["layers.0/amax"][:2] == [float(amax_of(model, inputs(i, 1.0 + i))), 0.0]


def test_a_function_without_modules_shares_its_histories_with_and_without_gradients() -> None:
    def attend(x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    torch._dynamo.reset()
    function = compiled(attend, RECIPES["delayed"])
    with torch.no_grad():
        function(inputs(0))
    function(inputs(1).requires_grad_()).sum().backward()
    (history,) = histories().values()
    assert history == [*(float(inputs(step).abs().amax()) for step in (1, 0)), 0.0, 0.0]
