"""Graphs beside the written one: unpacked, and checkpointed."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attn_compiler
from attn_compiler.compiling.explaining import explainer
from attn_compiler.passes.writing import layout
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from tests.passes.unpad.encoder import MASK, WIDTH, Decoder, ids_of

# What the report says of attention that is to be kept under checkpoints.
B, H, S, D = 2, 2, 6, 8
KEPT = "its output and lse are kept, {} a layer; its forward runs once a step"


def _attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.sin(), x, x)


def _layer(x: Tensor, **more: Any) -> Tensor:
    made: Tensor = checkpoint(_attend, x, use_reentrant=False, **more)
    return made


def _notes(
    function: Callable[[Tensor], Tensor], *, grad: bool = True, dynamic: bool = False, **options: Any
) -> list[str]:
    """What is said of each site's checkpoint, in the order of the rows. dynamic: lengths are symbols."""
    given = {"lowering": "reference", "checkpoint": "keep_attention", "inner": "inductor", "strict": True, **options}
    x = torch.randn(B, H, S, D, requires_grad=grad)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 2)
    reports = explainer(options=given)(function, x)
    notes = [note for report in reports for site in report.sites for note in site.notes]
    return [note.removeprefix("checkpoint: ") for note in notes if note.startswith("checkpoint: ")]


def test_the_bytes_of_output_and_lse() -> None:
    assert _notes(_layer) == [KEPT.format(f"{B * H * S * (D + 1) * 4} bytes")]


def test_layers_that_are_alike_share_a_row() -> None:
    assert len(_notes(lambda x: _layer(_layer(x)))) == 1


def test_bytes_of_symbolic_sizes_are_symbols() -> None:
    (note,) = _notes(_layer, dynamic=True)
    assert re.fullmatch(re.escape(KEPT).replace(re.escape("{}"), r"144\*s\d+ bytes"), note)


def test_a_checkpoint_in_a_checkpoint_is_one() -> None:
    def outer(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(_layer, x.cos(), use_reentrant=False)
        return made

    assert _notes(outer) == [KEPT.format("864 bytes")]


@pytest.mark.parametrize(
    ("function", "given", "why"),
    [
        (_attend, {}, "it is in no checkpoint of this graph"),
        (_layer, {"grad": False}, "it has no backward"),
        (_layer, {"inner": "aot_eager"}, "inner='aot_eager' goes by the checkpoint alone"),
        (_layer, {"lowering": "math"}, "math has no op whose output and lse could be"),
    ],
)
def test_where_nothing_is_kept(function: Callable[[Tensor], Tensor], given: dict[str, Any], why: str) -> None:
    (note,) = _notes(function, **given)
    assert note.startswith(f"nothing is kept, {why}")


def test_a_graph_that_asks_for_gradients_itself() -> None:
    def function(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(_layer(x).sum(), x)
        return grad

    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch puts no gradients into a graph")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        (note,) = _notes(function)
    assert note.startswith("nothing is kept, the graph asks for gradients itself")


def test_what_stays_as_the_model_has_it() -> None:
    (note,) = _notes(_layer, lowering="untouched")
    assert note == "kept only where PyTorch runs it as one of its own kernels, since it stays as the model has it"


def test_a_policy_of_the_users_own_may_have_the_last_word() -> None:
    policy = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    (note,) = _notes(functools.partial(_layer, context_fn=policy))
    assert note.endswith("runs once a step, unless the checkpoint's own policy says MUST_RECOMPUTE")


def test_by_default_nothing_is_said() -> None:
    assert _notes(_layer, checkpoint="recompute") == []


# The graph beside a packed one has kernels of its own, and whatever fails there costs it alone.
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


def _unpacked_notes() -> str:
    unpad = attn_compiler.reports()[-1].unpad
    assert unpad is not None
    return "; ".join(unpad.notes)


def test_calls_that_are_not_packed_run_kernels_and_are_right() -> None:
    model, eager, run = _compiled(strict=True)
    for labels in (LABELS.masked_fill(MASK == 0, -100), LABELS):
        for found, expected in zip(_trained(model, run, labels), _trained(eager, eager, labels), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert "a batch that is not packed runs with its padding: sdpa_cpu_flash × 2" in _unpacked_notes()
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
    assert "a batch that is not packed runs the model's own graph, with no kernel of ours" in _unpacked_notes()
    torch._dynamo.reset()
    seen.clear()
    with pytest.raises(PassFailed, match="planted"):
        _trained(model, _compiled(strict=True)[2], LABELS)
