"""Cards: each says what was chosen and why, and what there is to do."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.reasons.decisions import Decision
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.page import examples, sites
from attn_compiler.spec import masks
from tests.reporting.making import ESTIMATE, EVIDENCE, SITE, SPEC
from tests.reporting.page.reading import Element, read


def _card(site: SiteReport = SITE) -> Element:
    return read(sites.card(site, "here", "here"))


def _facts(card: Element) -> dict[str, str]:
    names, values = card.all("dt"), card.all("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def test_refusals_and_places_are_folded() -> None:
    folds = _card().all("details")
    assert [fold.one("summary").text for fold in folds] == ["Refused: 3 lowerings", "All 5 places"]
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
            "Every kernel that was asked refused: 3 of 3",
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


def test_the_same_site_of_another_graph_points_to_the_first() -> None:
    card = read(sites.card(SITE, "here", "graph-1-site-1"))
    assert card.one("a").attributes["href"] == "#graph-1-site-1"
    assert card.one("h3").text == "model.layers.0-4.self_attn ×5 hopper"
    assert EVIDENCE.why not in card.text
