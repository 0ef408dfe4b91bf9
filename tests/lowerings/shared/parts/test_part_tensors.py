"""The operands that a spec's kinds become, against the kinds' own references at every pair."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, Size
from attn_compiler.lowerings.base import Emitter, Operands, SizeOf, Tile, Tiles
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts as parts
from attn_compiler.spec import added_scores, masks, scores
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Alignment, Causal, Dense, MaskKind, MaskSpec
from tests.lowerings import plan_math
from tests.lowerings.bench import Bench
from tests.lowerings.specs import make_spec
from tests.spec.meanings import Inputs, adds, allows

B, H, Q, K = map(Index, "bhqk")
TILE = Tile(queries=64, keys=32, warps=4, stages=1)
TILES = Tiles(forward=TILE, grad_q=TILE, grad_kv=TILE)
BATCH, HEADS = 2, 3

KINDS: dict[str, MaskKind] = {
    "causal": Causal(),
    "bottom right": Causal(alignment=Alignment.BOTTOM_RIGHT),
    "strictly causal": masks.CausalFrom(offset=Const(-1)),
    "cached": masks.CausalFrom(offset=Load("length", (), "int")),
    "cached rows": masks.CausalFrom(offset=ix.add(Load("lengths", (B,), "int"), Const(-3))),
    "window": masks.SlidingWindow(left=5, right=None),
    "both sides": masks.SlidingWindow(left=3, right=4),
    "prefix": masks.Prefix(length=Load("lengths", (B,), "int")),
    "chunks": masks.Chunked(size=7, start=Load("lengths", (B,), "int")),
    "padding": masks.KeyPadding(condition=ix.as_bool(Load("padding", (B, K), "int"))),
    "shared padding": masks.KeyPadding(condition=ix.compare("<", Load("weights", (K,), "float"), Const(0.5))),
    "last": masks.KeyBound(side="last", bound=Load("lengths", (B,), "int")),
    "first": masks.KeyBound(side="first", bound=Const(2)),
    "documents": masks.Document(of_key=Load("ids", (B, K), "int")),
    "wide documents": masks.Document(of_key=Load("wide", (B, K), "int")),
    "halves": masks.Document(of_key=ix.apply("floordiv", Load("ids", (ix.ZERO, K), "int"), Const(2))),
    "positions": masks.Formula(condition=ix.compare("<=", K, Load("positions", (B, Q), "int"))),
    "queries": masks.Formula(condition=ix.as_bool(Load("padding", (B, Q), "int"))),
}
DOCUMENTS = {"documents", "wide documents", "halves"}


def tensors(seqlen_q: int, seqlen_kv: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    longest = max(seqlen_q, seqlen_kv)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    ids = numbers(0, 3, BATCH, longest)
    return {
        "q": torch.empty(BATCH, HEADS, seqlen_q, 8),
        "k": torch.empty(BATCH, 1, seqlen_kv, 8),
        "length": torch.tensor(3),
        "lengths": numbers(-4, seqlen_kv + 4, BATCH),
        "padding": numbers(0, 3, BATCH, longest),
        "weights": torch.rand(longest, generator=generator),
        "ids": ids.int(),
        # The same in their lower 32 bits.
        "wide": ids * 2**32 + 5,
        "positions": numbers(-2, seqlen_kv + 2, BATCH, seqlen_q),
        "slopes": torch.rand(HEADS, generator=generator),
        "table": torch.randn(2 * longest + 13, HEADS, generator=generator),
    }


def spec_of(
    bench: Bench, proved: Sequence[MaskKind] = (), added: Sequence[ProvedScore] = (), **others: Any
) -> AttentionSpec:
    """The spec of a dense mask, which no operand is taken from, for the bench's q and k."""
    (batch, heads, seqlen_q, _), (_, _, seqlen_kv, _) = bench.dims("q"), bench.dims("k")
    dense = Dense(shape=(batch, heads, seqlen_q, seqlen_kv), dtype="float32")
    mask = MaskSpec(kinds=tuple(proved), dense=dense)
    spec = make_spec(
        batch=batch, heads=heads, heads_kv=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, device="cpu", **others
    )
    return dataclasses.replace(spec, score=dataclasses.replace(spec.score, proved=tuple(added)))


