"""options={"verify": True}, end to end: what is wrong raises before the compiled function runs, what is right runs unchanged."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
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
from attn_compiler.passes.writing import keyless_nodes
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting import verifications as results
from attn_compiler.verifying import Verification, first
from tests.passes.compiling import Compiled, compiled, mark
from tests.verifying.planning import (
    LENGTH,
    SHAPE,
    Layers,
    Tensor,
    alibi_mask,
    causal,
    masked_alibi,
    planned,
    qkv,
    with_mask,
)
from tests.verifying.training import DTYPES, assert_verified, autocast, checkpointed, found, two_layers, with_table


def _causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()


# ---- attentions with every sort of mask ---------------------------------------------------------------------------


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    allowed = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return (q @ k.mT * 0.3).masked_fill(~allowed, torch.finfo(q.dtype).min).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    return with_mask(q, k, v, (distance >= 0) & (distance < 3))


def padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return with_mask(q, k, v, _causal(q) & attention_mask.bool()[:, None, None, :])


def padded_additive(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    lowest = torch.finfo(q.dtype).min
    mask = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(~_causal(q), lowest)
    return (q @ k.mT * 0.3 + mask.masked_fill(attention_mask[:, None, None, :] == 0, lowest)).softmax(-1) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    return with_mask(q, k, v, _causal(q) & (document[:, None, :, None] == document[:, None, None, :]))


def mask_from_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One mask for two bodies, read in a graph that holds no attention itself."""
    mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    x = checkpoint(with_mask, q, k, v, mask, use_reentrant=False)
    return checkpoint(with_mask, x + q, k, v, mask, use_reentrant=False)


def checkpointed_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, attention_mask: Tensor) -> Tensor:
    bias = alibi_mask(q, k, slopes, attention_mask)
    return checkpoint(with_mask, q.sin(), k, v, bias, use_reentrant=False) + 1


PADDING = torch.tensor([[1] * LENGTH, [0, 0, 1, 1, 0, 1]])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


#: a model, its further inputs, and how many sites and masks it has
CASES: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], int, int]] = [
    (F.scaled_dot_product_attention, (), 1, 0),
    (causal, (), 1, 1),
    (written_out, (), 1, 1),
    (window, (), 1, 1),
    (padded, (PADDING,), 1, 1),
    (padded_additive, (PADDING,), 1, 1),
    (documents, (DOCUMENTS,), 1, 1),
    (checkpointed, (), 1, 1),
    (mask_from_outside, (), 2, 2),
    (two_layers, (), 2, 2),
    (autocast, (), 1, 0),
]


def run(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Compiled, Any]:
    with_checks = compiled(function, verify=True, **options)
    return with_checks, with_checks(*args)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("function", "more", "sites", "masks"), CASES)
def test_right_attention_passes(function: Any, more: Any, sites: int, masks: int, dtype: torch.dtype) -> None:
    # A checkpoint without gradients is an error of PyTorch's own, with random numbers in it or what may draw some.
    inputs = [*qkv(dtype=dtype, grad=True), *more]
    # The second one for masks of numbers, whose rows may have no key: the first refuses those where there are gradients.
    _, out = run(function, *inputs, lowerings=["sdpa_cpu_flash", "math"])
    real = PADDING.bool() if more and more[0] is PADDING else torch.ones_like(PADDING).bool()
    kept = (real[:, None, None, :] & _causal(inputs[0])).any(-1, keepdim=True)
    tolerance = {"rtol": 2e-2, "atol": 4e-2} if dtype != torch.float32 or function is autocast else {}
    torch.testing.assert_close(out * kept, function(*inputs) * kept, **tolerance)
    assert_verified("output", sites=sites)
    assert_verified("mask", sites=masks)
    results.forget()
    if function in (causal, written_out, padded, checkpointed):
        run(function, *(mark(x.detach().clone().requires_grad_(x.requires_grad), (LENGTH, SHAPE[0])) for x in inputs))
        assert_verified("output", "mask")


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("dynamic_sizes", [(), (SHAPE[0], LENGTH)], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [masked_alibi, checkpointed_alibi, with_table], ids=lambda f: f.__name__)
def test_right_bias_passes(function: Callable[..., Tensor], dynamic_sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    table = torch.randn(2 * LENGTH, SHAPE[1], generator=torch.Generator().manual_seed(1))
    more = [table.to(dtype).requires_grad_()] if function is with_table else [SLOPES.clone(), PADDING.clone()]
    run(function, *(mark(x, dynamic_sizes) for x in [*qkv(dtype=dtype, grad=True), *more]))
    assert_verified("mask", "bias")
    (bias,) = found("bias")
    assert bias.formula is not None
    assert ("relative bias" if function is with_table else "ALiBi") in bias.formula


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


def test_adds_in_place_to_an_input_once_and_aliases_stay_aliases() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, whole: Tensor, part: Tensor) -> Tensor:
        whole.add_(1)
        return causal(q + part[:, :, :, :8], k, v)

    whole = torch.zeros(2, 4, 6, 16)
    _, out = run(function, *qkv(), whole, whole[..., 4:])
    q, k, v = qkv()
    torch.testing.assert_close(out, causal(q + 1, k, v))
    assert bool((whole == 1).all())
    assert_verified("output")
    (check,) = found("graph outputs")
    assert check.skipped == "inputs that share memory are written to"


