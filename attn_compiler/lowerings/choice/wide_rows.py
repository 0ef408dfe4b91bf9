"""Which lowering is asked first for head dims above 256. Of PyTorch's kernels the memory-efficient one and math take them."""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, FLASH_FIRST, MANY_SCORES, MOST_QUERIES, Row
from attn_compiler.lowerings.shared.limits import LAST_SM
from attn_compiler.spec.dtypes import HALF

#: architectures that were not measured, and PyTorch's order there
_MACHINES = (((80, 89), FLASH_FIRST), ((100, 109), CUDNN_FIRST), ((110, LAST_SM), FLASH_FIRST))
_WHY = (
    "the memory-efficient kernel holds no sum of more than 128 head dims in registers: for each block of keys it reads and writes a "
    "row of sums in float32, and a mask is a number for each pair and head; not measured here"
)
_WHY_DECODING = "as the rows for more queries; k and v are repeated for PyTorch's kernels, and a cache is read in full; not measured here"


def _row(sms: tuple[int, int], why: str, order: tuple[str, ...], **fields: Any) -> Row:
    return Row(sms=sms, dtypes=HALF, head_dims=(257, None), order=order, since="2026-11-27", why=why, **fields)


WIDE_ROWS: tuple[Row, ...] = tuple(
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
