"""Every case of the survey, and what running one gives: sites found against sites in the model, and the worst number.

found = sum over compiled graphs of (sites in its report) x (times it ran)
expected = attentions that the same forwards run eagerly, counted independently (counting.py) and equal to the family's
formula, less those that never reach any backend (Family.uncaptured, which a test holds against Dynamo)
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import attn_compiler
from attn_compiler.compiling.explaining import checked_settings
from attn_compiler.reporting.report import Report
from attn_compiler.verifying import Verification
from tests.hf import mask_kinds, older
from tests.hf.comparison import Worst, worst
from tests.hf.counting import AttentionCounter
from tests.hf.decoders import DECODERS
from tests.hf.encoders import ENCODERS, SEQ2SEQ, VISION
from tests.hf.family import Family
from tests.hf.modules import OTHER_LIBRARIES, TORCH_MODULES
from tests.hf.outputs import Named, run
from tests.hf.packages import Unavailable
from tests.hf.scenarios import SCENARIO, SCENARIOS, Scenario, Trial, distributed, prepare

FAMILIES: tuple[Family, ...] = (*DECODERS, *ENCODERS, *VISION, *SEQ2SEQ, *TORCH_MODULES, *OTHER_LIBRARIES)
FAMILY = {family.name: family for family in FAMILIES}

# Kernels even where, at these sizes, the model's own code is measured to be faster: the numbers of the kernels are the point.
# verify: every recovered mask and bias, at every index, against the model's own, in each case.
OPTIONS = {"inner": "aot_eager", "strict": True, "verify": True, "lowerings": ("sdpa_cpu_flash", "math")}


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """One run of the survey. dtype: "fp32", "bf16", or "amp" (float32 under bfloat16 autocast)."""

    family: str
    scenario: str
    impl: str
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.family}-{self.scenario}-{self.impl}-{self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case gave. status: "ok"; "sites" (found differs from expected); "numbers"; "miscounted" (the family's formula is
    wrong); "error"; "absent" (the family does not have the scenario); "unavailable" (a package is missing).

    kinds: what the masks were proved to be, and at how many sites. unproved: why masks made in the graph were not. verified,
    biases: masks, and what else is added, held against the model's own; unverified: why others were not.
    detail: the reason for every status but "ok". graphs: compiled graphs that held a site or a miss. max_error: the worst
    tensor's error over its largest value; limit: that error over what is allowed.
    """

    case: Case
    status: str
    detail: str = ""
    found: int = 0
    expected: int = 0
    uncaptured: int = 0
    graphs: int = 0
    lowerings: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    kinds: tuple[tuple[str, int], ...] = ()
    unproved: tuple[str, ...] = ()
    verified: int = 0
    biases: int = 0
    unverified: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()
    max_error: float | None = None
    limit: float | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status in ("sites", "numbers", "miscounted", "error")


def cases() -> Iterator[Case]:
    """Every family in every scenario, implementation and dtype, those that the family does not have included."""
    for family in FAMILIES:
        lacking = tuple(impl for impl in ("sdpa", "eager") if impl in family.absent)
        for scenario in SCENARIOS:
            for impl in (*family.impls, *lacking):
                for dtype in scenario.dtypes:
                    yield Case(family=family.name, scenario=scenario.name, impl=impl, dtype=dtype)


def why_absent(case: Case) -> str | None:
    """Why the family does not have the case, or None if it has."""
    absent = FAMILY[case.family].absent
    if case.impl in absent:
        return absent[case.impl]
    if case.scenario in absent:
        return absent[case.scenario]
    with_this_release = older.why_absent(case.family, case.scenario, case.impl)
    if with_this_release is not None:
        return with_this_release
    return SCENARIO[case.scenario].why_not(FAMILY[case.family])


class Recorder:
    """A torch.compile backend that hands each graph to attn_compiler, keeps its report, and counts how often the graph runs.

    The counts matter where a graph break splits a model: layers of one class then share a graph.
    """

    def __init__(self, options: Mapping[str, Any] = OPTIONS) -> None:
        # Decisions about linear attention read these of a backend.
        self.own_options, _ = checked_settings(None, dict(options))
        self.options = dict(options)
        self.reports: list[Report] = []
        self.runs: list[int] = []
        self.checks: tuple[Verification, ...] = ()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        backend: Any = torch._dynamo.lookup_backend("attn_compiler")
        compiled = backend(gm, example_inputs, options=self.options)
        index = len(self.reports)
        self.reports.append(attn_compiler.reports()[-1])
        self.runs.append(0)

        def counted(*args: Any) -> Any:
            self.runs[index] += 1
            return compiled(*args)

        return counted

    @property
    def found(self) -> int:
        return sum(report.num_sites * runs for report, runs in zip(self.reports, self.runs, strict=True))


