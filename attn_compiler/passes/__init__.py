"""The pipeline: its passes in order, what each needs and gives, and `run_pipeline`, which carries it out on one graph.

A pass is a function (unit, mirror) -> None on one GraphModule. A pass that fails leaves the model's graph as it was.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx

from attn_compiler import torch_compat, torch_tracing
from attn_compiler.dump import Dumper
from attn_compiler.errors import AttnCompilerError, AttnCompilerWarning, PassFailed
from attn_compiler.options import Options
from attn_compiler.passes import (
    body_inputs,
    buffers,
    expand,
    keys_last,
    layout,
    lower,
    match,
    recover,
    select,
    summary,
    verify,
)
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.unit import Unit, units, unsupported_tensor
from attn_compiler.report import Report
from attn_compiler.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """needs, gives: facts that must be there before it runs, and that are there after. rewrites: changes the Dynamo graph."""

    name: str
    run: Callable[[Unit, Mirror], None]
    needs: frozenset[str]
    gives: frozenset[str]
    rewrites: bool = False


def _expand(unit: Unit, _: Mirror | None) -> None:
    unit.expanded = expand.run(unit.graph_module)
    keys_last.run(unit.graph_module, unit.mode)


def _mirror(unit: Unit, _: Mirror | None) -> None:
    unit.mirrored()


def _facts(*names: str) -> frozenset[str]:
    return frozenset(names)


PIPELINE: tuple[Pass, ...] = (
    Pass(name="expand", run=_expand, needs=_facts(), gives=_facts("plain calls"), rewrites=True),
    Pass(name="mirror", run=_mirror, needs=_facts("plain calls"), gives=_facts("mirror")),
    Pass(name="match", run=match.run, needs=_facts("mirror"), gives=_facts("sites", "misses")),
    Pass(name="recover", run=recover.run, needs=_facts("sites"), gives=_facts("specs")),
    Pass(name="select", run=select.run, needs=_facts("specs"), gives=_facts("decisions")),
    Pass(name="layout", run=layout.run, needs=_facts("specs", "decisions"), gives=_facts("copies")),
    Pass(
        name="lower",
        run=lower.run,
        needs=_facts("mirror", "decisions", "copies"),
        gives=_facts("kernels"),
        rewrites=True,
    ),
    Pass(name="verify", run=verify.run, needs=_facts("kernels"), gives=_facts("checked graph")),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """What became of one graph. originals: each unit's graph as the model made it. failed: nothing was rewritten."""

    report: Report
    units: tuple[Unit, ...]
    originals: tuple[fx.Graph, ...]
    failed: bool


def run_pipeline(gm: fx.GraphModule, options: Options, targets: dict[str, Target] | None = None) -> Report:
    """As `rewrite`, for those who want the report alone."""
    return rewrite(gm, options, targets).report


def rewrite(gm: fx.GraphModule, options: Options, targets: dict[str, Target] | None = None) -> Rewritten:
    """Rewrite `gm` and the bodies nested in it in place, and say what was done.

    targets: by device type, for tests; a device that is missing there is this machine. If a pass fails, every graph is left as
    it came and the report says so, with one warning; with options.strict it raises PassFailed (or VerifyFailed) instead.
    """
    found = units(gm, options, targets or {})
    dumper = Dumper.create(options.dump_dir if found else None, torch_compat.graph_name())
    originals = tuple(torch_compat.copied_graph(unit.graph) for unit in found)
    seconds = dict.fromkeys((step.name for step in PIPELINE), 0.0)
    failure = None
    try:
        for unit in found:
            _run(unit, dumper, seconds)
        buffers.install(gm, found)
        body_inputs.pass_on(found)
    except Exception as error:  # noqa: BLE001 (whatever breaks in a pass, the user's model still runs)
        for unit, graph in zip(found, originals, strict=True):
            unit.graph_module.graph = graph
        buffers.discard(gm, found)
        failure = _failed(error, options)
    report = summary.report(gm, found, seconds, failure)
    dumper.report(report)
    return Rewritten(report=report, units=tuple(found), originals=originals, failed=failure is not None)


def _run(unit: Unit, dumper: Dumper, seconds: dict[str, float]) -> None:
    unsupported = unsupported_tensor(unit.graph_module)
    if unsupported is not None:
        unit.left_alone = unsupported
        return
    with torch_tracing.tracing_in(unit.mode):
        for step in PIPELINE:
            with _dumped(step, unit, dumper), _timed(step.name, seconds), _located(step.name, unit):
                step.run(unit, unit.mirror)  # type: ignore[arg-type]
            if step.name == "match" and not unit.sites:
                return


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start


@contextmanager
def _dumped(step: Pass, unit: Unit, dumper: Dumper) -> Iterator[None]:
    with dumper.around(step.name, unit.graph_module):
        yield
    if step.name == "mirror" and unit.mirror is not None:
        dumper.graph("mirror", unit.mirror.graph)


@contextmanager
def _located(name: str, unit: Unit) -> Iterator[None]:
    """Say which pass and which module an exception came from."""
    try:
        yield
    except AttnCompilerError:
        raise
    except Exception as error:
        raise PassFailed(
            pass_name=name,
            site=unit.current or unit.name or "the graph",
            cause=f"{type(error).__name__}: {error}",
            reproduce="compile with options={'strict': True, 'dump_dir': 'attn_dumps'} and send the dump",
        ) from error


def _failed(error: Exception, options: Options) -> str:
    """Strict: raise. Else warn, once for each distinct failure, and return the text for the report."""
    if options.strict:
        raise error
    warnings.warn(str(error), AttnCompilerWarning, stacklevel=2)
    return f"{error}\n{''.join(traceback.format_exception(error))}"
