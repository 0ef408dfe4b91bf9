from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config as inductor_config

from attn_compiler.compiling import unpadded
from attn_compiler.compiling.attempts import StepFailed
from attn_compiler.compiling.inner import Inner
from attn_compiler.passes.unpad import batches_before
from attn_compiler.passes.unpad.unpadding import PackedWork
from attn_compiler.torch_private import inductor as torch_inductor, packed as torch_packed
from tests import inductor_caches
from tests.passes.unpad.encoder import LENGTH, MASK, WIDTH, Decoder, Encoder, check, compiled, ids_of, mask_of, report


@pytest.fixture(autouse=True)
def always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a batch is."""
    monkeypatch.setattr(PackedWork, "is_saved", lambda *_: True)


def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x.view(-1, WIDTH), labels.view(-1))


def compiled_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that Inductor compiles without our passes."""
    made: list[str] = []
    own = Inner.compile_original

    def noted(self: Inner, gm: Any, inputs: Any) -> Any:
        made.append(str(gm.graph))
        return own(self, gm, inputs)

    monkeypatch.setattr(Inner, "compile_original", noted)
    return made


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_asked_before_each_call_is_one_compiled_graph(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where each op would be a launch."""
    made = compiled_alone(monkeypatch)
    monkeypatch.setattr(unpadded, "_is_launched", lambda _: True)
    model = Decoder(ending=loss)
    function = compiled(model, inner="inductor", dynamic=dynamic)
    for lengths, left in (((4, 10, 7), False), ((4, 10, 7), True), ((0, 10, 3), False), ((10, 10, 10), False)):
        mask = mask_of(*lengths, left=left)
        labels = (ids_of(mask) % WIDTH).masked_fill(mask == 0, -100)
        assert check(model, mask, function, labels=labels).kept is None
        assert report().last[-1].failed == ()
    # PyTorch starts over once with symbolic sizes.
    assert ["_places_of" in text for text in made] == [True] * (1 + dynamic)


def test_on_a_cpu_it_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled_alone(monkeypatch)
    model = Encoder()
    assert check(model, MASK, compiled(model, inner="inductor")).kept is None
    assert made == []


def test_where_that_fails_it_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpadded, "_is_launched", lambda _: True)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Inner, "compile_original", fail)
    model = Encoder()
    assert check(model, MASK, compiled(model, inner="inductor")).kept is None
    assert report().last[-1].failed == ()


def test_full_batches_run_padded_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where to ask is to wait. Then the padded graph is compiled by Inductor, with our kernels and 0 at padding."""

    class Come:
        def __init__(self, told: torch.Tensor) -> None:
            self.told = told

        def are_there(self) -> bool:
            return True

        def numbers(self) -> list[int]:
            found: list[int] = self.told.tolist()
            return found

    monkeypatch.setattr(unpadded, "_is_launched", lambda _: True)
    monkeypatch.setattr(batches_before, "Arriving", Come)
    full = mask_of(LENGTH, LENGTH, LENGTH)
    made = compiled_alone(monkeypatch)
    model = Encoder(ending=lambda x, mask: x.transpose(0, 1))
    function = compiled(model, inner="inductor")
    for mask in (full, full, full, MASK, MASK):
        ids = ids_of(mask)
        found = function(ids, mask)
        torch.testing.assert_close(found, model(ids, mask) * mask.t()[..., None], atol=2e-6, rtol=1e-5)
    failed = [batches_before.MUCH_PADDING in step.failed for step in report().last]
    assert failed == [False, False, True, True, False]
    assert len(made) == 1  # what is asked before each call


@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_graph_beside_knows_which_inputs_keep_their_address(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs would copy each parameter at each call: on an H200 BERT took 9.96 ms so, and 7.97 ms in Inductor's own."""
    known: list[tuple[int, ...]] = []
    own = compile_fx._compile_fx_inner

    def noted(gm: Any, inputs: Any, **given: Any) -> Any:
        known.append(tuple(given["static_input_idxs"]))
        return own(gm, inputs, **given)

    def fail(*_: Any) -> None:
        raise StepFailed("compile the padded graph", RuntimeError("no kernels"))

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", noted)
    model = Encoder()
    function = compiled(model, inner="inductor")
    with torch.no_grad(), inductor_caches.no_graphs():
        function(ids_of(MASK), MASK)
        if not has_kernels:
            monkeypatch.setattr(Inner, "compile_rewritten", fail)
        none = torch.zeros_like(MASK)
        function(ids_of(none), none)  # Fewer than two tokens are real.
    assert report().last[-1].failed != ()
    assert [len(static) for static in known] == [len(list(model.parameters()))] * 2


@pytest.mark.further
@pytest.mark.parametrize("is_unsafe", [False, True])
def test_the_packed_graphs_code_is_found_on_disk_with_its_guards(
    is_unsafe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if Inductor is told to find code whatever its guards say."""
    runs: list[list[torch_packed.Guards]] = []
    taken = torch_packed.taken_guards

    def noted(size: torch.SymInt, inputs: Any) -> torch_packed.Guards:
        runs[-1].append(taken(size, inputs))
        return runs[-1][-1]

    monkeypatch.setattr(torch_packed, "taken_guards", noted)
    with inductor_caches.no_graphs(), inductor_config.patch(unsafe_skip_cache_dynamic_shape_guards=is_unsafe):
        for _ in range(2):
            counters.clear()
            runs.append([])
            model = Encoder()
            function = compiled(model, inner="inductor", dynamic=True)
            for mask in (mask_of(4, 10, 7), mask_of(*[LENGTH] * 450, 5)):
                check(model, mask, function, close=1e-5)
    assert counters["inductor"]["fxgraph_cache_hit"] > 0
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    numbers = (2, 21, 4096, 4097, 8005, 2**22, 2**40)
    args = (ids_of(MASK), MASK)
    held = [[[guards.hold(number, args) for number in numbers] for guards in run] for run in runs]
    assert held[0] == held[1]
    assert not all(all(one) for one in held[0])


@pytest.mark.parametrize("is_set", [False, True])
def test_freezing_that_dynamo_does_not_see_is_told(
    is_set: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_inductor, "compile_with_inductor", lambda gm, *_, **__: gm.forward)
    model = torch.compile(torch.nn.Linear(2, 2), backend="attn_compiler", options={"freezing": True})
    with inductor_config.patch(freezing=is_set), torch.no_grad():
        model(torch.ones(1, 2))
    assert ("set torch._inductor.config.freezing = True" in caplog.text) is not is_set
