from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import compare, harness
from benchmarks.compare import Case


def test_relative_error_is_over_all_tensors_together() -> None:
    reference = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert compare.relative_error(reference, reference) == 0
    assert abs(compare.relative_error([torch.tensor([3.0]), torch.tensor([4.5])], reference) - 0.1) < 1e-6


def test_an_error_that_is_no_number_is_wrong() -> None:
    model = nn.Linear(4, 4)
    case = Case(model=model, inputs={"input": torch.randn(2, 4)})
    assert compare.numerics(case, lambda: torch.full((2, 4), torch.nan))["numerics"] == "WRONG"


def test_numerics_compares_only_valid_positions() -> None:
    model = nn.Linear(4, 4)
    inputs = {"input": torch.randn(2, 3, 4)}
    valid = torch.tensor([[True, True, False], [True, True, True]])

    def ours() -> torch.Tensor:
        output = model(inputs["input"]).detach()
        output[0, 2] = 100.0
        return output

    assert compare.numerics(Case(model=model, inputs=inputs, valid=valid), ours)["numerics"] == "ok"
    assert compare.numerics(Case(model=model, inputs=inputs), ours)["numerics"] == "WRONG"


def test_tensors_in_a_list_are_in_float32_too() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return sum((self.linear(x) for x in xs), torch.zeros((), dtype=self.linear.weight.dtype))

    model, inputs = Sum(), {"xs": [torch.randn(2, 4, dtype=torch.bfloat16) for _ in range(2)]}
    case = Case(model=model, inputs=inputs)
    assert compare.numerics(case, harness.make_step(model, inputs, training=False))["numerics"] == "ok"


def test_numerics_of_a_training_step_compares_gradients() -> None:
    model = nn.Linear(4, 4)
    inputs = {"input": torch.randn(2, 4)}
    case = Case(model=model, inputs=inputs, training=True)
    right = harness.make_step(model, inputs, training=True)

    def wrong() -> torch.Tensor:
        output = right()
        assert model.weight.grad is not None
        model.weight.grad *= 1.01
        return output

    assert compare.numerics(case, right)["numerics"] == "ok"
    assert compare.numerics(case, wrong)["numerics"] == "WRONG"


def test_nothing_compiled_is_no_site() -> None:
    assert compare.chosen(()) == {"sites": "0", "misses": "0", "lowerings": ""}


def test_each_side_gets_its_own_model_and_ours_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = {}

    def noted(model: nn.Module, *, backend: str, options: object, dynamic: bool) -> nn.Module:
        compiled[backend] = (model, options, dynamic)
        return model

    monkeypatch.setattr(torch, "compile", noted)
    ours, other = nn.Linear(4, 4), nn.Linear(4, 4)
    case = Case(model=ours, baseline=other, inputs={"input": torch.randn(2, 4)})
    compare.compile_both(case, {"lowering": "triton"})
    assert compiled == {"inductor": (other, None, False), "attn_compiler": (ours, {"lowering": "triton"}, False)}
    compare.compile_both(Case(model=ours, inputs=case.inputs))
    assert compiled == {"inductor": (ours, None, False), "attn_compiler": (ours, None, False)}
