"""The leaf ops: their schemas, fakes and operands that are given."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.codegen import custom_extern_kernel_codegen

from attn_compiler.lowerings.plain import ops as reference_ops
from attn_compiler.lowerings.shared.ops import given_ops, leaf_ops as ops
from attn_compiler.torch_private import inductor as torch_inductor, op_library
from tests import cases, numerics
from tests.cases import BY_NAME, Inputs

VARIETY = (
    *("causal", "gqa", "mask_bk", "head_dims_differ", "layout_bshd", "bias_mask", "everything", "causal_bfloat16"),
    *("bias_heads", "sinks"),
)


def operands(inputs: Inputs) -> list[torch.Tensor]:
    return [t for t in (inputs.mask, inputs.bias, inputs.sinks) if t is not None]


def leaf(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.attn_compiler.reference(inputs.q, inputs.k, inputs.v, operands(inputs), inputs.spec.to_text())


@pytest.mark.parametrize("name", ["cudnn", "decode", "fa4", "hopper", "reference", "rows", "triton"])
def test_the_schema_is_that_of_every_leaf_op(name: str) -> None:
    importlib.import_module(f"attn_compiler.lowerings.{name.replace('reference', 'plain')}.ops")
    op = getattr(torch.ops.attn_compiler, name).default
    assert str(op._schema) == f"attn_compiler::{name}{ops.LEAF_SCHEMA}"
    assert torch.Tag.needs_exact_strides in op.tags


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", VARIETY)
def test_opcheck(name: str) -> None:
    inputs = cases.build(BY_NAME[name])
    arguments = (inputs.q, inputs.k, inputs.v, operands(inputs), inputs.spec.to_text())
    torch.library.opcheck(torch.ops.attn_compiler.reference.default, arguments)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", VARIETY)
def test_opcheck_of_the_backward(name: str) -> None:
    inputs = cases.build(BY_NAME[name], needs_grad=False)
    out, lse = leaf(inputs)
    arguments = (out, lse, inputs.q, inputs.k, inputs.v, operands(inputs), out, lse, inputs.spec.to_text())
    torch.library.opcheck(torch.ops.attn_compiler.reference_backward.default, arguments)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_code_calls_the_leaf_op_without_its_formula(training: bool) -> None:
    inputs = cases.build(BY_NAME["causal"], needs_grad=training)
    calls: list[str] = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = operands(inputs)
        out: torch.Tensor = torch.ops.attn_compiler.reference(q, k, v, given, inputs.spec.to_text())[0]
        return out

    def noted(graph: fx.Graph) -> None:
        ops.without_autograd(graph)
        calls.extend(str(node.target) for node in graph.nodes if "attn_compiler" in str(node.target))

    def backend(gm: fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
        return torch_inductor.compile_with_inductor(gm, given, patches={}, cache_key=str(training), joint_pass=noted)

    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        found = torch.compile(run, backend=backend)(inputs.q, inputs.k, inputs.v)
    torch.testing.assert_close(found, leaf(inputs)[0])
    backward = ["attn_compiler.reference_backward.default"] if training else []
    assert calls == ["attn_compiler.reference_forward.default", *backward]
    if training:
        right = torch.autograd.grad(leaf(inputs)[0].sum(), inputs.q)[0]
        torch.testing.assert_close(torch.autograd.grad(found.sum(), inputs.q)[0], right)


def counted(*arguments: Any) -> Any:
    """The body that compiled code is told of below, in place of the reference's own."""
    COUNTED.append(len(arguments))
    return reference_ops._reference(*arguments)


class Place:
    """The same for one place: which of them is called."""

    def __init__(self) -> None:
        PLACES.append(self)

    def __call__(self, *arguments: Any) -> Any:
        CALLED.append(self)
        return counted(*arguments)


COUNTED: list[int] = []
PLACES: list[Place] = []
CALLED: list[Place] = []


