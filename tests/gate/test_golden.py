"""What is the same in every run is as the table says. A change on purpose renews it: python -m tests.gate

Each kind has a planted regression, which the same comparison has to name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import LayoutDemand
from attn_compiler.lowerings.choice import in_order, priorities
from attn_compiler.lowerings.decode import schedule
from benchmarks import select_cases
from tests.gate import golden, plans, table
from tests.gate.kernels import COMPILED
from tests.lowerings import golden_decisions

KEPT = table.read(golden.PATH)

#: Python calls of the passes, now and as the table has them
MOST_CALLS = 1.1
#: The passes' share of CPU time beside Dynamo's is 0.09 to 0.18, on an idle machine as on a busy one.
MOST_SHARE = 0.4

Lines = golden.Lines


def _differences(kind: str, now: Lines) -> list[str]:
    return table.differences(table.of_kinds(KEPT, [kind]), now)


def _as_before(kind: str, now: Lines) -> None:
    said = _differences(kind, now)
    assert not said, table.failure(said, golden.COMMAND)


# ---- plans: splits, copies, backwards -------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [plans.splits, plans.copies, plans.backwards], ids=lambda plan: plan.__name__)
def test_plans_are_those_of_the_table(plan: Callable[[], Lines]) -> None:
    _as_before(plan.__name__, plan())


def test_another_number_of_splits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(dataclasses.replace(row, least_keys=4 * row.least_keys) for row in schedule.ROWS)
    monkeypatch.setattr(schedule, "ROWS", rows)
    said = _differences("splits", plans.splits())
    assert any(line.startswith("splits decode b1_1k, sm90: was 16 splits") for line in said), said


def test_another_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = LayoutDemand(alignment=1 << 20)
    monkeypatch.setattr(type(by_name("sdpa_cudnn")), "demand", lambda self, spec: demand)
    said = _differences("copies", plans.copies())
    bytes_of_q = 8 * 2048 * 16 * 128 * 2
    assert any("causal_d128_s2048, sm100: was sdpa_cudnn: no copy, is sdpa_cudnn: " in line for line in said), said
    assert any(f"q {bytes_of_q} bytes" in line for line in said)


def test_another_backward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order.TABLE, "rows", tuple)
    said = _differences("backwards", plans.backwards())
    assert "backwards causal_d128_s2048, deterministic: was hopper_in_order, is triton" in said


# ---- kernels: grids, registers, stack, shared memory ---------------------------------------------------------------


@pytest.fixture(scope="module")
def hopper_compiler() -> None:
    """Whatever is missing to compile for Hopper, its kernels can neither be launched nor compiled here."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from triton import knobs

    for tool in ("ptxas", "cuobjdump"):
        try:
            getattr(knobs.nvidia, tool).path  # noqa: B018
        except RuntimeError as error:
            pytest.skip(f"Triton can't compile for a GPU that is not there: {error}")


@pytest.mark.usefixtures("hopper_compiler")
def test_launches_are_those_of_the_table() -> None:
    _as_before("launch", golden.launches())


@pytest.mark.further
@pytest.mark.usefixtures("hopper_compiler")
def test_another_grid_is_named() -> None:
    """Planted: a program does the work of two in the forwards of Triton's kernels."""
    prelude = """
from attn_compiler.lowerings.triton import launch
before = launch.launch
def planted(kernel, same, tensors, arguments, part=""):
    import dataclasses
    def halved():
        found = arguments()
        return dataclasses.replace(found, grid=(found.grid[0] // 2, *found.grid[1:]))
    return before(kernel, same, tensors, halved if kernel.fn.__name__ == "attention_forward" else arguments, part)
launch.launch = planted
"""
    said = _differences("launch", golden.launches(prelude))
    (line,) = [line for line in said if line.startswith("launch triton causal_128, ")]
    assert line.startswith("launch triton causal_128, attention_forward 0: was grid 8 x 4 x 2, num_warps 4")
    assert ", is grid 4 x 4 x 2, num_warps 4" in line


def _of_this_triton() -> Lines:
    found = {
        key: value
        for key, value in KEPT.items()
        if key[0] == "code" and key[1].endswith(f"Triton {golden.triton_release()}")
    }
    if not found:
        pytest.skip(f"the table has no machine code of Triton {golden.triton_release()}")
    return found


@pytest.mark.further
@pytest.mark.usefixtures("hopper_compiler")
def test_registers_stack_and_shared_memory_are_those_of_the_table() -> None:
    before = _of_this_triton()
    said = table.differences(before, golden.code())
    assert not said, table.failure(said, golden.COMMAND)


