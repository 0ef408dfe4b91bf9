"""Rewrite the Dynamo graph: for each site the operands as views, the planned copies, the kernel, and views of its output.

Rewriting happens before AOTAutograd, which then differentiates what the lowering emitted. The model's own nodes are erased
where nothing else reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import OF_CACHE, OF_NUMBERS, UNTOUCHED, LatentNodes, Operands, StoredNodes
from attn_compiler.lowerings.graph_ops import kept
from attn_compiler.passes.graph import axes, faults, gradient_runs, gradients, mutation, program, saved, strides
from attn_compiler.passes.graph.emit import GraphBuilder, Held
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Latent, Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.recovering import body_inputs, reach, recover
from attn_compiler.passes.writing import buffers, checkpointed, keyless_nodes, layout, linear_calls, tables
from attn_compiler.passes.writing.select import leave_alone
from attn_compiler.reasons.decisions import Copy
from attn_compiler.reasons.errors import VerifyFailed
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import op_library, snapshots as torch_snapshots, symbols as torch_symbols


def lower_sites(unit: Unit, mirror: Mirror, found: FoundSites, targets: Mapping[str, Target]) -> None:
    """Lower every site that has a lowering, then recompile.

    Sites are lowered in the order of their outputs: shared values are made before the first site, and kernels stand in the outputs'
    places.
    """
    builder = GraphBuilder(unit.graph, mirror, unit.mode)
    held: list[_Held] = []
    tables.sum_in_one_order(unit, mirror, builder, found.sites)
    for site in sorted(found.sites, key=lambda site: mirror.order(site.match.out)):
        unit.log.current = site.module
        if site.decision is not None and site.decision.lowering != UNTOUCHED:
            held += _try(unit, mirror, site, builder, targets)
    _leave_out(held)
    builder.forget_erased()
    builder.erase_unused([site.new_out for site in found.sites if site.new_out is not None])
    for site in found.sites:
        _erase_expanded(site, unit.graph)
    _report(held, unit.graph)
    checkpointed.tell(unit, found)
    unit.graph_module.recompile()


def take_back(gm: fx.GraphModule, units: Sequence[Unit]) -> None:
    """Undo what is outside of a graph that was restored, and give calls of linear attention the model's own function."""
    buffers.discard(gm, units)
    linear_calls.give_back(gm)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A copy that a site reads. is_saved: the site's kernel saves it, so that the copy is needed."""

    site: Site
    copy: Held
    is_saved: bool


def _leave_out(held: list[_Held]) -> None:
    """Let kernels read the tensors themselves where none saves the copy."""
    needed = {one.copy.node for one in held if one.is_saved}
    for node in dict.fromkeys(one.copy.node for one in held if one.copy.node not in needed):
        original = node.args[0]
        if isinstance(original, fx.Node) and _lies_as(node, original):
            node.replace_all_uses_with(original)


def _lies_as(node: fx.Node, other: fx.Node) -> bool:
    both = (x.meta["example_value"].stride() for x in (node, other))
    return all(torch_symbols.statically_known(a == b) for a, b in zip(*both, strict=True))


def _report(held: list[_Held], graph: fx.Graph) -> None:
    """Record the remaining copies on the sites whose kernels asked for them."""
    left = set(graph.nodes)
    for one in held:
        if one.is_saved and one.copy.node in left:
            copy = saved.copy(one.copy.operand, one.copy.node, one.copy.why)
            if copy not in one.site.copies:
                one.site.copies.append(copy)


def _try(unit: Unit, mirror: Mirror, site: Site, builder: GraphBuilder, targets: Mapping[str, Target]) -> list[_Held]:
    """Lower one site, or leave the graph as if it had not been tried. Returns the copies that the site reads.

    All that may fail comes before the first edit of existing nodes; until then only new nodes have to be taken back.
    """
    notes, copies, num_buffers = list(site.notes), list(site.copies), len(unit.written.buffers)
    taken_back = torch_snapshots.taken_back_on_error(unit.graph_module)
    with faults.confined(unit.log, "lower", site.module) as attempt, taken_back:
        new, held = _lower(unit, mirror, site, builder, targets)
        old = [builder.leaf(output) for output in site.match.outputs]
        gone = unread(mirror, site, old)
    if attempt.reason is not None:
        builder.forget_erased()
        buffers.forget(unit, num_buffers)
        body_inputs.forget_erased(unit)
        site.notes[:], site.copies[:] = notes, copies
        leave_alone(site, attempt.reason)
        return []
    for output, before, after in zip(site.match.outputs, old, new, strict=True):
        _read_by_name(output, before)
        builder.replace(before, after)
    site.new_out = new[0]
    for node in gone:
        unit.graph.erase_node(node)
    for node in new:
        _put_below(node)
    return held


