"""The numeric rule: what agrees, and each way not to."""

from __future__ import annotations

import torch

from tests.hf.comparison import worst


def _outputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(4, 5, generator=generator),
        "grad weight": torch.randn(5, 5, generator=generator) * 1e-3,
    }


def test_equal_outputs_agree() -> None:
    assert worst(_outputs(), _outputs(), None).agrees


def test_float32_may_differ_by_a_ten_thousandth() -> None:
    eager, actual = _outputs(), _outputs()
    top = eager["logits"].abs().max()
    actual["logits"][0, 0] += 0.9e-4 * top
    assert worst(actual, eager, None).agrees
    actual["logits"][0, 0] += 0.3e-4 * top
    assert not worst(actual, eager, None).agrees


def test_a_small_gradient_is_judged_by_its_own_size() -> None:
    eager, actual = _outputs(), _outputs()
    actual["grad weight"][0, 0] += 1e-5
    found = worst(actual, eager, None)
    assert not found.agrees
    assert found.name == "grad weight"


def test_half_precision_may_be_twice_as_wrong_as_eager() -> None:
    reference = _outputs()
    eager = {name: tensor + 0.1 * tensor.abs().max() for name, tensor in reference.items()}
    assert worst({n: t - 0.19 * t.abs().max() for n, t in reference.items()}, eager, reference).agrees
    assert not worst({n: t - 0.25 * t.abs().max() for n, t in reference.items()}, eager, reference).agrees


def test_a_missing_gradient_is_named() -> None:
    actual = _outputs()
    del actual["grad weight"]
    found = worst(actual, _outputs(), None)
    assert not found.agrees
    assert found.name == "grad weight (only eager has it)"


def test_nan_never_agrees() -> None:
    actual = _outputs()
    actual["logits"][1, 1] = torch.nan
    assert not worst(actual, _outputs(), None).agrees
    assert not worst(actual, actual, None).agrees


def test_another_dtype_never_agrees() -> None:
    actual = _outputs()
    actual["logits"] = actual["logits"].double()
    assert "float64" in worst(actual, _outputs(), None).name
