"""Scores of two sets of keys under one softmax: what stands beside them, and what is left where a kernel takes their place or none does.

Which programs are one attention: tests/near_miss/test_joined_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.graph.spelling import JOINED
from attn_compiler.passes.spelling import joined_keys
from tests import numerics
from tests.passes.compiling import CPU_FLASH, captured, compiled

B, H, S, D, MEMORY = 2, 3, 40, 16, 7


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=generator).to(dtype).requires_grad_() for n in (S, S, S, MEMORY, MEMORY)]


def _attention(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
    later = torch.arange(S)[None, :] > torch.arange(S)[:, None]
    own = (q @ k.mT / D**0.5).masked_fill(later, float("-inf"))
    weights = torch.cat([q @ mk.mT / D**0.5, own], -1).softmax(-1)
    return weights[..., :MEMORY] @ mv + weights[..., MEMORY:] @ v


def test_a_kernel_takes_the_place_of_all_of_it() -> None:
    run = compiled(_attention)
    torch.testing.assert_close(run(*_inputs()), _attention(*_inputs()))
    assert run.site.pattern == JOINED
    assert "the keys and values of 2 parts are joined, which copies them" in run.site.notes
    assert run.calls.count(CPU_FLASH) == 1
    assert not {"softmax", "matmul", "masked_fill"} & set(run.calls)


def test_the_mask_of_one_set_is_proved() -> None:
    """Of a memory that comes first, the diagonal lies behind it."""
    run = compiled(_attention)
    run(*_inputs())
    mask = run.site.spec.mask
    assert mask.reason is None
    assert mask.conditions, mask.words


def test_the_model_stays_where_no_kernel_takes_it() -> None:
    plain, _ = captured(_attention, *_inputs())
    run = compiled(_attention, lowerings=["cudnn"])
    torch.testing.assert_close(run(*_inputs()), _attention(*_inputs()))
    assert run.site.decision.lowering == "untouched"
    assert sorted(run.calls) == sorted(
        str(getattr(n.target, "__name__", n.target)) for n in plain.graph.nodes if n.op.startswith("call")
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_and_gradients(dtype: torch.dtype) -> None:
    """No further from float64 than twice what eager is."""
    run = compiled(_attention, lowerings=["sdpa_cpu_flash", "math"])
    found, usual, exact = (
        _with_gradients(function, [x.detach().to(kind).requires_grad_() for x in _inputs(dtype)])
        for function, kind in ((run, dtype), (_attention, dtype), (_attention, torch.float64))
    )
    for mine, own, right in zip(found, usual, exact, strict=True):
        allowed = numerics.FACTOR * numerics.worst(own, right) + numerics.floor(right, dtype)
        assert mine.dtype == dtype
        assert numerics.worst(mine, right) <= allowed


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


def test_under_autocast() -> None:
    def function(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _attention(*tensors)

    run = compiled(function)
    torch.testing.assert_close(run(*_inputs()), function(*_inputs()), atol=3e-2, rtol=3e-2)
    assert run.site.pattern == JOINED


def test_two_layers() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor) -> Tensor:
        return _attention(_attention(q, k, v, mk, mv), k, v, mk, mv)

    run = compiled(layers)
    torch.testing.assert_close(run(*_inputs()), layers(*_inputs()), atol=1e-5, rtol=1e-5)
    assert run.report.num_sites == 2
    assert not run.report.misses


def test_what_is_written_beside() -> None:
    gm, _ = captured(_attention, *_inputs())
    (spelled,) = joined_keys.spell_joined(gm)
    gm.graph.lint()
    assert spelled.product.meta["example_value"].requires_grad
    assert not spelled.own.users
    assert spelled.call in spelled.replaced
