"""The torch.compile backend: split the options, rewrite Dynamo's graph, hand it to the compiler that generates code."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from attn_compiler.compiling import left_to_python, linear_attention, without_us
from attn_compiler.compiling.attempts import StepFailed, step
from attn_compiler.compiling.inner import Inner
from attn_compiler.context_parallel import rank_sync
from attn_compiler.options.cache import cache_key
from attn_compiler.options.options import Options, check_lowering_names, split_options
from attn_compiler.reasons.errors import AttnCompilerError, described
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import (
    collector,
    compat as torch_compat,
    frames as torch_frames,
    inductor as torch_inductor,
    known_masks,
    observe as torch_observe,
)

if TYPE_CHECKING:
    from attn_compiler.lowerings.shared.launching.ahead import Ahead, NotCompiled
    from attn_compiler.passes import Rewritten
    from attn_compiler.passes.graph.unit import Unit
    from attn_compiler.reporting.facts import LinearReport
    from attn_compiler.spec.attention import AttentionSpec
    from attn_compiler.spec.linear import LinearSpec
    from attn_compiler.verifying.plan import CheckPlan

log = logging.getLogger(__name__)


def attn_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile one captured graph, for torch.compile(model, backend="attn_compiler", mode=..., options={...}).

    gm: Dynamo's graph; rewritten in place and given away. kwargs: torch.compile's `mode`, `options` and `name`, those that are not empty.
    Raises a class of errors.py for a wrong option. Any other failure on our side is raised under strict=True; otherwise it is one warning,
    and the model's own graph is compiled.
    """
    try:
        return _compile(gm, example_inputs, **kwargs)
    except AttnCompilerError as error:
        raise torch_compat.unwrapped(error) from error.__cause__


def _reset() -> None:
    """Forget everything, for torch._dynamo.reset(), which calls this for every backend that was used."""
    from attn_compiler.lowerings.shared.calls.failures import FAILURES
    from attn_compiler.passes.writing import fp8_state

    torch_inductor.forget_cuda_graphs()
    torch_frames.forget_meanings()
    FAILURES.forget()
    fp8_state.forget()


attn_compiler.reset = _reset  # type: ignore[attr-defined]
left_to_python.watch(attn_compiler)
linear_attention.watch(attn_compiler)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    **others: Any,
) -> Callable[..., Any]:
    if others:
        log.warning("ignored arguments of torch.compile that attn_compiler does not know: %s", ", ".join(others))
    own, patches = split_options(mode, options)
    left_to_python.watch(attn_compiler)
    with rank_sync.telling_of_failure(own.sequence_group, torch_compat.starts_over), collector.rarely():
        return _compile_with(gm, example_inputs, own, patches, name, mode=mode, options=options)


def _compile_with(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    own: Options,
    patches: dict[str, Any],
    name: str | None,
    **given: Any,
) -> Callable[..., Any]:
    """Compile with parsed options. own, patches: from `options`. given: `mode` and `options` as the user gave them."""
    begin = time.perf_counter()
    # The next replay of a CUDA graph overwrites its outputs without counting the write.
    is_recorded = False
    start: Callable[[], object] = object
    if own.inner == "inductor" and any(device.type == "cuda" for device in torch_compat.graph_devices(gm)):
        start = torch_inductor.start_workers
        torch_inductor.share_kernels()
        is_recorded = torch_inductor.records_cuda_graphs(patches)
    if own.inner == "inductor" and torch_inductor.freezes_in_vain(patches):
        log.warning(
            "options={'freezing': True} freezes no weight, since Dynamo does not see it; set torch._inductor.config.freezing = True"
        )
    # Imported at the first graph, so that naming the backend and printing its options stay cheap.
    try:
        with collector.paused():
            from attn_compiler import lowerings
            from attn_compiler.passes import rewrite, rewrites
            from attn_compiler.verifying import checked
    except (ImportError, AttributeError) as error:
        return without_us.or_raise(error)(gm, example_inputs, **given)

    check_lowering_names(own, lambda: lowerings.names())
    rewritten = rewrite(gm, own, store=rewrites.here(own, patches), start=start)
    report, packed = rewritten.report, None
    if rewritten.outcomes:
        from attn_compiler.passes.unpad.outcome import Packed

        packed = rewritten.outcome(Packed)
    ahead = None if rewritten.snapshot is None else _ahead(own)
    inner = Inner(options=own, patches=patches, region=name, ahead=ahead)
    # The graph is given away: a failure of ours from here on is repaired from a copy.
    failed: StepFailed | None = None
    try:
        with step("prepare the graph for the inner compiler", user_errors=True):
            key = _key(gm, own, report)
        plan = _plan(gm, own, rewritten)
        with step(f"compile the rewritten graph with {own.inner}") if rewritten.snapshot else contextlib.nullcontext():
            if packed is not None:
                from attn_compiler.compiling.unpadded import compile_unpadded

                compiled = compile_unpadded(gm, packed, inner, example_inputs, key)
            else:
                # If the rewrite was on disk, loading its code is cheap, and a garbage collection may take as long.
                with collector.paused() if report.from_cache else contextlib.nullcontext():
                    compiled = inner.compile_rewritten(gm, example_inputs, key)
    except StepFailed as error:
        failed = error
    except Exception as error:
        # A failed compilation has a report. A compilation that Dynamo restarts publishes its report in the next attempt.
        if not isinstance(error, AttnCompilerError) and not torch_compat.starts_over(error):
            _publish(report, own)
        raise
    # Outside of the handler above, so that an error of the model's own graph does not show ours as its context.
    if failed is not None:
        if own.strict:
            _publish(report, own)
        from attn_compiler.passes.writing import summary

        failure = failed.warn(own, report.graph, "the model's own graph is compiled")
        rewritten.take_back(gm)
        report, plan = summary.taken_back(report, failed.cause, failure), None
        try:
            compiled = inner.compile_original(gm, example_inputs)
        except Exception as error:
            if not torch_compat.starts_over(error):
                _publish(report, own)
            raise
    _watch([*_called_in(report), *([] if failed or packed is None else _called_beside(packed.padded))], own)
    if ahead is not None:
        built = ahead.built()
        # Report all failed kernels before the graph is compiled again.
        if failed is None and _tell_of(built.failed):
            rewritten.take_back(gm)
            return _compile_with(gm, example_inputs, own, patches, name, **given)
        report = dataclasses.replace(report, kernels=built.seconds)
    _publish(dataclasses.replace(report, compiled_in=time.perf_counter() - begin), own)
    compiled = checked(compiled, plan)
    if not torch_observe.is_ahead_of_time():
        compiled = known_masks.wrap(compiled, () if is_recorded else rewritten.known, rewritten.read)
    for outcome in rewritten.outcomes:
        compiled = outcome.around(compiled)
    return compiled


