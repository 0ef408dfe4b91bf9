"""Graphs of symbolic sizes are those that PyTorch traces without what makes it quick, and nothing of them is made twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _config_module

from tests import quick_tracing

QUICK = ("_cached_dispatch_impl", "_make_cache_entry")

pytestmark = pytest.mark.skipif(
    not hasattr(FakeTensorMode._make_cache_entry, "__wrapped__"), reason="PyTorch is left as it is"
)


def _model(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([x, y.expand_as(x)], 1)
    scores = (joined @ joined.mT / x.shape[1]).softmax(-1)
    return (scores @ joined).reshape(-1, x.shape[2]).clone()[1:].mul_(2)


def _traced(mode: str, size: int = 7) -> fx.GraphModule:
    graph: fx.GraphModule = make_fx(_model, tracing_mode=mode)(torch.ones(3, size, 8), torch.ones(1, size, 8))
    return graph


def _said(gm: fx.GraphModule) -> list[str]:
    """Each op, and what is known of its output."""
    return [f"{node.format_node()} {_known(node.meta.get('val'))}" for node in gm.graph.nodes]


def _known(value: Any) -> str:
    return f"{value.dtype} {value.shape} {value.stride()}" if isinstance(value, Tensor) else str(value)


@pytest.mark.parametrize("mode", ["symbolic", "fake"])
def test_the_graph_is_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = _said(_traced(mode))
    for name in QUICK:
        monkeypatch.setattr(FakeTensorMode, name, getattr(FakeTensorMode, name).__wrapped__)
    assert quick == _said(_traced(mode))
    assert any("s" in line.rpartition("[")[2] for line in quick) == (mode == "symbolic")


def _made_again(trace: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many outputs were made of what was kept of an op."""
    count, make = 0, FakeTensorMode._get_output_tensor_from_cache_entry

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return make(*args)

    monkeypatch.setattr(FakeTensorMode, "_get_output_tensor_from_cache_entry", counted)
    trace()
    return count


def test_nothing_of_symbolic_sizes_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _made_again(lambda: _traced("symbolic"), monkeypatch) == 0


def test_what_is_kept_of_known_sizes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _traced("fake", 11)
    assert _made_again(lambda: _traced("fake", 11), monkeypatch) > 0


def test_no_text_is_made_for_logs_that_are_off() -> None:
    torch._dynamo.reset()  # imports it
    quick_tracing.say_nothing()
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    found = torch._dynamo.utils.get_compilation_metrics()[-1]
    assert (found.inductor_config, found.dynamo_config) == (None, None)


def test_make_fx_puts_no_methods_into_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tracers do, also inside of it."""
    seen = []
    layer, call = torch.nn.ReLU(), torch.nn.Module.__call__

    def model(x: Tensor) -> Tensor:
        seen.append(torch.nn.Module.__call__ is call)
        fx.symbolic_trace(torch.nn.Sequential(layer, Noting()))
        return layer(x)

    class Noting(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.nn.Module.__call__ is call)
            return x

    graph = make_fx(model)(torch.ones(2))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.ops.aten.relu.default]
    assert seen == [True, False]


def test_settings_are_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = _config_module.ConfigModule.__getattr__
    slow = quick.__wrapped__  # type: ignore[attr-defined]
    settings: Any = torch._dynamo.config
    for name, entry in settings._config.items():
        if not entry.deprecated:
            assert quick(settings, name) == slow(settings, name), name
    assert settings.verbose is False
    with settings.patch(verbose=True):
        assert settings.verbose is True
    # As while `mock.patch` takes its value back.
    monkeypatch.setattr(settings._config["verbose"], "hide", True)
    assert not hasattr(settings, "verbose")
    assert not hasattr(settings, "no_such_setting")
