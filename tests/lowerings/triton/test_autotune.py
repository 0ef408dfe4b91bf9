"""Tuning with made-up times; measuring itself is tested in test_triton_measuring.py."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

import attn_compiler
from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.shared import parts, tile_table
from attn_compiler.lowerings.triton import autotune
from attn_compiler.lowerings.triton.autotune import Tuner, Unfit, key_of, unmeasurable
from attn_compiler.lowerings.triton.autotune_store import TileStore
from attn_compiler.lowerings.triton.candidates import candidates
from attn_compiler.spec import target as machine
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.codec import Codec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import inductor as torch_inductor
from tests.lowerings.specs import dense, make_spec
from tests.passes.compiling import Compiled, compiled

H200 = Target.fake()
GPU = torch.device("cuda")

OPEN = make_spec(head_dim=128, seqlen_q=4096, seqlen_kv=4096)
LISTED = dataclasses.replace(OPEN, mask=dense(2, 1, 1, 4096))

Times = Callable[[str, Tile], float | None]


class FakeGpu:
    """times: of a kernel's tile in microseconds; None where it does not run. calls: every measurement."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.calls: list[tuple[str, Tiles]] = []

    def __call__(self, spec: AttentionSpec, device: torch.device) -> autotune.Measure:
        def measure(kernel: str, tiles: Tiles) -> float:
            self.calls.append((kernel, tiles))
            time = self.times(kernel, getattr(tiles, kernel))
            if time is None:
                raise Unfit("out of resource: shared memory")
            return time

        return measure


def tuner(folder: Path, gpu: FakeGpu, name: str = "NVIDIA H200") -> Tuner:
    return Tuner(measure_of=gpu, gpu_name=lambda _: name, store=TileStore(folder=folder))


def tune(folder: Path, times: Times, spec: AttentionSpec = OPEN) -> autotune.Tuned:
    found = tuner(folder, FakeGpu(times)).of(spec, H200, GPU)
    assert found is not None
    return found


def fastest(wanted: Tiles) -> Times:
    return lambda kernel, tile: 1.0 if tile == getattr(wanted, kernel) else 5.0


# ---- what wins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, -1])
def test_the_fastest_of_each_kernel_wins(tmp_path: Path, place: int) -> None:
    given = candidates(OPEN, H200)
    wanted = Tiles(forward=given.forward[place], grad_q=given.grad_q[place], grad_kv=given.grad_kv[place])
    assert tune(tmp_path, fastest(wanted)).tiles == wanted


def test_the_tables_wins_over_what_is_no_faster(tmp_path: Path) -> None:
    assert tune(tmp_path, lambda *_: 3.0).tiles == tile_table.tiles(OPEN, H200)


def test_every_candidate_is_measured_once_over_the_fastest_forward(tmp_path: Path) -> None:
    given, gpu = candidates(OPEN, H200), FakeGpu(lambda _, tile: float(tile.queries + tile.keys + tile.stages))
    tuner(tmp_path, gpu).of(OPEN, H200, GPU)
    for kernel in ("forward", "grad_q", "grad_kv"):
        assert tuple(getattr(tiles, kernel) for name, tiles in gpu.calls if name == kernel) == getattr(given, kernel)
    best = min(given.forward, key=lambda tile: tile.queries + tile.keys + tile.stages)
    assert {tiles.forward for kernel, tiles in gpu.calls if kernel != "forward"} == {best}


def test_without_gradients_the_forward_alone_is_measured(tmp_path: Path) -> None:
    for spec in (OPEN, LISTED):
        gpu = FakeGpu(lambda _, tile: 0.5 if tile.queries == 128 else 1.0)
        found = tuner(tmp_path, gpu).of(dataclasses.replace(spec, needs_grad=False), H200, GPU)
        assert {kernel for kernel, _ in gpu.calls} == {"forward"}
        assert found is not None
        assert found.tiles.forward.queries == 128
        assert "dq" not in found.note
        if spec is LISTED:
            assert (found.tiles.grad_q.queries, found.tiles.grad_q.keys) == (128, found.tiles.forward.keys)


def test_what_does_not_run_is_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = candidates(OPEN, H200)

    def times(kernel: str, tile: Tile) -> float | None:
        return None if tile == getattr(given, kernel)[0] else float(tile.stages)

    with caplog.at_level(logging.DEBUG, logger="attn_compiler"):
        found = tune(tmp_path, times)
    assert found.tiles.forward == min(given.forward[1:], key=lambda tile: tile.stages)
    assert "left out forward 64x64 w4 s3: out of resource" in caplog.text
    assert "the table's 64x64 w4 s3 not measurable" in found.note


