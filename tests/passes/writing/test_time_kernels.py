"""Where no row speaks for a site, the fastest of several lowerings on this machine is taken, once a machine, and the report says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_compiler
from attn_compiler.lowerings import timed
from attn_compiler.lowerings.base import Lowering
from attn_compiler.passes.writing import time_kernels
from attn_compiler.torch_private.store import Store

CAUSAL = {"is_causal": True}
_AMONG = ("sdpa_cpu_flash", "rows", "math")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sites of a CPU are timed here, though by no clock."""
    monkeypatch.setattr(timed, "lowerings_for", lambda spec, target, first: tuple(dict.fromkeys((first, *_AMONG))))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a made-up machine")
    time_kernels._KNOWN.clear()
    yield
    time_kernels._KNOWN.clear()


def timed_as(monkeypatch: pytest.MonkeyPatch, **took: float) -> list[tuple[str, ...]]:
    """Lowerings take so long. Gives what was timed."""
    asked: list[tuple[str, ...]] = []

    def measured(spec: Any, target: Any, lowerings: Sequence[Lowering], *_: Any) -> dict[str, float]:
        # What runs here runs for real.
        assert type(torch.empty(1) + 1) is Tensor
        asked.append(tuple(lowering.name for lowering in lowerings))
        return {name: took[name] for name in asked[-1] if name in took}

    monkeypatch.setattr(timed, "microseconds", measured)
    return asked


def chosen(**options: Any) -> attn_compiler.SiteReport:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **CAUSAL)

    torch._dynamo.reset()
    attn_compiler.reset()
    q, k, v = (torch.randn(2, 3, 24, 16) for _ in range(3))
    given = {"time_kernels": True, "inner": "eager", "strict": True, **options}
    found = torch.compile(attention, backend="attn_compiler", options=given)(q, k, v)
    torch.testing.assert_close(found, attention(q, k, v))
    (report,) = attn_compiler.reports()
    (site,) = report.sites
    return site


def test_the_fastest_is_taken_and_the_report_says_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed_as(monkeypatch, sdpa_cpu_flash=12.0, rows=20.0, math=9.0)
    site = chosen()
    assert [set(one) for one in asked] == [set(_AMONG)]
    assert site.decision.lowering == "math"
    assert site.evidence is not None
    assert site.evidence.order == ("math", "sdpa_cpu_flash", "rows")
    said = "timed on this GPU as the graph was compiled, in us a call: math 9.0, sdpa_cpu_flash 12.0, rows 20.0"
    assert site.evidence.why == said
    assert said in site.notes


def test_the_first_of_the_rows_stays_where_others_are_hardly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, sdpa_cpu_flash=1.0, rows=1.0, math=1.0)
    first = chosen().decision.lowering
    time_kernels._KNOWN.clear()
    others = {name: 0.98 for name in _AMONG if name != first}
    timed_as(monkeypatch, **{first: 1.0}, **others)
    assert chosen().decision.lowering == first


def test_a_site_is_timed_once_a_process_and_once_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store(root=tmp_path)
    monkeypatch.setattr(Store, "beside_inductors", lambda patches: store)
    asked = timed_as(monkeypatch, sdpa_cpu_flash=12.0, rows=20.0, math=9.0)
    assert [chosen(verify=True, cache_rewrites=True).decision.lowering for _ in range(2)] == ["math", "math"]
    assert len(asked) == 1
    # Another process has the file alone.
    time_kernels._KNOWN.clear()
    assert chosen(verify=True, cache_rewrites=True).decision.lowering == "math"
    assert len(asked) == 1
    # A damaged one counts as none.
    for file in store.folder.glob("*.json"):
        file.write_text("{}")
    time_kernels._KNOWN.clear()
    assert chosen(verify=True, cache_rewrites=True).decision.lowering == "math"
    assert len(asked) == 2


@pytest.mark.parametrize("options", [{"time_kernels": False}, {"lowering": "rows"}, {"lowerings": ("rows", "math")}])
def test_nothing_is_timed_where_the_user_decides(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    asked = timed_as(monkeypatch, math=1.0)
    assert chosen(**options).decision.lowering != "math"
    assert not asked


@pytest.mark.parametrize("error", [timed.NoValues("little memory is free"), torch.OutOfMemoryError("out of memory")])
def test_what_can_t_be_timed_keeps_the_choice_of_the_rows(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any) -> dict[str, float]:
        raise error

    monkeypatch.setattr(timed, "microseconds", fails)
    site = chosen()
    assert not any("timed" in note for note in site.notes)
    assert site.decision.lowering in ("rows", "sdpa_cpu_flash")


def test_a_lowering_that_did_not_run_is_not_chosen_and_without_the_first_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed_as(monkeypatch, math=9.0)
    assert chosen().decision.lowering in ("rows", "sdpa_cpu_flash")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_times_a_short_site_and_results_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    time_kernels._KNOWN.clear()
    attn_compiler.reset()
    q, k, v = (torch.randn(4, 8, 250, 80, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kept = torch.arange(250, device="cuda") < torch.tensor([[250], [100], [37], [249]], device="cuda")

    def attention(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None, :])

    compiled = torch.compile(attention, backend="attn_compiler", options={"time_kernels": True, "strict": True})
    state = torch.cuda.get_rng_state()
    out = compiled(q, k, v, kept)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wanted = attention(q.double(), k.double(), v.double(), kept)
    expected = torch.autograd.grad(wanted, (q, k, v), torch.ones_like(wanted))
    for found, right in zip((out, *grads), (wanted, *expected), strict=True):
        assert float((found.double() - right.double()).norm() / right.double().norm()) < 1e-2
    (site,) = attn_compiler.reports()[-1].sites
    assert site.evidence is not None
    assert site.evidence.why.startswith("timed on this GPU")
    assert len(site.evidence.order) >= 2
