"""Comparison for a sequence that ranks share: this rank's rows with those of the attention over the whole sequence.

Two things have to hold. The recovered attention (as_read.py) gives, on the rank's own part, the same as the model's own operations. And the
rewritten graph gives this rank the same as that attention with the keys of all ranks, which ranks.py puts in the order of the sequence, at
this rank's positions. Both by the rule of outputs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.passes.graph import program
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.recovering import recover
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.numerics import exact_dtype
from attn_compiler.verifying import as_read, outputs
from attn_compiler.verifying.as_read import AsRead
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.outputs import RealBuilder
from attn_compiler.verifying.ranks import Ranks, WholeLoads
from attn_compiler.verifying.values import Body, Values


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedSite:
    """A site whose keys are on several ranks. new_out: in the rewritten graph. whole: makes the loads of its mask and biases."""

    site: Site
    spec: AttentionSpec
    body: Body
    new_out: fx.Node
    whole: WholeLoads
    ranks: Ranks


def read(of: SharedSite, values: Values) -> None:
    """Read the inputs of `check_whole_rows`. Raises NoValueError."""
    outputs.read_own(of.site, of.body, values)
    values.rewritten(of.body, of.new_out)
    for node in (*program.sources(of.site.match), *(factor.node for factor in of.site.match.scores.factors)):
        values.mirror(node)
    for version in (*_mask_loads(of).values(), *_score_loads(of).values()):
        of.whole.value(version, values, of.ranks)
        values.at(version)


def _mask_loads(of: SharedSite) -> dict[str, Version]:
    return {name: of.site.loads[name] for name in sorted(as_read.allowed(of.site, of.spec).facts.tensors)}


def _score_loads(of: SharedSite) -> dict[str, Version]:
    names = {name for kind in of.spec.score.proved for name in kind.summand.facts.tensors}
    return {name: of.site.score_loads[name] for name in sorted(names)}


def check_whole_rows(of: SharedSite, values: Values) -> tuple[Compared, torch.Tensor]:
    """Compare with the attention over the whole sequence, and return this rank's part of it. Every rank has to call it. Raises
    VerificationMismatch, or NoValueError."""
    site, ranks = of.site, of.ranks
    ranks.meet(f"the attention of {site.module}")
    # Steps that wait for other ranks come first: later findings are this rank's own.
    new = outputs.floating(values.rewritten(of.body, of.new_out))
    own = _part_attention(of, values)
    k, v = (ranks.whole(x, 2) for x in (own.k, own.v))
    loads, score_loads = (
        {name: of.whole.value(version, values, ranks) for name, version in known.items()}
        for known in (_mask_loads(of), _score_loads(of))
    )
    positions = ranks.positions(own.q.shape[2], own.q.device)
    whole = dataclasses.replace(own, k=k, v=v, positions=positions, loads=loads, score_loads=score_loads)
    kept = outputs.kept_rows(site, values, outputs.floating(values.mirror(site.match.out)))
    outputs.beside_own(site, of.body, _restored(of, own.run(), values), values, kept, "attention as it was read")
    out = _restored(of, whole.run(), values)

    def run(noise: Noise | None) -> torch.Tensor:
        return _restored(of, whole.run(exact_dtype(out.dtype), noise), values, in_dtype=False)

    compared = outputs.compared(
        site,
        new=new,
        own=out,
        run=run,
        v=v,
        kept=outputs.spread(site, whole.rows(), values),
        what=f"{outputs.lowered(site)} over the whole sequence",
        formula=ix.text(as_read.allowed(site, of.spec)),
    )
    return compared, out


def _part_attention(of: SharedSite, values: Values) -> AsRead:
    """Return the attention on this rank's part alone, as the model's own graph computes it."""
    match = of.site.match
    tensors = program.build(of.body.mirror, match, RealBuilder(values), recover.compute_dtype(of.body.mirror, match))
    return AsRead(
        site=of.site,
        spec=of.spec,
        values=values,
        q=tensors.q,
        k=tensors.k,
        v=tensors.v,
        sinks=tensors.sinks,
        positions=torch.arange(tensors.q.shape[2], device=tensors.q.device),
        loads=_local(_mask_loads(of), values),
        score_loads=_local(_score_loads(of), values),
    )


def _local(known: Mapping[str, Version], values: Values) -> dict[str, torch.Tensor]:
    return {name: values.at(version) for name, version in known.items()}


def _restored(of: SharedSite, out: torch.Tensor, values: Values, *, in_dtype: bool = True) -> torch.Tensor:
    """Return (B, H, Q, Dv) in the model's dimensions. in_dtype: and in its dtype."""
    found: torch.Tensor = program.restore(of.site.match, RealBuilder(values), out)
    return found.to(outputs.floating(values.mirror(of.site.match.out)).dtype) if in_dtype else found
