"""Whatever fails on our side, the model runs: one warning, and the model's own graph is compiled. Strict raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses import FakeTensorMode

import attn_compiler
import attn_compiler.compiling.backend as backend_module
import attn_compiler.passes as passes_module
import attn_compiler.reporting.publishing as publishing_module
from attn_compiler.lowerings.graph_ops import rotary_tables
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.passes.graph import faults, unit as unit_module
from attn_compiler.passes.pipeline import keeping
from attn_compiler.passes.recovering import body_inputs
from attn_compiler.passes.writing import buffers, fp8_sites, fp8_state, select, summary
from attn_compiler.reasons.errors import AttnCompilerError, AttnCompilerWarning, CompileFailed, PassFailed
from attn_compiler.reporting import dump
from attn_compiler.torch_private import (
    compat as torch_compat,
    inductor as torch_inductor,
    snapshots as torch_snapshots,
)
from attn_compiler.verifying import first, plan as plan_module
from tests.inductor_caches import no_graphs
from tests.passes.compiling import CPU_FLASH, compiled, warned
from tests.without_inductor import without_inductor

B, H, S, D = 2, 2, 6, 8
Break = Callable[[pytest.MonkeyPatch], None]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H * D, 3 * H * D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(mask, float("-inf"))
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class _Model(nn.Module):
    """A layer in the graph itself, one in a checkpoint, and an encoder's call that is spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mha = _Layer(), _Layer(), nn.MultiheadAttention(H * D, H, batch_first=True)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        mask = torch.ones(S, S, dtype=torch.bool).triu(1)
        x = self.first(x, mask)
        x = torch.utils.checkpoint.checkpoint(self.second, x, mask, use_reentrant=False)
        return x + self.mha(x, x, x, need_weights=False)[0] + self.steps


def _fresh() -> tuple[_Model, Tensor]:
    torch.manual_seed(0)
    return _Model(), torch.randn(B, S, H * D, requires_grad=True)


def _step(run: Callable[..., Tensor], model: _Model, x: Tensor) -> tuple[Tensor, ...]:
    out = run(x)
    return (out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *model.parameters()]), model.steps.clone())


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, ...]:
    model, x = _fresh()
    return _step(model, model, x)


