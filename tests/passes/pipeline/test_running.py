"""The pipeline: its steps, their work, and what fails."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes.graph.onward import Onward, Trial
from attn_compiler.passes.graph.unit import Unit, units
from attn_compiler.passes.pipeline import running, steps
from attn_compiler.passes.pipeline.step import PipelineStep, check_contracts, parsed
from attn_compiler.passes.pipeline.steps import PIPELINE
from attn_compiler.passes.pipeline.work import Work, located
from attn_compiler.reasons.errors import PassFailed, UnknownOption
from attn_compiler.reporting.dump import timed
from attn_compiler.torch_private.snapshots import Snapshot
from tests.passes.compiling import captured


# Steps run in their order, go on where one says, and what fails of a graph on trial is for its judge.
@pytest.fixture
def work() -> Work:
    gm, _ = captured(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), torch.randn(1, 2, 4, 8))
    return Work(gm=gm, options=Options(), units=units(gm, Options()))


Says = Callable[..., Any]
#: a step that may be imported
RUN = "graph.unit.leave_closed(unit)"


def _ran(work: Work, monkeypatch: pytest.MonkeyPatch, *given: tuple[str, Says, dict[str, Any]]) -> list[str]:
    """The names of the steps that ran. given: of each step its name, what it says, and fields."""
    ran: list[str] = []
    says = {name: said for name, said, _ in given}

    def call(step: PipelineStep, values: running.StepValues) -> Any:
        ran.append(step.name)
        return says[step.name](values)

    monkeypatch.setattr(running, "call", call)
    made = tuple(PipelineStep(name=name, run=RUN, **fields) for name, _, fields in given)
    monkeypatch.setattr(steps, "PIPELINE", made)
    running.run_steps(work)
    return ran


def test_a_step_of_an_option_is_skipped_without_it(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("options.packs", "options.check_invariants", "unit.is_spread", "unit.is_body")
    given = [(name, _nothing, {"only_if": name}) for name in names]
    assert _ran(work, monkeypatch, *given) == ["options.check_invariants"]


def _nothing(*_: Any) -> None: ...


def _once(said: Any) -> Says:
    """Said the first time."""
    left = [said]
    return lambda *_: left.pop() if left else None


def test_each_unit_goes_through_all_of_its_steps_before_the_next(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.units = [*work.units, *units(work.gm, work.options)]
    on_work = {"on": "work"}
    ran = _ran(
        work, monkeypatch, ("a", _nothing, on_work), ("b", _nothing, {}), ("c", _nothing, {}), ("d", _nothing, on_work)
    )
    assert ran == ["a", "b", "c", "b", "c", "d"]
    assert list(work.seconds) == ["b", "c"]


def test_nothing_more_is_done_where_a_step_says_so(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Says = lambda *_: Onward(step=None)  # noqa: E731
    on_work = {"on": "work"}
    assert _ran(work, monkeypatch, ("a", done, {}), ("b", _nothing, {}), ("c", _nothing, on_work)) == ["a", "c"]
    assert _ran(work, monkeypatch, ("a", done, on_work), ("b", _nothing, on_work)) == ["a"]


def test_a_step_goes_on_from_one_that_its_line_names(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    back = ("b", _once(Onward(step="a")), {"leads": ("a",)})
    assert _ran(work, monkeypatch, ("a", _nothing, {}), back, ("c", _nothing, {})) == ["a", "b", "a", "b", "c"]
    with pytest.raises(ValueError, match="of which its line says nothing"):
        _ran(work, monkeypatch, ("a", _nothing, {}), ("b", _once(Onward(step="a")), {}))


def _fails(*_: Any) -> None:
    raise KeyError("not today")


@pytest.mark.parametrize("way", [_fails, lambda *_: Onward(step="d")], ids=["fails", "goes on elsewhere"])
def test_on_trial_every_way_leads_to_the_judge(way: Says, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception | None] = []
    looks: list[Unit] = []
    trial = Trial()

    def looked(values: running.StepValues) -> Any:
        looks.append(values.get("unit"))
        return way() if len(looks) == 2 else None

    def judge(values: running.StepValues) -> None:
        assert values.get("trial") is trial
        failed.append(values.get("failed"))

    ran = _ran(
        work,
        monkeypatch,
        ("a", looked, {"leads": ("d",)}),
        ("b", lambda _: trial, {"leads": ("a",), "judge": "c"}),
        ("c", judge, {}),
        ("d", _nothing, {}),
    )
    assert ran == ["a", "b", "a", "c", "d"], "no trial within a trial"
    assert [type(one) for one in failed] == [KeyError if way is _fails else type(None)]
    assert looks[0].log.left_alone is None


def test_a_judge_runs_where_its_graph_is_on_trial(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    class Same(Trial):
        is_other_graph = False

    given = ({"leads": ("a",), "judge": "c"}, {"leads": ("a",), "judge": "d"})
    for said, judged in ((None, []), (Same(), ["d"])):
        ran = _ran(
            work,
            monkeypatch,
            ("a", _nothing, given[0]),
            ("b", lambda _, said=said: said, given[1]),
            *((name, _nothing, {}) for name in ("c", "d", "e")),
        )
        assert ran == ["a", "b", *judged, "e"]


def test_what_fails_otherwise_costs_the_graph(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ran(work, monkeypatch, ("a", _fails, {}), ("b", _nothing, {})) == ["a"]
    (unit,) = work.units
    assert unit.log.left_alone is not None
    assert "not today" in unit.log.left_alone.observed
    with pytest.raises(PassFailed, match="not today") as caught:
        _ran(work, monkeypatch, ("a", _fails, {"costs_all": True}))
    assert caught.value.pass_name == "a"


def test_a_graph_that_a_step_shows_is_dumped(work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    work.options, work.snapshot = Options(dump_dir=str(tmp_path)), Snapshot(work.gm)
    shown = fx.Graph()
    shown.output(shown.placeholder("shown"))
    _ran(
        work, monkeypatch, ("a", _nothing, {"shows": lambda unit: shown}), ("b", _nothing, {"shows": lambda unit: None})
    )
    names = [path.name for path in tmp_path.rglob("*.txt") if "shown" in path.read_text()]
    assert [name.split(".")[0].split("_", 1)[-1] for name in names] == ["a"]


# What holds of any tuple of steps.
def _step(name: str, run: str = RUN, **further: Any) -> PipelineStep:
    return PipelineStep(name=name, run=run, **further)


def test_steps_after_what_they_need_pass() -> None:
    check_contracts((_step("a"), _step("b", needs=("a",), leads=("a",)), _step("c", needs=("a", "b"))))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((_step("a", needs=("b",)), _step("b")), r"the pass 'a' needs \['b'\], which nothing before it gives"),
        ((_step("a"), _step("a")), "two passes are called 'a'"),
        ((_step("a", leads=("b",)),), r"the pass 'a' leads to \['b'\], which is no pass"),
        ((_step("a", judge="b"),), r"the pass 'a' leads to \['b'\], which is no pass"),
        ((_step("a", "m.f(x)"), _step("b", "x = m.g(gm)")), r"the pass 'a' needs \['x'\], which nothing before"),
        ((_step("a", "f(gm)"),), "is no call of a function"),
    ],
    ids=["too early", "twice", "nowhere", "no judge", "not given", "no call"],
)
def test_others_are_refused(steps: tuple[PipelineStep, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_contracts(steps)


# The pipeline keeps its contracts, and names everything that is done to a graph.
def test_pipeline_keeps_its_contracts() -> None:
    check_contracts(PIPELINE)


@pytest.mark.parametrize("position", range(1, len(PIPELINE)))
def test_a_pass_that_comes_too_early_is_refused(position: int) -> None:
    """Every neighbour exchange breaks a contract: no two passes may be swapped unnoticed."""
    swapped = list(PIPELINE)
    swapped[position - 1], swapped[position] = swapped[position], swapped[position - 1]
    with pytest.raises(ValueError, match=rf"the pass '{PIPELINE[position].name}' needs"):
        check_contracts(tuple(swapped))


def test_a_pass_that_is_missing_is_named_by_what_it_gives() -> None:
    without = tuple(step for step in PIPELINE if step.name != "select")
    with pytest.raises(ValueError, match="select"):
        check_contracts(without)


def test_steps_on_units_stand_in_one_row() -> None:
    on = [step.on for step in PIPELINE]
    first, last = on.index("unit"), len(on) - on[::-1].index("unit")
    assert set(on[first:last]) == {"unit"}


def test_options_that_rewrite_a_graph_go_on_from_its_mirror() -> None:
    assert {step.name: step.judge for step in PIPELINE if "mirror" in step.leads} == {
        "context_parallel": "agree",
        "unpad": "packed",
    }


# What there is of a rewriting while it goes on.
def test_seconds_of_a_part_are_added_up() -> None:
    work = Work(gm=fx.symbolic_trace(lambda x: x), options=Options())
    work.seconds["match"] = 1.0
    with timed("match", work.seconds):
        pass
    assert 1.0 <= work.seconds["match"] < 2.0


def test_time_counts_where_the_part_fails() -> None:
    seconds = {"match": 0.0}
    with pytest.raises(KeyError), timed("match", seconds):
        raise KeyError
    assert seconds["match"] > 0


def test_an_exception_says_which_pass_it_came_from() -> None:
    with pytest.raises(PassFailed, match="recover"), located("recover", None):
        raise ZeroDivisionError
    own = UnknownOption.__new__(UnknownOption)
    with pytest.raises(UnknownOption) as found, located("recover", None):
        raise own
    assert found.value is own


# A checker of types does not see the calls that PIPELINE names.
CALLS = {step.name: parsed(step.run) for step in PIPELINE}
#: type of each value: of a field, or of a step's result
TYPES = {name: field.type for kind in (Work, Unit) for name, field in kind.__dataclass_fields__.items()}
TYPES |= {"work": "Work", "unit": "Unit", "mirror": "Mirror", "failed": "Exception", "decided_for": "dict[str, Target]"}
for one in CALLS.values():
    if one.gives not in {None, *TYPES}:
        TYPES[one.gives] = inspect.get_annotations(one.function)["return"]
#: a judge gets what its own step has given, and an option's outcome is of its own kind
OTHERS = {"trial": {"Trial", "PackedTrial", "Spread"}, "outcome": {"SharedGraph"}}


def _plain(annotation: str) -> str:
    """A type without what a caller may leave out."""
    return re.sub(r"(Sequence|Iterable)\[", "list[", annotation.replace("Mapping[", "dict[").removesuffix(" | None"))


@pytest.mark.parametrize("name", CALLS)
def test_steps_take_and_give_what_their_lines_say(name: str) -> None:
    call = CALLS[name]
    types = inspect.get_annotations(call.function)
    inspect.signature(call.function).bind(*call.takes)
    # An argument has its parameter's name, or else its type.
    for taken, parameter in zip(call.takes, inspect.signature(call.function).parameters, strict=False):
        assert _plain(types[parameter]) in {_plain(TYPES.get(taken, "")), *OTHERS.get(taken, ())}, (taken, parameter)
    if call.gives is None:
        assert types["return"] in {"None", "Onward | None", "Spread | None", "PackedTrial | None"}
    else:
        assert _plain(types["return"]) in {_plain(TYPES[call.gives]), *OTHERS.get(call.gives, ())}
