from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes

from attn_compiler import torch_compat
from attn_compiler.errors import InvalidOption, PassFailed, UnsupportedTorch

Capture = Callable[..., list[fx.GraphModule]]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1", "2.15.0a0+git1234"])
def test_supported_versions(version: str) -> None:
    torch_compat.require_supported_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.16.0", "2.16.0.dev20261201", "3.0.0"])
def test_unsupported_versions(version: str) -> None:
    with pytest.raises(UnsupportedTorch, match=re.escape(version) + r".*>=2\.11,<2\.16"):
        torch_compat.require_supported_torch(version)


def test_importing_checks_the_version_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    spec = importlib.util.spec_from_file_location("copy_of_torch_compat", torch_compat.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(UnsupportedTorch):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_inductors_own_type_of_an_option() -> None:
    assert torch_compat.inductor_option_type("max_autotune") is bool
    assert torch_compat.inductor_option_type("cpp.simdlen") is None


class _Recorder(CustomGraphPass):
    """A pass of a user: notes Inductor's settings while a graph is compiled."""

    def __init__(self, uuid: str | None = "recorder") -> None:
        self.cudagraphs: list[bool] = []
        self._uuid = uuid

    def __call__(self, graph: fx.Graph) -> None:
        self.cudagraphs.append(torch._inductor.config.triton.cudagraphs)

    def uuid(self) -> str | None:
        return self._uuid


def unchanged(graph: fx.Graph) -> None:
    pass


def test_our_pass_runs_after_the_users() -> None:
    order: list[str] = []
    ours = torch_compat.JointPass("key", lambda _: order.append("ours"), before=(lambda _: order.append("the user's"),))
    ours(fx.Graph())
    assert order == ["the user's", "ours"]


def test_cache_key_pass_runs_and_counts_the_users_passes() -> None:
    first, second = _Recorder("first"), _Recorder("second")
    ours = torch_compat.JointPass("key", unchanged, before=(first, second))
    ours(fx.Graph())
    assert (len(first.cudagraphs), len(second.cudagraphs)) == (1, 1)
    assert ours.uuid() != torch_compat.JointPass("key", unchanged).uuid()
    assert ours.uuid() != torch_compat.JointPass("other key", unchanged, before=(first, second)).uuid()


@pytest.mark.parametrize("uncacheable", [_Recorder(uuid=None), lambda graph: None])
def test_a_users_pass_without_uuid_still_switches_caching_off(uncacheable: Any) -> None:
    assert torch_compat.JointPass("key", unchanged, before=(uncacheable,)).uuid() is None


def _capture(gm: fx.GraphModule, seen: list[fx.GraphModule]) -> Callable[..., Any]:
    seen.append(gm)
    return gm.forward


@pytest.fixture
def capture() -> Capture:
    """Dynamo's graphs of one call."""

    def run(function: Callable[..., Any], *args: Any, **compile_options: Any) -> list[fx.GraphModule]:
        seen: list[fx.GraphModule] = []
        torch.compile(function, backend=lambda gm, _: _capture(gm, seen), **compile_options)(*args)
        return seen

    return run


def test_patches_and_the_users_pass_reach_forward_and_lazy_backward() -> None:
    # Only matrix products: their graphs need no generated C++.
    recorder = _Recorder()
    patches = {"triton.cudagraphs": True, "joint_custom_pre_pass": recorder, "post_grad_custom_pre_pass": recorder}

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_compat.compile_with_inductor(
            gm, inputs, patches=patches, cache_key="test", joint_pass=unchanged, region="here"
        )

    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4)
    with torch._inductor.config.patch(force_disable_caches=True):
        out = torch.compile(lambda a: a @ weight, backend=backend)(x)
        out.backward(torch.ones_like(out))
    torch.testing.assert_close(out, x @ weight)
    torch.testing.assert_close(weight.grad, x.T @ torch.ones_like(out))
    # The joint graph once, then the forward and the backward after it.
    assert recorder.cudagraphs == [True, True, True]
    assert torch._inductor.config.joint_custom_pre_pass is None


def test_a_pass_set_in_inductors_config_is_kept() -> None:
    recorder = _Recorder()

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_compat.compile_with_inductor(gm, inputs, patches={}, cache_key="test", joint_pass=unchanged)

    with torch._inductor.config.patch(force_disable_caches=True, joint_custom_pre_pass=recorder):
        torch.compile(lambda a: a @ a, backend=backend)(torch.randn(4, 4))
    assert len(recorder.cudagraphs) == 1


