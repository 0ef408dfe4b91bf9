"""q and k that a model casts to float32 are read above the cast, where nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.calls.arguments import kernel_constants
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.matching import operands
from attn_compiler.passes.recovering import upcasts
from tests import numerics
from tests.passes.compiling import Compiled, compiled

BATCH, HEADS, LENGTH, DEPTH = 2, 3, 37, 16
HALVES = [torch.float16, torch.bfloat16]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcasts, "_is_on_cpu", lambda node: False)


def inputs(dtype: torch.dtype = torch.bfloat16, *, size: float = 1.0, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(BATCH, LENGTH, HEADS, DEPTH, generator=generator) for _ in range(3)]
    return [(x * size if i < 2 else x).to(dtype).transpose(1, 2).requires_grad_(grad) for i, x in enumerate(made)]


def mask(length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def gptj(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-J has it."""
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2))
    scores = torch.where(mask(), scores, torch.finfo(scores.dtype).min) / 4.0
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)


def cast_above_views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The casts stand above a transposition and a repetition."""
    q, k = q.float(), k.float()[:, :, None].expand(-1, -1, 1, -1, -1).reshape(k.shape)
    return (q * 0.25 @ k.mT).masked_fill(~mask(), -torch.inf).softmax(-1).to(v.dtype) @ v


def flint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The casts stand below a repetition of heads, and a sink of each head is joined to the scores."""
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(BATCH, 2 * HEADS, LENGTH, DEPTH) for x in (k, v))
    scores = torch.matmul(q.float(), k.float().mT) * 0.25
    sinks = torch.arange(2 * HEADS).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(v.dtype) @ v


def run(attention: Attention, *given: Tensor, **options: Any) -> Compiled:
    function = compiled(attention, strict=True, verify=True, **options)
    function(*given)
    return function


def is_narrow(function: Compiled) -> bool:
    site = function.site
    kept = site.spec.q.dtype == site.spec.k.dtype == site.spec.v.dtype and site.spec.dtype != "float32"
    assert kept == (upcasts.NOTE in site.notes)
    return kept


@pytest.mark.in_turns
@pytest.mark.parametrize("attention", [gptj, cast_above_views])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_casts_are_left_out(attention: Attention, dtype: torch.dtype) -> None:
    assert is_narrow(run(attention, *inputs(dtype), lowering="math"))


@pytest.mark.parametrize("as_on_a_gpu", [True, False])
def test_key_heads_are_found_above_casts(as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks vary along all heads, also where keys are read behind their repetition, as on a CPU."""
    monkeypatch.setattr(upcasts, "_is_on_cpu", lambda node: not as_on_a_gpu)
    q, k, v = inputs()
    found = run(flint, torch.cat([q, q * 0.5], 1), k, v, lowering="math")
    assert is_narrow(found) == as_on_a_gpu
    heads = HEADS if as_on_a_gpu else 2 * HEADS
    assert [x.shape[1] for x in (found.site.spec.q, found.site.spec.k, found.site.spec.v)] == [2 * HEADS, heads, heads]


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["math", "reference", "triton", "sdpa_cpu_flash"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [0.1, 1.0, 6.0])
def test_result_is_as_accurate(lowering: str, dtype: torch.dtype, size: float) -> None:
    """Beside float64, at most 1.1 times as far as the model's own."""
    if lowering == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    given = inputs(dtype, size=size)
    exact = gptj(*(x.double() for x in given))
    own = gptj(*given)
    function = compiled(gptj, strict=True, lowering=lowering)
    found = function(*given)
    assert is_narrow(function)
    ours, theirs = ((x.double() - exact).square().mean().sqrt() for x in (found, own))
    assert ours <= 1.1 * theirs


def _factor(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return (q.float() @ k.float().mT * factor).softmax(-1).to(v.dtype) @ v


def test_a_factor_that_is_a_tensor_keeps_the_casts() -> None:
    """It would be multiplied on q, and rounded."""
    assert not is_narrow(run(_factor, *inputs(), torch.tensor(0.3), lowering="math"))  # type: ignore[arg-type]


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q.float() @ k.float().mT + bias).softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_bias_of_float32_keeps_the_casts(dtype: torch.dtype, narrow: bool) -> None:
    bias = torch.randn(LENGTH, LENGTH).to(dtype)
    assert is_narrow(run(_biased, *inputs(), bias, lowering="math")) is narrow  # type: ignore[arg-type]


def test_values_in_float32_keep_the_casts() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.float() @ k.float().mT).softmax(-1) @ v.float()

    assert not is_narrow(run(attention, *inputs(), lowering="math"))


def test_numbers_that_were_not_half_keep_their_dtype() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q.float() * q.float().sum(-1, keepdim=True)) @ k.float().mT).softmax(-1).to(v.dtype) @ v

    assert not is_narrow(run(attention, *inputs(), lowering="math"))


def test_two_halves_keep_the_casts() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.float() @ k.float().mT).softmax(-1).to(v.dtype) @ v

    q, k, v = inputs()
    assert not is_narrow(run(attention, q.to(torch.float16), k, v, lowering="math"))


def test_a_cast_that_is_written_to_is_not_read_through() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = q.float()
        wide.mul_(1.7)
        return (wide @ k.float().mT).softmax(-1).to(v.dtype) @ v

    given = inputs()
    function = run(attention, *given, lowering="math")
    assert not is_narrow(function)
    torch.testing.assert_close(function(*given), attention(*given), atol=1e-2, rtol=1e-2)