@pytest.mark.parametrize(("site", "dynamic"), [(None, False), ("Place", False), ("Place", True)])
def test_compiled_code_calls_a_body_by_itself(monkeypatch: pytest.MonkeyPatch, site: str | None, dynamic: bool) -> None:
    """Forward and backward of two calls; where the caller is PyTorch, the op is what it was. Where sizes are symbols, no place is for one
    way that tensors lie."""
    registry = custom_extern_kernel_codegen.CUSTOM_EXTERN_KERNEL_CODEGEN
    monkeypatch.setitem(op_library.BODIES, "reference_forward", op_library.Late(__name__, "counted", site))
    monkeypatch.setitem(registry, "torch.ops.attn_compiler.reference_forward.default", None)  # is deleted afterwards
    inputs = cases.build(BY_NAME["causal"])

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        once: torch.Tensor = torch.ops.attn_compiler.reference(q, k, v, operands(inputs), inputs.spec.to_text())[0]
        out: torch.Tensor = torch.ops.attn_compiler.reference(once, k, v, operands(inputs), inputs.spec.to_text())[0]
        return out

    def backend(gm: fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
        joint_pass = ops.without_autograd
        return torch_inductor.compile_with_inductor(gm, given, patches={}, cache_key="directly", joint_pass=joint_pass)

    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        compiled = torch.compile(run, backend=backend, dynamic=dynamic)
        compiled(inputs.q, inputs.k, inputs.v)
        COUNTED.clear()
        CALLED.clear()
        found = compiled(inputs.q, inputs.k, inputs.v)
    right = run(inputs.q, inputs.k, inputs.v)
    assert COUNTED == [5, 5]
    assert ([] if site is None or dynamic else PLACES[-2:]) == CALLED
    torch.testing.assert_close(found, right)
    leaves = (inputs.q, inputs.k, inputs.v)
    upstream = torch.randn_like(right)
    for got, want in zip(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(right, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_out_is_bshd_in_memory_and_lse_contiguous() -> None:
    inputs = cases.build(BY_NAME["head_dims_differ"], needs_grad=False)
    out, lse = leaf(inputs)
    assert out.transpose(1, 2).is_contiguous()
    assert (lse.shape, lse.dtype) == ((2, 4, 73), torch.float32)
    assert lse.is_contiguous()


def test_lse_is_the_natural_logarithm_of_the_denominator_and_has_a_gradient() -> None:
    inputs = cases.build(BY_NAME["float64"])
    expected = (inputs.q @ inputs.k.transpose(-1, -2) * inputs.spec.score.scale).masked_fill(
        torch.ones(73, 73, dtype=torch.bool).triu(1), -torch.inf
    )
    got, right = leaf(inputs)[1], expected.logsumexp(-1)
    torch.testing.assert_close(got, right)
    upstream = torch.randn_like(right)
    grads = torch.autograd.grad(got, (inputs.q, inputs.k), upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(right, (inputs.q, inputs.k), upstream))


@pytest.mark.parametrize("name", ["float64", "everything"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    case = cases.dataclasses.replace(BY_NAME[name], dtype=torch.float64, seqlen_q=5, seqlen_kv=7, head_dim=4)
    inputs = cases.build(case)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, *others = tensors
        given = ([inputs.mask] if inputs.mask is not None else []) + others
        return torch.ops.attn_compiler.reference(q, k, v, given, inputs.spec.to_text())

    assert torch.autograd.gradcheck(function, inputs.differentiable)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_with_gradients(backend: str) -> None:
    inputs = cases.build(BY_NAME["everything"])

    def function(given: Inputs) -> torch.Tensor:
        return compiled(given.q, given.k, given.v, operands(given))

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, further: list[torch.Tensor]) -> torch.Tensor:
        return torch.ops.attn_compiler.reference(q, k, v, further, text)[0]

    text = inputs.spec.to_text()
    numerics.assert_within_rule(numerics.with_gradients(function, inputs), inputs)


def test_works_on_sizes_other_than_the_spec_names() -> None:
    small, large = (cases.build(cases.Case(name="x", seqlen_q=s, seqlen_kv=s, causal=cases.TOP_LEFT)) for s in (3, 9))
    got = torch.ops.attn_compiler.reference(large.q, large.k, large.v, [], small.spec.to_text())[0]
    numerics.assert_within_rule([got], large)


def test_a_wrong_number_of_operands_is_an_error() -> None:
    inputs = cases.build(BY_NAME["bias_heads"])
    with pytest.raises(ValueError, match="the spec has 1 operands"):
        torch.ops.attn_compiler.reference(inputs.q, inputs.k, inputs.v, [], inputs.spec.to_text())


def test_registering_again_changes_nothing() -> None:
    inputs = cases.build(BY_NAME["causal"])
    before = torch.ops.attn_compiler.reference.default
    importlib.reload(ops)
    assert torch.ops.attn_compiler.reference.default is before
    numerics.assert_within_rule(numerics.with_gradients(lambda given: leaf(given)[0], inputs), inputs)


def test_importing_lowerings_needs_neither_cuda_nor_transformers() -> None:
    code = (
        "import sys, torch, attn_compiler.lowerings\n"
        "assert not torch.cuda.is_initialized() and 'transformers' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
