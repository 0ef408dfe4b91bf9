"""Graphs of a training step as Inductor would be given them: after our pass, parted into forward and backward, and run op by op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition

from attn_compiler.torch_private import inductor as torch_inductor

#: what the forward of an attention is called in such a graph, by the lowering
FORWARD = {
    "reference": "attn_compiler::reference_forward",
    "rows": "attn_compiler::rows_forward",
    "sdpa_cpu_flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "triton": "attn_compiler::triton_forward",
    "reference_fp8": "attn_compiler::reference_fp8",
}


@dataclass
class Graphs:
    """The forward and the backward of all that was compiled."""

    parts: list[fx.GraphModule] = field(default_factory=list)

    def calls(self, lowering: str) -> list[int]:
        """Of the forward of an attention, in each part. What may draw random numbers is called by an op around it."""
        name = FORWARD[lowering]
        return [sum(name in _called(node) for node in part.graph.nodes) for part in self.parts]


def _called(node: fx.Node) -> list[str]:
    schemas = [getattr(target, "_schema", None) for target in (node.target, *node.args)]
    return [schema.name for schema in schemas if schema is not None]


@contextlib.contextmanager
def graphs() -> Iterator[Graphs]:
    """Inside, graphs are parted after our pass as Inductor does, and run op by op."""
    found = Graphs()

    @make_boxed_compiler
    def noted(gm: fx.GraphModule, inputs: Any) -> Any:
        found.parts.append(gm)
        return gm

    def compiled(gm: fx.GraphModule, inputs: Any, *, joint_pass: Any, **_: Any) -> Any:
        def parted(joint: fx.GraphModule, joint_inputs: Any, **more: Any) -> Any:
            joint_pass(joint.graph)
            return min_cut_rematerialization_partition(joint, joint_inputs, **more)

        return aot_autograd(fw_compiler=noted, bw_compiler=noted, partition_fn=parted)(gm, list(inputs))

    with mock.patch.object(torch_inductor, "compile_with_inductor", compiled):
        yield found
