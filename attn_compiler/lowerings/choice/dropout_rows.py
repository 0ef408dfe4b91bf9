"""Which lowering is asked first on sm90 where a mask stands beside dropout: by select_dropout.csv.

cuDNN drops weights at multiples of 1/16 alone. At other probabilities it refuses, and the lowering behind it serves. The times of cuDNN
are those of PyTorch's own choice at p 0.1, which no other kernel of PyTorch has: its time does not depend on p.
"""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, MANY_SCORES, Row
from attn_compiler.lowerings.shared.parts.site_parts import ADDED
from attn_compiler.spec.dtypes import HALF


def _row(order: tuple[str, ...], why: str, **fields: Any) -> Row:
    return Row(
        sms=(90, 90),
        dtypes=HALF,
        tensor=True,
        dropout=True,
        one_query=False,
        least_scores=MANY_SCORES,
        order=order,
        since="2026-11-27",
        why=f"{why} (us, forward and backward, select_dropout.csv)",
        **fields,
    )


DROPOUT_ROWS: tuple[Row, ...] = (
    _row(
        ("triton", *CUDNN_FIRST),
        "a learned table, D 64, S 512: 2956 with Triton's kernels, 3282 with cuDNN's, 3690 with the memory-efficient ones",
        parts=ADDED,
    ),
    _row(
        ("sdpa_cudnn", "triton", "sdpa_efficient"),
        "padding without a diagonal, D 64, S 512: 1618 with cuDNN's kernels, 2974 with Triton's, 4068 with the memory-efficient ones; "
        "S 2048: 5480, 9856 and 15053; D 128, S 512: 1568, 1826 and 3417",
        band="full",
    ),
    _row(
        ("triton", *CUDNN_FIRST),
        "padding under a diagonal, D 128, S 2048: 3882 with Triton's kernels, 5350 with cuDNN's, 12613 with the memory-efficient ones; "
        "D 256: 4009, 6235 and 19454; D 64, S 1024: 3710, 2900 and 7721",
    ),
)
