"""Layers of linear attention, reported as misses, found by the name of their function or module.

Their state is a sum over the past without a softmax, so no pattern starts there. Transformers has a function for each recurrence. A
module's name counts only if the module has products of computed tensors and no softmax.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from attn_compiler.lowerings.graph_ops.linear_call import linear_call
from attn_compiler.passes.graph.unit import is_anchor_like, module_path
from attn_compiler.passes.matching.written_out import is_product
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import compat as torch_compat

_FLA = "install flash-linear-attention, whose kernels transformers then calls, or load the model with use_kernels=True"
_MAMBA = "install mamba-ssm and causal-conv1d, whose kernels transformers then calls, or load the model with use_kernels=True"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """One recurrence. function, module: patterns for names of its functions and classes. name: for people. remedy: for the user."""

    function: str
    module: str
    name: str
    remedy: str | None = None


RECURRENCES: tuple[Recurrence, ...] = (
    Recurrence(
        function=r"\w*gated_delta_rule\w*", module=r"\w*GatedDeltaNet\w*", name="the gated delta rule", remedy=_FLA
    ),
    Recurrence(
        function=r"\w*kimi_delta\w*|\w*_kda", module=r"\w*KimiDelta\w*", name="Kimi's delta attention", remedy=_FLA
    ),
    Recurrence(
        function=r"mamba2_\w+|mamba_chunk_scan\w*|mamba_split_conv1d_scan\w*",
        module=r"\w*Mamba2Mixer|BambaMixer|FalconH1Mixer",
        name="Mamba-2's state space",
        remedy=_MAMBA,
    ),
    Recurrence(
        function=r"mamba_selective_\w+|selective_scan\w*|selective_state_update\w*",
        module=r"\w*MambaMixer",
        name="Mamba's state space",
        remedy=_MAMBA,
    ),
    Recurrence(function=r"lightning_attn\w*", module=r"\w*LightningAttention\w*", name="lightning attention"),
    Recurrence(function=r"rwkv_linear_attention\w*|wkv\w*", module=r"Rwkv\w*Attention", name="RWKV"),
    Recurrence(function=r"\w*retention", module=r"\w*Retention", name="retention"),
    Recurrence(
        function=r"(?!\w*mask)\w*linear_att(?:entio)?n\w*",
        module=r"\w*Linear(?:Self)?Att(?:entio)?n\w*",
        name="a sum over the past",
    ),
)

#: any other function that has the parameters of a recurrence
_OTHER = Recurrence(function="", module="", name="a recurrence")

_IN_FUNCTION = re.compile(r", in (\w+)$", re.MULTILINE)


#: number of compilations whose reasons are kept until their report is made
_MOST = 64
_REFUSED: OrderedDict[str, dict[str, Reason]] = OrderedDict()


def note_refused(called: str, reason: Reason) -> None:
    """Keep the reason against taking a function's calls, for the report of the current compilation."""
    _REFUSED.setdefault(torch_compat.graph_name(), {})[called] = reason
    while len(_REFUSED) > _MOST:
        _REFUSED.popitem(last=False)


def refused() -> Mapping[str, Reason]:
    """Return the reasons against functions in the current compilation, by function name, and forget them."""
    return _REFUSED.pop(torch_compat.graph_name(), {})


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearLayers:
    """Layers of one recurrence. called: the function or class that computes it. firsts: the first node of each layer, in order.
    refused: the reason against taking the function's calls, if they were examined."""

    recurrence: Recurrence
    called: str
    firsts: tuple[fx.Node, ...]
    num_nodes: int
    refused: Reason | None = None

    @property
    def reason(self) -> Reason:
        if self.refused is not None:
            return dataclasses.replace(self.refused, remedy=self.refused.remedy or self.recurrence.remedy)
        each = self.num_nodes // len(self.firsts)
        return Reason(
            code=Code.LINEAR_ATTENTION,
            rule="the weights of an attention are a softmax of q kᵀ",
            observed=f"{self.called} computes {self.recurrence.name}, a linear attention, in {each} plain ops a layer",
            remedy=self.recurrence.remedy,
        )


def find(graph: fx.Graph, refused: Mapping[str, Reason] | None = None) -> list[LinearLayers]:
    """Return the layers of linear attention in a Dynamo graph, grouped by function or class, without calls that were taken.

    refused: functions whose calls were examined and not taken (passes/matching/linear), by name.
    """
    looked_at = refused or {}
    by_call: dict[tuple[str, str], list[fx.Node]] = {}
    inside: dict[tuple[str, str], list[fx.Node]] = {}
    recurrences: dict[str, Recurrence] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is linear_call:
            taken.add(module_path(node))
            continue
        found = _function_of(node, looked_at)
        where = by_call if found is not None else inside
        found = found or _module_of(node)
        if found is not None:
            called, recurrences[called] = found
            where.setdefault((called, module_path(node)), []).append(node)
    of_functions = {path for _, path in by_call} | taken
    named = {key: nodes for key, nodes in inside.items() if not _is_told(key[1], of_functions) and _computes(nodes)}
    groups = _grouped({**by_call, **named}, recurrences)
    return [dataclasses.replace(one, refused=looked_at.get(one.called)) for one in groups]


def _is_told(path: str, of_functions: Iterable[str]) -> bool:
    """Return whether a function inside the module, or inside a submodule, is known by its name."""
    return any(other == path or other.startswith(f"{path}.") for other in of_functions)


def _grouped(
    layers: Mapping[tuple[str, str], list[fx.Node]], recurrences: Mapping[str, Recurrence]
) -> list[LinearLayers]:
    groups: dict[str, list[list[fx.Node]]] = {}
    for (called, _), nodes in layers.items():
        groups.setdefault(called, []).append(nodes)
    return [
        LinearLayers(
            recurrence=recurrences[called],
            called=called,
            firsts=tuple(nodes[0] for nodes in group),
            num_nodes=sum(map(len, group)),
        )
        for called, group in groups.items()
    ]


def _function_of(node: fx.Node, looked_at: Mapping[str, Reason]) -> tuple[str, Recurrence] | None:
    """Return the outermost function around a node that computes a recurrence, with that recurrence."""
    for name in _IN_FUNCTION.findall(node.meta.get("stack_trace") or ""):
        found = _named(name, "function") or (_OTHER if name in looked_at else None)
        if found is not None:
            return name, found
    return None


def _module_of(node: fx.Node) -> tuple[str, Recurrence] | None:
    """Return the class of the innermost module around a node, with its recurrence."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    kind = next(reversed(stack.values()))[1]
    name = (kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))).rpartition(".")[2]
    found = _named(name, "module")
    return None if found is None else (name, found)


@functools.cache
def _named(name: str, of: str) -> Recurrence | None:
    """Return the recurrence that such a function computes, or (of "module") such a class of modules."""
    return next((one for one in RECURRENCES if re.fullmatch(getattr(one, of), name)), None)


def _computes(nodes: list[fx.Node]) -> bool:
    """Return whether a module mixes tokens by products of computed tensors, without a softmax."""
    return any(map(is_product, nodes)) and not any(map(is_anchor_like, nodes))
