"""When kernels give rows without keys themselves, and what serves where they fail."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from attn_compiler.lowerings.shared.calls import by_definition
from attn_compiler.passes.writing import keyless_nodes
from tests.lowerings.shared.kernels.test_keyless_rows import added, attention, problem, replaced, results
from tests.passes.compiling import compiled

SIZES = (2, 4, 2, 40, 30, 16, 16)


@pytest.mark.parametrize(
    ("masked", "trains", "by_kernel"), [(added, True, True), (added, False, False), (replaced, True, False)]
)
def test_kernels_give_rows_where_q_and_k_get_a_gradient_from_them(
    masked: object, trains: bool, by_kernel: bool
) -> None:
    """Elsewhere nodes cost less."""
    tensors, takes_part, _ = problem(SIZES, "cpu", torch.float32)
    run = compiled(lambda *given: attention(*given, masked), lowering="triton")
    with torch.set_grad_enabled(trains):
        run(*tensors, *takes_part)
    (graph,) = run.graphs
    assert ('"means":true' in graph.text.replace('\\"', '"')) == by_kernel
    assert ("mean" in graph.calls) != by_kernel
    assert keyless_nodes.NOTE in run.site.notes


def test_the_definition_has_them_too() -> None:
    """What serves where a kernel fails."""
    tensors, (queries, keys), grad = problem(SIZES, "cpu", torch.float64)
    expected = results(lambda *given: attention(*given, added), tensors, [queries, keys], grad)
    mask = queries[:, None, :, None] & keys[:, None, None, :]
    q, k, v = (x.detach() for x in tensors)
    given = by_definition.Attention(q=q, k=k, v=v, tensors={"mask": mask}, scale=0.2, means=-torch.inf)
    out, lse = by_definition.forward(given)
    grads = by_definition.backward(given, grad, torch.zeros_like(lse), out, lse)
    for one, other in zip((out, grads.q, grads.k, grads.v), expected, strict=True):
        torch.testing.assert_close(one, other)
