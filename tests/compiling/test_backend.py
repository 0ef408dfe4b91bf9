"""The backend, the inner compiler that it hands on to, and attempts that failed."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

import attn_compiler.compiling.backend as backend_module
from attn_compiler import passes
from attn_compiler.lowerings import homes
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Decision, Reason
from attn_compiler.reasons.errors import InvalidOption, LoweringUnavailable, PassFailed, UnknownOption
from attn_compiler.reporting import publishing
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec import masks, scores
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, inductor as torch_inductor
from tests import fresh

NO_GPU = Reason(code=Code.DEVICE, rule="needs a CUDA device", observed="cpu")


@dataclass
class Pipeline:
    """Stands in for the passes and the reports: notes the calls, and answers with `report`."""

    report: Report = field(default_factory=lambda: Report(graph="0/0", target="cpu"))
    rewrite: Callable[[fx.GraphModule], None] = lambda gm: None
    calls: list[tuple[fx.GraphModule, Options]] = field(default_factory=list)
    published: list[tuple[Report, Options]] = field(default_factory=list)

    def run(self, gm: fx.GraphModule, options: Options, start: Callable[[], object], **_: Any) -> passes.Rewritten:
        self.calls.append((gm, options))
        start()
        self.rewrite(gm)
        return passes.Rewritten(report=self.report, units=(), originals=(), failed=False)

    def publish(self, report: Report, options: Options) -> None:
        self.published.append((report, options))


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    stand_in = Pipeline()
    monkeypatch.setattr(passes, "rewrite", stand_in.run)
    monkeypatch.setattr(publishing, "publish", stand_in.publish)
    known = {"sdpa": mock.Mock(unavailable=lambda _: []), "cudnn": mock.Mock(unavailable=lambda _: [NO_GPU])}
    monkeypatch.setattr(homes, "CLASSES", known)
    monkeypatch.setattr(select, "by_name", known.__getitem__)
    return stand_in


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="attn_compiler", options=options)


def _report_with_one_site() -> Report:
    tensor = TensorSpec(shape=(1, 2, 4, 8), strides=(64, 32, 8, 1), dtype="float32")
    spec = AttentionSpec(
        q=tensor,
        k=tensor,
        v=tensor,
        mask=masks.MaskSpec(),
        score=scores.ScoreSpec(scale=1.0),
        device="cpu",
        out_dtype="float32",
    )
    site = SiteReport(modules=("attn",), pattern="sdpa_call", spec=spec, decision=Decision(lowering="untouched"))
    return Report(graph="0/0", target="cpu", sites=(site,))


def test_registered_by_entry_point_without_an_import_of_ours() -> None:
    code = """
import sys, torch
assert "attn_compiler" in torch._dynamo.list_backends()
assert not [name for name in sys.modules if name.startswith("attn_compiler")]
version, torch.__version__ = torch.__version__, "2.10.0"
try:
    torch.compile(torch.sin, backend="attn_compiler")
except Exception as error:
    assert type(error).__name__ == "UnsupportedTorch", error
else:
    raise SystemExit("an unsupported torch was accepted")
torch.__version__ = version
torch.compile(torch.sin, backend="attn_compiler")  # nothing was half-registered
"""
    fresh.run(code)


def test_code_from_a_cache_finds_the_ops_that_it_calls() -> None:
    """No pass of the joint graph runs then, in a process that has imported nothing yet."""
    code = """
import torch
from attn_compiler.torch_private import inductor as torch_inductor

def cached(gm, example_inputs, **_):
    return lambda x: [torch.ops.attn_compiler.table(torch.ops.attn_compiler.held(x))]

torch_inductor.compile_with_inductor = cached
assert torch.equal(torch.compile(torch.sin, backend="attn_compiler")(torch.ones(3)), torch.ones(3))
"""
    fresh.run(code)


def test_ops_of_ranks_are_there_where_no_pass_ran() -> None:
    """A rewrite that was kept needs no pass, and code that was kept calls the ops all the same. Other graphs do without them."""
    code = """
import torch
from attn_compiler.compiling.inner import Inner
from attn_compiler.context_parallel import ContextParallel
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.torch_private import inductor as torch_inductor
from tests.meshes import fake_mesh

torch_inductor.compile_with_inductor = lambda *_, **__: None
gm = torch.fx.symbolic_trace(lambda x: x.sin())
Inner(options=Options(), patches={}, region=None, ahead=None).compile_rewritten(gm, [torch.ones(3)], "key")
of_ranks = ("gathered_sequence", "halo", "merged_over_ranks")
assert [hasattr(torch.ops.attn_compiler, name) for name in ("table", *of_ranks)] == [True, False, False, False]
with fake_mesh(2, rank=0) as mesh:
    shared = Options(context_parallel=ContextParallel(mesh))
    Inner(options=shared, patches={}, region=None, ahead=None).compile_rewritten(gm, [torch.ones(3)], "key")
for name in of_ranks:
    assert hasattr(torch.ops.attn_compiler, name), name
"""
    fresh.run(code)


def test_a_graph_without_attention_imports_no_families_and_no_rooms_of_options() -> None:
    code = """
