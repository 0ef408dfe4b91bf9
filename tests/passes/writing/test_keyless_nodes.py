"""Queries without keys: outputs and gradients at every position are eager's, whatever made them so. The loss is on those rows, too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler.passes.writing import keyless_nodes
from tests.passes.compiling import compiled

B, S, D = 3, 12, 8
LOWEST = torch.finfo(torch.float32).min

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padding(side: str = "right", empty: bool = True) -> Tensor:
    """(B, S): no padding, some, and nothing else."""
    lengths = torch.tensor([S, 7, 0 if empty else 1])[:, None]
    return (columns() < lengths if side == "right" else columns() >= S - lengths).long()


def rows() -> Tensor:
    return torch.arange(S)[:, None]


def columns() -> Tensor:
    return torch.arange(S)


def causal() -> Tensor:
    return rows() >= columns()


def inputs(heads_kv: int = 4, dtype: torch.dtype = torch.float32, queries: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, 4, queries, D), (B, heads_kv, S, D), (B, heads_kv, S, D))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.3


def weighed(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v.repeat_interleave(s.shape[1] // v.shape[1], 1)


def of_keys(real: Tensor) -> Tensor:
    return real[:, None, None, :].bool()


def of_pairs(real: Tensor) -> Tensor:
    return real[:, None, None, :].bool() & real[:, None, :, None].bool()


# ---- a number in place of the score -------------------------------------------------------------------------------


def empty_prompt(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill(~of_keys(real), LOWEST), v)


def by_another_number(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill(real[:, None, None] == 0, -1e9), v)


def by_where(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(torch.where(of_keys(real), scores(q, k), LOWEST), v)


def of_lengths(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    lengths = real.sum(-1)
    return weighed(scores(q, k).masked_fill(columns() >= lengths[:, None, None, None], LOWEST), v)


def under_a_diagonal(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill(~(of_keys(real) & causal()), LOWEST), v)


def diagonal_then_padding(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~causal(), -1e9)
    return weighed(s.masked_fill(~of_keys(real), -1e9), v)


def in_a_window(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    near = causal() & (rows() - columns() < 3)
    return weighed(scores(q, k).masked_fill(~(of_keys(real) & near), LOWEST), v)


def of_documents(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """Padding is a document that nobody may see."""
    document = real.cumsum(-1) // 3 * real
    same = (document[:, None, :, None] == document[:, None, None, :]) & (document[:, None, None, :] > 0)
    return weighed(scores(q, k).masked_fill(~same, LOWEST), v)


def of_queries_too(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """As DeBERTa-v2 masks."""
    return weighed(scores(q, k).masked_fill(~of_pairs(real), LOWEST), v)


def filled_twice(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(real[:, None, None, :] == 0, LOWEST)
    return weighed(s.masked_fill(real[:, None, :, None] == 0, LOWEST), v)


def strictly_causal(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill(rows() <= columns(), LOWEST), v)


def of_later_keys(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill((rows() >= columns()) | ~of_keys(real), LOWEST), v)


def of_heads(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """Each head sees keys of its own."""
    own = columns() % 4 == torch.arange(4)[:, None, None]
    return weighed(scores(q, k).masked_fill(~(own & of_keys(real)), LOWEST), v)


def of_a_dense_mask(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """Which nothing is known of."""
    unread = torch.sort(of_pairs(real).expand(B, 1, S, S).float(), dim=-1).values > 0.5
    return weighed(scores(q, k).masked_fill(~unread, LOWEST), v)


def capped(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed((torch.tanh(scores(q, k) / 5) * 5).masked_fill(~of_keys(real), LOWEST), v)


def after_a_bias(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    bias = (rows() - columns()).abs() * -0.5
    return weighed((scores(q, k) + bias).masked_fill(~of_pairs(real), -65504.0), v)


# ---- a number that is added ---------------------------------------------------------------------------------------


def added(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k) + torch.where(of_keys(real), 0.0, LOWEST), v)


def added_as_bert_does(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k) + (1 - of_keys(real).to(q.dtype)) * -1e9, v)


def added_under_a_diagonal(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k) + torch.where(of_keys(real) & causal(), 0.0, LOWEST), v)


def added_to_queries_too(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k) + torch.where(of_pairs(real), 0.0, LOWEST), v)


def added_beside_a_bias(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    bias = (rows() - columns()).abs() * -0.5
    return weighed(scores(q, k) + (bias + torch.where(of_keys(real), 0.0, LOWEST)), v)


def given_to_sdpa(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    mask = torch.where(of_pairs(real), 0.0, LOWEST)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


# ---- several numbers ----------------------------------------------------------------------------------------------


def diagonal_of_infinity(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """The mean is of the keys up to the query's own."""
    s = scores(q, k).masked_fill(~of_keys(real), LOWEST)
    return weighed(s.masked_fill(~causal(), -math.inf), v)


def lower_behind_the_diagonal(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~of_keys(real), -1e30)
    return weighed(s.masked_fill(~causal(), LOWEST), v)