def test_other_backends() -> None:
    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_compat.compile_with_backend("aot_eager", gm, inputs)

    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda a: a.sin().sum(), backend=backend)(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


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


def test_dims_and_conditions_add_no_guard(capture: Capture) -> None:
    (gm,) = capture(lambda x: x.sin(), torch.randn(6, 3), dynamic=True)
    sizes = [torch_compat.fake_value(n) for n in gm.graph.nodes if isinstance(torch_compat.fake_value(n), torch.SymInt)]
    size = sizes[0]
    guards = len(size.node.shape_env.guards)
    name = torch_compat.dim_of(size)
    assert isinstance(name, str)
    assert torch_compat.dim_of(size * 2) == f"2*{name}"
    assert torch_compat.dim_of(size - size + 4) == 4
    assert torch_compat.dim_of(3) == 3
    assert torch_compat.statically_known(size * 2 == size + size)
    assert not torch_compat.statically_known(size == 6)
    assert torch_compat.statically_known(True)
    assert len(size.node.shape_env.guards) == guards


def test_the_larger_of_two_sizes_is_the_one_that_guards_say() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        rest = torch.sym_max(n - 4, 0)
        if n >= 4:
            return x.new_zeros(rest) + x.new_zeros(torch.sym_min(n, 9))[:1]
        return x

    found: list[str] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        values = (n.meta.get("example_value") for n in gm.graph.nodes)
        found.extend(str(torch_compat.decided(value)) for value in values if isinstance(value, torch.SymInt))
        return gm.forward

    x = torch.zeros(6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(x)
    symbol = found[0]
    assert f"{symbol} - 4" in found
    assert f"Min(9, {symbol})" in found
    assert torch_compat.decided(3) == 3


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
    torch_compat.trace_artifact("attn_compiler_test", lambda: pytest.fail("payload was made for nobody"))


def test_forgetting_cuda_graphs_needs_no_gpu() -> None:
    torch_compat.forget_cuda_graphs()


def test_the_cache_folder_is_inductors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    assert torch_compat.cache_folder() == tmp_path / "made"
    assert (tmp_path / "made").is_dir()


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


BODIES = """
calls = []

def plus_one(x):
    calls.append("function")
    return x + 1

class Place:
    def __call__(self, x):
        calls.append(self)
        return x + 1
"""


@pytest.fixture
def bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose function and class do what the op `attn_compiler_test::plus_one` does, and say that they were called."""
    (tmp_path / "bodies_of_plus_one.py").write_text(BODIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bodies_of_plus_one", raising=False)
    return importlib.import_module("bodies_of_plus_one")


@pytest.fixture
def plus_one() -> Iterator[Any]:
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN

    library = torch.library.Library("attn_compiler_test", "FRAGMENT")
    library.define("plus_one(Tensor x) -> Tensor")
    library.impl("plus_one", lambda x: x + 1, "CPU")
    torch.library.register_fake("attn_compiler_test::plus_one", torch.empty_like, lib=library)
    yield torch.ops.attn_compiler_test.plus_one.default
    CUSTOM_EXTERN_KERNEL_CODEGEN.pop("torch.ops.attn_compiler_test.plus_one.default", None)
    library._destroy()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_calls_an_instance_for_each_place_where_tensors_lie_the_same(
    dynamic: bool, bodies: Any, plus_one: Any
) -> None:
    torch_compat.call_directly("attn_compiler_test::plus_one", bodies.__name__, "plus_one", site="Place")
    x = torch.zeros(4, 6)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(lambda x: plus_one(plus_one(x).t()), dynamic=dynamic, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), torch.full((6, 4), 2.0))
    first, second, *again = bodies.calls
    assert again == [first, second]
    if dynamic:
        assert first == second == "function"
    else:
        assert first is not second
        assert {type(first), type(second)} == {bodies.Place}


def test_compiled_code_calls_the_function_where_there_is_no_class(bodies: Any, plus_one: Any) -> None:
    torch_compat.call_directly("attn_compiler_test::plus_one", bodies.__name__, "plus_one")
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(plus_one)(torch.zeros(4))
    assert bodies.calls == ["function"]


def test_a_symbolic_number_is_that_of_the_call_without_a_guard() -> None:
    env = symbolic_shapes.ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        size = mode.from_tensor(torch.zeros(5, 16), static_shapes=False).shape[0]
        guards = len(env.guards)
        assert (torch_compat.example(size), torch_compat.example(size * 2 + 1)) == (5, 11)
        assert torch_compat.example(env.create_unbacked_symint()) is None
        assert len(env.guards) == guards
    assert (torch_compat.example(3), torch_compat.example(0.5)) == (3, 0.5)


def test_so_many_threads_compile_as_inductor_was_told() -> None:
    # Not by monkeypatch: what that puts back Inductor hides.
    with inductor_config.patch(compile_threads=3):
        assert torch_compat.compile_threads() == 3
    assert torch_compat.compile_threads() >= 1


def test_what_keeps_compiled_kernels_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    torch_compat.share_kernel_cache(0)
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"


def test_under_a_mode_allocators_are_those_that_know_of_modes() -> None:
    with FakeTensorMode():
        make = torch_compat.allocator((2, 3), (1, 2), torch.float16, "cuda")
        made = make()
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.float16, "cuda")