import sys, torch
torch.compile(torch.nn.Linear(2, 2), backend="attn_compiler")(torch.ones(3, 2)).sum().backward()
ours = [name.removeprefix("attn_compiler.") for name in sys.modules if name.startswith("attn_compiler.")]
rooms = ("lowerings.families", "lowerings.choice", "lowerings.hopper", "context_parallel.", "passes.context_parallel", "passes.unpad")
unused = (*rooms, "passes.matching.patterns", "passes.writing.lower", "passes.rewrites.key", "verifying.plan", "lowerings.shared.launching")
found = [name for name in ours if name.startswith(unused)]
assert set(found) <= {f"context_parallel.{name}" for name in ("batches", "description", "layout", "rank_sync")}, found
"""
    fresh.run(code)


def test_passes_rewrite_then_publish_then_compile(pipeline: Pipeline) -> None:
    def sine_becomes_cosine(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos
        gm.recompile()

    pipeline.rewrite = sine_becomes_cosine
    x = torch.randn(3)
    result = _compile(lambda a: torch.sin(a), inner="eager", strict=True)(x)
    torch.testing.assert_close(result, x.cos())
    assert [options for _, options in pipeline.calls] == [Options(inner="eager", strict=True, cache_rewrites=False)]
    assert pipeline.published == [(pipeline.report, Options(inner="eager", strict=True, cache_rewrites=False))]


@pytest.mark.parametrize(("inner", "device"), [("inductor", "cuda"), ("inductor", "cpu"), ("eager", "cuda")])
def test_inductors_processes_start_before_the_passes(
    inner: str, device: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU: what they compile are Triton kernels."""
    done: list[str] = []
    pipeline.rewrite = lambda gm: done.append("passes")
    monkeypatch.setattr(torch_inductor, "start_workers", lambda: done.append("workers"))
    monkeypatch.setattr(torch_inductor, "compile_with_inductor", lambda gm, inputs, **_: gm.forward)
    monkeypatch.setattr(torch_compat, "graph_devices", lambda gm: (torch.device(device),))
    monkeypatch.setattr(Target, "current", lambda device: Target.fake(device=device))
    _compile(lambda a: torch.sin(a), inner=inner)(torch.randn(3))
    assert done == (["workers", "passes"] if (inner, device) == ("inductor", "cuda") else ["passes"])


@pytest.mark.parametrize("from_cache", [True, False])
def test_the_collector_looks_rarely_and_is_paused_where_code_is_loaded(
    from_cache: bool, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, int]] = []

    def inner(name: str, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        seen.append((gc.isenabled(), gc.get_threshold()[0]))
        return gm.forward

    monkeypatch.setattr(torch_inductor, "compile_with_backend", inner)
    pipeline.report = dataclasses.replace(pipeline.report, from_cache=from_cache)
    before, threshold = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    try:
        _compile(lambda a: torch.sin(a), inner="eager")(torch.randn(3))
        assert (seen, gc.isenabled(), gc.get_threshold()) == ([(not from_cache, 50_000)], True, (700, 10, 10))
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if before else gc.disable)()


def test_a_graph_that_dynamo_traces_again_has_one_report() -> None:
    publishing.reset()
    attend = nn.functional.scaled_dot_product_attention
    scaled = torch.compile(lambda q, scale: attend(q, q, q, scale=scale), backend="attn_compiler", dynamic=True)
    torch._dynamo.utils.counters.clear()
    q = torch.randn(1, 2, 5, 8)
    torch.testing.assert_close(scaled(q, 0.5), attend(q, q, q, scale=0.5))
    assert len(publishing.reports()) == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_the_inner_compiler_fails_on_has_its_report(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no code for this")

    monkeypatch.setattr(torch_inductor, "compile_with_inductor", fails)
    with pytest.raises(Exception, match="no code for this"):
        _compile(lambda a: torch.sin(a))(torch.randn(3))
    assert [found for found, _ in pipeline.published] == [pipeline.report]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("num_sites", [0, 1])
def test_model_trains_as_in_eager(inner: str, num_sites: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), _Attention() if num_sites else nn.Linear(8, 8))
    x = torch.randn(2, 5, 8)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    out = _compile(model, inner=inner, strict=True)(x)
    out.sum().backward()
    torch.testing.assert_close(out, model(x))
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert publishing.reports()[-1].num_sites == num_sites


def test_model_without_attention_is_compiled_as_inductors_own_backend_would() -> None:
    # Matrix products alone: graphs without generated C++ compile fast.
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    x = torch.randn(3, 4)
    torch._dynamo.utils.counters.clear()
    ours = torch.compile(model, backend="attn_compiler")(x)
    assert torch._dynamo.utils.counters["inductor"]["extern_calls"] > 0
    torch._dynamo.reset()
    inductors = torch.compile(model, backend="inductor")(x)
    torch.testing.assert_close(ours, inductors, rtol=0, atol=0)
    assert "0 sites" in str(publishing.reports()[-1])


