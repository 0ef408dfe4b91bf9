"""What explain says, without us too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from attn_compiler import passes
from attn_compiler.compiling import without_us
from attn_compiler.compiling.explaining import explain, explainer
from attn_compiler.lowerings import homes
from attn_compiler.options.options import Options
from attn_compiler.reasons.errors import InvalidOption, PassFailed, UnknownOption
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe
from tests import fresh


# explain.
class Broken(nn.Module):
    """Two graphs: one before and one after the graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x).relu()
        torch._dynamo.graph_break()
        return y.relu()


class Seen:
    """Stands for the pipeline: records its graphs and options, and rewrites relu to sigmoid, so that a rewrite shows."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.options: list[Options] = []

    def __call__(self, gm: fx.GraphModule, options: Options) -> passes.Rewritten:
        self.graphs.append(gm)
        self.options.append(options)
        for module in torch_compat.graph_modules(gm):
            for node in module.graph.nodes:
                node.target = "sigmoid" if node.target == "relu" else node.target
        report = Report(graph=f"g{len(self.graphs)}", target="cpu")
        return passes.Rewritten(report=report, units=(), originals=(), failed=False)

    def shapes(self) -> list[list[Any]]:
        """The shapes of the placeholders, graph by graph."""
        return [
            [tuple(value.shape) for node in gm.graph.find_nodes(op="placeholder") if _is_tensor(value := _value(node))]
            for gm in self.graphs
        ]


def _value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    monkeypatch.setattr(passes, "rewrite", seen)
    monkeypatch.setattr(homes, "CLASSES", {})
    return seen


class Counted:
    """A user's backend that counts what it compiles and with which sizes."""

    def __init__(self) -> None:
        self.inputs: list[list[Any]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.inputs.append([value for value in example_inputs if not isinstance(value, nn.Parameter)])
        return gm.forward


def test_every_graph_is_reported_in_order(seen: Seen) -> None:
    reports = explain(Broken(), torch.randn(2, 4))
    assert isinstance(reports, Reports)
    assert [report.graph for report in reports] == ["g1", "g2"]


def test_the_package_exports_explain() -> None:
    import attn_compiler

    assert attn_compiler.explain is explain
    assert attn_compiler.explain is explain, "a second look-up must not find a submodule instead"


def test_the_model_runs_once_on_the_rewritten_graphs(seen: Seen) -> None:
    cache = torch.zeros(1)

    def model(x: torch.Tensor, *, cache: torch.Tensor) -> torch.Tensor:
        return cache.add_(x.relu())

    explain(model, torch.tensor([-1.0]), cache=cache)
    torch.testing.assert_close(cache, torch.tensor([-1.0]).sigmoid())


def test_all_arguments_reach_the_model(seen: Seen) -> None:
    got: dict[str, Any] = {}

    def model(*args: Any, **kwargs: Any) -> None:
        got.update(kwargs, args=args)

    explain(model, 1, model=2, dynamic=4, self=5)
    assert got == {"args": (1,), "model": 2, "dynamic": 4, "self": 5}


def test_options_are_those_of_torch_compile(seen: Seen) -> None:
    explain(nn.ReLU(), torch.randn(5, 6), options={"strict": True, "max_autotune": False})
    explain(torch.relu, torch.randn(5, 6), options=None)
    assert seen.options == [Options(strict=True, cache_rewrites=False), Options(cache_rewrites=False)]
    with pytest.raises(UnknownOption):
        explain(nn.ReLU(), torch.randn(5, 6), options={"stricct": True})


def test_options_of_the_model_go_to_the_model(seen: Seen) -> None:
    class Optional(nn.Module):
        def forward(self, x: torch.Tensor, options: float) -> torch.Tensor:
            return x.relu() + options

    explain(Optional(), torch.randn(5, 6), options=2.0)
    assert seen.options == [Options(cache_rewrites=False)]


def test_options_take_the_place_of_those_that_a_module_was_compiled_with(seen: Seen) -> None:
    compiled = torch.compile(nn.ReLU(), backend="attn_compiler", dynamic=True, options={"strict": True})
    explain(compiled, torch.randn(5, 6), options={"verify": True})
    assert seen.options == [Options(verify=True, cache_rewrites=False)]
    [[shape]] = seen.shapes()
    assert all(isinstance(size, torch.SymInt) for size in shape), "dynamic was lost"


def test_it_runs_in_the_callers_grad_mode(seen: Seen) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    x = torch.randn(3, requires_grad=True)
    explain(model, x)
    with torch.no_grad():
        explain(model, x)
    outputs = [_value(gm.graph.output_node().args[0][0]) for gm in seen.graphs]
    assert [output.requires_grad for output in outputs] == [True, False]


def test_dynamic_and_options(seen: Seen) -> None:
    asked = {"strict": True, "max_autotune": False}
    explainer(options=asked, mode=None, dynamic=True)(torch.relu, torch.randn(5, 6))
    assert seen.options == [Options(strict=True, cache_rewrites=False)]
    [[shape]] = seen.shapes()
    assert all(isinstance(size, torch.SymInt) for size in shape)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"stricct": True}, UnknownOption), ({"strict": 1}, InvalidOption), ({"lowering": "none such"}, InvalidOption)],
)
def test_wrong_options_are_refused_before_the_model_runs(seen: Seen, options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        explainer(options=options)


def test_no_graph_gives_empty_reports(seen: Seen) -> None:
    assert explain(lambda x: 3, torch.ones(2)) == ()


def test_an_error_of_the_pipeline_reaches_the_user_as_itself_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    def failing(gm: fx.GraphModule, options: Options) -> Report:
        raise PassFailed(pass_name="lower", site="attn", cause="KeyError", reproduce="strict=True")

    model = Broken()
    with monkeypatch.context() as patch:
        patch.setattr(passes, "rewrite", failing)
        with pytest.raises(PassFailed, match="pass 'lower' failed at attn"):
            explain(model, torch.randn(2, 4))
    assert len(explain(model, torch.randn(2, 4))) == 2


@pytest.mark.parametrize("compiled_by", ["torch.compile", "module.compile"])
def test_a_compiled_model_is_explained_as_the_model_itself(seen: Seen, compiled_by: str) -> None:
    users, model = Counted(), Broken()
    if compiled_by == "torch.compile":
        compiled: Callable[..., Any] = torch.compile(model, backend=users)
    else:
        model.compile(backend=users)
        compiled = model
    assert len(explain(compiled, torch.randn(2, 4))) == 2
    assert not users.inputs, "explain ran the user's compiled code"
    compiled(torch.randn(2, 4))
    assert len(users.inputs) == 2


def test_a_compiled_module_is_explained_with_its_own_options(seen: Seen) -> None:
    """What a recipe does to a model that was compiled with it was not to be seen."""
    compiled = torch.compile(
        nn.ReLU(), backend="attn_compiler", dynamic=True, options={"strict": True, "max_autotune": False}
    )
    explain(compiled, torch.randn(5, 6))
    explainer(options={"verify": True})(compiled, torch.randn(5, 6))
    assert seen.options == [Options(strict=True, cache_rewrites=False), Options(verify=True, cache_rewrites=False)]
    [[explained], [asked]] = seen.shapes()
    assert [all(isinstance(size, torch.SymInt) for size in shape) for shape in (explained, asked)] == [True, False]


def test_a_compiled_function_is_explained_as_the_function_itself(seen: Seen) -> None:
    users = Counted()
    compiled = torch.compile(lambda x: x.relu(), backend=users)
    compiled(torch.randn(2, 4))
    users.inputs.clear()
    assert len(explain(compiled, torch.randn(3, 4))) == 1
    assert not users.inputs


def test_repeated_explains_find_everything_each_time_and_use_up_no_recompile_limit(seen: Seen) -> None:
    model, users = Broken(), Counted()
    for rows in range(2, 14):
        assert len(explain(model, torch.randn(rows, 4))) == 2
    torch.compile(model, backend=users)(torch.randn(2, 4))
    assert len(users.inputs) == 2


def test_the_sizes_that_explain_saw_make_no_later_compile_dynamic(seen: Seen) -> None:
    model, users = Broken(), Counted()
    explain(model, torch.randn(3, 4))
    explainer(dynamic=True)(model, torch.randn(4, 4))
    torch.compile(model, backend=users)(torch.randn(5, 4))
    assert [[tuple(value.shape) for value in inputs] for inputs in users.inputs] == [[(5, 4)], [(5, 4)]]
    assert all(isinstance(size, int) for inputs in users.inputs for value in inputs for size in value.shape)


def test_what_the_user_compiled_before_is_kept(seen: Seen) -> None:
    model, users = Broken(), Counted()
    compiled = torch.compile(model, backend=users)
    compiled(torch.randn(2, 4))
    for rows in range(2, 14):
        explain(model, torch.randn(rows, 4))
    users.inputs.clear()
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))
    if torch_observe.HAS_ISOLATION:
        assert not users.inputs, "explain made the user's model compile again"
    users.inputs.clear()
    compiled(torch.randn(3, 4))
    assert any(isinstance(value, torch.SymInt) for value in users.inputs[0]), "automatic dynamic shapes were lost"


