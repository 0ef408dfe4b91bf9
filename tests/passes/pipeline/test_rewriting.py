"""The pipeline as a whole: failures, what is left untouched, graph breaks."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import attn_compiler
from attn_compiler import passes
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.options.options import Options
from attn_compiler.passes import run_pipeline
from attn_compiler.passes.pipeline import rewriting, running, steps
from attn_compiler.passes.pipeline.running import StepValues
from attn_compiler.passes.pipeline.step import PipelineStep
from attn_compiler.passes.pipeline.steps import PIPELINE
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from attn_compiler.spec.target import Target
from tests.passes.compiling import CPU_FLASH, captured, compiled

B, H, S, D = 2, 4, 6, 8
sdpa = F.scaled_dot_product_attention


def _q() -> Tensor:
    return torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(0))


# ---- failures -----------------------------------------------------------------------------------------------------


def _break(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The pass of that name does its work, then fails."""
    call = running.call

    def fail(step: PipelineStep, values: StepValues) -> Any:
        said = call(step, values)
        if step.name == name:
            raise KeyError(f"broken {name}")
        return said

    monkeypatch.setattr(running, "call", fail)


#: judges run where a graph is on trial
JUDGES = {step.judge for step in PIPELINE}
NAMES = [
    step.name
    for step in PIPELINE
    if step.name not in JUDGES and (step.only_if or "").split(".")[0] not in ("options", "unit")
]


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_pass_leaves_the_graph_as_it_came_and_warns_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, name)
    encoder = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()

    def function(x: Tensor) -> Tensor:
        return encoder(x) + torch.utils.checkpoint.checkpoint(lambda y: sdpa(y, y, y), x, use_reentrant=False)

    run = compiled(function, strict=False)
    x = torch.randn(2, 6, 16)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.testing.assert_close(run(x), function(x))
    ours = [str(w.message) for w in caught if issubclass(w.category, AttnCompilerWarning)]
    assert len(ours) == 1
    assert f"pass {name!r} failed" in ours[0]
    assert "To reproduce" in ours[0]
    assert run.report.failure is not None
    assert f"broken {name}" in run.report.failure
    assert run.report.sites == ()
    assert CPU_FLASH not in run.calls
    assert "_transformer_encoder_layer_fwd" in run.calls


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_pass_raises_in_strict_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, name)
    run = compiled(lambda q: sdpa(q, q, q))
    with pytest.raises(PassFailed, match=f"broken {name}") as caught:
        run(_q())
    assert caught.value.pass_name == name


def test_the_site_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(SdpaCpuFlash, "emit", fail)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), _Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    with pytest.raises(PassFailed, match="no kernel today") as caught:
        compiled(Model())(_q())
    assert (caught.value.pass_name, caught.value.site) == ("lower", "second")


class _Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sdpa(x, x, x)


def test_the_graph_is_the_very_same_text_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, "lower")
    gm, _ = captured(lambda q: F.softmax(q @ q.mT, -1) @ q, _q())
    before = gm.code
    with pytest.warns(AttnCompilerWarning):
        run_pipeline(gm, Options())
    assert gm.code == before
    assert all("example_value" in n.meta for n in gm.graph.nodes if n.op == "call_function")


# ---- what runs at all ---------------------------------------------------------------------------------------------


def test_a_graph_without_attention_is_not_even_mirrored() -> None:
    run = compiled(lambda x: x.relu() + 1)
    run(torch.ones(2))
    assert run.report.num_sites == run.report.num_misses == 0
    assert all(seconds == 0.0 for _, seconds in run.report.seconds)


def test_a_graph_of_misses_is_not_touched() -> None:
    run = compiled(lambda x: F.softmax(x, -1).cumsum(-1))
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), F.softmax(x, -1).cumsum(-1))
    assert run.report.num_misses == 1
    assert run.calls == ["softmax", "cumsum"]


def test_targets_for_tests_decide_instead_of_this_machine() -> None:
    gm, _ = captured(lambda q: sdpa(q, q, q), _q())
    report = run_pipeline(gm, Options(), {"cpu": Target.fake(device="cpu", disabled=frozenset({"flash"}))})
    (site,) = report.sites
    assert site.decision.lowering == "untouched"
    assert "flash off" in report.target


def test_every_pass_is_timed() -> None:
    run = compiled(lambda q: sdpa(q, q, q))
    run(_q())
    assert [name for name, _ in run.report.seconds] == [step.name for step in PIPELINE if step.on == "unit"]
    assert {name for name, seconds in run.report.seconds if seconds == 0.0} == JUDGES - {None}


