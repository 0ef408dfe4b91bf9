"""options={"verify": True}, end to end: what is wrong raises before the compiled function runs, what is right runs unchanged."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import index_expr as ix, verifying
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.passes.recovering import added, reading, score_kinds
from attn_compiler.passes.writing import buffers, keyless_nodes
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting import verifications as results
from attn_compiler.verifying import Verification
from tests.passes.compiling import Compiled, compiled, mark
from tests.verifying.planning import LENGTH, SHAPE, Layers, Tensor, causal, planned, qkv
from tests.verifying.training import assert_verified, checkpointed, found

pytestmark = pytest.mark.usefixtures("nothing_kept")
aten = torch.ops.aten


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2], device=x.device)


# ---- attentions with every sort of mask ---------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    allowed = positions(k) <= positions(q)[:, None]
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) @ v


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return written_out(q, k, v)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = positions(q)[:, None] - positions(k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 3))


def padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    allowed = (positions(k) <= positions(q)[:, None]) & attention_mask.bool()[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def padded_additive(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    lowest = torch.finfo(q.dtype).min
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype).masked_fill(
        positions(k) > positions(q)[:, None], lowest
    )
    mask = mask.masked_fill(attention_mask[:, None, None, :] == 0, lowest)
    return (q @ k.transpose(-1, -2) * 0.3 + mask).softmax(-1) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    same = document[:, None, :, None] == document[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same & (positions(k) <= positions(q)[:, None]))


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def mask_from_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One mask for two bodies, read in a graph that holds no attention itself."""
    mask = positions(k) <= positions(q)[:, None]
    x = checkpoint(with_mask, q, k, v, mask, use_reentrant=False)
    return checkpoint(with_mask, x + q, k, v, mask, use_reentrant=False)


def several(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = q
    for _ in range(3):
        x = window(x, k, v) + q
    return x


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, attention_mask: Tensor) -> Tensor:
    apart = positions(k) - positions(q)[:, None]
    allowed = (positions(k) <= positions(q)[:, None]) & (attention_mask != 0)[:, None, None, :]
    bias = torch.where(allowed, slopes[:, None, None] * apart, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def checkpointed_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, attention_mask: Tensor) -> Tensor:
    apart = positions(k) - positions(q)[:, None]
    allowed = (positions(k) <= positions(q)[:, None]) & (attention_mask != 0)[:, None, None, :]
    bias = torch.where(allowed, slopes[:, None, None] * apart, torch.finfo(q.dtype).min).to(q.dtype)
    return checkpoint(with_mask, q.sin(), k, v, bias, use_reentrant=False) + 1


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A learned table, of relative positions."""
    apart = positions(k) - positions(q)[:, None] + q.shape[-2] - 1
    return (q @ k.mT + F.embedding(apart, table).permute(2, 0, 1)).softmax(-1) @ v


PADDING = torch.tensor([[1] * LENGTH, [0, 0, 1, 1, 0, 1]])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


@dataclasses.dataclass(frozen=True)
class Case:
    function: Callable[..., Tensor]
    more: tuple[Tensor, ...] = ()
    mask: bool = True
    sites: int = 1


CASES = [
    Case(plain, mask=False),
    Case(causal),
    Case(written_out),
    Case(window),
    Case(padded, (PADDING,)),
    Case(padded_additive, (PADDING,)),
    Case(documents, (DOCUMENTS,)),
    Case(checkpointed),
    Case(mask_from_outside, sites=2),
    Case(several, sites=3),
    Case(autocast),
]


def run(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Compiled, Any]:
    with_checks = compiled(function, verify=True, **options)
    return with_checks, with_checks(*args)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_right_attention_passes(case: Case, dtype: torch.dtype) -> None:
    # A checkpoint without gradients is an error of PyTorch's own, with random numbers in it or what may draw some.
    inputs = [*qkv(dtype=dtype, grad=True), *case.more]
    # The second one for masks of numbers, whose rows may have no key: the first refuses those where there are gradients.
    _, out = run(case.function, *inputs, lowerings=["sdpa_cpu_flash", "math"])
    kept = torch.ones((*SHAPE[:1], 1, LENGTH, 1), dtype=torch.bool)
    if case.more and case.more[0] is PADDING:
        kept = (PADDING.bool()[:, None, None, :] & torch.ones(LENGTH, LENGTH).tril().bool()).any(-1, keepdim=True)
    tolerance = {"rtol": 2e-2, "atol": 4e-2} if dtype != torch.float32 or case.function is autocast else {}
    torch.testing.assert_close(out * kept, case.function(*inputs) * kept, **tolerance)
    assert_verified("output", sites=case.sites)
    assert len(found("mask")) == (case.sites if case.mask else 0)
    if case.mask:
        assert_verified("mask", sites=case.sites)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[4], CASES[7]], ids=lambda case: case.function.__name__)
def test_dynamic_sizes(case: Case) -> None:
    inputs = [mark(x, (LENGTH, SHAPE[0])) for x in [*qkv(grad=True), *(x.clone() for x in case.more)]]
    run(case.function, *inputs)
    assert_verified("output", "mask")


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("dynamic_sizes", [(), (SHAPE[0], LENGTH)], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [alibi, checkpointed_alibi, relative], ids=lambda f: f.__name__)
def test_right_bias_passes(function: Callable[..., Tensor], dynamic_sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    table = torch.randn(2 * LENGTH, SHAPE[1], generator=torch.Generator().manual_seed(1))
    more = [table.to(dtype).requires_grad_()] if function is relative else [SLOPES, PADDING]
    inputs = [*qkv(dtype=dtype, grad=True), *(x if x.requires_grad else x.clone() for x in more)]
    run(function, *(mark(x, dynamic_sizes) for x in inputs))
    assert_verified("mask", "bias")
    (bias,) = found("bias")
    assert bias.formula is not None
    assert ("relative bias" if function is relative else "ALiBi") in bias.formula


class Cached(nn.Module):
    """Decodes one token with a static cache, which it writes to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 4, 16, 8))
        self.register_buffer("values", torch.zeros(2, 4, 16, 8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        allowed = torch.arange(16) <= position[:, None]
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=allowed)


def test_static_cache_is_written_once() -> None:
    mine, right = Cached(), Cached()
    model = compiled(mine, verify=True)
    for step in range(3):
        token = [x + step for x in qkv(shape=(2, 4, 1, 8))]
        out = model(*token, torch.tensor([step]))
        torch.testing.assert_close(out, right(*token, torch.tensor([step])))
        torch.testing.assert_close(mine.keys, right.keys, rtol=0, atol=0)
    assert_verified("output", "mask")


def test_adds_in_place_to_an_input_once() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, total: Tensor) -> Tensor:
        total.add_(1)
        return causal(q, k, v) + total

    total = torch.zeros(3, 8)[0]
    run(function, *qkv(), total)
    assert total.tolist() == [1.0] * 8


