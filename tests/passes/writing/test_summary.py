"""The report of a graph: one row for each distinct spec, the models' own names and lines, and nothing claimed after a failure."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from attn_compiler.passes.writing import buffers, summary
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.facts import SiteReport
from tests.passes.compiling import Compiled, compiled

B, H, S, D = 2, 4, 6, 8
Tensor = torch.Tensor


class _Attention(nn.Module):
    def __init__(self, *, causal: bool = False, capped: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.causal, self.capped = causal, capped

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self._attend(q, k, v).transpose(1, 2).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.capped:
            return F.softmax(torch.tanh(q @ k.mT), -1) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class _Layer(nn.Module):
    def __init__(self, **kwargs: bool) -> None:
        super().__init__()
        self.attn = _Attention(**kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class _Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _compiled(*layers: nn.Module, **options: object) -> Compiled:
    run = compiled(_Model(*layers).eval(), **options)
    run(torch.randn(B, S, H * D))
    return run


def test_one_row_for_each_distinct_spec_in_the_order_of_the_model() -> None:
    run = _compiled(_Layer(), _Layer(causal=True), _Layer(), _Layer(capped=True))
    rows = [(site.modules, site.spec.mask.words, site.decision.lowering) for site in run.report.sites]
    assert rows == [
        (("layers.0.attn", "layers.2.attn"), "none", "sdpa_cpu_flash"),
        (("layers.1.attn",), "causal", "sdpa_cpu_flash"),
        (("layers.3.attn",), "none", "untouched"),
    ]
    assert run.report.num_sites == 4
    assert run.report.num_misses == 0


def test_a_row_is_told_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[set[str]] = []

    def row(**given: Any) -> SiteReport:
        told.append(set(given))
        return SiteReport(**given)

    monkeypatch.setattr(summary, "SiteReport", row)
    _compiled(_Layer())
    assert told == [{field.name for field in dataclasses.fields(SiteReport)}]


def test_rows_name_the_models_line() -> None:
    (site,) = _compiled(_Layer()).report.sites
    assert site.source is not None
    assert site.source.startswith("test_summary.py:")


def test_misses_name_their_modules_and_are_grouped() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x.exp(), -1)

    run = _compiled(Router(), Router())
    (miss,) = run.report.misses
    assert miss.modules == ("layers.0", "layers.1")
    assert miss.anchor == "aten.softmax.int"
    assert miss.source is not None
    assert miss.source.startswith("test_summary.py:")


def test_after_a_failure_no_site_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(buffers, "install", fail)
    with pytest.warns(AttnCompilerWarning, match="no kernel today"):
        run = _compiled(_Layer(), strict=False)
    assert run.report.num_sites == 0
    assert run.report.failure is not None
    assert "Traceback" in run.report.failure


def test_rows_of_layers_with_other_copies_are_their_own() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (H, D)).transpose(1, 2)
            keys = heads.contiguous().mT.contiguous().mT
            return F.scaled_dot_product_attention(keys, keys, keys).transpose(1, 2).flatten(2)

    run = _compiled(Turned(), _Layer())
    assert len(run.report.sites) == 2


def test_graph_and_target_are_named() -> None:
    report = _compiled(_Layer()).report
    assert report.graph == "0/0"
    assert report.target.startswith("cpu, torch ")


def test_report_goes_through_json() -> None:
    report = _compiled(_Layer(), _Layer(capped=True)).report
    parsed = json.loads(report.to_json())
    assert [site["lowering"] for site in parsed["sites"]] == ["sdpa_cpu_flash", "untouched"]
    assert parsed["sites"][1]["refusals"][0]["lowering"] == "sdpa_cpu_flash"


def test_a_kernel_that_the_model_chose_is_named() -> None:
    """Without that, the report of such a model said that it has no attention."""

    def model(q: Tensor) -> Tensor:
        options = {"BLOCK_M": 64}
        return flex_attention(flex_attention(q, q, q, kernel_options=options), q, q, kernel_options=options)

    run = compiled(model)
    q = torch.randn(1, 2, 128, 16)
    torch.testing.assert_close(run(q), model(q))
    (miss,) = run.report.misses
    assert (miss.anchor, len(miss.modules), run.report.num_sites) == ("flex_attention", 2, 0)
    assert "kernel_options BLOCK_M=64" in str(miss.reason)
