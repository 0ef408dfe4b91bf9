"""Facts of a report in its three outputs: table, JSON and page have each one. The words are golden, since a person reads them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.reasons import pages
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Faster, Reason, Refusal
from attn_compiler.reporting import columns, render
from attn_compiler.reporting.columns import Column
from attn_compiler.reporting.facts import GraphReport, LinearReport, MissReport, SiteReport, UnpadReport
from attn_compiler.reporting.page import page
from attn_compiler.reporting.report import Report
from attn_compiler.spec import masks, scores
from attn_compiler.spec.added_scores import Alibi
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from tests.reporting.making import EVIDENCE, INSTALL, LINEAR, REPORT, SITE, SPEC, UNPAD, with_site
from tests.reporting.page.reading import Element, read

EVERYTHING = dataclasses.replace(REPORT, linear=(LINEAR,), unpad=UNPAD)

PADDING = """\
padding: left out
  0 at padding: last_hidden_state, pooled
  asked at each call: rows begin with a token
  notes: a note
  real tokens of the last batches: 50%, 25%
  padding was computed: 1 time, since not: the first key is real"""

TEXT = f"""\
attn_compiler · graph 0/0 · cuda sm90, cuDNN 9.19.0, torch 2.13.0
5 attention sites of 1 kind, 2 layers of linear attention (linear_reference 2), 1 miss
passes took 254 ms: mirror 250 ms
kernels compiled: attention_forward 1.50 s
{PADDING}

[1] model.layers.0-4.self_attn ×5
    lowering  hopper
    pattern   sdpa call
    mask      causal ∧ key padding attention_mask[b, k] (proved)
    formula   k <= q ∧ attention_mask[b, k] ≠ 0
    score     scale 0.125, softcap 50
    dtype     bfloat16, needs grad
    q, k, v   q    bfloat16[2, 8, 1024, 64]  strides (524288, 64, 512, 1)
              k,v  bfloat16[2, 2, 1024, 64]  strides (131072, 64, 128, 1)
    source    modeling_llama.py:120
    copies    v, 1.0 MB: its last stride is 2, the kernel reads 1
    notes     K/V read without their 4-fold repetition
    refused   fa4
                rule: flash-attn-4 is installed; observed: none (AC105)
                remedy: pip install 'attn_compiler[fa4]'
                rule: the kernel has no softcap; observed: softcap 50 (AC301)
                remedy: on a GPU, leave the choice to the compiler: our Triton kernels
                apply the softcap
              cudnn, flash
                rule: the kernel has no softcap; observed: softcap 50 (AC301)
                remedy: on a GPU, leave the choice to the compiler: our Triton kernels
                apply the softcap

[linear 1] mixer.0-1 ×2
    lowering  linear_reference
    computes  gated delta rule, 4 heads of 5/7, 2 of q and k, decay a head, with a state
    function  models:delta, proved
    dtype     float32, no grad
    length    90
    refused   linear
                rule: flash-attn-4 is installed; observed: none (AC105)
                remedy: pip install 'attn_compiler[fa4]'

[miss] pool.attn
    anchor   softmax(dim=1)
    nearest  softmax_matmul, stopped at the product with v, vit.py:88
    source   vit.py:87
    why      rule: the softmax runs over the keys; observed: axis 1 of 3 (AC503)
             remedy: softmax(-1)"""

BRIEF = f"""\
attn_compiler on cuda sm90, cuDNN 9.19.0, torch 2.13.0
graph 0/0: 5 attention sites of 1 kind, 2 layers of linear attention (linear_reference
2), 1 miss; passes took 254 ms, 25% of 1.00 s to compile it
    slow: mirror 250 ms
{PADDING}
[1] model.layers.0-4.self_attn ×5 · hopper · about 0.25 ms a call, 0.75 by sdpa_cudnn ·
modeling_llama.py:120
    mask    causal ∧ key padding attention_mask[b, k] (proved)
    why     measured, 2026-11-23: times the fastest: hopper 1.00, triton 1.37; refused:
            fa4 (AC105, AC301), cudnn and flash (AC301)
    copies  v 1.0 MB: its last stride is 2, the kernel reads 1
[linear 1] mixer.0-1 ×2 · linear_reference
    computes  gated delta rule, 4 heads of 5/7, 2 of q and k, decay a head, with a state
    why       the only one on a CPU