REPLACED = [
    *(empty_prompt, by_another_number, by_where, of_lengths, under_a_diagonal, diagonal_then_padding, in_a_window),
    *(of_documents, of_queries_too, filled_twice, strictly_causal, of_later_keys, of_heads, of_a_dense_mask, capped),
    *(after_a_bias, diagonal_of_infinity, lower_behind_the_diagonal),
]
ADDED = [*(added, added_as_bert_does, added_under_a_diagonal, added_to_queries_too, added_beside_a_bias, given_to_sdpa)]


def _results(call: Callable[..., Tensor], real: Tensor, heads_kv: int) -> list[Tensor]:
    """Of SDPA by its math: its kernel for CPUs makes the weights anew from a logsumexp that has no digits beside such numbers."""
    tensors = inputs(heads_kv)
    with sdpa_kernel(SDPBackend.MATH) if isinstance(call, FunctionType) else contextlib.nullcontext():
        out = call(*tensors, real)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in tensors if x.grad is not None)]


@pytest.mark.in_turns
@pytest.mark.parametrize("lowering", ["reference", "math", "sdpa_cpu_flash", "rows"])
@pytest.mark.parametrize("function", [*REPLACED, *ADDED], ids=lambda function: function.__name__)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_row_is_eagers(function: Function, side: str, lowering: str) -> None:
    real = padding(side)
    run = compiled(function, lowering=lowering)
    # Keys and values of several heads are one where the kernel can say so.
    for heads_kv in (2, 4):
        found, expected = (_results(call, real, heads_kv) for call in (run, function))
        assert len(found) == len(expected) == 4
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert all(report.num_sites == 1 for report in run.reports)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("function", [*REPLACED, *ADDED], ids=lambda function: function.__name__)
def test_every_row_is_eagers_behind_a_kernel_of_ours(function: Function) -> None:
    """The kernels give such rows themselves, where they leave pairs out."""
    real = padding("left")
    run = compiled(function, lowering="triton")
    found, expected = (_results(call, real, 2) for call in (run, function))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert keyless_nodes.NOTE in run.site.notes or keyless_nodes.NOTE_NUMBERS in run.site.notes


#: of keys alone, so that one query may ask
OF_KEYS = [empty_prompt, by_another_number, by_where, of_lengths, of_heads, capped, added, added_as_bert_does]
SEVERAL = (diagonal_of_infinity, lower_behind_the_diagonal)


