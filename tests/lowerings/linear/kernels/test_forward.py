"""With a decay for each head, results and states are those of the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attn_compiler.passes.matching.linear import draws
from tests.lowerings.linear.triton_problems import FORMS, SIZES, furthest, problem
from tests.thinned import further


@pytest.mark.parametrize("name", ["delta", "ssd"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("sort", further(draws.SORTS, daily=draws.SORTS[:1]))
def test_results_and_states_are_the_recurrence(name: str, sizes: tuple[int, int, int, int, int], sort: str) -> None:
    torch.manual_seed(0)
    found = furthest(FORMS[name], problem(FORMS[name], sizes, sort=sort), gradients=False)
    assert max(found.values()) < 5e-6, found


def test_equal_keys_without_decay_are_no_trouble() -> None:
    """Powers of the triangle of 64 such rows would be far beyond float32."""
    form = FORMS["delta"]
    given = dict(zip(form.roles, problem(form, (128, 1, 1, 16, 16)), strict=True))
    with torch.no_grad():
        given["k"][:] = given["k"][:, :1]
        given["beta"].fill_(1.0)
        given["g"].zero_()
    assert max(furthest(form, list(given.values())).values()) < 2e-5