def test_aliases_among_the_inputs_stay_aliases() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, whole: Tensor, part: Tensor) -> Tensor:
        whole.add_(1)
        return causal(q + part[:, :, :, :8], k, v)

    whole = torch.zeros(2, 4, 6, 16)
    args = [*qkv(), whole, whole[..., 4:]]
    right = copy.deepcopy(args[:3])
    _, out = run(function, *args)
    torch.testing.assert_close(out, causal(right[0] + 1, *right[1:]))
    assert_verified("output")


def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(causal(F.dropout(q, 0.5), k, v), 0.5)


def test_random_numbers_are_those_of_a_run_without_it() -> None:
    outs = []
    for verify in (False, True):
        function = compiled(noisy, verify=verify)
        torch.manual_seed(0)
        outs.append((function(*qkv()), torch.rand(1)))
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert_verified("output")


def test_only_the_first_call_of_each_graph_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = verifying.running.run_checks
    monkeypatch.setattr(verifying.running, "run_checks", lambda plan, args: runs.append(plan) or real(plan, args))
    function = compiled(causal, dynamic=False, verify=True)
    for _ in range(3):
        function(*qkv())
    assert len(runs) == 1
    function(*qkv(shape=(1, 2, 5, 8)))
    assert len(runs) == 2


def test_threads_that_call_at_once_verify_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(causal, *qkv())
    runs: list[Any] = []
    real = verifying.running.run_checks

    def slow(plan: Any, args: Any) -> list[Verification]:
        runs.append(args)
        time.sleep(0.1)
        return real(plan, args)

    monkeypatch.setattr(verifying.running, "run_checks", slow)
    function = verifying.checked(lambda *args: len(runs), found.plan)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: function(*found.args), range(4))) == [1] * 4


def test_a_call_on_fake_tensors_is_no_first_call() -> None:
    found = planned(causal, *qkv())
    function = verifying.checked(found.module.forward, found.plan)
    with FakeTensorMode() as mode:
        function(*(mode.from_tensor(x) for x in found.args))
    assert attn_compiler.verifications() == ()
    function(*found.args)
    assert_verified("output")