def _read_by_name(output: fx.Node, node: fx.Node) -> None:
    """Let who reads a tensor after a Dynamo node wrote to it, and gave it back, read what the node gives. output: its mirror node."""
    written = node.args[0] if mutation.returned(output) is not None and node.args else None
    if not isinstance(written, fx.Node):
        return
    for user in list(written.users):
        if node < user:
            user.replace_input_with(written, node)


def _put_below(node: fx.Node) -> None:
    """Move what reads a node, and stands in front of it, to behind it, with what is made of that in front."""
    place = node
    early = {user for user in node.users if user < node}
    reader = min(early, default=node)
    while reader is not node:
        following = reader.next
        if reader in early or early & set(reader.all_input_nodes):
            early.add(reader)
            place.append(reader)
            place = reader
        reader = following


def _erase_expanded(site: Site, graph: fx.Graph) -> None:
    """Erase the nodes that make k and v of a latent, if nothing reads them any more: writes in place would keep them alive."""
    latent = site.match.reads.latent
    if not isinstance(latent, Latent) or any(user not in latent.made_for for n in latent.made_for for user in n.users):
        return
    for node in reversed(graph.nodes):
        if node in latent.made_for:
            graph.erase_node(node)


def _lower(
    unit: Unit, mirror: Mirror, site: Site, builder: GraphBuilder, targets: Mapping[str, Target]
) -> tuple[list[fx.Node], list[_Held]]:
    """Return the replacements of the site's outputs, which nothing reads yet, and the copies that the site reads."""
    if site.spec is None or site.decision is None:
        raise ValueError(f"the site at {site.module} was not decided")
    target = targets[site.spec.device]
    note, with_grad = site.notes.append, site.spec.needs_grad
    make, carry = functools.partial(buffers.make, unit, site), functools.partial(body_inputs.carry, unit)
    keep = saved.Keeping(unit=unit, mirror=mirror, match=site.match).why_loaded if with_grad else None
    before = len(builder.made)
    with builder.at(
        site.match.out, with_grad=with_grad, target=target, note=note, buffers=make, carry=carry, keep=keep
    ) as old:
        tensors = program.build(mirror, site.match, builder, recover.compute_dtype(site.match))
        operands = _operands(mirror, site, site.spec, builder, tensors)
        if not with_grad and _brings_gradient(mirror, site):
            operands = gradients.detached(builder, operands)
        spec = keyless_nodes.asked_for(site.spec, site.keyless, site.decision.lowering, target)
        with builder.without_autocast():
            if spec.mask.means and site.keyless is not None:
                has_keys = keyless_nodes.with_keys(builder, spec, site.keyless, operands)
                operands = dataclasses.replace(operands, has_keys=has_keys)
            out, *lse = _emitted(site, spec, target, builder, operands)
        if spec.mask.means:
            keyless_nodes.tell(builder, spec, site.keyless)
        elif site.decision.lowering in OF_CACHE and (
            spec.adds_unread or (site.keyless is not None and not site.keyless.by_tensor)
        ):
            note(keyless_nodes.NOTE_OF_CACHE)
        elif site.keyless is not None and not _has_own_rows(site, site.spec):
            with builder.without_autocast():
                out = keyless_nodes.completed(builder, site.spec, site.keyless, operands, out)
        width = axes.dim_size(site.match.axes.head_dim_v)
        if width.is_Integer and width != spec.head_dim_v:
            out = builder.call(torch.narrow, out, 3, 0, int(width))
        new = finish(mirror, site, builder, out, old)
        site.texts = op_library.texts(builder.made[before:])
        site.forwards = tuple(filter(kept.is_attention, builder.made[before:]))
        held, new = _settle(unit, site, builder, builder.made[before:], new)
        finished = [_finish_lse(mirror, site, builder, x) for x in lse]
    site.notes.extend(site.match.notes)
    return [new, *finished], held


