"""Named attention cases: every lowering is run on each of them that it does not refuse. Sizes are odd on purpose.

A `Case` is data; `build` makes its tensors and its spec. Shapes of masks and biases are spelled by the axes that vary:
"bhqk" varies along all, "k" is (1, 1, 1, Skv), and "q k" (with a blank) is the 2-D (Sq, Skv).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Alignment, Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreChange, ScoreSpec, Sinks, Softcap

AXES = "bhqk"


@dataclass(frozen=True, kw_only=True)
class Case:
    """mask: axes that it varies along; mask_dtype: "bool" or a float dtype. empty_rows: every fifth query may see no key.

    layout: how q, k and v lie in memory (see `_laid_out`). scale: None for 1 / sqrt(head_dim_qk).
    """

    name: str
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 4
    seqlen_q: int = 73
    seqlen_kv: int = 73
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    causal: Alignment | None = None
    mask: str | None = None
    mask_dtype: torch.dtype = torch.bool
    empty_rows: bool = False
    bias: str | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a case. q, k, v, bias and sinks are leaves that require gradients if the case was built for it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    spec: AttentionSpec

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and, where the case has them, bias and sinks."""
        return tuple(t for t in (self.q, self.k, self.v, self.bias, self.sinks) if t is not None)


def build(case: Case, *, device: str = "cpu", needs_grad: bool = True, seed: int = 0) -> Inputs:
    """Random tensors of the case, on `device`, and the spec that describes them."""
    generator = torch.Generator().manual_seed(seed)
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    q_shape = (case.batch, case.heads_q, case.seqlen_q, case.head_dim)
    k_shape = (case.batch, case.heads_kv, case.seqlen_kv, case.head_dim)
    v_shape = (*k_shape[:3], head_dim_v)
    q, k, v = (
        _laid_out(shape, case, generator).to(device).requires_grad_(needs_grad) for shape in (q_shape, k_shape, v_shape)
    )
    mask = None if case.mask is None else _mask(case, generator).to(device)
    bias = None if case.bias is None else _normal(_axes_shape(case, case.bias), case.dtype, generator).to(device)
    sinks = _normal((case.heads_q,), case.dtype, generator).to(device) if case.sinks else None
    for parameter in (bias, sinks):
        if parameter is not None:
            parameter.requires_grad_(needs_grad)
    spec = AttentionSpec(
        q=_tensor_spec(q),
        k=_tensor_spec(k),
        v=_tensor_spec(v),
        mask=_mask_spec(case, mask),
        score=_score_spec(case, bias),
        device=torch.device(device).type,
        out_dtype=_dtype_name(case.dtype),
        needs_grad=needs_grad,
    )
    return Inputs(q=q, k=k, v=v, mask=mask, bias=bias, sinks=sinks, spec=spec)


