"""Which lowering is asked first on sm90 for attention that leaves most of the GPU idle, and for head dims up to 32.

By sites_h200.csv, attentions that a seed drew (benchmarks/random_sites.py). `why` has microseconds of single sites: batch x length, heads,
head dim. These are the GPU's.

The host counts where a GPU has little to do. A call of ours takes it 3 us more than PyTorch's in a forward, and some 40 us more in a
training step (host_h200.csv). So rows want a million elements of q in a forward, and four million in a step.
Sites of less work in `why` show the same order on the GPU alone.
"""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, PREFERRED_CUDNN, Row
from attn_compiler.spec.dtypes import HALF

_TRITON = ("triton", *CUDNN_FIRST)
_MILLION = 1_000_000


def _row(order: tuple[str, ...], why: str, **fields: Any) -> Row:
    return Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        dropout=False,
        one_query=False,
        order=order,
        since="2026-11-28",
        why=f"{why} (us, sites_h200.csv)",
        **fields,
    )


_FULL_INFERENCE = (
    _row(
        ("triton", "hopper", *CUDNN_FIRST),
        "8 x 998, 12 heads of 32: Triton 58, Hopper's 73, cuDNN 73; 1 x 4262, 16 heads: 159, 169, 224; with the gradients 2 x 8192, 16 "
        "heads: 3254, 3893, 3992",
        mask="full",
        head_dims=(1, 32),
        seqlens=(17, None),
        least_elements=2 * _MILLION,
    ),
    _row(
        _TRITON,
        "1 x 64, 6 heads of 64: Triton 3.1, cuDNN 6.4; 256 x 64, 3 heads: 13, 21; 256 x 64, 16 heads of 80: 60, 99; 4 x 82, 16 heads of "
        "72: 7.9, 12.4",
        mask="full",
        training=False,
        head_dims=(33, 96),
        seqlens=(17, 128),
        least_elements=_MILLION,
    ),
    _row(
        _TRITON,
        "4 x 196, 24 heads of 64: Triton 10, cuDNN 12; 1 x 729, 24 heads: 19, 28; 4 x 935, 24 heads: 69, 76; 1 x 1025, 6 heads: 14, 22. "
        "But 1 x 577, 24 heads: 16, 15",
        mask="full",
        training=False,
        head_dims=(33, 64),
        seqlens=(17, 1100),
        least_elements=_MILLION,
        most_elements=6 * _MILLION,
    ),
    _row(
        _TRITON,
        "4 x 256, 8 heads of 80: Triton 7.7, cuDNN 22.5; 4 x 256, 16 heads of 72: 10, 13; 1 x 577, 16 heads of 80: 17, 17",
        mask="full",
        training=False,
        head_dims=(65, 96),
        seqlens=(17, 600),
        least_elements=_MILLION,
        most_elements=_MILLION * 3 // 2,
    ),
    _row(
        _TRITON,
        "4 x 256, 12 heads of 128: Triton 10.9, cuDNN 12.7; 1 x 22 x 77, 24 heads: 7.5, 8.2; 1 x 157 x 257, 8 heads of 160: 13, 19",
        mask="full",
        training=False,
        head_dims=(97, 256),
        seqlens=(17, 260),
        least_elements=_MILLION,
        most_elements=2 * _MILLION,
    ),
)

_FULL_TRAINING = (
    _row(
        _TRITON,
        "forward and backward, 16 x 257, 24 heads of 64: Triton 165, cuDNN 178; 64 x 130, 20 heads: 246, 272. But 16 x 322, 20 heads: 185, "
        "177",
        mask="full",
        training=True,
        head_dims=(33, 64),
        seqlens=(17, 560),
        least_elements=4 * _MILLION,
        most_elements=11 * _MILLION,
    ),
)

_CAUSAL_INFERENCE = (
    _row(
        _TRITON,
        "32 x 200, 14/2 heads of 64: Triton 29, cuDNN 30; 8 x 777, 14/2 heads: 43, 50",
        mask="causal",
        training=False,
        head_dims=(33, 64),
        seqlens=(17, 1000),
        least_elements=_MILLION,
        most_elements=8 * _MILLION,
    ),
    _row(
        _TRITON,
        "32 x 64, 32/8 heads of 128: Triton 24, cuDNN 35; 2 x 172, 8/1 heads of 256: 13, 20",
        mask="causal",
        training=False,
        head_dims=(97, 256),
        seqlens=(17, 200),
        least_elements=_MILLION,
    ),
    _row(
        ("hopper", *CUDNN_FIRST),
        "4 x 526, 24/8 heads of 128: Hopper's 32, cuDNN 42; 1 x 337, 64/8 heads: 18, 18; 2 x 861, 32 heads of 80: 35, 45",
        mask="causal",
        training=False,
        head_dims=(65, 128),
        seqlens=(290, 1023),
        least_elements=_MILLION,
        most_elements=8 * _MILLION,
    ),
)

