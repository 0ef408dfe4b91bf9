"""Masks that a module holds: read once, known as long as nobody writes to them, and never known to be what they are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_compiler
from attn_compiler import index_expr as ix
from attn_compiler.passes.recovering import buffers
from attn_compiler.torch_private import known_masks

B, H, S, D, MOST = 2, 3, 13, 8, 20
LOWEST = torch.finfo(torch.float32).min
KEPT = torch.ones(MOST, MOST, dtype=torch.bool).tril()
OPTIONS = {"inner": "eager", "strict": True, "lowerings": ("sdpa_cpu_flash", "reference")}


class Held(nn.Module):
    """Attention whose mask is a buffer."""

    def __init__(self, mask: Tensor, use: Callable[[Tensor, Tensor], Tensor], *, registered: bool = True) -> None:
        super().__init__()
        if registered:
            self.register_buffer("mask", mask, persistent=True)
        else:
            self.mask = mask
        self.use = use

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.use(scores, self.mask[..., : q.shape[-2], : k.shape[-2]]).softmax(-1) @ v


def kept(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, scores, LOWEST)


def kept_by_number(scores: Tensor, mask: Tensor) -> Tensor:
    """nanoGPT's and minGPT's."""
    return scores.masked_fill(mask == 0, -math.inf)


def added(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask


def _inputs(length: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, length, D, generator=generator, requires_grad=True) for _ in range(3)]


def _run(run: Callable[..., Tensor], length: int = S) -> list[Tensor]:
    inputs = _inputs(length)
    out = run(*inputs)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def _check(module: nn.Module, run: Callable[..., Tensor], length: int = S) -> None:
    for found, wanted in zip(_run(run, length), _run(module, length), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def _words() -> list[str]:
    return [site.spec.mask.words for report in attn_compiler.reports() for site in report.sites]


def _compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    attn_compiler.reset()
    return torch.compile(module, backend="attn_compiler", options=OPTIONS)


PROVED = {
    "tril": (KEPT, kept, "causal (proved)"),
    "tril with axes": (KEPT.view(1, 1, MOST, MOST), kept, "causal (proved)"),
    "tril of numbers": (KEPT.float()[None, None], kept_by_number, "causal (proved)"),
    "tril of whole numbers": (KEPT.long(), kept_by_number, "causal (proved)"),
    "what is later": (~KEPT, lambda s, m: s.masked_fill(m, LOWEST), "causal (proved)"),
    "-inf to be added": (torch.full((MOST, MOST), -math.inf).triu(1), added, "causal (proved)"),
    "the lowest to be added": (torch.where(KEPT, 0.0, LOWEST)[None], added, "causal (proved)"),
    "a window": (KEPT ^ KEPT.tril(-4), kept, "causal ∧ window (3 back) (proved)"),
    "both sides": (torch.ones(MOST, MOST).tril(4).triu(-4) > 0, kept, "window (4 back, 4 ahead) (proved)"),
}


@pytest.mark.parametrize("name", PROVED)
def test_what_a_module_holds_is_proved(name: str) -> None:
    mask, use, words = PROVED[name]
    module = Held(mask.clone(), use)
    run = _compiled(module)
    _check(module, run)
    _check(module, run)
    (found,) = _words()
    assert found.startswith(words)


def test_a_tensor_that_is_no_buffer_is_the_modules_too() -> None:
    module = Held(KEPT.clone(), kept, registered=False)
    _check(module, _compiled(module))
    assert _words() == ["causal (proved)"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_lengths(dynamic: bool | None) -> None:
    module = Held(KEPT.clone(), kept)
    _compiled(module)
    run = torch.compile(module, backend="attn_compiler", options=OPTIONS, dynamic=dynamic)
    for length in (S, S - 2, S + 4):
        _check(module, run, length)
    assert all(words.startswith("causal (proved)") for words in _words())


def _one_more(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[2, 5] = True
    return mask


NOT_PROVED: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "one pair more": (_one_more(KEPT), kept),
    "one pair less": (~_one_more(~KEPT.mT).mT, kept),
    "any pairs": (torch.rand(MOST, MOST, generator=torch.Generator().manual_seed(3)) > 0.2, kept),
    "another mask for each head": (torch.stack([KEPT, KEPT.tril(-1) | KEPT.mT, KEPT])[None], kept),
    "three numbers": (torch.where(KEPT, 0.0, LOWEST).tril(6) + KEPT.float().tril(-4), added),
    "numbers that mask nothing": (KEPT.float(), added),
    "a number and none": (torch.where(KEPT, 1.0, math.nan).tril(20).nan_to_num(2.0), added),
}


@pytest.mark.parametrize("name", NOT_PROVED)
def test_what_looks_like_a_band_is_added_or_masks_as_it_is(name: str) -> None:
    mask, use = NOT_PROVED[name]
    module = Held(mask | torch.eye(MOST, dtype=torch.bool) if mask.dtype == torch.bool else mask, use)
    _check(module, _compiled(module))
    assert all("(proved)" not in words for words in _words())


def _new_tensor(module: Held) -> None:
    module.mask = ~_one_more(~module.mask.mT).mT | torch.eye(MOST, dtype=torch.bool)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.mask.fill_(True),
    "through data": lambda m: m.mask.data.fill_(True),
    "a loaded state": lambda m: m.load_state_dict({"mask": torch.ones_like(m.mask)}),
    "numpy": lambda m: m.mask.numpy().fill(True),
    "another tensor": _new_tensor,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_mask_that_is_written_means_what_it_holds(name: str) -> None:
    module = Held(KEPT.clone(), kept)
    run = _compiled(module)
    _check(module, run)
    WRITES[name](module)
    before = _run(module)[0].clone()
    _check(module, run)
    assert not torch.allclose(before, _run(Held(KEPT.clone(), kept))[0])
    assert _words()[0] == "causal (proved)"


def test_what_is_written_before_each_call_is_compiled_three_times() -> None:
    """Twice it was read. Then code that relies on nothing serves all calls."""
    module = Held(KEPT.clone(), kept)
    run = _compiled(module)
    for _ in range(6):
        module.mask.copy_(KEPT)
        _check(module, run)
    found = _words()
    assert found[:2] == ["causal (proved)"] * 2
    assert len(found) == 3
    assert "dense bool" in found[2]


def test_a_mask_that_the_graph_writes_is_not_known() -> None:
    class Writing(Held):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.mask[1, 3:5] = True
            return super().forward(q, k, v)

    module, own = (Writing(KEPT.clone(), kept) for _ in range(2))
    run = _compiled(module)
    for found, wanted in zip(_run(run), _run(own), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    assert all("(proved)" not in words for words in _words())


def test_an_argument_is_not_read() -> None:
    """Each call may bring another one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, q @ k.mT, LOWEST).softmax(-1) @ v

    torch._dynamo.reset()
    attn_compiler.reset()
    mask = KEPT[:S, :S].clone()
    torch.compile(attend, backend="attn_compiler", options=OPTIONS)(*_inputs(), mask)
    assert known_masks.recall(mask) is None
    assert "dense bool" in _words()[0]


