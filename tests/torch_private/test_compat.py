"""What every torch that we support has under other names, and its collector and caches."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import logging
import operator
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler._cache import CacheArtifactManager

from attn_compiler.reasons.errors import InvalidOption, PassFailed, UnsupportedTorch
from attn_compiler.torch_private import (
    caches as torch_caches,
    collector,
    compat as torch_compat,
    inductor as torch_inductor,
)

Capture = Callable[..., list[fx.GraphModule]]


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.13.0+cpu", "2.15.1", "2.15.0a0+git1234", "2.16.0.dev20261201", "3.0.0"]
)
def test_supported_versions(version: str) -> None:
    torch_compat.require_supported_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0"])
def test_unsupported_versions(version: str) -> None:
    with pytest.raises(UnsupportedTorch, match=re.escape(version) + r".*>=2\.11"):
        torch_compat.require_supported_torch(version)


def test_importing_checks_the_version_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    spec = importlib.util.spec_from_file_location("copy_of_torch_compat", torch_compat.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(UnsupportedTorch):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _raise(error: Exception) -> Callable[..., Any]:
    raise error


def test_unwrapped_error_reaches_the_user_in_its_own_class() -> None:
    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise torch_compat.unwrapped(InvalidOption(option="strict", expected="True or False", value=3))

    with pytest.raises(InvalidOption, match="got 3") as caught:
        torch.compile(lambda a: a + 1, backend=backend)(torch.ones(1))
    assert caught.value.value == 3
    assert type(caught.value).__name__ == "InvalidOption"


def test_unwrapped_error_keeps_the_traceback_of_its_cause() -> None:
    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        failed = PassFailed(pass_name="match", site="attn", cause="KeyError: 'q'", reproduce="run it again")
        failed.__cause__ = KeyError("q")
        raise torch_compat.unwrapped(failed) from failed.__cause__

    with pytest.raises(PassFailed) as caught:
        torch.compile(lambda a: a + 1, backend=backend)(torch.ones(1))
    assert "KeyError: 'q'" in "".join(traceback.format_exception(caught.value)).split("run it again")[1]


def test_graph_devices_looks_into_nested_graphs(capture: Capture) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.to("meta").sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

    (gm,) = capture(outer, torch.randn(2))
    assert torch_compat.graph_devices(gm) == (torch.device("cpu"), torch.device("meta"))
    assert len(list(torch_compat.graph_modules(gm))) == 2


def test_wrapper_subclasses_are_seen() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    assert torch_compat.is_wrapper_subclass(nested)
    assert not torch_compat.is_wrapper_subclass(torch.nn.Parameter(torch.ones(2)))


def test_graph_name_is_the_compile_id() -> None:
    names: list[str] = []

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        names.append(torch_compat.graph_name())
        return gm.forward

    compiled = torch.compile(lambda a: a + 1, backend=backend, dynamic=False)
    compiled(torch.ones(1))
    compiled(torch.ones(2))
    assert re.fullmatch(r"\d+/0", names[0])
    assert names[1] == names[0].replace("/0", "/1")
    assert torch_compat.graph_name() == "-"


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_artifact_is_written_to_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = _Collector()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [collector])
    torch_compat.trace_artifact("attn_compiler_test", lambda: '{"a": 1}', encoding="json")
    record = next(r for r in collector.records if "artifact" in r.metadata)
    assert record.metadata["artifact"] == {"name": "attn_compiler_test", "encoding": "json"}
    assert record.payload == '{"a": 1}'


def test_artifact_costs_nothing_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    made: list[str] = []

    def payload() -> str:
        made.append("payload")
        return ""

    torch_compat.trace_artifact("attn_compiler_test", payload)
    assert made == []


def test_real_tensors_in_the_middle_of_tracing() -> None:
    with FakeTensorMode() as mode, torch.enable_grad():
        with torch_compat.real_tensors():
            made = torch.ones(2, requires_grad=True) * 2
            assert type(made) is torch.Tensor
            assert not made.requires_grad
        assert torch.ones(2).fake_mode is mode  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_the_raw_stream_is_the_current_one() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_compat.current_raw_stream(torch.cuda.current_device()) == stream.cuda_stream
    assert torch_compat.current_raw_stream(torch.cuda.current_device()) == torch.cuda.current_stream().cuda_stream


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about builds without CUDA")
def test_without_cuda_there_is_no_stream() -> None:
    with pytest.raises(RuntimeError, match="cuda:0 has no stream"):
        torch_compat.current_raw_stream(0)


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about builds without CUDA")
def test_without_cuda_no_device_is_the_current_one() -> None:
    with pytest.raises(RuntimeError, match="no device is the current one"):
        torch_compat.current_cuda_device()


@pytest.mark.gpu
def test_the_current_device_is_torchs() -> None:
    assert torch_compat.current_cuda_device() == torch.cuda.current_device()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_allocator_gives_a_new_tensor_each_time(device: str) -> None:
    make = torch_compat.allocator((2, 3), (1, 2), torch.bfloat16, device)
    first, second = make(), make()
    assert first.data_ptr() != second.data_ptr()
    like = torch_compat.empty_strided((2, 3), (1, 2), torch.bfloat16, device)
    for made in (first, second):
        assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, (1, 2), torch.bfloat16, like.device)


def test_under_a_mode_allocators_are_those_that_know_of_modes() -> None:
    with FakeTensorMode():
        make = torch_compat.allocator((2, 3), (1, 2), torch.float16, "cuda")
        made = make()
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.float16, "cuda")


def test_a_fake_is_registered_without_a_search_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(inspect, "getmodule", search)
    with torch.library._scoped_library("test_torch_compat", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> Tensor")
        library.impl("halves", lambda x: x.view(2, -1).clone(), "CompositeExplicitAutograd")
        torch_compat.register_fake(library, "halves", lambda x: x.new_empty(2, x.numel() // 2))
        with FakeTensorMode():
            assert torch.ops.test_torch_compat.halves(torch.ones(6)).shape == (2, 3)
        assert torch.ops.test_torch_compat.halves(torch.ones(4)).shape == (2, 2)
    assert not hasattr(torch.ops.test_torch_compat, "halves")


def test_where_dynamo_ends_a_graph_is_the_models_line() -> None:
    found: list[tuple[str, str] | None] = []

    def backend(gm: fx.GraphModule, _: object) -> Any:
        found.append(torch_compat.line_of_break(gm))
        return gm.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.ones(2))
    first, second = found
    assert first is not None
    assert first[0] == "torch._dynamo.graph_break()"
    assert first[1].startswith("test_compat.py:")
    assert second is None


# Python's cyclic collector is paused, or looks more rarely, and goes on as it was.
@pytest.fixture(params=[True, False], ids=["on", "off"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_goes_on_as_it_was(enabled: bool) -> None:
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_it_goes_on_after_an_error(enabled: bool) -> None:
    with pytest.raises(ZeroDivisionError), collector.paused():
        raise ZeroDivisionError
    assert gc.isenabled() is enabled


@pytest.fixture
def young(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many new objects start a collection outside of the block."""
    before = gc.get_threshold()
    gc.set_threshold(request.param, *before[1:])
    yield request.param
    gc.set_threshold(*before)


