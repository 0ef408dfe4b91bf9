"""`attn_compiler::scaled_dot_product_attention_with_lse` (lse_op.py): SDPA's arguments, a softcap, and an optional logsumexp."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import NoReturn

from torch import fx

from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse
from attn_compiler.passes.graph import views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, ReadLse, Refused
from attn_compiler.passes.matching.patterns import sdpa_call
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.scores import Softcap

NAME = "sdpa call with lse"
ANCHORS = frozenset({attention_with_lse})


def match(mirror: Mirror, anchor: fx.Node) -> Match:
    """Match a call. Raises Refused if the output is not taken out of the call, or is taken out after the logsumexp."""
    out, lse = (_output(anchor, index) for index in range(2))
    call = sdpa_call.SdpaCall(pattern=NAME, anchor=anchor, out=out, mask="attn_mask", gqa=True)
    found = sdpa_call.match_call(mirror, call)
    cap = views.argument(anchor, "softcap")
    if isinstance(cap, (int, float)):
        found.scores = replace(found.scores, changes=(Softcap(cap=float(cap)),))
    if mirror.readers(lse):
        # A kernel stands at the output, and its logsumexp is read below it.
        of_out, of_lse = mirror.dynamo_node(out), mirror.dynamo_node(lse)
        if of_out is None or of_lse is None or not of_out < of_lse:
            _refuse(anchor, "the logsumexp is taken out of it first, or alone")
        is_part = bool(views.argument(anchor, "is_part"))
        found.lse = ReadLse(node=lse, dims=found.out_dims[:-1], is_part=is_part)
        found.covered |= {lse}
    return found


def _output(anchor: fx.Node, index: int) -> fx.Node:
    nodes = [node for node in anchor.users if node.target is operator.getitem and node.args[1] == index]
    if len(nodes) != 1:
        _refuse(anchor, f"output {index} is taken out of it {len(nodes)} times")
    return nodes[0]


def _refuse(anchor: fx.Node, observed: str) -> NoReturn:
    rule = "of a call with a logsumexp the output is taken out first, and each once"
    remedy = "take the output out of the call before the logsumexp, and each of the two once"
    raise Refused(Code.OTHER_OUTPUT, rule, observed, at=anchor, progress=1, remedy=remedy)
