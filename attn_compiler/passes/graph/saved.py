"""Tensors that a site may read in the backward: those that the model's own autograd saves there, and those that nobody writes afterwards.

A kernel saves the tensors that it reads, and often its output. The model's own ops save others: the repeated keys and not the keys, the
weights and not the output, no mask that was added. A write between the forward and the backward does not matter to a tensor that nobody
saved. So a tensor that a kernel saves is safe only if

- the model's own autograd saves the same memory at the site (an ordinary write is then an error in the model too), or
- nobody can write to it after the site: no node of this graph or of one that calls it, and no user. A user can write to the graph's
  results and inputs. A parameter counts as an input only if the graph itself writes to it: between the forward and the backward nothing
  else does, since nearly every layer saves its parameters.

Any other tensor is copied where the kernel reads it, and the copy is in the report. The copy is made above repetitions, copies and scales:
so it has at most as many bytes as the op that the kernel does without. Without gradients nothing is saved, and nothing copied. A write
through `.data` to a tensor that the model's autograd saved changes the model's gradients: no kernel gives the same, and the site is left
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from attn_compiler.lowerings.base import PART
from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.aliasing import Storages, memory_of
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.calls import reached, target_name
from attn_compiler.passes.graph.gradient_runs import GradientRun, run_on_fakes
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import KeptOutputs, Match, Operand
from attn_compiler.passes.graph.unit import BodyCall, Unit
from attn_compiler.reasons.decisions import Copy
from attn_compiler.torch_private.op_library import NAMESPACE

#: calls whose body runs again in the backward, from its inputs: its tensors are not saved, except attention that users keep
_RUN_AGAIN = frozenset({"tag_activation_checkpoint"})

_RETURNED = "the graph returns it, and it may be written to before the backward"
_NO_CACHE = "return no keys and values in training: model(..., use_cache=False), or config.use_cache = False"


@dataclass(frozen=True, kw_only=True)
class Danger:
    """A possible write to a tensor after a site.

    by_user: outside of the graph, between the forward and the backward.
    of_checkpoint: the tensor is made in a checkpoint, so that the model's own autograd never saves it.
    """

    why: str
    by_user: bool = False
    of_checkpoint: bool = False


def is_given_to_kernel(node: fx.Node) -> bool:
    """Return whether a kernel is given the memory of a Dynamo node, directly or through views: kernels save all their operands."""
    memory = memory_of(node)
    holders = reached([node], lambda holder: [user for user in holder.users if memory_of(user) & memory])
    return any(_is_kernel(user) for holder in holders for user in holder.users)


def _is_kernel(node: fx.Node) -> bool:
    """Return whether a node calls an attention kernel of PyTorch, or a leaf op that has a backward."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, name = node.target.namespace, target_name(node)
    ours = getattr(torch.ops, NAMESPACE)
    family = name.removesuffix(PART)
    return name.startswith("_scaled_dot_product") or (namespace == NAMESPACE and hasattr(ours, f"{family}_backward"))


@dataclass(kw_only=True, eq=False)
class Keeping:
    """The rule for copies, for one site that is differentiated."""

    unit: Unit
    mirror: Mirror
    match: Match

    @cached_property
    def _model(self) -> GradientRun | None:
        """Run the model's own computation of the site, from the first product to the output."""
        owners = {self.mirror.owner(node) for node in self.match.covered}
        nodes = [n for n in self.unit.graph.nodes if n in owners and n.meta.get("example_value") is not None]
        return run_on_fakes(nodes, self.unit.mode, self.unit.memory.runs)

    @cached_property
    def _read(self) -> Storages:
        """Return the memory that the site's nodes work with."""
        nodes = {m for n in self.match.covered for m in (n, *n.all_input_nodes)}
        return set().union(*(memory_of(self.mirror.dynamo_node(n)) for n in nodes))

    def why(self, node: fx.Node) -> str | None:
        """Return why a kernel that saves the tensor of this mirror node has to save a copy; None if it need not.

        Raises AxisError where the model's own gradients would change, and a kernel's would not be the same.
        """
        dynamo = self.mirror.dynamo_node(node)
        danger = danger_after(self.unit, self.mirror, node, self.match.out) if dynamo is not None else None
        if dynamo is None or danger is None:
            return None
        is_read = bool(memory_of(dynamo) & self._read)
        if danger.of_checkpoint or not (is_read and self._model is not None and self._model.saves(dynamo)):
            return danger.why
        if not danger.by_user and memory_of(dynamo) & self.unit.memory.aliases.taken_as_data:
            raise AxisError(f"{node.name} is written to through .data after the model's autograd saved it")
        return None if danger.by_user else danger.why

    def why_loaded(self, node: fx.Node) -> str | None:
        """Return `why` for a tensor that a kernel computes a mask or bias from anew. A copy is right there, so an AxisError is a reason."""
        try:
            return self.why(node)
        except AxisError as error:
            return str(error)