def test_where_nothing_runs_the_tables_are_taken_and_nothing_is_kept(tmp_path: Path) -> None:
    found = tune(tmp_path, lambda *_: None)
    assert found.tiles == tile_table.tiles(OPEN, H200)
    assert found.note == "tiles are the table's: autotune could measure none (out of resource: shared memory)"
    assert list(tmp_path.iterdir()) == []
    assert "autotuned" in tune(tmp_path, lambda *_: 1.0).note


def test_where_one_kernel_never_runs_its_tile_is_the_tables(tmp_path: Path) -> None:
    found = tune(tmp_path, lambda kernel, tile: None if kernel == "grad_kv" else float(tile.stages))
    assert found.tiles.grad_kv == tile_table.tiles(OPEN, H200).grad_kv
    assert found.tiles.forward.stages == 2


# ---- lists --------------------------------------------------------------------------------------------------------


def test_with_lists_forward_and_dq_are_chosen_together(tmp_path: Path) -> None:
    assert parts.of(LISTED).tiles

    def times(kernel: str, tile: Tile) -> float:
        if kernel == "forward":
            return 10.0 if tile.queries == 64 else 12.0
        # dq loses more by small tiles than the forward wins.
        return 25.0 if tile.queries == 64 else 20.0

    chosen = tune(tmp_path, times, LISTED).tiles
    assert (chosen.forward.queries, chosen.grad_q.queries) == (128, 128)
    assert chosen.forward.keys == chosen.grad_q.keys
    assert tune(tmp_path, times, OPEN).tiles.forward.queries == 64


def test_with_lists_dq_is_measured_over_a_forward_that_makes_its_lists(tmp_path: Path) -> None:
    gpu = FakeGpu(lambda _, tile: float(tile.queries))
    tuner(tmp_path, gpu).of(LISTED, H200, GPU)
    pairs = [(tiles.forward, tiles.grad_q) for kernel, tiles in gpu.calls if kernel == "grad_q"]
    assert len(pairs) > 3
    assert all((a.queries, a.keys) == (b.queries, b.keys) for a, b in pairs)


def test_with_lists_a_forward_without_a_dq_is_not_taken(tmp_path: Path) -> None:
    def times(kernel: str, tile: Tile) -> float | None:
        if kernel == "forward":
            return 1.0 if tile.queries == 64 else 9.0
        return None if tile.queries == 64 and kernel == "grad_q" else 3.0

    chosen = tune(tmp_path, times, LISTED).tiles
    assert (chosen.forward.queries, chosen.grad_q.queries) == (128, 128)
    never = tune(tmp_path / "never", lambda kernel, _: None if kernel == "grad_q" else 1.0, LISTED).tiles
    table = tile_table.tiles(LISTED, H200)
    assert (never.forward, never.grad_q) == (table.forward, table.grad_q)


# ---- on disk ------------------------------------------------------------------------------------------------------


def test_a_second_compilation_reads_what_the_first_measured(tmp_path: Path) -> None:
    first = tune(tmp_path, lambda _, tile: float(tile.stages + tile.warps))
    gpu = FakeGpu(lambda *_: None)
    again = tuner(tmp_path, gpu).of(OPEN, H200, GPU)
    assert again is not None
    assert not gpu.calls
    assert again.tiles == first.tiles
    assert first.note.startswith("tiles (autotuned): forward ")
    assert again.note == first.note.replace("(autotuned)", "(from disk)")


def test_one_compilation_measures_a_spec_once_and_says_the_same_of_every_layer(tmp_path: Path) -> None:
    gpu = FakeGpu(lambda *_: 1.0)
    shared = tuner(tmp_path, gpu)
    first = shared.of(OPEN, H200, GPU)
    count = len(gpu.calls)
    assert shared.of(OPEN, H200, GPU) == first
    assert len(gpu.calls) == count


def test_the_key_has_all_that_matters() -> None:
    given = candidates(OPEN, H200)
    keys = {
        key_of(OPEN, H200, "NVIDIA H200", given),
        key_of(LISTED, H200, "NVIDIA H200", given),
        key_of(OPEN, Target.fake(triton="3.8.0"), "NVIDIA H200", given),
        key_of(OPEN, H200, "NVIDIA H100 80GB HBM3", given),
        key_of(OPEN, H200, "NVIDIA H200", dataclasses.replace(given, grad_q=given.grad_q[:-1])),
    }
    with mock.patch.object(autotune, "_kernels_digest", return_value="edited"):
        keys.add(key_of(OPEN, H200, "NVIDIA H200", given))
    with mock.patch.object(autotune, "package_version", return_value="9"):
        keys.add(key_of(OPEN, H200, "NVIDIA H200", given))
    assert len(keys) == 7
    assert key_of(OPEN, H200, "NVIDIA H200", given) in keys


