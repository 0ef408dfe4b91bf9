"""The harness: sides take turns, compared and linked; releases of Triton."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import bench_embed, compare, embed_peers, harness, kernel_code, linking, waves
from benchmarks.compare import Case
from benchmarks.harness import BACKEND, BASELINE


def test_timing_columns_hold_both_sides() -> None:
    columns = harness.timing_columns({BASELINE: [4.0] * 5, BACKEND: [1.0, 2.0, 2.0, 2.0, 9.0]})
    assert columns["ratio"] == "2.000"
    assert columns[f"{BACKEND}_p50_ms"] == "2"
    assert float(columns[f"{BACKEND}_p80_ms"]) > 2
    assert columns["rounds"] == "5"


def test_a_training_step_leaves_gradients_of_one_call_only() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    step = harness.make_step(model, {"input": torch.randn(2, 4, 3)}, training=True)
    step()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step()
    assert len(first) == 4
    assert all(g.abs().sum() > 0 for g in first)
    torch.testing.assert_close(first, [p.grad for p in model.parameters()])


def test_rows_are_on_disk_at_once_and_kept_by_append(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.csv"
    harness.CsvFile(path, ["model", "ratio"]).add({"model": "llama", "ratio": "1.5"})
    again = harness.CsvFile(path, ["model", "ratio"], append=True)
    again.add({"model": "gpt2"})
    assert [row["model"] for row in harness.read(path)] == ["llama", "gpt2"] == [row["model"] for row in again.rows]
    with pytest.raises(ValueError, match="speed"):
        again.add({"speed": "1"})


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"ratio": "0.98", "numerics": "ok"}, 0),
        ({"ratio": "0.97", "numerics": "ok"}, 1),
        ({"ratio": "2.0", "numerics": "WRONG"}, 1),
        ({"failure": "no such kernel"}, 0),
    ],
)
def test_failures_are_the_slow_and_the_wrong(row: dict[str, str], status: int) -> None:
    assert harness.failures([row]) == status


class Named:
    def __init__(self, name: str) -> None:
        self.names = {"case": name}


def test_a_command_measures_what_is_not_there_and_judges_rows_of_its_commit(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(case: Named, given: Any) -> Iterator[dict[str, str]]:
        asked.append(case.names["case"])
        if asked[-1] == "broken":
            raise RuntimeError("no such kernel")
        yield {**case.names, "us": "1"}

    bench = harness.Bench(
        doc="", results="x.csv", columns=("case", "us", "failure"), devices=("cpu",), budget=100.0, measure=measure,
        cases=lambda given: map(Named, given.cases), options=(harness.PATTERNS,),
    )  # fmt: skip
    main, path = harness.run(bench), tmp_path / "x.csv"
    common = ["--output", str(path), "--append", "--cases"]
    assert main([*common, "a", "broken", "--commit", "old"]) == 1
    assert main([*common, "a", "broken", "b", "--commit", "new"]) == 0, "what another commit broke is not this one's"
    assert asked == ["a", "broken", "b"]
    assert main([*common, "c", "--budget-seconds", "-1", "--commit", "new"]) == 0
    rows = {row["case"]: row for row in harness.read(path)}
    assert {name: row["failure"] for name, row in rows.items()} == {
        "a": "", "broken": "RuntimeError: no such kernel", "b": "",
    }  # fmt: skip
    assert rows["b"]["commit"] == "new"
    assert rows["b"]["torch"] == torch.__version__
    assert rows["b"]["device"]


def test_relative_error_is_over_all_tensors_together() -> None:
    reference = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert compare.relative_error(reference, reference) == 0
    assert abs(compare.relative_error([torch.tensor([3.0]), torch.tensor([4.5])], reference) - 0.1) < 1e-6


def test_numerics_compares_only_valid_positions() -> None:
    model = nn.Linear(4, 4)
    inputs = {"input": torch.randn(2, 3, 4)}
    valid = torch.tensor([[True, True, False], [True, True, True]])

    def ours() -> torch.Tensor:
        output = model(inputs["input"]).detach()
        output[0, 2] = 100.0
        return output

    assert compare.numerics(Case(model=model, inputs=inputs, valid=valid), ours)["numerics"] == "ok"
    assert compare.numerics(Case(model=model, inputs=inputs), ours)["numerics"] == "WRONG"
    nan = compare.numerics(Case(model=model, inputs=inputs), lambda: torch.full((2, 3, 4), torch.nan))
    assert nan["numerics"] == "WRONG"


def test_tensors_in_a_list_are_in_float32_too() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return sum((self.linear(x) for x in xs), torch.zeros((), dtype=self.linear.weight.dtype))

    model, inputs = Sum(), {"xs": [torch.randn(2, 4, dtype=torch.bfloat16) for _ in range(2)]}
    case = Case(model=model, inputs=inputs)
    assert compare.numerics(case, harness.make_step(model, inputs, training=False))["numerics"] == "ok"


def test_numerics_of_a_training_step_compares_gradients() -> None:
    model = nn.Linear(4, 4)
    inputs = {"input": torch.randn(2, 4)}
    case = Case(model=model, inputs=inputs, training=True)
    right = harness.make_step(model, inputs, training=True)

    def wrong() -> torch.Tensor:
        output = right()
        assert model.weight.grad is not None
        model.weight.grad *= 1.01
        return output

    assert compare.numerics(case, right)["numerics"] == "ok"
    assert compare.numerics(case, wrong)["numerics"] == "WRONG"


def test_each_side_gets_its_own_model_and_ours_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = {}

    def noted(model: nn.Module, *, backend: str, options: object, dynamic: bool) -> nn.Module:
        compiled[backend] = (model, options, dynamic)
        return model

    monkeypatch.setattr(torch, "compile", noted)
    ours, other = nn.Linear(4, 4), nn.Linear(4, 4)
    case = Case(model=ours, baseline=other, inputs={"input": torch.randn(2, 4)})
    assert compare.chosen(()) == {"sites": "0", "misses": "0", "lowerings": ""}
    compare.compile_both(case, {"lowering": "triton"})
    assert compiled == {"inductor": (other, None, False), "attn_compiler": (ours, {"lowering": "triton"}, False)}
    compare.compile_both(Case(model=ours, inputs=case.inputs))
    assert compiled == {"inductor": (ours, None, False), "attn_compiler": (ours, None, False)}


def _script(path: Path, code: int) -> str:
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_one_that_compiles_and_does_not_link_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, right = _script(tmp_path / "broken", 1), _script(tmp_path / "right", 0)
    monkeypatch.setenv("CXX", broken)
    monkeypatch.setattr(linking, "OTHERS", ("no such compiler", right))
    assert linking.compiler.__wrapped__() == right


def test_this_machines_compiler_links() -> None:
    found = linking.compiler()
    assert found is not None
    assert linking.settings() == {"cpp.cxx": (None, found)}


# How the machine code of two checkouts is compared.
SAME = {"registers": "64", "stack": "0", "shared": "1024", "instructions": "9"} | dict.fromkeys(
    ("sass", "moved", "opcodes"), "a"
)


def row(case: str, **other: str) -> dict[str, str]:
    return {"case": case, "kernel": "attention_forward", "nth": "0", **SAME, **other}


def test_an_instruction_is_read_without_its_address() -> None:
    line = "        /*00b0*/              @!P0 LDG.E.128 R4, [R2.64] ;                 /* 0x0000000402047981 */"
    assert kernel_code._instruction(line) == "@!P0 LDG.E.128 R4, [R2.64]"
    assert kernel_code._instruction(".text.attention_forward:") == ""


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({"sass": "b"}, "arguments elsewhere"),
        ({"sass": "b", "moved": "b"}, "the same instructions, reordered"),
        (
            {"sass": "b", "moved": "b", "opcodes": "b", "registers": "80"},
            "another: registers 64 to 80, stack 0 to 0, shared 1024 to 1024, instructions 9 to 9",
        ),
    ],
)
def test_the_smallest_difference_is_named(other: dict[str, Any], verdict: str) -> None:
    said = kernel_code.compare([row("one"), row("two")], [row("one", **other), row("two")])
    assert said == [f"one attention_forward 0: {verdict}", f"1 {verdict}, 1 the same machine code"]


def test_a_kernel_of_one_checkout_alone_is_named() -> None:
    assert kernel_code.compare([row("one")], [])[0] == "one attention_forward 0: only before"


# Cases are prepared side by side and finished in turn.

#: seconds that no test waits, however busy the machine is
NEVER = 3600.0


def prepare(case: str, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Of processes: each case says what it does."""
    if case == "dies":
        os._exit(1)
    if case == "late":
        time.sleep(NEVER)
    if case == "late with the lock":
        with lock:
            time.sleep(NEVER)
    with lock:
        prepared = time.monotonic()

    def finish() -> waves.Row | None:
        if case == "dies later":
            os._exit(1)
        begun = time.monotonic()
        time.sleep(0.1)
        times = {"prepared": str(prepared), "begun": str(begun), "ended": str(time.monotonic())}
        return None if case == "none" else {"pid": str(os.getpid()), **times}

    return finish