def test_random_numbers_are_those_of_a_run_without_it() -> None:
    outs = []
    for verify in (False, True):
        function = compiled(lambda q, k, v: F.dropout(causal(F.dropout(q, 0.5), k, v), 0.5), verify=verify)
        torch.manual_seed(0)
        outs.append((function(*qkv()), torch.rand(1)))
        assert (attn_compiler.verifications() != ()) == verify
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    assert_verified("output")


def test_only_the_first_call_of_each_graph_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = first.run_checks
    monkeypatch.setattr(first, "run_checks", lambda plan, args: runs.append(plan) or real(plan, args))
    function = compiled(causal, dynamic=False, verify=True)
    for _ in range(3):
        function(*qkv())
    assert len(runs) == 1
    function(*qkv(shape=(1, 2, 5, 8)))
    assert len(runs) == 2


def test_threads_that_call_at_once_verify_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(causal, *qkv())
    runs: list[Any] = []
    real = first.run_checks

    def slow(plan: Any, args: Any) -> list[Verification]:
        runs.append(args)
        time.sleep(0.1)
        return real(plan, args)

    monkeypatch.setattr(first, "run_checks", slow)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
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


def _mask_is_ignored(patch: pytest.MonkeyPatch) -> None:
    emit = SdpaCpuFlash.emit

    def without_mask(self: Any, emitter: Any, spec: Any, operands: Any) -> Any:
        return emit(self, emitter, spec, dataclasses.replace(operands, mask=None))

    patch.setattr(SdpaCpuFlash, "emit", without_mask)


