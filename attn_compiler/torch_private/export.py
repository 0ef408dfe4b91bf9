"""Private PyTorch API of exported programs: building one from parts, its inputs, symbols without new guards, and decompositions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.export import ExportedProgram
from torch.export._trace import custom_triton_ops_decomposition_disabled
from torch.export.graph_signature import InputKind


class NewGuards(RuntimeError):
    """The program's sizes need a condition that the program does not check."""


def has_backward(program: ExportedProgram) -> bool:
    """Return True if the graph computes gradients itself."""
    return program.graph_signature.backward_signature is not None


def numbers(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the constants of one element, such as `torch.tensor(0.125)`, by the name of their graph input."""
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
    """Copy the program's graph under the names of its signature: a plain copy renames nodes named like a Python builtin ("input")."""
    gm: fx.GraphModule = copy.deepcopy(program.graph_module)
    for node, original in zip(gm.graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    return gm


def with_graph(program: ExportedProgram, gm: fx.GraphModule, renamed: Mapping[str, str]) -> ExportedProgram:
    """Return the same program with another graph, checked by PyTorch's own verifiers. Weights and constants are shared. gm: given away.
    renamed: replaced values by name -> their replacements' names."""
    signature, calls = copy.deepcopy((program.graph_signature, program.module_call_graph))
    for old, new in renamed.items():
        signature.replace_all_uses(old, new)
    for call in calls:
        # A module with a preserved signature names the values that go in and out of it.
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
    # A loaded program has the guards' text alone, and not its source.
    if hasattr(program, "_guards_code"):
        made._guards_code = program._guards_code
    return made


@contextlib.contextmanager
def without_new_guards(mode: FakeTensorMode | None) -> Iterator[None]:
    """Raise for a new guard on a symbolic size within the block: no code checks guards added after the export."""
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


def take_apart(op: str, into: Callable[..., Any], library: Any) -> None:
    """Decompose an op by `into` where a graph is traced to be compiled. library: that defined the op. An export keeps the op, as it keeps
    those of `torch.library.triton_op`."""

    def rule(mode: Any, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if custom_triton_ops_decomposition_disabled():  # type: ignore[no-untyped-call]
            return mode.__torch_dispatch__(func, types, args, kwargs)
        if not all(issubclass(kind, FakeTensor) or kind in (torch.Tensor, FunctionalTensor) for kind in types):
            return NotImplemented
        with mode:
            return into(*args, **kwargs)

    torch.library.register_torch_dispatch(op, FunctionalTensorMode, rule, lib=library)


def launched(
    kernel: Any, grid: tuple[Any, ...], arguments: Mapping[str, Any], written: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Trace a launch of a Triton kernel as an op of the graph. Return the written tensors by parameter. written: parameters that the kernel
    may write to."""
    outputs: dict[str, torch.Tensor] = triton_kernel_wrapper_functional(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[grid],
        tma_descriptor_metadata={},
        kwargs=dict(arguments),
        tensors_to_clone=list(written),
    )
    return outputs