def run(cases: list[str], jobs: int, *, until: float = float("inf"), **further: Any) -> list[Any]:
    given: dict[str, Any] = {"wave_seconds": NEVER, "finish_seconds": NEVER, **further}
    return list(waves.run(cases, prepare, jobs=jobs, until=until, **given))


def run_beside_a_late_one(cases: list[str], jobs: int, **further: Any) -> dict[str, Any]:
    """Waves that end before a late one does, and are long enough for the others on this machine, as it is now."""
    seconds, others = 1.25, [case for case in cases if not case.startswith("late")]
    while True:
        found = dict(run(cases, jobs, wave_seconds=seconds, **further))
        if seconds > NEVER / 20 or all("pid" in (found[case] or ()) for case in others):
            return found
        seconds *= 4


def test_a_wave_is_prepared_whole_before_its_cases_are_finished_one_by_one() -> None:
    found = run(["a", "b", "c"], 2)
    assert [case for case, _ in found] == ["a", "b", "c"]
    first, second, third = (row for _, row in found)
    assert first["pid"] != second["pid"]
    assert first["pid"] == third["pid"]
    assert float(second["prepared"]) < float(first["begun"])
    assert float(first["ended"]) < float(second["begun"])
    assert float(second["ended"]) < float(third["prepared"])