def _tell_of(failed: Sequence[NotCompiled]) -> bool:
    """Note kernels that do not compile. Return True if sites of the graph use one, which have to be decided again."""
    from attn_compiler.lowerings.shared.calls import failures
    from attn_compiler.lowerings.shared.limits import untried

    found = [(one, failures.at_compilation(one.op, one.text, one.error)) for one in failed]
    for one, concerned in found:
        for caller in concerned:
            untried.note(caller.lowering, Target.current(caller.spec.device), described(one.error))
    return any(concerned for _, concerned in found)


_Called = tuple[tuple[str, ...], str, "AttentionSpec | LinearSpec"]


def _called_in(report: Report) -> list[_Called]:
    """Return (texts, lowering, spec) of each site that calls leaf ops."""
    linear = [(_texts_of(row), row.decision.lowering, row.spec) for row in report.linear]
    return [*((site.texts, site.decision.lowering, site.spec) for site in report.sites if site.texts), *linear]


def _texts_of(row: LinearReport) -> tuple[str, ...]:
    """Return the keys of failures of a row's kernels: the form's text at a launch, the op ahead of it."""
    from attn_compiler.lowerings import linear_table

    leaves = {one.name: one.leaves for one in linear_table.LINEAR_LOWERINGS}
    return (row.spec.form.text, *leaves.get(row.decision.lowering, ()))


def _called_beside(padded: Unit | None) -> list[_Called]:
    sites = () if padded is None else padded.found.sites
    return [(s.texts, s.decision.lowering, s.spec) for s in sites if s.texts and s.decision and s.spec]


def _watch(called: Sequence[_Called], options: Options) -> None:
    """Compile the frame anew once a kernel of these sites fails. Most graphs have no such site."""
    if not called:
        return
    from attn_compiler.lowerings.shared.calls.failures import FAILURES, Caller

    start_over = torch_frames.start_over()
    for texts, lowering, spec in called:
        FAILURES.watch(texts, Caller(lowering=lowering, spec=spec, strict=options.strict, start_over=start_over))


def _key(gm: fx.GraphModule, options: Options, report: Report) -> str:
    """Return the key of the compile caches. Raises the errors about the user's options."""
    targets = {Target.current(str(device)) for device in torch_compat.graph_devices(gm)}
    if report.sites and options.lowering is not None:
        from attn_compiler.passes.writing import select

        select.require_available(options, {site.spec.device for site in report.sites}, targets)
    if report.sites and options.fp8_recipe is not None:
        from attn_compiler.passes.writing import fp8_sites

        fp8_sites.check_recipe_used(options.fp8_recipe, report, is_whole=torch_frames.is_whole(gm))
    return cache_key(options, targets)


def _plan(gm: fx.GraphModule, options: Options, rewritten: Rewritten) -> CheckPlan | None:
    """Plan the checks of the first call, before the compiler changes the graph."""
    if not options.verify:
        return None
    from attn_compiler.verifying.plan import prepare

    try:
        with step("prepare the check of options={'verify': True}"):
            return prepare(gm, rewritten)
    except StepFailed as failed:
        failed.warn(options, rewritten.report.graph, "nothing of this graph is checked")
        return None


def _ahead(options: Options) -> Ahead | None:
    """Return the ahead-of-time compiler of kernels, where CUDA is in use; only for Inductor, since only it traces the backward before."""
    if options.inner != "inductor" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    from attn_compiler.lowerings.shared.launching import ahead

    return ahead.here()


def _publish(report: Report, options: Options) -> None:
    from attn_compiler.reporting.publishing import publish

    try:
        with step("publish the report"):
            publish(report, options)
    except StepFailed as failed:
        failed.warn(options, report.graph, "the model runs, and the report may be missing")
