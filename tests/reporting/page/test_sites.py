"""Cards: each says what was chosen and why, and what there is to do."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.reasons.decisions import Decision, Refusal
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.page import examples, sites
from attn_compiler.spec import masks
from tests.reporting.page.making import ESTIMATE, EVIDENCE, MISS, REASON, SITE, SPEC
from tests.reporting.page.reading import Element, read


def _card(site: SiteReport = SITE) -> Element:
    return read(sites.site_card(site, "here"))


def _facts(card: Element) -> dict[str, str]:
    names, values = card.all("dt"), card.all("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def _rows(card: Element, caption: str) -> list[list[str]]:
    (table,) = [each for each in card.all("table") if each.one("caption").text == caption]
    return [[cell.text for cell in row.inside] for row in table.one("tbody").inside]


def test_everything_about_a_site_is_there() -> None:
    card = _card()
    assert card.one("h3").text == "model.layers.{0..4}.self_attn ×5 hopper"
    assert _facts(card) == {
        "Chosen": "hopper",
        "Why": "The first that does not refuse, of fa4, hopper, triton.Measured, 2026-11-23: times the fastest: hopper 1.00, triton 1.37",
        "Time": "About 0.25 ms a call, forward and backward. PyTorch's sdpa_cudnn takes about 0.75 ms: 0.5 ms gained, 2.5 ms in 5 calls."
        "An estimate from speeds that were measured on 2026-11-22, bfloat16 and S 8192, H200. This model was not timed.",
        "Line of the model": "modeling_llama.py:120",
        "Written as": "sdpa call",
        "Mask": "causal ∧ key padding attention_mask[b, k] (proved), as dense bool[2, 1, 1024, 1024]",
        "Formula": "k <= q ∧ attention_mask[b, k] ≠ 0",
        "Scores": "scale 0.125, softcap 50",
        "Computed in": "bfloat16, needs grad",
        "Notes": "K/V read without their 4-fold repetition",
    }
    assert _rows(card, "What it reads") == [
        ["q", "bfloat16", "2, 8, 1024, 64", "524288, 64, 512, 1", "2.1 MB"],
        ["k, v", "bfloat16", "2, 2, 1024, 64", "131072, 64, 128, 1", "524.3 kB"],
    ]
    assert _rows(card, "Copies, 1.0 MB a call") == [["v", "1.0 MB", "its last stride is 2, the kernel reads 1"]]
    assert _rows(card, "Why each was not taken") == [["fa4", REASON.rule, REASON.observed, REASON.remedy, REASON.code]]


def test_refusals_and_places_are_folded() -> None:
    folds = _card().all("details")
    assert [fold.one("summary").text for fold in folds] == ["Refused: 1 lowering", "All 5 places"]
    assert all("open" not in fold.attributes for fold in folds)
    assert [item.text for item in folds[1].all("li")] == [f"model.layers.{i}.self_attn" for i in range(5)]


def test_a_card_has_its_heading_for_a_name() -> None:
    article = _card().one("article")
    assert article.attributes["aria-labelledby"] == article.one("h3").attributes["id"] == "here"


def test_the_mask_is_drawn_with_an_example_that_is_said_to_be_one() -> None:
    caption = _card().one("figcaption")
    assert caption.one("ul").text.startswith("43 tiles skipped")
    assert [line.text for line in caption.all("p")] == [
        "Tiles of 128 queries × 128 keys, as a kernel that knows the mask may compute them. 24.5 % of the pairs take part.",
        "An example, since it depends on what is known at run time only: attention_mask leaves out the first 307 keys.",
    ]


def test_a_mask_that_was_not_proved_has_a_reason_in_the_drawings_place() -> None:
    mask = masks.MaskSpec(dense=SPEC.mask.dense, reason="it <adds> numbers")
    card = _card(dataclasses.replace(SITE, spec=dataclasses.replace(SPEC, mask=mask)))
    assert card.all("figure") == []
    assert "it <adds> numbers." in card.text
    assert _facts(card)["Not proved, since"] == "it <adds> numbers"


def test_a_drawing_that_fails_costs_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise ZeroDivisionError("mod by zero")

    monkeypatch.setattr(sites, "drawable", fails)
    mask = masks.MaskSpec(kinds=(masks.SlidingWindow(left=41, right=None),))
    card = _card(dataclasses.replace(SITE, spec=dataclasses.replace(SPEC, mask=mask)))
    assert "The drawing of the mask failed: ZeroDivisionError: mod by zero" in card.text
    assert _facts(card)["Chosen"] == "hopper"


def test_layers_that_share_a_mask_evaluate_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(*args: object, **kwargs: object) -> object:
        asked.append(args)
        return examples.drawable(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(sites, "drawable", counted)
    mask = masks.MaskSpec(kinds=(masks.SlidingWindow(left=43, right=None),))
    for scale in (1, 2):
        spec = dataclasses.replace(SPEC, mask=mask, needs_grad=scale == 1)
        _card(dataclasses.replace(SITE, spec=spec))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"evidence": None}, "No measured order decided"),
        ({"evidence": None, "decision": Decision(lowering="untouched")}, "No measured order decided"),
        (
            {"evidence": None, "decision": Decision(lowering="untouched", refusals=SITE.decision.refusals)},
            "Every kernel that was asked refused: 1 of 1",
        ),
        (
            {"decision": Decision(lowering="untouched", refusals=SITE.decision.refusals)},
            "Every kernel that was asked refused",
        ),
        ({"decision": Decision(lowering="untouched")}, "No kernel was asked.Measured, 2026-11-23"),
        (
            {"decision": Decision(lowering="untouched"), "evidence": dataclasses.replace(EVIDENCE, measured=False)},
            "No kernel was asked.Not measured here, 2026-11-23",
        ),
        ({"decision": Decision(lowering="hopper_fp8")}, "It is asked before all others"),
    ],
)
def test_why(changed: dict[str, object], said: str) -> None:
    assert _facts(_card(dataclasses.replace(SITE, **changed)))["Why"].startswith(said)  # type: ignore[arg-type]


def test_lengths_that_are_not_known_are_said_with_what_they_were_chosen_for() -> None:
    assert "Length" not in _facts(_card(SITE))
    of_any = dataclasses.replace(EVIDENCE, length="any, chosen as for 4096")
    assert _facts(_card(dataclasses.replace(SITE, evidence=of_any)))["Length"] == "any, chosen as for 4096"


@pytest.mark.parametrize(
    ("estimate", "said", "unsaid"),
    [
        (None, "No estimate: nothing like this site was measured", "ms"),
        (dataclasses.replace(ESTIMATE, other_milliseconds=0.1), "0.15 ms lost, 0.75 ms in 5 calls", "gained"),
        (dataclasses.replace(ESTIMATE, other=None, other_milliseconds=None), "About 0.25 ms a call", "PyTorch"),
    ],
)
def test_time(estimate: object, said: str, unsaid: str) -> None:
    time = _facts(_card(dataclasses.replace(SITE, estimate=estimate)))["Time"]  # type: ignore[arg-type]
    assert said in time
    assert unsaid not in time


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (masks.MaskSpec(kinds=(masks.Causal(),), flag=masks.Flag.READ), True),
        (masks.MaskSpec(kinds=(masks.Causal(),), flag=masks.Flag.CALLED), False),
        (masks.MaskSpec(kinds=(masks.Causal(),), reason="not read"), False),
        (SPEC.mask, False),
    ],
)
def test_pytorchs_time_is_without_the_models_mask_tensor_and_it_is_said(mask: masks.MaskSpec, said: bool) -> None:
    time = _facts(_card(dataclasses.replace(SITE, spec=dataclasses.replace(SPEC, mask=mask))))["Time"]
    assert ("with a mask tensor, as the model calls it, it takes longer" in time) == said


def test_sizes_that_are_not_known() -> None:
    q = dataclasses.replace(SPEC.q, shape=("s0", 8, 1024, 64))
    copies = (dataclasses.replace(SITE.copies[0], bytes=None),)
    card = _card(dataclasses.replace(SITE, spec=dataclasses.replace(SPEC, q=q), copies=copies))
    assert _rows(card, "What it reads")[0][-1] == "known at run time"
    assert _rows(card, "Copies")[0][1] == "known at run time"


def test_a_site_without_copies_says_so() -> None:
    assert "No operand is copied." in _card(dataclasses.replace(SITE, copies=())).text


def test_lowerings_with_one_reason_share_a_row() -> None:
    refusals = tuple(Refusal(lowering=name, reasons=(dataclasses.replace(REASON, remedy=None),)) for name in ("a", "b"))
    card = _card(dataclasses.replace(SITE, decision=Decision(lowering="hopper", refusals=refusals)))
    assert _rows(card, "Why each was not taken") == [["a, b", REASON.rule, REASON.observed, "none", REASON.code]]


def test_a_long_mask_is_folded() -> None:
    several = tuple(masks.SlidingWindow(left=n, right=None) for n in range(64))
    card = _card(dataclasses.replace(SITE, spec=dataclasses.replace(SPEC, mask=masks.MaskSpec(kinds=several))))
    assert len(card.all("dd")[3].all("details") or card.all("details")) >= 1
    assert masks.MaskSpec(kinds=several).words in card.text


def test_a_miss_has_its_place_its_reason_and_its_remedy() -> None:
    card = read(sites.miss_card(MISS, "there"))
    assert card.one("h3").text == "pool.attn miss"
    assert _facts(card) == {
        "Found": "softmax(dim=1)",
        "Stopped at": "the product with v, vit.py:88",
        "Nearest pattern": "softmax_matmul",
        "Line of the model": "vit.py:87",
        "What has to hold": "the softmax runs over the keys",
        "What was seen": "axis 1 of 3",
        "Remedy": "softmax(-1)",
        "Code": "AC503",
    }


def test_the_same_site_of_another_graph_points_to_the_first() -> None:
    card = read(sites.again_card(SITE, "here", "graph-1-site-1"))
    assert card.one("a").attributes["href"] == "#graph-1-site-1"
    assert card.one("h3").text == "model.layers.{0..4}.self_attn ×5 hopper"
    assert EVIDENCE.why not in card.text
