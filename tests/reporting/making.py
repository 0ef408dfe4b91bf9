"""Reports for tests, each record of them with every fact that it can have, and one with names that try to break out of the page."""

from __future__ import annotations

import dataclasses

from attn_compiler import index_expr as ix
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Estimate, Evidence, Reason, Refusal
from attn_compiler.reporting.facts import LinearReport, MissReport, SiteReport, Steps, UnpaddedStep, UnpadReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec import masks, scores
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from tests.lowerings.linear import linear_forms

#: a module may be called so: nothing checks the names that a model gives
HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=alert(1)>"

TARGET = "cuda sm90, cuDNN 9.19.0, torch 2.13.0"
Q = TensorSpec(shape=(2, 8, 1024, 64), strides=(524288, 64, 512, 1), dtype="bfloat16", requires_grad=True)
KV = TensorSpec(shape=(2, 2, 1024, 64), strides=(131072, 64, 128, 1), dtype="bfloat16", requires_grad=True)
PADDING = masks.KeyPadding(condition=ix.as_bool(ix.Load("attention_mask", (ix.Index("b"), ix.Index("k")), "int")))
SPEC = AttentionSpec(
    q=Q,
    k=KV,
    v=KV,
    mask=masks.MaskSpec(kinds=(masks.Causal(), PADDING), dense=masks.Dense(shape=(2, 1, 1024, 1024), dtype="bool")),
    score=scores.ScoreSpec(scale=0.125, changes=(scores.Softcap(cap=50.0),)),
    device="cuda",
    out_dtype="bfloat16",
    needs_grad=True,
)
INSTALL = "pip install 'attn_compiler[fa4]'"
REASON = Reason(code=Code.LIBRARY_MISSING, rule="flash-attn-4 is installed", observed="none", remedy=INSTALL)
NO_SOFTCAP = Reason(code=Code.SOFTCAP, rule="the kernel has no softcap", observed="softcap 50")
EVIDENCE = Evidence(
    order=("fa4", "hopper", "triton"), why="times the fastest: hopper 1.00, triton 1.37", since="2026-11-23"
)
ESTIMATE = Estimate(
    milliseconds=0.25, other="sdpa_cudnn", other_milliseconds=0.75, like="bfloat16 and S 8192, H200", since="2026-11-22"
)
SITE = SiteReport(
    modules=tuple(f"model.layers.{i}.self_attn" for i in range(5)),
    pattern="sdpa call",
    spec=SPEC,
    decision=Decision(
        lowering="hopper",
        refusals=(
            Refusal(lowering="fa4", reasons=(REASON, NO_SOFTCAP)),
            Refusal(lowering="cudnn", reasons=(NO_SOFTCAP,)),
            Refusal(lowering="flash", reasons=(NO_SOFTCAP,)),
        ),
    ),
    copies=(Copy(operand="v", bytes=1048576, why="its last stride is 2, the kernel reads 1"),),
    notes=("K/V read without their 4-fold repetition",),
    source="modeling_llama.py:120",
    evidence=EVIDENCE,
    estimate=ESTIMATE,
)
MISS = MissReport(
    modules=("pool.attn",),
    anchor="softmax(dim=1)",
    nearest="softmax_matmul",
    stopped_at="the product with v, vit.py:88",
    reason=Reason(
        code=Code.SOFTMAX_AXIS, rule="the softmax runs over the keys", observed="axis 1 of 3", remedy="softmax(-1)"
    ),
    source="vit.py:87",
)
LINEAR = LinearReport(
    modules=("mixer.0", "mixer.1"),
    spec=linear_forms.spec(),
    decision=Decision(lowering="linear_reference", refusals=(Refusal(lowering="linear", reasons=(REASON,)),)),
    evidence="the only one on a CPU",
)
STEPS = Steps()
STEPS.last += [UnpaddedStep(number=n, positions=64, failed=f) for n, f in ((32, ()), (16, ("the first key is real",)))]
UNPAD = UnpadReport(
    zeroed=("last_hidden_state", "pooled"), facts=("rows begin with a token",), notes=("a note",), steps=STEPS
)
REPORT = Report(
    graph="0/0",
    target=TARGET,
    sites=(SITE,),
    misses=(MISS,),
    seconds=(("mirror", 0.25), ("match", 0.0042)),
    kernels=(("attention_forward", 1.5),),
)


def with_site(*, spec: dict[str, object] | None = None, **changes: object) -> Report:
    """REPORT with a site in which some fields are others."""
    changed = {"spec": dataclasses.replace(SPEC, **(spec or {})), **changes}  # type: ignore[arg-type]
    return dataclasses.replace(REPORT, sites=(dataclasses.replace(SITE, **changed),))  # type: ignore[arg-type]


def hostile() -> Report:
    """A report of which every text tries to break out."""
    reason = Reason(code=Code.DTYPE, rule=HOSTILE, observed=HOSTILE, remedy=HOSTILE)
    load = ix.Load(HOSTILE, (ix.Index("b"), ix.Index("k")), "int")
    mask = masks.MaskSpec(kinds=(masks.Document(of_key=load),), dense=SPEC.mask.dense)
    site = dataclasses.replace(
        SITE,
        modules=(HOSTILE, f"{HOSTILE}.2"),
        pattern=HOSTILE,
        spec=dataclasses.replace(SPEC, mask=mask),
        decision=Decision(lowering=HOSTILE, refusals=(Refusal(lowering=HOSTILE, reasons=(reason,)),)),
        copies=(Copy(operand=HOSTILE, bytes=None, why=HOSTILE),),
        notes=(HOSTILE,),
        source=HOSTILE,
        evidence=Evidence(order=(HOSTILE,), why=HOSTILE, since=HOSTILE),
        estimate=dataclasses.replace(ESTIMATE, other=HOSTILE, like=HOSTILE, since=HOSTILE),
    )
    miss = MissReport(
        modules=(HOSTILE,), anchor=HOSTILE, nearest=HOSTILE, stopped_at=HOSTILE, reason=reason, source=HOSTILE
    )
    return Report(
        graph=HOSTILE,
        target=HOSTILE,
        sites=(site,),
        misses=(miss,),
        seconds=((HOSTILE, 1.0),),
        kernels=((HOSTILE, 1.0),),
        failure=f"{HOSTILE}\n{HOSTILE}",
        faults=(HOSTILE,),
        not_kept=HOSTILE,
        unpad=UnpadReport(kept=reason, module=HOSTILE, source=HOSTILE),
    )
