"""PIPELINE: every step of a rewriting, in order. The functions here name the room that does each step.

They import the rooms where they run: a process that finds a kept rewrite goes no further than `kept`, and imports none.
"""

from __future__ import annotations

import dataclasses
import logging

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.aliasing import Aliases
from attn_compiler.passes.graph.first_look import SharedGraph
from attn_compiler.passes.graph.padding_outcome import Packed
from attn_compiler.passes.graph.unit import GraphMemory, Unit, closed_to_us, units
from attn_compiler.passes.pipeline.step import Again, Onward, PipelineStep, check_contracts
from attn_compiler.passes.pipeline.work import Work, timed
from attn_compiler.passes.recovering import borders
from attn_compiler.passes.rewrites import remembered
from attn_compiler.passes.writing import linear_calls
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.torch_private.snapshots import Snapshot

log = logging.getLogger(__name__)
#: the entry, among the seconds of steps, for finding a kept rewrite, repeating it, and keeping one
_CACHE = "cache"


# ---- before the rooms ------------------------------------------------------------------------------------------------


def _units(work: Work) -> None:
    work.units = units(work.gm, work.options)


def _snapshot(work: Work) -> None:
    work.has_linear_calls = linear_calls.are_in(work.gm)
    if work.snapshot is None and (work.units or work.has_linear_calls or work.options.is_context_parallel):
        work.snapshot = Snapshot(work.gm)


def _checkpoints(work: Work) -> Onward | None:
    """Inline checkpoints: positions of a sequence, padding and the sources of masks are followed from a graph into them, and back."""
    if not (work.options.is_context_parallel or work.options.unpad) or work.inlined is not None:
        return None
    from attn_compiler.passes.pipeline import rooms

    work.inlined = rooms.checkpoints.inline(work.gm)
    # Inlined bodies are no units any more.
    return Onward(step="units") if work.inlined else None


def _border(work: Work) -> None:
    work.border = borders.reached(work.gm, work.units, work.options, work.readers)


def _kept(work: Work) -> Onward | None:
    if work.store is None or work.border is None:
        return None
    if not work.units and not work.has_linear_calls and work.border.root is None:
        return None
    with timed(_CACHE, work.seconds):
        work.memory = remembered.begin(work.gm, work.options, work.border, work.store)
        kept = work.memory.find()
        if kept is None:
            return None
        try:
            report = work.memory.apply(kept)
        except Exception as error:
            if torch_compat.starts_over(error):
                raise
            # The steps can do without a kept file, whatever is wrong with it.
            log.debug("what was kept of graph %s does not fit: %r", torch_compat.graph_name(), error)
            work.begin_anew()
            return Onward(step="units")
    work.known, work.units = kept.crossing.known, []
    work.report = dataclasses.replace(report, seconds=((_CACHE, work.seconds[_CACHE]),))
    return Onward(step=None)


def _unseen(work: Work) -> None:
    from attn_compiler.passes.pipeline import rooms

    work.unseen = rooms.unseen.find(work.gm)


# ---- on each unit: plain calls and their mirror ----------------------------------------------------------------------


def _plain(_: Work, unit: Unit) -> Onward | None:
    unit.log.left_alone = closed_to_us(unit)
    return None if unit.log.left_alone is None else Onward(step=None)


def _lengths(work: Work, unit: Unit) -> None:
    if unit.options.is_context_parallel:
        from attn_compiler.passes.pipeline import rooms

        work.readers.longer[unit] = rooms.spreading.whole_lengths(unit)


