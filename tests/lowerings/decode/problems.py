"""What the decode kernel is run on: parts given one by one, random operands for them, and the same attention from its definition."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from attn_compiler.lowerings.decode import launch, plan as decode_plan
from attn_compiler.lowerings.decode.plan import DecodeCall, DecodePlan, Schedule
from attn_compiler.lowerings.shared.parts import kernel_plan
from attn_compiler.spec.attention import AttentionSpec, StoredSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec, Softcap
from tests import numerics
from tests.lowerings import plan_math

#: without a GPU, Triton's interpreter (see tests/conftest.py)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SMALL = Schedule(keys=32, warps=4, stages=1, programs=64, least_keys=32, splits=3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """bounds: (first key, one after the last) of each batch row, for every query, or for each query where there is a list of them; by_head:
    for each query of each head. means: as in `DecodePlan`.

    keys: "holes" or "left" padding. pairs: the axes that a dense mask or (bias) a bias varies along. distances: heads they are for.
    layout: "cache" (B, Hkv, L, D), of which q has its own, "bshd", "wide" (a slice of a longer cache), "joined" (k and v in one
    tensor), "odd" (beginning between two vectors), "one_batch" (the batch is expanded). stored: k's and v's own dtype, in FP8; k_scale,
    v_scale: what they are multiplied by.
    """

    name: str
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    seqlen_q: int = 1
    seqlen_kv: int = 150
    head_dim: int = 16
    head_dim_v: int | None = None
    layout: str = "cache"
    bounds: tuple[Any, ...] | None = None
    keys: str | None = None
    mask: str | None = None
    bias: str | None = None
    distances: int | None = None
    slopes: bool = False
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    splits: int | None = 3
    stored: str | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    by_head: bool = False
    means: Literal["all", "finite"] | None = None

    @property
    def plan(self) -> DecodePlan:
        return DecodePlan(
            count=self.splits != 1,
            bounds=self.bounds is not None,
            keys=self.keys is not None,
            mask=self.mask is not None,
            bias=self.bias is not None,
            distances=self.distances is not None,
            slopes=self.slopes,
            sinks=self.sinks,
            k_scale=self.k_scale is not None,
            v_scale=self.v_scale is not None,
            bounds_of=self.bounds_of,
            begin_alike="yes" if all(map(_begin_alike, self.bounds or ())) else "unknown",
            means=self.means,
        )

    @property
    def bounds_of(self) -> Literal["batch", "query", "row"]:
        if self.by_head:
            return "row"
        return "batch" if self.bounds is None or self.seqlen_q == 1 else "query"

    @property
    def scale_used(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


def _begin_alike(of_row: Any) -> bool:
    return isinstance(of_row, tuple) or len({first for first, end in of_row if first < end}) < 2


MASKS = (
    Case(name="plain"),
    Case(name="one_split", splits=1),
    Case(name="splits_unknown", splits=None),
    Case(name="more_splits_than_tiles", splits=9),
    Case(name="lengths", bounds=((0, 150), (0, 37))),
    Case(name="lengths_of_one_and_none", bounds=((0, 1), (0, 0))),
    Case(name="one_length", bounds=((0, 70),)),
    Case(name="left_padding", bounds=((90, 150), (3, 150))),
    Case(name="window", bounds=((100, 133), (149, 150))),
    Case(name="beyond_the_end", bounds=((0, 400), (-7, 160))),
    Case(name="keys", keys="holes"),
    Case(name="keys_left", keys="left", bounds=((75, 150), (0, 64))),
    Case(name="mask_k", mask="bk"),
    Case(name="mask_hk", mask="hk", bounds=((5, 130), (0, 80))),
    Case(
        name="several_queries",
        seqlen_q=4,
        bounds=([(0, 60), (0, 61), (0, 62), (0, 63)], [(40, 80), (41, 81), (42, 82), (43, 83)]),
    ),
    Case(
        name="several_queries_some_without_keys",
        seqlen_q=3,
        bounds=([(0, 0), (0, 40), (90, 120)], [(5, 5), (7, 3), (150, 150)]),
    ),
    Case(name="queries_mask", seqlen_q=5, mask="bqk", keys="holes"),
)
#: of the second batch row some queries, or all, have no key
_SOME: Any = ([(0, 60), (0, 61), (0, 62)], [(40, 80), (81, 81), (9, 3)])
MEANS = (
    Case(name="mean", means="all", bounds=((0, 37), (0, 0)), keys="holes"),
    Case(name="mean_one_split", means="all", bounds=((3, 150), (7, 2)), splits=1, mask="bk", scale=-0.5),
    Case(name="mean_of_some_queries", means="all", bounds=_SOME, seqlen_q=3, keys="holes", head_dim=80, head_dim_v=48),
    Case(name="mean_of_masked_queries", means="all", bounds=_SOME, seqlen_q=3, mask="bqk", softcap=2.0),
    Case(name="mean_beside_a_bias", means="all", bounds=_SOME, seqlen_q=3, bias="hqk"),
    Case(
        name="mean_of_some_rows", means="all", bounds=_SOME, seqlen_q=3, heads_q=7, heads_kv=1, bias="bk", slopes=True
    ),
    Case(
        name="mean_by_head",
        means="all",
        by_head=True,
        bounds=([(0, 40), (3, 3), (0, 150), (9, 2)], [(0, 0)] * 4),
        mask="hk",
    ),
    Case(name="mean_fp8", means="all", bounds=((0, 99), (0, 0)), stored="float8_e4m3fn", k_scale=0.5, v_scale=3.0),
    Case(name="mean_of_numbers", means="finite", bounds=((0, 150), (0, 0)), bias="bk", keys="holes"),
    Case(name="mean_of_numbers_queries", means="finite", bounds=((0, 150), (0, 0)), bias="bqk", seqlen_q=2),
    Case(
        name="mean_of_numbers_by_head", means="finite", bounds=([(0, 150)] * 4, [(0, 0)] * 4), bias="bhk", by_head=True
    ),
)
SCORES = (
    Case(name="softcap", softcap=2.0, bounds=((0, 99), (0, 11))),
    Case(name="softcap_queries", softcap=2.0, seqlen_q=4, keys="left"),
    Case(name="sinks", sinks=True),
    Case(name="sinks_alone", sinks=True, bounds=((0, 0), (0, 150))),
    Case(name="slopes", slopes=True, seqlen_q=3, bounds=((0, 140), (0, 33))),
    Case(name="bias", bias="bhqk", seqlen_q=3),
    Case(name="bias_k", bias="k"),
    Case(name="distances", distances=4, seqlen_q=3),
    Case(name="distances_one_head", distances=1, sinks=True, bounds=((0, 90), (0, 149))),
    Case(name="negative_scale", scale=-0.5),
    Case(
        name="everything", seqlen_q=3, bounds=((0, 120), (20, 90)), keys="holes", bias="hk", distances=1,
        slopes=True, sinks=True, softcap=3.0,
    ),
)  # fmt: skip
SHAPES = (
    Case(name="one_key", seqlen_kv=1),
    Case(name="mha", heads_q=3, heads_kv=3),
    Case(name="mqa", heads_q=7, heads_kv=1, bounds=((0, 120), (0, 30))),
    Case(name="sixteen_queries", seqlen_q=16, heads_q=3, heads_kv=3),
    Case(name="rows_beyond_a_tile", seqlen_q=16, heads_q=6, heads_kv=1, bounds=((0, 150), (0, 50))),
    Case(name="tile_even", seqlen_kv=192, splits=2),
    Case(name="head_dim_5", head_dim=5),
    Case(name="head_dim_72", head_dim=72),
    Case(name="head_dims_80_48", head_dim=80, head_dim_v=48),
    Case(name="head_dims_192_128", head_dim=192, head_dim_v=128, batch=1),
    Case(name="head_dims_48_96", head_dim=48, head_dim_v=96, seqlen_q=2, sinks=True),
    Case(name="head_dim_256", head_dim=256, batch=1, seqlen_kv=70),
)
LAYOUTS = tuple(
    Case(name=f"layout_{layout}", layout=layout, bounds=((0, 99), (0, 150)))
    for layout in ("bshd", "wide", "joined", "odd", "one_batch")
)
_E4M3: Any = {"stored": "float8_e4m3fn", "bounds": ((0, 99), (0, 150))}
STORED = (
    Case(name="fp8", **_E4M3),
    Case(name="fp8_scaled", k_scale=0.02, v_scale=3.0, **_E4M3),
    Case(name="fp8_negative_scale", k_scale=-0.5, **_E4M3),
    Case(name="fp8_softcap", k_scale=0.5, v_scale=0.25, softcap=2.0, seqlen_q=3, **_E4M3),
    Case(name="fp8_one_split", v_scale=0.7, splits=1, sinks=True, **_E4M3),
    Case(name="fp8_head_dims_80_48", head_dim=80, head_dim_v=48, k_scale=0.3, **_E4M3),
    Case(name="fp8_odd", layout="odd", k_scale=0.3, **_E4M3),
    Case(name="fp8_e5m2", stored="float8_e5m2", keys="holes", v_scale=0.5),
)
ALL = (*MASKS, *MEANS, *SCORES, *SHAPES, *LAYOUTS, *STORED)
BY_NAME = {case.name: case for case in ALL}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The tensors of a case. named: the operands by the plan's names."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    named: dict[str, Tensor]
    spec: AttentionSpec
    text: str
    plan: DecodePlan = field(default_factory=DecodePlan)

    @property
    def operands(self) -> list[Tensor]:
        return [self.named[name] for name in self.plan.operands]


def build(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    seed: int = 0,
    schedule: Schedule | None = None,
    one_kv: bool = False,
) -> Problem:
    """one_kv: keys are values, too.
    schedule: with the case's number of splits; SMALL where there is none. What no bound lets a row use is NaN in k and v."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = _in_memory(case, normal, dtype, device)
    if case.stored is not None:
        k, v = (_like(x, x, getattr(torch, case.stored)) for x in (k, v))
    named = _operands(case, normal, dtype, device, generator)
    unused = ~_of_any_query(case, named, device)
    if case.layout != "one_batch":
        # A mean reads all values, and numbers are added to every score.
        of_values = unused & ~_is_mean(case, named).any((1, 2))[:, None] if case.means else unused
        of_keys = of_values if case.means == "finite" or one_kv else unused
        k, v = (
            _like(x, x.float().masked_fill(no[:, None, :, None], torch.nan), x.dtype)
            for x, no in ((k, of_keys), (v, of_values))
        )
    chosen = dataclasses.replace(schedule or SMALL, splits=case.splits)
    spec = _spec(case, q, k, v)
    text = DecodeCall(spec=spec, schedule=chosen).to_text()
    return Problem(case=case, q=q, k=k, v=v, named=named, spec=spec, text=text, plan=case.plan)


