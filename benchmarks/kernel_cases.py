"""What the kernels are measured on: cases as data, their tensors, and how much work their masks leave.

A case becomes the spec that an unmodified model of that kind would give, and the lowering itself makes the operands from it, outside of all
timing. So what is measured is what a compiled graph runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.base import Operands, Tiles
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts as parts, tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan
from attn_compiler.spec import added_scores, masks, scores
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target

#: forward without gradients; the gradients alone; both through autograd
Pass = Literal["forward", "backward", "both"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "both")
# The backward has five products of matrices where the forward has two.
_WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}

_TOKENS, _WIDTH = 16384, 2048
_B, _H, _Q, _K = map(Index, "bhqk")


@dataclass(frozen=True, kw_only=True)
class Case:
    """padding: the lengths of the batch rows fall evenly from all to half of the keys; "lengths": at the right, and the model compares
    positions with numbers of keys, where it else has a vector of truth values. window: keys back from the query, itself among
    them. documents: of equal length, so many a row. bias: a learned [1, Hq, S, S]. table: learned, for each distance and head.
    dropout_p: of the weights.

    peers: names of kernel_peers.PEERS.
    """

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen: int
    head_dim: int
    head_dim_v: int
    causal: bool = True
    padding: Literal["left", "right", "lengths"] | None = None
    window: int | None = None
    documents: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    alibi: bool = False
    table: bool = False
    dropout_p: float = 0.0
    peers: tuple[str, ...] = ()

    @property
    def pairs(self) -> int:
        """Allowed pairs of queries and keys, over all batch rows, of one head."""
        first, end = intervals(self)
        return int((end - first).clamp(min=0).sum())

    def flops(self, which: Pass) -> float:
        """What the allowed pairs alone cost: multiplications and additions of the products of matrices."""
        return _WORK[which] * 2.0 * self.pairs * self.heads_q * (self.head_dim + self.head_dim_v)

    @property
    def small(self) -> Case:
        """The same for Triton's interpreter."""
        return dataclasses.replace(
            self, batch=2, heads_q=2, heads_kv=2 if self.heads_kv == self.heads_q else 1, seqlen=96,
            window=None if self.window is None else 24, documents=None if self.documents is None else 3,
        )  # fmt: skip

    @property
    def tiny(self) -> Case:
        """The same where nothing but the host's work is left."""
        return dataclasses.replace(self, batch=1, seqlen=64)

    @property
    def columns(self) -> dict[str, str]:
        """What a row says of the case."""
        names = ("batch", "heads_q", "heads_kv", "seqlen", "head_dim", "head_dim_v", "pairs")
        return self.names | {name: str(getattr(self, name)) for name in names}

    @property
    def names(self) -> dict[str, str]:
        """What tells it from others."""
        return {"case": self.name}


COLUMNS = ("case", "batch", "heads_q", "heads_kv", "seqlen", "head_dim", "head_dim_v", "pairs")