def _expand(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.spelling = rooms.plain_calls.expanded(unit, unit.spelling)


def _dtensors(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.spelling = rooms.plain_calls.on_local_tensors(unit, unit.spelling)


def _flex(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.spelling = rooms.plain_calls.of_flex(unit, unit.spelling)


def _library_calls(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.spelling = rooms.plain_calls.of_libraries(unit, unit.spelling)


def _keys_last(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.spelling = rooms.plain_calls.with_keys_last(unit, unit.spelling)


def _mirror(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.mirror = rooms.mirroring.trace_mirror(unit, is_whole=work.trial is None and rooms.mirroring.asks_for_all(unit))


# ---- on each unit: its attentions ------------------------------------------------------------------------------------


def _block_masks(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.spelling = rooms.block_masks.checked(unit, unit.mirrored, unit.spelling, work.readers)


def _match(_: Work, unit: Unit) -> Onward | None:
    from attn_compiler.passes.pipeline import rooms

    unit.found = rooms.match.find_sites(unit, unit.mirrored, unit.spelling)
    if unit.found.sites:
        return None
    if unit.options.is_context_parallel and rooms.spreading.asked(unit) is not None:
        return None
    return Onward(step="give_back")


def _recover(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    unit.found = rooms.recover.recover_specs(unit, unit.mirrored, unit.found, work.readers)


def _machine(work: Work, unit: Unit) -> None:
    for device in {site.spec.device for site in unit.found.sites if site.spec is not None} - work.targets.keys():
        work.targets[device] = Target.current(device)


def _context_parallel(work: Work, unit: Unit) -> Again | None:
    from attn_compiler.passes.context_parallel.spread import Spread
    from attn_compiler.passes.pipeline import rooms

    if work.trial is not None:
        return None
    work.trial = rooms.spreading.spread(unit, unit.mirrored, unit.found, work.targets)
    if not isinstance(work.trial, Spread) or not work.trial.is_other_graph:
        return None
    unit.memory = GraphMemory(aliases=Aliases(graph=unit.graph))
    work.readers.longer.pop(unit, None)
    return Again(step="mirror", judge="agree")


def _agree(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.context_parallel.spread import Spread
    from attn_compiler.passes.pipeline import rooms

    if isinstance(work.trial, Spread):
        spread, failed = work.trial, work.failed
        work.trial = work.failed = None
        unit.outcome = rooms.agreeing.agree(unit, unit.found, spread, failed)


def _unpad(work: Work, unit: Unit) -> Again | None:
    if not unit.options.unpad or work.trial is not None:
        return None
    from attn_compiler.passes.pipeline import rooms

    made = rooms.packing.pack(unit, unit.mirrored, unit.found)
    if not isinstance(made, rooms.packing.Trial):
        unit.outcome = made
        return None
    work.trial = made
    return Again(step="mirror", judge="packed")


def _fp8_sites(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.fp8_sites.ask_for_fp8(unit, unit.found)


def _select(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    among = None if work.trial is None else rooms.judging.LEAVING_OUT
    rooms.select.select_lowerings(unit, unit.found, work.targets, among)


def _packed(work: Work, unit: Unit) -> Onward | None:
    from attn_compiler.passes.pipeline import rooms

    if not isinstance(work.trial, rooms.packing.Trial):
        return None
    trial, failed = work.trial, work.failed
    work.trial = work.failed = None
    unit.outcome = rooms.judging.judged(unit, trial, failed)
    work.padded = trial.before.beside(unit) if unit.outcome is trial.packed else None
    return None if work.padded is not None else Onward(step="select")


# ---- on each unit: its kernels ---------------------------------------------------------------------------------------


def _time_kernels(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.time_kernels.time_kernels(unit, unit.mirrored, unit.found, work.targets, work.store)


def _layout(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.layout.choose_copies(unit, unit.found)


def _lower(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.lower.lower_sites(unit, unit.mirrored, unit.found, work.targets)


def _padded(work: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    work.padded = rooms.unpacked_graph.write_kernels(unit, work.padded, work.targets)


def _give_back(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.plain_calls.given_back(unit, unit.spelling)


def _last_look(_: Work, unit: Unit) -> None:
    if isinstance(unit.outcome, SharedGraph):
        unit.outcome = unit.outcome.completed(unit.graph, unit.mirrored, unit.found.sites)


def _verify(_: Work, unit: Unit) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.verify.verify_graph(unit, unit.found)


# ---- on all of them ----------------------------------------------------------------------------------------------------


def _linear(work: Work) -> None:
    if work.has_linear_calls:
        with timed("linear", work.seconds), work.dumper.around("linear", work.gm):
            work.linear = linear_calls.lower(work.gm, work.options)


def _not_left(work: Work) -> None:
    if work.options.is_context_parallel:
        from attn_compiler.passes.pipeline import rooms

        for unit in work.units:
            rooms.spreading.check_not_left(unit)


def _buffers(work: Work) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.buffers.install(work.gm, work.units)


def _body_inputs(work: Work) -> None:
    from attn_compiler.passes.pipeline import rooms

    rooms.body_inputs.pass_on(work.units)


def _crossing(work: Work) -> None:
    if work.border is not None:
        work.known = borders.crossed(work.border)


def _warnings(work: Work) -> None:
    work.warned = faults.warned(unit.log for unit in work.units)


def _report(work: Work) -> None:
    from attn_compiler.passes.pipeline import rooms

    unseen = [] if work.unseen is None else work.unseen.rows(rooms.match.owners_in_sites(work.units))
    linear = linear_calls.rows(work.linear)
    work.report = rooms.summary.report(
        work.gm,
        work.units,
        work.decided_for,
        work.seconds,
        faults=work.warned,
        unseen=unseen,
        linear=linear,
        padded=work.padded,
    )


def _outline(work: Work) -> None:
    if work.inlined:
        from attn_compiler.passes.pipeline import rooms

        models = [unit.outcome.original for unit in work.units if isinstance(unit.outcome, Packed)]
        padded = [work.padded.graph_module] if work.padded else []
        rooms.checkpoints.outline_all(work.gm, models + padded, work.inlined)


def _keep(work: Work) -> None:
    if work.memory is not None and work.report is not None:
        with timed(_CACHE, work.seconds):
            report = work.memory.keep(work.report, work.known, work.units)
        work.report = dataclasses.replace(report, seconds=tuple(work.seconds.items()))


PIPELINE: tuple[PipelineStep, ...] = (
    # The graphs, and kept rewrites.
    PipelineStep(name="units", on="work", run=_units),
    PipelineStep(name="snapshot", on="work", run=_snapshot, needs=("units",)),
    PipelineStep(name="checkpoints", on="work", run=_checkpoints, needs=("snapshot",), leads=("units",)),
    PipelineStep(name="border", on="work", run=_border, needs=("checkpoints",)),
    PipelineStep(name="kept", on="work", run=_kept, needs=("border",), leads=("units",)),
    PipelineStep(name="unseen", on="work", run=_unseen, needs=("kept",)),
    # Each graph in plain calls, and as ATen ops.
    PipelineStep(name="plain", run=_plain, needs=("unseen",), costs_all=True),
    PipelineStep(name="lengths", run=_lengths, needs=("plain",), costs_all=True),
    PipelineStep(name="expand", run=_expand, needs=("lengths",), costs_all=True),
    PipelineStep(name="dtensors", run=_dtensors, needs=("expand",), costs_all=True),
    PipelineStep(name="flex", run=_flex, needs=("dtensors",), costs_all=True),
    PipelineStep(name="library_calls", run=_library_calls, needs=("flex",), costs_all=True),
    PipelineStep(name="keys_last", run=_keys_last, needs=("library_calls",), costs_all=True),
    PipelineStep(
        name="mirror", run=_mirror, needs=("keys_last",), shows=lambda unit: getattr(unit.mirror, "graph", None)
    ),
    # Its attentions, and their specs.
    PipelineStep(name="block_masks", run=_block_masks, needs=("mirror",)),
    PipelineStep(name="match", run=_match, needs=("block_masks",), leads=("give_back",)),
    PipelineStep(name="recover", run=_recover, needs=("match",)),
    PipelineStep(name="machine", run=_machine, needs=("recover",)),
    # Options may rewrite the graph, which is then mirrored, matched and recovered again.
    PipelineStep(
        name="context_parallel", run=_context_parallel, needs=("machine",), leads=("mirror", "agree"), costs_all=True
    ),
    PipelineStep(name="agree", run=_agree, needs=("context_parallel",), costs_all=True),
    PipelineStep(name="unpad", run=_unpad, needs=("agree",), leads=("mirror", "packed")),
    # The kernels.
    PipelineStep(name="fp8_sites", run=_fp8_sites, needs=("unpad",)),
    PipelineStep(name="select", run=_select, needs=("fp8_sites",)),
    PipelineStep(name="packed", run=_packed, needs=("select",), leads=("select",)),
    PipelineStep(name="time_kernels", run=_time_kernels, needs=("packed",)),
    PipelineStep(name="layout", run=_layout, needs=("time_kernels",)),
    PipelineStep(name="lower", run=_lower, needs=("layout",), costs_all=True),
    PipelineStep(name="padded", run=_padded, needs=("lower",)),
    PipelineStep(name="give_back", run=_give_back, needs=("padded",), costs_all=True),
    PipelineStep(name="last_look", run=_last_look, needs=("give_back",)),
    PipelineStep(name="verify", run=_verify, needs=("last_look",)),
    # All graphs together, and the report.
    PipelineStep(name="linear", on="work", run=_linear, needs=("verify",)),
    PipelineStep(name="not_left", on="work", run=_not_left, needs=("linear",)),
    PipelineStep(name="buffers", on="work", run=_buffers, needs=("not_left",)),
    PipelineStep(name="body_inputs", on="work", run=_body_inputs, needs=("buffers",)),
    PipelineStep(name="crossing", on="work", run=_crossing, needs=("body_inputs",)),
    PipelineStep(name="warnings", on="work", run=_warnings, needs=("crossing",)),
    PipelineStep(name="report", on="work", run=_report, needs=("warnings",)),
    PipelineStep(name="outline", on="work", run=_outline, needs=("report",)),
    PipelineStep(name="keep", on="work", run=_keep, needs=("outline",)),
)

check_contracts(PIPELINE)
