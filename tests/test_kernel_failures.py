"""A kernel that can't be compiled or started costs its site, never a call: one warning, right numbers, and code without it from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import attn_compiler
import attn_compiler.compiling.backend as backend_module
from attn_compiler.lowerings.decode import replaying as decode_launch
from attn_compiler.lowerings.shared.calls import listing_launch
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.launching import ahead, launch as launching, on_device, replaying
from attn_compiler.lowerings.shared.ops import listing
from attn_compiler.reasons.errors import KernelFailed
from tests.passes.compiling import warned

B, H, S, D = 2, 2, 40, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: what users may meet: how it is said, and by whom
ERRORS: dict[str, Callable[[], Exception]] = {
    "compile error": lambda: CompilationError("def kernel(): pass", None, "'tuple' object has no attribute _replace"),
    "assembler": lambda: PTXASError("ptxas fatal: Unsupported .version 9.0; current version is '8.4'"),
    "out of resources": lambda: OutOfResources(300_000, 232_448, "shared memory"),
    "launch error": lambda: RuntimeError("Triton Error [CUDA]: invalid argument"),
    "driver too old": lambda: RuntimeError(
        "Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain."
    ),
}


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every launch of a test is a first one."""
    torch._dynamo.reset()
    monkeypatch.setattr(replaying, "_CACHES", on_device.KnownCalls())
    yield
    torch._dynamo.reset()


class _Planted:
    """Launches of kernels whose name has a part in it fail. met: how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, error: Callable[[], Exception]) -> None:
        self.met, launch, first = 0, launching._first_launch, launching.first_launch

        def failing(kernel: Any, *given: Any, **named: Any) -> Any:
            if part in kernel.fn.__name__:
                self.met += 1
                raise error()
            return launch(kernel, *given, **named)

        def failing_too(kernel: Any, *given: Any, **named: Any) -> Any:
            if part in kernel.fn.__name__:
                self.met += 1
                raise error()
            return first(kernel, *given, **named)

        monkeypatch.setattr(launching, "_first_launch", failing)
        monkeypatch.setattr(decode_launch, "first_launch", failing_too)


def _masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Causal, with padding, and then an attention of another kind, which keeps its kernel."""
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & keep[:, None, None, :])
    return first + F.scaled_dot_product_attention(q, k, v)


def _inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, device=DEVICE, requires_grad=True) for _ in range(3))
    return q, k, v, torch.arange(S, device=DEVICE) < torch.tensor([[S], [S - 7]], device=DEVICE)


