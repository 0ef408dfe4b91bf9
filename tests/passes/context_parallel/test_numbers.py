"""Numbers of a mask, a bias or a scale that look like the length of a rank's part, and those that do not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.passes.context_parallel.compiled import HEADS, LENGTH, Attend, Data, Model, compile_and_run

Index = torch.Tensor


def _mask(make: Callable[[Index, Index, int], torch.Tensor]) -> Attend:
    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        count = torch.arange(q.shape[2])
        return scaled_dot_product_attention(q, k, v, attn_mask=make(count[:, None], count[None], q.shape[2]))

    return attend


def _scaled(scale: Callable[[int], float]) -> Attend:
    return lambda m, q, k, v, d: scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale(q.shape[2]))


def _centred(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    count = torch.arange(q.shape[2])
    bias = model.table[count[None] - count[:, None] + q.shape[2] - 1].permute(2, 0, 1)[None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _bucketed(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    """As T5 does it: 16 is in another bucket in another dtype."""
    count = torch.arange(q.shape[2])
    distance = (count[None] - count[:, None]).abs()
    far = 7 + (torch.log(distance.clamp(min=1).float() / 7) / math.log(13) * 7).to(torch.int64)
    bias = model.table[torch.where(distance < 7, distance, far.clamp(0, 13))].permute(2, 0, 1)[None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_buckets_that_depend_on_rounding_are_refused() -> None:
    with pytest.raises(ContextParallelUnsupported, match="depends on how a number is rounded"):
        compile_and_run(attend=_bucketed)


OF_LENGTH: dict[str, Attend] = {
    "prefix of all but one": _mask(lambda q, k, n: (k < n - 1) | (k <= q)),
    "prefix of half": _mask(lambda q, k, n: (k < n // 2) | (k <= q)),
    "window as wide as a part": _mask(lambda q, k, n: (k <= q) & (q - k < n)),
    "from the last position on": _mask(lambda q, k, n: (0.5 * (k - (n - 1))).expand(n, n)),
    "distance by length": _mask(lambda q, k, n: (k - q) / n),
    "table with its centre at the last position": _centred,
    "scale by the logarithm": _scaled(math.log),
    "default scale by the logarithm": _scaled(lambda n: math.log(n) / math.sqrt(16 // HEADS)),
}

OF_THE_MODEL: dict[str, Attend] = {
    "prefix": _mask(lambda q, k, n: (k < 5) | (k <= q)),
    "window of half": _mask(lambda q, k, n: (k <= q) & (q - k < LENGTH // 2)),
    "window wider than a part": _mask(lambda q, k, n: (k <= q) & (q - k < LENGTH + 7)),
    "distance by a number": _mask(lambda q, k, n: (k - q) / 10),
    "scale": _scaled(lambda n: 0.3),
}


@pytest.mark.parametrize("name", OF_LENGTH)
def test_a_number_that_looks_like_the_length_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=f"a rank has {LENGTH} positions.*allow=.'length',"):
        compile_and_run(attend=OF_LENGTH[name])


@pytest.mark.parametrize("name", ["window as wide as a part", "scale by the logarithm"])
def test_it_may_be_chance(name: str) -> None:
    compile_and_run(attend=OF_LENGTH[name], allow=("length",))


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_other_numbers_are_taken(name: str) -> None:
    compile_and_run(attend=OF_THE_MODEL[name])
