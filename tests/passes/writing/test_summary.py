"""What is summed up of a written graph, what is verified, and buffers."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import DelayedScaling, Fp8Recipe
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.passes.pipeline.steps import PIPELINE
from attn_compiler.passes.writing import buffers, fp8_state, lower, summary
from attn_compiler.reasons.errors import AttnCompilerWarning, VerifyFailed
from attn_compiler.reporting import wording
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.torch_private import compat as torch_compat, inductor as torch_inductor
from tests.passes.compiling import CPU_FLASH, Compiled, compiled

# The report of a graph.
B, H, S, D = 2, 4, 6, 8


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


QKV = torch.randn(3, B, H, S, D)


def _triangle(kept: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def _both(kept: Tensor) -> Tensor:
    return _triangle(kept) & kept[:, None, None]


#: mask of a tensor of padding, kernel, whether it reads an element for each pair, and whether all of them are proved
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str, bool, bool]] = {
    "a flag": (_triangle, "sdpa_cpu_flash", False, False),
    "keys": (lambda kept: kept[:, None, None], "sdpa_cpu_flash", False, False),
    "both": (_both, "sdpa_cpu_flash", True, True),
    "by parts": (_both, "rows", False, False),
    "as the model wrote it": (_both, "untouched", True, True),
    "data": (lambda kept: kept.expand(S, -1) | torch.rand(S, S).gt(2), "math", True, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_row_tells_a_mask_that_is_proved_and_read_in_full(name: str) -> None:
    mask, lowering, reads, proved = MASKS[name]
    kept = torch.ones(1, S, dtype=torch.bool)
    run = compiled(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, mask(m)), lowering=lowering)
    run(*QKV, kept)
    assert (run.site.decision.lowering, run.site.reads_pairs, run.site.proved_as_dense) == (lowering, reads, proved)
    assert ("1 of them proved and read as a dense tensor" in wording.summary(run.report)) == proved


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


# A lowering that breaks an invariant is caught before anything runs.
Q = (2, 4, 6, 8)
Emit = Callable[[Emitter, AttentionSpec, Operands], fx.Node]


def _layer(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def _wrong_shape(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    return emitter.call(torch.narrow, operands.q, 3, 0, 4)


def _wrong_size(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    return emitter.call(torch.narrow, operands.q, 2, 0, 5)


def _wrong_device(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    return emitter.call(torch.Tensor.to, operands.q, "meta")


def _no_such_attribute(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    missing = operands.q.graph.create_node("get_attr", "nowhere")
    missing.meta["example_value"] = emitter.value(operands.q)
    return emitter.call(torch.add, operands.q, missing)


def _break(monkeypatch: pytest.MonkeyPatch, emit: Emit) -> None:
    monkeypatch.setattr(SdpaCpuFlash, "emit", lambda _, *args: emit(*args))


@pytest.mark.parametrize(
    ("emit", "observed"),
    [
        (_wrong_shape, r"\(2, 4, 6, 4\)"),
        (_wrong_size, r"\(2, 4, 5, 8\)"),
        (_wrong_device, "on meta"),
        (_no_such_attribute, "nonexistent attribute nowhere"),
    ],
)
def test_strict_raises_with_what_should_hold(emit: Emit, observed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, emit)
    with pytest.raises(VerifyFailed, match=observed) as caught:
        compiled(_layer)(torch.randn(Q))
    assert caught.value.pass_name == "lower"


def test_without_strict_the_model_runs_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, _wrong_shape)
    run = compiled(_layer, strict=False)
    q = torch.randn(Q)
    with pytest.warns(AttnCompilerWarning, match="it no longer holds that the output is"):
        torch.testing.assert_close(run(q), _layer(q))
    assert run.report.failure is not None
    assert CPU_FLASH not in run.calls


def test_wrong_dtype_is_brought_back_to_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel answers in q's dtype whatever the model goes on with: a cast, no failure."""
    _break(monkeypatch, lambda emitter, spec, operands: emitter.call(torch.Tensor.to, operands.q, torch.float64))
    got = compiled(_layer)(torch.randn(Q))
    assert got.dtype == torch.float32


def test_wrong_output_node_dtype_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the passes themselves put into place is checked too."""
    from attn_compiler.passes.graph import strides

    def restride(*args: Any) -> fx.Node:
        builder, node, _ = args
        return builder.call(torch.Tensor.to, node, torch.float16)

    monkeypatch.setattr(strides, "relies_on", lambda *args: "somebody")
    monkeypatch.setattr(strides, "restride", restride)
    with pytest.raises(VerifyFailed, match=r"torch.float16"):
        compiled(_layer)(torch.randn(Q))


def test_switched_off_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, _wrong_size)
    run = compiled(_layer, check_invariants=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnCompilerWarning)
        assert run(torch.randn(Q)).shape == (2, 4, 5, 8)


def test_a_right_graph_passes() -> None:
    run = compiled(_layer)
    run(torch.randn(Q))
    assert run.report.failure is None


# What compiled code keeps from call to call.
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
        mock.patch.object(lower, "_check_output", side_effect=ValueError("broken")),
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