_PADDING = (
    _row(
        ("triton", "hopper", *CUDNN_FIRST),
        "64 x 557, 16 heads of 32: Triton 189, Hopper's 251, cuDNN 845; 1 x 2001, 12 heads: 44, 62, 74; with the gradients 1 x 3288, 12 "
        "heads: 327, 404, 606; 1 x 7276, 16 heads: 1645, 1794, 2912",
        mask="padding",
        head_dims=(1, 32),
        seqlens=(17, None),
        least_elements=2 * _MILLION,
    ),
    _row(
        ("hopper", "triton", *CUDNN_FIRST),
        "causal, 1 x 3000, 14/2 heads of 64: Hopper's 67, Triton 85; 1 x 2048: 38, 46. Triton's is the faster one of more sequences",
        mask="padding",
        band="causal",
        training=False,
        grouped=True,
        head_dims=(33, 64),
        seqlens=(1536, 4095),
        most_elements=4 * _MILLION,
    ),
    _row(
        _TRITON,
        "causal, 1 x 105, 8/4 heads of 256: Triton 15, cuDNN 21; 2 x 200, 16/8 heads: 24, 24",
        mask="padding",
        band="causal",
        training=False,
        head_dims=(129, 256),
        seqlens=(17, 260),
    ),
)

_OTHERS = (
    _row(
        ("sdpa_cudnn", "hopper", "triton", "sdpa_flash", "sdpa_efficient"),
        "forward and backward, 8 x 2565 x 226 keys, 8 heads of 160, which cuDNN's kernel in PyTorch does not take: Hopper's 603, Triton "
        "612, flash 789",
        mask="full",
        training=True,
        head_dims=(129, 256),
        seqlens=(17, None),
    ),
    _row(
        CUDNN_FIRST,
        "causal and padded, 1 x 344, 32/8 heads of 128: cuDNN 21, Triton 28; with the gradients 1 x 332, 28/4 heads: 69, 110",
        mask="padding",
        band="causal",
        grouped=True,
        head_dims=(97, 128),
        seqlens=(300, 511),
        most_elements=_MILLION * 3 // 2,
    ),
    _row(
        ("triton", "hopper", *CUDNN_FIRST),
        "causal and padded, 8 x 512, 64/8 heads of 64: Triton 93, Hopper's 130, cuDNN 169",
        mask="padding",
        band="causal",
        training=False,
        grouped=True,
        head_dims=(33, 64),
        seqlens=(512, 1535),
    ),
    _row(
        ("fa4", "hopper", "cudnn", *CUDNN_FIRST),
        "1 x 4096, 32 heads of 80, window 1024: Hopper's 191, cuDNN's graph 263",
        mask="window",
        training=False,
        head_dims=(65, 96),
        seqlens=(1024, None),
    ),
    _row(
        ("fa4", "triton", "cudnn", "hopper", *CUDNN_FIRST),
        "4 x 1024, 14/2 heads of 64, window 256: Triton 24, cuDNN's graph 27; 1 x 4096: 23, 27; 4 x 7880, window 1024: 321, 361",
        mask="window",
        training=False,
        grouped=True,
        head_dims=(33, 64),
        seqlens=(1024, None),
    ),
    _row(
        CUDNN_FIRST,
        "documents, all pairs of each: 8 x 256, 16 heads of 64: cuDNN 23, Triton 39; 2 x 1266: 84, 99; with the gradients 8 x 512, 12 "
        "heads: 147, 216",
        mask="tensor",
        band="full",
        parts=frozenset({"documents"}),
        head_dims=(33, 64),
        seqlens=(17, 1400),
    ),
    _row(
        ("triton", "hopper", *CUDNN_FIRST),
        "with T5's table, 2 x 384, 12 heads of 64: Triton 13, cuDNN 22; 32 x 257, 8 heads of 32: 52, 102; 16 x 384, 16 heads of 64: 50, 63",
        parts=frozenset({"distances"}),
        training=False,
        head_dims=(1, 64),
        seqlens=(200, 511),
    ),
)

SHORT_ROWS: tuple[Row, ...] = (*_FULL_INFERENCE, *_FULL_TRAINING, *_CAUSAL_INFERENCE, *_PADDING, *_OTHERS)
