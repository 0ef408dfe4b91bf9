"""Attention of nested (jagged) tensors at which Dynamo breaks the graph, so the call is in no graph.

If Dynamo traces the call instead, it is in the graph, and closed (closed.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from attn_compiler.passes.graph import closed
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import compat as torch_compat

ANCHOR = "scaled_dot_product_attention"
REMEDY = (
    "pad the batch (torch.nested.to_padded_tensor) and give a mask of its lengths, or call torch.nn.attention.varlen.varlen_attn on "
    "x.values() and x.offsets()"
)
_SAYS_ATTENTION = re.compile(r"attention|attn|sdpa", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False)
class BrokenOff:
    """given: the nested tensor that the graph passes to the code after it. source: the model's line of the call."""

    given: fx.Node
    source: str

    @property
    def reason(self) -> Reason:
        return Reason(
            code=Code.CLOSED_TENSOR,
            rule="q, k and v are plain strided tensors",
            observed=f"{self.given.name} is a nested tensor, and Dynamo ends the graph at the attention that reads it",
            remedy=REMEDY,
        )


def find(gm: fx.GraphModule) -> BrokenOff | None:
    """Return the call at which the graph ends, if it is an attention of nested tensors."""
    line = torch_compat.line_of_break(gm)
    if line is None or _SAYS_ATTENTION.search(line[0]) is None:
        return None
    given = next((node for node in gm.graph.output_node().all_input_nodes if closed.is_of_nested(node)), None)
    return None if given is None else BrokenOff(given=given, source=line[1])
