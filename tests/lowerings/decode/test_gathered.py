"""Decoding over chosen keys: the kernel, in Triton's interpreter, reads these alone, and the numbers are eager's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.decode import gathered
from attn_compiler.spec import added_scores, masks
from attn_compiler.spec.attention import AttentionSpec, SizeRange, StoredSpec
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import Dense, MaskSpec
from tests.interpreted_target import triton_interpreted
from tests.lowerings.specs import make_spec
from tests.passes.compiling import Compiled, compiled, mark

B, Q, H, K = map(Index, "bqhk")
BATCH, HEADS, HEADS_KV, KEYS, COUNT, D = 2, 4, 2, 300, 12, 16
BLOCK, OF_BLOCKS = 4, 3
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with triton_interpreted():
        yield


# ---- when it is taken ---------------------------------------------------------------------------------------------

SCATTERED = ix.invert(Load("scattered", (B, ix.ZERO, K), "bool"))
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("padding", (B, K), "int")))
CHOSEN = Chosen(tensor="top", at=(B, ix.ZERO), count=COUNT, distinct=True, condition=SCATTERED)
DENSE = Dense(shape=(BATCH, 1, 1, KEYS), dtype="bool")


def _spec(chosen: Chosen | None = CHOSEN, **of: Any) -> AttentionSpec:
    kinds = of.pop("kinds", (masks.KeyPadding(condition=SCATTERED), PADDING))
    told = {name: of.pop(name, None) for name in ("reason", "rest")}
    mask = MaskSpec(kinds=kinds, dense=DENSE, chosen=chosen, out_of_reach=of.pop("lost", ()), **told)
    return make_spec(**{"mask": mask, "batch": BATCH, "seqlen_q": 1, "seqlen_kv": KEYS, "needs_grad": False, **of})


def test_chosen_keys_are_gathered_where_they_are_few() -> None:
    assert gathered.chosen_of(_spec()) == CHOSEN
    assert gathered.chosen_of(_spec(None)) is None
    assert gathered.chosen_of(_spec(dataclasses.replace(CHOSEN, count=KEYS // 8))) is not None
    assert gathered.chosen_of(_spec(dataclasses.replace(CHOSEN, count=KEYS // 8 + 1))) is None
    assert gathered.chosen_of(_spec(dataclasses.replace(CHOSEN, count="s0"))) is None


def test_a_cache_of_unknown_length_may_be_long() -> None:
    """A row is then as long as the cache, up to a number that is known."""
    many = dataclasses.replace(CHOSEN, count="Min(2048, s0)")
    assert gathered.chosen_of(_spec(seqlen_kv="s0")) is not None
    assert gathered.chosen_of(_spec(dataclasses.replace(many, most=2048), seqlen_kv="s0")) is not None
    assert gathered.chosen_of(_spec(many, seqlen_kv="s0")) is None
    for most, is_gathered in ((16384, True), (16383, False)):
        spec = _spec(dataclasses.replace(many, most=2048), seqlen_kv="s0")
        spec = dataclasses.replace(spec, ranges=(SizeRange(size="s0", least=2, most=most),))
        assert (gathered.chosen_of(spec) is not None) is is_gathered


BIAS = added_scores.Alibi(slopes=Load("slopes", (H,), "float"), position=K)


@pytest.mark.parametrize(
    "spec",
    [
        _spec(seqlen_q=4),
        _spec(seqlen_q="s0"),
        _spec(reason="x compares numbers that are rounded"),
        _spec(reason="not read", rest=masks.Formula(condition=ix.apply("or", SCATTERED, PADDING.condition))),
        _spec(lost=("top",)),
        _spec(dataclasses.replace(CHOSEN, at=(B, H)), heads=4, heads_kv=2),
        _spec(dataclasses.replace(CHOSEN, at=(B, ix.apply("floordiv", H, Const(3)))), heads=4, heads_kv=2),
        _spec(dataclasses.replace(CHOSEN, block=4)),
        _spec(kinds=(masks.Formula(condition=ix.as_bool(Load("any", (B, H, K), "int"))),)),
        dataclasses.replace(_spec(), score=dataclasses.replace(_spec().score, proved=(BIAS,))),
        dataclasses.replace(_spec(), stored=StoredSpec(k=_spec().k, v=_spec().v)),
    ],
    ids=[
        "four queries",
        "any queries",
        "unread",
        "more than the choice",
        "out of reach",
        "of a head",
        "of three heads",
        "large blocks",
        "more than keys",
        "a bias",
        "FP8",
    ],
)
def test_where_the_cache_is_read_as_it_lies(spec: AttentionSpec) -> None:
    assert gathered.chosen_of(spec) is None


def test_heads_that_share_a_key_share_the_choice() -> None:
    for size in (2, 4):
        of_group = dataclasses.replace(CHOSEN, at=(B, ix.apply("floordiv", H, Const(size))))
        assert gathered.chosen_of(_spec(of_group, heads=4, heads_kv=2)) is not None
    assert gathered.chosen_of(_spec(dataclasses.replace(CHOSEN, at=(B, H)), heads=4, heads_kv=4)) is not None


def test_a_mask_out_of_reach_is_no_matter_if_it_is_the_choice_itself() -> None:
    """What was scattered need not be at hand, if only the tensor of indices is."""
    assert gathered.chosen_of(_spec(lost=("others",))) == CHOSEN


# ---- numbers ------------------------------------------------------------------------------------------------------


def _left_out(chosen: Tensor) -> Tensor:
    return chosen.new_ones((chosen.shape[0], 1, KEYS), dtype=torch.bool).scatter(-1, chosen.long(), False)[:, None]


def _called(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """As DeepSeek V3.2."""
    allowed = padding.bool()[:, None, None] & ~_left_out(scores.topk(COUNT, -1).indices.int())
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _added(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    added = torch.full((q.shape[0], 1, KEYS), -torch.inf, dtype=q.dtype)
    added.scatter_(-1, scores.topk(COUNT, -1).indices, 0.0)
    added = added[:, None].masked_fill(padding[:, None, None] == 0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True)


def _repeated(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """Keys that a row names twice, and three times."""
    top = scores.topk(COUNT, -1).indices // 3
    allowed = padding.bool()[:, None, None] & ~_left_out(top)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _alone(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """Nothing else masks."""
    allowed = ~_left_out(scores.topk(COUNT, -1).indices)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _up_to(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """A static cache, which is filled up to a length that is a tensor; the choice is of what is beyond, too."""
    filled = torch.arange(KEYS)[None, None, None] <= padding.sum(-1)[:, None, None, None] - 1
    allowed = filled & ~_left_out(scores.topk(COUNT, -1).indices)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _eager(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """By hand, with a softcap, one k for v and for all heads, and finite numbers."""
    lowest = torch.finfo(q.dtype).min
    s = torch.tanh(q @ k[:, :1].mT * D**-0.5 / 20.0) * 20.0
    s = s.masked_fill(_left_out(scores.topk(COUNT, -1).indices), lowest).masked_fill(
        padding[:, None, None] == 0, lowest
    )
    return F.softmax(s, -1) @ k[:, :1]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """As MiniMax M3: blocks of keys by group of heads; those that are none fall into a column that is cut off."""
    blocks = -(-KEYS // BLOCK)
    by_group = torch.stack([scores, scores.flip(-1)], 1)
    of_blocks = F.pad(by_group, (0, blocks * BLOCK - KEYS), value=-torch.inf).unflatten(-1, (blocks, BLOCK)).amax(-1)
    of_blocks = of_blocks.masked_fill(torch.arange(blocks) % 5 == 0, -torch.inf)
    best, top = of_blocks.topk(OF_BLOCKS, -1)
    top = top.masked_fill(best < 1.9, blocks)
    kept = torch.full((q.shape[0], HEADS_KV, 1, blocks + 1), -torch.inf, dtype=q.dtype).scatter_(-1, top, 0.0)
    kept = (kept[..., :blocks] == 0.0).repeat_interleave(BLOCK, dim=-1)[..., :KEYS]
    kept = kept.repeat_interleave(HEADS // HEADS_KV, dim=1) & padding.bool()[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True)


def _one_more(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """What is not chosen is written behind the last key."""
    top = scores.topk(COUNT, -1)
    kept = torch.zeros(q.shape[0], 1, KEYS + 1, dtype=torch.bool)
    kept = kept.scatter(-1, top.indices.masked_fill(top.values < 1.8, KEYS), True)[..., :KEYS]
    allowed = kept[:, None] & padding.bool()[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _by_head(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """Heads that share no keys each choose their own."""
    k, v = torch.cat([k, v], 1), torch.cat([v, k], 1)
    by_head = torch.stack([scores.roll(n, -1) for n in range(HEADS)], 1)
    kept = torch.zeros(q.shape[0], HEADS, 1, KEYS, dtype=torch.bool).scatter(-1, by_head.topk(COUNT, -1).indices, True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept & padding.bool()[:, None, None])


FORMS: dict[str, Callable[..., Tensor]] = {
    "in blocks": _in_blocks,
    "one more": _one_more,
    "by head": _by_head,
    "called": _called,
    "added": _added,
    "repeated": _repeated,
    "alone": _alone,
    "up to": _up_to,
    "eager": _eager,
}


def _given(seed: int = 0, batch: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, 1), (HEADS_KV, KEYS), (HEADS_KV, KEYS))
    q, k, v = (torch.randn(batch, *shape, D, generator=generator) for shape in shapes)
    padding = torch.ones(batch, KEYS, dtype=torch.int64)
    padding[-1, KEYS // 2 :] = 0
    return [q, k, v, torch.randn(batch, 1, KEYS, generator=generator), padding]


def _assert_gathered(run: Compiled) -> None:
    """The kernel is given as many keys as were chosen."""
    assert [site.decision.lowering for report in run.reports for site in report.sites] == ["decode"] * len(run.reports)
    notes = [note for report in run.reports for site in report.sites for note in site.notes]
    assert any(note.startswith(f"the {COUNT} keys of ") for note in notes)
    assert all(call not in run.calls for call in ("scaled_dot_product_attention", "softmax"))
    leaf = run.text[run.text.index("decode_default =") :]
    assert f",{COUNT},{D}]" in leaf
    assert f",{KEYS},{D}]" not in leaf


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("form", FORMS)
def test_numbers(form: str) -> None:
    run = compiled(FORMS[form], lowering="decode")
    found, expected = (
        run(*_given(len(form))),
        FORMS[form](*[x.double() if x.is_floating_point() else x for x in _given(len(form))]),
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    _assert_gathered(run)


def test_what_was_not_chosen_is_not_read() -> None:
    """And what was, and does not count, gets into no result."""

    def given() -> list[Tensor]:
        made = _given(7)
        chosen = torch.zeros(BATCH, KEYS, dtype=torch.bool).scatter(-1, made[3][:, 0].topk(COUNT, -1).indices, True)
        used = (chosen & made[4].bool())[:, None, :, None]
        made[1], made[2] = (torch.where(used, x, torch.nan) for x in made[1:3])
        return made

    def cleared(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        return _called(q, k.nan_to_num(0.0), v.nan_to_num(0.0), *others)

    run = compiled(_called, lowering="decode")
    torch.testing.assert_close(run(*given()), cleared(*given()))
    _assert_gathered(run)


def test_a_query_whose_chosen_keys_do_not_count() -> None:
    """PyTorch gives 0 where truth values leave no key."""

    def given() -> list[Tensor]:
        made = _given(8)
        made[4][0] = 0
        return made

    run = compiled(_called, lowering="decode")
    found = run(*given())
    torch.testing.assert_close(found, _called(*given()))
    assert not found[0].any()


def test_a_batch_of_any_size() -> None:
    run = compiled(_called, lowering="decode")
    for batch in (3, 5, 7):
        given = [mark(x, (batch,)) for x in _given(batch, batch)]
        torch.testing.assert_close(run(*given), _called(*_given(batch, batch)))
    assert len(run.reports) == 1
    _assert_gathered(run)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("form", ["called", "in blocks", "one more", "repeated"])
def test_a_cache_that_grows(form: str) -> None:
    """Rows are as long as the cache, until that has more than are chosen."""
    count = {"in blocks": OF_BLOCKS * BLOCK}.get(form, COUNT)

    def function(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
        return _GROWING[form](q, k, v, scores, padding)

    run = compiled(function, lowering="decode")
    for keys in (11, 19, 20, 21, 64, 150):
        q, k, v, scores, padding = _given(keys)
        given = [q, *(mark(x[:, :, :keys].clone(), (keys,)) for x in (k, v))]
        given += [mark(x[..., -keys:].clone(), (keys,)) for x in (scores, padding)]
        wide = [x.double() if x.is_floating_point() else x for x in given]
        torch.testing.assert_close(run(*given).double(), function(*wide), rtol=0, atol=2e-6)
    # Tracing a slice of repeated blocks asks whether it cuts any off, gathered or not.
    assert len(run.reports) == (2 if form == "in blocks" else 1)
    for report in run.reports:
        assert any(note.startswith(f"the {count} keys of ") for site in report.sites for note in site.notes)


def _grows(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor, *, divided: int = 1, more: int = 0
) -> Tensor:
    keys = k.shape[2]
    top = scores.topk(min(COUNT, keys), -1)
    indices = top.indices // divided
    indices = indices.masked_fill(top.values < 0.3, keys) if more else indices
    kept = torch.zeros(q.shape[0], 1, keys + more, dtype=torch.bool).scatter(-1, indices, True)[..., :keys]
    allowed = kept[:, None] & padding.bool()[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _grows_in_blocks(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    keys = k.shape[2]
    blocks = (keys + BLOCK - 1) // BLOCK
    by_group = torch.stack([scores, scores.flip(-1)], 1)[..., :blocks]
    top = by_group.topk(min(OF_BLOCKS, blocks), -1).indices
    kept = torch.zeros(q.shape[0], HEADS_KV, 1, blocks, dtype=torch.bool).scatter(-1, top, True)
    kept = kept.repeat_interleave(BLOCK, dim=-1)[..., :keys].repeat_interleave(HEADS // HEADS_KV, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept & padding.bool()[:, None, None], enable_gqa=True)


_GROWING: dict[str, Callable[..., Tensor]] = {
    "called": _grows,
    "one more": functools.partial(_grows, more=1),
    "repeated": functools.partial(_grows, divided=3),
    "in blocks": _grows_in_blocks,
}


def test_layers_share_the_choice() -> None:
    """Those of one indexer (GLM-5) gather by one tensor of keys."""

    def function(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
        allowed = padding.bool()[:, None, None] & ~_left_out(scores.topk(COUNT, -1).indices)
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return F.scaled_dot_product_attention(first, k + 1, v, attn_mask=allowed, enable_gqa=True)

    run = compiled(function, lowering="decode")
    torch.testing.assert_close(run(*_given(5)), function(*_given(5)))
    assert run.calls.count("decode") == 2
    # The indices, the padding, and k and v of each layer; v is the same.
    assert run.calls.count("index") <= 6


def _few(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """Several tokens at the end of a cache, as checked drafts are."""
    queries = q.shape[2]
    top = scores.topk(COUNT, -1).indices
    left_out = top.new_ones((top.shape[0], queries, KEYS), dtype=torch.bool).scatter(-1, top, False)[:, None]
    causal = torch.arange(KEYS) <= torch.arange(queries)[:, None] + KEYS - queries
    allowed = causal & padding.bool()[:, None, None] & ~left_out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def _few_by_group(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
    """Groups of heads choose their own, by indices that may repeat."""
    queries = q.shape[2]
    top = torch.stack([scores, scores.flip(-1)], 1).topk(COUNT, -1).indices // 2
    kept = torch.zeros(top.shape[0], HEADS_KV, queries, KEYS, dtype=torch.bool).scatter(-1, top, True)
    causal = torch.arange(KEYS) <= torch.arange(queries)[:, None] + KEYS - queries
    allowed = causal & kept.repeat_interleave(HEADS // HEADS_KV, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


@pytest.mark.in_turns
@pytest.mark.parametrize("form", [_few, _few_by_group])
@pytest.mark.parametrize("queries", [2, 3])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_few_queries_read_their_own_keys_each(form: Callable[..., Tensor], queries: int, dynamic: bool) -> None:
    run = compiled(form, lowering="decode")
    for batch in (5, 7) if dynamic else (2,):
        _, k, v, _, padding = _given(queries, batch)
        generator = torch.Generator().manual_seed(queries)
        given = [
            torch.randn(batch, HEADS, queries, D, generator=generator),
            *(k, v),
            torch.randn(batch, queries, KEYS, generator=generator),
            padding,
        ]
        wide = [x.double() if x.is_floating_point() else x for x in given]
        found = run(*([mark(x, (batch,)) for x in given] if dynamic else given))
        torch.testing.assert_close(found.double(), form(*wide), rtol=0, atol=2e-6)
    _assert_gathered(run)
    assert len(run.reports) == 1
    assert run.site.spec.mask.is_partial


class _AtOnce:
    """Calls instead of putting nodes."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def test_what_the_kernel_gives_is_put_back_by_query() -> None:
    out, lse = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3)
    by_row = out.transpose(1, 2).flatten(0, 1).unsqueeze(2), lse.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    read = gathered.OverChosen(spec=_spec(), operands=mock.Mock(), queries=3)
    for given, expected in zip(by_row, (out, lse), strict=True):
        assert torch.equal(read.restored(_AtOnce(), given), expected)  # type: ignore[arg-type]


