"""Attentions over a cache for bench_decode.py: shapes, what they mask, and the tensors of each."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attn_compiler.index_expr import Index, Load
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec, StoredSpec, TensorSpec
from attn_compiler.spec.masks import Dense, MaskKind, MaskSpec
from attn_compiler.spec.scores import ScoreChange, ScoreSpec, Sinks, Softcap

#: caches of one case together, so that none is in the L2 cache when its turn comes
CACHES_BYTES = 300_000_000
MOST_CACHES = 64


Tried = Literal["nothing", "splits", "tiles"]
#: from less to more
TRIED: tuple[Tried, ...] = get_args(Tried)


@dataclass(frozen=True, kw_only=True)
class Case:
    """length: of the cache; filled: keys in use. stored: its dtype, if that is FP8, with a scale for K and one for V.
    window: so many of those. tried: which other schedules are measured too."""

    name: str
    batch: int
    length: int
    filled: int | None = None
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int | None = None
    seqlen_q: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    stored: str | None = None
    tried: Tried = "nothing"

    @property
    def names(self) -> dict[str, str]:
        return {"name": self.name}

    @property
    def used(self) -> int:
        """Keys from the first to the last that the last query may use."""
        filled = self.length if self.filled is None else self.filled
        return filled if self.window is None else min(self.window, filled)

    @property
    def bytes_used(self) -> int:
        """Of keys and values, those in use."""
        return (
            (2 if self.stored is None else 1) * self.batch * self.heads_kv * self.used * (self.head_dim + self.width_v)
        )

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def columns(self) -> dict[str, str]:
        shown = {**dataclasses.asdict(self), "filled": self.length if self.filled is None else self.filled}
        shown["head_dim_v"] = self.width_v
        del shown["tried"]
        return {name: "" if value is None else str(value) for name, value in shown.items()}


COLUMNS = tuple(f.name for f in dataclasses.fields(Case) if f.name != "tried")


def _read(name: str, *, tried: Tried = "tiles", **further: Any) -> Case:
    """A case whose name has its batch and length: "b16_4k_half" is half filled."""
    batch, length, half = re.fullmatch(r"(?:.*_)?b(\d+)_(\d+)k(_half)?", name).groups()  # type: ignore[union-attr]
    keys = int(length) * 1024
    return Case(
        name=name, batch=int(batch), length=keys, tried=tried, **{"filled": keys // 2 if half else None, **further}
    )


_D64 = {"heads_q": 64, "head_dim": 64}
_D256 = {"heads_q": 16, "head_dim": 256, "softcap": 50.0}
_FP8 = {"stored": "float8_e4m3fn"}
_FURTHER = (
    *map(_read, "b1_1k b1_4k b1_32k b1_32k_half b16_4k b16_4k_half b64_8k".split()),
    *(_read(f"d64_{name}", **_D64) for name in ("b1_4k", "b16_4k", "b16_4k_half")),
    _read("d64_sinks_b16_4k", sinks=True, **_D64),
    *(_read(f"d256_softcap_{name}", **_D256) for name in ("b1_4k", "b16_4k")),
    _read("window_b16_8k", filled=8000, window=1024), _read("softcap_b16_4k", softcap=50.0),
    *(_read(f"q{queries}_b16_4k", seqlen_q=queries) for queries in (4, 16)),
    _read("d192_b4_8k", heads_q=16, heads_kv=16, head_dim=192, head_dim_v=128),
    *(_read(f"fp8_{name}", **_FP8) for name in ("b1_4k", "b1_32k", "b16_4k")),
    _read("fp8_b16_4k_half", tried="nothing", **_FP8),
    _read("fp8_e5m2_b16_4k", tried="nothing", stored="float8_e5m2"), _read("fp8_b64_8k", **_FP8),
    _read("fp8_d64_b16_4k", **_D64, **_FP8), _read("mha_b4_4k", tried="nothing", heads_kv=32),
)  # fmt: skip
#: numbers of tiles that no number of splits fills a machine with evenly
_BETWEEN = tuple(_read(f"b{batch}_4k", tried="splits") for batch in (2, 3, 5, 6, 10, 12, 20, 24, 40))
CASES: tuple[Case, ...] = (*_FURTHER, *_BETWEEN)
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """caches: keys and values, (B, Hkv, L, D) each, one pair a layer. named: operands of the leaf op but for its counters."""

    case: Case
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    named: dict[str, Tensor]
    spec: AttentionSpec


def build(case: Case, device: str, *, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """On "meta" the tensors hold nothing: a spec to decide on."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    q = normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim).transpose(1, 2)
    shape = (case.batch, case.heads_kv, case.length)
    size = case.batch * case.heads_kv * case.length * (case.head_dim + case.width_v) * dtype.itemsize
    count = max(1, min(MOST_CACHES, CACHES_BYTES // size)) if device != "cpu" else 1
    held = dtype if case.stored is None else getattr(torch, case.stored)
    caches = [
        (normal(*shape, case.head_dim).to(held), normal(*shape, case.width_v).to(held)) for _ in range(max(count, 2))
    ]
    first, end = (bound.to(device) for bound in intervals(case))
    bounds = torch.stack([first, end]).int()[:, None].expand(2, case.batch, -1).contiguous()
    named = {"bounds": bounds}
    if case.sinks:
        named["sinks"] = normal(case.heads_q)
    if case.stored is not None:
        named["k_scale"], named["v_scale"] = (torch.tensor(scale, device=device) for scale in (0.5, 2.0))
    return Problem(case=case, q=q, caches=caches, named=named, spec=_spec(case, q, *caches[0]))


def intervals(case: Case) -> tuple[Tensor, Tensor]:
    """(Sq,) each: the first key of each query and the one after its last."""
    filled = case.length if case.filled is None else case.filled
    end = filled - case.seqlen_q + 1 + torch.arange(case.seqlen_q)
    first = torch.zeros_like(end) if case.window is None else (end - case.window).clamp(min=0)
    return first, end


def _spec(case: Case, q: Tensor, k: Tensor, v: Tensor) -> AttentionSpec:
    def described(x: Tensor) -> TensorSpec:
        return TensorSpec(shape=tuple(x.shape), strides=tuple(x.stride()), dtype=str(x.dtype).removeprefix("torch."))

    bound = Load("lengths", (Index("b"),), "int")
    proved: tuple[MaskKind, ...] = (masks.KeyBound(side="last", bound=bound),)
    if case.seqlen_q > 1:
        proved = (masks.CausalFrom(offset=bound),)
    if case.window is not None:
        proved = (*proved, masks.KeyBound(side="first", bound=Load("firsts", (Index("b"),), "int")))
    changes: tuple[ScoreChange, ...] = () if case.softcap is None else (Softcap(cap=case.softcap),)
    changes = (*changes, Sinks(requires_grad=False)) if case.sinks else changes
    dense = Dense(shape=(case.batch, 1, case.seqlen_q, case.length), dtype="bool")
    return AttentionSpec(
        q=described(q), k=described(k), v=described(v), mask=MaskSpec(kinds=proved, dense=dense),
        score=ScoreSpec(scale=case.head_dim**-0.5, changes=changes), device=q.device.type,
        out_dtype=str(q.dtype).removeprefix("torch."),
        stored=StoredSpec(k=described(k), v=described(v), k_scaled=True, v_scaled=True) if case.stored else None,
    )  # fmt: skip


def expected(problem: Problem) -> Tensor:
    """Attention over the first cache by its definition, in float32."""
    case, (k, v) = problem.case, problem.caches[0]
    if case.stored is not None:
        k, v = k.float() * problem.named["k_scale"], v.float() * problem.named["v_scale"]
    k, v = (x.float().repeat_interleave(case.heads_q // case.heads_kv, 1) for x in (k, v))
    scores = problem.q.float() @ k.transpose(2, 3) * case.head_dim**-0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    keys = torch.arange(case.length, device=scores.device)
    first, end = (bound[..., None] for bound in problem.named["bounds"])
    scores = scores.masked_fill(~((keys >= first) & (keys < end))[:, None], -torch.inf)
    if case.sinks:
        sinks = problem.named["sinks"].float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., : case.length] @ v