def test_another_gpu_measures_again(tmp_path: Path) -> None:
    tune(tmp_path, lambda *_: 1.0)
    gpu = FakeGpu(lambda *_: 1.0)
    tuner(tmp_path, gpu, name="NVIDIA H100").of(OPEN, H200, GPU)
    assert gpu.calls
    assert len(list(tmp_path.iterdir())) == 2


def _without_forwards(value: Any) -> Any:
    return {**value, "microseconds": {**value["microseconds"], "forward": []}}


def _with(value: Any, kernel: str, **changed: Any) -> Any:
    first, *others = value["microseconds"][kernel]
    return {**value, "microseconds": {**value["microseconds"], kernel: [{**first, **changed}, *others]}}


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda value: [],
        lambda value: {},
        lambda value: {"microseconds": {"forward": 3, "grad_q": [], "grad_kv": []}},
        lambda value: {"microseconds": {"forward": ["fast"], "grad_q": [], "grad_kv": []}},
        _without_forwards,
        lambda value: _with(value, "forward", queries=48),
        lambda value: _with(value, "forward", queries=[64]),
        lambda value: _with(value, "forward", threads=3),
        lambda value: _with(value, "grad_q", microseconds="slow"),
        lambda value: _with(value, "grad_q", microseconds=float("nan")),
    ],
)
def test_what_is_no_result_is_measured_again(tmp_path: Path, spoiled: Callable[[Any], Any]) -> None:
    tune(tmp_path, lambda *_: 1.0)
    store, (path,) = TileStore(folder=tmp_path), tmp_path.iterdir()
    store.put(path.stem, spoiled(store.get(path.stem)))
    assert tune(tmp_path, lambda *_: 2.0).note.startswith("tiles (autotuned)")
    assert tune(tmp_path, lambda *_: None).note.startswith("tiles (from disk)")


def test_a_file_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    tune(tmp_path, lambda *_: 1.0)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-20])
    assert tune(tmp_path, lambda *_: 2.0).note.startswith("tiles (autotuned)")


def test_where_it_is_kept(tmp_path: Path) -> None:
    with mock.patch.object(torch_inductor, "cache_folder", return_value=tmp_path):
        assert Tuner.here().store.folder == tmp_path / "attn_compiler" / "autotune"


# ---- what people see ----------------------------------------------------------------------------------------------


def test_the_note_compares_with_the_table(tmp_path: Path) -> None:
    wanted = Tile(queries=128, keys=64, warps=8, stages=3)
    times: Times = lambda kernel, tile: 411.6 if (kernel, tile) == ("forward", wanted) else 455.2  # noqa: E731
    assert tune(tmp_path, times).note == (
        "tiles (autotuned): forward 128x64 w8 s3 412 µs (the table's 64x64 w4 s3 455 µs), "
        "dq 128x64 w8 s3 455 µs (as in the table), dk and dv 64x128 w8 s3 455 µs (as in the table)"
    )


def test_the_note_says_what_unknown_sizes_were_measured_with(tmp_path: Path) -> None:
    spec = make_spec(seqlen_q="s0", seqlen_kv="s0")
    note = tune(tmp_path, lambda *_: 1.0, spec).note
    assert note.endswith("; measured with 4096 queries for s0, 4096 keys for s0")


def test_progress_names_the_shape_on_a_terminals_stderr_and_goes_away(tmp_path: Path) -> None:
    shown = io.StringIO()
    consoles: list[dict[str, Any]] = []

    def console(**given: Any) -> Console:
        consoles.append(given)
        return Console(file=shown, force_terminal=True, width=120)

    with mock.patch("rich.console.Console", console):
        tune(tmp_path, lambda *_: 1.0)
        text = shown.getvalue()
        assert consoles == [{"stderr": True}]
        assert "autotune: batch 2, 8 heads, 4096 queries, 4096 keys, head dim 128, bfloat16" in text
        assert text.endswith("\x1b[2K")
        tune(tmp_path, lambda *_: 1.0)
        assert shown.getvalue() == text


def test_nothing_is_printed_where_there_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tune(tmp_path, lambda *_: 1.0)
    assert capfd.readouterr() == ("", "")


# ---- machines that measure nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Target.fake(), None),
        (Target.fake(device="cpu"), "there is no GPU behind cpu"),
        (Target.fake(sm=0), "there is no GPU behind cuda"),
        (Target.fake(triton_interpreted=True), "Triton interprets its kernels"),
        (Target.fake(device="cpu", triton_interpreted=True), "Triton interprets its kernels"),
    ],
)
def test_where_nothing_can_be_measured(tmp_path: Path, target: Target, why: str | None) -> None:
    gpu = FakeGpu(lambda *_: 1.0)
    assert unmeasurable(target) == why
    assert (tuner(tmp_path, gpu).of(OPEN, target, GPU) is None) is (why is not None)
    assert bool(gpu.calls) is (why is None)


