"""(1 - mask) · -10000 on each kernel that runs here, for whatever whole numbers a mask holds: the model's own numbers in float64.

Kernels that know truth values of keys add no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.interpreted_target import triton_interpreted
from tests.lowerings.against_float64 import assert_same
from tests.passes.compiling import compiled

B, HEADS, S, D = 4, 2, 35, 32
#: what makes (B, 1, 1, S) of a mask (B, S)
Make = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with triton_interpreted():
        yield


def _attention(make: Make) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(mask).to(q.dtype)[:, None, None])

    return attend


def _diffusers(mask: Tensor) -> Tensor:
    return (1 - mask.to(torch.float32)) * -10000.0


MASKS: dict[str, Callable[[], Tensor]] = {
    "0 and 1": lambda: torch.tensor([[1] * S, [1] * 20 + [0] * (S - 20), [0] * S, [0, 1, 0] * 11 + [0] * 2]),
    "truth values": lambda: torch.tensor([[1] * S, [1] * 20 + [0] * (S - 20), [0] * S, [0, 1] * 17 + [1]]).bool(),
    "other whole numbers": lambda: torch.arange(B * S).view(B, S) % 5 - 1,
    "below 0": lambda: -(torch.arange(B * S).view(B, S) % 3) - 2,
}
FORMS: dict[str, Make] = {
    "diffusers'": _diffusers,
    "in half precision": lambda mask: (1 - mask.to(torch.float16)) * -10000.0,
    "of all heads": lambda mask: _diffusers(mask).repeat_interleave(HEADS, 0).view(B, HEADS, S)[:, 0],
}


def _given(mask: str, dtype: torch.dtype, *, grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, HEADS, S, D, generator=generator).to(dtype).requires_grad_(grad) for _ in range(3))
    return [q, k, v, MASKS[mask]()]


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["triton", "decode", "rows", "sdpa_cpu_flash", "math", "reference"])
@pytest.mark.parametrize("mask", MASKS)
def test_forward(mask: str, lowering: str) -> None:
    """PyTorch's kernels and those of no keys add the numbers, and have their rounding."""
    attend, queries = _attention(_diffusers), 4 if lowering == "decode" else S
    run = compiled(attend, lowering=lowering)

    def given() -> list[Tensor]:
        q, *others = _given(mask, torch.float32, grad=False)
        return [q[:, :, :queries], *others]

    assert_same(run, attend, given, within=2e-5 if lowering in ("triton", "decode", "rows") else 2e-2)
    assert run.site.spec.score.by_highest
    assert run.site.decision.lowering == lowering


@pytest.mark.in_turns
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", MASKS)
def test_forward_and_backward(mask: str, form: str) -> None:
    attend = _attention(FORMS[form])
    run = compiled(attend, lowering="triton")
    assert_same(run, attend, lambda: _given(mask, torch.float16, grad=True), within=2e-3)
    assert run.site.spec.score.by_highest
    assert run.site.decision.lowering == "triton"


def _lowest(mask: Tensor) -> Tensor:
    return (1 - mask.to(torch.float32)) * torch.finfo(torch.float32).min


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["triton", "decode", "rows", "sdpa_cpu_flash", "math", "reference"])
@pytest.mark.parametrize("mask", ["0 and 1", "other whole numbers", "below 0", "twice and infinite"])
def test_a_lowest_number(mask: str, lowering: str) -> None:
    """No score counts beside it: a row without a 0 is the softmax over the numbers, and NaN where one is infinite."""
    assert torch.isinf(_lowest(torch.tensor(3)))
    attend, queries = _attention(_lowest), 4 if lowering == "decode" else S
    run = compiled(attend, lowering=lowering)

    def given() -> list[Tensor]:
        q, k, v, found = _given("other whole numbers" if mask not in MASKS else mask, torch.float32, grad=False)
        twice = torch.tensor([[1] * S, [1] * 20 + [2] * (S - 20), [0] * 9 + [2] + [1] * (S - 10), [0, 3] * 17 + [1]])
        return [q[:, :, :queries], k, v, found if mask in MASKS else twice]

    torch.testing.assert_close(run(*given()), _in_float64(attend, given()), atol=2e-5, rtol=2e-5, equal_nan=True)
    assert run.site.spec.score.by_highest
    assert run.site.decision.lowering == lowering


def _in_float64(attend: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
    """In float64, with the numbers that float32 holds. PyTorch gives 0 where all of them are -inf."""
    q, k, v, mask = given
    scores = q.double() @ k.double().mT * D**-0.5
    masked = (scores.float() + _lowest(mask)[:, None, None]).double()
    return (torch.ops.aten._safe_softmax.default(masked, -1) @ v.double()).float()


def test_gradients_in_float32_are_left_to_the_model() -> None:
    """PyTorch's kernels would add the numbers, and make the weights anew from an lse beside them."""
    run = compiled(_attention(_diffusers), lowering="sdpa_cpu_flash")
    run(*_given("0 and 1", torch.float32, grad=True))
    assert run.site.decision.lowering == "untouched"
