from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop

from attn_compiler.lowerings.graph_ops import no_gradients
from attn_compiler.lowerings.plain import ops as _ops  # noqa: F401 (registers the reference)
from attn_compiler.torch_private import inductor as torch_inductor
from tests import cases
from tests.cases import BY_NAME

BACKWARD = torch.ops.attn_compiler.reference_backward.default
ZEROS = torch.ops.attn_compiler.zeros.default


TEXT = cases.build(BY_NAME["causal"]).spec.to_text()


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.attn_compiler.reference(q, k, v, [], TEXT)
    return found


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(attention(q, k, v)[0], k, v)[0]


def reads_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attention(q, k, v)
    return attention(out, k, v)[0] + lse[..., None]


def once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)[0]


def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two lengths of queries."""
    return torch.cat([attention(q, k, v)[0], attention(q[:, :, :9], k, v)[0]], 2)


def shared(function: Callable[..., Tensor]) -> tuple[fx.GraphModule, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The backward after it, and gradients with it and without."""
    inputs = cases.build(BY_NAME["causal"])
    leaves, seen = (inputs.q, inputs.k, inputs.v), []

    def noted(gm: fx.GraphModule, given: Sequence[Tensor]) -> Any:
        no_gradients.share_zeros(gm.graph)
        gm.graph.lint()
        gm.recompile()
        seen.append(gm)
        return nop(gm, given)

    found = torch.autograd.grad(aot_function(function, nop, noted)(*leaves).sum(), leaves)
    return seen[0], found, torch.autograd.grad(function(*leaves).sum(), leaves)


@pytest.mark.parametrize(("function", "made"), [(twice, 1), (reads_one, 0), (once, 0), (apart, 0)])
def test_zeros_are_made_once_for_attentions_that_are_alike(function: Callable[..., Tensor], made: int) -> None:
    gm, found, right = shared(function)
    zeros = [node for node in gm.graph.nodes if node.target is ZEROS]
    assert len(zeros) == made
    readers = [node for node in gm.graph.nodes if node.target is BACKWARD and node.args[1] in zeros]
    assert len(readers) == 2 * made
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_fills_memory_once(dynamic: bool) -> None:
    inputs = cases.build(BY_NAME["causal"])
    leaves = (inputs.q, inputs.k, inputs.v)

    def backend(gm: fx.GraphModule, given: Sequence[Tensor]) -> Any:
        key = f"zeros {dynamic}"
        return torch_inductor.compile_with_inductor(
            gm, given, patches={}, cache_key=key, joint_pass=no_gradients.share_zeros
        )

    calls: list[tuple[int, ...]] = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ZEROS:
                calls.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        found = torch.compile(twice, backend=backend, dynamic=dynamic)(*leaves)
        with Counted():
            gradients = torch.autograd.grad(found.sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(twice(*leaves).sum(), leaves))
    assert calls == [tuple(inputs.q.shape[:3])]