def _step(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = run(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def _compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    asked = {"inner": "aot_eager", "lowerings": ["triton", "math"], **options}
    return torch.compile(function, backend="attn_compiler", options=asked)


def _lowerings() -> list[str]:
    """Of the last report, in the order of its sites."""
    return [site.decision.lowering for site in attn_compiler.reports()[-1].sites]


@pytest.mark.in_turns
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kernel", ["attention_forward", "attention_grad_q"])
def test_a_first_launch_that_fails(kernel: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs()
    expected = _step(_masked, inputs)
    planted = _Planted(monkeypatch, kernel, ERRORS[error])
    run = _compiled(_masked)
    got, said = warned(lambda: _step(run, inputs))
    torch.testing.assert_close(got, expected)
    assert planted.met > 0
    assert _lowerings() == ["triton", "triton"]
    assert said
    cause = str(ERRORS[error]()).split()[0]
    assert all(cause in text and "to reproduce" in text.lower() and "AC917" in text for text in said)
    met = planted.met
    again, said = warned(lambda: _step(run, inputs))
    torch.testing.assert_close(again, expected)
    assert not said
    assert planted.met == met
    assert "triton" not in _lowerings()
    (report,) = attn_compiler.reports()[-1:]
    refused = [refusal for site in report.sites for refusal in site.decision.refusals]
    assert any(cause in reason.observed and reason.code == "AC112" for one in refused for reason in one.reasons)


def test_the_other_site_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the site whose text failed is decided again."""
    launch = launching._first_launch

    def failing(kernel: Any, same: Any, tensors: Any, found: Any) -> Any:
        if kernel.fn.__name__ == "attention_forward" and "keys" in tensors:
            raise RuntimeError("planted")
        return launch(kernel, same, tensors, found)

    monkeypatch.setattr(launching, "_first_launch", failing)
    inputs = _inputs()
    expected, run = _step(_masked, inputs), _compiled(_masked)
    for _ in range(2):
        got, _said = warned(lambda: _step(run, inputs))
        torch.testing.assert_close(got, expected)
    assert sorted(_lowerings()) == ["math", "triton"]


@pytest.mark.parametrize("kernel", ["attention_forward", "attention_grad_kv"])
def test_strict_raises(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs()
    _Planted(monkeypatch, kernel, ERRORS["launch error"])
    with pytest.raises(KernelFailed, match="invalid argument"):
        _step(_compiled(_masked, strict=True), inputs)


def test_memory_that_ran_out_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs()
    _Planted(monkeypatch, "attention_forward", lambda: torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        _step(_compiled(_masked), inputs)
    assert not FAILURES.causes


def test_dropout_is_the_same_in_a_backward_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward ran with the kernel, whose draws the definition makes again."""
    inputs = _inputs()[:3]

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(3)
    expected = _step(_compiled(dropped), inputs)
    torch._dynamo.reset()
    monkeypatch.setattr(replaying, "_CACHES", on_device.KnownCalls())
    _Planted(monkeypatch, "attention_grad_q", ERRORS["launch error"])
    torch.manual_seed(3)
    got, said = warned(lambda: _step(_compiled(dropped), inputs))
    torch.testing.assert_close(got, expected)
    assert said


def test_a_helpers_kernel() -> None:
    """Lists of tiles are made by ordinary ops then."""
    keys = torch.arange(100, device=DEVICE) < torch.tensor([[100], [60]], device=DEVICE)
    given = (None, keys, None, None, None, 64, 100, listing.OPEN, 0, False, 64, 32, False, True)

    def failing(*_: Any) -> Any:
        raise ERRORS["launch error"]()

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(listing_launch, "launch", failing)
        found, said = warned(lambda: listing_launch.lists(*given))
    assert len(said) == 1
    # For each row of the batch, two tiles of which the second is in part, and its place; what follows that means nothing.
    right = listing.listed(*given)
    assert found.shape == right.shape
    assert torch.equal(found[:, :, 0, :5], right[:, :, 0, :5])


def test_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, length, D, device=DEVICE) for length in (1, S, S))
    keep = torch.arange(S, device=DEVICE) < torch.tensor([[S - 3], [S - 9]], device=DEVICE)

    def step(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])

    planted = _Planted(monkeypatch, "attention_decode", ERRORS["out of resources"])
    run = _compiled(step, lowerings=["decode", "math"])
    with torch.no_grad():
        expected = step(q, k, v, keep)
        got, said = warned(lambda: run(q, k, v, keep))
        torch.testing.assert_close(got, expected)
        assert said
        assert _lowerings() == ["decode"]
        torch.testing.assert_close(run(q, k, v, keep), expected)
    assert _lowerings() == ["math"]
    assert planted.met == 1


class _Ahead:
    """Says of the first graph with Triton's kernels that one of them does not compile."""

    def __init__(self, error: Exception) -> None:
        self.error, self.made = error, ahead.Ahead(begin=lambda *_: [])
        self.texts: list[str] = []

    def read(self, graph: torch.fx.Graph) -> None:
        for call in ahead.calls(graph):
            if call.op == "triton_forward" and call.text not in self.texts:
                self.texts.append(call.text)
                future: Future[Any] = Future()
                future.set_exception(self.error)
                self.made.started[future] = call

    def built(self) -> ahead.Built:
        return self.made.built()


def test_a_kernel_that_does_not_compile_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is compiled again before it runs."""
    inputs = _inputs()
    expected = _step(_masked, inputs)
    made: list[_Ahead] = []

    def here(_options: Any) -> _Ahead:
        made.append(_Ahead(ERRORS["compile error"]()))
        return made[-1]

    monkeypatch.setattr(backend_module, "_ahead", here)
    run = _compiled(_masked, inner="inductor")
    got, said = warned(lambda: _step(run, inputs))
    torch.testing.assert_close(got, expected)
    assert [one.texts == [] for one in made] == [False, True]
    assert len(said) == 2
    assert all("did not compile" in text and "_replace" in text for text in said)
    assert _lowerings() == ["math", "math"]


def test_strict_raises_what_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_ahead", lambda _options: _Ahead(ERRORS["assembler"]()))
    with pytest.raises(KernelFailed, match="ptxas"):
        _step(_compiled(_masked, inner="inductor", strict=True), _inputs())
