"""Which lowering is asked first, by architecture: dated data, each row with what it rests on. `order` reads it.

Times are of 2026-11-21 on one H200 with torch 2.11 and cuDNN 9.19, bf16, causal, in microseconds: forward / backward.

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

from dataclasses import dataclass

from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

LAST = "untouched"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The order on one kind of machine. sms: architectures from .. to, both included; None: no GPU. cudnn: at least this
    version. since: the date of the evidence. why: the evidence."""

    sms: tuple[int, int] | None
    cudnn: int = 0
    order: tuple[str, ...]
    since: str
    why: str


# PyTorch puts cuDNN first from 9.15.1 on (check_prefer_cudnn_attention in sdp_utils.cpp: "> 91500").
_PREFERRED_CUDNN = 91_501
_FLASH_FIRST = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
_CUDNN_FIRST = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")

# The first row that fits counts.
ROWS: tuple[Row, ...] = (
    Row(
        sms=None,
        order=("sdpa_cpu_flash",),
        since="2026-11-21",
        why="the only fused kernel that PyTorch has there",
    ),
    Row(
        sms=(90, 90),
        cudnn=_PREFERRED_CUDNN,
        order=_CUDNN_FIRST,
        since="2026-11-21",
        why="measured on an H200 (table above): cuDNN is first in every shape, forward, backward and decode; PyTorch's order",
    ),
    Row(
        sms=(100, 109),
        cudnn=_PREFERRED_CUDNN,
        order=_CUDNN_FIRST,
        since="2026-11-21",
        why="PyTorch's own order (sdp_utils.cpp, torch 2.11 to 2.15); not measured here",
    ),
    Row(
        sms=(80, 121),
        order=_FLASH_FIRST,
        since="2026-11-21",
        why=(
            "PyTorch's own order for sm80, sm86, sm89, sm120 and for older cuDNN, where sequence lengths off multiples of 128 "
            "went wrong (https://github.com/pytorch/pytorch/issues/169849); it never comes to cuDNN there unless the others "
            "are switched off; not measured here"
        ),
    ),
    Row(
        sms=(50, 79),
        order=("sdpa_efficient",),
        since="2026-11-21",
        why="the only fused kernel that PyTorch has there; not measured here",
    ),
)


def row_of(target: Target) -> Row | None:
    """The row for a machine; None for one that no row knows."""
    return next((row for row in ROWS if _fits(row, target)), None)


def order(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Names of lowerings in the order to ask them; "untouched" is always the last. "reference" is never among them.

    spec: rows may come to tell shapes apart; those of today do not.
    """
    row = row_of(target)
    return (*(row.order if row is not None else ()), LAST)


def _fits(row: Row, target: Target) -> bool:
    if row.sms is None or target.device != "cuda":
        return row.sms is None and target.device == "cpu"
    first, last = row.sms
    return first <= target.sm <= last and target.cudnn >= row.cudnn
