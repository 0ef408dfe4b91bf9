"""The pipeline: its passes in order, what each needs and gives, and `run`, which carries it out on one graph.

A pass is a function (unit, mirror) -> None on one GraphModule. Imported where passes run: a rewrite that was kept needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes import context_parallel, unpad
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.unit import Unit, unsupported_tensor
from attn_compiler.passes.graph.work import Work, located, timed
from attn_compiler.passes.matching import match, unseen as unseen_attention
from attn_compiler.passes.recovering import body_inputs, borders, recover
from attn_compiler.passes.recovering.borders import Border
from attn_compiler.passes.spelling import checkpoints, flex, plain_calls
from attn_compiler.passes.writing import buffers, layout, lower, select, summary, verify
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reporting.dump import Dumper
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """needs, gives: facts that must be there before it runs, and that are there after. rewrites: changes the Dynamo graph."""

    name: str
    run: Callable[[Unit, Mirror], None]
    needs: frozenset[str]
    gives: frozenset[str]
    rewrites: bool = False


def _expand(unit: Unit, _: Mirror | None) -> None:
    plain_calls.spell_out(unit)


def _mirror(unit: Unit, _: Mirror | None) -> None:
    unit.mirrored()


def _give_back(unit: Unit, _: Mirror | None) -> None:
    flex.give_back(unit.graph_module, unit.spelled)


def _facts(*names: str) -> frozenset[str]:
    return frozenset(names)


PIPELINE: tuple[Pass, ...] = (
    Pass(name="expand", run=_expand, needs=_facts(), gives=_facts("plain calls"), rewrites=True),
    Pass(name="mirror", run=_mirror, needs=_facts("plain calls"), gives=_facts("mirror")),
    Pass(name="match", run=match.run, needs=_facts("mirror"), gives=_facts("sites", "misses")),
    Pass(name="recover", run=recover.run, needs=_facts("sites"), gives=_facts("specs")),
    Pass(
        name="context_parallel",
        run=context_parallel.run,
        needs=_facts("mirror", "specs"),
        gives=_facts("whole sequences"),
        rewrites=True,
    ),
    Pass(name="unpad", run=unpad.run, needs=_facts("mirror", "specs", "whole sequences"), gives=_facts("real tokens")),
    Pass(name="select", run=select.run, needs=_facts("specs", "real tokens"), gives=_facts("decisions")),
    Pass(name="layout", run=layout.run, needs=_facts("specs", "decisions"), gives=_facts("copies")),
    Pass(
        name="lower",
        run=lower.run,
        needs=_facts("mirror", "decisions", "copies"),
        gives=_facts("kernels"),
        rewrites=True,
    ),
    Pass(name="give_back", run=_give_back, needs=_facts("kernels"), gives=_facts("own calls"), rewrites=True),
    Pass(name="verify", run=verify.run, needs=_facts("kernels", "own calls"), gives=_facts("checked graph")),
)


def check_contracts(pipeline: tuple[Pass, ...]) -> None:
    """Raise ValueError if a pass needs a fact that no pass before it gives."""
    known: set[str] = set()
    for step in pipeline:
        missing = step.needs - known
        if missing:
            raise ValueError(f"the pass {step.name!r} needs {sorted(missing)}, which nothing before it gives")
        known |= step.gives


check_contracts(PIPELINE)


def run(gm: fx.GraphModule, options: Options, work: Work, border: Border) -> Report:
    """Every pass on every unit, and what is told of that."""
    work.seconds = dict.fromkeys((step.name for step in PIPELINE), 0.0) | work.seconds
    work.dumper = Dumper.create(options.dump_dir if work.units else None, torch_compat.graph_name())
    with located("unseen", None):
        unseen = unseen_attention.rows(gm)
    for unit in work.units:
        _run_on(unit, work.dumper, work.seconds)
        context_parallel.check_not_left(unit)
    with located("buffers", None):
        buffers.install(gm, work.units)
    with located("body inputs", None):
        body_inputs.pass_on(work.units)
    with located("borders", None):
        work.known = borders.crossed(border)
    warned = faults.warned(work.units)
    with located("report", None):
        found = summary.report(gm, work.units, work.seconds, faults=warned, unseen=unseen)
    with located("checkpoints", None):
        checkpoints.outline(gm, work.inlined)
    return found


def _run_on(unit: Unit, dumper: Dumper, seconds: dict[str, float]) -> None:
    unsupported = unsupported_tensor(unit.graph_module)
    if unsupported is not None:
        unit.left_alone = Reason(
            code=Code.CLOSED_TENSOR, rule="the graph's inputs are plain strided tensors", observed=unsupported
        )
        return
    if unit.in_autocast:
        unit.left_alone = Reason(
            code=Code.AUTOCAST_BODY,
            rule="an exported program's attention is outside of `with torch.autocast`",
            observed="wrap_with_autocast runs the graph that it is in",
            remedy="export the model in the dtype that autocast would have given (model.bfloat16()), without autocast",
        )
        return
    # What users are to know is no fault of a pass.
    unit.longer = context_parallel.longer(unit)
    with torch_tracing.tracing_in(unit.mode):
        for step in PIPELINE:
            where = located(step.name, unit)
            with _dumped(step, unit, dumper), timed(step.name, seconds), where, _confined(step, unit) as attempt:
                step.run(unit, unit.mirror)  # type: ignore[arg-type]
            if attempt.reason is not None:
                unit.left_alone = attempt.reason
                unit.sites.clear()
                unit.misses.clear()
                unit.untried.clear()
                return
            if step.name == "match" and not unit.sites and context_parallel.asked(unit) is None:
                _give_back(unit, unit.mirror)
                return


def _confined(step: Pass, unit: Unit) -> contextlib.AbstractContextManager[faults.Attempt]:
    """Whatever fails of one graph before anything of it was rewritten costs that graph, and no other that is nested in it or around it."""
    if step.rewrites or unit.is_rewritten:
        return contextlib.nullcontext(faults.Attempt())
    return faults.confined(unit, step.name, unit.name or "the graph")


@contextlib.contextmanager
def _dumped(step: Pass, unit: Unit, dumper: Dumper) -> Iterator[None]:
    with dumper.around(step.name, unit.graph_module):
        yield
    if step.name == "mirror" and unit.mirror is not None:
        dumper.graph("mirror", unit.mirror.graph)
