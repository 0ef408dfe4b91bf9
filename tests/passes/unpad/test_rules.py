"""Single lines of the table, where an op's arguments decide whether it commutes with packing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

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
