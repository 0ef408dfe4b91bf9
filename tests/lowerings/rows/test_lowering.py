"""Rows of one token and in pieces: what the lowering takes and emits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.rows import ops as rows_ops
from attn_compiler.lowerings.rows.takes import TAKES
from attn_compiler.lowerings.shared.limits.takes import refused
from attn_compiler.lowerings.shared.parts.site_parts import ADDED
from attn_compiler.spec.masks import Dense, Document, KeyPadding, MaskSpec
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.rows.test_pieces import Built, built
from tests.lowerings.specs import CAUSAL, bias, make_spec, words

HEADS, SEQLEN, HEAD_DIM = 4, 70, 8
LENGTHS = (SEQLEN, 20, 41)

Attention = Callable[..., torch.Tensor]


def padding(*, gaps: bool = False) -> torch.Tensor:
    """bool (B, S): right, left and no padding; with gaps a key in the middle of a row is out, too."""
    at = torch.arange(SEQLEN)
    mask = torch.stack((at < 20, at >= 30, at >= 0))
    if gaps:
        mask[2, 5] = mask[0, 3] = False
    return mask


def documents(*, sorted_: bool) -> torch.Tensor:
    found = torch.randint(0, 4, (3, SEQLEN), generator=torch.Generator().manual_seed(1))
    return found.sort(1).values if sorted_ else found


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], enable_gqa=True)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    at = torch.arange(q.shape[2])
    allowed = (at[:, None] >= at[None, :])[None, None] & mask[:, None, None, :]
    # A query without keys is padding, and counts for nothing.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True) * mask[:, None, :, None]


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    at = torch.arange(q.shape[2])
    allowed = ((at[:, None] - at[None, :]).abs() <= 9)[None, None] & mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True) * mask[:, None, :, None]


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    same = of[:, None, :, None] == of[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same, enable_gqa=True)


def packed_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    at = torch.arange(q.shape[2])
    same = (of[:, None, :, None] == of[:, None, None, :]) & (at[:, None] >= at[None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same, enable_gqa=True)


def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    at = torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(at[None, :] <= position[:, None])[None, None])


def _by_distance(q: torch.Tensor, allowed: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    # SDPA adds in float32, which has digits for a score beside float16's lowest number: rows without keys are no mean then.
    lowest = -torch.inf if q.dtype == torch.float16 else torch.finfo(q.dtype).min
    return torch.where(allowed, added.to(q.dtype), lowest)


def _ahead(length: int) -> torch.Tensor:
    at = torch.arange(length)
    return at[None, :] - at[:, None]


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    added = table[_ahead(q.shape[2]).clamp(-9, 9) + 9].permute(2, 0, 1)[None]
    mask = _by_distance(q, mask[:, None, None, :], added)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def biased_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    ahead = _ahead(q.shape[2])
    added = table[ahead.clamp(-9, 9) + 9].permute(2, 0, 1)[None]
    allowed = (ahead <= 0)[None, None] & mask[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=_by_distance(q, allowed, added), enable_gqa=True)
    # A query without keys is padding, and counts for nothing.
    return out * mask[:, None, :, None]


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    ahead = _ahead(q.shape[2])
    allowed = (ahead <= 0)[None, None] & mask[:, None, None, :]
    joined = _by_distance(q, allowed, (slopes[:, None, None] * ahead)[None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=joined, enable_gqa=True) * mask[:, None, :, None]


def biased_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    added = table[_ahead(q.shape[2]).clamp(-9, 9) + 9].permute(2, 0, 1)[None]
    same = of[:, None, :, None] == of[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_by_distance(q, same, added), enable_gqa=True)


def compare(
    attention: Attention, *further: torch.Tensor, heads_kv: int = HEADS, queries: int = SEQLEN, **cast: Any
) -> None:
    """Outputs and gradients are those of eager."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, HEADS, queries, HEAD_DIM), *((3, heads_kv, SEQLEN, HEAD_DIM),) * 2)
    inputs = [torch.randn(shape, generator=generator).to(**cast).requires_grad_() for shape in shapes]
    expected = attention(*inputs, *further)
    noise = torch.randn(expected.shape, generator=generator).to(expected.dtype)
    of_eager = torch.autograd.grad(expected, inputs, noise)
    options = {"lowering": "rows", "inner": "aot_eager", "strict": True}
    found = torch.compile(attention, backend="attn_compiler", options=options)(*inputs, *further)
    (site,) = attn_compiler.reports()[-1].sites
    assert site.decision.lowering == "rows", site.decision.refusals
    close: dict[str, Any] = (
        {"atol": 2e-6, "rtol": 1e-5} if expected.dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    )
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, noise), of_eager, **close)


