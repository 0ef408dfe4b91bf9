"""compare: one real comparison of a forward and of a training step; and that the model is as it was, with backends that compile nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import attn_compiler
from attn_compiler.compiling.comparing import compare as comparing
from attn_compiler.compiling.comparing.compare import compare, comparer
from attn_compiler.reasons.errors import CannotCompare, InvalidOption, UnknownOption
from attn_compiler.torch_private import observe as torch_observe


@dataclass
class Output:
    hidden: torch.Tensor
    mask: torch.Tensor


class Attention(nn.Module):
    """Counts its calls in a buffer, and gives a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> Output:
        self.calls += 1
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        mask = attention_mask[:, None, None, :].bool() & torch.ones(x.shape[1], x.shape[1]).tril().bool()
        return Output(hidden=nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), mask=mask)


def _inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[0, 20:] = 0
    return {"x": torch.randn(2, 32, 16), "attention_mask": mask}


def test_a_training_step_beside_inductor() -> None:
    model = Attention()
    found = comparer(training=True, seconds=0)(model, **_inputs())
    assert [side.name for side in found.sides] == ["eager", "inductor", "attn_compiler"]
    for side in found.sides:
        assert side.failure is None
        assert side.first_seconds is not None
        assert side.milliseconds is not None
    for side in found.sides[1:]:
        assert side.outputs is not None
        assert side.gradients is not None
        assert side.gradients.beside > 0
        assert side.outputs.largest < 1e-5
        assert side.gradients.largest < 1e-5
        assert side.outputs.others == side.gradients.others == ()
    assert found.gain is not None
    assert found.gain > 0
    assert found.reports.num_sites == 1
    assert found.inputs == ("x float32[2, 32, 16]", "attention_mask int64[2, 32]")
    assert model.calls.item() == 0
    assert model.project.weight.grad is None
    assert len(attn_compiler.reports()) == 0
    assert json.loads(found.to_json())["gain"] == found.gain


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run op by op, on both sides."""
    real = torch_observe.compile_apart

    def apart(
        model: Callable[..., Any], backend: str, dynamic: bool | None, options: Mapping[str, Any] | None = None
    ) -> Any:
        if backend == "inductor":
            return real(model, "eager", dynamic)
        return real(model, backend, dynamic, {**(options or {}), "inner": "eager"})

    monkeypatch.setattr(torch_observe, "compile_apart", apart)
    torch._dynamo.reset()
    attn_compiler.reset()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("training", [False, True])
def test_nothing_of_the_model_is_another(training: bool) -> None:
    model, inputs = Attention(), _inputs()
    compiled = torch.compile(model, backend="attn_compiler", options={"inner": "eager"})
    compiled(**inputs)
    reports = list(attn_compiler.reports())
    model.project.weight.grad = gradient = torch.ones_like(model.project.weight)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    names, state, drawn = set(vars(model)), torch.get_rng_state(), [x.clone() for x in inputs.values()]
    comparer(training=training, seconds=0)(model, **inputs)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert set(vars(model)) == names
    assert model.project.weight.grad is gradient
    assert model.project.bias.grad is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, inputs.values(), drawn))
    compiled(**inputs)
    assert list(attn_compiler.reports()) == reports


@pytest.mark.usefixtures("quick")
def test_dynamo_keeps_no_code_of_the_model() -> None:
    comparer(seconds=0)(Attention(), **_inputs())
    assert _debug_get_cache_entry_list(Attention.forward.__code__) == []


@pytest.mark.usefixtures("quick")
def test_a_module_that_was_compiled_in_place_is_compared_as_it_was_written() -> None:
    model = Attention()
    model.compile(backend="eager")
    implementation = model._compiled_call_impl
    found = comparer(seconds=0)(model, **_inputs())
    assert found.reports.num_sites == 1
    assert model._compiled_call_impl is implementation


@pytest.mark.usefixtures("quick")
def test_a_compiled_module_is_compared_with_its_options() -> None:
    model = torch.compile(Attention(), backend="attn_compiler", options={"lowering": "untouched"})
    found = compare(model, **_inputs(), options={"lowering": "math"})
    assert [site.decision.lowering for report in found.reports for site in report.sites] == ["math"]
    found = compare(model, **_inputs())
    assert [site.decision.lowering for report in found.reports for site in report.sites] == ["untouched"]
    assert found.model == "Attention"
    assert found.settings["options"] == {"lowering": "'untouched'"}


@pytest.mark.usefixtures("quick")
def test_a_function_and_its_module() -> None:
    model, inputs = Attention(), _inputs()

    def hidden(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x, inputs["attention_mask"]).hidden
        return found

    found = comparer(training=True, seconds=0)(hidden, inputs["x"])
    assert found.model.endswith("hidden")
    assert found.reports.num_sites == 1
    assert model.calls.item() == 0
    assert model.project.weight.grad is None


@pytest.mark.usefixtures("quick")
def test_a_side_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = torch_observe.compile_apart

    def failing(_: Any, __: Any) -> Any:
        raise ValueError("cannot generate code")

    def apart(model: Any, backend: Any, *others: Any) -> Any:
        return torch.compile(model, backend=failing) if backend == "inductor" else quick(model, backend, *others)

    monkeypatch.setattr(torch_observe, "compile_apart", apart)
    found = comparer(seconds=0)(Attention(), **_inputs())
    failure = found.side("inductor").failure
    assert failure is not None
    assert "cannot generate code" in failure
    assert found.side("attn_compiler").milliseconds is not None
    assert found.gain is None
    assert "inductor failed: " in str(found)


@pytest.mark.usefixtures("quick")
def test_what_the_model_itself_raises_is_raised() -> None:
    model = Attention()
    with pytest.raises(TypeError, match="attention_mask"):
        compare(model, torch.ones(2, 32, 16))
    assert model.calls.item() == 0


def test_wrong_requests_are_told_before_anything_runs() -> None:
    with pytest.raises(CannotCompare, match=r"attn_compiler.compare: the model comes first.*got 'bert' \(str\)"):
        compare("bert")  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match="unpd"):
        comparer(options={"unpd": True})
    with pytest.raises(InvalidOption):
        comparer(options={"lowering": "hoppr"})


@pytest.mark.usefixtures("quick")
def test_dropout_is_said_to_make_differences_tell_nothing() -> None:
    found = comparer(seconds=0)(nn.Dropout(0.5), torch.ones(4, 4))
    assert found.drew_random_numbers
    assert "drew random numbers" in str(found)
    assert not comparer(seconds=0)(nn.Dropout(0.5).eval(), torch.ones(4, 4)).drew_random_numbers


def test_devices_are_those_of_the_model_and_the_inputs() -> None:
    assert comparing._devices([torch.ones(1, device="meta")]) == [torch.device("meta"), torch.device("cpu")]


class PaddedCausal(nn.Module):
    """float16 or bfloat16, heads of 64, and a mask for each pair of positions: (batch, length, 64 * heads) to the same."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(64 * heads, 3 * 64 * heads)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, 64)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        causal = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
        mask = attention_mask[:, None, None, :].bool() & causal
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found.transpose(1, 2).flatten(2)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_on_a_gpu_memory_is_measured_and_a_dense_mask_is_gone(training: bool) -> None:
    model = PaddedCausal(4).to("cuda", torch.bfloat16)
    weight = model.project.weight.detach().clone()
    torch.manual_seed(0)
    x = torch.randn(8, 2048, 256, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([2048, 2000, 1500, 1024, 777, 513, 64, 1], device="cuda")
    mask = (torch.arange(2048, device="cuda") < lengths[:, None]).long()
    found = comparer(training=training, seconds=0.2, dynamic=False)(model, x, attention_mask=mask)
    for side in found.sides:
        assert side.failure is None
        assert side.milliseconds is not None
        assert side.held_bytes is not None
        assert side.peak_bytes is not None
        assert side.peak_bytes >= side.held_bytes > x.nbytes
    ours, inductor = found.side("attn_compiler"), found.side("inductor")
    assert ours.outputs is not None
    assert ours.outputs.largest < 0.05
    assert (ours.gradients is not None) is training
    assert ours.peak_bytes is not None
    assert inductor.peak_bytes is not None
    # A number for each pair takes a byte at least.
    assert inductor.peak_bytes - ours.peak_bytes >= 8 * 2048 * 2048
    assert torch.equal(model.project.weight, weight)
    assert model.project.weight.grad is None
