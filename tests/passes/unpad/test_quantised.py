"""Linear layers in int8 leave padding out where each token is quantised by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_compiler.reasons.codes import Code
from attn_compiler.torch_private import inductor
from tests.passes.unpad.encoder import MASK, Encoder, compiled, ids_of, mask_of, on_real_tokens, report


class Int8(nn.Module):
    """torch._int_mm, with a scale for each token, or for the whole batch."""

    def __init__(self, linear: nn.Linear, *, whole: bool = False) -> None:
        super().__init__()
        weight, self.whole = linear.weight.detach(), whole
        scale = weight.abs().amax(1) / 127
        self.register_buffer("numbers", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(0, -2)
        scale = (y.abs().amax() if self.whole else y.abs().amax(-1, keepdim=True)) / 127
        product = torch._int_mm((y / scale).round().to(torch.int8), self.numbers.t())
        return (product * scale * self.scale + self.bias).to(x.dtype).reshape(*x.shape[:-1], -1)


class WeightOnly(Int8):
    def forward(self, x: Tensor) -> Tensor:
        product = torch._weight_int8pack_mm(x.flatten(0, -2), self.numbers, self.scale)
        return (product + self.bias).reshape(*x.shape[:-1], -1)


def replaced(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            replaced(child, make)


def by_torchao(config: str, **further: Any) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        found = pytest.importorskip("torchao.quantization")
        made = {name: found.PerTensor() if value == "PerTensor" else value for name, value in further.items()}
        if "act_mapping_type" in made:
            made["act_mapping_type"] = found.MappingType.ASYMMETRIC
        found.quantize_(model, getattr(found, config)(**made))

    return quantise


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "int_mm": lambda model: replaced(model, Int8),
    "int8pack": lambda model: replaced(model, WeightOnly),
    "torchao": by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao asymmetric": by_torchao("Int8DynamicActivationInt8WeightConfig", act_mapping_type="ASYMMETRIC"),
    "torchao weights": by_torchao("Int8WeightOnlyConfig"),
}
OF_BATCH: dict[str, Callable[[nn.Module], None]] = {
    "int_mm": lambda model: replaced(model, lambda linear: Int8(linear, whole=True)),
    "torchao": by_torchao("Int8DynamicActivationInt8WeightConfig", granularity="PerTensor"),
}


def run(model: nn.Module, function: Any, mask: Tensor, close: float) -> None:
    ids = ids_of(mask)
    with torch.no_grad():
        found, expected = function(ids, mask), model(ids, mask)
    torch.testing.assert_close(on_real_tokens(found, mask), on_real_tokens(expected, mask), atol=close, rtol=0)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_are_quantised_by_themselves_are_packed(way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Encoder().eval().to(dtype)
    WAYS[way](model)
    function = compiled(model, dynamic=True)
    close = 1e-6 if dtype == torch.float32 else 2e-2
    for mask in (MASK, mask_of(9, 1, 2, 9, 3), mask_of(1, 1)):
        run(model, function, mask, close)
        found = report()
        assert found.kept is None
        assert found.steps is not None
        assert not found.steps.last[-1].failed
        assert found.steps.last[-1].number == int(mask.sum())


@pytest.mark.parametrize("way", OF_BATCH)
def test_one_scale_for_a_batch_keeps_padding(way: str) -> None:
    model = Encoder().eval()
    OF_BATCH[way](model)
    run(model, compiled(model), MASK, 1e-6)
    kept = report().kept
    assert kept is not None
    assert kept.code is Code.MIXES_POSITIONS
    assert "along rows or positions" in kept.observed


@pytest.mark.parametrize(("way", "expected"), [("int_mm", 8), ("torchao", 8), ("int8pack", None)])
def test_inductor_stores_what_several_ops_of_a_quantisation_read(
    way: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GELU, whose largest and smallest numbers are asked, would be computed for each of its readers."""
    given: list[dict[str, Any]] = []

    def compile_with_inductor(gm: Any, inputs: Any, *, patches: dict[str, Any], **_: Any) -> Callable[..., Any]:
        given.append(patches)
        run: Callable[..., Any] = gm.forward
        return run

    monkeypatch.setattr(inductor, "compile_with_inductor", compile_with_inductor)
    model = Encoder().eval()
    WAYS[way](model)
    with torch.no_grad():
        compiled(model, inner="inductor")(ids_of(MASK), MASK)
    assert given[0].get("realize_opcount_threshold") == expected


def test_quantised_weights_in_training_stay() -> None:
    model = Encoder()
    WAYS["torchao weights"](model)
    ids = ids_of(MASK)
    torch.testing.assert_close(compiled(model)(ids, MASK), model(ids, MASK))
    assert report().kept is not None
