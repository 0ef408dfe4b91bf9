"""Where lengths come in steps, the batch's own padding fills them up: nothing sees it, and no gradient comes from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_compiler.torch_private import unpadding
from tests.passes.unpad.encoder import (
    LENGTH,
    MASK,
    WIDTH,
    Decoder,
    Encoder,
    Windowed,
    compiled,
    ids_of,
    mask_of,
    report,
)
from tests.passes.unpad.test_zeroing import cls, held, loss, mean

STEP = 8
RECORDED = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": False}


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of packed graphs that ran, in steps of 8."""
    found: list[int] = []
    own = unpadding.Unpadded._length

    def noted(self: unpadding.Unpadded, number: int, positions: int) -> int:
        found.append(own(self, number, positions))
        return found[-1]

    monkeypatch.setattr(unpadding.Unpadded, "_length", noted)
    monkeypatch.setattr(unpadding, "in_steps", lambda number: -(-number // STEP) * STEP)
    return found


def of(model: Encoder, **further: Any) -> tuple[Encoder, Any]:
    """In float64, asking for CUDA graphs, which are what steps are for."""
    return model.double(), compiled(model, **RECORDED, **further)


MASKS = (MASK, mask_of(1, 10, 0), mask_of(9, 9, 9), mask_of(LENGTH, LENGTH, LENGTH), mask_of(2, 2, 4), mask_of(1, 1, 0))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("ending", [None, mean, lambda x, mask: (x * mask[..., None]).sum()])
def test_outputs_and_gradients(ending: Callable[..., Any] | None, inner: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    model, function = of(Encoder(ending=ending), inner=inner)
    for mask in MASKS:
        held(model, function, mask)
        assert report().last[-1].failed == ()
    assert lengths == [24, 16, 30, 30, 8, 8]


@pytest.mark.parametrize("kind", [Windowed, Decoder])
@pytest.mark.parametrize("left", [False, True])
def test_bands(kind: type[Encoder], left: bool, lengths: list[int]) -> None:
    """Padding behind the last row is near to its tokens."""
    torch.manual_seed(0)
    model, function = of(kind())
    for mask in (mask_of(4, 10, 7, left=left), mask_of(3, 2, 5, left=left), mask_of(10, 0, 1, left=left)):
        held(model, function, mask)
        assert report().last[-1].failed == ()
    assert lengths == [24, 16, 16]


@pytest.mark.parametrize("left", [False, True])
def test_losses(left: bool, lengths: list[int]) -> None:
    """Labels at what fills up are ignored. What has a label is a token, and no such padding."""
    torch.manual_seed(0)
    model, function = of(Decoder(ending=loss), inner="aot_eager")
    for mask in (mask_of(4, 10, 7, left=left), mask_of(3, 2, 5, left=left)):
        labels = (ids_of(mask) % WIDTH).masked_fill(mask == 0, -100)
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        for given in (labels, shifted):
            held_on_real_tokens(model, function, mask, given)
            assert report().last[-1].failed == ()
    assert all(length % STEP == 0 for length in lengths)


def held_on_real_tokens(model: Encoder, function: Any, mask: torch.Tensor, labels: torch.Tensor) -> None:
    ids = ids_of(mask)
    found, expected = function(ids, mask, labels=labels), model(ids, mask, labels=labels)
    torch.testing.assert_close(found[0], expected[0], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found[1][mask.bool()], expected[1][mask.bool()], atol=1e-12, rtol=1e-10)
    gradients = [torch.autograd.grad(x[0], list(model.parameters()), allow_unused=True) for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}])
def test_there_are_none_unless_each_is_to_be_recorded(options: dict[str, Any], lengths: list[int]) -> None:
    torch.manual_seed(0)
    model = Encoder().double()
    held(model, compiled(model, **options), MASK)
    assert lengths == [21]


def test_the_first_token_of_each_row(lengths: list[int]) -> None:
    torch.manual_seed(0)
    model, function = of(Encoder(ending=cls))
    held(model, function, MASK)
    assert report().last[-1].failed == ()
    assert lengths == [24]


@pytest.mark.further
@pytest.mark.parametrize("training", [False, True])
def test_compiled_by_inductor(training: bool, lengths: list[int]) -> None:
    """Its graphs take the length as a number: a CUDA graph is found by it."""
    torch.manual_seed(0)
    model = Encoder(ending=mean).double()
    function = compiled(model, inner="inductor", **RECORDED)
    for mask in MASKS[:3]:
        if training:
            held(model, function, mask)
        else:
            with torch.no_grad():
                torch.testing.assert_close(function(ids_of(mask), mask), model(ids_of(mask), mask))
    assert lengths == [24, 16, 30]
