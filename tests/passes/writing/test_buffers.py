"""What compiled code keeps from call to call: where it is in the graphs, and that nothing of it is left where rewriting failed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import DelayedScaling, Fp8Recipe
from attn_compiler.passes.pipeline.steps import PIPELINE
from attn_compiler.passes.writing import verify
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.torch_private import compat as torch_compat, fp8_state, inductor as torch_inductor
from tests.passes.compiling import Compiled, compiled

RECIPE = Fp8Recipe(scaling=DelayedScaling(amax_history_len=2))


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def checkpointed(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(attention, x, use_reentrant=False)
    return out


def twice(x: Tensor) -> Tensor:
    return checkpointed(checkpointed(x))


def run(function: Any, **options: Any) -> Compiled:
    made = compiled(function, fp8_recipe=RECIPE, **{"lowerings": ["reference_fp8", "math"], **options})
    made(inputs())
    return made


def inputs() -> Tensor:
    return torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()


def given_away(function: Any) -> fx.GraphModule:
    """The rewritten graph module, as the inner compiler gets it."""
    found: list[fx.GraphModule] = []

    def keep(name: str, gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(gm)
        return gm.forward

    with mock.patch.object(torch_inductor, "compile_with_backend", keep):
        torch.compile(
            function,
            backend="attn_compiler",
            options={"fp8_recipe": RECIPE, "lowering": "reference_fp8", "inner": "eager", "strict": True},
        )(inputs())
    (gm,) = found
    return gm


def test_the_graph_has_a_buffer_for_q_k_and_v_and_writes_it_once() -> None:
    gm = given_away(attention)
    assert {name: tuple(x.shape) for name, x in gm.named_buffers()} == {"attn_compiler_buffer_0": (2, 3)}
    writes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target.__name__ == "setitem"]
    assert len(writes) == 1


def test_a_checkpoints_body_gets_it_as_an_input_and_so_what_it_held_before() -> None:
    gm = given_away(checkpointed)
    assert len(list(gm.named_buffers())) == 1
    (call,) = (node for node in gm.graph.nodes if "checkpoint" in str(node.target))
    names = [str(node.target) for node in call.args[-2:]]
    assert names == ["attn_compiler_buffer_wrap_body_0_0", "attn_compiler.held.default"]
    assert not any("buffer" in str(node.target) for node in call.args[:-2])
    (body,) = (module for module in torch_compat.graph_modules(gm) if module is not gm)
    assert not list(body.named_buffers())


def test_each_of_two_checkpoints_has_its_own() -> None:
    gm = given_away(twice)
    buffers = dict(gm.named_buffers())
    assert len(buffers) == 2
    assert all(bool((x[0] > 0).all()) and not x[1].any() for x in buffers.values())


def test_what_fails_afterwards_leaves_none_and_the_model_as_it_was() -> None:
    with (
        mock.patch.object(verify, "_check_output", side_effect=ValueError("broken")),
        pytest.warns(AttnCompilerWarning, match="broken"),
    ):
        function = run(attention, strict=False)
    assert function.report.failure is not None
    assert "attn_compiler" not in "".join(function.calls)
    torch.testing.assert_close(function(inputs()), attention(inputs()))


def test_a_checkpoint_in_a_checkpoint_has_no_place_for_them_and_says_so() -> None:
    def outer(x: Tensor) -> Tensor:
        return checkpoint(checkpointed, x, use_reentrant=False) + attention(x)

    found = {site.decision.lowering: site for site in run(outer).report.sites}
    assert set(found) == {"reference_fp8", "math"}
    (note,) = (note for note in found["math"].notes if "fp8_recipe" in note)
    assert "no history can be kept" in note
    assert "CurrentScaling" in note


def test_a_graph_of_another_shape_starts_with_a_history_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_state, "_kept", [])
    function = run(attention, dynamic=False)
    function(inputs()[:, :, :48])
    assert sorted(attn_compiler.fp8_state_dict()) == ["(no module)/amax", "(no module)/amax#2"]


def test_the_pipeline_verifies_after_lowering() -> None:
    """Or the test of a failure above would fail too early."""
    on_units = [step.name for step in PIPELINE if step.on == "unit"]
    assert on_units[-5:] == ["lower", "padded", "give_back", "last_look", "verify"]