def test_a_mask_that_says_more_than_was_read_is_read_as_it_lies() -> None:
    """A threshold on rounded numbers of keys is no kind, and the choice is not all that is left."""

    def function(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, padding: Tensor, x: Tensor) -> Tensor:
        allowed = ~_left_out(scores.topk(COUNT, -1).indices) & padding.bool()[:, None, None] & (x * 0.1 > -0.05)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)

    given = [*_given(3), torch.randn(KEYS, generator=torch.Generator().manual_seed(3))]
    run = compiled(function, lowering="decode")
    torch.testing.assert_close(run(*given), function(*given))
    assert run.site.spec.mask.chosen is not None
    assert run.site.spec.mask.reason is not None
    assert not any("keys of" in note for note in run.site.notes)


def test_a_prompt_reads_a_tensor() -> None:
    """More queries have keys of their own each: the rest of their mask is one tensor."""

    def function(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        left_out = chosen.new_ones((BATCH, 6, KEYS), dtype=torch.bool).scatter(-1, chosen, False)[:, None]
        causal = torch.arange(KEYS) <= torch.arange(6)[:, None] + KEYS - 6
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal & ~left_out)

    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(BATCH, HEADS, n, D, generator=generator) for n in (6, KEYS, KEYS))
    chosen = torch.randn(BATCH, 6, KEYS, generator=generator).topk(COUNT, -1).indices
    run = compiled(function, lowering="decode")
    torch.testing.assert_close(run(q, k, v, chosen), function(q, k, v, chosen))
    assert run.site.spec.mask.chosen is not None
    assert run.site.spec.mask.is_partial
    assert not any("keys of" in note for note in run.site.notes)