def _patches_given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = []

    def compile_with_inductor(gm: fx.GraphModule, inputs: Any, *, patches: dict[str, Any], **_: Any) -> Any:
        given.append(patches)
        return gm.forward

    monkeypatch.setattr(torch_inductor, "compile_with_inductor", compile_with_inductor)
    return given


def test_mode_reaches_inductor(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _patches_given(monkeypatch)
    torch.compile(torch.sin, backend="attn_compiler", mode="max-autotune")(torch.ones(1))
    assert given == [torch._inductor.list_mode_options("max-autotune")]


def test_inductors_options_reach_inductor_beside_ours(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _patches_given(monkeypatch)
    _compile(torch.sin, **{"triton.cudagraphs": True, "attn.strict": True})(torch.ones(1))
    assert given == [{"triton.cudagraphs": True}]
    assert pipeline.calls[0][1] == Options(strict=True, cache_rewrites=False)


def test_key_of_the_caches_tells_options_and_switched_off_kernels_apart(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def compile_with_inductor(gm: fx.GraphModule, inputs: Any, *, cache_key: str, **_: Any) -> Any:
        keys.append(cache_key)
        return gm.forward

    monkeypatch.setattr(torch_inductor, "compile_with_inductor", compile_with_inductor)
    for options in ({}, {"lowerings": ["sdpa"]}, {}):
        _compile(torch.sin, **options)(torch.ones(1))
        torch._dynamo.reset()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        _compile(torch.sin)(torch.ones(1))
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3


def test_compiling_again_with_the_same_options_costs_nothing(pipeline: Pipeline) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return a + 1

    for strict in (True, True, False):
        _compile(function, inner="eager", strict=strict)(torch.ones(1))
    assert [options.strict for _, options in pipeline.calls] == [True, False]


def test_unknown_option_reaches_the_user(pipeline: Pipeline) -> None:
    with pytest.raises(UnknownOption, match=r"no option 'stric'\. Nearest: 'strict' \(attn_compiler\)"):
        _compile(torch.sin, stric=True)(torch.ones(1))
    assert pipeline.calls == []
    torch.testing.assert_close(_compile(torch.sin, inner="eager")(torch.ones(1)), torch.ones(1).sin())


def test_wrong_type_reaches_the_user(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidOption, match="'strict' takes True or False, got 'yes'"):
        _compile(torch.sin, strict="yes")(torch.ones(1))


def test_unknown_mode_reaches_the_user(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidOption, match="'mode' takes one of"):
        torch.compile(torch.sin, backend="attn_compiler", mode="fast")(torch.ones(1))


def test_unknown_lowering_reaches_the_user(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidOption, match="nearest: 'cudnn'"):
        _compile(torch.sin, lowering="cudn")(torch.ones(1))


def test_pass_that_fails_in_strict_mode_reaches_the_user(pipeline: Pipeline) -> None:
    def fail(gm: fx.GraphModule) -> None:
        raise PassFailed(pass_name="match", site="attn", cause="KeyError: 'q'", reproduce="again") from KeyError("q")

    pipeline.rewrite = fail
    with pytest.raises(PassFailed, match="'match' failed at attn"):
        _compile(torch.sin, strict=True)(torch.ones(1))


def test_forced_lowering_that_can_never_run_here(pipeline: Pipeline) -> None:
    pipeline.report = _report_with_one_site()
    with pytest.raises(LoweringUnavailable, match=r"'cudnn'.*needs a CUDA device; observed cpu") as caught:
        _compile(torch.sin, lowering="cudnn")(torch.ones(1))
    assert caught.value.reasons == (NO_GPU,)
    assert pipeline.published == []


def test_forced_lowering_is_no_matter_where_there_is_no_attention(pipeline: Pipeline) -> None:
    torch.testing.assert_close(_compile(torch.sin, lowering="cudnn", inner="eager")(torch.ones(1)), torch.ones(1).sin())


def test_available_forced_lowering_is_no_error(pipeline: Pipeline) -> None:
    pipeline.report = _report_with_one_site()
    torch.testing.assert_close(_compile(torch.sin, lowering="sdpa", inner="eager")(torch.ones(1)), torch.ones(1).sin())
    assert [found for found, _ in pipeline.published] == [pipeline.report]


def test_inductors_options_without_inductor_are_told(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    _compile(torch.sin, inner="eager", max_autotune=True)(torch.ones(1))
    assert "max_autotune" in caplog.text


def test_arguments_of_a_later_torch_compile_are_told(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    gm = fx.symbolic_trace(lambda a: a + 1)
    compiled = backend_module.attn_compiler(gm, [torch.ones(1)], options={"inner": "eager"}, name="region", novelty=1)
    torch.testing.assert_close(compiled(torch.ones(1)), torch.full((1,), 2.0))
    assert "novelty" in caplog.text
    assert "region" not in caplog.text


def test_dynamos_reset_frees_what_cuda_graphs_hold(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    torch._dynamo.reset()
    monkeypatch.setattr(torch_inductor, "forget_cuda_graphs", lambda: freed.append("graphs"))
    _compile(torch.sin, inner="eager")(torch.ones(1))
    assert freed == []
    torch._dynamo.reset()
    assert freed == ["graphs"]