# ---- from end to end ----------------------------------------------------------------------------------------------


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Two layers that mask alike."""
    at = torch.arange(q.shape[2], device=q.device)
    mask = (at[None, :] <= at[:, None]) & padding[:, None, None, :].bool()
    first = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return torch.nn.functional.scaled_dot_product_attention(first, k, v, attn_mask=mask)


def _tensors(device: str, seqlen: int = 70) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, seqlen, 16, generator=generator).to(device).requires_grad_() for _ in range(3))
    padding = torch.ones(2, seqlen, dtype=torch.int64, device=device)
    padding[0, -3:] = 0
    return [q, k, v, padding]


def _notes(function: Compiled) -> list[str]:
    return [note for note in function.site.notes if "tiles" in note or "autotune" in note]


def test_a_cpu_says_that_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRITON_INTERPRETED", False)
    given = _tensors("cpu")
    function = compiled(_padded, autotune=True)
    assert torch.allclose(function(*given), _padded(*given), atol=1e-5)
    assert _notes(function) == ["autotune has nothing to measure: there is no GPU behind cpu"]
    plain = compiled(_padded)
    plain(*given)
    assert _notes(plain) == []


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled, not interpreted")
    monkeypatch.setattr(machine, "TRITON_INTERPRETED", True)
    monkeypatch.setattr(machine, "_triton_version", lambda: "3.7.0")


@pytest.mark.usefixtures("_interpreted")
def test_the_interpreter_says_that_there_is_nothing_to_measure() -> None:
    function = compiled(_padded, autotune=True, lowering="triton")
    function(*_tensors("cpu"))
    assert _notes(function) == ["autotune has nothing to measure: Triton interprets its kernels"]


@pytest.mark.usefixtures("_interpreted")
def test_what_was_tuned_is_what_is_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = FakeGpu(lambda _, tile: float(tile.warps) + 0.1 * tile.queries)
    monkeypatch.setattr(autotune, "unmeasurable", lambda _: None)
    monkeypatch.setattr(Tuner, "here", lambda: tuner(tmp_path, gpu))
    given, own = _tensors("cpu"), _tensors("cpu")
    function = compiled(_padded, autotune=True, lowering="triton")
    found, expected = function(*given), _padded(*own)
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(given[:3], own[:3], strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)
    # Both layers have one row: the second said what the first did.
    (note,) = _notes(function)
    given_tiles = candidates(function.site.spec, Target.current("cpu"))
    best = min(given_tiles.forward, key=lambda tile: gpu.times("forward", tile) or 0.0)
    assert best != given_tiles.forward[0]
    assert f"(autotuned): forward {best.queries}x{best.keys} w{best.warps} s{best.stages} 10 µs (the table's" in note
    said = Codec((Tile,), brief=True).text(best)
    assert function.graphs[0].text.replace("\\", "").count(f'"forward":{said}') == 2

    count = len(gpu.calls)
    again = compiled(_padded, autotune=True, lowering="triton")
    again(*_tensors("cpu"))
    assert len(gpu.calls) == count
    assert _notes(again) == [note.replace("(autotuned)", "(from disk)")]


@pytest.mark.usefixtures("_interpreted")
def test_nothing_is_measured_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def here() -> Tuner:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(autotune, "unmeasurable", lambda _: None)
    monkeypatch.setattr(Tuner, "here", here)
    function = compiled(_padded, lowering="triton")
    function(*_tensors("cpu"))
    assert function.site.decision.lowering == "triton"
    assert _notes(function) == []


@pytest.mark.gpu
def test_a_padded_llama_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="this test compiles a model of transformers: pip install -e '.[models]'")
    from benchmarks import bench_h200, compare, harness, inputs

    monkeypatch.setattr(torch_inductor, "cache_folder", lambda: tmp_path)
    way = inputs.SCENARIOS["prefill_padded"]
    case = bench_h200.Measured(family="llama", implementation="sdpa", scenario=way).case("small", "cuda:0")
    for source in ("autotuned", "from disk"):
        torch._dynamo.reset()
        attn_compiler.reset()
        options = {"autotune": True, "lowering": "triton"}
        model = torch.compile(case.model, backend="attn_compiler", options=options)
        step = harness.make_step(model, case.inputs, training=case.training)
        step()
        errors = compare.numerics(case, step)
        assert errors["numerics"] == "ok", errors
        notes = {note for report in attn_compiler.reports() for site in report.sites for note in site.notes}
        tiles = [note for note in notes if note.startswith("tiles")]
        assert tiles
        assert all(note.startswith(f"tiles ({source}): forward ") for note in tiles)