def test_without_the_option_nothing_is_verified() -> None:
    compiled(causal)(*qkv())
    assert attn_compiler.verifications() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("lowering", ["sdpa_cudnn", "sdpa_flash", "sdpa_efficient"])
def test_right_attention_passes_on_a_gpu(lowering: str, dtype: torch.dtype) -> None:
    inputs = [x.cuda().requires_grad_() for x in qkv(dtype=dtype, shape=(2, 4, 128, 64))]
    states, checks = [], []
    for verify in (True, False):
        function = compiled(
            lambda q, k, v: window(F.dropout(q, 0.1), k, v) + causal(q, k, v), lowerings=[lowering], verify=verify
        )
        torch.manual_seed(0)
        function(*inputs)
        states.append(torch.cuda.get_rng_state())
        checks += attn_compiler.verifications()
    assert torch.equal(*states)
    assert [v.skipped for v in checks if v.subject == "mask"] == [None] * 2
    assert {v.skipped for v in checks if v.subject == "output"} <= {None, "the site is as the model made it"}


# ---- what is wrong ------------------------------------------------------------------------------------------------


@pytest.fixture
def mask_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = SdpaCpuFlash.emit

    def without_mask(self: Any, emitter: Any, spec: Any, operands: Any) -> Any:
        return emit(self, emitter, spec, dataclasses.replace(operands, mask=None))

    monkeypatch.setattr(SdpaCpuFlash, "emit", without_mask)


@pytest.fixture
def less_or_equal_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.READERS, aten.le.Tensor, reading.READERS[aten.lt.Tensor])


@pytest.mark.usefixtures("mask_is_ignored")
def test_lowering_that_ignores_the_mask() -> None:
    with pytest.raises(VerificationMismatch) as caught:
        run(window, *qkv())
    error = caught.value
    assert error.what == "output of sdpa_cpu_flash"
    assert "k <= q" in error.formula
    index = [int(i) for i in error.index.strip("[]").split(",")]
    wrong, right = plain(*qkv()), window(*qkv())
    assert tuple(index) == tuple(int(i) for i in torch.unravel_index((wrong - right).abs().argmax(), right.shape))
    assert float(error.expected.split()[0]) == pytest.approx(right[tuple(index)].item(), rel=1e-4)
    assert float(error.observed) == pytest.approx(wrong[tuple(index)].item(), rel=1e-4)
    assert "an error of" in error.allowed
    assert "options={'lowering': 'untouched'}" in str(error)


@pytest.mark.usefixtures("mask_is_ignored")
def test_lowering_that_ignores_the_mask_inside_a_checkpoint() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(window, q, k, v, use_reentrant=False).sin()

    with pytest.raises(VerificationMismatch, match="output of sdpa_cpu_flash"):
        run(function, *qkv(grad=True))


@pytest.mark.in_turns
@pytest.mark.usefixtures("less_or_equal_is_less")
@pytest.mark.parametrize("function", [causal, checkpointed, mask_from_outside], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic_sizes", [(), (SHAPE[0], LENGTH)], ids=["static", "dynamic"])
def test_condition_that_is_off_by_one(function: Callable[..., Tensor], dynamic_sizes: tuple[int, ...]) -> None:
    with pytest.raises(VerificationMismatch) as caught:
        run(function, *(mark(x, dynamic_sizes) for x in qkv(grad=True)))
    error = caught.value
    assert error.what == "recovered mask"
    assert error.formula == "k + 1 <= q"
    assert error.index == "b=0, h=0, q=0, k=0"
    assert "allowed" in error.expected
    assert error.observed == "masked out"
    assert error.differing.startswith(f"{LENGTH} of {LENGTH * LENGTH} pairs")


@pytest.mark.parametrize("function", [alibi, checkpointed_alibi], ids=lambda f: f.__name__)
def test_bias_that_is_off_by_a_position(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor]) -> None:
    real = score_kinds.RECOGNISERS[0]

    def off_by_one(part: added.Summand) -> Any:
        kind = real(part)
        return kind and dataclasses.replace(kind, position=ix.add(kind.position, ix.ONE))

    monkeypatch.setattr(score_kinds, "RECOGNISERS", (off_by_one, *score_kinds.RECOGNISERS[1:]))
    with pytest.raises(VerificationMismatch) as caught:
        run(function, *qkv(grad=True), SLOPES, PADDING)
    error = caught.value
    assert error.what == "recovered bias"
    assert error.formula.startswith("ALiBi")
    assert error.formula.endswith("· (k + 1 - q)")
    assert error.index.startswith("b=0, h=0, ")