def test_masks_keep_their_meaning_over_a_graph_break() -> None:
    def function(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[2])
        mask = at[:, None] >= at
        torch._dynamo.graph_break()
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    found = explain(function, torch.randn(2, 3, 16, 8))
    (site,) = [site for report in found for site in report.sites]
    assert site.spec.mask.words == "causal (proved)"


def test_a_graph_without_its_padding_is_explained() -> None:
    """The packed graph takes more than the model's inputs, so the model's own graph runs, and the report has the packed one's site."""

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = x.view(3, 10, 2, 8).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
        outputs.append(y)
        return y

    outputs: list[torch.Tensor] = []
    x, mask = torch.randn(3, 10, 16), torch.arange(10) < torch.tensor([[4], [10], [7]])
    for dynamic in (None, True):
        (report,) = explainer(options={"unpad": True}, dynamic=dynamic)(function, x, mask)
        assert report.unpad is not None
        assert report.unpad.kept is None
        torch.testing.assert_close(outputs.pop(), function(x, mask))
        outputs.clear()


class Counts(nn.Module):
    """Has buffers that each call in training writes, puts in another's place, or leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("nothing", None)
        with torch.inference_mode():
            self.register_buffer("fixed", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.norm(x)


def test_buffers_hold_what_they_held() -> None:
    model = Counts().train()
    kept = dict(model.named_buffers())
    before = {name: x.clone() for name, x in kept.items()}
    explain(model, torch.randn(8, 4) + 3)
    for name, x in model.named_buffers():
        assert x is kept[name]
        torch.testing.assert_close(x, before[name])
    model(torch.randn(8, 4) + 3)
    assert (model.seen.item(), model.norm.num_batches_tracked.item()) == (1, 1)  # type: ignore[union-attr, operator]


# A torch that was not tried may lack what this package needs.
PROGRAM = """
import sys, warnings
import torch
from torch import nn

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "attn_compiler.{module}":
            raise ImportError("cannot import name 'CompileContext'")

sys.meta_path.insert(0, Missing())
tried, torch.__version__ = torch.__version__, "{version}"
model, x = nn.Linear(4, 4), torch.randn(2, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        found = torch.compile(model, backend="attn_compiler", options={{"strict": True, "max_autotune": False}})(x)
torch.testing.assert_close(found, model(x))
print(len([w for w in caught if "CompileContext" in str(w.message) and "Inductor alone" in str(w.message)]))
"""


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("module", ["compiling.backend", "passes"])
def test_a_newer_torch_that_lacks_something_has_inductor_alone(module: str) -> None:
    assert fresh.run_anew(PROGRAM.format(module=module, version="2.99.0")).stdout.strip() == "1"


def test_with_a_torch_that_was_tried_it_is_an_error() -> None:
    with pytest.raises(ImportError, match="broken"):
        without_us.or_raise(ImportError("broken"))


def test_options_of_ours_are_left_out() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    gm = torch.fx.symbolic_trace(double)
    x = torch.randn(3)
    run = without_us.compiled_by_inductor(gm, [x], options={"lowering": "math", "max_autotune": False})
    (found,) = run(x) if isinstance(run(x), (tuple, list)) else (run(x),)
    torch.testing.assert_close(found, x * 2)