@pytest.mark.parametrize("queries", [1, 3])
def test_over_a_latent(queries: int) -> None:
    """What k and v are made of is gathered, and neither of them is made."""
    rank, rope_dim, nope, slots = 32, 8, 16, 96 * queries

    def function(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        made = F.linear(latent, weight).unflatten(-1, (HEADS, 2 * nope)).transpose(1, 2)
        k = torch.cat([made[..., :nope], rope[:, None].expand(-1, HEADS, -1, -1)], -1)
        chosen = scores.topk(COUNT, -1).indices
        left_out = chosen.new_ones(scores.shape, dtype=torch.bool).scatter(-1, chosen, False)[:, None]
        filled = torch.arange(slots) < length + torch.arange(queries)[:, None]
        return F.scaled_dot_product_attention(q, k, made[..., nope:], attn_mask=filled & ~left_out)

    generator = torch.Generator().manual_seed(queries)
    given = [
        torch.randn(BATCH, HEADS, queries, nope + rope_dim, generator=generator),
        torch.randn(BATCH, slots, rank, generator=generator),
        torch.randn(BATCH, slots, rope_dim, generator=generator),
        torch.randn(HEADS * 2 * nope, rank, generator=generator) / 6,
        torch.randn(BATCH, queries, slots, generator=generator),
        torch.tensor(60),
    ]
    run = compiled(function, lowering="decode_latent")
    with torch.no_grad():
        torch.testing.assert_close(run(*given), function(*given), rtol=0, atol=1e-5)
    assert any(note.startswith(f"the {COUNT} keys of ") for note in run.site.notes)
    assert "linear" not in run.calls
