"""The model's own graph beside a packed one: calls that may not be packed run it, so it gets kernels as any graph does."""

from __future__ import annotations

from collections.abc import Mapping

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.writing import layout, lower, select
from attn_compiler.spec.target import Target


def write_kernels(packed: Unit, padded: Unit | None, targets: Mapping[str, Target]) -> Unit | None:
    """Write kernels into the padded graph. None where a pass fails, which the packed graph's log then says.

    packed: any graph of the compilation.
    padded: the graph beside one of them. Its attentions are found, and nothing was rewritten.
    """
    if padded is None or padded.place is not packed.place:
        return padded
    with faults.confined(packed.log, "padded", packed.name or "the graph") as attempt:
        select.select_lowerings(padded, padded.found, targets)
        layout.choose_copies(padded, padded.found)
        lower.lower_sites(padded, padded.mirrored, padded.found, targets)
    packed.log.faults.extend(padded.log.faults)
    return padded if attempt.reason is None else None