def emitted(
    bench: Bench, spec: AttentionSpec, sizes: dict[str, SizeOf] | None = None, **given: fx.Node
) -> list[fx.Node]:
    def emit(emitter: Emitter) -> list[fx.Node]:
        nodes = bench.nodes
        operands = Operands(
            q=nodes["q"], k=nodes["k"], v=nodes["k"], loads=nodes, score_loads=nodes, sizes=sizes or {}, **given
        )
        return part_tensors.emit(emitter, spec, operands, TILES)

    found: list[fx.Node] = bench.call(emit)
    return found


def check_mask(spec: AttentionSpec, made: Sequence[torch.Tensor], have: dict[str, torch.Tensor], **sizes: int) -> None:
    plan = parts.make_plan(spec)
    assert not plan.mask
    assert not plan.bias
    named = dict(zip(plan.operands, made, strict=True))
    seqlen_q, seqlen_kv = have["q"].shape[2], have["k"].shape[2]
    for name in ("rows", "keys", "documents_q", "documents_k"):
        assert name not in named or (named[name].is_contiguous() and named[name].shape[-1] in (seqlen_q, seqlen_kv))
    found = plan_math.allowed(plan, named, seqlen_q, seqlen_kv).expand(BATCH, HEADS, seqlen_q, seqlen_kv)
    inputs = Inputs(
        seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, load=lambda tensor, at: have[tensor][at].item(), sizes=sizes
    )
    for b, q, k in itertools.product(range(BATCH), range(seqlen_q), range(seqlen_kv)):
        expected = all(allows(kind, b, 0, q, k, inputs) for kind in spec.mask.read)
        assert bool(found[b, 0, q, k]) is expected, (b, q, k)


@pytest.mark.parametrize(
    ("rest", "shape"),
    [
        (ix.invert(Load("chosen", (B, Q, K), "bool")), (BATCH, 1, 5, 7)),
        (ix.compare(">", Load("numbers", (H, K, Q), "float"), Const(0.25)), (1, HEADS, 5, 7)),
        (ix.as_bool(Load("square", (Q, ix.apply("floordiv", K, Const(2))), "int")), (1, 1, 5, 7)),
        (ix.apply("or", Load("chosen", (B, Q, K), "bool"), ix.compare("<=", K, Q)), (BATCH, 1, 5, 7)),
    ],
)
def test_a_condition_on_pairs(rest: Expr, shape: tuple[int, ...]) -> None:
    """What a mask says besides its kinds, as large as what it depends on."""
    generator = torch.Generator().manual_seed(4)
    have = tensors(5, 7) | {
        "chosen": torch.rand(BATCH, 5, 7, generator=generator) > 0.5,
        "numbers": torch.rand(HEADS, 7, 5, generator=generator),
        "square": torch.randint(0, 2, (5, 4), generator=generator),
    }
    bench = Bench(**have)
    spec = spec_of(bench, [Causal()])
    mask = dataclasses.replace(spec.mask, reason="not read", rest=masks.Formula(condition=rest))
    spec = dataclasses.replace(spec, mask=mask)
    made = dict(zip(parts.make_plan(spec).operands, bench.run(emitted(bench, spec)), strict=True))["mask"]
    assert (made.dtype, tuple(made.shape)) == (torch.bool, shape)
    inputs = Inputs(seqlen_q=5, seqlen_kv=7, load=lambda tensor, at: have[tensor][at].item())
    expanded = made.expand(BATCH, HEADS, 5, 7)
    for at in itertools.product(*map(range, expanded.shape)):
        assert bool(expanded[at]) is bool(inputs.value(rest, *at)), at


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True).filter(
        lambda names: len(DOCUMENTS & set(names)) < 2
    ),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 2**16),
)
def test_the_operands_are_the_conjunction(names: list[str], seqlen_q: int, seqlen_kv: int, seed: int) -> None:
    have = tensors(seqlen_q, seqlen_kv, seed)
    bench = Bench(**have)
    spec = spec_of(bench, [KINDS[name] for name in names])
    check_mask(spec, bench.run(emitted(bench, spec)), have)


