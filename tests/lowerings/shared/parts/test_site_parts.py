"""What a spec's kinds become: bands, intervals of keys, flags, tensors."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Linear, Load, Size, Test
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.intervals import Interval
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Plan
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec import added_scores, masks, scores
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q, Alignment, Causal, Dense, Flag, MaskKind, MaskSpec
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec

B, H, Q, K = map(Index, "bhqk")
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("attention_mask", (B, K), "int")))
DOCUMENT = masks.Document(of_key=Load("ids", (B, K), "int"))
OTHER_DOCUMENT = masks.Document(of_key=Load("others", (B, K), "int"))
LENGTH = Load("length", (), "int")
BOTTOM_RIGHT = Causal(alignment=Alignment.BOTTOM_RIGHT)
BLOCKS = masks.AnyOf(alternatives=((Causal(),), (DOCUMENT,)))
DENSE = Dense(shape=(2, 1, 128, 192), dtype="bool")
ADDED = Dense(shape=(2, 1, 128, 192), dtype="bfloat16")

TABLE = added_scores.RelativeBias(
    table="table", at=(ix.add(ix.add(K, Q, -1), Const(127)), H), distance=ix.add(K, Q, -1)
)
LEARNED = dataclasses.replace(TABLE, requires_grad=True)
SLOPES = Load("slopes", (H,), "float")
BLOOM = added_scores.Alibi(slopes=SLOPES, position=K)


def spec_of(
    *proved: MaskKind,
    dense: Dense | None = DENSE,
    flag: Flag | None = None,
    added: tuple[ProvedScore, ...] = (),
    changes: tuple[scores.ScoreChange, ...] = (),
    reason: str | None = None,
    lost: tuple[str, ...] = (),
    rest: masks.Formula | None = None,
    seqlen_q: Dim = 128,
    seqlen_kv: Dim = 192,
    needs_grad: bool = True,
) -> AttentionSpec:
    """A mask (or, among the changes, a bias) that was proved to be this; lost: names that are out of reach."""
    mask = MaskSpec(kinds=proved, flag=flag, dense=dense, reason=reason, out_of_reach=lost, rest=rest)
    spec = make_spec(mask=mask, changes=changes, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, needs_grad=needs_grad)
    return dataclasses.replace(spec, score=dataclasses.replace(spec.score, proved=added, out_of_reach=lost))


def test_the_parts_of_a_spec_are_made_once() -> None:
    """Whoever asks, of equal specs too, gets the very same."""
    site_parts.parts.cache_clear()
    own, equal = (spec_of(Causal(), PADDING) for _ in "ab")
    for options in (Options(), Options(lowerings=("cudnn", "triton", "decode", "math"))):
        select.decide(own, Target.fake(cudnn_frontend="1.23.0"), options)
        select.decide(equal, Target.fake(cudnn_frontend="1.23.0"), options)
    assert site_parts.parts.cache_info().misses == 1
    assert site_parts.parts(own) is site_parts.parts(equal)


@pytest.mark.parametrize(
    ("proved", "dense", "kinds"),
    [
        ([], None, set()),
        ([Causal()], DENSE, {"band"}),
        ([masks.KeyBound(side="last", bound=LENGTH)], DENSE, {"lengths"}),
        ([masks.KeyBound(side="first", bound=LENGTH)], DENSE, {"rows"}),
        ([masks.Chunked(size=8)], DENSE, {"rows"}),
        ([Causal(), PADDING, DOCUMENT], DENSE, {"band", "keys", "documents"}),
        ([], Dense(shape=(2, 1, 1, 192), dtype="bool"), {"keys"}),
        ([], DENSE, {"mask"}),
        ([], ADDED, {"bias"}),
    ],
)
def test_kinds_of_parts(proved: list[MaskKind], dense: Dense | None, kinds: set[str]) -> None:
    assert parts(*proved, dense=dense).kinds == kinds


@pytest.mark.parametrize(("kind", "found"), [(TABLE, "distances"), (BLOOM, "slopes")])
def test_kinds_of_parts_that_are_added(kind: ProvedScore, found: str) -> None:
    assert parts(dense=ADDED, added=(kind,)).kinds == {found}
    assert {found} <= site_parts.ADDED
    assert not site_parts.ADDED & site_parts.MASKING


def parts(*proved: MaskKind, **of: object) -> Parts:
    return site_parts.parts(spec_of(*proved, **of))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("proved", "expected"),
    [
        ([Causal()], Parts(band=Band(right=0))),
        ([BOTTOM_RIGHT], Parts(band=Band(right=0, from_end=True))),
        ([masks.CausalFrom(offset=Const(-1))], Parts(band=Band(right=-1))),
        ([masks.SlidingWindow(left=7, right=None), Causal()], Parts(band=Band(left=7, right=0))),
        ([masks.SlidingWindow(left=7, right=9), masks.CausalFrom(offset=Const(3))], Parts(band=Band(left=7, right=3))),
        ([masks.CausalFrom(offset=LENGTH)], Parts(rows=Interval(upper=ix.add(ix.add(Q, LENGTH), ix.ONE)))),
        ([masks.KeyBound(side="first", bound=LENGTH)], Parts(rows=Interval(lower=LENGTH))),
        ([masks.KeyBound(side="last", bound=LENGTH)], Parts(rows=Interval(upper=ix.add(LENGTH, ix.ONE)))),
        ([masks.Prefix(length=LENGTH)], Parts(rows=Interval(upper=ix.apply("max", ix.add(Q, ix.ONE), LENGTH)))),
        ([PADDING], Parts(keys=PADDING.condition)),
        ([PADDING, DOCUMENT, Causal()], Parts(band=Band(right=0), keys=PADDING.condition, documents=DOCUMENT.of_key)),
        ([DOCUMENT, DOCUMENT], Parts(documents=DOCUMENT.of_key)),
        ([DOCUMENT, OTHER_DOCUMENT], Parts(documents=DOCUMENT.of_key, mask=True)),
        ([masks.Document(of_key=Load("ids", (K,), "float"))], Parts(mask=True)),
        ([BLOCKS], Parts(mask=True)),
        ([Causal(), BLOCKS], Parts(band=Band(right=0), mask=True)),
        ([Causal(), PADDING, DOCUMENT, BLOCKS], Parts(band=Band(right=0), documents=DOCUMENT.of_key, mask=True)),
        ([masks.Formula(condition=ix.as_bool(Load("any", (B, Q, K), "int")))], Parts(mask=True)),
        (
            [masks.Formula(condition=ix.compare("<=", K, Load("position", (Q,), "int")))],
            Parts(rows=Interval(upper=ix.add(Load("position", (Q,), "int"), ix.ONE))),
        ),
        (
            [masks.Formula(condition=ix.as_bool(Load("used", (B, Q), "int")))],
            Parts(rows=Interval(upper=ix.where(ix.as_bool(Load("used", (B, Q), "int")), SEQLEN_KV, ix.ZERO))),
        ),
        ([masks.Formula(condition=ix.compare("!=", K, Const(3)))], Parts(keys=ix.compare("!=", K, Const(3)))),
        (
            [masks.Formula(condition=ix.compare("<=", ix.mul(K, Const(2)), Q))],
            Parts(rows=Interval(upper=ix.add(ix.apply("floordiv", Q, Const(2)), ix.ONE))),
        ),
        ([masks.Formula(condition=ix.compare("<=", ix.apply("mul", K, Q), Q))], Parts(mask=True)),
        ([masks.Formula(condition=ix.compare("<=", K, ix.add(Q, H)))], Parts(mask=True)),
    ],
)
def test_where_a_kind_goes(proved: list[MaskKind], expected: Parts) -> None:
    assert parts(*proved) == expected


def test_a_kind_that_parts_do_not_name_is_keys_if_it_is_of_keys_alone() -> None:
    @dataclasses.dataclass(frozen=True)
    class Strided:
        condition = ix.compare("==", ix.apply("mod", K, Const(4)), ix.ZERO)

    assert parts(Strided()) == Parts(keys=Strided.condition)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (PADDING, "attention_mask"),
        (DOCUMENT, "ids"),
        (masks.CausalFrom(offset=ix.add(LENGTH, Size("s7"))), "s7"),
        (masks.CausalFrom(offset=ix.add(LENGTH, Size("s7"))), "length"),
    ],
)
def test_what_is_out_of_reach_stays_in_the_tensor(kind: MaskKind, name: str) -> None:
    assert parts(Causal(), kind, lost=(name,)) == Parts(band=Band(right=0), mask=True)
    assert not parts(Causal(), kind, lost=("others",)).mask


def test_a_mask_beside_the_causal_flag() -> None:
    assert parts(Causal(), PADDING, flag=Flag.CALLED) == Parts(band=Band(right=0), keys=PADDING.condition)
    assert parts(Causal(), BLOCKS, flag=Flag.CALLED) == Parts(band=Band(right=0), mask=True)
    assert parts(Causal(), dense=None, flag=Flag.READ) == Parts(band=Band(right=0))
    assert parts(dense=None) == Parts()


@pytest.mark.parametrize(
    ("dense", "expected"),
    [
        (DENSE, Parts(mask=True)),
        (Dense(shape=(128, 192), dtype="bool"), Parts(mask=True)),
        (Dense(shape=(2, 1, 1, 192), dtype="bool"), Parts(keys_given=True)),
        (Dense(shape=(192,), dtype="bool"), Parts(keys_given=True)),
        (Dense(shape=(2, 1, 1, 1), dtype="bool"), Parts(mask=True)),
        (Dense(shape=(2, 8, 1, 192), dtype="bool"), Parts(mask=True)),
        (ADDED, Parts(bias=True)),
        (Dense(shape=(2, 1, 1, 192), dtype="float32"), Parts(bias=True)),
    ],
)
@pytest.mark.parametrize("reason", [None, "attention_mask is an input of the graph"])
def test_an_unproved_tensor_is_used_as_it_is(dense: Dense, expected: Parts, reason: str | None) -> None:
    assert parts(dense=dense, reason=reason) == expected


def test_a_float_mask_that_was_proved_is_no_bias() -> None:
    assert parts(PADDING, dense=ADDED) == Parts(keys=PADDING.condition)
    assert parts(BLOCKS, dense=ADDED) == Parts(mask=True)
    assert parts(BLOCKS, dense=dataclasses.replace(ADDED, shape=(2, 1, 1, 192))) == Parts(keys_given=True)


# ---- masks that were read in part ---------------------------------------------------------------------------------

UNREAD = "scatter was made by scatter in a way that can not be read"
REST = masks.Formula(condition=ix.invert(Load("scatter", (B, Q, K), "bool")))
READ = Parts(band=Band(right=0), keys=PADDING.condition)


@pytest.mark.parametrize("dense", [DENSE, ADDED])
def test_the_rest_of_a_mask_is_a_tensor_of_its_own(dense: Dense) -> None:
    found = parts(Causal(), PADDING, dense=dense, reason=UNREAD, rest=REST)
    assert found == dataclasses.replace(READ, mask=True, rest=REST.condition)
    assert found.kinds == {"band", "keys", "mask"}
    plan = site_parts.make_plan(spec_of(Causal(), PADDING, dense=dense, reason=UNREAD, rest=REST))
    assert (plan.band, plan.keys, plan.mask, plan.bias) == (Band(right=0), True, True, False)


@pytest.mark.parametrize("dense", [DENSE, ADDED])
@pytest.mark.parametrize(
    ("kinds", "rest", "lost"),
    [
        ((Causal(), PADDING), None, ()),
        ((Causal(), PADDING), REST, ("scatter",)),
        ((Causal(), PADDING), REST, ("attention_mask",)),
        ((Causal(), BLOCKS), REST, ()),
    ],
)
def test_a_tensor_that_says_all_is_read_within_the_band(
    dense: Dense, kinds: tuple[MaskKind, ...], rest: masks.Formula | None, lost: tuple[str, ...]
) -> None:
    """Where the rest is not at hand, or a kind is no part: no kind may be lost."""
    found = parts(*kinds, dense=dense, reason=UNREAD, rest=rest, lost=lost)
    assert found == Parts(band=Band(right=0), mask=True)


def test_numbers_that_are_added_beside_a_mask_that_was_read_in_part() -> None:
    bias = added_scores.Bias(tensor="x", at=(B, Q, K), shape=(2, 1, 128, 192))
    assert parts(Causal(), PADDING, dense=ADDED, reason=UNREAD, added=(bias,)) == dataclasses.replace(READ, bias=True)
    learned = parts(Causal(), PADDING, dense=None, changes=BIAS, reason=UNREAD)
    assert learned == dataclasses.replace(READ, bias=True, bias_grad=True)


# ---- scores -------------------------------------------------------------------------------------------------------

BIAS_OF_KEYS = added_scores.Bias(tensor="mask", at=(B, K), shape=(2, 1, 1, 192), weight=10000.0)
BIAS = (scores.DenseBias(shape=(1, 8, 128, 192), dtype="bfloat16"),)


def test_a_table_of_distances() -> None:
    assert parts(PADDING, dense=ADDED, added=(TABLE,)) == Parts(keys=PADDING.condition, distances=(TABLE,))
    learned = parts(PADDING, dense=None, changes=BIAS, added=(LEARNED,))
    assert learned == Parts(keys=PADDING.condition, distances=(LEARNED,), distances_grad=True)


def test_slopes_of_keys() -> None:
    expected = ix.mul(ix.as_float(SLOPES), Const(1.0))
    assert parts(Causal(), dense=ADDED, added=(BLOOM,)) == Parts(band=Band(right=0), slopes=expected)
    last = dataclasses.replace(BLOOM, position=ix.add(K, Const(-35)))
    assert parts(dense=ADDED, added=(last,)).slopes == expected
    back = dataclasses.replace(BLOOM, position=ix.mul(ix.add(Q, K, -1), Const(2)))
    assert parts(dense=ADDED, added=(back,)).slopes == ix.mul(ix.as_float(SLOPES), Const(-2.0))


def test_slopes_of_both_sides_are_distances() -> None:
    both_ways = dataclasses.replace(BLOOM, position=ix.mul(ix.apply("abs", ix.add(K, Q, -1)), Const(-1)))
    assert parts(dense=ADDED, added=(both_ways,)) == Parts(distances=(both_ways,))
    assert parts(dense=ADDED, added=(both_ways, TABLE)).distances == (both_ways, TABLE)
    assert parts(dense=ADDED, added=(BLOOM, TABLE)).distances == (TABLE,)


def test_a_sink_sees_what_a_row_has_in_common() -> None:
    sinks = (scores.Sinks(requires_grad=False),)
    assert parts(dense=ADDED, added=(BLOOM,), changes=sinks) == Parts(bias=True)
    exact = dataclasses.replace(BLOOM, position=ix.add(K, Q, -1))
    assert parts(dense=ADDED, added=(exact,), changes=sinks).slopes is not None


@pytest.mark.parametrize(
    "added",
    [
        dataclasses.replace(BLOOM, position=Load("position", (B, K), "int")),
        added_scores.Alibi(slopes=SLOPES, position=ix.add(K, Load("shift", (K,), "int"))),
        added_scores.GatheredBias(table="table", at=(Load("index", (Q, K), "int"), H)),
        added_scores.RegionPenalty(value=-100.0, of_key=Load("regions", (B, K), "int")),
        added_scores.Bias(tensor="bias", at=(H, Q, K), shape=(1, 8, 128, 192)),
    ],
)
def test_what_is_no_function_of_the_distance_stays_a_tensor(added: ProvedScore) -> None:
    assert parts(Causal(), dense=ADDED, added=(added,)) == Parts(band=Band(right=0), bias=True)
    assert parts(Causal(), dense=ADDED, added=(TABLE, added)) == Parts(band=Band(right=0), bias=True)


def test_learned_slopes_keep_their_gradient() -> None:
    learned = dataclasses.replace(BLOOM, requires_grad=True)
    found = parts(dense=None, added=(learned,), changes=BIAS)
    assert found == Parts(bias=True, bias_grad=True)
    exact = dataclasses.replace(learned, position=ix.add(K, Q, -1))
    assert parts(dense=None, added=(exact,), changes=BIAS) == Parts(distances=(exact,), distances_grad=True)


@pytest.mark.parametrize(("queries", "keys"), [(1, True), (128, False)])
def test_numbers_of_keys_of_which_the_highest_count(queries: int, keys: bool) -> None:
    spec = spec_of(dense=dataclasses.replace(ADDED, shape=(2, 1, queries, 192)), added=(BIAS_OF_KEYS,))
    spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, by_highest=True))
    assert site_parts.parts(spec) == (Parts(keys_given=True) if keys else Parts(bias=True))


def test_a_gradient_that_no_kind_has_stays_with_the_tensor() -> None:
    assert parts(Causal(), dense=None, added=(TABLE,), changes=BIAS) == Parts(
        band=Band(right=0), bias=True, bias_grad=True
    )
    assert parts(dense=None, changes=BIAS, needs_grad=False) == Parts(bias=True)


def test_a_table_out_of_reach_stays_a_tensor() -> None:
    assert parts(Causal(), dense=ADDED, added=(TABLE,), lost=("table",)) == Parts(band=Band(right=0), bias=True)
    assert parts(dense=ADDED, added=(BLOOM,), lost=("slopes",)) == Parts(bias=True)


def test_a_mask_that_is_no_part_stays_in_the_bias() -> None:
    assert parts(Causal(), BLOCKS, dense=ADDED, added=(TABLE,)) == Parts(band=Band(right=0), bias=True)


def test_the_plan_says_which_parts_there_are() -> None:
    sinks = scores.Sinks(requires_grad=True)
    spec = spec_of(PADDING, DOCUMENT, Causal(), dense=None, added=(LEARNED,), changes=(*BIAS, sinks))
    assert site_parts.make_plan(spec) == Plan(
        band=Band(right=0),
        keys=True,
        documents=True,
        distances=True,
        distances_grad=True,
        sinks=True,
        sinks_grad=True,
        needs_grad=True,
    )
    long = make_spec(needs_grad=False, seqlen_q=1024, seqlen_kv=1024)
    dropped = dataclasses.replace(long, score=ScoreSpec(scale=1.0, dropout_p=0.1))
    assert site_parts.make_plan(dropped) == Plan(dropout=True)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "few"),
    [(1024, 128, True), (32, 4096, True), (33, 129, False), ("s0", "s1", False), (1, "s1", True), ("s0", 128, True)],
)
def test_few_pairs_need_no_lists(seqlen_q: Dim, seqlen_kv: Dim, few: bool) -> None:
    mask = MaskSpec(dense=Dense(shape=(2, 1, 1, seqlen_kv), dtype="bool"))
    plan = site_parts.make_plan(dataclasses.replace(make_spec(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv), mask=mask))
    assert (plan.tiles, plan.unlisted) == (not few, few)


# Which kinds are bands and intervals of keys.
def test_a_chunk_is_an_interval_of_each_query() -> None:
    rows = parts(masks.Chunked(size=16, start=ix.ONE)).rows
    assert rows is not None
    for q in range(40):
        first, end = (ix.evaluate(x, {"q": q}, lambda *_: None) for x in (rows.lower, rows.upper) if x is not None)
        assert [k for k in range(64) if (q - 1) // 16 == (k - 1) // 16] == list(range(max(first, 0), end))


def test_bands_of_two_corners_are_a_band_and_rows() -> None:
    found = parts(Causal(), BOTTOM_RIGHT)
    assert found.band == Band(right=0)
    assert found.rows == Interval(upper=ix.add(ix.add(ix.add(Q, SEQLEN_KV), SEQLEN_Q, -1), ix.ONE))


@pytest.mark.parametrize("seqlen", [128, "s0"])
def test_a_square_has_one_corner(seqlen: Dim) -> None:
    assert parts(BOTTOM_RIGHT, seqlen_q=seqlen, seqlen_kv=seqlen) == Parts(band=Band(right=0))


def test_intervals_are_intersected() -> None:
    found = parts(masks.KeyBound(side="first", bound=LENGTH), masks.Chunked(size=16), masks.CausalFrom(offset=LENGTH))
    assert found.rows is not None
    assert found.rows.lower == ix.apply("max", LENGTH, ix.mul(ix.apply("floordiv", Q, Const(16)), Const(16)))
    assert found.rows.upper is not None
    assert ix.evaluate(found.rows.upper, {"q": 17}, lambda *_: 3) == 21
    assert ix.evaluate(found.rows.upper, {"q": 17}, lambda *_: 30) == 32


def test_a_test_of_a_choice_of_keys_is_no_interval() -> None:
    either = ix.where(ix.compare("<", K, Const(4)), Q, ix.mul(Q, Const(2)))
    condition = Test(">=", Linear(((either, 1), (K, -1))))
    assert parts(masks.Formula(condition=condition)) == Parts(mask=True)


@pytest.mark.parametrize("offset", [-9, -3, 0, 4])
@pytest.mark.parametrize("factor", [-3, -2, -1, 1, 2, 3])
def test_bounds_of_every_nth_key_are_an_interval(factor: int, offset: int) -> None:
    """Keys that a rank keeps of a cache which ranks share: n · k + rank <= q."""
    form = Linear(tuple(sorted(((K, factor), (Q, -1 if factor > 0 else 1)), key=str)), offset)
    rows = parts(masks.Formula(condition=Test(">=", form))).rows
    assert rows is not None
    (bound,) = (x for x in (rows.lower, rows.upper) if x is not None)
    for q in range(20):
        first = ix.evaluate(bound, {"q": q}, lambda *_: None)
        allowed = [factor * k + (q if factor < 0 else -q) + offset >= 0 for k in range(-20, 40)]
        assert allowed == [k < first if factor < 0 else k >= first for k in range(-20, 40)]
