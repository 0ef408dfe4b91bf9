"""`rewrite`: the passes on a program that torch.export made, and a program again."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.export import ExportedProgram

from attn_compiler.export.own_ops import compiled_ahead
from attn_compiler.export.plain_ops import spelled_out
from attn_compiler.export.readable import Readable, put_back, readable
from attn_compiler.options.options import Options, check_lowering_names, own_name, split_options
from attn_compiler.reasons.errors import (
    AttnCompilerError,
    AttnCompilerWarning,
    CompileFailed,
    ExportUnsupported,
    NotAnExportedProgram,
    described,
)
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, export as torch_export, tracing as torch_tracing

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode

    from attn_compiler.passes import Rewritten

_NAME = "export"


def rewrite(program: ExportedProgram, /, options: Mapping[str, Any] | Options | None = None) -> ExportedProgram:
    """A program that computes the same, in which PyTorch's own attention kernels and our Triton kernels stand for the attentions that
    were found.

    A package of it (`torch._inductor.aoti_compile_and_package`) runs where this package is not installed: lowerings that need its Python
    are refused, by name, in the report. `reports()[-1]` is that report. A program that has our Triton kernels is itself run, loaded and
    compiled where `attn_compiler.export` is imported; with options={"lowerings": [...]} of PyTorch's kernels alone, anywhere. Inputs,
    outputs, weights, the names of all of them, and dynamic shapes are those of `program`, which stays as it is; weights are shared.

    The program is for inference on this machine: kernels are chosen for the devices of its tensors, as they are here, and without a
    backward. options: as of torch.compile(backend="attn_compiler"). Raises NotAnExportedProgram, ExportUnsupported, UnknownOption or
    InvalidOption for what can't be done, and, under strict=True, for whatever fails on our side; else that is one warning, and what is
    returned is the program as it came.
    """
    from attn_compiler.passes import rewrite as run_passes
    from attn_compiler.passes.writing import summary
    from attn_compiler.reporting.publishing import publish

    own = _checked(program, options)
    gm = torch_export.copied_graph(program)
    read = readable(gm, torch_export.numbers(program))
    mode = torch_tracing.fake_mode_of_values(node.meta["example_value"] for node in read.before)
    made: ExportedProgram | None = None
    report: Report | None = None
    try:
        with torch_export.without_new_guards(mode):
            rewritten = run_passes(gm, own, _targets(gm))
            report = dataclasses.replace(rewritten.report, graph=_NAME)
        if not rewritten.failed and rewritten.snapshot is not None and mode is not None:
            made = _made(program, read, rewritten, mode)
    except AttnCompilerError:
        # What the user did wrong, and what strict=True asks for.
        raise
    except Exception as error:  # noqa: BLE001 (it is told, and raised with strict=True)
        failure = _told(error, own)
        failed = summary.of_failure(gm, {}, {}, failure)
        report = failed if report is None else summary.taken_back(report, described(error), failure)
    publish(report, own)
    return made or torch_export.with_graph(program, torch_export.copied_graph(program), {})


def _checked(program: object, options: Mapping[str, Any] | Options | None) -> Options:
    from attn_compiler.lowerings import names

    if not isinstance(program, ExportedProgram):
        raise NotAnExportedProgram(given=f"{type(program).__module__}.{type(program).__qualname__}")
    own = options if isinstance(options, Options) else split_options(None, options)[0]
    check_lowering_names(own, names())
    inductors = [] if isinstance(options, Options) else [name for name in options or {} if own_name(name) is None]
    if inductors:
        raise ExportUnsupported(
            rule="it generates no code, so it takes no option of Inductor",
            observed=", ".join(map(repr, inductors)),
            remedy="Give it to torch._inductor.aoti_compile_and_package(..., inductor_configs={...}).",
        )
    if own.verify:
        raise ExportUnsupported(
            rule="options={'verify': True} compares in the first call of compiled code, which an exported program has none of",
            observed="verify=True",
            remedy="Compare the outputs of rewritten.module() with those of program.module().",
        )
    if own.unpad:
        raise ExportUnsupported(
            rule="options={'unpad': True} looks at each batch before compiled code runs, which an exported program has none of",
            observed="unpad=True",
            remedy="Compile the model with torch.compile(model, backend='attn_compiler', options={'unpad': True}).",
        )
    if own.keeps_attention:
        raise ExportUnsupported(
            rule="options={'checkpoint': 'keep_attention'} is about a backward, which an exported program has none of",
            observed="checkpoint='keep_attention'",
            remedy="Leave the option out; to train the model, torch.compile(model, backend='attn_compiler').",
        )
    if own.context_parallel is not None:
        raise ExportUnsupported(
            rule="options={'context_parallel': ...} makes code for the processes of one group, which an exported program knows nothing of",
            observed=f"context_parallel={own.context_parallel!r}",
            remedy="Compile the model with torch.compile(model, backend='attn_compiler', options={'context_parallel': ...}).",
        )
    if torch_export.has_backward(program):
        raise ExportUnsupported(
            rule="the program's graph computes the model's output alone",
            observed="a graph of a forward and its backward",
            remedy="Export the model without a loss; to train it, torch.compile(model, backend='attn_compiler').",
        )
    return own


def _targets(gm: fx.GraphModule) -> dict[str, Target]:
    """This machine, by the types of the devices that the program's tensors are on."""
    types = {device.type: str(device) for device in torch_compat.graph_devices(gm)}
    return {type_: dataclasses.replace(Target.current(device), packaged=True) for type_, device in types.items()}


def _made(program: ExportedProgram, read: Readable, rewritten: Rewritten, mode: FakeTensorMode) -> ExportedProgram:
    with torch_export.without_new_guards(mode):
        replaced = spelled_out(read.graph_module, read.before, mode)
        compiled_ahead(read.graph_module, read.before)
    put_back(read)
    renamed = {}
    for unit in rewritten.units:
        # What was spelled out stood for a value of the program.
        spelled = {one.product: one.own for one in unit.spelling.calls if one.out is one.product}
        for site in unit.found.sites:
            old, new = unit.mirrored.dynamo_node(site.match.out), site.new_out
            if old is not None and new is not None:
                renamed[spelled.get(old, old).name] = replaced.get(new, new).name
    for module in torch_compat.graph_modules(read.graph_module):
        module.recompile()
    return torch_export.with_graph(program, read.graph_module, renamed)


def _told(error: Exception, options: Options) -> str:
    """Warn, and return the text for the report; with options.strict raise instead."""
    said = CompileFailed(
        step="make an exported program of the rewritten graph",
        graph=_NAME,
        cause=described(error),
        instead="the program is returned as it came",
    )
    if options.strict:
        raise said from error
    warnings.warn(str(said), AttnCompilerWarning, stacklevel=3)
    return f"{said}\n{''.join(traceback.format_exception(error))}"