def _of_any_query(case: Case, named: Mapping[str, Tensor], device: str) -> Tensor:
    """bool (B, Skv)"""
    found = torch.ones(case.batch, case.seqlen_kv, dtype=torch.bool, device=device)
    if "bounds" in named:
        first, end = named["bounds"][..., None]
        at = torch.arange(case.seqlen_kv, device=device)
        # Between the keys of two queries of a tile, values are read, and weigh nothing.
        first = torch.where(first < end, first, case.seqlen_kv).amin(1)
        found = found & (at >= first) & (at < end.amax(1))
    return found & named["keys"] if "keys" in named else found


def _is_mean(case: Case, named: Mapping[str, Tensor]) -> Tensor:
    """bool (B, Hq|1, Sq|1): which rows have no key."""
    first, end = named["bounds"].unflatten(2, (case.heads_q if case.by_head else 1, -1))
    return (first >= end) | (first >= case.seqlen_kv)


def _in_memory(case: Case, normal: Any, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    width_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    q = normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim).to(device, dtype).transpose(1, 2)

    def one(width: int) -> Tensor:
        shape = (case.batch, case.heads_kv, case.seqlen_kv, width)
        match case.layout:
            case "cache":
                return normal(*shape).to(device, dtype)
            case "bshd":
                return normal(shape[0], shape[2], shape[1], width).to(device, dtype).transpose(1, 2)
            case "wide":
                return normal(shape[0], shape[1], shape[2] + 9, width).to(device, dtype)[:, :, 5:-4]
            case "odd":
                return normal(*shape[:3], width + 3).to(device, dtype)[..., 1 : width + 1]
            case "one_batch":
                return normal(1, *shape[1:]).to(device, dtype).expand(shape)
        raise ValueError(f"no layout {case.layout!r}")

    if case.layout == "joined":
        both = normal(case.seqlen_kv, case.batch, case.heads_kv, 2 * case.head_dim).to(device, dtype)
        k, v = both.permute(1, 2, 0, 3).split(case.head_dim, dim=-1)
        return q, k, v
    return q, one(case.head_dim), one(width_v)


