"""One fault costs one thing: an exception at one of two sites leaves that one as the model made it, and the other is lowered as usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

import attn_compiler
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.passes.graph import faults, mutation, program, strides
from attn_compiler.passes.graph.unit import module_path
from attn_compiler.passes.matching import match
from attn_compiler.passes.pipeline import running, step as one_step, steps
from attn_compiler.passes.recovering import reach, recover
from attn_compiler.passes.spelling import expand
from attn_compiler.passes.writing import lower, select
from attn_compiler.reasons.errors import PassFailed
from tests.passes.compiling import CPU_FLASH, Compiled, compiled, warned

B, H, S, D = 2, 4, 6, 8
sdpa = F.scaled_dot_product_attention
Break = Callable[[pytest.MonkeyPatch], None]


class _Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * D**-0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ v


class _Two(nn.Module):
    """`bad` is the only site with a mask, so that its spec is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad, self.fine = _Attention(False), _Attention(True), _Attention(False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fine(self.bad(self.good(q, k, v), k, v), k, v)


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, S, D, generator=generator, requires_grad=True) for _ in range(3)]


def _with_gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    inputs = _inputs()
    out = function(*inputs)
    return (out.detach(), *torch.autograd.grad(out.sin().sum(), inputs))


def _raising(monkeypatch: pytest.MonkeyPatch, home: Any, name: str, when: Callable[..., bool]) -> None:
    """The function does its work, then fails where `when` says so of its arguments: what it did has to be taken back."""
    function = getattr(home, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if when(*args):
            raise RuntimeError("not today")
        return result

    monkeypatch.setattr(home, name, fail)


def _causal(spec: Any) -> bool:
    return bool(spec.mask.is_causal)


def _is_bad(site: Any) -> bool:
    return bool(site.module == "bad")


def _in_lower(function: str, home: Any, when: Callable[..., bool]) -> tuple[str, Break]:
    return "lower", lambda patch: _raising(patch, home, function, when)


#: name -> the pass that fails at `bad` alone, and how
BROKEN: dict[str, tuple[str, Break]] = {
    "match": ("match", lambda p: _raising(p, match, "_match", lambda m, anchor, *_: "bad" in _owner(m, anchor))),
    "describe": ("recover", lambda p: _raising(p, recover, "_describe", lambda u, m, site, *_: _is_bad(site))),
    "decide": ("select", lambda p: _raising(p, select, "decide", lambda spec, *_: _causal(spec))),
    "why_not": ("select", lambda p: _raising(p, SdpaCpuFlash, "why_not", lambda _, spec, *__: _causal(spec))),
    "demand": ("layout", lambda p: _raising(p, SdpaCpuFlash, "demand", lambda _, spec: _causal(spec))),
    "emit": _in_lower("emit", SdpaCpuFlash, lambda _, builder, spec, __: _causal(spec)),
    "operands": _in_lower("_operands", lower, lambda m, site, *_: _is_bad(site)),
    "finish": _in_lower("finish", lower, lambda m, site, *_: _is_bad(site)),
    "unread": _in_lower("unread", lower, lambda m, site, *_: _is_bad(site)),
}


def _owner(mirror: Any, node: Any) -> str:
    owner = mirror.owner(node)
    return "" if owner is None else module_path(owner)


def _run(name: str, **options: Any) -> tuple[Compiled, tuple[Tensor, ...], list[str]]:
    run = compiled(_Two(), **{"strict": False, **options})
    got, said = warned(lambda: _with_gradients(run))
    return run, got, said


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_at_one_site_costs_that_site(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_name, break_it = BROKEN[name]
    expected = _with_gradients(_Two())
    break_it(monkeypatch)
    run, got, said = _run(name)
    torch.testing.assert_close(got, expected)
    assert run.calls.count(CPU_FLASH) == 2
    assert run.calls.count("softmax") == 1
    (text,) = said
    assert f"pass {pass_name!r} failed at bad: RuntimeError: not today" in text
    assert "To reproduce" in text
    assert run.report.faults == (text,)
    assert run.report.failure is None
    assert text[:60] in " ".join(str(run.report).split())
    lowered = [m for row in run.report.sites if row.decision.lowering == "sdpa_cpu_flash" for m in row.modules]
    assert lowered == ["good", "fine"]
    if pass_name in ("match", "recover"):
        (miss,) = run.report.misses
        reason, modules = miss.reason, miss.modules
    else:
        (row,) = (row for row in run.report.sites if row.decision.lowering == "untouched")
        reason, modules = row.decision.refusals[-1].reasons[-1], row.modules
        assert row.copies == ()
    assert modules == ("bad",)
    assert "RuntimeError: not today" in reason.observed


@pytest.mark.parametrize("name", BROKEN)
def test_strict_raises_with_the_site(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_name, break_it = BROKEN[name]
    break_it(monkeypatch)
    with pytest.raises(PassFailed, match="not today") as caught:
        compiled(_Two())(*_inputs())
    assert (caught.value.pass_name, caught.value.site) == (pass_name, "bad")


@pytest.mark.parametrize("name", [name for name, (where, _) in BROKEN.items() if where == "lower"])
def test_lowering_leaves_no_trace_of_a_site_that_failed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is the one that comes about if the site is refused from the start."""
    decide = select.decide

    def refuse(spec: Any, *args: Any) -> Any:
        decision = decide(spec, *args)
        return dataclasses.replace(decision, lowering="untouched") if _causal(spec) else decision

    with monkeypatch.context() as patch:
        patch.setattr(select, "decide", refuse)
        refused, *_ = _run(name)
    BROKEN[name][1](monkeypatch)
    failed, *_ = _run(name)
    assert [graph.calls for graph in failed.graphs] == [graph.calls for graph in refused.graphs]


def test_an_attempt_that_failed_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three sites with one mask fails when the mask is made: the second makes its own."""
    calls = []

    def fail_first(*_: Any) -> bool:
        calls.append(1)
        return len(calls) == 1

    _raising(monkeypatch, SdpaCpuFlash, "emit", fail_first)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = mask.float() * -3.0
        for _ in range(3):
            q = sdpa(q, k, v, attn_mask=bias.masked_fill(mask, float("-inf")))
        return q

    mask = torch.randn(B, 1, S, S, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0] = False
    inputs = [x.detach() for x in _inputs()]
    run = compiled(function, strict=False)
    got, said = warned(lambda: run(*inputs, mask))
    torch.testing.assert_close(got, function(*inputs, mask))
    assert len(said) == 1
    assert run.calls.count(CPU_FLASH) == 2
    assert run.calls.count("scaled_dot_product_attention") == 1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_buffers_of_a_site_that_failed_are_gone(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emit = SdpaCpuFlash.emit

    def fail(self: SdpaCpuFlash, builder: Any, spec: Any, operands: Any) -> Any:
        if not _causal(spec):
            return emit(self, builder, spec, operands)
        builder.buffer("amax", (2, 3))
        raise RuntimeError("not today")

    monkeypatch.setattr(SdpaCpuFlash, "emit", fail)
    model = _Two()

    def function(*inputs: Tensor) -> Tensor:
        if not checkpointed:
            return model(*inputs)
        return torch.utils.checkpoint.checkpoint(model, *inputs, use_reentrant=False)

    expected = _with_gradients(model)
    run = compiled(function, strict=False)
    got, said = warned(lambda: _with_gradients(run))
    torch.testing.assert_close(got, expected)
    assert len(said) == 1
    assert run.calls.count(CPU_FLASH) == 2
    assert "attn_compiler_buffer" not in run.text
    assert attn_compiler.fp8_state_dict() == {}


def test_the_same_fault_at_many_sites_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, SdpaCpuFlash, "emit", lambda *_: True)
    run, got, (text,) = _run("all")
    torch.testing.assert_close(got, _with_gradients(_Two()))
    assert "failed at good, bad, fine:" in text
    assert run.report.faults == (text,)
    assert CPU_FLASH not in run.calls


def test_two_faults_are_two_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, SdpaCpuFlash, "emit", lambda *_: True)
    _raising(monkeypatch, SdpaCpuFlash, "demand", lambda _, spec: _causal(spec))
    _, got, said = _run("both")
    torch.testing.assert_close(got, _with_gradients(_Two()))
    assert sorted("'layout' failed at bad" in text for text in said) == [False, True]
    assert sorted("'lower' failed at good, fine" in text for text in said) == [False, True]


@pytest.mark.parametrize("depth", ["program.build", "program.restore", "strides.relies_on", "mutation.storages"])
def test_faults_deep_inside_of_lowering(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last of three sites, counted from the begin of the pass."""
    module, _, name = depth.partition(".")
    home = {"program": program, "strides": strides, "mutation": mutation}[module]
    run_lower, sites = lower._lower, []

    def count(unit: Any, mirror: Any, site: Any, *rest: Any) -> Any:
        sites.append(site)
        return run_lower(unit, mirror, site, *rest)

    monkeypatch.setattr(lower, "_lower", count)
    _raising(monkeypatch, home, name, lambda *_: len(sites) == 3)
    run, got, said = _run(depth)
    torch.testing.assert_close(got, _with_gradients(_Two()))
    assert len(said) == 1
    assert run.calls.count(CPU_FLASH) == 2


def test_a_mask_that_lies_out_of_reach_may_fail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, reach, "missing", lambda *_: True)
    run, got, said = _run("reach")
    torch.testing.assert_close(got, _with_gradients(_Two()))
    assert len(said) == 1
    assert run.report.num_misses == 3


# ---- calls that are rewritten before there are sites ---------------------------------------------------------------


def _mha(weights: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return weights(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("function", ["inline", "_parts", "_describe"])
def test_a_call_that_can_not_be_expanded_costs_that_call(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    bad, good, x = nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 4), torch.randn(5, 2, 16)

    def two(x: Tensor) -> Tensor:
        return _mha(good, _mha(bad, x))

    calls: list[int] = []
    made = expand.inline

    def count(*args: Any) -> Any:
        calls.append(1)
        return made(*args)

    monkeypatch.setattr(expand, "inline", count)
    _raising(monkeypatch, expand, function, lambda *_: len(calls) == 1)
    run = compiled(two, strict=False)
    got, said = warned(lambda: run(x))
    torch.testing.assert_close(got, two(x))
    assert len(said) == 1
    assert "pass 'expand' failed" in said[0]
    assert run.calls.count("multi_head_attention_forward") == 1
    assert run.calls.count(CPU_FLASH) == 1


def test_a_softmax_whose_axis_can_not_be_moved_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v) + F.softmax(q @ k.mT, dim=1) @ v

    _raising(monkeypatch, expand, "_parts", lambda *_: True)
    run = compiled(function, strict=False)
    got, said = warned(lambda: _with_gradients(run))
    torch.testing.assert_close(got, _with_gradients(function))
    assert len(said) == 1
    assert run.calls.count(CPU_FLASH) == 1
    assert "transpose" not in run.calls
    with pytest.raises(PassFailed, match="'expand' failed"):
        compiled(function)(*_inputs())


# ---- what passes through -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [KeyboardInterrupt, TensorifyScalarRestartAnalysis])
def test_what_is_no_failure_passes_through(stop: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []

    def interrupt(*_: Any) -> Any:
        if not raised:
            raised.append(1)
            raise stop("the user, or Dynamo")
        return decide(*_)

    decide = select.decide
    monkeypatch.setattr(select, "decide", interrupt)
    run = compiled(_Two(), strict=False)
    if stop is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run(*_inputs())
        return
    got, said = warned(lambda: _with_gradients(run))
    torch.testing.assert_close(got, _with_gradients(_Two()))
    assert said == []
    assert run.calls.count(CPU_FLASH) == 3


def test_deep_recursion_and_lack_of_memory_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = recover._describe
    for kind in (RecursionError, MemoryError, torch.OutOfMemoryError):

        def fail(unit: Any, mirror: Any, site: Any, *rest: Any, kind: type[Exception] = kind) -> Any:
            if _is_bad(site):
                raise kind("too much")
            return describe(unit, mirror, site, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(recover, "_describe", fail)
            run, got, (text,) = _run(kind.__name__)
        torch.testing.assert_close(got, _with_gradients(_Two()))
        assert f"{kind.__name__}: too much" in text
        assert run.calls.count(CPU_FLASH) == 2


def test_the_text_of_a_fault_names_the_line_of_ours() -> None:
    from attn_compiler.reasons.errors import described

    try:
        one_step.check_contracts(steps.PIPELINE[-1:])
    except ValueError as error:
        text = described(error)
    assert text.startswith("ValueError: the pass 'keep' needs")
    assert "(step.py:" in text
    assert faults.failed("match", "layer", ValueError("a\n  b")).cause == "ValueError: a b"


@pytest.mark.parametrize("name", ["mirror", "match", "recover", "select", "layout"])
def test_a_pass_that_fails_for_one_graph_leaves_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bodies of checkpoints, of which one can't even be traced."""

    call = running.call

    def fail(step: Any, values: running.StepValues) -> Any:
        said = call(step, values)
        if step.name == name and values.get("unit").name == "wrap_body_0":
            raise KeyError("not today")
        return said

    monkeypatch.setattr(running, "call", fail)
    first, second = _Attention(False), _Attention(True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.utils.checkpoint.checkpoint(first, q, k, v, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(second, q, k, v, use_reentrant=False)

    run = compiled(function, strict=False)
    got, (text,) = warned(lambda: _with_gradients(run))
    torch.testing.assert_close(got, _with_gradients(function))
    assert f"pass {name!r} failed at wrap_body_0: KeyError: 'not today'" in text
    assert (run.report.num_sites, run.report.num_misses, run.report.faults) == (1, 1, (text,))
    assert "KeyError: 'not today'" in run.report.misses[0].reason.observed
    assert run.calls.count(CPU_FLASH) == 1
    with pytest.raises(PassFailed, match="not today"):
        compiled(function)(*_inputs())
