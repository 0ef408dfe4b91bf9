"""The graph beside a packed one has kernels of its own, and whatever fails there costs it alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler.passes.writing import layout
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from tests.passes.unpad.encoder import MASK, WIDTH, Decoder, ids_of

IDS = ids_of(MASK)
LABELS = torch.randint(0, WIDTH, MASK.shape, generator=torch.Generator().manual_seed(1))


def _loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.reshape(-1, WIDTH), labels.reshape(-1), ignore_index=-100)


def _trained(model: Any, run: Any, labels: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = run(IDS, MASK, labels=labels)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def _compiled(**options: Any) -> tuple[Decoder, Decoder, Any]:
    torch.manual_seed(0)
    model = Decoder(ending=_loss).double()
    return model, copy.deepcopy(model), torch.compile(
        model, backend="attn_compiler", options={"unpad": True, "inner": "aot_eager", **options}
    )  # fmt: skip


def _notes() -> str:
    unpad = attn_compiler.reports()[-1].unpad
    assert unpad is not None
    return "; ".join(unpad.notes)


def test_calls_that_are_not_packed_run_kernels_and_are_right() -> None:
    model, eager, run = _compiled(strict=True)
    for labels in (LABELS.masked_fill(MASK == 0, -100), LABELS):
        for found, expected in zip(_trained(model, run, labels), _trained(eager, eager, labels), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert "a batch that is not packed runs with its padding: sdpa_cpu_flash × 2" in _notes()
    unpad = attn_compiler.reports()[-1].unpad
    assert unpad is not None
    assert [bool(step.failed) for step in unpad.last] == [False, True]


def test_what_fails_there_leaves_the_packed_graph_and_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = layout.choose_copies
    seen: list[object] = []

    def fail_beside(unit: Any, found: Any) -> None:
        seen.append(unit)
        if len(seen) == 2:
            raise ValueError("planted")
        chosen(unit, found)

    monkeypatch.setattr(layout, "choose_copies", fail_beside)
    model, eager, run = _compiled()
    with pytest.warns(AttnCompilerWarning, match="planted"):
        found = _trained(model, run, LABELS)
    torch.testing.assert_close(found, _trained(eager, eager, LABELS), rtol=1e-10, atol=1e-12)
    assert "a batch that is not packed runs the model's own graph, with no kernel of ours" in _notes()
    torch._dynamo.reset()
    seen.clear()
    with pytest.raises(PassFailed, match="planted"):
        _trained(model, _compiled(strict=True)[2], LABELS)