def test_a_new_pass_needs_only_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    name = "made_by_a_test"
    room = types.ModuleType(name)
    vars(room)["count"] = lambda found: [site.match.pattern for site in found.sites]
    vars(room)["tell"] = seen.append
    monkeypatch.setitem(sys.modules, f"attn_compiler.passes.{name}", room)
    extra = PipelineStep(name="count", run=f"patterns = {name}.count(found)", needs=("match",))
    last = PipelineStep(name="tell", on="work", run=f"{name}.tell(patterns)", needs=("count",))
    after = [step.name for step in PIPELINE].index("verify") + 1
    monkeypatch.setattr(steps, "PIPELINE", (*PIPELINE[:after], extra, *PIPELINE[after:], last))
    compiled(lambda q: sdpa(q, q, q))(_q())
    assert seen == [["sdpa call"]]


# ---- models that Dynamo cuts into pieces --------------------------------------------------------------------------


def test_graph_break_inside_the_attention() -> None:
    """Each half is a graph of its own; neither holds a whole attention, and the strides between them are kept."""

    def function(q: Tensor) -> Tensor:
        weights = F.softmax(q @ q.mT, -1)
        torch._dynamo.graph_break()
        return weights @ q

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()))
    assert [(r.num_sites, r.num_misses) for r in run.reports] == [(0, 1), (0, 0)]


def test_graph_break_between_two_attentions() -> None:
    def function(q: Tensor) -> Tensor:
        q = sdpa(q, q, q)
        torch._dynamo.graph_break()
        return sdpa(q, q, q)

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()))
    assert [r.num_sites for r in run.reports] == [1, 1]


def test_outputs_keep_their_strides_for_code_after_the_graph() -> None:
    def attention(q: Tensor) -> Tensor:
        return F.softmax(q @ q.mT, -1) @ q

    def function(q: Tensor) -> Tensor:
        out = attention(q.transpose(1, 2))
        torch._dynamo.graph_break()
        return out.view(B, -1)

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()))
    (site,) = run.reports[0].sites
    assert [copy.operand for copy in site.copies] == ["out"]


def test_softmax_over_the_queries_is_refused_and_right() -> None:
    def function(q: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ q.mT, dim=-2) @ v

    run = compiled(function)
    torch.testing.assert_close(run(_q(), _q() * 2), function(_q(), _q() * 2))
    (miss,) = run.report.misses
    assert miss.reason.rule == "the product with v contracts the axis that the softmax ran over"
    assert CPU_FLASH not in run.calls


# ---- one decision for many layers ---------------------------------------------------------------------------------


def test_eight_equal_layers_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    why_not = SdpaCpuFlash.why_not

    def count(self: SdpaCpuFlash, spec: Any, target: Any) -> Any:
        asked.append(spec.to_text())
        return why_not(self, spec, target)

    monkeypatch.setattr(SdpaCpuFlash, "why_not", count)

    def function(q: Tensor) -> Tensor:
        for _ in range(8):
            q = sdpa(q, q, q)
        return sdpa(q, q, q, is_causal=True)

    run = compiled(function)
    torch.testing.assert_close(run(_q()), function(_q()), atol=2e-5, rtol=2e-5)
    assert len(asked) == len(set(asked)) == 2
    assert [len(site.modules) for site in run.report.sites] == [8, 1]


def test_public_reports_hold_the_report() -> None:
    run = compiled(lambda q: sdpa(q, q, q))
    run(_q())
    assert attn_compiler.reports()[-1] is run.report


def test_attention_in_a_graph_of_constants() -> None:
    """No input is a tensor: there is nothing to trace with, and nothing to gain."""
    constant = torch.randn(B, H, S, D)
    run = compiled(lambda n: sdpa(constant, constant, constant) * n)
    torch.testing.assert_close(run(2.0), sdpa(constant, constant, constant) * 2.0)


def test_empty_graph_module() -> None:
    gm = fx.symbolic_trace(lambda x: x)
    assert run_pipeline(gm, Options()).num_sites == 0


# ---- what goes on around a call -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_hooks_on_saved_tensors_see_those_of_the_call_alone(verify: bool) -> None:
    """A checkpoint around compiled code counts what is saved, and compares with its second run, which compiles nothing."""
    projection, x = nn.Linear(D, D), _q().requires_grad_()

    def layer(x: Tensor) -> Tensor:
        q = projection(x)
        return x + sdpa(q, q, q, is_causal=True)

    run = compiled(layer, verify=verify)
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert CPU_FLASH in run.calls
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("enabled", [True, False])
def test_pythons_collector_is_as_it_was_after_the_passes(enabled: bool) -> None:
    during: list[bool] = []

    def failing(*_: Any) -> Any:
        during.append(gc.isenabled())
        raise RuntimeError("planted")

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with mock.patch.object(rewriting, "_run", failing), pytest.warns(AttnCompilerWarning, match="planted"):
            passes.rewrite(fx.symbolic_trace(lambda x: x), Options())
        assert (gc.isenabled(), during) == (enabled, [False])
    finally:
        (gc.enable if before else gc.disable)()