def _laid_out(shape: tuple[int, int, int, int], case: Case, generator: torch.Generator) -> torch.Tensor:
    """A leaf of logical `shape` in the strides that the case asks for."""
    batch, heads, seqlen, head_dim = shape
    match case.layout:
        case "bhsd":
            return _normal(shape, case.dtype, generator)
        case "bshd":
            return _normal((batch, seqlen, heads, head_dim), case.dtype, generator).transpose(1, 2)
        case "sbhd":
            return _normal((seqlen, batch, heads, head_dim), case.dtype, generator).permute(1, 2, 0, 3)
        case "slice":
            # One of three in a fused projection: gaps between the heads of one position and the next.
            return _normal((batch, seqlen, 3, heads, head_dim), case.dtype, generator)[:, :, 1].transpose(1, 2)
        case "expanded_heads":
            return _normal((batch, 1, seqlen, head_dim), case.dtype, generator).expand(shape)
        case "expanded_batch":
            return _normal((1, heads, seqlen, head_dim), case.dtype, generator).expand(shape)
        case "last_stride":
            return _normal((batch, heads, head_dim, seqlen), case.dtype, generator).transpose(2, 3)
    raise ValueError(f"no layout {case.layout!r}")


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _axes_shape(case: Case, axes: str) -> tuple[int, ...]:
    sizes = dict(zip(AXES, (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv), strict=True))
    if " " in axes:
        return tuple(sizes[axis] for axis in axes.split())
    return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def _mask(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = _axes_shape(case, case.mask or "")
    allowed = torch.rand(shape, generator=generator) > 0.3
    if shape[-1] > 1:
        allowed[..., 0] = True
    if case.empty_rows:
        allowed[..., ::5, :] = False
    if case.mask_dtype == torch.bool:
        return allowed
    bias = _normal(shape, case.mask_dtype, generator)
    return bias.masked_fill(~allowed, -math.inf)


def _mask_spec(case: Case, mask: torch.Tensor | None) -> MaskSpec:
    dense = None if mask is None else Dense(shape=tuple(mask.shape), dtype=_dtype_name(mask.dtype))
    if case.causal is None:
        return MaskSpec(dense=dense)
    return MaskSpec(kinds=(Causal(alignment=case.causal),), flag=Flag.CALLED, dense=dense)


def _score_spec(case: Case, bias: torch.Tensor | None) -> ScoreSpec:
    changes: list[ScoreChange] = []
    if case.softcap is not None:
        changes.append(Softcap(cap=case.softcap))
    if bias is not None:
        changes.append(
            DenseBias(shape=tuple(bias.shape), dtype=_dtype_name(bias.dtype), requires_grad=bias.requires_grad)
        )
    if case.sinks:
        changes.append(Sinks(requires_grad=True))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return ScoreSpec(scale=scale, changes=tuple(changes), dropout_p=case.dropout_p)


def _tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=_dtype_name(tensor.dtype),
        requires_grad=tensor.requires_grad,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the cases ------------------------------------------------------------------------------------------------------

TOP_LEFT, BOTTOM_RIGHT = Alignment.TOP_LEFT, Alignment.BOTTOM_RIGHT
_GQA = {"heads_q": 8, "heads_kv": 2}
_CROSS = {"seqlen_q": 73, "seqlen_kv": 155}

_BASE = (
    Case(name="plain"),
    Case(name="causal", causal=TOP_LEFT),
    Case(name="causal_long", causal=TOP_LEFT, batch=1, heads_q=2, heads_kv=2, seqlen_q=423, seqlen_kv=423),
    Case(name="cross", **_CROSS),
    Case(name="cross_more_queries", seqlen_q=155, seqlen_kv=92),
    Case(name="causal_more_keys", causal=TOP_LEFT, **_CROSS),
    Case(name="causal_more_queries", causal=TOP_LEFT, seqlen_q=155, seqlen_kv=92),
    Case(name="causal_bottom_right", causal=BOTTOM_RIGHT, **_CROSS),
    Case(name="causal_bottom_right_square", causal=BOTTOM_RIGHT),
    Case(name="causal_bottom_right_empty_rows", causal=BOTTOM_RIGHT, seqlen_q=92, seqlen_kv=73),
    Case(name="decode", seqlen_q=1, seqlen_kv=155, **_GQA),
    Case(name="decode_bottom_right", seqlen_q=1, seqlen_kv=155, causal=BOTTOM_RIGHT, **_GQA),
    Case(name="one_key", seqlen_q=5, seqlen_kv=1),
    Case(name="scale", scale=0.5),
    Case(name="gqa", causal=TOP_LEFT, **_GQA),
    Case(name="mqa", heads_q=4, heads_kv=1, **_CROSS),
    Case(name="head_dim_72", head_dim=72, causal=TOP_LEFT),
    Case(name="head_dim_80", head_dim=80, **_GQA),
    Case(name="head_dim_96", head_dim=96, **_CROSS),
    Case(name="head_dim_112", head_dim=112, causal=TOP_LEFT),
    Case(name="head_dim_odd", head_dim=5),
    Case(name="head_dims_differ", head_dim=96, head_dim_v=64, causal=TOP_LEFT),
    Case(name="head_dims_differ_gqa", head_dim=48, head_dim_v=80, **_GQA),
)

_MASKS = (
    *(Case(name=f"mask_{axes}", mask=axes, **_CROSS) for axes in ("bhqk", "bqk", "hqk", "qk", "bk", "k", "bhk")),
    Case(name="mask_2d", mask="q k", **_CROSS),
    Case(name="mask_queries_only", mask="bq", **_CROSS),
    Case(name="mask_empty_rows", mask="bqk", empty_rows=True, **_CROSS),
    Case(name="mask_gqa", mask="bk", seqlen_q=92, seqlen_kv=92, **_GQA),
    Case(name="mask_decode", mask="bk", seqlen_q=1, seqlen_kv=423, **_GQA),
    Case(name="mask_and_causal", mask="bk", causal=TOP_LEFT),
    Case(name="additive", mask="bqk", mask_dtype=torch.float32, **_CROSS),
    Case(name="additive_heads", mask="hqk", mask_dtype=torch.float32),
    Case(name="additive_empty_rows", mask="bqk", mask_dtype=torch.float32, empty_rows=True),
)

_SCORES = (
    Case(name="softcap", softcap=2.0, causal=TOP_LEFT),
    Case(name="softcap_mask_gqa", softcap=5.0, mask="bqk", empty_rows=True, **_GQA),
    Case(name="sinks", sinks=True, causal=TOP_LEFT, **_GQA),
    Case(name="sinks_empty_rows", sinks=True, mask="bqk", empty_rows=True),
    Case(name="bias_heads", bias="hqk"),
    Case(name="bias_batch_causal", bias="bhqk", causal=TOP_LEFT),
    Case(name="bias_mask", bias="hqk", mask="bk", **_CROSS),
    Case(name="everything", bias="hqk", sinks=True, softcap=3.0, causal=TOP_LEFT, mask="bk", **_GQA),
    Case(name="dropout", dropout_p=0.125),
)

_LAYOUTS = (
    *(Case(name=f"layout_{layout}", layout=layout, causal=TOP_LEFT) for layout in ("bshd", "sbhd", "slice")),
    Case(name="layout_bshd_gqa", layout="bshd", head_dim=80, **_GQA),
    Case(name="layout_expanded_heads", layout="expanded_heads"),
    Case(name="layout_expanded_batch", layout="expanded_batch"),
    Case(name="layout_last_stride", layout="last_stride"),
)

FLOAT32 = (*_BASE, *_MASKS, *_SCORES, *_LAYOUTS)
_LOW_PRECISION = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_IN_LOW_PRECISION = (
    "causal",
    "causal_long",
    "cross",
    "gqa",
    "decode",
    "head_dim_72",
    "head_dims_differ",
    "mask_bqk",
    "mask_empty_rows",
    "mask_gqa",
    "additive",
    "softcap",
    "sinks",
    "bias_heads",
    "everything",
    "layout_bshd",
    "layout_slice",
)


def lowered(case: Case, name: str, dtype: torch.dtype) -> Case:
    """The case in a lower precision; an additive mask goes with it."""
    mask_dtype = case.mask_dtype if case.mask_dtype == torch.bool else dtype
    return dataclasses.replace(case, name=f"{case.name}_{name}", dtype=dtype, mask_dtype=mask_dtype)


CASES: tuple[Case, ...] = (
    *FLOAT32,
    *(
        lowered(case, name, dtype)
        for name, dtype in _LOW_PRECISION.items()
        for case in FLOAT32
        if case.name in _IN_LOW_PRECISION
    ),
    # A float32 mask of a bfloat16 model: masks are often made before anything is cast.
    Case(name="additive_float32_bfloat16", mask="bqk", mask_dtype=torch.float32, dtype=torch.bfloat16),
    Case(name="float64", dtype=torch.float64, causal=TOP_LEFT, head_dim=16),
)

BY_NAME = {case.name: case for case in CASES}
