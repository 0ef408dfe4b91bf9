"""The table: golden texts, since a person reads them, and the exactness of the abbreviated module paths."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Evidence, Reason, Refusal
from attn_compiler.reporting import render, wording
from attn_compiler.reporting.facts import MissReport, SiteReport
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.spec import masks, scores
from attn_compiler.spec.attention import AttentionSpec, TensorSpec

TARGET = "cuda sm90, cuDNN 9.19.0, torch 2.13.0"
KV = TensorSpec(shape=(2, 8, 4096, 64), strides=(2097152, 64, 512, 1), dtype="bfloat16")
SPEC = AttentionSpec(
    q=TensorSpec(shape=(2, 32, 4096, 64), strides=(8388608, 64, 2048, 1), dtype="bfloat16"),
    k=KV,
    v=KV,
    mask=masks.MaskSpec(kinds=(masks.Causal(),), flag=masks.Flag.CALLED),
    score=scores.ScoreSpec(scale=0.125, changes=(scores.Softcap(cap=50.0),)),
    device="cuda",
    out_dtype="bfloat16",
    needs_grad=True,
)
NO_SOFTCAP = Reason(code=Code.SOFTCAP, rule="the kernel has no softcap", observed="softcap 50")
NO_RECIPE = Reason(
    code=Code.FP8_NOT_ASKED, rule="an FP8 recipe is given", observed="none", remedy="pass options={'fp8': Fp8Recipe()}"
)
SITE = SiteReport(
    modules=tuple(f"model.layers.{i}.self_attn" for i in range(32)),
    pattern="softmax_matmul",
    spec=SPEC,
    decision=Decision(
        lowering="sdpa",
        refusals=(
            Refusal(lowering="cudnn_fp8", reasons=(NO_RECIPE, NO_SOFTCAP)),
            Refusal(lowering="cudnn", reasons=(NO_SOFTCAP,)),
            Refusal(lowering="flash", reasons=(NO_SOFTCAP,)),
        ),
    ),
    copies=(
        Copy(operand="v", bytes=33554432, why="its last stride is 2, the kernel reads 1"),
        Copy(operand="k", bytes=None, why="an expanded axis"),
    ),
    notes=("repeat_kv ×4 taken out",),
)
MISS = MissReport(
    modules=("pool.attn",),
    anchor="softmax(dim=1) of float32[8, 197, 12]",
    nearest="softmax_matmul",
    stopped_at="the product with v",
    reason=Reason(code=Code.SOFTMAX_AXIS, rule="the softmax runs over the keys", observed="axis 1 of 3"),
    source="vit.py:88 in forward",
)
REPORT = Report(
    graph="0/0", target=TARGET, sites=(SITE,), misses=(MISS,), seconds=(("mirror", 0.121), ("match", 0.0042))
)

REPORT_TEXT = """\
attn_compiler · graph 0/0 · cuda sm90, cuDNN 9.19.0, torch 2.13.0
32 attention sites of 1 kind, 1 miss
passes took 125 ms: mirror 121 ms

[1] model.layers.{0..31}.self_attn ×32
    lowering  sdpa
    pattern   softmax_matmul
    mask      causal
    score     scale 0.125, softcap 50
    dtype     bfloat16, needs grad
    q, k, v   q    bfloat16[2, 32, 4096, 64]  strides (8388608, 64, 2048, 1)
              k,v  bfloat16[2, 8, 4096, 64]   strides (2097152, 64, 512, 1)
    copies    v, 33.6 MB: its last stride is 2, the kernel reads 1
              k, size known at run time: an expanded axis
    notes     repeat_kv ×4 taken out
    refused   cudnn_fp8
                rule: an FP8 recipe is given; observed: none (AC401)
                remedy: pass options={'fp8': Fp8Recipe()}
                rule: the kernel has no softcap; observed: softcap 50 (AC301)
              cudnn, flash
                rule: the kernel has no softcap; observed: softcap 50 (AC301)

