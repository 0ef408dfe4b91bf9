"""Models with layers of linear attention: their functions are taken, in training, in prompts and in decoding, and are told where not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_compiler
from attn_compiler.reasons.codes import Code
from tests.hf.linear_families import FAMILIES, FAMILY, VOCAB, LinearFamily
from tests.hf.linear_scenarios import OPTIONS, SCENARIOS, show
from tests.hf.packages import import_package
from tests.thinned import further

_DTYPES = (torch.float32, torch.float64)
_DAILY = [
    ("qwen3_next", "padded left", torch.float32),
    ("qwen3_5", "padded right", torch.float64),
    ("bamba", "decode", torch.float32),
    ("qwen3_next", "lengths", torch.float32),
    ("mamba2", "generate", torch.float32),
]
#: what CI runs of every family but those that compile for minutes; `python -m tests.hf.linear_table` runs all
_IN_CI = [("padded left", torch.float32), ("padded right", torch.float64), ("decode", torch.float64)]
_LONG = ("qwen4_exp", "glm5_next")


def _case(name: str, scenario: str, dtype: torch.dtype) -> Any:
    is_in_ci = (scenario, dtype) in _IN_CI and name not in _LONG
    mark = pytest.mark.further if is_in_ci else pytest.mark.slow
    marks = () if (name, scenario, dtype) in _DAILY else mark
    return pytest.param(name, scenario, dtype, marks=marks, id=f"{name}-{scenario}-{dtype}")


_CASES = [_case(*case) for case in itertools.product(FAMILY, SCENARIOS, _DTYPES)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


def _family(name: str) -> LinearFamily:
    family = FAMILY[name]
    if not hasattr(import_package("transformers"), family.model):
        pytest.skip(f"this release of transformers has no {family.model}")
    return family


@pytest.mark.parametrize(("name", "scenario", "dtype"), _CASES)
def test_every_layer_is_taken_and_gives_what_eager_gives(
    name: str, scenario: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    shown = show(_family(name), scenario, dtype, tmp_path)
    assert shown.is_right(dtype), shown


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_the_report_names_the_layers(name: str) -> None:
    family = _family(name)
    run = torch.compile(family.build(), backend="attn_compiler", options=OPTIONS, fullgraph=True)
    with torch.no_grad():
        run(_ids(), use_cache=False)
    (report,) = attn_compiler.reports()
    assert (report.num_linear, report.num_misses, report.num_sites) == (family.linear, 0, family.sites)
    assert [path.partition("layers.")[2].partition(".")[0] for path in report.linear[0].modules] == ["0", "1"]


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))


_TOLD = {
    "gated delta rule": ("torch_chunk_gated_delta_rule", "flash-linear-attention"),
    "Kimi's delta attention": ("chunk_kimi_delta_attention", "flash-linear-attention"),
    "state space": ("mamba2_chunk_scan", "mamba-ssm"),
}


@pytest.mark.parametrize(
    "name", further([one.name for one in FAMILIES], daily=["qwen3_5", "kimi_linear", "nemotron_h"])
)
def test_layers_that_are_not_taken_are_told(name: str) -> None:
    family = _family(name)
    model, ids = family.build(), _ids()
    run = torch.compile(model, backend="attn_compiler", options={**OPTIONS, "lowering": "untouched"})
    with torch.no_grad():
        found, wanted = run(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    reports = attn_compiler.reports()
    misses = [miss for report in reports for miss in report.misses if miss.reason.code == Code.LINEAR_ATTENTION]
    assert reports.num_linear == 0
    function, remedy = _TOLD[family.kind]
    assert {miss.anchor for miss in misses} == {function}
    assert all(remedy in str(miss.reason.remedy) for miss in misses)
    if len(reports) == 1:
        # GLM-5-next's own function breaks the graph, where a lowering in its place does not. Paths are those within a graph then.
        paths = [path.partition("layers.")[2].partition(".")[0] for miss in misses for path in miss.modules]
        assert paths == ["0", "1"]
