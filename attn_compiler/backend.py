"""The torch.compile backend: split the options, rewrite Dynamo's graph, hand it to the compiler that generates code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from attn_compiler import fp8_state, torch_compat
from attn_compiler.cache import cache_key
from attn_compiler.errors import AttnCompilerError, LoweringUnavailable
from attn_compiler.options import Options, check_lowering_names, split_options
from attn_compiler.report import Report
from attn_compiler.target import Target

if TYPE_CHECKING:
    from attn_compiler.lowerings import Lowering

log = logging.getLogger(__name__)


def attn_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """torch.compile(model, backend="attn_compiler", mode=..., options={...}) calls this once per captured graph.

    gm: Dynamo's graph; rewritten in place and given away. kwargs: torch.compile's `mode`, `options` and `name`, those
    that are not empty. Raises a class of errors.py for a wrong option, and, under strict=True, for a failing pass.
    """
    try:
        return _compile(gm, example_inputs, **kwargs)
    except AttnCompilerError as error:
        raise torch_compat.unwrapped(error) from error.__cause__


def _reset() -> None:
    """Called by torch._dynamo.reset() for every backend that was used."""
    torch_compat.forget_cuda_graphs()
    fp8_state.forget()


attn_compiler.reset = _reset  # type: ignore[attr-defined]


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    **others: Any,
) -> Callable[..., Any]:
    # Imported at the first graph, so that naming the backend and printing its options stay cheap.
    from attn_compiler import torch_frames
    from attn_compiler.lowerings import LOWERINGS
    from attn_compiler.passes import fp8_sites, rewrite
    from attn_compiler.report import publish
    from attn_compiler.verifying import checked, prepare

    if others:
        log.warning("ignored arguments of torch.compile that attn_compiler does not know: %s", ", ".join(others))
    own, patches = split_options(mode, options)
    check_lowering_names(own, (lowering.name for lowering in LOWERINGS))
    targets = {Target.current(str(device)) for device in torch_compat.graph_devices(gm)}
    rewritten = rewrite(gm, own)
    _require_available(own, rewritten.report, targets, LOWERINGS)
    if own.fp8_recipe is not None:
        fp8_sites.check(own.fp8_recipe, rewritten.report, is_whole=torch_frames.is_whole(gm))
    # Before the graph is given away: the compiler changes it.
    plan = prepare(gm, rewritten) if own.verify else None
    try:
        compiled = _compile_inner(gm, example_inputs, own, patches, cache_key(own, targets), name)
    except Exception as error:
        # What failed has its report. What starts over comes again, with a report of its own.
        if not torch_compat.starts_over(error):
            publish(rewritten.report, own)
        raise
    publish(rewritten.report, own)
    return checked(compiled, plan)


def _compile_inner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    key: str,
    region: str | None,
) -> Callable[..., Any]:
    # Here and not in the pass, which does not run where a cache has the code: that calls their ops all the same.
    from attn_compiler import rotary_tables
    from attn_compiler.lowerings.ops import without_autograd

    def joint_pass(graph: fx.Graph) -> None:
        without_autograd(graph)
        rotary_tables.keep_tables(graph)

    if options.inner == "inductor":
        return torch_compat.compile_with_inductor(
            gm, example_inputs, patches=patches, cache_key=key, joint_pass=joint_pass, region=region
        )
    if patches:
        log.warning("inner=%r ignores Inductor's options: %s", options.inner, ", ".join(patches))
    return torch_compat.compile_with_backend(options.inner, gm, example_inputs)


def _require_available(options: Options, report: Report, targets: set[Target], lowerings: Sequence[Lowering]) -> None:
    """Raise LoweringUnavailable if the one lowering asked for can't run at all on the device of some site."""
    if options.lowering is None:
        return
    (lowering,) = (candidate for candidate in lowerings if candidate.name == options.lowering)
    devices = {site.spec.device for site in report.sites}
    for target in (t for t in targets if t.device in devices):
        reasons = tuple(lowering.unavailable(target))
        if reasons:
            raise LoweringUnavailable(lowering=options.lowering, target=target.words, reasons=reasons)