def _like(x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values where x lies, in a dtype: an offset of the memory stays."""
    room = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=dtype, device=x.device)
    return room.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(values)


def _shape(case: Case, axes: str) -> tuple[int, ...]:
    sizes = zip("bhqk", (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv), strict=True)
    return tuple(size if axis in axes else 1 for axis, size in sizes)


def _operands(
    case: Case, normal: Any, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if case.plan.count:
        found["count"] = torch.zeros(case.batch * case.heads_kv * 8, dtype=torch.int32, device=device)
    if case.bounds is not None:
        rows = case.seqlen_q * (case.heads_q if case.by_head else 1)
        each = [b if isinstance(b, list) else [b] * rows for b in case.bounds]
        found["bounds"] = torch.tensor(each, dtype=torch.int32).permute(2, 0, 1).contiguous().to(device)
    if case.keys is not None:
        usable = torch.rand(case.batch, case.seqlen_kv, generator=generator) < 0.6
        if case.keys == "left":
            usable = torch.arange(case.seqlen_kv) >= torch.arange(case.batch)[:, None] * case.seqlen_kv // 3
        found["keys"] = usable.to(device)
    if case.mask is not None:
        found["mask"] = (torch.rand(_shape(case, case.mask), generator=generator) < 0.6).to(device)
    if case.bias is not None:
        found["bias"] = normal(*_shape(case, case.bias)).to(device, dtype)
        if case.means == "finite":
            found["bias"][1], found["bias"][1, ..., 5::7] = torch.finfo(dtype).min, -torch.inf
    if case.distances is not None:
        length = -(-(case.seqlen_q + case.seqlen_kv) // 8) * 8
        values = normal(case.distances, length + 8)
        found["distances"] = torch.stack([values[:, p : p + length] for p in range(8)], 1).contiguous().to(device)
    if case.slopes:
        found["slopes"] = (normal(case.heads_q).abs() * 0.1).to(device)
    if case.sinks:
        found["sinks"] = normal(case.heads_q).to(device, dtype)
    for name, value in (("k_scale", case.k_scale), ("v_scale", case.v_scale)):
        if value is not None:
            found[name] = torch.tensor(value, device=device)
    return found


def _spec(case: Case, q: Tensor, k: Tensor, v: Tensor) -> AttentionSpec:
    def described(x: Tensor) -> TensorSpec:
        return TensorSpec(shape=tuple(x.shape), strides=tuple(x.stride()), dtype=str(x.dtype).removeprefix("torch."))

    changes = () if case.softcap is None else (Softcap(cap=case.softcap),)
    return AttentionSpec(
        q=described(q),
        k=described(k),
        v=described(v),
        # Each case has a text of its own: what is compiled for one is kept by its text.
        mask=MaskSpec(reason=case.name, means=case.means is not None),
        score=ScoreSpec(scale=case.scale_used, changes=changes),
        device=q.device.type,
        out_dtype=str(q.dtype).removeprefix("torch."),
        stored=None
        if case.stored is None
        else StoredSpec(k=described(k), v=described(v), k_scaled=case.plan.k_scale, v_scaled=case.plan.v_scale),
    )


# ---- running ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def planned(plan: DecodePlan) -> Iterator[None]:
    """Every call has this plan."""
    launch.prepare.cache_clear()
    try:
        with mock.patch.object(decode_plan, "plan_of", return_value=plan):
            yield
    finally:
        launch.prepare.cache_clear()


def results(problem: Problem) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel."""
    with planned(problem.plan):
        return run(problem)


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same where the plan is known already."""
    given = (problem.q, problem.k, problem.v, problem.operands, problem.text)
    found: tuple[Tensor, Tensor] = torch.ops.attn_compiler.decode(*given)
    return found


def _as_triton_plan(named: Mapping[str, Tensor]) -> kernel_plan.Plan:
    return kernel_plan.Plan(
        rows="bounds" in named,
        keys="keys" in named,
        mask="mask" in named,
        bias="bias" in named,
        distances="distances" in named,
        slopes="slopes" in named,
    )


def allowed_of(problem: Problem) -> Tensor:
    """bool (B, Hq, Sq, Skv); a bias of -inf shuts a pair out."""
    case, named = problem.case, dict(problem.named)
    if case.by_head:
        first, end = named.pop("bounds").unflatten(2, (case.heads_q, -1))[..., None]
        at = torch.arange(case.seqlen_kv, device=problem.q.device)
        named["mask"] = named.get("mask", torch.ones_like(at, dtype=torch.bool)) & (at >= first) & (at < end)
    if "bounds" in named:
        named["rows"] = named["bounds"]
    sizes = (case.seqlen_q, case.seqlen_kv)
    found = plan_math.allowed(_as_triton_plan(named), named, *sizes, device=problem.q.device)
    if "bias" in named:
        found = found & (named["bias"] != -torch.inf)
    return found.expand(case.batch, case.heads_q, *sizes)


def expected(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `results` should be, every step in `dtype`. A row without any allowed key gives 0 and -inf."""
    case, named = problem.case, dict(problem.named)
    plan = _as_triton_plan(named)
    sizes = (case.seqlen_q, case.seqlen_kv)
    scales = (named.pop(name, torch.ones(())).to(problem.q) for name in ("k_scale", "v_scale"))
    # Where no query may read, there is NaN.
    k, v = (
        (x.to(dtype) * scale).nan_to_num(0.0).repeat_interleave(case.heads_q // case.heads_kv, 1)
        for x, scale in zip((problem.k, problem.v), scales, strict=True)
    )
    logits = problem.q.to(dtype) @ k.transpose(-1, -2) * case.scale_used
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    logits = logits + plan_math.added(plan, named, *sizes, dtype=dtype, device=problem.q.device)
    allowed = allowed_of(problem)
    logits = torch.where(allowed, logits, torch.finfo(dtype).min)
    joined = logits
    if case.sinks:
        joined = torch.cat([logits, named["sinks"].to(dtype)[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = torch.where(allowed, joined.softmax(-1)[..., : case.seqlen_kv], 0.0)
    lse = torch.logsumexp(joined, -1)
    if case.means is not None:
        is_mean = _is_mean(case, problem.named)[..., None].expand(*logits.shape[:3], 1)
        alike = torch.zeros_like(logits)
        if case.means == "finite":
            counts = named["keys"][:, None, None] if case.keys else torch.tensor(True)
            alike = torch.where(counts & (named["bias"] != -torch.inf), alike, -torch.inf)
        mean = alike.softmax(-1)
        return torch.where(is_mean, mean, weights) @ v, lse
    return weights @ v, lse if case.sinks else torch.where(allowed.any(-1), lse, -torch.inf)


def assert_within_rule(got: Sequence[Tensor], problem: Problem) -> None:
    """Hold `results` against the project's numeric rule (see tests/numerics.py)."""
    worst = margin(got, problem)
    assert max(worst.values()) <= 1.0, worst


def margin(got: Sequence[Tensor], problem: Problem) -> dict[str, float]:
    """The error of each result over what the rule allows."""
    dtype = problem.q.dtype
    exact, plain = expected(problem, numerics.exact_dtype(dtype)), expected(problem, dtype)
    factor = numerics.FACTOR if problem.case.softcap is None else numerics.FACTOR_SOFTCAP
    found = {}
    if problem.case.means is not None:
        # Of a mean nobody reads it.
        is_mean = _is_mean(problem.case, problem.named)
        got, plain = ((out, torch.where(is_mean, exact[1], lse.to(exact[1]))) for out, lse in (got, plain))
    for label, mine, right, usual in zip(("out", "lse"), got, exact, plain, strict=True):
        if mine.shape != right.shape:
            raise ValueError(f"{label}: shape {tuple(mine.shape)} instead of {tuple(right.shape)}")
        finite = torch.where(right == -torch.inf, 0.0, right)
        allowed = factor * numerics.worst(usual, right) + numerics.floor(finite, dtype)
        found[label] = numerics.worst(mine, right) / allowed
    return found