[miss] pool.attn
    anchor   softmax(dim=1) of float32[8, 197, 12]
    nearest  softmax_matmul, stopped at the product with v
    source   vit.py:88 in forward
    why      rule: the softmax runs over the keys; observed: axis 1 of 3 (AC503)"""


def test_report_text() -> None:
    assert str(REPORT) == REPORT_TEXT


def test_a_graph_without_attention_says_so() -> None:
    text = str(Report(graph="1/0", target=TARGET))
    assert text.splitlines() == [
        f"attn_compiler · graph 1/0 · {TARGET}",
        "0 sites: no attention was found in this graph",
    ]


def test_a_failure_is_shown_and_is_not_a_graph_without_attention() -> None:
    failed = Report(graph="1/0", target=TARGET, failure="KeyError in pass 'lower'")
    assert "FAILED, the graph was left as it was: KeyError in pass 'lower'" in str(failed)
    merged = str(Reports((failed, Report(graph="2/0", target=TARGET))))
    assert "FAILED, the graph was left as it was" in merged
    assert "1 graph without attention: 2/0" in merged
    assert "total: 2 graphs, 0 attention sites, 1 FAILED, 0 ms in passes" in merged


def test_a_traceback_in_a_failure_is_indented_under_its_message() -> None:
    failed = Report(graph="1/0", target=TARGET, failure="it broke\nTraceback:\n  File x\nKeyError: 1\n")
    assert str(failed).splitlines()[2:] == [
        "FAILED, the graph was left as it was: it broke",
        "    Traceback:",
        "      File x",
        "    KeyError: 1",
    ]


def test_reports_text_merges_graphs_and_totals() -> None:
    empty = [Report(graph=f"{i}/0", target=TARGET) for i in (1, 2)]
    assert str(Reports((empty[0], REPORT, empty[1]))) == (
        f"{REPORT_TEXT}\n\n2 graphs without attention: 1/0, 2/0\n\n"
        "total: 3 graphs, 32 attention sites (sdpa 32), 1 miss, 125 ms in passes"
    )


def test_many_graphs_without_attention_are_one_line() -> None:
    empty = [Report(graph=f"{i}/0", target=TARGET) for i in range(25)]
    told = "25 graphs without attention: 0/0, 1/0, 2/0, 3/0, 4/0, 5/0, 6/0, 7/0, and 17 more"
    assert told in str(Reports((REPORT, *empty))).splitlines()
    assert wording.without_attention(empty[:8]).endswith("6/0, 7/0")


def test_reports_of_one_graph_read_like_the_report() -> None:
    assert str(Reports((REPORT,))) == REPORT_TEXT


def test_reports_of_no_graph() -> None:
    text = str(Reports())
    assert text.startswith("attn_compiler: no graph was compiled")
    # What people do wrong with launchers, and nobody else tells them.
    assert 'model.compile(backend="attn_compiler")' in text


def test_unusual_dtypes_symbolic_sizes_and_returned_weights_are_shown() -> None:
    q = TensorSpec(shape=("s0", 32, "s1", 64), strides=("2048*s1", 64, 2048, 1), dtype="float16")
    spec = dataclasses.replace(SPEC, q=q, out_dtype="float32", needs_grad=False, returns_weights=True, lse="read")
    text = str(dataclasses.replace(REPORT, sites=(dataclasses.replace(SITE, spec=spec),)))
    assert "float16, goes on as float32, no grad, returns the weights, its logsumexp is read" in " ".join(text.split())
    assert "float16[s0, 32, s1, 64]" in text
    assert "strides (2048*s1, 64, 2048, 1)" in text


def _rows_of_mask(mask: masks.MaskSpec) -> list[str]:
    site = dataclasses.replace(SITE, spec=dataclasses.replace(SPEC, mask=mask))
    lines = [line.strip() for line in str(dataclasses.replace(REPORT, sites=(site,), misses=())).splitlines()]
    return lines[
        lines.index("pattern   softmax_matmul") + 1 : next(i for i, x in enumerate(lines) if x.startswith("score"))
    ]


def test_a_proved_mask_is_shown_in_words_and_as_a_formula() -> None:
    padding = masks.KeyPadding(condition=ix.as_bool(ix.Load("attention_mask", (ix.Index("b"), ix.Index("k")), "int")))
    proved = masks.MaskSpec(kinds=(masks.Causal(), padding), dense=masks.Dense(shape=(2, 1, 8, 8), dtype="bool"))
    assert _rows_of_mask(proved) == [
        "mask      causal ∧ key padding attention_mask[b, k] (proved), as dense bool[2, 1, 8,",
        "8]",
        "formula   k <= q ∧ attention_mask[b, k] ≠ 0",
    ]


def test_a_mask_that_stays_dense_says_why() -> None:
    dense = masks.Dense(shape=(1, 1, 8, 8), dtype="float32")
    assert _rows_of_mask(masks.MaskSpec(dense=dense, reason="bias adds more than masking: x[q, k]")) == [
        "mask      dense additive float32[1, 1, 8, 8]",
        "unproved  bias adds more than masking: x[q, k]",
    ]


def test_nothing_is_lost_when_lines_are_broken() -> None:
    path = "encoder." + "x" * 150
    observed = " ".join(f"word{i}" for i in range(60))
    site = dataclasses.replace(
        SITE,
        modules=(path,),
        decision=Decision(
            lowering="sdpa",
            refusals=(Refusal(lowering="cudnn", reasons=(Reason(code=Code.DTYPE, rule="r", observed=observed),)),),
        ),
    )
    text = str(Report(graph="0/0", target=TARGET, sites=(site,)))
    assert max(map(len, text.splitlines())) <= render.WIDTH
    assert path in text.replace("\n", "")
    assert re.findall(r"word\d+", text) == observed.split()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_plain_text_never_has_colours_or_markup(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("COLUMNS", "40")
    odd = dataclasses.replace(SITE, pattern="[bold]not markup[/bold] :warning:", notes=("[red]",))
    text = str(Report(graph="0/0", target=TARGET, sites=(odd,)))
    assert "\x1b" not in text
    assert "[bold]not markup[/bold] :warning:" in text
    assert "notes     [red]" in text
    assert max(map(len, text.splitlines())) > 40


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["attn"], ["attn"]),
        ([""], ["(the model itself)"]),
        (["attn", "attn"], ["attn ×2"]),
        (["l.0.a", "l.1.a"], ["l.{0,1}.a ×2"]),
        ([f"l.{i}.a" for i in range(0, 12, 2)], ["l.{0,2,..,10}.a ×6"]),
        ([f"l.{i}.a" for i in (0, 1, 2, 3, 4, 6, 7, 8, 10)], ["l.{0..4,6..8,10}.a ×9"]),
        ([f"l.{i}.b.{j}.a" for i in range(4) for j in range(2)], ["l.{0..3}.b.{0,1}.a ×8"]),
        (["l.0.b.0", "l.0.b.1", "l.1.b.0"], ["l.0.b.{0,1} ×2", "l.1.b.0"]),
        (["layers[0].attn2", "layers[1].attn2"], ["layers[{0,1}].attn2 ×2"]),
        (["l.0.a", "l.0.c", "l.1.a", "l.1.c"], ["l.{0,1}.a ×2", "l.{0,1}.c ×2"]),
        (["l.0.a", "l.0.a", "l.1.a"], ["l.0.a ×2", "l.1.a"]),
        (["l.00.a", "l.0.a"], ["l.00.a", "l.0.a"]),
    ],
)
def test_abbreviate(paths: list[str], expected: list[str]) -> None:
    assert render.abbreviate(paths) == expected


def _expand(line: str) -> Counter[str]:
    """What an abbreviation stands for, read as a person would: an oracle with its own parser."""
    path, _, times = line.partition(" ×")
    choices = []
    for piece in re.split(r"(\{[^}]*\})", path):
        if not piece.startswith("{"):
            choices.append([piece])
            continue
        numbers: list[int] = []
        items = piece[1:-1].split(",")
        if ".." in items:
            first, second, last = int(items[0]), int(items[1]), int(items[3])
            numbers = list(range(first, last + 1, second - first))
        else:
            for item in items:
                low, _, high = item.partition("..")
                numbers += range(int(low), int(high or low) + 1)
        choices.append([str(number) for number in numbers])
    paths = ["".join(parts) for parts in itertools.product(*choices)]
    repeats, rest = divmod(int(times or 1), len(paths))
    assert rest == 0
    return Counter(dict.fromkeys(paths, repeats))


@given(
    st.lists(
        st.builds(
            "{}.{}.{}".format,
            st.sampled_from(["a.3", "b", "c2"]),
            st.integers(0, 12),
            st.one_of(st.integers(0, 3), st.sampled_from(["q", "1x"])),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_abbreviations_stand_for_exactly_the_paths(paths: list[str]) -> None:
    assert sum((_expand(line) for line in render.abbreviate(paths)), Counter()) == Counter(paths)


def test_a_long_mask_loses_its_middle() -> None:
    """A mask of 64 documents fills a page otherwise; the JSON has it whole."""
    several = [
        ix.apply("and", ix.compare("==", ix.Index("k"), ix.Const(i)), ix.compare("==", ix.Index("q"), ix.Const(2 * i)))
        for i in range(64)
    ]
    kind = masks.Formula(condition=ix.apply("or", *several))
    spec = dataclasses.replace(SPEC, mask=masks.MaskSpec(kinds=(masks.Causal(), kind), flag=masks.Flag.CALLED))
    report = dataclasses.replace(REPORT, sites=(dataclasses.replace(SITE, spec=spec),))
    shown = " ".join(str(report).split())
    assert len(spec.mask.words) > 1000
    assert "characters left out, which the JSON has" in shown
    assert shown.count("∧") < 100
    assert " ".join(spec.mask.words[-30:].split()) in shown
    assert spec.mask.words in str(report.to_dict()["sites"][0]["mask"])


def test_kernels_that_were_compiled_have_a_line_of_seconds() -> None:
    report = dataclasses.replace(REPORT, kernels=(("attention_forward", 1.82), ("attention_grad_q", 0.004)))
    lines = str(report).splitlines()
    passes = next(i for i, line in enumerate(lines) if line.startswith("passes took"))
    assert lines[passes + 1] == "kernels compiled: attention_forward 1.82 s, attention_grad_q 4 ms"
    assert "kernels compiled" not in str(REPORT)


def test_lengths_that_are_not_known_have_a_row() -> None:
    evidence = Evidence(
        order=("triton",), why="as it was measured", since="2026-11-27", length="any, chosen as for 4096"
    )
    of_any = dataclasses.replace(SITE, evidence=evidence)
    text = str(dataclasses.replace(REPORT, sites=(of_any,)))
    assert re.search(r"length +any, chosen as for 4096", text)
    assert "chosen as for" not in str(REPORT)


def _labels(function: Callable[..., Any]) -> set[str]:
    """The first of each pair that a function writes, where it is a word."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
    firsts = [node.elts[0] for node in nodes if isinstance(node, ast.Tuple) and len(node.elts) == 2]
    found = [x.value for first in firsts for x in ast.walk(first) if isinstance(x, ast.Constant)]
    return {label for label in found if isinstance(label, str) and label}


def test_each_row_of_a_block_is_explained() -> None:
    labels = _labels(render._site_block) | _labels(render._mask_rows)
    assert {"lowering", "copies", "formula", "length"} <= labels
    page = (Path(__file__).parents[2] / "docs/reading.md").read_text(encoding="utf-8")
    assert [label for label in sorted(labels) if f"| `{label}` |" not in page] == []