DYNAMIC = {
    "q": (2,),
    "k": (2,),
    "padding": (1,),
    "weights": (0,),
    "ids": (1,),
    "wide": (1,),
    "positions": (1,),
    "table": (0,),
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_one_graph_for_every_length(name: str) -> None:
    bench = Bench(DYNAMIC, **tensors(6, 9))
    spec = spec_of(bench, [KINDS[name]])
    nodes = emitted(bench, spec)
    assert not bench.env.guards
    for sizes in ((1, 1), (4, 11), (11, 4)):
        have = tensors(*sizes, seed=3)
        check_mask(spec, bench.run(nodes, **have), have)


def test_symbolic_sizes_are_read_where_they_are() -> None:
    bench = Bench({"cache": (1,), **DYNAMIC}, cache=torch.empty(2, 5), **tensors(6, 9))
    (_, name) = bench.dims("cache")
    assert isinstance(name, str)
    spec = spec_of(bench, [masks.CausalFrom(offset=Size(name))])
    nodes = emitted(bench, spec, {name: SizeOf(node=bench.nodes["cache"], axis=1)})
    for length in (0, 2, 7):
        have = tensors(4, 11)
        made = bench.run(nodes, cache=torch.empty(2, length), **have)
        check_mask(spec, made, have, **{name: length})


def test_what_sites_share_is_made_once() -> None:
    bench = Bench(**tensors(6, 9))
    spec = spec_of(bench, [KINDS[name] for name in ("padding", "cached rows", "wide documents")])
    first = emitted(bench, spec)
    before = len(bench.graph.nodes)
    assert emitted(bench, spec) == first
    assert len(bench.graph.nodes) == before
    other = dict(bench.nodes)
    bench.nodes["padding"] = bench.nodes["wide"]
    again = dict(zip(parts.make_plan(spec).operands, emitted(bench, spec), strict=True))
    names = dict(zip(parts.make_plan(spec).operands, first, strict=True))
    assert again["rows"] is names["rows"]
    assert again["keys"] is not names["keys"]
    bench.nodes = other


# ---- ready-made masks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(BATCH, 1, 6, 9), (6, 9), (BATCH, 1, 1, 9), (9,), (1, HEADS, 6, 1)])
def test_a_dense_mask_is_used_as_it_is(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    dense = allowed if dtype == torch.bool else torch.where(allowed, 0.0, torch.finfo(dtype).min)
    bench = Bench(mask=dense, **tensors(6, 9))
    spec = spec_of(bench)
    given = Dense(shape=shape, dtype=str(dtype).removeprefix("torch."))
    blocks = masks.AnyOf(alternatives=((Causal(),), (KINDS["documents"],)))
    spec = dataclasses.replace(spec, mask=MaskSpec(kinds=(blocks,), dense=given))
    plan = parts.make_plan(spec)
    made = bench.run(emitted(bench, spec, mask=bench.nodes["mask"]))
    named = dict(zip(plan.operands, made, strict=True))
    assert plan.keys is (shape in ((BATCH, 1, 1, 9), (9,)))
    found = plan_math.allowed(plan, named, 6, 9).expand(BATCH, HEADS, 6, 9)
    assert torch.equal(found, allowed.expand(BATCH, HEADS, 6, 9))


def test_an_unproved_float_mask_is_added() -> None:
    bench = Bench(mask=torch.randn(6, 9), **tensors(6, 9))
    spec = spec_of(bench)
    spec = dataclasses.replace(spec, mask=MaskSpec(dense=Dense(shape=(6, 9), dtype="float32")))
    (bias,) = bench.run(emitted(bench, spec, mask=bench.nodes["mask"]))
    assert torch.equal(bias, bench.tensors["mask"][None, None])


# ---- scores -------------------------------------------------------------------------------------------------------


def _added(
    bench: Bench, spec: AttentionSpec, made: Sequence[torch.Tensor], seqlen_q: int, seqlen_kv: int
) -> torch.Tensor:
    plan = parts.make_plan(spec)
    named = dict(zip(plan.operands, made, strict=True))
    found = plan_math.added(plan, named, seqlen_q, seqlen_kv)
    assert found.dtype == torch.float32
    return found.expand(1, HEADS, seqlen_q, seqlen_kv)[0]


def _scored(spec: AttentionSpec, have: dict[str, torch.Tensor]) -> torch.Tensor:
    seqlen_q, seqlen_kv = have["q"].shape[2], have["k"].shape[2]
    inputs = Inputs(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, load=lambda tensor, at: have[tensor][at].item())
    places = itertools.product(range(HEADS), range(seqlen_q), range(seqlen_kv))
    values = [sum(adds(kind, 0, h, q, k, inputs) for kind in spec.score.proved) for h, q, k in places]
    return torch.tensor(values).view(HEADS, seqlen_q, seqlen_kv)


def t5_row(distance: Expr, buckets: int, furthest: int, *, both_ways: bool) -> Expr:
    """T5's formula of a bucket as recovery reads it."""
    return _t5(distance, buckets, furthest, both_ways, _Expressions)


def t5_bucket(distance: torch.Tensor, buckets: int, furthest: int, *, both_ways: bool) -> torch.Tensor:
    """`T5Attention._relative_position_bucket`."""
    found: torch.Tensor = _t5(distance, buckets, furthest, both_ways, _Tensors)
    return found


class _Expressions:
    log = staticmethod(lambda x: ix.apply("log", x))
    where = staticmethod(ix.where)
    least = staticmethod(lambda x, n: ix.apply("min", x, Const(n)))
    absolute = staticmethod(lambda x: ix.apply("abs", x))
    negative = staticmethod(lambda x: ix.mul(ix.apply("min", x, ix.ZERO), Const(-1)))
    over = staticmethod(lambda x, n: ix.apply("div", ix.as_float(x), Const(float(n))))
    times = staticmethod(lambda x, n: ix.mul(x, Const(float(n))))
    whole = staticmethod(lambda x: ix.apply("int", x))
    plus = staticmethod(lambda x, n: ix.add(x, Const(n)))
    both = staticmethod(ix.add)
    below = staticmethod(lambda x, n: ix.compare("<", x, Const(n)))
    after = staticmethod(lambda x, n: ix.mul(ix.as_int(ix.compare(">", x, ix.ZERO)), Const(n)))


class _Tensors:
    log = staticmethod(torch.log)
    where = staticmethod(torch.where)
    least = staticmethod(lambda x, n: torch.clamp(x, max=n))
    absolute = staticmethod(torch.abs)
    negative = staticmethod(lambda x: -torch.clamp(x, max=0))
    over = staticmethod(lambda x, n: x.float() / n)
    times = staticmethod(torch.mul)
    whole = staticmethod(lambda x: x.long())
    plus = staticmethod(torch.add)
    both = staticmethod(torch.add)
    below = staticmethod(torch.lt)
    after = staticmethod(lambda x, n: (x > 0).long() * n)


def _t5(distance: Any, buckets: int, furthest: int, both_ways: bool, ops: Any) -> Any:
    first = None
    if both_ways:
        buckets //= 2
        first, distance = ops.after(distance, buckets), ops.absolute(distance)
    else:
        distance = ops.negative(distance)
    exact = buckets // 2
    wide = ops.over(ops.log(ops.over(distance, exact)), math.log(furthest / exact))
    wide = ops.plus(ops.whole(ops.times(wide, buckets - exact)), exact)
    row = ops.where(ops.below(distance, exact), distance, ops.least(wide, buckets - 1))
    return row if first is None else ops.both(first, row)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 20), (32, 200)])
