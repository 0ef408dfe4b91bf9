"""Private PyTorch API of exported programs: how one is made of another one's parts, what its inputs are, and symbols without new guards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


class NewGuards(RuntimeError):
    """A program's sizes were found to need a condition that the program does not check."""


def has_backward(program: ExportedProgram) -> bool:
    """Whether the graph computes gradients itself."""
    return program.graph_signature.backward_signature is not None


def numbers(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The constants of one element, such as `torch.tensor(0.125)`, by the name of the input that the graph has each as."""
    constants = {
        spec.arg.name: program.constants.get(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None
    }
    return {
        name: constant
        for name, constant in constants.items()
        if isinstance(constant, torch.Tensor) and not isinstance(constant, FakeTensor) and constant.numel() == 1
    }


def copied_graph(program: ExportedProgram) -> fx.GraphModule:
    """The program's graph, in names that its signature knows: a copy renames what is called like a builtin of Python ("input")."""
    gm: fx.GraphModule = copy.deepcopy(program.graph_module)
    for node, original in zip(gm.graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    return gm


def with_graph(program: ExportedProgram, gm: fx.GraphModule, renamed: Mapping[str, str]) -> ExportedProgram:
    """The same program with another graph, checked by PyTorch's own verifiers. Weights and constants are shared.

    gm: given away. renamed: the names of values that others took the place of -> the others' names.
    """
    signature, calls = copy.deepcopy((program.graph_signature, program.module_call_graph))
    for old, new in renamed.items():
        signature.replace_all_uses(old, new)
    for call in calls:
        # A module whose own signature is kept says which values go in and out of it.
        arguments = [] if call.signature is None else [*call.signature.inputs, *call.signature.outputs]
        for argument in arguments:
            argument.name = renamed.get(argument.name, argument.name)
    made = ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=signature,
        state_dict=dict(program.state_dict),
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=dict(program.constants),
        verifiers=list(program.verifiers),
    )
    # A program that was loaded has the guards' text, and no longer what it was made of.
    if hasattr(program, "_guards_code"):
        made._guards_code = program._guards_code
    return made


@contextlib.contextmanager
def without_new_guards(mode: FakeTensorMode | None) -> Iterator[None]:
    """Within the block, what would add a guard on a symbolic size raises: nothing checks a guard that is added after the export."""
    env = None if mode is None else mode.shape_env
    if env is None:
        yield
        return
    before = len(env.guards)
    raising = getattr(env, "error_on_new_guards", contextlib.nullcontext)
    with raising():
        yield
    if len(env.guards) > before:
        added = ", ".join(str(guard.expr) for guard in env.guards[before:])
        del env.guards[before:]
        raise NewGuards(f"sizes would have to hold that {added}, and an exported program does not check it")
