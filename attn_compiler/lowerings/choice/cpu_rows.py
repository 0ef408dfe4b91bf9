"""Which lowering is asked first on a CPU: dated data, each row with what it rests on. priorities.py has the other machines.

One thread of an AMD EPYC (AVX-512 with BF16), torch 2.13 with Inductor, 2026-11-21; microseconds, best of many, of
the model's own decomposed attention / "math" / "sdpa_cpu_flash". e: a padded batch, all heads their own; c: causal, GQA 4. "math" is
left out for bfloat16: it was measured with products in half precision, which overflow; what it does since is the float32 column's.

                        float32                       bfloat16
    e 32x12, S 24       1510 / 1261 / 1333            1234 / 1801
    e 4x12, S 128       9285 / 9695 / 3905            2383 / 3715
    c 2x8, S 128        978 / 910 / 964               553 / 1136
    c 1x8, S 512        20060 / 17983 / 11522         3413 / 11547
    c 1x4, S 1024       40837 / 41958 / 17756         7051 / 14536
    c 1x2, S 2048       108138 / 123916 / 36315       85911 / 32689
    decode, 512 keys    57 / 69 / 74                  71 / 426
    decode, 2048 keys   2223 / 2800 / 2439            1693 / 36587
    with the backward:
    e 32x12, S 24       4366 / 3480 / 5149            3570 / 22912
    c 2x8, S 128        2995 / 2714 / 3716            1621 / 5522
    c 1x8, S 256        6533 / 10579 / 9843           3445 / 10238
    c 1x8, S 512        23487 / 25266 / 23364         11335 / 20196
    c 1x4, S 1024       108150 / 96852 / 69964        134193 / 69806

Half precision on one thread of an AMD EPYC without AVX-512, 2026-11-22, a machine that others used, too. The process's own time, medians,
head dim 64 (e: 32; f: 128, no mask), of "math" in float32 / "sdpa_cpu_flash" ("math" with products in bfloat16: 2.5 to 26 times as long):

                        bfloat16            with the backward         float16
    e 32x12, S 24       3022 / 2144         5577 / 12433
    e 4x12, S 128       8452 / 3110         14403 / 31442
    c 2x8, S 128        1565 / 1481         4866 / 19597              1527 / 3619
    c 1x8, S 256        3027 / 2410         8309 / 42523
    c 1x8, S 512        11863 / 9406        37013 / 170632            13182 / 19299
    f 1x8, S 512        22161 / 18616       49503 / 568268
    c 1x4, S 1024       23484 / 12998       74557 / 238291            25864 / 19707
    c 1x2, S 2048       65895 / 21398
    decode, 512 keys    184 / 700
    decode, 2048 keys   770 / 2416                                    366 / 3769
    the same, 8 at once 4851 / 20481
"""

from __future__ import annotations

from attn_compiler.lowerings.choice.rows import Row
from attn_compiler.lowerings.choice.shape_class import Mask
from attn_compiler.spec.dtypes import HALF

#: masks of which a batch row, or a query, sees a part of the keys, in one piece or in a few
_IN_PIECES: tuple[Mask, ...] = ("padding", "lengths", "tensor", "window")