def test_t5s_buckets_to_the_last_bit(buckets: int, furthest: int, both_ways: bool) -> None:
    have = {**tensors(400, 300), "table": torch.randn(buckets, HEADS)}
    bench = Bench(**have)
    row = t5_row(ix.add(K, Q, -1), buckets, furthest, both_ways=both_ways)
    kind = added_scores.RelativeBias(table="table", at=(row, H), distance=ix.add(K, Q, -1))
    spec = spec_of(bench, added=[kind], needs_grad=False)
    found = _added(bench, spec, bench.run(emitted(bench, spec)), 400, 300)
    distance = torch.arange(300) - torch.arange(400)[:, None]
    expected = have["table"][t5_bucket(distance, buckets, furthest, both_ways=both_ways)].permute(2, 0, 1)
    assert torch.equal(found, expected)


SCORES: dict[str, list[ProvedScore]] = {
    "bloom": [added_scores.Alibi(slopes=Load("slopes", (H,), "float"), position=K)],
    "mpt": [added_scores.Alibi(slopes=ix.apply("pow", Const(2.0), ix.as_float(ix.mul(H, Const(-1)))), position=ix.add(K, Q, -1))],
    "both ways": [added_scores.Alibi(slopes=Load("slopes", (H,), "float"), position=ix.apply("abs", ix.add(K, Q, -1)))],
    "table": [added_scores.RelativeBias(table="table", at=(ix.add(ix.add(K, Q, -1), Const(12)), H), distance=ix.add(K, Q, -1))],
    "shared table": [
        added_scores.RelativeBias(table="table", at=(ix.apply("abs", ix.add(K, Q, -1)), ix.ZERO), distance=ix.add(K, Q, -1), weight=0.5)
    ],
    "two": [
        added_scores.Alibi(slopes=Load("slopes", (H,), "float"), position=ix.add(K, Q, -1)),
        added_scores.RelativeBias(table="table", at=(ix.add(ix.add(K, Q, -1), Const(12)), H), distance=ix.add(K, Q, -1)),
        added_scores.RelativeBias(table="table", at=(ix.apply("abs", ix.add(K, Q, -1)), ix.ONE), distance=ix.add(K, Q, -1)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SCORES))
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_added(name: str, dynamic: bool) -> None:
    bench = Bench({"q": (2,), "k": (2,)} if dynamic else None, **tensors(6, 9))
    spec = spec_of(bench, added=SCORES[name], needs_grad=False)
    nodes = emitted(bench, spec)
    assert not bench.env.guards
    for sizes in ((6, 9), (1, 5), (8, 3)) if dynamic else ((6, 9),):
        have = {**tensors(*sizes), "table": bench.tensors["table"], "slopes": bench.tensors["slopes"]}
        different = {name: have[name] for name in ("q", "k")}
        found, expected = _added(bench, spec, bench.run(nodes, **different), *sizes), _scored(spec, have)
        # What a row has in common is nothing that a softmax sees.
        apart = (found - expected) - (found - expected)[..., :1]
        assert apart.abs().max() < 1e-5
        if name != "bloom":
            assert torch.allclose(found, expected, atol=1e-5)


def test_a_table_gets_its_gradient() -> None:
    have = tensors(6, 9)
    table = have["table"].requires_grad_()
    bench = Bench(**have)
    kinds = [dataclasses.replace(SCORES["table"][0], requires_grad=True)]
    spec = spec_of(bench, added=kinds)
    bias = scores.DenseBias(shape=(1, HEADS, 6, 9), dtype="float32")
    spec = dataclasses.replace(spec, mask=MaskSpec(), score=dataclasses.replace(spec.score, changes=(bias,)))
    assert parts.make_plan(spec).differentiable == ("distances",)
    weights = torch.randn(HEADS, 6, 9)
    found = _added(bench, spec, bench.run(emitted(bench, spec), table=table), 6, 9)
    (found * weights).sum().backward()
    own = have["table"].detach().requires_grad_()
    distance = torch.arange(9) - torch.arange(6)[:, None] + 12
    (own[distance].permute(2, 0, 1) * weights).sum().backward()
    assert table.grad is not None
    assert own.grad is not None
    assert torch.allclose(table.grad, own.grad, atol=1e-6)


def test_what_wants_no_gradient_carries_none() -> None:
    have = tensors(6, 9)
    bench = Bench(**have)
    for name in ("bloom", "table"):
        (made,) = bench.run(
            emitted(bench, spec_of(bench, added=SCORES[name])),
            table=have["table"].requires_grad_(),
            slopes=have["slopes"].requires_grad_(),
        )
        assert not made.requires_grad


def test_sinks_and_a_seed() -> None:
    bench = Bench(sinks=torch.randn(2 * HEADS)[::2], **tensors(6, 9))
    spec = spec_of(bench, dropout_p=0.2, changes=(scores.Sinks(requires_grad=False),))
    spec = dataclasses.replace(spec, mask=MaskSpec())
    nodes = emitted(bench, spec, sinks=bench.nodes["sinks"])
    sinks, seed = bench.run(nodes)
    assert sinks.is_contiguous()
    assert (seed.dtype, seed.shape) == (torch.int64, (1,))
    torch.manual_seed(7)
    first = bench.run(nodes)[1]
    assert not torch.equal(first, bench.run(nodes)[1])
    torch.manual_seed(7)
    assert torch.equal(first, bench.run(nodes)[1])