@pytest.mark.parametrize("young", [700, 2000], indirect=True)
def test_it_looks_more_rarely_within(young: int) -> None:
    before = gc.get_threshold()
    with collector.rarely():
        assert gc.get_threshold() == (50_000, *before[1:])
        with collector.rarely():
            assert gc.get_threshold()[0] == 50_000
        assert gc.get_threshold()[0] == 50_000
    assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError), collector.rarely():
        raise ZeroDivisionError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("young", [700], indirect=True)
def test_what_is_set_within_stays(young: int) -> None:
    with collector.rarely():
        gc.set_threshold(1234, 3, 3)
    assert gc.get_threshold() == (1234, 3, 3)


@pytest.mark.parametrize("young", [0, 80_000], indirect=True)
def test_who_has_it_look_more_rarely_yet_is_left_alone(young: int) -> None:
    with collector.rarely():
        assert gc.get_threshold()[0] == young


# What is private to PyTorch in caching.
def test_inductors_switches_and_users_patches_of_them() -> None:
    on = {"fx_graph_cache": True, "force_disable_caches": False}
    assert torch_caches.are_wanted(on)
    assert not torch_caches.are_wanted({**on, "fx_graph_cache": False})
    assert not torch_caches.are_wanted({**on, "force_disable_caches": True})
    with torch._inductor.config.patch(on):
        assert torch_caches.are_wanted({})
    with torch._inductor.config.patch({**on, "force_disable_caches": True}):
        assert not torch_caches.are_wanted({})


def test_the_state_is_plain_and_the_same_when_asked_again() -> None:
    state = torch_caches.state([torch.device("cpu")])
    assert json.loads(json.dumps(state)) == state == torch_caches.state([torch.device("cpu")])


def test_the_state_names_modes() -> None:
    before = torch_caches.state([])
    with torch.device("meta"):
        inside = torch_caches.state([])
    assert before["modes"] != inside["modes"]
    assert before["default"] != inside["default"]


@pytest.mark.parametrize("part", ["cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul"])
def test_the_state_is_known_where_precisions_are_set_one_by_one(part: str) -> None:
    """PyTorch's functions for all of them raise then."""
    before, owner = torch_caches.state([]), operator.attrgetter(part)(torch.backends)
    precision = owner.fp32_precision
    try:
        owner.fp32_precision = "tf32" if precision == "ieee" else "ieee"
        assert torch_caches.state([])["precision"] != before["precision"]
    finally:
        owner.fp32_precision = precision
    assert torch_caches.state([]) == before


def test_a_file_that_comes_along_is_written_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    data = {"key": "a", "rewrite": [1, "ü", None]}
    with CacheArtifactManager.with_fresh_cache():
        torch_caches.carry("some/folder/a.json", data)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    assert torch.compiler.load_cache_artifacts(saved[0]) is not None
    path = torch_inductor.cache_folder() / "some/folder/a.json"
    assert path.read_bytes() == torch_caches.content(data)
