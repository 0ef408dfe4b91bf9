from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.plain import ops as reference_ops
from attn_compiler.lowerings.shared.ops import given_ops, leaf_ops as ops
from attn_compiler.torch_private import inductor as torch_inductor
from tests import cases
from tests.cases import BY_NAME
from tests.lowerings.shared.ops.test_leaf_ops import leaf, operands


def test_what_is_given_gets_the_family_s_gradients_and_is_left_out_of_compiled_code() -> None:
    """out and lse of nodes of their own, here of the reference itself; the backward reads what was kept, here half of q."""

    def read(kept: Sequence[torch.Tensor], text: str) -> given_ops.Read:
        half, k, v = kept
        return given_ops.Read(q=half * 2, k=k, v=v, text=text.removeprefix("kept "))

    given_ops.register_given(
        "reference",
        "reference_halved_given",
        leading=lambda text: 3 if text.startswith("kept ") else 0,
        read=read,
        differentiable=reference_ops._reference_differentiable,
    )
    inputs = cases.build(BY_NAME["causal"])
    text, calls = inputs.spec.to_text(), []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = [x.detach() for x in (q, k, v)]
        out, lse = torch.ops.attn_compiler.reference(*given, operands(inputs), text)
        kept = [out * 1, lse, given[0] / 2, *given[1:], *operands(inputs)]
        attached: torch.Tensor = torch.ops.attn_compiler.reference_halved_given(q, k, v, kept, f"kept {text}")[0]
        return attached

    def noted(graph: fx.Graph) -> None:
        ops.without_autograd(graph)
        calls.extend(str(node.target) for node in graph.nodes if "attn_compiler" in str(node.target))

    def backend(gm: fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
        return torch_inductor.compile_with_inductor(gm, given, patches={}, cache_key="given", joint_pass=noted)

    leaves = (inputs.q, inputs.k, inputs.v)
    right = leaf(inputs)[0]
    upstream = torch.randn_like(right)
    expected = [right, *torch.autograd.grad(right, leaves, upstream)]
    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        for function in (run, torch.compile(run, backend=backend)):
            out = function(*leaves)
            torch.testing.assert_close([out, *torch.autograd.grad(out, leaves, upstream)], expected)
    assert calls == ["attn_compiler.reference_forward.default", "attn_compiler.reference_backward.default"]


def test_a_formula_gets_what_comes_after_out_and_lse() -> None:
    got: list[Any] = []

    def formula(grad_out: torch.Tensor, further: Sequence[torch.Tensor], text: str) -> given_ops.Gradients:
        got.append((tuple(further), text))
        return grad_out * further[0], grad_out * 2, grad_out * 3

    given_ops.register_given_with("tests", formula=formula)
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    factor, out, lse = torch.tensor(5.0), torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8)
    found = torch.ops.attn_compiler.tests_given(q, k, v, [out, lse, factor], "text")
    torch.testing.assert_close(found[:2], (out, lse))
    upstream = torch.randn(1, 2, 8, 4)
    grads = torch.autograd.grad(found[0], (q, k, v), upstream)
    torch.testing.assert_close(grads, (upstream * 5, upstream * 2, upstream * 3))
    assert got == [((factor,), "text")]
