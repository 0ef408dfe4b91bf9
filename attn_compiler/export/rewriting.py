"""`rewrite`: the passes on a program of torch.export, with a program as the result.

The emitted functions and methods of PyTorch become the ATen ops that an exported program may have. Ops of this package that launch Triton
kernels become their twins, which a compilation takes apart (lowerings/shared/launching/packaged_ops.py). Ops that hold a value become a
copy of it.
"""

from __future__ import annotations

import dataclasses
import operator
import traceback
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram

from attn_compiler.export.readable import Readable, put_back, readable
from attn_compiler.lowerings import families as lowerings, homes  # defines our ops, for programs that were saved
from attn_compiler.options.options import Options, check_lowering_names, own_name, split_options
from attn_compiler.passes.spelling import expand
from attn_compiler.reasons import errors
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, export as torch_export, tracing as torch_tracing
from attn_compiler.torch_private.op_library import NAMESPACE

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode

    from attn_compiler.passes import Rewritten

_NAME = "export"
_OWN = torch.ops.attn_compiler
_PLAIN = {_OWN.held.default: torch.ops.aten.clone.default}
#: Ops of lowerings that can be packaged. Defines their twins, which loaded programs need.
_TWINS = {
    op.default: lowerings.packaged_twin(op.default) for op in (_OWN.triton, _OWN.tile_lists, _OWN.document_numbers)
}


def rewrite(program: ExportedProgram, /, options: Mapping[str, Any] | Options | None = None) -> ExportedProgram:
    """Return a program that computes the same, with PyTorch's attention kernels and our Triton kernels for the found attentions.

    A package of it (`torch._inductor.aoti_compile_and_package`) runs where this package is not installed: lowerings that need its Python
    are refused, by name, in the report, which is `reports()[-1]`. A program with our Triton kernels is itself run, loaded and compiled
    where `attn_compiler.export` is imported; with options={"lowerings": [...]} of PyTorch's kernels alone, anywhere. Keeps the inputs,
    outputs, weights, their names, and dynamic shapes of `program`; does not modify it, and shares its weights.

    The program is for inference on this machine: kernels are chosen for the devices of its tensors on this machine, and without a backward.
    options: as of torch.compile(backend="attn_compiler"). Raises NotAnExportedProgram, ExportUnsupported, UnknownOption or InvalidOption
    for wrong arguments. Any other failure on our side is raised under strict=True; otherwise it is one warning, and the given program is
    returned.
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
            made = _rebuilt(program, read, rewritten, mode)
    except errors.AttnCompilerError:
        # Errors of the user, and of strict=True.
        raise
    except Exception as error:  # noqa: BLE001 (it is told, and raised with strict=True)
        failure = _failure_text(error, own)
        failed = summary.of_failure(gm, {}, {}, failure)
        report = failed if report is None else summary.taken_back(report, errors.described(error), failure)
    publish(report, own)
    return made or torch_export.with_graph(program, torch_export.copied_graph(program), {})


def _checked(program: object, options: Mapping[str, Any] | Options | None) -> Options:
    if not isinstance(program, ExportedProgram):
        raise errors.NotAnExportedProgram(given=f"{type(program).__module__}.{type(program).__qualname__}")
    own = options if isinstance(options, Options) else split_options(None, options)[0]
    check_lowering_names(own, homes.names)
    inductors = [] if isinstance(options, Options) else [name for name in options or {} if own_name(name) is None]
    if inductors:
        raise errors.ExportUnsupported(
            rule="it generates no code, so it takes no option of Inductor",
            observed=", ".join(map(repr, inductors)),
            remedy="Give it to torch._inductor.aoti_compile_and_package(..., inductor_configs={...}).",
        )
    if own.verify:
        raise errors.ExportUnsupported(
            rule="options={'verify': True} compares in the first call of compiled code, which an exported program has none of",
            observed="verify=True",
            remedy="Compare the outputs of rewritten.module() with those of program.module().",
        )
    if own.packs:
        raise errors.ExportUnsupported(
            rule="'unpad' and 'share_prefix' look at each batch before compiled code runs, which an exported program has none of",
            observed="unpad=True" if own.unpad else "share_prefix=True",
            remedy="Compile the model with torch.compile(model, backend='attn_compiler') and the option.",
        )
    if own.keeps_attention:
        raise errors.ExportUnsupported(
            rule="options={'checkpoint': 'keep_attention'} is about a backward, which an exported program has none of",
            observed="checkpoint='keep_attention'",
            remedy="Leave the option out; to train the model, torch.compile(model, backend='attn_compiler').",
        )
    if own.context_parallel is not None:
        raise errors.ExportUnsupported(
            rule="options={'context_parallel': ...} makes code for the processes of one group, which an exported program knows nothing of",
            observed=f"context_parallel={own.context_parallel!r}",
            remedy="Compile the model with torch.compile(model, backend='attn_compiler', options={'context_parallel': ...}).",
        )
    if torch_export.has_backward(program):
        raise errors.ExportUnsupported(
            rule="the program's graph computes the model's output alone",
            observed="a graph of a forward and its backward",
            remedy="Export the model without a loss; to train it, torch.compile(model, backend='attn_compiler').",
        )
    return own


def _targets(gm: fx.GraphModule) -> dict[str, Target]:
    """Return this machine by the types of the devices of the program's tensors."""
    types = {device.type: str(device) for device in torch_compat.graph_devices(gm)}
    return {type_: dataclasses.replace(Target.current(device), packaged=True) for type_, device in types.items()}