def _case(name: str, *, seqlen: int = 8192, head_dim: int = 128, **further: Any) -> Case:
    """16k tokens of width 2048, where nothing else is said."""
    sizes = {"batch": _TOKENS // seqlen, "heads_q": _WIDTH // head_dim, "head_dim_v": head_dim} | further
    sizes.setdefault("heads_kv", sizes["heads_q"])
    return Case(name=name, seqlen=seqlen, head_dim=head_dim, **sizes)


_PLAIN = ("cudnn", "flash", "flex")
_GROUPED: dict[str, Any] = {"seqlen": 2048, "heads_q": 32, "heads_kv": 8, "peers": ("cudnn", "flex")}
_LEARNED: dict[str, Any] = {"seqlen": 2048, "peers": ("efficient", "flex")}
_FLEX: dict[str, Any] = {"peers": ("flex",)}


def _plain(head_dim: int, seqlen: int, *, causal: bool) -> Case:
    name = f"{'causal' if causal else 'none'}_d{head_dim}_s{seqlen}"
    return _case(name, head_dim=head_dim, seqlen=seqlen, causal=causal, peers=_PLAIN)


def _added(head_dim: int) -> list[Case]:
    """What is added to the scores: T5's encoder and a learned bias mask nothing, ALiBi's models are causal."""
    sizes = {"head_dim": head_dim, **_LEARNED}
    return [
        _case(f"bias_d{head_dim}", bias=True, causal=False, **sizes),
        _case(f"alibi_d{head_dim}", alibi=True, **sizes),
        _case(f"t5_d{head_dim}", table=True, causal=False, **sizes),
    ]


def _odd(head_dim: int, head_dim_v: int) -> Case:
    """16 heads each: next to causal_d128_s8192."""
    values = "" if head_dim_v == head_dim else f"_{head_dim_v}"
    further: dict[str, Any] = {"heads_q": 16, "head_dim_v": head_dim_v, "peers": ("cudnn",)}
    return _case(f"causal_d{head_dim}{values}_s8192", head_dim=head_dim, **further)


#: the most telling first
CASES: tuple[Case, ...] = (
    _case("padding_right", padding="right", **_GROUPED), _case("documents_causal", documents=8, **_FLEX), *_added(64),
    _plain(128, 8192, causal=True), _case("softcap", softcap=50.0, **_FLEX), _case("sinks", sinks=True, **_FLEX),
    _case("window", window=1024, **_FLEX), _case("padding_left", padding="left", **_GROUPED),
    _plain(64, 8192, causal=True), *_added(128), _odd(72, 72), _odd(80, 80), _odd(96, 96), _odd(112, 112),
    _odd(192, 128), _case("documents", documents=8, causal=False, **_FLEX), _plain(256, 8192, causal=True),
    *(_plain(head_dim, 2048, causal=True) for head_dim in (128, 64, 256)),
    *(_plain(head_dim, seqlen, causal=False) for seqlen in (8192, 2048) for head_dim in (128, 64, 256)),
    *(_case(f"documents_{'causal' if causal else 'full'}_d64", head_dim=64, documents=8, causal=causal) for causal in (True, False)),
)  # fmt: skip


def key_bounds(case: Case) -> tuple[Tensor, Tensor]:
    """int64 (B,), (B,): the first key of each batch row that is no padding, and the one after the last."""
    first, end = torch.zeros(case.batch, dtype=torch.int64), torch.full((case.batch,), case.seqlen)
    if case.padding is None:
        return first, end
    missing = torch.arange(case.batch) * case.seqlen // (2 * max(case.batch - 1, 1))
    return (missing, end) if case.padding == "left" else (first, end - missing)


def document_ids(case: Case) -> Tensor:
    """int32 (B, S)"""
    return (torch.arange(case.seqlen) * (case.documents or 1) // case.seqlen).int().repeat(case.batch, 1)


def intervals(case: Case) -> tuple[Tensor, Tensor]:
    """int64 (B, S), (B, S): the first key that each query may use, and the one after the last; none where they cross."""
    queries = torch.arange(case.seqlen)
    first, end = (bound[:, None].repeat(1, case.seqlen) for bound in key_bounds(case))
    if case.causal:
        end = torch.minimum(end, queries + 1)
    if case.window is not None:
        first = torch.maximum(first, queries - case.window + 1)
    if case.documents is not None:
        ids = document_ids(case)
        first = torch.maximum(first, torch.searchsorted(ids, ids))
        end = torch.minimum(end, torch.searchsorted(ids, ids, right=True))
    return first, end


def used_queries(case: Case) -> Tensor:
    """bool (B, 1, S, 1): which queries may use any key."""
    first, end = intervals(case)
    return (end > first)[:, None, :, None]


def _mask(case: Case) -> masks.MaskSpec:
    """As a model's mask is recovered: a flag if it is only causal, else a dense tensor and what it means."""
    proved: list[masks.MaskKind] = [masks.Causal()] if case.causal else []
    if case.window is not None:
        proved.append(masks.SlidingWindow(left=case.window - 1, right=None))
    if case.padding == "lengths":
        proved.append(masks.KeyBound(side="last", bound=ix.add(Load("lengths", (_B,), "int"), Const(-1))))
    elif case.padding is not None:
        proved.append(masks.KeyPadding(condition=ix.as_bool(Load("attention_mask", (_B, _K), "int"))))
    if case.documents is not None:
        proved.append(masks.Document(of_key=Load("ids", (_B, _K), "int")))
    if case.alibi or not all(isinstance(kind, masks.Causal) for kind in proved):
        heads, dtype = (case.heads_q, "float32") if case.alibi else (1, "bool")
        dense = masks.Dense(shape=(case.batch, heads, case.seqlen, case.seqlen), dtype=dtype)
        return masks.MaskSpec(kinds=tuple(proved), dense=dense)
    return masks.MaskSpec(kinds=tuple(proved), flag=masks.Flag.READ if proved else None)


def _score(case: Case, dtype: str, *, training: bool) -> scores.ScoreSpec:
    changes: list[scores.ScoreChange] = []
    if case.softcap is not None:
        changes.append(scores.Softcap(cap=case.softcap))
    if case.sinks:
        changes.append(scores.Sinks(requires_grad=training))
    if case.bias or case.table:
        shape = (1, case.heads_q, case.seqlen, case.seqlen)
        changes.append(scores.DenseBias(shape=shape, dtype=dtype, requires_grad=training))
    return scores.ScoreSpec(
        scale=case.head_dim**-0.5,
        changes=tuple(changes),
        dropout_p=case.dropout_p,
        proved=tuple(_added_kinds(case, training=training)),
    )


def _added_kinds(case: Case, *, training: bool) -> list[added_scores.ProvedScore]:
    distance = ix.add(_K, _Q, -1)
    if case.alibi:
        return [added_scores.Alibi(slopes=Load("slopes", (_H,), "float"), position=distance)]
    if case.table:
        at = (ix.add(distance, Const(case.seqlen - 1)), _H)
        return [added_scores.RelativeBias(table="table", at=at, distance=distance, requires_grad=training)]
    if case.bias:
        shape = (1, case.heads_q, case.seqlen, case.seqlen)
        return [
            added_scores.Bias(tensor="bias", at=(ix.ZERO, _H, _Q, _K), shape=shape, requires_grad=training),
        ]
    return []


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case's tensors, logical BHSD in BSHD memory. given: the model's own, by name. named: our operands, by the plan's names.

    training: for the gradients of q, k, v and of whatever is learned.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    given: dict[str, Tensor]
    training: bool
    spec: AttentionSpec
    plan: Plan
    tiles: Tiles
    named: dict[str, Tensor]

    @property
    def text(self) -> str:
        """The leaf op's."""
        return Call(spec=self.spec, tiles=self.tiles).to_text()

    @property
    def operands(self) -> list[Tensor]:
        """The leaf op's, in its order."""
        return [self.named[name] for name in self.plan.operands]


def build(case: Case, *, device: str, dtype: torch.dtype, training: bool, tiles: Tiles | None = None) -> Problem:
    """The tensors of a case, the same ones for every call. tiles: others than the table's. Raises LookupError where it has none."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v = (
        normal(case.batch, case.seqlen, heads, width).transpose(1, 2)
        for heads, width in (
            (case.heads_q, case.head_dim),
            (case.heads_kv, case.head_dim),
            (case.heads_kv, case.head_dim_v),
        )
    )
    given = _given(case, normal, device)
    spec = spec_of(case, q, k, v, training=training)
    tiles = tiles or tile_table.tiles(spec, Target.current(device))
    plan = parts.make_plan(spec)
    with torch.no_grad():
        operands = _operands(spec, q, k, v, given, tiles, device)
    named = dict(zip(plan.operands, operands, strict=True))
    named |= {name: named[name].detach().requires_grad_() for name in plan.differentiable}
    return Problem(
        case=case, q=q, k=k, v=v, given=given, training=training, spec=spec, plan=plan, tiles=tiles, named=named
    )


def _given(case: Case, normal: Callable[..., Tensor], device: str) -> dict[str, Tensor]:
    """What a model of that kind has."""
    found: dict[str, Tensor] = {}
    if case.padding is not None:
        first, end = (bound[:, None] for bound in key_bounds(case))
        keys = torch.arange(case.seqlen)
        found["attention_mask"] = ((keys >= first) & (keys < end)).long().to(device)
        found["lengths"] = end[:, 0].to(device)
    if case.documents is not None:
        found["ids"] = document_ids(case).to(device)
    if case.sinks:
        found["sinks"] = normal(case.heads_q)
    if case.alibi:
        found["slopes"] = 2.0 ** (-8.0 * torch.arange(1, case.heads_q + 1, device=device) / case.heads_q)
    if case.table:
        found["table"] = normal(2 * case.seqlen - 1, case.heads_q)
    if case.bias:
        found["bias"] = normal(1, case.heads_q, case.seqlen, case.seqlen)
    return found


def spec_of(case: Case, q: Tensor, k: Tensor, v: Tensor, *, training: bool) -> AttentionSpec:
    """What is recovered from a model of that kind."""
    dtype = str(q.dtype).removeprefix("torch.")

    def described(x: Tensor) -> TensorSpec:
        return TensorSpec(shape=tuple(x.shape), strides=tuple(x.stride()), dtype=dtype, requires_grad=training)

    return AttentionSpec(
        q=described(q), k=described(k), v=described(v), mask=_mask(case),
        score=_score(case, dtype, training=training), device=q.device.type, out_dtype=dtype, needs_grad=training,
    )  # fmt: skip


def leaf_call(emitter: EagerEmitter, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The op of the last call of a leaf op whose name begins so, and its arguments. Raises ValueError if there was none."""
    for node in reversed(emitter.graph.nodes):
        if node.op == "call_function" and str(node.target).startswith(f"attn_compiler.{name}"):
            function: Any = node.target
            return function, tuple(fx.map_arg(node.args, emitter.value))
    raise ValueError(f"no call of {name}")


def _operands(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Tensor], tiles: Tiles, device: str
) -> list[Tensor]:
    emitter: Any = EagerEmitter(Target.current(device))
    site = site_of(emitter, q, k, v, given)
    return [emitter.value(node) for node in part_tensors.emit(emitter, spec, site, tiles)]


def site_of(emitter: EagerEmitter, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Tensor]) -> Operands:
    """The nodes that a lowering finds at the site of a case."""
    nodes = {name: emitter.given(name, tensor) for name, tensor in ({"q": q, "k": k, "v": v} | dict(given)).items()}
    return Operands(
        q=nodes["q"], k=nodes["k"], v=nodes["v"], mask=nodes.get("bias"), sinks=nodes.get("sinks"), loads=nodes,
        score_loads=nodes,
    )  # fmt: skip