def _has_own_rows(site: Site, spec: AttentionSpec) -> bool:
    """Return whether the lowering adds the model's own numbers, and so has the model's result in every row, gradients included."""
    if spec.mask.own_rows is not None:
        return True
    return site.decision is not None and site.decision.lowering in OF_NUMBERS and recover.is_added_up(site.match, spec)


def _emitted(
    site: Site, spec: AttentionSpec, target: Target, builder: GraphBuilder, operands: Operands
) -> tuple[fx.Node, ...]:
    """Return one node for each output of the match."""
    lowering = by_name(UNTOUCHED if site.decision is None else site.decision.lowering)
    plan = lowering.plan(spec, target)
    if site.match.lse is None:
        return (lowering.emit(builder, plan, operands),)
    return lowering.emit_with_lse(builder, plan, operands)


def _operands(
    mirror: Mirror, site: Site, spec: AttentionSpec, builder: GraphBuilder, tensors: program.Tensors[fx.Node]
) -> Operands:
    copied = {c.operand for c in site.copies}
    q, k, v = (
        _copied(site, spec, builder, name, x) if name in copied else x
        for name, x in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v))
    )
    mask, score = spec.mask, spec.score
    return Operands(
        q=q,
        k=k,
        v=v,
        mask=tensors.mask,
        sinks=tensors.sinks,
        stored=None if tensors.stored is None else StoredNodes(**vars(tensors.stored)),
        latent=None if tensors.latent is None else LatentNodes(**vars(tensors.latent)),
        loads=reach.tensors(builder, site.loads, mask.conditions, mask.out_of_reach),
        score_loads=reach.tensors(builder, site.score_loads, score.proved, score.out_of_reach),
        sizes=reach.sizes(mirror, site.match, (*mask.conditions, *score.proved)),
    )


def _copied(site: Site, spec: AttentionSpec, builder: GraphBuilder, name: str, x: fx.Node) -> fx.Node:
    """Make q, k or v contiguous, with zeros up to the spec's head dim. A symbolic one gets none."""
    own, wanted = axes.size_expr(x.meta["example_value"].shape[-1]), getattr(spec, name).shape[-1]
    if own.is_Integer and own != wanted:
        return builder.call(torch.Tensor.contiguous, builder.call(torch.constant_pad_nd, x, (0, wanted - int(own))))
    if name in layout.told_wrong(site.match):
        # AOTAutograd keeps this op even where tracing says that `x` is contiguous.
        return builder.call(torch.clone, x, memory_format=torch.contiguous_format)
    return builder.call(torch.Tensor.contiguous, x)


def finish(mirror: Mirror, site: Site, builder: GraphBuilder, out: fx.Node, old: fx.Node) -> fx.Node:
    """Return the kernel's output in the model's dimensions and dtype, copied where somebody downstream needs the model's strides."""
    return _as_was(mirror, site, builder, program.restore(site.match, builder, out), site.match.out, old, "out")


def _finish_lse(mirror: Mirror, site: Site, builder: GraphBuilder, lse: fx.Node) -> fx.Node:
    """Finish the lse as `finish` does. Kernels save theirs, so anyone who may write to the lse gets a copy."""
    match = site.match
    if match.lse is None:
        raise ValueError(f"nothing reads the lse of the site at {site.module}")
    new = program.restore_lse(match, builder, lse)
    new = _as_was(mirror, site, builder, new, match.lse.node, builder.leaf(match.lse.node), "lse")
    return new if match.kept.lse is None else _handed_on(site, builder, new, match.kept.lse, "lse")


def _as_was(
    mirror: Mirror, site: Site, builder: GraphBuilder, new: fx.Node, at: fx.Node, old: fx.Node, name: str
) -> fx.Node:
    """Return an output in a Dynamo node's dtype, in its strides if somebody needs them, and detached if it had no gradient.

    at: the Dynamo node's mirror node.
    """
    wanted: torch.Tensor = old.meta["example_value"]
    if builder.value(new).dtype != wanted.dtype:
        new = builder.call(torch.Tensor.to, new, wanted.dtype)
    if not wanted.requires_grad and _brings_gradient(mirror, site):
        new = builder.call(torch.Tensor.detach, new)
    reader = strides.relies_on(mirror, at, old, builder.value(new), builder.mode)
    if reader is not None:
        size = (
            None if any(isinstance(s, torch.SymInt) for s in wanted.shape) else wanted.numel() * wanted.element_size()
        )
        site.copies.append(Copy(operand=name, bytes=size, why=f"{reader} needs the strides that the model made"))
        return strides.restride(builder, new, wanted)
    return new


