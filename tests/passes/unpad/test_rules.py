"""Single lines of the table, where an op's arguments decide whether it commutes with packing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from attn_compiler.reasons.codes import Code
from tests.near_miss import linear_variants
from tests.passes.unpad.encoder import MASK, WIDTH, WORDS, Encoder, check, compiled, ids_of, report

ALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "sum": lambda x: x.sum(()),
    "mean": lambda x: x.mean(()),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=()),
}


@pytest.mark.parametrize("name", ALL)
def test_no_axes_are_all_axes(name: str) -> None:
    model = Encoder(ending=lambda x, mask: ALL[name](x)).eval()
    out = compiled(model)(ids_of(MASK), MASK)
    assert report().kept is not None
    torch.testing.assert_close(out, model(ids_of(MASK), MASK))


def test_a_masked_sum_over_no_axes_is_one_over_all() -> None:
    found = check(Encoder(ending=lambda x, mask: (x * mask[..., None]).sum(())), close=2e-5)
    assert found.kept is None


def test_gradients_that_count_how_often_a_token_occurs() -> None:
    model = Encoder()
    model.words = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)
    assert check(model).kept is not None


SEVERAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "frexp": lambda x: torch.frexp(x).mantissa,
    "frexp, put together": lambda x: torch.ldexp(*torch.frexp(x)),
    "frexp of a part": lambda x: x * torch.frexp(x[..., :1]).exponent,
    "frexp of what no attention made": lambda x: x * torch.frexp(torch.ones_like(x)).mantissa,
    "aminmax": lambda x: x - torch.aminmax(x, dim=-1, keepdim=True).min,
    "max": lambda x: x - x.max(-1, keepdim=True).values,
    "topk": lambda x: x - x.topk(2, -1).values.sum(-1, keepdim=True),
    "sort": lambda x: x.sort(-1).values,
    "median": lambda x: x - x.median(-1, keepdim=True).values,
    "cummax": lambda x: x.cummax(-1).values,
    "var_mean": lambda x: x - torch.var_mean(x, -1, keepdim=True)[1],
    "native_layer_norm": lambda x: torch.native_layer_norm(x, [WIDTH], None, None, 1e-5)[0],
    "qr": lambda x: x + torch.linalg.qr(x).Q.sum(),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_results_are_a_refusal_and_no_fault(name: str) -> None:
    """A fault would raise: `compiled` is strict."""
    kept = check(Encoder(between=SEVERAL[name]), close=2e-5).kept
    assert kept is not None
    assert kept.code is Code.MIXES_POSITIONS


def test_linear_attention_below_an_attention_is_named() -> None:
    function = linear_variants.own("mamba2_chunk_scan")

    def ending(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = (x * mask[..., None]).unflatten(-1, (2, -1))
        decay = -torch.ones(2)
        out = function(heads, heads[..., 0], decay, heads, heads, chunk_size=16, dt_softplus=True)
        return out.flatten(2)  # type: ignore[no-any-return]

    model = Encoder(ending=ending).eval()
    out = compiled(model)(ids_of(MASK), MASK)
    kept = report().kept
    assert kept is not None
    assert kept.code == Code.MIXES_POSITIONS
    assert "linear attention" in kept.observed
    torch.testing.assert_close(out, model(ids_of(MASK), MASK))
