"""PIPELINE: every step of a rewriting, in order, with the function that does it, what that takes, and what it gives.

Functions stand in the rooms; those of an option in the option's own room. They are imported when they run (step.py).
"""

from __future__ import annotations

from attn_compiler.passes.pipeline.step import PipelineStep as Step, check_contracts

PIPELINE: tuple[Step, ...] = (
    # The graphs, and kept rewrites.
    Step("units", "units = graph.unit.units(gm, options)", on="work"),
    Step("snapshot", "snapshot = pipeline.keeping.snapshot(gm, units)", ("units",), on="work"),
    Step(
        "checkpoints",
        "inlined = spelling.checkpoints.inline_followed(gm, units, options)",
        ("snapshot",),
        on="work",
        only_if="units",
    ),
    Step("border", "border = recovering.borders.reached(gm, units, options, readers)", ("checkpoints",), on="work"),
    Step("kept", "pipeline.keeping.find(work)", ("border",), on="work", leads=("units",)),
    Step("unseen", "unseen = matching.unseen.find(gm)", ("kept",), on="work"),
    # Each graph in plain calls, and as ATen ops.
    Step("plain", "graph.unit.leave_closed(unit)", ("unseen",), costs_all=True),
    Step(
        "lengths",
        "context_parallel.spreading.note_lengths(unit, readers)",
        ("plain",),
        only_if="options.is_context_parallel",
        costs_all=True,
    ),
    Step("expand", "spelling = spelling.plain_calls.expanded(unit, spelling)", ("lengths",), costs_all=True),
    Step("dtensors", "spelling = spelling.plain_calls.on_local_tensors(unit, spelling)", ("expand",), costs_all=True),
    Step("flex", "spelling = spelling.plain_calls.of_flex(unit, spelling)", ("dtensors",), costs_all=True),
    Step("library_calls", "spelling = spelling.plain_calls.of_libraries(unit, spelling)", ("flex",), costs_all=True),
    Step(
        "keys_last",
        "spelling = spelling.plain_calls.with_keys_last(unit, spelling)",
        ("library_calls",),
        costs_all=True,
    ),
    Step(
        "mirror",
        "mirror = graph.mirroring.trace_mirror(unit, trial)",
        ("keys_last",),
        shows=lambda unit: getattr(unit.mirror, "graph", None),
    ),
    # Its attentions, and their specs.
    Step("block_masks", "spelling = recovering.block_masks.checked(unit, mirror, spelling, readers)", ("mirror",)),
    Step("match", "found = matching.match.find_sites(unit, mirror, spelling)", ("block_masks",)),
    Step("sites", "matching.match.leave_without_sites(unit, found)", ("match",), leads=("give_back",)),
    Step("recover", "found = recovering.recover.recover_specs(unit, mirror, found, readers)", ("sites",)),
    Step("machine", "writing.select.add_targets(found, targets)", ("recover",)),
    # Options may rewrite the graph, which is then mirrored, matched and recovered again, and judged.
    Step(
        "context_parallel",
        "context_parallel.spreading.spread(unit, mirror, found, targets, readers)",
        ("machine",),
        leads=("mirror",),
        judge="agree",
        only_if="unit.is_spread",
        costs_all=True,
    ),
    Step(
        "agree",
        "outcome = context_parallel.agreement.agree(unit, found, trial, failed)",
        ("context_parallel",),
        only_if="options.is_context_parallel",
        costs_all=True,
    ),
    Step(
        "unpad",
        "unpad.packing.pack(unit, mirror, found)",
        ("agree",),
        leads=("mirror",),
        judge="packed",
        only_if="options.packs",
    ),
    # The kernels.
    Step("fp8_sites", "writing.fp8_sites.ask_for_fp8(unit, found)", ("unpad",)),
    Step("select", "writing.select.select_lowerings(unit, found, targets, trial)", ("fp8_sites",)),
    Step("packed", "unpad.judging.judge(unit, trial, failed)", ("select",), leads=("select",), only_if="options.packs"),
    Step("time_kernels", "writing.time_kernels.time_kernels(unit, mirror, found, targets, store)", ("packed",)),
    Step("layout", "writing.layout.choose_copies(unit, found)", ("time_kernels",)),
    Step("lower", "writing.lower.lower_sites(unit, mirror, found, targets)", ("layout",), costs_all=True),
    Step("padded", "unpad.judging.write_padded(unit, targets)", ("lower",), only_if="options.packs"),
    Step("give_back", "spelling.plain_calls.given_back(unit, spelling)", ("padded",), costs_all=True),
    Step(
        "last_look", "context_parallel.agreement.complete(unit)", ("give_back",), only_if="options.is_context_parallel"
    ),
    Step("verify", "writing.lower.verify_graph(unit, found)", ("last_look",)),
    # All graphs together, and the report.
    Step(
        "linear",
        "linear = writing.linear_calls.lower(gm, options, seconds, dumper)",
        ("verify",),
        on="work",
        only_if="snapshot",
    ),
    Step(
        "not_left",
        "context_parallel.spreading.check_not_left(units)",
        ("linear",),
        on="work",
        only_if="options.is_context_parallel",
    ),
    Step("buffers", "writing.buffers.install(gm, units)", ("not_left",), on="work", only_if="units"),
    Step("body_inputs", "recovering.body_inputs.pass_on(units)", ("buffers",), on="work", only_if="units"),
    Step("crossing", "known = recovering.borders.crossed(border)", ("body_inputs",), on="work"),
    Step("warnings", "warned = graph.unit.warned(units)", ("crossing",), on="work"),
    Step(
        "report",
        "report = writing.summary.report(gm, units, decided_for, warned, unseen, linear)",
        ("warnings",),
        on="work",
    ),
    Step("outline", "spelling.checkpoints.outline_all(gm, units, inlined)", ("report",), on="work", only_if="units"),
    Step("keep", "pipeline.keeping.keep(work)", ("outline",), on="work"),
)

check_contracts(PIPELINE)
