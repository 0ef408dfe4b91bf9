"""Runs the examples of attn_compiler/reasons/pages.md: which reasons does one give?

The names that an example may use are `NAMES`: `why_not(lowering, attention(...), Target.fake(...))` asks one lowering about one attention
on a made-up machine, and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler.lowerings import by_name
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.reasons.pages import ExampleKind, Page
from attn_compiler.reporting.report import Report
from attn_compiler.spec import masks, scores
from attn_compiler.spec.attention import AttentionSpec, Dim, TensorSpec
from attn_compiler.spec.fp8_recipe import Fp8Recipe
from attn_compiler.spec.target import Target


def attention(
    *,
    batch: Dim = 2,
    batch_kv: Dim | None = None,
    heads: Dim = 8,
    heads_kv: Dim | None = None,
    length: Dim = 128,
    length_kv: Dim | None = None,
    head_dim: Dim = 64,
    head_dim_v: Dim | None = None,
    dtype: str = "bfloat16",
    dtype_v: str | None = None,
    last_stride: int = 1,
    mask: masks.MaskSpec = masks.MaskSpec(),  # noqa: B008 - frozen
    bias: scores.DenseBias | None = None,
    changes: tuple[scores.ScoreChange, ...] = (),
    scale: float = 0.125,
    dropout: float = 0.0,
    softmax_dtype: str = "float32",
    device: str = "cuda",
    **further: Any,
) -> AttentionSpec:
    """One attention: bfloat16 on a GPU, without a mask and without gradients, unless told otherwise. further: fields of AttentionSpec."""
    batch_kv = batch if batch_kv is None else batch_kv
    heads_kv = heads if heads_kv is None else heads_kv
    length_kv = length if length_kv is None else length_kv

    def tensor(*shape: Dim, of: str) -> TensorSpec:
        *_, sequence, width = shape
        known = [x if isinstance(x, int) else 64 for x in (sequence, width)]
        strides = (known[0] * known[1] * 8, known[0] * known[1], known[1] * last_stride, last_stride)
        return TensorSpec(shape=shape, strides=strides, dtype=of)

    return AttentionSpec(
        q=tensor(batch, heads, length, head_dim, of=dtype),
        k=tensor(batch_kv, heads_kv, length_kv, head_dim, of=dtype),
        v=tensor(batch_kv, heads_kv, length_kv, head_dim if head_dim_v is None else head_dim_v, of=dtype_v or dtype),
        mask=mask,
        score=scores.ScoreSpec(
            scale=scale,
            changes=changes if bias is None else (*changes, bias),
            dropout_p=dropout,
            softmax_dtype=softmax_dtype,
        ),
        device=device,
        out_dtype=dtype,
        **further,
    )


def causal(alignment: masks.Alignment = masks.Alignment.TOP_LEFT, dense: masks.Dense | None = None) -> masks.MaskSpec:
    """A diagonal that the model's call asks for, with a mask tensor beside it or none."""
    return masks.MaskSpec(kinds=(masks.Causal(alignment=alignment),), flag=masks.Flag.CALLED, dense=dense)


def why_not(lowering: str, spec: AttentionSpec, target: Target, *, chosen: bool = False) -> tuple[Reason, ...]:
    """What a lowering has against an attention. chosen: with what the choice among lowerings has against it, such as that it is slower."""
    if not chosen:
        return tuple(by_name(lowering).why_not(spec, target))
    refusals = decide(spec, target, Options()).refusals
    return tuple(reason for refusal in refusals if refusal.lowering == lowering for reason in refusal.reasons)


NAMES: dict[str, Any] = {
    "F": F,
    "Fp8Recipe": Fp8Recipe,
    "Target": Target,
    "attention": attention,
    "attn_compiler": attn_compiler,
    "causal": causal,
    "masks": masks,
    "scores": scores,
    "torch": torch,
    "why_not": why_not,
}


def given(page: Page) -> tuple[str, ...]:
    """The lines that a page's example gives, each with its code: reasons as text, or the error's message. None of words."""
    match page.kind:
        case ExampleKind.DECISION:
            return tuple(map(str, eval(page.example, dict(NAMES))))
        case ExampleKind.PROGRAM:
            return tuple(dict.fromkeys(str(reason) for reason in _of_program(page.example)))
        case ExampleKind.RAISES:
            try:
                exec(page.example, dict(NAMES))
            except AttnCompilerError as error:
                # Dynamo adds lines of its own.
                return (str(error).partition("\n")[0],)
            raise AssertionError(f"the example of {page.code} raises nothing")
        case ExampleKind.TOLD:
            return ()


def own_line(page: Page) -> str | None:
    """The line of the page's own code; None of an example in words. Raises AssertionError if its example does not give its code."""
    lines = given(page)
    if page.kind is ExampleKind.TOLD:
        return None
    found = next((line for line in lines if line.endswith(f"({page.code})")), None)
    if found is None:
        raise AssertionError(f"the example of {page.code} gives {lines or 'nothing'}")
    return found


def _of_program(text: str) -> Iterator[Reason]:
    names = dict(NAMES)
    exec(text, names)
    torch.compiler.reset()
    reports = attn_compiler.explainer(options=names.get("options"))(names["model"], *names["inputs"])
    for report in reports:
        yield from _reasons(report)


def _reasons(report: Report) -> Iterator[Reason]:
    for site in report.sites:
        for refusal in site.decision.refusals:
            yield from refusal.reasons
    yield from (miss.reason for miss in report.misses)
    if report.unpad is not None and report.unpad.kept is not None:
        yield report.unpad.kept