#: attention by rows, where it was measured to be faster than a mask as a tensor
_BY_ROWS: tuple[Row, ...] = (
    *(
        Row(
            sms=None,
            dtypes=("float32",),
            mask=mask,
            seqlens=(512, None),
            order=("rows", "sdpa_cpu_flash"),
            since="2026-11-23",
            why=(
                "rows_cpu.csv, ms by rows and with a dense mask, forward / with the backward: padding 8 x 12 x 512 62.7 and 88.7 / "
                "238 and 341; causal and padded 4 x 8 x 1024 65.6 and 138 / 246 and 471; window of 64 of 2048 21 and 142 / 69 and 466; "
                "16 documents of 128 16 and 210 / 54 and 683. At 128 keys alike; below slower: each piece is a call (32 x 12 x 59: 11.0 "
                "and 7.7)"
            ),
        )
        for mask in _IN_PIECES
    ),
    *(
        Row(
            sms=None,
            dtypes=HALF,
            decomposed=False,
            mask=mask,
            seqlens=(1024, None),
            order=("rows", "sdpa_cpu_flash", "math"),
            since="2026-11-23",
            why=(
                "rows_cpu.csv, bfloat16, causal and padded 4 x 8 x 1024: 66 and 132 ms / 199 and 373; fewer keys were not held against "
                "math"
            ),
        )
        for mask in _IN_PIECES
    ),
    *(
        Row(
            sms=None,
            dtypes=("float32",),
            decomposed=False,
            training=False,
            one_query=True,
            least_scores=2048,
            mask=mask,
            order=("rows", "sdpa_cpu_flash"),
            since="2026-11-23",
            why="rows_cpu.csv, a cache of 2048 a quarter full, 8 x 32 heads of 128: 15.5 and 75.5 ms",
        )
        for mask in _IN_PIECES[:2]
    ),
)

#: The first row that fits counts.
CPU_ROWS: tuple[Row, ...] = (
    *_BY_ROWS,
    Row(
        sms=None,
        dtypes=HALF,
        decomposed=False,
        training=False,
        one_query=True,
        most_scores=1024 * 1024,
        order=("math", "sdpa_cpu_flash"),
        since="2026-11-22",
        why="math is 3 to 10 times faster than CPU flash, which SDPA would pick",
    ),
    Row(
        sms=None,
        dtypes=HALF,
        decomposed=False,
        training=False,
        most_scores=1024 * 1024,
        order=("sdpa_cpu_flash", "math"),
        since="2026-11-22",
        why=(
            "CPU flash, which SDPA would pick, is up to 3.1 times as fast as math without AVX-512, with it from S 512 on; products in half "
            "precision, which AVX-512 made faster, overflow. math serves what flash does not take"
        ),
    ),
    Row(
        sms=None,
        dtypes=HALF,
        decomposed=False,
        training=True,
        most_scores=512 * 512,
        order=("math", "sdpa_cpu_flash"),
        since="2026-11-22",
        why=(
            "forward and backward: math is 2.2 to 11 times faster than CPU flash, which SDPA would pick, without AVX-512; with it, by the "
            "times of float32, 2.0 to 6.6 times up to S 128, 1.0 at S 256, 0.8 at S 512"
        ),
    ),
    Row(
        sms=None,
        dtypes=HALF,
        decomposed=True,
        training=True,
        least_scores=1024 * 1024,
        order=("sdpa_cpu_flash",),
        since="2026-11-21",
        why="S 1024 with the backward: 1.9 times faster than the model's own; up to S 512 slower",
    ),
    Row(
        sms=None,
        dtypes=HALF,
        decomposed=True,
        training=False,
        least_scores=2048 * 2048,
        order=("sdpa_cpu_flash",),
        since="2026-11-21",
        why="S 2048: 2.6 times faster than the model's own; up to S 1024 slower",
    ),
    Row(
        sms=None,
        dtypes=HALF,
        decomposed=True,
        order=(),
        since="2026-11-21",
        why="CPU flash is 1.1 to 20 times slower than Inductor's own products and softmax, and lengths may be unknown",
    ),
    Row(
        sms=None,
        decomposed=True,
        training=True,
        most_scores=256 * 256,
        order=(),
        since="2026-11-21",
        why="float32 with the backward: CPU flash is up to 1.5 times slower up to S 256",
    ),
    Row(
        sms=None,
        decomposed=True,
        one_query=True,
        order=(),
        since="2026-11-21",
        why="float32 decode: CPU flash is 1.1 to 1.3 times slower than Inductor's own products and softmax",
    ),
    Row(
        sms=None,
        order=("sdpa_cpu_flash",),
        since="2026-11-21",
        why="float32: from 1.0 times at S 24 to 3 times faster at S 2048; what SDPA picks",
    ),
)
