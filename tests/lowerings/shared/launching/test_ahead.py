"""Which kernels of a graph are compiled ahead: those that its leaf ops launch, forward and backward, once for calls that are alike."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import attn_compiler
from attn_compiler.compiling import backend
from attn_compiler.lowerings.shared.launching import ahead, dry_tensors, launch as launching
from attn_compiler.lowerings.shared.launching.ahead import Ahead
from attn_compiler.lowerings.shared.launching.compiling import Compiled
from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION
from attn_compiler.lowerings.shared.ops.listing import OPEN
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.torch_private import inductor as torch_inductor, op_library
from tests import inductor_caches

BACKWARD = ["attention_grad_q", "attention_grad_kv"]


class Begun:
    """Notes the kernels that would be compiled, and what of their arguments is asked for. failure: of each compilation.

    slow: names of kernels that are not done. pending: their compilations.
    """

    def __init__(self) -> None:
        self.slow: frozenset[str] = frozenset()
        self.pending: list[Future[Compiled]] = []
        self.kernels: list[str] = []
        self.named: list[dict[str, Any]] = []
        self.failure: Exception | None = None

    def __call__(self, kernel: Any, positional: Sequence[Any], named: dict[str, Any]) -> list[Future[Compiled]]:
        self.kernels.append(kernel.fn.__name__)
        self.named.append(named)
        future: Future[Compiled] = Future()
        if kernel.fn.__name__ in self.slow:
            self.pending.append(future)
        elif self.failure is not None:
            future.set_exception(self.failure)
        else:
            future.set_result(Compiled(kernel=kernel.fn.__name__, seconds=1.5))
        return [future]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    attn_compiler.reset()
    made = Begun()
    monkeypatch.setattr(ahead, "here", lambda: Ahead(begin=made))
    monkeypatch.setattr(backend, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    # Where a cache has the code, Triton's has the kernels, and no graph is read.
    with inductor_caches.no_graphs():
        yield made


class Layers(nn.Module):
    """Two attentions that are alike, and one that is not; with padding of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(2):
            q = self.q(x).unflatten(-1, (2, 16)).transpose(1, 2)
            x = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)
        q = x.unflatten(-1, (1, 32)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


INPUTS = (torch.randn(2, 24, 32), torch.arange(24).expand(2, -1) > 3)


def compiled(**options: Any) -> Callable[..., Any]:
    return torch.compile(Layers(), backend="attn_compiler", options={"lowering": "triton", **options})


def test_forward_and_backward_of_calls_that_are_alike_once(begun: Begun) -> None:
    compiled()(*INPUTS).sum().backward()
    assert sorted(begun.kernels) == sorted(2 * ["attention_forward", *BACKWARD])
    (report,) = attn_compiler.reports()
    assert dict(report.kernels) == {"attention_forward": 3.0, "attention_grad_q": 3.0, "attention_grad_kv": 3.0}
    assert "kernels compiled: attention_forward 3.00 s" in " ".join(report.details().split())


def test_the_kernels_of_a_backward_are_not_waited_for(begun: Begun) -> None:
    """They are in the report once they are done."""
    begun.slow = frozenset(BACKWARD)
    compiled()(*INPUTS)
    (report,) = attn_compiler.reports()
    assert dict(report.kernels) == {"attention_forward": 3.0}
    first, second, *_ = begun.pending
    first.set_result(Compiled(kernel="attention_grad_q", seconds=0.5))
    second.set_exception(RuntimeError("out of registers"))
    assert dict(report.kernels) == {"attention_forward": 3.0, "attention_grad_q": 0.5}
    assert report.to_dict()["kernels"][-1] == {"kernel": "attention_grad_q", "seconds": 0.5}


def test_kernels_that_are_done_while_a_report_is_read_are_told_of_once() -> None:
    late, early = Future[Compiled](), Future[Compiled]()
    early.set_result(Compiled(kernel="early", seconds=1.0))
    kernels = ahead.KernelSeconds([late, early])
    read = []
    for one in kernels:
        read.append(one)
        if not late.done():
            late.set_result(Compiled(kernel="late", seconds=2.0))
    assert read == [("early", 1.0)]
    assert list(kernels) == [("late", 2.0), ("early", 1.0)]


def test_compiled_code_launches_what_was_noted(
    begun: Begun, known_calls: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors lie in the compiled graph as its values said."""
    launched: list[Any] = []
    launch = launching.first_launch

    def looked_at(kernel: Any, grid: Any, *positional: Any, **named: Any) -> Any:
        if noter() is None:
            launched.append((kernel.fn.__name__, _told_apart({**named, **FUSION})))
        return launch(kernel, grid, *positional, **named)

    monkeypatch.setattr(launching, "first_launch", looked_at)
    known_calls.clear()
    compiled()(*INPUTS).sum().backward()
    noted = [(kernel, _told_apart(named)) for kernel, named in zip(begun.kernels, begun.named, strict=True)]
    assert len(launched) >= 6
    assert all(one in noted for one in launched)
    assert all(one in launched for one in noted)


def _told_apart(named: dict[str, Any]) -> dict[str, Any]:
    """Arguments, with what is looked at of tensors in their place."""

    def of(value: Any) -> Any:
        return (value.dtype, value.data_ptr() % 16) if hasattr(value, "data_ptr") else value

    return {name: of(value) for name, value in named.items()}


def test_without_gradients_the_forward_alone(begun: Begun) -> None:
    with torch.no_grad():
        compiled()(*INPUTS)
    assert begun.kernels == 2 * ["attention_forward"]


def test_sizes_that_are_symbolic_are_those_of_the_call(begun: Begun) -> None:
    model = compiled()
    for length in (24, 17):
        torch._dynamo.mark_dynamic(x := torch.randn(2, length, 32), 1)
        torch._dynamo.mark_dynamic(mask := torch.ones(2, length, dtype=torch.bool), 1)
        with torch.no_grad():
            model(x, mask)
    # As they are, and of both sorts that Triton compiles apart for.
    assert begun.kernels == 3 * ["tile_bounds", "tile_lists"] + 6 * ["attention_forward"]
    lengths = [named["sizes"].seqlen_q for named in begun.named if "sizes" in named]
    assert lengths == 2 * [24, 32, 33]
    assert {type(length) for length in lengths} == {int}


@pytest.mark.usefixtures("planted_failures")
def test_a_compilation_that_fails_is_told_and_the_model_runs_without_the_kernel(begun: Begun) -> None:
    begun.failure = RuntimeError("out of registers")
    expected = (model := Layers())(*INPUTS)
    with pytest.warns(AttnCompilerWarning, match="out of registers"):
        found = torch.compile(model, backend="attn_compiler", options={"lowering": "triton"})(*INPUTS)
    torch.testing.assert_close(found, expected)
    (report,) = attn_compiler.reports()
    assert (tuple(report.kernels), report.failure, report.faults) == ((), None, ())
    assert {site.decision.lowering for site in report.sites} == {"untouched"}
    assert "out of registers" in " ".join(report.details().split())


def test_a_body_that_fails_on_stand_ins_is_told_and_others_are_compiled(
    monkeypatch: pytest.MonkeyPatch, begun: Begun, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("no stand-ins")

    monkeypatch.setitem(op_library.NOTING, "triton_backward", fail)
    with caplog.at_level(logging.WARNING, "attn_compiler"):
        compiled()(*INPUTS).sum().backward()
    assert begun.kernels == 2 * ["attention_forward"]
    assert "no stand-ins" in caplog.text


def test_whatever_fails_is_a_warning_and_the_model_runs(monkeypatch: pytest.MonkeyPatch, begun: Begun) -> None:
    def fail(_: fx.Graph) -> None:
        raise TypeError("a node without a value")

    monkeypatch.setattr(ahead, "calls", fail)
    with pytest.warns(AttnCompilerWarning, match="compile kernels ahead"), torch.no_grad():
        compiled()(*INPUTS)
    assert not begun.kernels


def test_nothing_is_kept_of_stand_ins(begun: Begun) -> None:
    """A launch after that is a first launch."""
    expected = (model := Layers())(*INPUTS)
    compile_ = torch.compile(model, backend="attn_compiler", options={"lowering": "triton"})
    for _ in range(2):
        torch.testing.assert_close(compile_(*INPUTS), expected)


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, ["attn_compiler: compiling 1 kernels"]), (False, [])])
def test_a_terminal_shows_what_is_waited_for(
    is_terminal: bool, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    @contextlib.contextmanager
    def status(words: str) -> Iterator[None]:
        found.append(words)
        future.set_result(Compiled(kernel="kernel", seconds=2.0))
        yield

    future: Future[Compiled] = Future()
    console = SimpleNamespace(is_terminal=is_terminal, status=status)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    monkeypatch.setattr(ahead, "_SHOWN_AFTER", 0.0)
    waiting = Ahead(begin=lambda *_: [], started={future: None})
    if not is_terminal:
        future.set_result(Compiled(kernel="kernel", seconds=2.0))
    assert tuple(waiting.built().seconds) == (("kernel", 2.0),)
    assert found == shown


def test_other_compilers_trace_no_backward(begun: Begun) -> None:
    compiled(inner="eager")(*INPUTS)
    assert not begun.kernels


def test_without_a_gpu_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_inductor, "compile_threads", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert backend._ahead(attn_compiler.Options()) is None


@pytest.mark.parametrize("threads", [1, 4])
def test_on_a_gpu_threads_compile_where_inductor_would_have_it(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing at a time, too, is compiled before a call."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch_inductor, "compile_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert ahead.here() is None, "the interpreter compiles nothing"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert ahead.here() is not None


def test_calls_are_those_whose_values_are_known() -> None:
    graph = fx.Graph()
    known, unknown = graph.placeholder("known"), graph.placeholder("unknown")
    known.meta["val"] = value = torch.zeros(2, 70, dtype=torch.bool)
    lists = torch.ops.attn_compiler.tile_lists.default
    numbers = (64, 70, OPEN, 0, False, 64, 32)
    for keys in (known, unknown):
        graph.call_function(lists, (None, keys, None, None, None, *numbers), {"by_key": True, "ordered": False})
    (call,) = ahead.calls(graph)
    assert call.body is op_library.launching_body(lists)
    assert call.arguments == (None, dry_tensors.TensorLayout.read(value), None, None, None, *numbers)
    assert call.named == (("by_key", True), ("ordered", False))


def test_every_leaf_op_of_triton_kernels_is_looked_at() -> None:
    names = {
        "triton",
        "triton_forward",
        "triton_backward",
        "triton_part",
        "decode",
        "decode_latent",
        "hopper",
        "hopper_backward",
        "hopper_in_order_backward",
        "hopper_fp8",
        "document_numbers",
        "tile_lists",
    }
    names |= {"round_fp8", "largest_fp8", "mean_fp8", "linear_chunks", "linear_chunks_backward"}
    names |= {"linear_one_token"}
    assert set(op_library.NOTING) == names
    for name in names:
        assert op_library.launching_body(getattr(torch.ops.attn_compiler, name).default) is op_library.NOTING[name]
    assert op_library.launching_body(torch.ops.aten.add.Tensor) is None
    assert op_library.launching_body(torch.ops.attn_compiler.held.default) is None
    assert op_library.launching_body(len) is None
