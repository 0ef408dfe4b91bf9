"""Where a kernel of linear attention fails, plain ops compute the call and its gradients, and its graph is compiled without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import attn_compiler
from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_backward, triton_launch, triton_op, triton_step
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning, KernelFailed
from attn_compiler.spec.linear import LinearForm
from tests.lowerings.linear.triton_problems import FORMS, _far, problem


@pytest.fixture(autouse=True)
def nothing_is_compiled(planted_failures: None) -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


def _fail(*given: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("sizes", [(90, 2, 4, 5, 7), (1, 2, 2, 16, 16)], ids=str)
def test_it_is_the_recurrence(name: str, sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_launched", _fail)
    monkeypatch.setattr(triton_backward, "_launched", _fail)
    form, given = FORMS[name], problem(FORMS[name], sizes)
    exact = dataclasses.replace(form, out_dtype="float64", state_dtype="float64")
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = definition(exact, wide)
    with pytest.warns(AttnCompilerWarning, match="no such kernel"):
        outs = triton_op.run(given, form.text)
    noise = [torch.randn_like(x) for x in wanted]
    grads = torch.autograd.grad(outs, given, [x.to(y.dtype) for x, y in zip(noise, outs, strict=True)])
    of_wide = torch.autograd.grad(wanted, wide, noise)
    for one, other in zip((*outs, *grads), (*wanted, *of_wide), strict=True):
        assert _far(one, other) < 1e-5


def test_a_step_writes_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_step, "_first", _fail)
    form = FORMS["delta"]
    x = dict(zip(form.roles, (x.detach() for x in problem(form, (1, 2, 4, 16, 24))), strict=True))
    wanted, last = definition(form, list(x.values()))
    with pytest.warns(AttnCompilerWarning, match="no such kernel"):
        out = triton_step.one_token(x["q"], x["k"], x["v"], x["g"], x["beta"], None, x["state"], form.text)
    assert _far(out, wanted) < 1e-5
    assert _far(x["state"], last) < 1e-5


def _function() -> tuple[LinearForm, Any]:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out, _ = module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        return out  # type: ignore[no-any-return]

    return dataclasses.replace(FORMS["delta"], roles=("q", "k", "v", "g", "beta")), run


def test_a_graph_whose_kernel_fails_is_compiled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_launched", _fail)
    form, own = _function()
    given = [x.detach() for x in problem(form, (70, 2, 2, 16, 16))]
    options: Any = {"inner": "aot_eager", "lowering": "linear_triton"}
    run = torch.compile(own, backend="attn_compiler", options=options)
    with pytest.warns(AttnCompilerWarning, match="no such kernel"):
        torch.testing.assert_close(run(*given), own(*given), rtol=1e-4, atol=1e-5)
    attn_compiler.reset()
    torch.testing.assert_close(run(*given), own(*given), rtol=1e-4, atol=1e-5)
    assert not [row for report in attn_compiler.reports() for row in report.linear]
    reasons = [miss.reason for report in attn_compiler.reports() for miss in report.misses]
    assert Code.NOT_COMPILED in [reason.code for reason in reasons]


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_launched", _fail)
    form, own = _function()
    options: Any = {"inner": "aot_eager", "lowering": "linear_triton", "strict": True}
    run = torch.compile(own, backend="attn_compiler", options=options)
    with pytest.raises(KernelFailed, match="no such kernel"):
        run(*(x.detach() for x in problem(form, (70, 2, 2, 16, 16))))