def _settle(
    unit: Unit, site: Site, builder: GraphBuilder, emitted: Sequence[fx.Node], new: fx.Node
) -> tuple[list[_Held], fx.Node]:
    """Return the copies that the site reads, with whether its kernel saves them, and the output, copied if the kernel saves it."""
    why = site.match.kept.out
    given = {copy.node for copy in builder.held if saved.is_given_to_kernel(copy.node)}
    # A run costs milliseconds, and is not needed where kernels are given all the copies.
    ran = (
        gradient_runs.run_on_fakes(emitted, unit.mode, unit.memory.runs)
        if why is not None or len(given) < len(builder.held)
        else None
    )
    held = [
        _Held(site=site, copy=copy, is_saved=copy.node in given or ran is None or ran.saves(copy.node))
        for copy in builder.held
    ]
    is_handed_on = why is not None and (ran is None or ran.saves(new))
    return held, _handed_on(site, builder, new, why, "out") if is_handed_on and why is not None else new


def _handed_on(site: Site, builder: GraphBuilder, new: fx.Node, why: str, name: str) -> fx.Node:
    """Return a copy of a kernel's result, which the kernel saves."""
    site.copies.append(saved.copy(name, new, why))
    # Inductor removes a clone if a view of it is returned: it does not know yet that the output is saved, too.
    return builder.call(torch.ops.attn_compiler.held.default, new)


def _brings_gradient(mirror: Mirror, site: Site) -> bool:
    """Return whether an input of the kernel carries a gradient: the model may have stopped it on the way, or all around."""
    factors = (factor.node for factor in site.match.scores.factors)
    return any(gradients.carries(mirror, node) for node in (*program.sources(site.match), *factors))


def unread(mirror: Mirror, site: Site, old: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that become dead when the new outputs replace the old ones, users before their inputs.

    These are the site's own nodes, and pure nodes above that only these read.
    """
    own = {mirror.owner(n) for n in site.match.covered}
    writers = {mirror.owner(writer) for writer, _ in mirror.writers} - own
    candidates = list(old)
    found: dict[fx.Node, None] = {}
    while candidates:
        node = candidates.pop()
        is_read = node not in old and not found.keys() >= node.users.keys()
        if node in found or node in writers or is_read or node.op not in ("call_function", "call_method"):
            continue
        found[node] = None
        candidates.extend(n for n in node.all_input_nodes if n in own or _is_pure(mirror, n))
    return list(found)


def _is_pure(mirror: Mirror, node: fx.Node) -> bool:
    """Return whether a node only computes its value: it exists in the mirror as ATen ops that write nothing."""
    return node.op in ("call_function", "call_method") and mirror.computes_only(node)


# ---- invariants of a rewritten graph ---------------------------------------------------------------------------------


def verify_graph(unit: Unit, found: FoundSites) -> None:
    """Raise VerifyFailed if the graph is malformed, or a site's value changed in shape, dtype or device."""
    if not unit.options.check_invariants:
        return
    try:
        unit.graph.lint()
    except RuntimeError as error:
        raise VerifyFailed(
            pass_name="lower",
            site=unit.name or "the graph",
            invariant="every node is defined before it is used",
            observed=str(error),
        ) from error
    for site in found.sites:
        if site.new_out is not None:
            _check_output(site, site.new_out)


def _check_output(site: Site, new_out: fx.Node) -> None:
    before: torch.Tensor = site.match.out.meta["val"]
    after: torch.Tensor = new_out.meta["example_value"]
    if _differs(before, after):
        was = f"the output is {_words(before)}"
        raise VerifyFailed(pass_name="lower", site=site.module, invariant=was, observed=_words(after))


def _differs(before: torch.Tensor, after: torch.Tensor) -> bool:
    if (before.dtype, before.device, before.dim()) != (after.dtype, after.device, after.dim()):
        return True
    # Equal sizes may be spelled differently: s0**2 // s0. What PyTorch can not prove a guard keeps.
    equal = [a == b for a, b in zip(before.shape, after.shape, strict=True)]
    return not all(torch_symbols.statically_known(x) or (torch_symbols.example(x) and bool(x)) for x in equal)


def _words(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"
