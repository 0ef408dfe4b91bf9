"""Plans of decoding, their schedules, the leaf op, and the definition that kernels are held against."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.decode import latent_launch, launch, plan as decode_plan, schedule
from attn_compiler.lowerings.decode.plan import DecodeCall, DecodePlan, Schedule
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import Alignment, Causal, Dense, MaskKind, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks
from attn_compiler.spec.target import Target
from tests.lowerings.decode import latent_problems, problems
from tests.lowerings.decode.problems import ALL, BY_NAME, Case, Problem, allowed_of, build, planned, results
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, make_spec

pytest.importorskip("triton")

SCHEDULE = Schedule(keys=64, warps=4, stages=3, programs=132, least_keys=128)
LENGTH = masks.KeyBound(side="last", bound=Load("length", (), "int"))
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("padding", (Index("b"), Index("k")), "int")))


def proved(*kinds: MaskKind, dtype: str = "bool") -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, 1, 128), dtype=dtype))


def spec_of(mask: MaskSpec, seqlen_q: int = 1, **others: object) -> AttentionSpec:
    return make_spec(mask=mask, seqlen_q=seqlen_q, needs_grad=False, **others)  # type: ignore[arg-type]


def operands(spec: AttentionSpec, splits: int | None = 1) -> tuple[str, ...]:
    return decode_plan.plan_of(DecodeCall(spec=spec, schedule=dataclasses.replace(SCHEDULE, splits=splits))).operands


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "expected"),
    [
        (MaskSpec(), 1, ()),
        (BOTTOM_RIGHT, 1, ()),
        (BOTTOM_RIGHT, 4, ("bounds",)),
        (CAUSAL, 1, ("bounds",)),
        (proved(LENGTH), 1, ("bounds",)),
        (proved(LENGTH, PADDING), 1, ("bounds", "keys")),
        (proved(SlidingWindow(left=7, right=None), Causal(alignment=Alignment.BOTTOM_RIGHT)), 1, ("bounds",)),
        (MaskSpec(dense=Dense(shape=(2, 1, 1, 128), dtype="bool"), reason="an input"), 1, ("bounds", "keys")),
        (MaskSpec(dense=Dense(shape=(2, 8, 1, 128), dtype="bool"), reason="an input"), 1, ("bounds", "mask")),
        (MaskSpec(dense=Dense(shape=(2, 1, 1, 128), dtype="float32"), reason="an input"), 1, ("bounds", "bias")),
    ],
)
def test_operands(mask: MaskSpec, seqlen_q: int, expected: tuple[str, ...]) -> None:
    spec = spec_of(mask, seqlen_q)
    assert operands(spec) == expected
    assert operands(spec, splits=4) == operands(spec, splits=None) == ("count", *expected)


def test_sinks_are_the_last_operand() -> None:
    assert operands(spec_of(proved(LENGTH), changes=(Sinks(requires_grad=False),))) == ("bounds", "sinks")


def test_places_of_operands() -> None:
    plan = DecodePlan(count=True, keys=True, bias=True)
    assert [plan.place(*names) for names in (("count",), ("mask", "bias"), ("bounds",))] == [0, 2, None]


@pytest.mark.parametrize(
    ("mask", "begin_alike"),
    [
        (MaskSpec(), "yes"),
        (BOTTOM_RIGHT, "yes"),
        (proved(LENGTH, PADDING), "yes"),
        (proved(masks.CausalFrom(offset=LENGTH.bound), masks.KeyBound(side="first", bound=LENGTH.bound)), "yes"),
        (proved(SlidingWindow(left=7, right=None), Causal(alignment=Alignment.BOTTOM_RIGHT)), "unknown"),
        (proved(SlidingWindow(left=7, right=0), LENGTH), "unknown"),
    ],
)
def test_rows_of_a_window_alone_may_leave_keys_between_theirs(mask: MaskSpec, begin_alike: str) -> None:
    plan = decode_plan.plan_of(DecodeCall(spec=spec_of(mask, 4), schedule=SCHEDULE))
    assert plan.begin_alike == begin_alike


def test_a_band_is_an_interval_of_each_query() -> None:
    spec = spec_of(proved(SlidingWindow(left=7, right=None), Causal()), 4)
    assert parts.parts(spec).rows is None
    found = decode_plan.parts(spec)
    assert found.band is None
    assert found.rows is not None
    values = [
        [ix.evaluate(x, {"q": q}, lambda name, at: 0) for x in (found.rows.lower, found.rows.upper) if x is not None]
        for q in (0, 9)
    ]
    assert values == [[-7, 1], [2, 10]]


@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q", "rows"),
    [(8, 8, 1, (16, 1)), (32, 8, 1, (16, 1)), (32, 8, 5, (32, 1)), (32, 4, 16, (64, 2)), (71, 1, 1, (64, 2))],
)
def test_queries_of_a_group_share_tiles(heads: int, heads_kv: int, seqlen_q: int, rows: tuple[int, int]) -> None:
    assert decode_plan.rows_of(make_spec(heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q)) == rows


@pytest.mark.parametrize(
    ("spec", "rows"), [({"head_dim": 256}, (32, 4)), ({"head_dim_v": 256}, (32, 4)), ({"dtype": "float32"}, (16, 8))]
)
def test_tiles_are_smaller_where_registers_are_short(spec: dict[str, Any], rows: tuple[int, int]) -> None:
    assert decode_plan.rows_of(make_spec(heads=16, heads_kv=2, seqlen_q=16, **spec)) == rows


@pytest.mark.parametrize(
    ("tiles", "seqlen_kv", "splits"),
    [
        (8, 32768, 16),
        (32, 32768, 4),
        (128, 4096, 1),
        (512, 8192, 1),
        (10_000, 8192, 1),
        # Once would leave four of ten multiprocessors idle, twice too.
        (80, 8192, 1),
        (96, 8192, 1),
        (160, 8192, 3),
        # No fewer keys than are worth it.
        (8, 1024, 8),
        (8, 100, 1),
        (8, 1, 1),
        (0, 4096, 32),
    ],
)
def test_splits_fill_the_machine_and_are_worth_their_cost(tiles: int, seqlen_kv: int, splits: int) -> None:
    assert decode_plan.splits(SCHEDULE, tiles=tiles, seqlen_kv=seqlen_kv) == splits


_NUMBERS = MaskSpec(dense=Dense(shape=(2, 8, 1, 128), dtype="float32"), reason="an input")


@pytest.mark.parametrize(
    ("mask", "queries", "by_head", "means", "bounds_of"),
    [
        (proved(LENGTH), 1, False, "all", "batch"),
        (proved(LENGTH), 3, False, "all", "query"),
        (proved(LENGTH), 1, True, "all", "row"),
        (_NUMBERS, 1, True, "finite", "row"),
    ],
)
def test_rows_without_keys_are_means_by_their_bounds(
    mask: MaskSpec, queries: int, by_head: bool, means: str, bounds_of: str
) -> None:
    asked = dataclasses.replace(mask, means=True)
    calls = [
        DecodeCall(spec=spec_of(each, queries), schedule=dataclasses.replace(SCHEDULE, splits=1), by_head=by_head)
        for each in (mask, asked)
    ]
    plain, found = map(decode_plan.plan_of, calls)
    assert (plain.means, found.means, found.bounds_of) == (None, means, bounds_of)
    assert plain.operands == found.operands


@pytest.mark.parametrize("splits", [None, 3])
def test_a_call_is_its_text(splits: int | None) -> None:
    call = DecodeCall(spec=spec_of(proved(LENGTH, PADDING)), schedule=dataclasses.replace(SCHEDULE, splits=splits))
    assert DecodeCall.from_text(call.to_text()) == call
    assert (
        DecodeCall(spec=call.spec, schedule=SCHEDULE).to_text()
        != DecodeCall(spec=call.spec, schedule=dataclasses.replace(SCHEDULE, warps=8)).to_text()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", [Target.fake(), Target.fake(sm=80, processors=108), Target.fake(device="cpu")])
def test_every_shape_has_a_schedule(dtype: str, target: Target) -> None:
    widest = 256 if dtype == "float32" else 512
    for qk, v, seqlen_q in itertools.product((1, 64, 72, 128, 192, 256, widest), (16, 128, widest), (1, 16)):
        spec = make_spec(head_dim=qk, head_dim_v=v, seqlen_q=seqlen_q, seqlen_kv=4096, dtype=dtype)
        found = schedule.schedule(spec, target)
        assert found.least_keys >= found.keys >= 16
        assert found.splits is not None
        assert found.splits >= 1


def test_what_is_wider_than_any_row_has_none() -> None:
    with pytest.raises(LookupError, match="520"):
        schedule.schedule(make_spec(head_dim=520), Target.fake())


def splits(batch: Dim, seqlen_kv: Dim, target: Target) -> int | None:
    spec = make_spec(batch=batch, heads=32, heads_kv=8, head_dim=128, seqlen_q=1, seqlen_kv=seqlen_kv)
    return schedule.schedule(spec, target).splits


def test_few_sequences_are_split_often_and_many_are_not() -> None:
    found = [splits(batch, 8192, Target.fake()) for batch in (1, 4, 16, 256)]
    assert None not in found
    assert found == sorted(found, key=lambda n: -(n or 0))
    assert found[-1] == 1
    assert (found[0] or 0) > 8


def test_a_smaller_machine_has_fewer_splits() -> None:
    assert (splits(1, 32768, Target.fake(processors=60)) or 0) < (splits(1, 32768, Target.fake()) or 0)


@pytest.mark.parametrize(("batch", "seqlen_kv"), [("s0", 4096), (1, "s0 + 1"), ("s0", "s1")])
def test_unknown_sizes_are_left_to_the_launch(batch: Dim, seqlen_kv: Dim) -> None:
    assert splits(batch, seqlen_kv, Target.fake()) is None


# The decode leaf op as PyTorch sees it.
def problem_of(name: str) -> Problem:
    """Without NaN: opcheck compares a tensor with itself."""
    problem = build(BY_NAME[name])
    return dataclasses.replace(problem, k=problem.k.nan_to_num(0.0), v=problem.v.nan_to_num(0.0))


@pytest.mark.parametrize("name", ["lengths", "keys_left", "everything", "splits_unknown"])
def test_opcheck(name: str) -> None:
    """Among the checks: no operand is changed, the counters included."""
    problem = problem_of(name)
    with planned(problem.plan):
        arguments = (problem.q, problem.k, problem.v, problem.operands, problem.text)
        torch.library.opcheck(torch.ops.attn_compiler.decode.default, arguments)


def test_counters_are_zeros_where_the_queries_are() -> None:
    q = torch.empty(2, 4, 1, 16)
    arguments = (q, 6)
    assert torch.equal(torch.ops.attn_compiler.decode_count(*arguments), torch.zeros(6, dtype=torch.int32))
    torch.library.opcheck(torch.ops.attn_compiler.decode_count.default, arguments)


# What decoding computes by its definition, held against the oracle that its kernels are held against.
def _failed(problem: Problem) -> Problem:
    """Its kernel has failed before."""
    FAILURES.fail(problem.text, "RuntimeError: planted")
    return problem


@pytest.mark.usefixtures("planted_failures")
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_caches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_by_kernel", None)
    problem = _failed(build(case))
    problems.assert_within_rule(problems.results(problem), problem)


@pytest.mark.usefixtures("planted_failures")
@pytest.mark.parametrize("rope", [16, 0])
def test_latents(rope: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_launch, "_by_kernel", None)
    case = Case(name="latent", batch=2, heads_q=5, heads_kv=1, seqlen_q=2, seqlen_kv=70, keys="left")
    problem = _failed(latent_problems.of_latent(case, rope=rope))
    problems.assert_within_rule(latent_problems.results(problem), problem)


# As of the Triton family, of the decode kernel.
POISONS = (torch.nan, torch.inf, -torch.inf)
LARGE = 1e3
#: intervals with keys between them that no query has
_GAPS: Any = {
    "seqlen_q": 4,
    "bounds": ([(0, 9), (30, 41), (50, 50), (90, 120)], [(5, 5), (7, 3), (150, 150), (20, 64)]),
}

#: intervals that begin alike, among them an empty one
_PREFIXES: Any = {"seqlen_q": 4, "bounds": ([(3, 9), (3, 41), (50, 50), (3, 120)], [(5, 5), (7, 3), (0, 150), (0, 64)])}

CASES = (
    Case(name="unused_lengths", bounds=((0, 37), (0, 0))),
    Case(name="unused_window", bounds=((100, 133), (149, 150))),
    Case(name="unused_keys", keys="holes"),
    Case(name="unused_keys_queries", keys="left", seqlen_q=3),
    Case(name="unused_gaps", **_GAPS),
    Case(name="unused_gaps_keys", keys="holes", **_GAPS),
    Case(name="unused_prefixes", **_PREFIXES),
    Case(name="unused_prefixes_keys", keys="holes", softcap=2.0, **_PREFIXES),
    Case(name="unused_mask", mask="bk"),
    Case(name="unused_mask_heads", mask="hk", bounds=((5, 130), (0, 80)), heads_kv=4),
    Case(name="unused_mask_queries", mask="bqk", **_GAPS),
    Case(name="unused_mask_many_rows", mask="bqk", seqlen_q=16, heads_q=4, heads_kv=1),
    Case(name="unused_bias", bias="bk"),
    Case(name="unused_bias_rows", bias="bqk", seqlen_q=4),
    Case(name="unused_softcap", softcap=2.0, mask="bk"),
    Case(name="unused_distances", distances=4, **_GAPS),
    Case(name="unused_sinks", sinks=True, **_GAPS),
    Case(name="unused_one_split", splits=1, mask="bk"),
    Case(name="unused_two_parts", head_dim=80, head_dim_v=48, **_GAPS),
    Case(name="unused_fp8", stored="float8_e5m2", v_scale=0.5, mask="bk", head_dim=32),
    Case(name="unused_fp8_odd", stored="float8_e5m2", layout="odd", mask="bk"),
)
#: keys of a tile, and slices
_SLICED = dataclasses.replace(problems.SMALL, keys=32, warps=2, slices=2)


def made(case: Case, **options: Any) -> Problem:
    """Columns of a mask are shut, and of a bias -inf; so are rows."""
    problem = build(case, **options)
    for name, shut in (("mask", False), ("bias", -torch.inf)):
        if name in problem.named:
            problem.named[name][..., 40:47] = shut
            problem.named[name][..., 100:] = shut
            if case.seqlen_q > 1:
                problem.named[name][..., 1, :] = shut
    return problem


def poisoned(problem: Problem, values: tuple[float, ...]) -> Problem:
    """With those values, by turns, in keys and values that no row uses, and in queries without a key."""
    case, pairs = problem.case, allowed_of(problem)
    keys = ~pairs.any(2).unflatten(1, (case.heads_kv, -1)).any(2)[..., None]
    rows = ~pairs.any(3)[..., None]
    k, v = (_filled(x, keys, values) for x in (problem.k, problem.v))
    return dataclasses.replace(problem, q=_filled(problem.q, rows, values), k=k, v=v)


def _filled(x: Tensor, where: Tensor, values: tuple[float, ...]) -> Tensor:
    fill = torch.tensor(values, device=x.device)
    of_positions = fill[torch.arange(x.shape[2], device=x.device) % len(values)][:, None]
    return problems._like(x, torch.where(where, of_positions, x.float().nan_to_num(0.0)), x.dtype)


def check(problem: Problem) -> None:
    clean, got = (results(poisoned(problem, values)) for values in ((LARGE,), POISONS))
    for label, mine, other in zip(("out", "lse"), got, clean, strict=True):
        assert torch.equal(mine, other), f"{label} changes by what no row uses"
    rows = ~allowed_of(problem).any(3)
    assert not got[0].masked_select(rows[..., None]).any()
    if not problem.case.sinks:
        assert torch.all(got[1].masked_select(rows) == -torch.inf)
    problems.assert_within_rule(got, poisoned(problem, (0.0,)))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("unused_"))
def test_nothing_leaks(case: Case) -> None:
    check(made(case))


@pytest.mark.parametrize(
    "name", ["unused_gaps", "unused_prefixes_keys", "unused_mask", "unused_bias_rows", "unused_two_parts"]
)
def test_nothing_leaks_where_warps_go_on_alone(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    check(made(dataclasses.replace(case, name=f"{name}_sliced"), schedule=_SLICED))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("unused_"))
def test_nothing_leaks_on_a_gpu(case: Case) -> None:
    check(made(case, dtype=torch.bfloat16))


def test_a_sink_of_minus_infinity_beside_no_key_is_none() -> None:
    problem = build(Case(name="unused_no_sink", sinks=True, bounds=((0, 0), (0, 150))))
    problem.named["sinks"].fill_(-torch.inf)
    out, lse = results(problem)
    assert not out[0].any()
    assert torch.all(lse[0] == -torch.inf)
    assert torch.isfinite(lse[1]).all()
