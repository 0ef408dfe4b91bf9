"""Which lowering is asked first for head dims above 256. Of PyTorch's kernels the memory-efficient one and math take them."""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, FLASH_FIRST, MANY_SCORES, MOST_QUERIES, Row
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.spec.dtypes import HALF

#: architectures that were not measured, and PyTorch's order there
_MACHINES = (((80, 89), FLASH_FIRST), ((100, 109), CUDNN_FIRST), ((110, LAST_SM), FLASH_FIRST))
_WHY = (
    "the memory-efficient kernel holds no sum of more than 128 head dims in registers: for each block of keys it reads and writes a "
    "row of sums in float32, and a mask is a number for each pair and head; not measured here"
)
_WHY_DECODING = "as the rows for more queries; k and v are repeated for PyTorch's kernels, and a cache is read in full; not measured here"


def _row(sms: tuple[int, int], why: str, order: tuple[str, ...], **fields: Any) -> Row:
    given = {"head_dims": (257, None), "since": "2026-11-27"} | fields
    return Row(sms=sms, dtypes=HALF, order=order, why=why, **given)


#: of an H200: benchmarks/results/wide_h200.csv
_MEASURED: tuple[Row, ...] = (
    _row(
        (90, 90),
        "wide_h200.csv, D 512, us of decoding with the memory-efficient kernel, k and v repeated as models have it, and with ours: "
        "1 x 4096 keys, 32/4 heads: 663 and 22; 1 x 32768: 5580 and 76; 16 x 4096, half full, 16/2 heads: 2696 and 39; 4 x 8192, 64/1 "
        "heads, sinks (without them): 897 and 56",
        ("decode", "triton", *CUDNN_FIRST),
        training=False,
        most_queries=MOST_QUERIES,
    ),
    _row(
        (90, 90),
        "wide_h200.csv, D 512, us of the memory-efficient kernel, k and v repeated before, of Triton's and Hopper's own: causal, 1 x 8192, "
        "32/4 heads: 16655, 11081, 5105; 4 x 2048: 3942, 3162, 1406; no mask, 1 x 4096, 16/2 heads: 3768, 3085, 1231; padding, 4 x 4096: "
        "15639, 1908, 1153; window 128, sinks, 2 x 4096, 64/1 heads: 32844 (without sinks), 1392, 937; k is v, 1 x 4096: 8236 (without "
        "sinks), 3765, 2758; D 384, 2 x 4096, 16 heads: 2811, 2191, 1153; D 320, which has the products of 384 here, 2523 and 1765. The "
        "backward after it is the faster one of Triton's and its own (wide_backward_h200.csv: 4 x 2048 16148 and 6291)",
        ("hopper", "triton", *CUDNN_FIRST),
        one_query=False,
        least_scores=MANY_SCORES,
        head_dims=(320, 512),
        since="2026-11-28",
    ),
    _row(
        (90, 90),
        "wide_h200.csv, D 512, us of the memory-efficient kernel, k and v repeated before, and ours: causal, 1 x 8192, 32/4 heads: 15841 "
        "and 11083, with the gradients 144448 and 86798; 4 x 2048: 3895 and 3007, 27893 and 25685; padding, 4 x 4096, 16/2 heads: 16308 "
        "and 3478; D 320, 2 x 4096, 16 heads: 2523 and 1765",
        ("triton", *CUDNN_FIRST),
        one_query=False,
        least_scores=MANY_SCORES,
    ),
)

WIDE_ROWS: tuple[Row, ...] = _MEASURED + tuple(
    row
    for sms, pytorchs in _MACHINES
    for row in (
        _row(
            sms,
            _WHY_DECODING,
            ("decode", "triton", *pytorchs),
            training=False,
            most_queries=MOST_QUERIES,
            measured=False,
        ),
        _row(
            sms,
            _WHY,
            ("triton", *pytorchs),
            one_query=False,
            least_scores=MANY_SCORES,
            measured=False,
        ),
    )
)
