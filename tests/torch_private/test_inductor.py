from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from attn_compiler.torch_private import inductor as torch_inductor


def test_inductors_own_type_of_an_option() -> None:
    assert torch_inductor.inductor_option_type("max_autotune") is bool
    assert torch_inductor.inductor_option_type("cpp.simdlen") is None


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
    ours = torch_inductor.JointPass(
        "key", lambda _: order.append("ours"), before=(lambda _: order.append("the user's"),)
    )
    ours(fx.Graph())
    assert order == ["the user's", "ours"]


def test_cache_key_pass_runs_and_counts_the_users_passes() -> None:
    first, second = _Recorder("first"), _Recorder("second")
    ours = torch_inductor.JointPass("key", unchanged, before=(first, second))
    ours(fx.Graph())
    assert (len(first.cudagraphs), len(second.cudagraphs)) == (1, 1)
    assert ours.uuid() != torch_inductor.JointPass("key", unchanged).uuid()
    assert ours.uuid() != torch_inductor.JointPass("other key", unchanged, before=(first, second)).uuid()


@pytest.mark.parametrize("uncacheable", [_Recorder(uuid=None), lambda graph: None])
def test_a_users_pass_without_uuid_still_switches_caching_off(uncacheable: Any) -> None:
    assert torch_inductor.JointPass("key", unchanged, before=(uncacheable,)).uuid() is None


def test_patches_and_the_users_pass_reach_forward_and_lazy_backward() -> None:
    # Only matrix products: their graphs need no generated C++.
    recorder = _Recorder()
    patches = {"triton.cudagraphs": True, "joint_custom_pre_pass": recorder, "post_grad_custom_pre_pass": recorder}

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_inductor.compile_with_inductor(
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


def test_the_last_pass_sees_the_forward_and_the_backward_each_by_itself() -> None:
    recorder, seen = _Recorder(), []

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_inductor.compile_with_inductor(
            gm,
            inputs,
            patches={"post_grad_custom_pre_pass": recorder},
            cache_key="test",
            joint_pass=unchanged,
            last_pass=seen.append,
        )

    weight = torch.randn(4, 4, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        out = torch.compile(lambda a: a @ weight, backend=backend)(torch.randn(4, 4))
        assert len(seen) == 1
        out.backward(torch.ones_like(out))
    assert len(seen) == 2
    # The user's own runs, too.
    assert len(recorder.cudagraphs) == 2


def test_a_pass_set_in_inductors_config_is_kept() -> None:
    recorder = _Recorder()

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_inductor.compile_with_inductor(gm, inputs, patches={}, cache_key="test", joint_pass=unchanged)

    with torch._inductor.config.patch(force_disable_caches=True, joint_custom_pre_pass=recorder):
        torch.compile(lambda a: a @ a, backend=backend)(torch.randn(4, 4))
    assert len(recorder.cudagraphs) == 1


def test_other_backends() -> None:
    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return torch_inductor.compile_with_backend("aot_eager", gm, inputs)

    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda a: a.sin().sum(), backend=backend)(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_cuda_graphs_are_forgotten_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    trees, freed = "torch._inductor.cudagraph_trees", list[str]()
    monkeypatch.delitem(sys.modules, trees, raising=False)
    torch_inductor.forget_cuda_graphs()
    assert trees not in sys.modules
    monkeypatch.setitem(sys.modules, trees, SimpleNamespace(reset_cudagraph_trees=lambda: freed.append("trees")))
    torch_inductor.forget_cuda_graphs()
    assert freed == ["trees"]


def test_the_cache_folder_is_inductors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    assert torch_inductor.cache_folder() == tmp_path / "made"
    assert (tmp_path / "made").is_dir()


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
    torch_inductor.call_directly("attn_compiler_test::plus_one", bodies.__name__, "plus_one", site="Place")
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
    torch_inductor.call_directly("attn_compiler_test::plus_one", bodies.__name__, "plus_one")
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(plus_one)(torch.zeros(4))
    assert bodies.calls == ["function"]


@pytest.mark.parametrize("site", [None, "Place"])
def test_a_profile_has_a_range_for_each_direct_call(site: str | None, bodies: Any, plus_one: Any) -> None:
    torch_inductor.call_directly("attn_compiler_test::plus_one", bodies.__name__, "plus_one", site=site)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(lambda x: plus_one(plus_one(x).t()))
        compiled(torch.zeros(4, 6))
        with torch.profiler.profile() as profile:
            compiled(torch.zeros(4, 6))
    assert [event.name for event in profile.events()].count("attn_compiler_test::plus_one") == 2
    assert len(bodies.calls) == 4


def test_so_many_threads_compile_as_inductor_was_told() -> None:
    # Not by monkeypatch: what that puts back Inductor hides.
    with inductor_config.patch(compile_threads=3):
        assert torch_inductor.compile_threads() == 3
    assert torch_inductor.compile_threads() >= 1


@pytest.mark.parametrize(("given", "kept"), [(None, "inductor/triton/1"), ("somewhere", "somewhere")])
def test_kernels_are_compiled_and_kept_as_inductor_would(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor.runtime import compile_tasks

    folders, told = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}, []
    with mock.patch.dict(os.environ, folders | ({"TRITON_CACHE_DIR": str(tmp_path / given)} if given else {})):
        if not given:
            os.environ.pop("TRITON_CACHE_DIR", None)
        monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: told.append("ptxas"))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        torch_inductor.share_kernels()
        assert (Path(os.environ["TRITON_CACHE_DIR"]), told) == (tmp_path / kept, ["ptxas"])


def test_its_processes_are_started_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    started: list[bool] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(True))
    torch_inductor.start_workers()
    assert started == [True]
    # A release without it starts them by itself.
    monkeypatch.delattr(async_compile, "maybe_warm_pool")
    torch_inductor.start_workers()


def test_the_stack_is_as_deep_as_inductor_makes_it() -> None:
    from torch._inductor import compile_fx

    assert "sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))" in inspect.getsource(compile_fx)
    before = sys.getrecursionlimit()
    try:
        for given, made in ((1000, 2000), (2000, 2000), (3000, 3000)):
            sys.setrecursionlimit(given)
            torch_inductor.deepen_stack()
            assert sys.getrecursionlimit() == made
    finally:
        sys.setrecursionlimit(before)