def test_what_is_cast_may_be_written_to_before_the_kernel() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().mT
        q.zero_()
        return scores.softmax(-1).to(v.dtype) @ v

    given = inputs()
    expected = attention(*(x.clone() for x in given))
    function = compiled(attention, strict=True, lowering="math")
    torch.testing.assert_close(function(*(x.clone() for x in given)), expected, atol=1e-2, rtol=1e-2)
    assert not is_narrow(function)


def test_axes_that_can_not_be_followed_keep_the_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site is not lost for it."""
    read = operands.read

    def fails(*given: Any, through_upcasts: bool = False, **named: Any) -> Any:
        if through_upcasts:
            raise AxisError("a dimension that can't be followed")
        return read(*given, **named)

    monkeypatch.setattr(operands, "read", fails)
    assert not is_narrow(run(gptj, *inputs(), lowering="math"))


def test_training_keeps_the_casts() -> None:
    assert not is_narrow(run(gptj, *inputs(grad=True), lowering="math"))


# ---- training: products in tf32 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [gptj, cast_above_views])
def test_training_holds_numbers_of_bfloat16(attention: Attention) -> None:
    site = run(attention, *inputs(grad=True), lowering="math").site
    assert site.spec.of_bfloat16
    assert kernel_constants(site.spec, added=False)["PRECISION"] == "tf32"


def _widened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As CodeGen has it where its tables of positions are float32."""
    return ((q.float() * 1.1 + 0.3) @ k.float().mT).softmax(-1).to(v.dtype) @ v


def _of_float32_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.float() @ k.float().mT).softmax(-1) @ (v.float() * v.float())


def _factor_of_run_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.float() @ k.float().mT * v.float().mean()).softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        (gptj, torch.float16),
        (gptj, torch.float32),
        (_widened, torch.bfloat16),
        (_of_float32_values, torch.bfloat16),
        (_factor_of_run_time, torch.bfloat16),
    ],
)
def test_training_on_other_numbers_keeps_float32(attention: Attention, dtype: torch.dtype) -> None:
    """tf32 has not all digits of float32, and cuts weights of float16 where the model rounds them."""
    site = run(attention, *inputs(dtype, grad=True), lowering="math").site
    assert not site.spec.of_bfloat16
    assert kernel_constants(site.spec, added=False)["PRECISION"] == "ieee"


def test_inference_has_no_such_site() -> None:
    assert not run(gptj, *inputs(), lowering="math").site.spec.of_bfloat16


@pytest.mark.parametrize("size", [0.3, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_weights_and_gradients_that_are_cut_to_tf32_are_as_accurate(size: float, mean: float) -> None:
    """The kernels' own formulas, with each product in tf32: beside float64, at most 1.1 times as far as the model's own."""
    q, k, v = (x.detach() for x in inputs(size=size))
    v = (v.float() + mean).to(v.dtype)
    upstream = torch.randn(v.shape, generator=torch.Generator().manual_seed(5)).to(v.dtype)
    exact, own = (
        _with_gradients([x.to(kind) for x in (q, k, v)], upstream.to(kind)) for kind in (torch.float64, q.dtype)
    )
    for mine, usual, right in zip(_in_tf32(q, k, v, upstream), own, exact, strict=True):
        ours, theirs = ((x.double() - right).square().mean().sqrt() for x in (mine, usual))
        assert ours <= 1.1 * theirs


def _with_gradients(given: list[Tensor], upstream: Tensor) -> list[Tensor]:
    given = [x.requires_grad_() for x in given]
    out = gptj(*given)
    return [out, *torch.autograd.grad(out, given, upstream)]


def _in_tf32(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Tensor]:
    dtype, (q, k, v, upstream) = q.dtype, (x.float() for x in (q, k, v, upstream))
    scores = (q @ k.mT / 4.0).masked_fill(~mask(), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = _cut(weights) @ v / weights.sum(-1, keepdim=True)
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    grad = _cut(weights * (upstream @ v.mT - (upstream * out).sum(-1, keepdim=True)))
    found = [out, grad @ k / 4.0, grad.mT @ q / 4.0, _cut(weights).mT @ upstream]
    return [x.to(dtype) for x in found]


def _cut(x: Tensor) -> Tensor:
    """As tensor cores read float32: without the last 13 bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    scores = (q.float() @ k.float().mT).where(at <= at[:, None], torch.finfo(torch.float32).min) / 4.0
    return scores.softmax(-1).to(v.dtype) @ v


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_training_on_a_gpu(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    given = [x.detach().cuda().requires_grad_() for x in inputs(size=size)]
    upstream = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(5)).cuda().bfloat16()

    def results(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        out = function(*tensors)
        return [out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]

    exact = results(_causal, [x.detach().double().requires_grad_() for x in given])
    own = results(_causal, given)
    function = compiled(_causal, strict=True, lowering="triton", inner="aot_eager")
    found = results(function, given)
    assert function.site.spec.of_bfloat16
    far = {
        name: [float((x.double() - right).detach().square().mean().sqrt()) for x in (mine, usual)]
        for name, mine, usual, right in zip(("out", "dq", "dk", "dv"), found, own, exact, strict=True)
    }
    assert all(ours <= numerics.FACTOR * theirs for ours, theirs in far.values()), far


def test_a_cpu_keeps_the_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not is_narrow(run(gptj, *inputs(), lowering="math"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    given = [x.cuda() for x in inputs(dtype)]
    exact, own = _causal(*(x.double() for x in given)), _causal(*given)
    function = compiled(_causal, strict=True, lowerings=["triton", "sdpa_efficient"])
    found = function(*given)
    assert is_narrow(function)
    ours, theirs = ((x.double() - exact).square().mean().sqrt() for x in (found, own))
    assert ours <= 1.1 * theirs