@pytest.mark.further
@pytest.mark.usefixtures("hopper_compiler")
def test_other_registers_are_named() -> None:
    """Planted: decoding over a latent with half the warps."""
    prelude = """
import dataclasses
from attn_compiler.lowerings.decode import latent_schedule
from tests.gate import kernels
latent_schedule.ROWS = tuple(dataclasses.replace(row, warps=row.warps // 2) for row in latent_schedule.ROWS)
kernels.code.__defaults__ = (("latent 16",),)
"""
    before = {key: value for key, value in _of_this_triton().items() if key[1].startswith(COMPILED[2])}
    said = table.differences(before, golden.code(prelude))
    assert any(line.startswith("code latent 16") and "attention_decode_latent 0: was" in line for line in said), said


# ---- decisions -----------------------------------------------------------------------------------------------------


def test_another_row_of_the_order_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the orders that were measured for sm90, the other way round."""
    rows = tuple(
        dataclasses.replace(row, order=tuple(reversed(row.order))) if row.sms == (90, 90) else row
        for row in priorities.ROWS
    )
    monkeypatch.setattr(priorities, "ROWS", rows)
    spec = select_cases.spec_of(select_cases.BY_NAME["causal_d128_s2048"], training=False)
    now = {
        ("decision", "measured_causal_d128_s2048", "sm90"): golden_decisions.decided(
            spec, golden_decisions.TARGETS["sm90"]
        )
    }
    before = {key: golden_decisions.read()[key] for key in now}
    (said,) = table.differences(before, now)
    assert said.startswith("decision measured_causal_d128_s2048, sm90: was hopper")


# ---- captures: graphs, sites, copies, and what the passes cost -----------------------------------------------------


def _needs_versions(*names: str) -> None:
    for name in names:
        key = ("made with", "captures", name)
        if KEPT[key] != (found := golden.made_with()[key]):
            pytest.skip(f"the table was made with {name} {KEPT[key]}, this is {found}")


@pytest.fixture(scope="module")
def captured() -> Lines:
    pytest.importorskip("transformers")
    _needs_versions("torch", "transformers")
    return golden.captures()


#: of captures what costs time, and is bounded instead
_COSTS = ("calls", "share")


def _without_costs(lines: Lines) -> Lines:
    return {key: value for key, value in lines.items() if key[0] == "capture" and key[2] not in _COSTS}


def _dear(lines: Lines) -> list[str]:
    """What costs more than it may."""
    found = []
    for (kind, name, what), value in lines.items():
        if what == "calls" and int(value) > MOST_CALLS * int(KEPT[kind, name, what]):
            found.append(f"{name}: {value} Python calls within the passes, {KEPT[kind, name, what]} before")
        if what == "share" and float(value) > MOST_SHARE:
            found.append(f"{name}: the passes take {value} of the CPU time of Dynamo's tracing, more than {MOST_SHARE}")
    return found


@pytest.mark.further
def test_captures_are_those_of_the_table(captured: Lines) -> None:
    said = table.differences(_without_costs(KEPT), _without_costs(captured))
    assert not said, table.failure(said, golden.COMMAND)


@pytest.mark.further
def test_the_passes_cost_no_more_than_they_did(captured: Lines) -> None:
    _needs_versions("python")
    assert not _dear(captured), table.failure(_dear(captured), golden.COMMAND)


def test_the_passes_of_the_first_models_cost_no_more_than_they_did() -> None:
    """Of the first ones in the table: what is compiled before changes what the passes call."""
    pytest.importorskip("transformers")
    _needs_versions("torch", "transformers", "python")
    found = golden.captures(["llama"])
    assert found
    assert not _dear(found), table.failure(_dear(found), golden.COMMAND)


def test_another_graph_and_dearer_passes_are_named() -> None:
    """Planted: a graph break in the model, and a pass that looks at each node again and again, and at nothing else for a second."""
    pytest.importorskip("transformers")
    _needs_versions("torch", "transformers", "python")
    prelude = """
import torch, transformers
from attn_compiler.passes.pipeline import running
forward = transformers.BertModel.forward
def broken(self, *given, **named):
    made = forward(self, *given, **named)
    torch._dynamo.graph_break()
    return made.last_hidden_state * 2
transformers.BertModel.forward = broken
run_steps = running.run_steps
def work(node):
    return node.name
def slow(given):
    for _ in range(500):
        for node in given.gm.graph.nodes:
            work(node)
    sum(range(40_000_000))
    return run_steps(given)
running.run_steps = slow
"""
    found = golden.captures(["bert"], prelude)
    name = "bert sdpa train_padded"
    said = table.differences(
        {("capture", name, "graphs"): KEPT["capture", name, "graphs"]},
        {key: found[key] for key in found if key[2] == "graphs"},
    )
    assert said == [f"capture {name}, graphs: was 1, is 2"]
    dear = _dear(found)
    assert [line.split(": ")[1].split(" ")[0] for line in dear] == [found["capture", name, "calls"], "the"], dear
