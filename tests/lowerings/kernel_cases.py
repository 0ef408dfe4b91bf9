"""Attentions that the Triton kernels are run on, as data. Lengths are odd, so that tiles of 32 to 64 are full, partial and skipped."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Plan


@dataclass(frozen=True, kw_only=True)
class Case:
    """keys: which may be used: "left" or "right" padding, "holes", or "none" of the first batch row. mask, bias: the axes that
    they vary along. distances: heads that they are for. layout: how q, k and v lie in memory (see `kernel_problems.build`).
    grad_kv: queries × keys of that kernel's tile."""

    name: str
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 1
    seqlen_q: int = 70
    seqlen_kv: int = 70
    head_dim: int = 16
    head_dim_v: int | None = None
    layout: str = "bshd"
    band: Band | None = None
    keys: str | None = None
    documents: bool = False
    rows: bool = False
    mask: str | None = None
    bias: str | None = None
    bias_grad: bool = True
    distances: int | None = None
    slopes: bool = False
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    needs_grad: bool = True
    few_pairs: bool = False
    grad_kv: tuple[int, int] = (32, 64)

    @property
    def plan(self) -> Plan:
        wants = self.needs_grad
        return Plan(
            band=self.band,
            rows=self.rows,
            keys=self.keys is not None,
            documents=self.documents,
            mask=self.mask is not None,
            bias=self.bias is not None,
            bias_grad=self.bias is not None and self.bias_grad and wants,
            distances=self.distances is not None,
            distances_grad=self.distances is not None and wants,
            slopes=self.slopes,
            sinks=self.sinks,
            sinks_grad=self.sinks and wants,
            dropout=self.dropout_p > 0,
            needs_grad=wants,
            few_pairs=self.few_pairs,
        )


CAUSAL = Band(right=0)
BOTTOM_RIGHT = Band(right=0, from_end=True)

MASKS = (
    Case(name="plain"),
    Case(name="causal", band=CAUSAL),
    Case(name="causal_from_end", band=BOTTOM_RIGHT, seqlen_q=37),
    Case(name="causal_from_end_more_queries", band=BOTTOM_RIGHT, seqlen_kv=37),
    Case(name="causal_more_queries", band=CAUSAL, seqlen_kv=37),
    Case(name="causal_more_keys", band=CAUSAL, seqlen_q=37, seqlen_kv=130),
    Case(name="offset", band=Band(right=21), seqlen_q=37, seqlen_kv=101),
    Case(name="strict", band=Band(right=-1)),
    Case(name="window", band=Band(left=9, right=0)),
    Case(name="window_wide", band=Band(left=70, right=0), seqlen_q=130, seqlen_kv=130),
    Case(name="window_both_sides", band=Band(left=40, right=7)),
    Case(name="window_from_end", band=Band(left=20, right=0, from_end=True), seqlen_q=37),
    Case(name="window_left_alone", band=Band(left=5)),
    Case(name="keys_right", keys="right", band=CAUSAL),
    Case(name="keys_left", keys="left", band=CAUSAL),
    Case(name="keys_holes", keys="holes", seqlen_q=33),
    Case(name="keys_none", keys="none"),
    Case(name="documents", documents=True, band=CAUSAL),
    Case(name="rows", rows=True),
    Case(name="mask_bqk", mask="bqk"),
    Case(name="mask_hqk", mask="hqk"),
    Case(name="mask_k", mask="k", seqlen_q=33),
    Case(name="mask_q", mask="q", seqlen_kv=33),
    Case(name="unlisted_keys", few_pairs=True, keys="left", band=CAUSAL),
    Case(name="unlisted_keys_none", few_pairs=True, keys="none"),
    Case(name="unlisted_rows", few_pairs=True, rows=True, bias="hqk", seqlen_kv=33),
    Case(
        name="unlisted_all",
        few_pairs=True,
        band=Band(left=50, right=3),
        keys="holes",
        documents=True,
        rows=True,
        mask="bhqk",
    ),
    Case(name="all_masks", band=Band(left=50, right=3), keys="holes", documents=True, rows=True, mask="bhqk"),
)

SCORES = (
    Case(name="bias_bhqk", bias="bhqk", seqlen_q=33),
    Case(name="bias_hqk_causal", bias="hqk", band=CAUSAL),
    Case(name="bias_without_gradient", bias="qk", bias_grad=False, keys="right"),
    Case(name="distances", distances=2, keys="right"),
    Case(name="distances_cross", distances=2, seqlen_q=33, seqlen_kv=101),
    Case(name="slopes", slopes=True, band=CAUSAL),
    Case(name="slopes_from_end", slopes=True, band=BOTTOM_RIGHT, seqlen_q=37),
    Case(name="sinks", sinks=True, band=Band(left=20, right=0)),
    Case(name="sinks_keys_none", sinks=True, keys="none"),
    Case(name="softcap", softcap=2.0, band=CAUSAL),
    Case(name="softcap_keys", softcap=2.0, keys="left"),
    Case(name="negative_scale", scale=-0.5, band=CAUSAL),
    Case(name="dropout", dropout_p=0.3, band=CAUSAL),
    Case(name="dropout_keys_bias", dropout_p=0.1, keys="left", bias="hqk"),
    Case(
        name="everything",
        band=CAUSAL,
        keys="left",
        documents=True,
        bias="hqk",
        distances=1,
        slopes=True,
        sinks=True,
        softcap=3.0,
        dropout_p=0.2,
    ),
)

SHAPES = (
    Case(name="one", seqlen_q=1, seqlen_kv=1),
    Case(name="decode", seqlen_q=1, seqlen_kv=101, layout="bhsd"),
    Case(name="one_key", seqlen_q=70, seqlen_kv=1, band=CAUSAL),
    Case(name="one_head", batch=1, heads_q=1, heads_kv=1, band=CAUSAL),
    Case(name="mqa", heads_q=3, band=CAUSAL, batch=1),
    Case(name="gqa", heads_q=4, heads_kv=2, batch=1, band=CAUSAL),
    Case(name="even", seqlen_q=64, seqlen_kv=64, band=CAUSAL),
    Case(name="wide_blocks_of_queries", band=CAUSAL, keys="right", seqlen_q=130, seqlen_kv=97, grad_kv=(64, 32)),
    Case(name="head_dim_5", head_dim=5),
    Case(name="head_dim_72", head_dim=72, band=CAUSAL),
    Case(name="head_dims_80_48", head_dim=80, head_dim_v=48),
    Case(name="head_dims_16_112", head_dim=16, head_dim_v=112, keys="holes"),
    Case(name="head_dims_192_128", head_dim=192, head_dim_v=128, band=CAUSAL, batch=1),
    Case(name="head_dim_256", head_dim=256, band=CAUSAL, batch=1, seqlen_q=33, seqlen_kv=40),
)

LAYOUTS = (
    Case(name="layout_bhsd", layout="bhsd", band=CAUSAL),
    Case(name="layout_expanded_heads", layout="expanded_heads", heads_kv=2),
    Case(name="layout_expanded_batch", layout="expanded_batch", band=CAUSAL),
    Case(name="layout_slice", layout="slice", band=CAUSAL),
    Case(name="layout_joined_mqa", layout="sb(h+2hg)d", heads_q=3, band=CAUSAL, batch=3),
)

ALL = (*MASKS, *SCORES, *SHAPES, *LAYOUTS)
BY_NAME = {case.name: case for case in ALL}