@pytest.mark.in_turns
@pytest.mark.parametrize("attention", [padded, causal, window])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("heads_kv", [HEADS, 2])
def test_padding_with_and_without_gaps(attention: Attention, gaps: bool, heads_kv: int) -> None:
    compare(attention, padding(gaps=gaps), heads_kv=heads_kv)


@pytest.mark.in_turns
@pytest.mark.parametrize("attention", [packed, packed_causal])
@pytest.mark.parametrize("sorted_", [True, False])
def test_documents_in_one_piece_and_in_several(attention: Attention, sorted_: bool) -> None:
    compare(attention, documents(sorted_=sorted_))


@pytest.mark.in_turns
@pytest.mark.parametrize("attention", [biased, biased_causal, alibi])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("heads_kv", [HEADS, 2])
def test_what_is_added_by_distance(attention: Attention, gaps: bool, heads_kv: int) -> None:
    added = torch.linspace(0.1, 0.9, HEADS) if attention is alibi else torch.randn(19, HEADS)
    compare(attention, padding(gaps=gaps), added, heads_kv=heads_kv)


@pytest.mark.parametrize("sorted_", [True, False])
def test_what_is_added_by_distance_within_documents(sorted_: bool) -> None:
    compare(biased_documents, documents(sorted_=sorted_), torch.randn(19, HEADS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_added_in_half_precision(dtype: torch.dtype) -> None:
    compare(biased, padding(), torch.randn(19, HEADS, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "learned", "said"), [(torch.float64, False, "float32"), (torch.float32, True, "gradient")]
)
def test_what_is_added_and_refused(dtype: torch.dtype, learned: bool, said: str) -> None:
    table = torch.randn(19, HEADS, dtype=dtype, requires_grad=learned)
    inputs = [torch.randn(3, HEADS, SEQLEN, HEAD_DIM, dtype=dtype) for _ in range(3)]
    function = torch.compile(biased, backend="attn_compiler", options={"inner": "aot_eager", "strict": True})
    function(*inputs, padding(), table)
    spec = attn_compiler.reports()[-1].sites[0].spec
    assert said in str([reason.rule for reason in by_name("rows").why_not(spec, Target.current("cpu"))])


@pytest.mark.parametrize("queries", [1, 5])
def test_the_filled_part_of_a_cache(queries: int) -> None:
    compare(cached, torch.arange(30, 30 + queries), queries=queries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare(causal, padding(), dtype=dtype)


def test_a_row_without_keys_is_zero_and_has_no_gradient() -> None:
    mask = padding()
    mask[1] = False
    torch._dynamo.reset()
    inputs = [torch.randn(3, HEADS, SEQLEN, HEAD_DIM, requires_grad=True) for _ in range(3)]
    options = {"lowering": "rows", "inner": "aot_eager", "strict": True}
    out = torch.compile(padded, backend="attn_compiler", options=options)(*inputs, mask)
    assert out[1].abs().max() == 0
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(x[1].abs().max() == 0 and x.isfinite().all() for x in gradients)


def test_what_is_refused() -> None:
    rows, cpu = by_name("rows"), Target.current("cpu")
    plain = make_spec(device="cpu")
    assert [reason.rule for reason in rows.why_not(plain, cpu)] == ["some keys are left out"]
    dropping = dataclasses.replace(plain, score=dataclasses.replace(plain.score, dropout_p=0.1))
    assert "no dropout" in [reason.rule for reason in rows.why_not(dropping, cpu)]
    assert [reason.rule for reason in rows.why_not(plain, Target.fake())] == ["runs on the CPU"]


# The leaf op of attention by rows.
def test_no_operand_gets_a_gradient() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert rows_ops._differentiable([mask, mask], "text") == [False, False]


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool) -> None:
    given: Built = built(causal=causal)
    q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    torch.library.opcheck(torch.ops.attn_compiler.rows.default, (q, k, v, [given.keys], given.text))


def test_opcheck_of_the_backward() -> None:
    given = built(causal=True)
    out, lse = torch.ops.attn_compiler.rows(given.q, given.k, given.v, [given.keys], given.text)
    tensors = (torch.ones_like(out), torch.zeros_like(lse), given.q, given.k, given.v)
    arguments = (*tensors, [given.keys], out, lse, given.text)
    torch.library.opcheck(torch.ops.attn_compiler.rows_backward.default, arguments)


def test_it_is_a_cpus_alone() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("attn_compiler::rows", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("attn_compiler::rows", "CUDA")


# What attention by rows takes.
PADDED = KeyPadding(condition=ix.as_bool(Load("mask", (Index("b"), Index("k")), "int")))
#: the model's own
TENSOR = Dense(shape=(2, 1, 128, 128), dtype="bool")
PACKED = Document(of_key=Load("ids", (Index("b"), Index("k")), "int"))


@pytest.mark.parametrize(
    "spec",
    [
        {"mask": CAUSAL},
        {"mask": MaskSpec(kinds=(PADDED,), dense=TENSOR)},
        {"mask": MaskSpec(kinds=(PACKED,), dense=TENSOR)},
        {"dtype": "float64"},
        {"head_dim": 7},
        {"heads_kv": 2},
        {"batch": 70_000},
        {"seqlen_q": "s0", "seqlen_kv": "s0"},
    ],
    ids=str,
)
def test_it_takes_any_sizes_and_masks_that_leave_pieces(spec: dict[str, Any]) -> None:
    asked = make_spec(device="cpu", **spec)
    assert refused(TAKES, asked) == []
    assert TAKES.beyond(asked) == set()


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ({"changes": (Softcap(cap=30.0),)}, "no softcap"),
        ({"changes": (Sinks(requires_grad=False),)}, "no attention sinks"),
        ({"head_dim_v": 32}, "q, k and v have one head_dim"),
        ({"dropout_p": 0.1}, "no dropout"),
        ({"dtype": "float8_e4m3fn"}, "observed float8_e4m3fn"),
    ],
)
def test_what_it_has_no_argument_for_is_refused(spec: dict[str, Any], rule: str) -> None:
    assert rule in words(refused(TAKES, make_spec(device="cpu", **spec)))


def test_of_what_is_added_to_scores_it_takes_numbers_by_distance() -> None:
    assert TAKES.parts & ADDED == {"distances", "slopes"}
    assert TAKES.beyond(make_spec(device="cpu", changes=(bias(1, 8, 128, 128),))) == {"bias"}


def test_queries_without_keys_beside_large_scores_change_no_gradient() -> None:
    """Found by the fuzzer: exponentials of scores above 88 were infinite for them, times gradients of 0."""

    def near(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[2])
        allowed = ((at[:, None] - at[None, :]).abs() <= 1)[None, None] & mask[:, None, None, :]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=allowed)

    mask = torch.arange(11).expand(2, 11) < torch.tensor([[11], [4]])
    x = (torch.randn(2, 2, 11, 8, generator=torch.Generator().manual_seed(0)) * 12).requires_grad_()
    compiled = torch.compile(near, backend="attn_compiler", options={"lowering": "rows", "inner": "eager"})
    (mine,), (right,) = (torch.autograd.grad(f(x, mask).sum(), x) for f in (compiled, near))
    torch.testing.assert_close(mine, right)
    assert attn_compiler.reports()[-1].sites[0].decision.lowering == "rows"
