"""AC7xx: DTensors."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages.page import ExampleKind, Page

_PROCESSES = "It takes several processes. tests/distributed has the programs that meet it."

PAGES = (
    Page(
        code=Code.SHARDED_SEQUENCE,
        title="A sequence is spread over processes",
        cause="q, k or v is sharded along its positions (context or sequence parallelism), so no process has all keys "
        "of its queries. A kernel of one process can't compute that attention.",
        remedy="Redistribute q, k and v over heads or over the batch before the attention, or to `Replicate()`. "
        "PyTorch's own `context_parallel` keeps its attention.",
        kind=ExampleKind.TOLD,
        example=f"{_PROCESSES} q, k and v are placed as `Shard(2)`.",
    ),
    Page(
        code=Code.PLACEMENTS,
        title="q, k, v and the mask are placed differently",
        cause="Each process has to have whole sequences of the same heads and rows of all of them. Here one is sharded "
        "along another axis, lies on another mesh, or is no DTensor.",
        remedy="Redistribute q, k and v to the same placements before the attention, and a mask as q is, or give it one "
        "element along what is sharded.",
        kind=ExampleKind.TOLD,
        example=f"{_PROCESSES} q is `Shard(1)` and k is `Replicate()`.",
    ),
    Page(
        code=Code.SHARDED_DROPOUT,
        title="DTensors with dropout",
        cause="PyTorch draws random numbers for DTensors in a way of its own, which a kernel of one process would not "
        "draw.",
        remedy="Leave out attention dropout, or call the attention on local tensors (`x.to_local()`).",
        kind=ExampleKind.TOLD,
        example=f"{_PROCESSES} `scaled_dot_product_attention(q, k, v, dropout_p=0.1)` is called on DTensors.",
    ),
    Page(
        code=Code.UNEQUAL_SHARES,
        title="The shares of the processes are not equal",
        cause="Heads or rows do not divide evenly among the processes, a sum is only partly made, or a size is a symbol "
        "and nobody knows.",
        remedy="Choose a number of processes that divides the heads, or compile with `dynamic=False`.",
        kind=ExampleKind.TOLD,
        example=f"{_PROCESSES} 3 heads are sharded over 2 processes.",
    ),
    Page(
        code=Code.NO_LOCAL_ATTENTION,
        title="The attention of DTensors can't be written for local tensors",
        cause="An op in between is not known to be the same on shares as on the whole, or what it gives differs in "
        "shape or dtype.",
        remedy="Call the attention on local tensors (`x.to_local()`), and make a DTensor of its result.",
        kind=ExampleKind.TOLD,
        example=f"{_PROCESSES} An op writes in place to the scores, which are a DTensor.",
    ),
)