@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize(
    ("function", "queries"),
    # The kernel takes no documents.
    [*((f, S) for f in (*REPLACED, *ADDED) if f not in (*SEVERAL, of_documents)), *((f, 1) for f in OF_KEYS)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@torch.no_grad()
def test_every_row_is_eagers_where_little_of_a_cache_is_read(function: Function, queries: int, heads_kv: int) -> None:
    run = compiled(function, lowering="decode", verify=True)
    tensors, real = inputs(heads_kv, queries=queries), padding("left")
    torch.testing.assert_close(run(*tensors, real), function(*tensors, real), rtol=1e-4, atol=1e-5)
    assert keyless_nodes.NOTE in run.site.notes
    assert run.calls.count("decode") == 1
    assert {"mean", "matmul"} & set(run.calls) == set()


@pytest.mark.parametrize("function", SEVERAL)
@torch.no_grad()
def test_the_report_says_which_rows_over_a_cache_are_not(function: Function) -> None:
    run = compiled(function, lowering="decode")
    run(*inputs(), padding("left"))
    assert keyless_nodes.NOTE_OF_CACHE in run.site.notes


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("function", [*REPLACED, *ADDED], ids=lambda function: function.__name__)
def test_the_report_says_so(function: Function) -> None:
    run = compiled(function, lowerings=["rows", "sdpa_cpu_flash", "math"])
    with torch.no_grad():
        run(*inputs(), padding("left"))
    assert (keyless_nodes.NOTE_NUMBERS if function in SEVERAL else keyless_nodes.NOTE) in run.site.notes


def masked_again(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """As DeBERTa's first softmax: a query without keys has no weights at all."""
    out = ~of_pairs(real)
    return (q @ k.mT).masked_fill(out, LOWEST).softmax(-1).masked_fill(out, 0.0) @ v


def multiplied_again(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    allowed = of_pairs(real)
    return ((q @ k.mT).masked_fill(~allowed, LOWEST).softmax(-1) * allowed) @ v


@pytest.mark.parametrize("lowering", ["reference", "math"])
@pytest.mark.parametrize("function", [masked_again, multiplied_again])
def test_a_row_whose_weights_are_set_to_zero_stays_zero(function: Function, lowering: str) -> None:
    run = compiled(function, lowering=lowering)
    found, expected = (_results(call, padding(), 4) for call in (run, function))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not found[0][1, :, 7:].any()
    assert keyless_nodes.NOTE not in run.site.notes


def test_a_row_that_infinity_shuts_out_stays_zero() -> None:
    """Eager has NaN there."""

    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~of_pairs(real), -math.inf).softmax(-1) @ v

    run = compiled(function, lowering="reference")
    with torch.no_grad():
        out = run(*inputs(), padding())
    assert not out[1, :, 7:].any()
    assert out.isfinite().all()
    assert keyless_nodes.NOTE not in run.site.notes


def _causal_alone(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill(~causal(), LOWEST), v)


def _window_alone(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return weighed(scores(q, k).masked_fill((rows() - columns()).abs() > 2, LOWEST), v)


def _documents_alone(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    same = real[:, None, :, None] == real[:, None, None, :]
    return weighed(scores(q, k).masked_fill(~(same & causal()), LOWEST), v)


def _truth_of_sdpa(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=of_pairs(real))


@pytest.mark.parametrize("function", [_causal_alone, _window_alone, _documents_alone, _truth_of_sdpa])
def test_nothing_is_done_where_each_query_has_keys_or_pytorch_answers(function: Function) -> None:
    run = compiled(function, lowering="reference")
    run(*inputs(), padding())
    assert not {keyless_nodes.NOTE, keyless_nodes.NOTE_NUMBERS} & set(run.site.notes)


@pytest.mark.parametrize(
    "function", [under_a_diagonal, of_queries_too, added_under_a_diagonal], ids=lambda function: function.__name__
)
def test_lengths_may_be_symbolic(function: Function) -> None:
    def cut(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        length = q.shape[2]
        diagonal = torch.arange(length)[:, None] >= torch.arange(length)
        allowed = of_keys(real) & diagonal if function is not of_queries_too else of_pairs(real)
        if function is added_under_a_diagonal:
            return weighed(scores(q, k) + torch.where(allowed, 0.0, LOWEST), v)
        return weighed(scores(q, k).masked_fill(~allowed, LOWEST), v)

    run = compiled(cut, dynamic=True, lowering="rows")
    for length in (S, S - 3):
        tensors = [x[:, :, :length].detach().requires_grad_() for x in inputs()]
        real = padding("left")[:, :length]
        torch.testing.assert_close(run(*tensors, real), cut(*tensors, real), rtol=1e-4, atol=1e-5)


def test_a_score_that_is_not_lost_beside_the_number_is_left_to_what_adds_it() -> None:
    """float64 counts in 1e-7 at -1e9: the row is nearly the softmax over its own scores."""
    run = compiled(added_as_bert_does, lowerings=["rows", "math"])
    tensors = inputs(dtype=torch.float64)
    torch.testing.assert_close(run(*tensors, padding()), added_as_bert_does(*tensors, padding()))
    assert run.site.decision.lowering == "math"
    (refusal,) = run.site.decision.refusals
    assert "without keys" in refusal.reasons[0].rule


def test_numbers_of_a_mask_that_no_kind_reads_are_left_to_the_model() -> None:
    """Of two masks with a number each one is known, and the other one is a tensor of one element."""

    def function(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        near = ((j.int() - i.int() - 1).to(torch.uint8) > 250) | (j == 0)
        s = (q @ k.mT).masked_fill(~near, -65504.0).masked_fill(~allowed, -math.inf)
        return s.softmax(-1) @ v

    run = compiled(function, lowerings=["sdpa_cpu_flash", "reference", "math"], dynamic=True)
    for allowed in (True, False):
        for keys in (3, 7):
            q, k, v = (torch.randn(2, 1, size, 4) for size in (3, keys, keys))
            given = (q, k, v, torch.full((1, 1, 1, 1), allowed))
            torch.testing.assert_close(run(*given).nan_to_num(0.0), function(*given).nan_to_num(0.0))


def replaced_after_it_was_added(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    s = scores(q, k) + torch.where(of_keys(real), 0.0, LOWEST)
    return weighed(torch.where(causal(), s, LOWEST), v)


@pytest.mark.parametrize("lowering", ["reference", "math", "triton"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_keys_whose_score_was_replaced_pass_no_gradient_on_beside_those_whose_was_not(side: str, lowering: str) -> None:
    real, function = padding(side), replaced_after_it_was_added
    run = compiled(function, lowering=lowering)
    found, expected = (_results(call, real, 2) for call in (run, function))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def never(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """The second number is in place of all scores, whatever the key."""
    s = scores(q, k).masked_fill(~of_keys(real), LOWEST)
    return weighed(s.masked_fill((torch.arange(B) >= 0)[:, None, None, None], -1e30), v)


@pytest.mark.parametrize("lowering", ["reference", "math"])
def test_one_of_several_numbers_for_all_keys_is_their_mean(lowering: str) -> None:
    run = compiled(never, lowering=lowering)
    found, expected = (_results(call, padding(), 2) for call in (run, never))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert keyless_nodes.NOTE_NUMBERS in run.site.notes


@pytest.mark.parametrize("lowering", ["reference", "math"])
def test_a_batch_without_any_key_is_eagers(lowering: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT + torch.where(of_keys(real), 0.0, LOWEST)).softmax(-1) @ v

    run = compiled(function, lowering=lowering, dynamic=True)
    for keys in (5, 0):
        tensors = [torch.randn(2, 1, n, D, requires_grad=True) for n in (3, keys, keys)]
        real = torch.zeros(2, keys, dtype=torch.long)
        found, expected = (call(*tensors, real) for call in (run, function))
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(x.cos().sum(), tensors) for x in (found, expected)]
        torch.testing.assert_close(*gradients)