def test_one_that_dies_costs_its_own_case() -> None:
    found = dict(run(["dies", "none", "dies later", "a"], 2))
    assert found["dies"] == {"failure": "its process died"}
    assert found["none"] is None
    assert found["dies later"]["failure"].startswith("EOFError")
    assert "pid" in found["a"]


def test_one_that_is_late_is_left_behind() -> None:
    found = run_beside_a_late_one(["late", "a"], 2)
    assert found["late"] == {"failure": "it was not compiled in time"}
    assert "pid" in found["a"]


def test_what_a_late_one_held_is_free_again() -> None:
    found = run_beside_a_late_one(["late with the lock", "a", "b"], 1)
    assert found["late with the lock"] == {"failure": "it was not compiled in time"}
    assert "pid" in found["a"]
    assert "pid" in found["b"]


@pytest.mark.parametrize("logits", [False, True])
def test_groups_of_sorted_rows_give_what_a_padded_batch_gives(logits: bool) -> None:
    ids = torch.arange(1, 16).view(3, 5)
    mask = (torch.arange(5) < torch.tensor([2, 5, 3])[:, None]).long()
    shapes = []

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        found = (ids * mask)[..., None].float().expand(-1, -1, 2)
        return found.sum(1) if logits else found

    torch.testing.assert_close(embed_peers.in_groups(encode, 2)(ids, mask), encode(ids, mask))
    assert shapes == [(2, 5), (1, 2), (3, 5)]


def test_cells_have_as_many_real_tokens_as_they_say() -> None:
    for cell in bench_embed.CELLS:
        if cell.length:
            ids, mask = cell.given
            assert ids.shape == mask.shape == (cell.batch, cell.length)
            assert mask[0].all()
            assert (mask[:, 1:] <= mask[:, :-1]).all(), "padding on the right"
            assert abs(float(mask.float().mean()) - cell.fill / 100) < 0.005
