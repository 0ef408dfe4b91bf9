"""Which lowering is asked first where nothing was measured: other GPUs than sm90. priorities.py has the rest.

Where a tensor joins the scores, rows go by the pairs that a kernel visits and the bytes that it reads for each
(tests/lowerings/choice/cost.py). Tests hold these rows against that model, and the model against what was measured on sm90. Elsewhere
PyTorch's own order stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_compiler.lowerings.choice.rows import CUDNN_FIRST, FLASH_FIRST, MANY_SCORES, PREFERRED_CUDNN, Row
from attn_compiler.lowerings.choice.shape_class import Mask
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.lowerings.shared.parts.site_parts import PartKind
from attn_compiler.spec.dtypes import HALF

_SINCE = "2026-11-27"
#: architectures, and PyTorch's order there
_MACHINES = (((80, 89), FLASH_FIRST), ((100, 109), CUDNN_FIRST), ((110, LAST_SM), FLASH_FIRST))
#: masks that cost a kernel of ours no byte for a pair, and no more work than a list of few tiles
_CHEAP: tuple[Mask, ...] = ("padding", "lengths", "window")
#: as on sm90 (short_masks_h200.csv)
_FEWEST = 64
_BY_COST = (
    "not measured here: by pairs and bytes. PyTorch's kernels take a mask as a number for each pair and head, and visit every "
    "pair; ours visits those that positions allow, and reads nothing for a pair of a mask that was proved"
)
_BY_NUMBERS = "not measured here: by pairs and bytes. Each kernel reads a number for each pair and head"


def _row(sms: tuple[int, int], why: str, **fields: Any) -> Row:
    """Of sites where a tensor joins the scores of several queries."""
    return Row(sms=sms, dtypes=HALF, tensor=True, one_query=False, since=_SINCE, measured=False, why=why, **fields)


def _with_a_tensor(sms: tuple[int, int], pytorchs: tuple[str, ...]) -> Iterator[Row]:
    order = ("triton", *pytorchs)
    why = f"{_BY_COST}. On sm90, where it was measured, so it is (priorities.py)"
    yield _row(sms, why, least_scores=MANY_SCORES, order=order)
    why = f"{_BY_COST}. On sm90 so it is from 64 queries and keys on (short_masks_h200.csv)"
    yield from (_row(sms, why, mask=mask, seqlens=(_FEWEST, None), order=order) for mask in _CHEAP)


def _with_a_number_for_each_pair() -> Iterator[Row]:
    """Where ours reads one, too, which is not always less."""
    for sms, pytorchs in _MACHINES:
        if pytorchs is FLASH_FIRST:
            why = f"{_BY_NUMBERS}. A backward of ours reads them twice, where PyTorch's reads them once"
            yield _row(
                sms,
                why,
                least_scores=MANY_SCORES,
                parts=frozenset({"bias"}),
                training=True,
                order=(*pytorchs, "triton"),
            )
            continue
        why = f"{_BY_NUMBERS}. cuDNN's products are the fastest, and its other kernels know no instructions of sm100"
        parts: frozenset[PartKind] = frozenset({"bias", "mask"})
        order = ("sdpa_cudnn", "triton", "sdpa_flash", "sdpa_efficient")
        yield _row(sms, why, cudnn=PREFERRED_CUDNN, least_scores=MANY_SCORES, parts=parts, order=order)
        # If a kernel that reads none leaves nothing out.
        for mask in _CHEAP[:2]:
            why = f"{_BY_COST}. With wide heads and without a diagonal cuDNN's products are so much faster that its mask costs less"
            yield _row(
                sms,
                why,
                cudnn=PREFERRED_CUDNN,
                least_scores=MANY_SCORES,
                mask=mask,
                band="full",
                head_dims=(129, 256),
                order=order,
            )


UNMEASURED_ROWS: tuple[Row, ...] = (
    *_with_a_number_for_each_pair(),
    *(row for sms, pytorchs in _MACHINES for row in _with_a_tensor(sms, pytorchs)),
    Row(
        sms=(100, 109),
        cudnn=PREFERRED_CUDNN,
        one_query=False,
        least_scores=MANY_SCORES,
        order=(*CUDNN_FIRST, "triton"),
        since=_SINCE,
        measured=False,
        why=(
            "PyTorch's own order (sdp_utils.cpp, torch 2.11 to 2.15); softcap and sinks are otherwise left to Inductor, which writes all "
            "scores to memory; not measured here"
        ),
    ),
    Row(
        sms=(100, 109),
        cudnn=PREFERRED_CUDNN,
        order=CUDNN_FIRST,
        since="2026-11-21",
        measured=False,
        why="PyTorch's own order (sdp_utils.cpp, torch 2.11 to 2.15); not measured here",
    ),
    Row(
        sms=(80, LAST_SM),
        one_query=False,
        least_scores=MANY_SCORES,
        order=(*FLASH_FIRST, "triton"),
        since="2026-11-21",
        measured=False,
        why="as below; softcap and sinks are otherwise left to Inductor, which writes all scores to memory; not measured here",
    ),
    Row(
        sms=(80, LAST_SM),
        order=FLASH_FIRST,
        since="2026-11-21",
        measured=False,
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
        measured=False,
        why="the only fused kernel that PyTorch has there; not measured here",
    ),
)
