"""Which lowering is asked first on sm90 for a bias with an element for each pair, of vision models' lengths: by learned_bias_h200.csv.

Rows of the bias that no vector is loaded from are copied for the Triton kernels (shared/parts/mask_nodes.py), and so they were timed.
"""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, Row
from attn_compiler.spec.dtypes import HALF


def _row(order: tuple[str, ...], why: str, **fields: Any) -> Row:
    return Row(
        sms=(90, 90),
        dtypes=HALF,
        parts=frozenset({"bias"}),
        dropout=False,
        head_dims=(1, 64),
        order=order,
        since="2026-11-28",
        why=f"{why} (us, learned_bias_h200.csv)",
        **fields,
    )


BIAS_ROWS: tuple[Row, ...] = (
    _row(
        ("triton", *CUDNN_FIRST),
        "2048 windows of 49 tokens, 4 heads of 32: Triton 178, memory-efficient 230, cuDNN 621, Inductor 520",
        training=False,
        seqlens=(17, 127),
    ),
    _row(
        ("triton", *CUDNN_FIRST),
        "128 x 197, 12 heads of 64: Triton 274, cuDNN 474, Inductor 361; 64 x 257, 16 heads: 341, 572, 558; 256 x 196, 4 heads of 32: 163, "
        "181, 221. But at 144 tokens, 8 heads of 32, cuDNN 436 and Triton 595",
        training=False,
        seqlens=(192, 511),
    ),
    _row(
        ("cudnn", "triton", *CUDNN_FIRST),
        "forward and backward with the bias' gradient, 16 x 577, 16 heads of 64: cuDNN 3196, Triton 3368, Inductor 3736; 32 x 1025, 12 "
        "heads: 7938, 8397, 9471; 64 x 257, 16 heads: 1803, 1896, 2316; 128 x 197, 12 heads: 1761, 1877, 1734; 256 x 196, 4 heads of 32: "
        "1383, 1258, 1504",
        learned=True,
        seqlens=(192, 1100),
    ),
)