def _rebuilt(program: ExportedProgram, read: Readable, rewritten: Rewritten, mode: FakeTensorMode) -> ExportedProgram:
    with torch_export.without_new_guards(mode):
        replaced = spelled_out(read.graph_module, read.before, mode)
        compiled_ahead(read.graph_module, read.before)
    put_back(read)
    renamed = {}
    for unit in rewritten.units:
        # The replaced node was an output of the program.
        spelled = {one.product: one.own for one in unit.spelling.calls if one.out is one.product}
        for site in unit.found.sites:
            old, new = unit.mirrored.dynamo_node(site.match.out), site.new_out
            if old is not None and new is not None:
                renamed[spelled.get(old, old).name] = replaced.get(new, new).name
    for module in torch_compat.graph_modules(read.graph_module):
        module.recompile()
    return torch_export.with_graph(program, read.graph_module, renamed)


def _failure_text(error: Exception, options: Options) -> str:
    """Warn, and return the text for the report; with options.strict raise instead."""
    said = errors.CompileFailed(
        step="make an exported program of the rewritten graph",
        graph=_NAME,
        cause=errors.described(error),
        instead="the program is returned as it came",
    )
    if options.strict:
        raise said from error
    warnings.warn(str(said), errors.AttnCompilerWarning, stacklevel=3)
    return f"{said}\n{''.join(traceback.format_exception(error))}"


def spelled_out(gm: fx.GraphModule, before: Collection[fx.Node], mode: FakeTensorMode) -> dict[fx.Node, fx.Node]:
    """Rewrite all nodes but those of `before`, in place, and return the replacement of each. mode: of the graph's values."""
    replaced: dict[fx.Node, fx.Node] = {}
    for module in torch_compat.graph_modules(gm):
        for node in [node for node in module.graph.nodes if node not in before and not _is_plain(node)]:
            called: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
            parts = expand.spell_out(module, node, called, mode)
            replaced.update({old: new for old, new in parts.items() if isinstance(new, fx.Node)})
    return replaced


def _is_plain(node: fx.Node) -> bool:
    if node.op == "call_method":
        return False
    plain = isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # A call without a value is kept for its side effect.
    return node.op != "call_function" or plain or node.target is operator.getitem or node.meta["example_value"] is None


def compiled_ahead(gm: fx.GraphModule, before: Collection[fx.Node]) -> None:
    """Rewrite all nodes but those of `before`, in place."""
    for module in torch_compat.graph_modules(gm):
        for node in module.graph.nodes:
            if node not in before and getattr(node.target, "namespace", None) == NAMESPACE:
                node.target = {**_PLAIN, **_TWINS}[node.target]