def run_case(case: Case) -> Result:
    """Run one case. What the model or the backend raises, it raises."""
    reason = why_absent(case)
    if reason is not None:
        return Result(case=case, status="absent", detail=reason)
    started = time.perf_counter()
    torch._dynamo.reset()
    try:
        result = _compare(case, FAMILY[case.family], SCENARIO[case.scenario])
    except Unavailable as missing:
        return Result(case=case, status="unavailable", detail=str(missing))
    finally:
        torch._dynamo.reset()
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def run_or_tell(case: Case) -> Result:
    """As run_case, with status "error" and the message instead of an exception."""
    try:
        return run_case(case)
    except Exception as error:  # noqa: BLE001 - one broken case is a row of the table, not the end of the survey
        return Result(case=case, status="error", detail=f"{type(error).__name__}: {error}")


def _compare(case: Case, family: Family, scenario: Scenario) -> Result:
    trial = prepare(family, scenario, case.impl, case.dtype)
    counter, eager = _run_eager(trial)
    reference = None if case.dtype == "fp32" else _run_fp32(trial)
    recorder, compiled = _run_compiled(trial)
    result = _described(case, recorder)
    formula = family.expected(scenario.name) * scenario.calls
    beyond = family.uncaptured[scenario.name].sites if scenario.name in family.uncaptured else 0
    result = dataclasses.replace(result, expected=counter.sites - beyond, uncaptured=beyond, found=recorder.found)
    if counter.sites != formula:
        return dataclasses.replace(result, status="miscounted", detail=f"{formula} by formula, ran {counter.calls}")
    if scenario.compares:
        result = _with_numbers(result, worst(compiled, eager, reference))
    if result.found != result.expected:
        return dataclasses.replace(result, status="sites", detail=_lost(recorder, result.expected))
    return result


def _run_eager(trial: Trial) -> tuple[AttentionCounter, Named]:
    counter = AttentionCounter()

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return trial.model(*args, **kwargs)

    return counter, run(trial, trial.model, counted)


def _run_fp32(trial: Trial) -> Named:
    """The numeric reference: the same weights and inputs in float32, eagerly."""
    model: nn.Module = copy.deepcopy(trial.model).float()
    return run(dataclasses.replace(trial, model=model, autocast=False), model, model)


def _run_compiled(trial: Trial) -> tuple[Recorder, Named]:
    recorder = Recorder()
    dynamic = True if trial.scenario.dynamic else None
    with distributed(trial) as target:
        compiled = torch.compile(target, backend=recorder, dynamic=dynamic)
        attn_compiler.reset()
        outputs = run(trial, trial.model, compiled)
        recorder.checks = attn_compiler.verifications()
        return recorder, outputs


def _described(case: Case, recorder: Recorder) -> Result:
    sites = [site for report in recorder.reports for site in report.sites]
    misses = [miss for report in recorder.reports for miss in report.misses]
    checks = [check for check in recorder.checks if check.subject in ("mask", "bias")]
    held = Counter(check.subject for check in checks if check.skipped is None)
    return Result(
        case=case,
        status="ok",
        graphs=sum(bool(report.sites or report.misses) for report in recorder.reports),
        lowerings=_distinct(site.decision.lowering for site in sites),
        patterns=_distinct(site.pattern for site in sites),
        masks=_distinct(site.spec.mask.words for site in sites),
        kinds=mask_kinds.counted(zip(recorder.reports, recorder.runs, strict=True)),
        unproved=mask_kinds.reasons(recorder.reports),
        verified=held["mask"],
        biases=held["bias"],
        unverified=_distinct(v.skipped for v in checks if v.skipped is not None),
        scores=_distinct(site.spec.score.words for site in sites),
        misses=_distinct(
            f"{miss.anchor}: {miss.nearest} stopped at {miss.stopped_at}: {miss.reason}" for miss in misses
        ),
    )


def _with_numbers(result: Result, one: Worst) -> Result:
    result = dataclasses.replace(result, max_error=one.relative, limit=one.ratio)
    if one.agrees:
        return result
    detail = f"{one.name} is off by {one.error:.3g}, {one.allowed:.3g} is allowed"
    return dataclasses.replace(result, status="numbers", detail=detail)


def _lost(recorder: Recorder, expected: int) -> str:
    missed = sum(report.num_misses * runs for report, runs in zip(recorder.reports, recorder.runs, strict=True))
    outside = expected - recorder.found - missed
    return f"found {recorder.found} of {expected}: {missed} refused by the matcher, {outside} never reached it"


def _distinct(values: Iterator[str] | Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