@pytest.mark.usefixtures("less_or_equal_is_less")
def test_site_is_named_and_the_other_sites_too() -> None:
    with pytest.raises(VerificationMismatch) as caught:
        run(Layers(), *qkv())
    assert caught.value.site == "layers.0"
    assert "layers.0" in str(caught.value)
    assert any("layers.1" in note for note in caught.value.__notes__)


@pytest.mark.usefixtures("mask_is_ignored")
def test_a_call_that_raised_is_no_first_call() -> None:
    function = compiled(window, verify=True)
    for _ in range(2):
        with pytest.raises(VerificationMismatch):
            function(*qkv())


@pytest.mark.usefixtures("mask_is_ignored")
def test_a_mismatch_leaves_caches_as_they_were() -> None:
    model = Cached()
    with pytest.raises(VerificationMismatch):
        run(model, *qkv(shape=(2, 4, 1, 8)), torch.tensor([0]))
    assert not model.keys.any()


@pytest.mark.usefixtures("mask_is_ignored")
def test_every_call_is_wrong_without_the_option() -> None:
    """That the fault of these tests would go unnoticed otherwise."""
    out = compiled(window)(*qkv())
    assert not torch.allclose(out, window(*qkv()), atol=1e-2)


# ---- what can't be compared ---------------------------------------------------------------------------------------


def _warnings(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [r.getMessage() for r in caplog.records if r.name == results.__name__ and r.levelno == logging.WARNING]


def test_a_site_that_is_left_untouched_is_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    run(causal, *qkv(), lowering="untouched")
    assert [v.skipped for v in found("output")] == ["the site is as the model made it"]
    assert_verified("mask")
    assert any("output not verified: the site is as the model made it" in text for text in _warnings(caplog))


def test_a_mask_that_was_not_read_is_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    run(function, *qkv(), torch.ones(LENGTH, LENGTH).tril().bool())
    (mask,) = found("mask")
    assert mask.skipped is not None
    assert "is an input of the graph" in mask.skipped
    assert_verified("output")
    assert any("mask not verified" in text for text in _warnings(caplog))


def test_dropout_is_said_to_be_unchecked() -> None:
    run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), *qkv(), lowerings=["reference"])
    (output,) = found("output")
    assert output.skipped is not None


@pytest.mark.parametrize(("fill", "part"), [(-1e9, 1), (-math.inf, 2)])
def test_rows_without_any_key_are_left_out_where_the_model_gives_no_number(fill: float, part: int) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).masked_fill(attention_mask[:, None, None, :] == 0, fill).softmax(-1) @ v

    run(function, *qkv(), torch.tensor([[1] * LENGTH, [0] * LENGTH]))
    (output,) = found("output")
    assert output.skipped is None
    assert output.elements == torch.Size(SHAPE).numel() // part


def test_a_row_without_keys_that_is_not_the_models_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).masked_fill(attention_mask[:, None, None, :] == 0, -2e9).softmax(-1) @ v

    monkeypatch.setattr(keyless_nodes, "completed", lambda emitter, spec, keyless, operands, out: out)
    with pytest.raises(VerificationMismatch):
        run(function, *qkv(), torch.tensor([[1] * LENGTH, [0] * LENGTH]))


def test_attention_inside_one_call() -> None:
    """nn.MultiheadAttention is expanded: the model's own graph has none of its parts."""
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, LENGTH, 8)
    with torch.no_grad():
        run(lambda x: module(x, x, x, need_weights=False)[0], x)
    assert_verified("output")


def test_softmax_over_another_axis() -> None:
    """Its node keeps its name and means something else after the rewriting."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate = (q @ q.transpose(-1, -2)).softmax(-2) @ v
        return causal(gate, k, v) + gate

    run(function, *qkv())
    assert all(v.skipped is None for v in attn_compiler.verifications()), attn_compiler.verifications()


def test_a_graph_that_a_pass_failed_on_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("odd")

    monkeypatch.setattr(buffers, "install", broken)
    with pytest.warns(attn_compiler.reasons.errors.AttnCompilerWarning):
        _, out = run(causal, *qkv(), strict=False)
    torch.testing.assert_close(out, causal(*qkv()))
    assert attn_compiler.verifications() == ()