def _less_or_equal_is_less(patch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    patch.setitem(reading.READERS, aten.le.Tensor, reading.READERS[aten.lt.Tensor])


def _off_by_a_position(patch: pytest.MonkeyPatch) -> None:
    def off_by_one(part: added.Summand) -> Any:
        kind = real(part)
        return kind and dataclasses.replace(kind, position=ix.add(kind.position, ix.ONE))

    real, *others = score_kinds.RECOGNISERS
    patch.setattr(score_kinds, "RECOGNISERS", (off_by_one, *others))


def _checkpointed_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(window, q, k, v, use_reentrant=False).sin()


OUTPUT = {"what": "output of sdpa_cpu_flash", "formula": "k <= q", "allowed": "an error of"}
MASK = {"what": "recovered mask", "formula": "k + 1 <= q", "index": "b=0, h=0, q=0, k=0", "expected": "allowed"}
MASK |= {"observed": "masked out", "differing": f"{LENGTH} of {LENGTH * LENGTH} pairs"}
BIAS = {"what": "recovered bias", "formula": "· (k + 1 - q)", "index": "b=0, h=0, "}


@pytest.mark.parametrize("dynamic_sizes", [(), (SHAPE[0], LENGTH)], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("function", "fault", "more", "said"),
    [
        (window, _mask_is_ignored, (), OUTPUT),
        (_checkpointed_window, _mask_is_ignored, (), OUTPUT),
        *((x, _less_or_equal_is_less, (), MASK) for x in (causal, checkpointed, mask_from_outside, Layers())),
        *((x, _off_by_a_position, (SLOPES, PADDING), BIAS) for x in (masked_alibi, checkpointed_alibi)),
    ],
)
def test_what_is_wrong_raises_and_is_named(
    monkeypatch: pytest.MonkeyPatch, function: Any, fault: Any, more: Any, said: dict[str, str], dynamic_sizes: Any
) -> None:
    fault(monkeypatch)
    with pytest.raises(VerificationMismatch) as caught:
        run(function, *(mark(x, dynamic_sizes) for x in (*qkv(grad=True), *(x.clone() for x in more))))
    error = caught.value
    for name, text in said.items():
        assert text in getattr(error, name), name
    assert "options={'lowering': 'untouched'}" in str(error)
    if isinstance(function, Layers):
        assert error.site == "layers.0"
        assert any("layers.1" in note for note in error.__notes__)
    if function is window:
        index = tuple(int(i) for i in error.index.strip("[]").split(","))
        wrong, right = F.scaled_dot_product_attention(*qkv()), window(*qkv())
        assert index == tuple(int(i) for i in torch.unravel_index((wrong - right).abs().argmax(), right.shape))
        assert float(error.expected.split()[0]) == pytest.approx(right[index].item(), rel=1e-4)
        assert float(error.observed) == pytest.approx(wrong[index].item(), rel=1e-4)


def test_a_call_that_raised_is_no_first_call_and_leaves_caches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option every call is wrong."""
    _mask_is_ignored(monkeypatch)
    model = Cached()
    function = compiled(model, verify=True)
    for _ in range(2):
        with pytest.raises(VerificationMismatch):
            function(*qkv(shape=(2, 4, 1, 8)), torch.tensor([0]))
        assert not model.keys.any()
    assert not torch.allclose(compiled(window)(*qkv()), window(*qkv()), atol=1e-2)


# ---- what can't be compared ---------------------------------------------------------------------------------------


def _dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


@pytest.mark.parametrize(
    ("function", "more", "options", "subject", "why"),
    [
        (causal, (), {"lowering": "untouched"}, "output", "the site is as the model made it"),
        (with_mask, (torch.ones(LENGTH, LENGTH).tril().bool(),), {}, "mask", "is an input of the graph"),
        (_dropping, (), {"lowerings": ["reference"]}, "output", ""),
    ],
)
def test_what_is_unchecked_is_said(
    caplog: pytest.LogCaptureFixture, function: Any, more: Any, options: Any, subject: str, why: str
) -> None:
    run(function, *qkv(), *more, **options)
    (check,) = found(subject)
    assert check.skipped is not None
    assert why in check.skipped
    assert all(x.skipped is None for x in (*found("mask"), *found("output")) if x.subject != subject)
    said = [r.getMessage() for r in caplog.records if r.name == results.__name__ and r.levelno == logging.WARNING]
    assert any(f"{subject} not verified: " in text and why in text for text in said)


def _filled(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, real: (q @ k.mT).masked_fill(real[:, None, None, :] == 0, fill).softmax(-1) @ v


@pytest.mark.parametrize(("fill", "part"), [(-1e9, 1), (-math.inf, 2)])
def test_rows_without_any_key_are_left_out_where_the_model_gives_no_number(
    monkeypatch: pytest.MonkeyPatch, fill: float, part: int
) -> None:
    """A row that is not the model's is a mismatch elsewhere, and what comes after such rows differs."""
    real = torch.tensor([[1] * LENGTH, [0] * LENGTH])
    run(_filled(fill), *qkv(), real)
    (output,), (after,) = found("output"), found("graph outputs")
    assert output.skipped is None
    assert output.elements == torch.Size(SHAPE).numel() // part
    assert (after.skipped is None) == (part == 1)
    monkeypatch.setattr(keyless_nodes, "completed", lambda emitter, spec, keyless, operands, out: out)
    if part == 1:
        with pytest.raises(VerificationMismatch):
            run(_filled(2 * fill), *qkv(), real)


def _gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax over another axis keeps its name and means something else after the rewriting."""
    gate = (q @ q.mT).softmax(-2) @ v
    return causal(gate, k, v) + gate


def test_attention_inside_one_call_and_softmax_over_another_axis() -> None:
    """nn.MultiheadAttention is expanded: the model's own graph has none of its parts."""
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        run(lambda x: module(x, x, x, need_weights=False)[0], torch.randn(2, LENGTH, 8))
    assert_verified("output")
    run(_gated, *qkv())
    assert all(v.skipped is None for v in attn_compiler.verifications())
