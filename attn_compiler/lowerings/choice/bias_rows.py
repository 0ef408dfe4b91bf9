"""Which lowering is asked first on sm90 for biases of short sequences, and for padding beside wide heads of few scores.

By learned_bias_h200.csv and sites_h200.csv.

Rows of the bias that no vector is loaded from are copied for the Triton kernels (shared/parts/mask_nodes.py), and so they were timed.
"""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, MANY_SCORES, Row
from attn_compiler.spec.dtypes import HALF


def _row(order: tuple[str, ...], why: str, *, file: str = "learned_bias_h200.csv", **fields: Any) -> Row:
    shared = {"parts": frozenset({"bias"}), "head_dims": (1, 64)}
    return Row(
        sms=(90, 90),
        dtypes=HALF,
        dropout=False,
        order=order,
        since="2026-11-28",
        why=f"{why} (us, {file})",
        **{**shared, **fields},
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
        ("triton", "cudnn", *CUDNN_FIRST),
        "forward and backward with the gradient of Swin's table, heads of 32: 8 x 256, 3 heads: Triton 271, cuDNN 320; 32 x 256, 6 heads: "
        "456, 485",
        file="sites_h200.csv",
        learned=True,
        head_dims=(1, 32),
        seqlens=(192, 1100),
    ),
    _row(
        ("triton", "hopper", *CUDNN_FIRST),
        "forward and backward with the gradient of Swin's table, windows of 144 tokens, heads of 32: 64 windows, 12 heads: Triton 493, "
        "Hopper's 527, memory-efficient 1065; 8 windows, 6 heads: 179, 189, 440",
        file="sites_h200.csv",
        learned=True,
        seqlens=(128, 191),
    ),
    _row(
        ("cudnn", "triton", *CUDNN_FIRST),
        "forward and backward with the bias' gradient, 16 x 577, 16 heads of 64: cuDNN 3196, Triton 3368, Inductor 3736; 32 x 1025, 12 "
        "heads: 7938, 8397, 9471; 64 x 257, 16 heads: 1803, 1896, 2316; 128 x 197, 12 heads: 1761, 1877, 1734; 256 x 196, 4 heads of 32: "
        "1383, 1258, 1504",
        learned=True,
        seqlens=(192, 1100),
    ),
    _row(
        ("triton", *CUDNN_FIRST),
        "forward and backward with the bias' gradient, 32 windows of 64 tokens, 24 heads of 32: Triton 155, memory-efficient 340, "
        "Inductor 314. But 512 windows of 49 tokens, 3 heads: 342, 142, 249",
        file="sites_h200.csv",
        learned=True,
        seqlens=(64, 127),
    ),
    _row(
        ("triton", *CUDNN_FIRST),
        "forward and backward with the gradient of T5's table, 1 x 257, 20 heads of 64: Triton 183, memory-efficient 290664, "
        "Inductor 81359, where all pairs of a bucket are added up one after the other; 8 x 128, 25 heads of 128: 124, 46524, 38529",
        file="sites_h200.csv",
        parts=frozenset({"distances"}),
        training=True,
        head_dims=(1, 256),
        most_scores=MANY_SCORES - 1,
    ),
    _row(
        ("triton", *CUDNN_FIRST),
        "forward and backward with a padding mask, 32 x 84 tokens, 8 heads of 160: Triton 32, Hopper's 38, memory-efficient 73, Inductor "
        "31",
        file="sites_h200.csv",
        parts=None,
        tensor=True,
        training=True,
        head_dims=(129, 256),
        most_scores=MANY_SCORES - 1,
    ),
)
