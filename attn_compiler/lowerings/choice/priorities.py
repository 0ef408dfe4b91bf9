"""Order of lowerings by machine and shape: dated data, each row with its evidence. `order` reads it.

Rows by classes of shapes come from priorities_sm90.csv, which `python -m benchmarks.select_rows` makes from the measured times of
benchmarks/results/select_h200.csv and select_hopper_h200.csv: nobody writes in it. All others are written by hand in priorities.toml.

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
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from attn_compiler.lowerings.base import OF_LATENT
from attn_compiler.lowerings.choice import rows, shape_class
from attn_compiler.lowerings.choice.rows import PREFERRED_CUDNN, Row
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

LAST = "untouched"

_FP8_FIRST = ("hopper_fp8", "cudnn_fp8")


#: Lowerings that return a logsumexp. They come after those of a measured order, and before `untouched`, which writes all scores to memory.
_WITH_LSE = ("decode", "hopper", "triton", "math")

_BY_HAND = Path(__file__).with_name("priorities.toml")
MEASURED = Path(__file__).with_name("priorities_sm90.csv")
#: columns of MEASURED, in its order
COLUMNS = tuple(
    "mask band head_dim_from head_dim_to seqlen_from seqlen_to elements_from training grouped order since times cases".split()
)


def _measured(line: Mapping[str, str]) -> Row:
    """Return a row of MEASURED. Conditions without a column: half precision, no dropout, and the cuDNN that PyTorch prefers too, or a newer
    one."""
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


def _rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows of priorities.toml with the names of their groups. An entry that names MEASURED stands for the rows of that file."""
    with _BY_HAND.open("rb") as file, MEASURED.open(newline="") as measured:
        for group, entries in tomllib.load(file).items():
            for entry in entries:
                found = map(_measured, csv.DictReader(measured)) if "file" in entry else rows.read(entry, Row)
                yield from ((group, row) for row in found)


_GROUPED = tuple(_rows())
#: The first row that fits counts.
ROWS: tuple[Row, ...] = tuple(row for _, row in _GROUPED)


def group(name: str) -> tuple[Row, ...]:
    """Return the rows of one group of priorities.toml."""
    return tuple(row for of, row in _GROUPED if of == name)


def row_of(spec: AttentionSpec, target: Target) -> Row | None:
    """Return the row that decides; None for a machine that no row knows."""
    return next((row for row in ROWS if row.fits(spec, target)), None)


def order(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Return names of lowerings in the order to ask them; "untouched" is always the last. "reference" is never among them."""
    row = row_of(spec, target)
    fp8 = _FP8_FIRST if spec.fp8 is not None else ()
    measured = row.order if row is not None else ()
    giving = () if spec.lse == "unread" else tuple(name for name in _WITH_LSE if name not in measured)
    return (*fp8, *_of_latent(spec, target), *measured, *giving, LAST)


def _of_latent(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Return the lowerings that come first for a latent: they read a few bytes of each key, where others need k and v made
    (docs/decode_kernels.md)."""
    if spec.latent is None:
        # One of them is enough to report the reason.
        return OF_LATENT[-1:] if spec.no_latent is not None else ()
    return OF_LATENT if target.device == "cuda" else OF_LATENT[-1:]