def _fails(home: Any, name: str, *, afterwards: bool = True) -> Break:
    """The function raises, after it has done its work if `afterwards`: what it did has to be taken back."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        function = getattr(home, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if afterwards:
                function(*args, **kwargs)
            raise RuntimeError(f"{name} is broken")

        monkeypatch.setattr(home, name, fail)

    return break_it


def _kernel_in(gm: fx.GraphModule) -> bool:
    nodes = (node for module in torch_compat.graph_modules(gm) for node in module.graph.nodes)
    return any(CPU_FLASH in str(node.target) for node in nodes)


def _inner_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner compiler fails on the graph with a kernel in it, when it has changed whatever it changes."""
    compile_with_backend = torch_inductor.compile_with_backend

    def fail(name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        has_kernel = _kernel_in(gm)
        result = compile_with_backend(name, gm, example_inputs)
        if has_kernel:
            gm.graph.erase_node(next(node for node in reversed(gm.graph.nodes) if not node.users))
            gm.recompile()
            raise RuntimeError("inner is broken")
        return result

    monkeypatch.setattr(torch_inductor, "compile_with_backend", fail)


#: step -> how it is broken, what the warning says, whether the rewriting is given up
STEPS: dict[str, tuple[Break, str, bool]] = {
    "units": (_fails(unit_module, "units"), "pass 'units' failed at the graph", True),
    "copies of the graph": (_fails(torch_compat, "copied_graph"), "pass 'snapshot' failed", True),
    "buffers": (_fails(buffers, "install"), "pass 'buffers' failed", True),
    "body inputs": (_fails(body_inputs, "pass_on"), "pass 'body_inputs' failed", True),
    "report": (_fails(summary, "report"), "pass 'report' failed", True),
    "target of the report": (_fails(summary, "_target"), "pass 'report' failed", True),
    "devices": (_fails(backend_module.torch_compat, "graph_devices"), "graph_devices is broken", True),
    "availability": (_fails(select, "require_available"), "failed to prepare the graph", True),
    "cache key": (_fails(backend_module, "cache_key"), "failed to prepare the graph", True),
    "inner compiler": (_inner_fails, "failed to compile the rewritten graph with eager", True),
    "publication": (_fails(publishing_module, "publish", afterwards=False), "failed to publish the report", False),
}


#: only a lowering that was asked for by name has to be available
_ASKED: dict[str, Any] = {"availability": {"lowering": "sdpa_cpu_flash"}}


@pytest.mark.parametrize("step", STEPS)
def test_one_warning_and_the_models_own_numbers(
    step: str, expected: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, text, given_up = STEPS[step]
    model, x = _fresh()
    run = compiled(model, strict=False, **_ASKED.get(step, {}))
    break_it(monkeypatch)
    got, said = warned(lambda: _step(run, model, x))
    torch.testing.assert_close(got, expected)
    (warning,) = said
    assert text in warning
    assert "is broken" in warning
    assert "options={'strict': True" in warning
    assert (CPU_FLASH in run.graphs[-1].calls) == (not given_up)
    if step != "publication":
        assert warning in " ".join((run.report.failure or "").split("\n"))
        assert "Traceback" in (run.report.failure or "")
        assert "FAILED, the graph was left as it was" in str(run.report)
        assert {row.decision.lowering for row in run.report.sites} <= {"untouched"}


@pytest.mark.parametrize("step", STEPS)
def test_strict_raises(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _fresh()
    run = compiled(model, strict=True, **_ASKED.get(step, {}))
    STEPS[step][0](monkeypatch)
    with pytest.raises((PassFailed, CompileFailed), match="is broken") as caught:
        run(x)
    # What the passes made of a graph is known, whatever comes after them.
    if isinstance(caught.value, CompileFailed) and step != "publication":
        assert run.report.num_sites == 3


def test_the_report_says_which_sites_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _fresh()
    run = compiled(model, strict=False)
    _inner_fails(monkeypatch)
    warned(lambda: run(x))
    assert run.report.num_sites == 3
    for row in run.report.sites:
        assert (row.decision.lowering, row.copies, row.notes) == ("untouched", (), ())
        refusal = row.decision.refusals[-1]
        assert refusal.lowering == "sdpa_cpu_flash"
        assert "RuntimeError: inner is broken" in refusal.reasons[0].observed


def test_the_second_graph_is_the_very_graph_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def note(gm: fx.GraphModule) -> None:
        texts.append("\n".join(str(m.code) for m in torch_compat.graph_modules(gm)) + str(sorted(gm.__dict__)))

    rewrite, compile_with_backend = passes_module.rewrite, torch_inductor.compile_with_backend
    monkeypatch.setattr(passes_module, "rewrite", lambda gm, *args, **named: (note(gm), rewrite(gm, *args, **named))[1])

    def fail(name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        note(gm)
        if _kernel_in(gm):
            gm.graph = fx.Graph()
            for module in list(torch_compat.graph_modules(gm))[1:]:
                module.graph = fx.Graph()
            gm.attribute_of_a_compiler = 1
            raise RuntimeError("inner is broken")
        return compile_with_backend(name, gm, example_inputs)

    monkeypatch.setattr(torch_inductor, "compile_with_backend", fail)
    model, x = _fresh()
    warned(lambda: compiled(model, strict=False)(x))
    came, rewritten, again = texts
    assert came == again != rewritten


def test_buffers_go_with_the_rewriting(expected: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    emit = SdpaCpuFlash.emit

    def with_buffer(self: SdpaCpuFlash, builder: Any, spec: Any, operands: Any) -> Any:
        node, held = builder.buffer("amax", (2, 3))
        out = emit(self, builder, spec, operands)
        builder.call(torch.Tensor.copy_, node, held)
        return out

    monkeypatch.setattr(SdpaCpuFlash, "emit", with_buffer)
    model, x = _fresh()
    kept = compiled(model, strict=True)
    _step(kept, model, x)
    assert "attn_compiler_buffer" in kept.text
    assert len(fp8_state.fp8_state_dict()) == 3
    model, x = _fresh()
    run = compiled(model, strict=False)
    _inner_fails(monkeypatch)
    got, said = warned(lambda: _step(run, model, x))
    torch.testing.assert_close(got, expected)
    assert len(said) == 1
    assert "attn_compiler_buffer" not in run.graphs[-1].text
    assert fp8_state.fp8_state_dict() == {}


def test_an_error_of_the_models_own_graph_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise ValueError("ours" if _kernel_in(gm) else "the model's own")

    monkeypatch.setattr(torch_inductor, "compile_with_backend", fail)
    model, x = _fresh()
    run = compiled(model, strict=False)
    with pytest.raises(Exception, match="the model's own") as caught, pytest.warns(AttnCompilerWarning, match="ours"):
        run(x)
    inner = caught.value.inner_exception  # type: ignore[attr-defined]
    assert type(inner) is ValueError
    assert inner.__context__ is None
    assert "ours" in (run.report.failure or "")


def test_a_graph_without_attention_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(*_: Any) -> Any:
        calls.append(1)
        raise ValueError("no code for this")

    monkeypatch.setattr(torch_inductor, "compile_with_backend", fail)
    run = compiled(torch.sin, strict=False)
    with pytest.raises(BackendCompilerFailed, match="no code for this"):
        run(torch.ones(2))
    assert calls == [1]


def test_a_key_that_can_not_be_made_costs_a_graph_without_attention_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(backend_module, "cache_key")(monkeypatch)
    got, said = warned(lambda: compiled(torch.sin, strict=False)(torch.ones(2)))
    torch.testing.assert_close(got, torch.ones(2).sin())
    assert len(said) == 1


# ---- errors that are the user's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"lowering": "cudnn"}, {"lowering": "nothing"}, {"lowerings": ["sdpa_cpu_flash", "x"]}, {"dump_dir": 3}],
)
def test_users_errors_are_raised_without_strict(options: dict[str, Any]) -> None:
    model, x = _fresh()
    with pytest.raises(AttnCompilerError):
        compiled(model, **{"strict": False, **options})(x)


def test_errors_of_a_recipe_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _fresh()
    recipe = attn_compiler.Fp8Recipe(exclude=("*",))
    with pytest.raises(AttnCompilerError, match="exclude"):
        compiled(model, strict=False, fp8_recipe=recipe)(x)
    _fails(fp8_sites, "check_recipe_used", afterwards=False)(monkeypatch)
    run = compiled(model, strict=False, fp8_recipe=recipe)
    _, said = warned(lambda: run(x))
    assert len(said) == 1
    assert CPU_FLASH not in run.graphs[-1].calls


# ---- Inductor and AOTAutograd for real -------------------------------------------------------------------------------


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """Nothing comes out of a cache of graphs: Inductor compiles."""
    with no_graphs():
        yield


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("stage", ["AOTAutograd", "Inductor"])
def test_the_leaf_op_fails_where_it_is_compiled(stage: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a leaf op of ours: its fake, as AOTAutograd calls it, or its lowering, as Inductor calls it. What fails before Inductor does not
    need it for the model's own graph."""
    from torch._inductor import lowering as inductor

    from attn_compiler.lowerings.shared.ops import leaf_ops as ops

    model, x = _fresh()
    layer, mask = model.first, torch.ones(S, S, dtype=torch.bool).triu(1)
    wanted = layer(x, mask)
    grads = torch.autograd.grad(wanted.sin().sum(), [x, *layer.parameters()])

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{stage} is broken")

    if stage == "Inductor":
        # By name: a namespace of ops lists only those that were asked for before.
        for name in ("reference", "reference_forward", "reference_backward"):
            monkeypatch.setitem(inductor.lowerings, getattr(torch.ops.attn_compiler, name).default, fail)
    compile_with_inductor = torch_inductor.compile_with_inductor

    def compile_it(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch, without_inductor() if stage == "AOTAutograd" else contextlib.nullcontext():
            if stage == "AOTAutograd":
                FakeTensorMode.cache_clear()
                patch.setattr(ops, "empty_outputs", fail)
            return compile_with_inductor(*args, **kwargs)

    monkeypatch.setattr(torch_inductor, "compile_with_inductor", compile_it)
    torch._dynamo.reset()
    attn_compiler.reset()
    run = torch.compile(layer, backend="attn_compiler", dynamic=dynamic, options={"lowering": "reference"})
    got, said = warned(lambda: run(x, mask))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), [x, *layer.parameters()]), grads)
    assert len(said) == 1
    assert f"{stage} is broken" in said[0]
    (report,) = attn_compiler.reports()
    assert report.sites[0].decision.lowering == "untouched"


@pytest.mark.usefixtures("nothing_known")
def test_tables_that_can_not_be_kept_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(rotary_tables, "keep_tables", afterwards=False)(monkeypatch)
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.cos() @ x, backend="attn_compiler")
    x = torch.randn(4, 4)
    got, said = warned(lambda: run(x))
    torch.testing.assert_close(got, x.cos() @ x)
    assert len(said) == 1
    assert "computed where they are read" in said[0]


# ---- the first call's check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full"), KeyError("full")])
def test_a_check_that_fails_is_a_warning(
    error: Exception, expected: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail(*_: Any) -> Any:
        calls.append(1)
        raise error

    monkeypatch.setattr(first, "run_checks", fail)
    model, x = _fresh()
    run = compiled(model, strict=False, verify=True)
    got, said = warned(lambda: _step(run, model, x))
    torch.testing.assert_close(got, expected)
    assert len(said) == 1
    assert "failed to run the check of the first call of options={'verify': True}" in said[0]
    assert "full" in said[0]
    assert CPU_FLASH in run.calls
    run(x)
    assert calls == [1]
    with pytest.raises(CompileFailed, match="full"):
        compiled(model, strict=True, verify=True)(x)


def test_a_check_that_can_not_be_prepared_is_a_warning(
    expected: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails(plan_module, "prepare")(monkeypatch)
    model, x = _fresh()
    run = compiled(model, strict=False, verify=True)
    got, said = warned(lambda: _step(run, model, x))
    torch.testing.assert_close(got, expected)
    assert len(said) == 1
    assert CPU_FLASH in run.calls
    with pytest.raises(CompileFailed, match="is broken"):
        compiled(model, strict=True, verify=True)(x)


# ---- dumps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graph_text", "op_counts", "code_of", "_new_directory"])
def test_a_dump_that_fails_costs_the_dump(
    name: str, expected: tuple[Tensor, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails(dump, name, afterwards=False)(monkeypatch)
    model, x = _fresh()
    run = compiled(model, strict=True, dump_dir=str(tmp_path))
    got, said = warned(lambda: _step(run, model, x))
    torch.testing.assert_close(got, expected)
    assert len(said) == 1
    assert CPU_FLASH in run.calls


def test_nothing_is_copied_where_there_is_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("copied")

    monkeypatch.setattr(torch_snapshots, "Snapshot", never)
    monkeypatch.setattr(keeping, "Snapshot", never)
    assert faults.warned([]) == ()
    torch.testing.assert_close(compiled(torch.sin)(torch.ones(2)), torch.ones(2).sin())