def record_copies(unit: Unit, mirror: Mirror, match: Match) -> None:
    """Record on a differentiated site why kernels have to copy its operands and its outputs, if so. Raises AxisError as Keeping.why."""
    keeping = Keeping(unit=unit, mirror=mirror, match=match)
    for operand in operands(match):
        operand.kept = keeping.why(operand.root)
    lse = None if match.lse is None else keeping.why(match.lse.node)
    match.kept = KeptOutputs(out=keeping.why(match.out), lse=lse)


def operands(match: Match) -> list[Operand]:
    """Return every operand of a site, including those of masks, biases and sinks."""
    terms = [term.operand for term in match.scores.terms]
    return [
        match.q,
        match.k,
        match.v,
        *terms,
        *([match.scores.sinks] if isinstance(match.scores.sinks, Operand) else []),
    ]


def danger_after(unit: Unit, mirror: Mirror, node: fx.Node, site: fx.Node) -> Danger | None:
    """Return who may write to the tensor of a mirror node after the site with this output, until the backward is done."""
    mine = mutation.storages(node)
    writer = mutation.written_after(mirror, mine, site)
    if writer is not None:
        return Danger(why=f"{writer.name} writes to it afterwards")
    is_written = any(mine & written for _, written in mirror.writers)
    return _from_outside(unit, memory_of(mirror.dynamo_node(node)), is_written=is_written)


def written_by_user(unit: Unit, node: fx.Node) -> str | None:
    """Say who may write to the memory of a Dynamo node outside of the graph; None if nobody."""
    memory = memory_of(node)
    danger = _from_outside(unit, memory, is_written=bool(memory & unit.memory.aliases.written))
    return None if danger is None else danger.why


def copy(operand: str, node: fx.Node, why: str) -> Copy:
    """Describe a copy for the report. node: the Dynamo node that is copied, or the copy. why: as Keeping.why gives it."""
    value: torch.Tensor = node.meta["example_value"]
    is_known = not any(isinstance(size, torch.SymInt) for size in value.shape)
    size = value.numel() * value.element_size() if is_known else None
    remedy = _NO_CACHE if why == _RETURNED and operand in ("k", "v") else None
    return Copy(operand=operand, bytes=size, why=f"{why}, and the backward reads it", remedy=remedy)


def _from_outside(unit: Unit, memory: Storages, *, is_written: bool) -> Danger | None:
    """Return who may write to this memory of a graph from outside of it. is_written: nodes of the graph do."""
    reached = unit.memory.aliases
    is_output = bool(reached.returned & memory)
    if not unit.is_body:
        if is_output:
            return Danger(why=_RETURNED, by_user=True)
        if reached.given & memory and (is_written or not reached.parameters & memory):
            return Danger(why="the graph is given it, and it may be written to before the backward", by_user=True)
        return None
    inputs = [i for i, given in enumerate(reached.inputs) if given & memory]
    if not inputs and not is_output:
        return None
    if not unit.place.calls:
        return Danger(why="it goes in or out of a graph whose calls are not followed")
    found = (_by_caller(call, inputs, is_output=is_output) for call in unit.place.calls)
    return next((danger for danger in found if danger is not None), None)


def _by_caller(call: BodyCall, inputs: Iterable[int], *, is_output: bool) -> Danger | None:
    """Return who may write to a body's inputs or results after this call of it."""
    given = [call.node.args[call.first + i] for i in inputs]
    nodes = [*(x for x in given if isinstance(x, fx.Node)), *([call.node] if is_output else [])]
    memory: Storages = set().union(*map(memory_of, nodes))
    reached = call.unit.memory.aliases
    writer = next((n for n, written in reached.writers.items() if call.node < n and written & memory), None)
    if writer is not None:
        return Danger(why=f"{writer.name} writes to it after the call")
    runs_again = target_name(call.node) in _RUN_AGAIN
    if runs_again and not (is_output and call.unit.options.keeps_attention):
        return None
    found = _from_outside(call.unit, memory, is_written=bool(reached.written & memory))
    return found and replace(found, of_checkpoint=runs_again or found.of_checkpoint)