[miss] pool.attn · softmax(dim=1) · vit.py:87
    why  rule: the softmax runs over the keys; observed: axis 1 of 3 (AC503)
         remedy: softmax(-1)"""

#: the JSON's values that are no words; keys of words are in KEYS alone
NOT_INSTALLED = '{"code": "AC105", "rule": "flash-attn-4 is installed", "observed": "none", "remedy": "pip install \'attn_compiler[fa4]\'"}'
CAPPED = (
    '{"code": "AC301", "rule": "the kernel has no softcap", "observed": "softcap 50", "remedy": '
    f'"{pages.advice(Code.SOFTCAP)}"}}'
)
JSON: list[dict[str, Any]] = json.loads(f"""[
{{
 "modules": ["model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.2.self_attn",
             "model.layers.3.self_attn", "model.layers.4.self_attn"],
 "spec": {SPEC.to_text()}, "faster": null, "mask_unproved": null, "reads_pairs": false, "proved_as_dense": false, "score_added": null,
 "refusals": [{{"lowering": "fa4", "reasons": [{NOT_INSTALLED}, {CAPPED}], "when_built": false}},
              {{"lowering": "cudnn", "reasons": [{CAPPED}], "when_built": false}},
              {{"lowering": "flash", "reasons": [{CAPPED}], "when_built": false}}],
 "copies": [{{"operand": "v", "bytes": 1048576, "why": "its last stride is 2, the kernel reads 1", "remedy": null}}],
 "remedies": [],
 "notes": ["K/V read without their 4-fold repetition"],
 "evidence": {{"order": ["fa4", "hopper", "triton"], "why": "times the fastest: hopper 1.00, triton 1.37", "since": "2026-11-23",
               "measured": true, "length": null}},
 "estimate": {{"milliseconds": 0.25, "other": "sdpa_cudnn", "other_milliseconds": 0.75, "like": "bfloat16 and S 8192, H200",
               "since": "2026-11-22"}}
}}, {{
 "modules": ["mixer.0", "mixer.1"], "function": "models:delta", "evidence": "the only one on a CPU",
 "spec": {json.dumps(dataclasses.asdict(LINEAR.spec))},
 "refusals": [{{"lowering": "linear", "reasons": [{NOT_INSTALLED}], "when_built": false}}]
}}, {{
 "modules": ["pool.attn"], "nearest": "softmax_matmul", "stopped_at": "the product with v, vit.py:88",
 "reason": {{"code": "AC503", "rule": "the softmax runs over the keys", "observed": "axis 1 of 3", "remedy": "softmax(-1)"}}
}}]""")
#: never one less: tools read them
KEYS = [
    "modules pattern spec mask mask_formula mask_unproved reads_pairs proved_as_dense score score_added "
    "lowering refusals copies notes source evidence estimate faster remedies",
    "modules computes function spec lowering refusals evidence",
    "modules anchor nearest stopped_at reason source",
]
GRAPH: dict[str, Any] = json.loads("""{
 "version": 1, "graph": "0/0", "model": null, "target": "cuda sm90, cuDNN 9.19.0, torch 2.13.0", "num_sites": 5, "num_misses": 1,
 "num_linear": 2,
 "seconds": [{"pass": "mirror", "seconds": 0.25}, {"pass": "match", "seconds": 0.0042}],
 "kernels": [{"kernel": "attention_forward", "seconds": 1.5}],
 "failure": null, "faults": [], "from_cache": false, "not_kept": null, "untried": [], "dumped": null, "compiled_in": null,
 "unpad": {"kept": null, "shares": false, "module": null, "source": null, "zeroed": ["last_hidden_state", "pooled"],
           "facts": ["rows begin with a token"], "notes": ["a note"],
           "last": [{"fill": 0.5, "number": 32, "positions": 64, "groups": null, "failed": []},
                    {"fill": 0.25, "number": 16, "positions": 64, "groups": null, "failed": ["the first key is real"]}]}
}""")

#: the page's facts that the table has not, or not in these words
ON_PAGE = [
    {
        "Chosen": "hopper",
        "Why": "The first that does not refuse, of fa4, hopper, triton."
        "Measured, 2026-11-23: times the fastest: hopper 1.00, triton 1.37",
        "Time": "About 0.25 ms a call, forward and backward. PyTorch's sdpa_cudnn takes about 0.75 ms: 0.5 ms gained, 2.5 ms in 5 calls."
        "An estimate from speeds that were measured on 2026-11-22, bfloat16 and S 8192, H200. This model was not timed.",
    },
    {"Why": "the only one on a CPU"},
    {
        "What has to hold": "the softmax runs over the keys",
        "What was seen": "axis 1 of 3",
        "Remedy": "softmax(-1)",
        "Code": "AC503",
    },
]
LISTS: list[tuple[Column[Any], ...]] = [columns.SITE, columns.LINEAR, columns.MISS]
OPERANDS = [
    ["q", "bfloat16", "2, 8, 1024, 64", "524288, 64, 512, 1", "2.1 MB"],
    ["k, v", "bfloat16", "2, 2, 1024, 64", "131072, 64, 128, 1", "524.3 kB"],
]
NO_SOFTCAP = ["the kernel has no softcap", "softcap 50", pages.advice(Code.SOFTCAP), "AC301"]
REFUSED = [["fa4", "flash-attn-4 is installed", "none", INSTALL, "AC105"], ["fa4", *NO_SOFTCAP]]


def _cards(report: Report) -> list[Element]:
    return read(page((report,))).all("article")


def _facts(card: Element) -> dict[str, str]:
    return {name.text: value.text for name, value in zip(card.all("dt"), card.all("dd"), strict=True)}


def _rows(card: Element, caption: str) -> list[list[str]]:
    (table,) = [each for each in card.all("table") if each.one("caption").text == caption]
    return [[cell.text for cell in row.inside] for row in table.one("tbody").inside]


def _of_row(text: str, label: str) -> str:
    """Its value in the first block of a table, in one line."""
    found = re.search(rf"^    {re.escape(label)}  +(.*?)(?=^    \S|^$|\Z)", text, re.MULTILINE | re.DOTALL)
    return "" if found is None else " ".join(found[1].split())


def _blocks() -> list[str]:
    return re.split(r"\n\n(?=\[)", TEXT)[1:]


def test_the_table_has_everything() -> None:
    assert EVERYTHING.details() == TEXT


def test_the_short_report_has_what_decides() -> None:
    assert str(dataclasses.replace(EVERYTHING, compiled_in=1.0)) == BRIEF
    quick = str(dataclasses.replace(EVERYTHING, compiled_in=10.0))
    assert "passes took 254 ms, 3% of 10.00 s" in quick
    assert "slow:" not in quick
    assert "passes took 254 ms\npadding" in str(EVERYTHING)


def test_a_site_that_no_kernel_takes_says_all_and_what_helps() -> None:
    copy = dataclasses.replace(SITE.copies[0], operand="k", remedy="use_cache=False")
    left = dataclasses.replace(SITE.decision, lowering="untouched")
    shown = str(with_site(decision=left, copies=(copy, *SITE.copies), remedies=("use_cache=False",), faster=FASTER))
    assert _of_row(shown, "copies") == "k 1.0 MB, v 1.0 MB: its last stride is 2, the kernel reads 1"
    assert _of_row(shown, "remedy") == f"use_cache=False {INSTALL} {pages.advice(Code.SOFTCAP)}"
    assert _of_row(shown, "faster").startswith("fa4 was 1.25 times as fast")
    assert "refused: fa4 (flash-attn-4 is installed, observed none (AC105); the kernel" in _of_row(shown, "why")


def test_six_kinds_fit_a_screen() -> None:
    masks_ = [dataclasses.replace(SPEC, mask=masks.MaskSpec(dense=DENSE, reason=f"it adds {n}")) for n in range(3)]
    changed = [{"spec": spec} for spec in masks_] + [{"faster": FASTER}, {"reads_pairs": True}, {"copies": ()}]
    sites = tuple(dataclasses.replace(SITE, **each) for each in changed)  # type: ignore[arg-type]
    report = Report(graph="0/0", target=REPORT.target, sites=sites, misses=REPORT.misses, seconds=REPORT.seconds)
    empty = [Report(graph=f"{n}/0", target=REPORT.target) for n in range(1, 20)]
    lines = render.plain(render.brief_view((report, *empty)), width=120).splitlines()
    assert [line[:3] for line in lines if line.startswith("[")] == ["[1]", "[2]", "[3]", "[4]", "[5]", "[6]", "[mi"]
    assert len(lines) <= 40


def test_the_json_has_everything_and_the_tables_words() -> None:
    data = json.loads(EVERYTHING.to_json())
    assert data == EVERYTHING.to_dict()
    records = [*data.pop("sites"), *data.pop("linear"), *data.pop("misses")]
    assert data == GRAPH
    for record, keys, found, listed, block in zip(records, KEYS, JSON, LISTS, _blocks(), strict=True):
        assert sorted(record) == sorted(keys.split())
        words = {column.key: _of_row(block, column.label) for column in listed if column.key in record.keys() - found}
        assert record == words | found


def test_the_page_has_everything_in_the_tables_words() -> None:
    cards = _cards(EVERYTHING)
    for card, own, listed, block in zip(cards, ON_PAGE, LISTS, _blocks(), strict=True):
        rows = {column.title: _of_row(block, column.label) for column in listed if column.label and column.title}
        assert _facts(card) == own | {title: words for title, words in rows.items() if words}
    assert _rows(cards[0], "What it reads") == OPERANDS
    assert _rows(cards[0], "Copies, 1.0 MB a call") == [["v", "1.0 MB", "its last stride is 2, the kernel reads 1"]]
    assert _rows(cards[0], "Why each was not taken") == [*REFUSED, ["cudnn, flash", *NO_SOFTCAP]]
    assert _rows(cards[1], "Why each was not taken") == [["linear", *REFUSED[0][1:]]]


DENSE = masks.Dense(shape=(1, 1, 8, 8), dtype="float32")
UNREAD = masks.MaskSpec(dense=DENSE, reason="it adds <x>[q, k]")
UNUSUAL = {"q": dataclasses.replace(SPEC.q, dtype="float16"), "out_dtype": "float32", "needs_grad": False}
FASTER = Faster(
    lowering="fa4", distribution="flash-attn-4", install=INSTALL, speed=1.25, why="of 3", since="2026-11-01"
)
ALIBI = Alibi(slopes=ix.Load("slopes", (ix.Index("h"),), "float"), position=ix.Index("k"))


def test_the_short_report_has_what_is_added_and_what_an_option_did() -> None:
    score = scores.ScoreSpec(scale=0.125, proved=(ALIBI,), by_highest=True)
    told = ("context parallel: ring over 2 ranks", "checkpoint: kept", "fp8_recipe: ignored")
    text = " ".join(str(with_site(spec={"score": score}, notes=(*SITE.notes, *told))).split())
    assert f"added {ALIBI.words}, whose highest number masks the others (proved) " in text
    assert f"notes {' '.join(told)}" in text
    assert "repetition" not in text


ANY_LENGTH = dataclasses.replace(EVIDENCE, length="any, chosen as for 4096")
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "unproved": ({"spec": {"mask": UNREAD}}, "it adds <x>[q, k]"),
    "mask": ({"spec": {"mask": UNREAD}}, "dense additive float32[1, 1, 8, 8]"),
    "read as": ({"reads_pairs": True}, "proved, read as a dense tensor: bool[2, 1, 1024, 1024]"),
    "added": ({"spec": {"score": scores.ScoreSpec(scale=1.0, proved=(ALIBI,))}}, "ALiBi slopes[h] · k"),
    "dtype": (
        {"spec": {**UNUSUAL, "returns_weights": True, "lse": "read"}},
        "float16, goes on as float32, no grad, returns the weights, its logsumexp is read",
    ),
    "length": ({"evidence": ANY_LENGTH}, "any, chosen as for 4096"),
    "faster": ({"faster": FASTER}, f"fa4 was 1.25 times as fast on such sites (2026-11-01; of 3): {INSTALL}"),
}


@pytest.mark.parametrize("label", SAID)
def test_a_fact_is_the_same_in_each_output(label: str) -> None:
    changes, words = SAID[label]
    report = with_site(**changes)
    (column,) = [column for column in columns.SITE if column.label == label]
    assert _of_row(report.details(), label) == words
    assert _facts(_cards(report)[0])[column.title] == words
    (row,) = report.to_dict()["sites"]
    assert row.get(column.key, words) in (words, dataclasses.asdict(FASTER), True)


def test_facts_that_a_site_lacks_have_no_row_and_a_null() -> None:
    bare = dataclasses.replace(SITE, copies=(), notes=(), source=None, evidence=None, estimate=None)
    report = dataclasses.replace(REPORT, sites=(bare,), misses=())
    assert not re.search(
        "copies|notes|source|length|faster|added|unproved|read as", report.details().partition("[1]")[2]
    )
    card = _cards(report)[0]
    assert not {"Notes", "Line of the model", "Length", "Added to scores"} & _facts(card).keys()
    assert "No operand is copied." in card.text
    (row,) = report.to_dict()["sites"]
    assert (row["notes"], row["copies"], row["source"], row["evidence"], row["estimate"]) == ([], [], None, None, None)


def test_several_lines_of_a_fact() -> None:
    copies = (*SITE.copies, Copy(operand="k", bytes=None, why="an expanded axis"))
    report = with_site(notes=("one", "[red]two"), copies=copies)
    assert _of_row(report.details(), "notes") == "one [red]two"
    assert _of_row(report.details(), "copies").endswith("reads 1 k, size known at run time: an expanded axis")
    card = _cards(report)[0]
    assert [item.text for item in card.one("dl").all("li")] == ["one", "[red]two"]
    assert _rows(card, "Copies")[1] == ["k", "size known at run time", "an expanded axis"]


def test_symbolic_sizes() -> None:
    q = TensorSpec(shape=("s0", 8, "s1", 64), strides=("512*s1", 64, 512, 1), dtype="bfloat16", requires_grad=True)
    report = with_site(spec={"q": q})
    assert "q bfloat16[s0, 8, s1, 64] strides (512*s1, 64, 512, 1)" in _of_row(report.details(), "q, k, v")
    assert _rows(_cards(report)[0], "What it reads")[0][-1] == "size known at run time"
    assert AttentionSpec.from_text(json.dumps(report.to_dict()["sites"][0]["spec"])) == report.sites[0].spec


def test_a_long_mask_loses_its_middle_in_the_table_and_is_folded_on_the_page() -> None:
    """A mask of 64 documents fills a page otherwise; the JSON has it whole."""
    several = [
        ix.apply("and", ix.compare("==", ix.Index("k"), ix.Const(i)), ix.compare("==", ix.Index("q"), ix.Const(2 * i)))
        for i in range(64)
    ]
    mask = masks.MaskSpec(kinds=(masks.Formula(condition=ix.apply("or", *several)),), dense=DENSE)
    report = with_site(spec={"mask": mask})
    shown = _of_row(report.details(), "mask")
    assert len(mask.words) > 1000
    assert "characters left out, which the JSON has" in shown
    assert len(shown) < 600
    assert shown.endswith(" ".join(mask.words[-30:].split()))
    assert report.to_dict()["sites"][0]["mask"] == mask.words
    assert mask.words in [value.all("span")[0].text for value in _cards(report)[0].all("dd") if value.all("details")]


@pytest.mark.parametrize(
    ("record", "listed", "elsewhere"),
    [
        (GraphReport, columns.GRAPH, set()),
        (SiteReport, columns.SITE, {"decision", "texts", "target", "options"}),
        (LinearReport, columns.LINEAR, {"decision"}),
        (MissReport, columns.MISS, set()),
        (UnpadReport, columns.UNPAD, {"steps"}),
        (Reason, columns.REASON, set()),
    ],
)
def test_every_field_of_a_record_is_a_column(
    record: type[Any], listed: tuple[Column[Any], ...], elsewhere: set[str]
) -> None:
    keys = [column.key for column in listed if column.key]
    assert len(set(keys)) == len(keys)
    assert {field.name for field in dataclasses.fields(record)} - set(keys) == elsewhere


def test_each_row_of_a_block_is_explained() -> None:
    docs = (Path(__file__).parents[2] / "docs/reading.md").read_text(encoding="utf-8")
    labels = {column.label for column in columns.SITE} - {""}
    assert {"lowering", "copies", "formula", "length"} <= labels
    assert [label for label in sorted(labels) if f"| `{label}` |" not in docs] == []


def test_nothing_is_lost_when_lines_are_broken() -> None:
    path = "encoder." + "x" * 150
    observed = " ".join(f"word{i}" for i in range(60))
    refusal = Refusal(lowering="cudnn", reasons=(Reason(code=Code.DTYPE, rule="r", observed=observed),))
    text = with_site(modules=(path,), decision=Decision(lowering="sdpa", refusals=(refusal,))).details()
    assert max(map(len, text.splitlines())) <= render.WIDTH
    assert path in text.replace("\n", "")
    assert re.findall(r"word\d+", text) == observed.split()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_plain_text_never_has_colours_or_markup(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = with_site(pattern="[bold]not markup[/bold] :warning:", notes=("[red]",)).details()
    assert "\x1b" not in text
    assert "[bold]not markup[/bold] :warning:" in text
    assert "notes     [red]" in text
    assert max(map(len, text.splitlines())) > 40