def test_two_modules_of_one_class_have_their_own_masks() -> None:
    first, second = Held(KEPT.clone(), kept), Held(KEPT.tril(2).triu(-3), kept)
    run = _compiled(first)
    _check(first, run)
    other = torch.compile(second, backend="attn_compiler", options=OPTIONS)
    _check(second, other)
    _check(first, run)
    assert [words.split(" (proved)")[0] for words in _words()] == ["causal", "causal ∧ window (3 back)"]


@pytest.mark.parametrize("rows", [3, 7])
@pytest.mark.parametrize("ahead", range(-4, 8))
@pytest.mark.parametrize("back", [-3, 0, 2, 9])
def test_bands(rows: int, ahead: int, back: int) -> None:
    mask = torch.ones(rows, 5, dtype=torch.bool).tril(ahead).triu(-back)
    for given, kind in ((mask, bool), (mask.float() * 2 - 1, float), (mask.int(), int)):
        found = buffers.band_of(given)
        if found is None:
            # All are one, or the first pair is outside of a band that has an end on both sides.
            assert len(given.unique()) == 1 or not mask[0, 0]
            continue
        values = [[ix.evaluate(found, {"i0": q, "i1": k}, {}) for k in range(5)] for q in range(rows)]
        assert [[kind(x) for x in row] for row in values] == given.tolist()


def test_a_look_ends_with_its_tensor() -> None:
    mask = KEPT.clone()
    assert buffers._is_next(mask)
    assert buffers._is_next(mask)
    assert not buffers._is_next(mask)
    key = id(mask)
    assert key in buffers._looks
    del mask
    assert key not in buffers._looks
