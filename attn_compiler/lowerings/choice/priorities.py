"""Which lowering is asked first, by machine and shape: dated data, each row with what it rests on. `order` reads it.

The CPU's rows are in cpu_rows.py, those of GPUs that were not measured in unmeasured_rows.py, those of head dims above 256 in
wide_rows.py, those of little work in short_rows.py. Rows by classes of shapes come from priorities_sm90.csv, which
`python -m benchmarks.select_rows` makes from the measured times of benchmarks/results/select_h200.csv and select_hopper_h200.csv: nobody
writes in it. Those below are for what was not measured so.

GPU: one H200, torch 2.11, cuDNN 9.19, 2026-11-21; bf16, causal, microseconds, forward / backward.

    B, H, S, D          cuDNN         flash         memory-efficient
    8, 32, 2048, 64     349 / 1050    525 / 1550    1165 / 3568
    8, 16, 2048, 128    269 / 831     482 / 1395    980 / 2967
    8, 8, 2048, 256     255 / 1072    523 / 1642    1041 / 9081
    1, 32, 16384, 64    2406          3718
    1, 16, 16384, 128   1846          3547
    decode, 16 sequences, 32/8 heads of 128, 4096 keys: 76 cuDNN, 83 flash; with a mask tensor 85 cuDNN with GQA,
    1340 cuDNN and 1575 memory-efficient with K/V repeated.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from attn_compiler.lowerings.base import OF_LATENT
from attn_compiler.lowerings.choice import hopper_added, shape_class
from attn_compiler.lowerings.choice.bias_rows import BIAS_ROWS
from attn_compiler.lowerings.choice.cpu_rows import CPU_ROWS
from attn_compiler.lowerings.choice.dropout_rows import DROPOUT_ROWS
from attn_compiler.lowerings.choice.rows import (
    CUDNN_FIRST,
    FLASH_FIRST,
    MANY_SCORES,
    MOST_QUERIES,
    PREFERRED_CUDNN,
    Row,
)
from attn_compiler.lowerings.choice.short_rows import SHORT_ROWS
from attn_compiler.lowerings.choice.unmeasured_rows import UNMEASURED_ROWS
from attn_compiler.lowerings.choice.wide_rows import WIDE_ROWS
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

LAST = "untouched"

_FP8_FIRST = ("hopper_fp8", "triton_fp8", "cudnn_fp8")


#: Lowerings that give a logsumexp. They come after those of a measured order, and before `untouched`, which writes all scores to memory.
_WITH_LSE = ("decode", "hopper", "triton", "math")

MEASURED = Path(__file__).with_name("priorities_sm90.csv")
#: columns of MEASURED, in its order
COLUMNS = tuple(
    "mask band head_dim_from head_dim_to seqlen_from seqlen_to elements_from training grouped order since times cases".split()
)


def _measured(line: Mapping[str, str]) -> Row:
    """A row of MEASURED. What is not said there: half precision, no dropout, and the cuDNN that PyTorch prefers too, or a newer one."""
    return Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        dropout=False,
        training=_YES_NO[line["training"]],
        mask=_MASKS[line["mask"]],
        band=_BANDS[line["band"]],
        grouped=_YES_NO[line["grouped"]],
        head_dims=(int(line["head_dim_from"]), int(line["head_dim_to"])),
        seqlens=(int(line["seqlen_from"]), int(line["seqlen_to"]) if line["seqlen_to"] else None),
        least_elements=int(line["elements_from"]) if line["elements_from"] else None,
        order=tuple(line["order"].split()),
        since=line["since"],
        why=f"times the fastest: {line['times']} ({line['cases']})",
        times={name: float(mean) for name, mean in (one.split() for one in line["times"].split(", "))},
    )


_YES_NO = {"yes": True, "no": False, "": None}
_MASKS: Mapping[str, shape_class.Mask] = {mask: mask for mask in shape_class.MASKS}
_BANDS: Mapping[str, shape_class.Band | None] = {"": None} | {band: band for band in shape_class.BANDS}


def _read() -> tuple[Row, ...]:
    with MEASURED.open(newline="") as file:
        return tuple(map(_measured, csv.DictReader(file)))


# The first row that fits counts.
ROWS: tuple[Row, ...] = (
    *CPU_ROWS,
    *WIDE_ROWS,
    *SHORT_ROWS,
    # The measured rows of padding are of all keys, or of a diagonal.
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        dropout=False,
        mask="padding",
        band="window",
        seqlens=(512, None),
        order=("triton", "hopper", *CUDNN_FIRST),
        since="2026-11-23",
        why=(
            "Mistral, 4 layers, D 128, padded prefill of 4096 with a window of 1024 (h200.csv): attention 1.24 ms with Hopper's own "
            "kernel, 1.14 with Triton's, whose smaller tiles have fewer pairs beside the window"
        ),
    ),
    *_read(),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        dropout=False,
        mask="padding",
        head_dims=(1, 64),
        seqlens=(17, 1300),
        order=("triton", *CUDNN_FIRST),
        since="2026-11-28",
        why=(
            "short_masks_h200.csv, 12 heads of 64, S 64 to 384, batch 1 to 64, us of cuDNN with a dense mask and ours: 28.4 and 11.9 at "
            "64 x 64, 70.7 and 64.6 at 64 x 256, causal 166.5 and 89.0 at 64 x 384; with the gradients 284.8 and 244.7, causal 575.9 and "
            "349.4; alike at 16 x 256 and 64 x 128 keys. sites_h200.csv: 32 x 594 x 186 keys, 12 heads, 63 and 89; 32 x 1024 x 257, 10 "
            "heads: 119 and 295; 1 x 1024, 9/3 heads, causal: 25 and 28. But 1 x 512, 14/2 heads, causal: 20 and 16"
        ),
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        dropout=False,
        mask="padding",
        band="causal",
        head_dims=(97, 128),
        seqlens=(64, 511),
        order=("triton", *CUDNN_FIRST),
        since="2026-11-23",
        why="short_masks_h200.csv, 16 heads of 128, S 64 to 384: cuDNN with a dense mask takes 1.1 to 1.6 times as long",
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        dropout=False,
        training=True,
        mask="padding",
        band="full",
        head_dims=(97, 128),
        seqlens=(256, 511),
        order=("triton", *CUDNN_FIRST),
        since="2026-11-23",
        why=(
            "short_masks_h200.csv, 16 heads of 128, S 256 and 384 with the gradients: cuDNN with a dense mask takes 1.04 to 1.26 times as "
            "long; forward alone 0.86 to 1.12"
        ),
    ),
    Row(
        sms=(80, LAST_SM),
        decomposed=True,
        upcast=True,
        one_query=False,
        order=(),
        since="2026-11-23",
        why=(
            "the model casts q and k to float32 and its weights back: Inductor's product with v stays in half precision, where "
            "PyTorch's float32 kernels take two products in float32 and five in the backward. H200, training step of GPT-J, D 256, "
            "S 6144: 135 ms, with memory-efficient 285; GPT-Neo, D 128: 70 and 137 (upcasts_h200.csv). A prefill was timed once, "
            "without a row: GPT-J 100 and 155"
        ),
    ),
    Row(
        sms=(89, LAST_SM),
        dtypes=HALF,
        training=False,
        most_queries=MOST_QUERIES,
        stored=True,
        order=("decode", *FLASH_FIRST),
        since="2026-11-21",
        why="ours alone reads FP8; for the others the whole cache is made the model's dtype first, which moves 5 bytes for each of its own",
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        training=False,
        most_queries=MOST_QUERIES,
        tensor=True,
        order=("decode", *CUDNN_FIRST),
        since="2026-11-21",
        why=(
            "8 layers of Llama and Qwen3, 16 sequences, a static cache of 4096: a step 6.04 to 1.58 and 5.99 to 1.52 ms half full, 6.04 to "
            "1.80 at 4000 tokens, 6.04 to 1.35 at 64; one sequence 1.63 and 1.64 to 1.29. PyTorch's kernels repeat K/V and read every slot"
        ),
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        training=False,
        one_query=True,
        tensor=False,
        head_dims=(129, 256),
        order=("decode", *CUDNN_FIRST),
        since="2026-11-28",
        why=(
            "sites_h200.csv, one query, us of cuDNN and ours: 8 x 149 keys, 8 heads of 160: 11.7, 6.0; 8 x 151, 8/1 heads of 256: 11.0, "
            "6.7; 16 x 2886, 8/1 heads of 256: 32, 18; 32 x 1453, 8/1 heads: 29, 19"
        ),
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        training=False,
        most_queries=MOST_QUERIES,
        order=(*CUDNN_FIRST, "decode"),
        since="2026-11-21",
        why=(
            "decode_h200.csv: caches not in L2, cuDNN 74 and ours 65 us for 16 x 4096, 11.0 and 8.8 for 1 x 4096; in L2 64.0 and 63.3, "
            "8.9 and 6.9, but 81.5 and 83.8 for 20 sequences, which share the machine unevenly. As a step of a model without a mask was "
            "not measured, PyTorch's order stays. Ours serves softcap and sinks"
        ),
    ),
    Row(
        sms=(80, LAST_SM),
        dtypes=HALF,
        training=False,
        most_queries=MOST_QUERIES,
        tensor=True,
        order=("decode", *FLASH_FIRST),
        since="2026-11-21",
        why="of PyTorch's kernels those that take a mask repeat K/V and read every slot of a cache; not measured here",
    ),
    Row(
        sms=(80, 99),
        dtypes=HALF,
        training=False,
        most_queries=MOST_QUERIES,
        order=(*FLASH_FIRST, "decode"),
        since="2026-11-21",
        why="as the rows for more queries; ours is last, for softcap and sinks; not measured here",
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        mask="sinks",
        dropout=False,
        seqlens=(1024, None),
        order=("cudnn", "hopper", "triton", "fa4"),
        since="2026-11-23",
        why=(
            "head dims above 64, of which windows alone were measured (cudnn_h200.csv: window 1024, S 8192: cuDNN 146 and ours 180 us at "
            "head dim 128, 137 and 198 at 256; with the gradients 586, 1158; 688, 1164). flash-attn-4 with sinks was measured at 64 alone. "
            "Hopper's kernel was timed once without a window, D 128, S 8192, without a row: 824 us, as without sinks"
        ),
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        dtypes=HALF,
        mask="lengths",
        dropout=False,
        seqlens=(1024, None),
        order=("cudnn", "hopper", "triton", *CUDNN_FIRST),
        since="2026-11-21",
        why=(
            "head dims 96 and 256, as at 128 and 64 (select_h200.csv, S 2048, forward and backward: cuDNN by lengths 409 and 1156 us, ours "
            "492 and 1544, cuDNN with a dense mask 828 and 2564; 552 and 1468, 632 and 1528, 1101 and 2598)"
        ),
    ),
    *BIAS_ROWS,
    Row(
        sms=(90, 90),
        dtypes=HALF,
        parts=hopper_added.PARTS,
        dropout=False,
        one_query=False,
        least_scores=MANY_SCORES,
        order=("hopper", "triton", *CUDNN_FIRST),
        since="2026-11-25",
        why=(
            "Hopper's own kernel serves biases and dense masks where it was measured to be faster than Triton's "
            "(hopper_added_sm90.csv), and no others. Triton's before PyTorch's, S 2048, against the memory-efficient kernel "
            "(kernels_h200.csv): a learned bias 3.6 times at D 64 and 3.0 at 128, a table by distance 3.4 and 2.7"
        ),
    ),
    Row(
        sms=(90, 90),
        dtypes=HALF,
        tensor=True,
        dropout=False,
        one_query=False,
        head_dims=(65, 256),
        least_scores=MANY_SCORES,
        order=("hopper", "triton", *CUDNN_FIRST),
        since="2026-11-23",
        why=(
            "as the row below. Documents, S 8192, D 128: Hopper's own kernel takes 203 us and Triton's 257; ALiBi, S 2048: 278 and 367 "
            "(hopper_kernels_h200.csv). The Triton kernels take what Hopper's does not"
        ),
    ),
    Row(
        sms=(90, 90),
        dtypes=HALF,
        mask="tensor",
        dropout=False,
        one_query=False,
        head_dims=(1, 64),
        seqlens=(2048, None),
        order=("hopper", "triton", *CUDNN_FIRST),
        since="2026-11-23",
        why=(
            "documents, S 8192, D 64: 286 us and 344 with Triton's (hopper_kernels_h200.csv). The Triton kernels take dense masks, "
            "which Hopper's does not"
        ),
    ),
    *DROPOUT_ROWS,
    Row(
        sms=(90, 90),
        dtypes=HALF,
        tensor=True,
        dropout=False,
        one_query=False,
        least_scores=MANY_SCORES,
        order=("triton", *CUDNN_FIRST),
        since="2026-11-22",
        why=(
            "padded prefill of 4 x 4096, S 1024 to 4096: attention of Llama 18.4 to 4.8 ms, Gemma 2 9.9 to 1.4, Bloom 3.4 to 0.5, "
            "of Llama's padded training 29.3 to 11.6: cuDNN computes the whole square with a tensor. S 512, against Inductor, with "
            "PyTorch's kernels and with ours: prefill BERT 1.00 and 1.06, T5 2.11 and 2.50; training BERT 1.02 and 1.04, eager 1.06 "
            "and 1.10, T5 with its learned table 1.21 and 1.64, eager 1.05 and 1.38"
        ),
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        one_query=False,
        least_scores=MANY_SCORES,
        order=(*CUDNN_FIRST, "hopper", "triton"),
        since="2026-11-21",
        why=(
            "causal, S 8192, D 128: cuDNN 604 TFLOP/s, Triton's 480. Last, ours serve what PyTorch's kernels don't take: softcap and "
            "sinks, 1.7 times (Gemma 2, eager) and 6.0 times (gpt-oss) Inductor's speed in a padded prefill of 4096"
        ),
    ),
    Row(
        sms=(90, 90),
        cudnn=PREFERRED_CUDNN,
        order=CUDNN_FIRST,
        since="2026-11-21",
        why="measured on an H200: of PyTorch's kernels cuDNN is first in every shape, forward, backward and decode; PyTorch's order",
    ),
    *UNMEASURED_ROWS,
)


def row_of(spec: AttentionSpec, target: Target) -> Row | None:
    """The row that decides; None for a machine that no row knows."""
    return next((row for row in ROWS if row.fits(spec, target)), None)


def order(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Names of lowerings in the order to ask them; "untouched" is always the last. "reference" is never among them."""
    row = row_of(spec, target)
    fp8 = _FP8_FIRST if spec.fp8 is not None else ()
    measured = row.order if row is not None else ()
    giving = () if spec.lse == "unread" else tuple(name for name in _WITH_LSE if name not in measured)
    return (*fp8, *_of_latent(spec, target), *measured, *giving, LAST)


def _of_latent(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Before all others: they read a few bytes of each key where others have k and v made of it first (mla.md has the figures)."""
    if spec.latent is None:
        # The reason is the same for all of them.
        return OF_LATENT[-1:] if spec.no_latent is not None else ()
    return OF_LATENT if target.device == "cuda" else OF_LATENT[-1:]
