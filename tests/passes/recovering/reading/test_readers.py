"""One reader for each graph as it is now, and mirrors of callers where a mask is followed there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_compiler.index_expr import Index
from attn_compiler.options.options import Options
from attn_compiler.passes.graph import mirroring
from attn_compiler.passes.graph.unit import Unit, units
from attn_compiler.passes.recovering.reading.readers import Readers
from tests.passes.compiling import captured

Q, S = (2, 4, 5, 8), 5


def _body() -> Unit:
    """Of a checkpoint, which is given a mask."""

    def function(q: Tensor) -> Tensor:
        mask = (torch.arange(S) > 2)[None]
        attend = F.scaled_dot_product_attention
        return checkpoint(lambda q, m: attend(q, q, q, attn_mask=m), q, mask, use_reentrant=False)

    gm, _ = captured(function, torch.randn(Q, requires_grad=True))
    (body,) = units(gm, Options())
    return body


def test_a_graph_has_one_reader_until_it_has_another_mirror() -> None:
    body, readers = _body(), Readers()
    body.mirror = mirroring.trace_mirror(body)
    first = readers.of(body)
    assert readers.of(body) is first
    body.mirror = mirroring.trace_mirror(body)
    assert readers.of(body) is not first
    assert readers.of(body).mirror is body.mirror


def test_a_caller_gets_its_mirror_where_a_mask_is_followed_there() -> None:
    body, readers = _body(), Readers()
    body.mirror = mirroring.trace_mirror(body)
    caller = body.place.calls[0].unit
    reader = readers.of(body)
    assert caller.mirror is None
    mask = next(node for node in body.mirror.graph.find_nodes(op="placeholder") if node.meta["val"].dtype == torch.bool)
    assert "k" in str(reader.read_at(len(body.mirror.graph.nodes), mask, (Index("q"), Index("k"))))
    assert caller.mirror is not None


def test_lengths_are_those_that_were_given_for_the_graph() -> None:
    body, readers = _body(), Readers()
    readers.longer[body] = {5: 10}
    assert readers.of(body).longer == {5: 10}
