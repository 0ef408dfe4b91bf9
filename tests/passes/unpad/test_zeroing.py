"""Whichever graph runs, what it gives at padding is 0, and real tokens have the model's numbers: also where batches change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attn_compiler.compiling import unpadded
from attn_compiler.passes.unpad import batches_before
from tests.passes.unpad.encoder import LENGTH, MASK, WIDTH, Decoder, Encoder, compiled, ids_of, mask_of, report

FULL = mask_of(LENGTH, LENGTH, LENGTH)
HOLE = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]] * 3)


class Coming:
    """Numbers that come after so many calls."""

    def __init__(self, told: torch.Tensor, late: int) -> None:
        self.told, self.late = told, late

    def are_there(self) -> bool:
        self.late -= 1
        return self.late < 0

    def numbers(self) -> list[int]:
        found: list[int] = self.told.tolist()
        return found


@pytest.fixture(params=[0, 1, 3])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As on a GPU, where numbers come so many calls later."""
    monkeypatch.setattr(unpadded, "_is_launched", lambda _: True)
    monkeypatch.setattr(batches_before, "Arriving", lambda told: Coming(told, request.param))
    return int(request.param)


def held(model: Encoder, function: Any, mask: torch.Tensor, **further: torch.Tensor) -> None:
    """Outputs are the model's on real tokens and 0 at padding; gradients are the model's."""
    ids = ids_of(mask)
    expected, found = (as_list(f(ids, mask, **further)) for f in (model, function))
    for i, x in enumerate(expected):
        if x.dim() == 3:
            expected[i] = x.masked_fill(mask[..., None] == 0, 0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(gradients(found, model), gradients(expected, model), atol=1e-11, rtol=1e-9)


def as_list(x: Any) -> list[torch.Tensor]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def gradients(found: list[torch.Tensor], model: Encoder) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    total = torch.stack([(x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in found]).sum()
    return list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask[..., None].to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def cls(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, 0]


def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.nn.functional.cross_entropy(x.view(-1, WIDTH), labels.view(-1)), x


MASKS = (FULL, FULL, FULL, MASK, MASK, HOLE, FULL, MASK, FULL, FULL, FULL, mask_of(3, 0, 9), mask_of(5, 10, 2))


@pytest.mark.parametrize("ending", [None, mean, cls, lambda x, mask: (x, mean(x, mask))])
def test_batches_change_from_full_to_half_full(ending: Callable[..., Any] | None, late: int) -> None:
    torch.manual_seed(0)
    model = Encoder(ending=ending).double()
    function = compiled(model)
    for mask in MASKS:
        if ending is not cls or bool(mask[:, 0].all()):
            held(model, function, mask)
    failed = [batches_before.MUCH_PADDING in step.failed for step in report().last]
    assert any(failed)
    assert not all(failed)


@pytest.mark.parametrize("left", [False, True])
def test_losses_of_batches_that_change(left: bool, late: int) -> None:
    torch.manual_seed(0)
    model = Decoder(ending=loss).double()
    function = compiled(model)
    for lengths in ((10, 10, 10), (10, 10, 10), (10, 9, 10), (4, 10, 7), (2, 3, 2), (2, 1, 2), (10, 10, 10)):
        mask = mask_of(*lengths, left=left)
        held(model, function, mask, labels=(ids_of(mask) % WIDTH).masked_fill(mask == 0, -100))


def test_batches_of_two_rows_of_one_length(late: int) -> None:
    torch.manual_seed(0)
    model = Encoder().double()
    function = compiled(model)
    for mask in (mask_of(10, 10), mask_of(10, 9), mask_of(10, 10), mask_of(1, 1), mask_of(1, 1), mask_of(0, 10)):
        held(model, function, mask)


@pytest.mark.parametrize(
    "ending",
    [
        lambda x, mask: x.transpose(0, 1),
        lambda x, mask: x.permute(2, 1, 0),
        lambda x, mask: x.permute(2, 0, 1).contiguous(),
        lambda x, mask: (x.reshape(-1, WIDTH), x.transpose(1, 2)),
        lambda x, mask: (x.argmax(-1), x > 0),
    ],
)
def test_axes_in_another_order(ending: Callable[..., Any], late: int) -> None:
    torch.manual_seed(0)
    model = Encoder(ending=ending).double()
    function = compiled(model)
    with torch.no_grad():
        packed = as_list(function(ids_of(MASK), MASK))
        for _ in range(3):
            function(ids_of(FULL), FULL)
        padded = as_list(function(ids_of(MASK), MASK))
    assert batches_before.MUCH_PADDING in last_failed(function)
    torch.testing.assert_close(padded, packed)


def last_failed(function: Any) -> tuple[str, ...]:
    """Of the last call that was known of, once those under way are known."""
    with torch.no_grad():
        for _ in range(12):
            function(ids_of(FULL), FULL)
    return next(step.failed for step in reversed(report().last) if step.fill < 1)


ASKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask == 1": lambda mask: mask == 1,
    "mask > 0": lambda mask: mask > 0,
    "not 1 - mask": lambda mask: ~(1 - mask).bool(),
    "mask < 1": lambda mask: mask < 1,
    "mask != 1": lambda mask: mask != 1,
}


@pytest.mark.parametrize("words", ASKED)
def test_masks_that_are_asked_for_one(words: str) -> None:
    """They are padding as long as they are 0 or 1. Else the padded graph runs, and no real token is made 0."""
    is_allowed = ASKED[words]
    is_negated = words in ("mask < 1", "mask != 1")

    class Asking(Encoder):
        def allowed(self, mask: torch.Tensor) -> torch.Tensor:
            return is_allowed(mask)[:, None, None, :]

    torch.manual_seed(0)
    model = Asking(ending=lambda x, mask: (x, mean(x, is_allowed(mask).long()))).double()
    function = compiled(model)
    for real in (MASK, FULL, mask_of(3, 0, 9)):
        mask = 1 - real if is_negated else real
        ids = ids_of(real)
        found, expected = function(ids, mask), model(ids, mask)
        assert report().last[-1].failed == ()
        torch.testing.assert_close(found[0], expected[0].masked_fill(real[..., None] == 0, 0), atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(found[1], expected[1], atol=1e-12, rtol=1e-10)
    for other in (2, -1):
        mask = MASK.clone()
        mask[0, 1] = mask[1, 3] = mask[2, 9] = other
        ids = ids_of(MASK)
        found, expected = function(ids, mask), model(ids, mask)
        assert report().last[-1].failed == ("the mask of padding is 0 or 1",)
        real = is_allowed(mask)
        torch.testing.assert_close(found[0][real], expected[0][real], atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(found[1], expected[1], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("shape", [(0, 6), (0, 0), (2, 1), (1, 2)])
def test_a_batch_of_hardly_any_positions_keeps_its_padding(shape: tuple[int, int]) -> None:
    """Found by the fuzzer: the number of real tokens of an empty batch is no symbol."""

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            heads = x[:, None] * 2
            y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, None, None, :] != 0)
            return (x + y[:, 0]) * mask[..., None]

    x, mask = torch.randn(*shape, 4), torch.ones(shape, dtype=torch.long)
    torch.testing.assert_close(compiled(Layer())(x, mask), Layer()(x, mask))
    assert report().kept is not None
