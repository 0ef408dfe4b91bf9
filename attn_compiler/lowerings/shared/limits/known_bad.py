"""Kernels with known bugs, by library version and architecture: data with links. Lowerings refuse them by name.

An entry describes the bug, and on which machines it occurs. The lowering's own check, which calls `refusal`, decides which sites it
affects. To add one: an entry here, its check where the lowering's limits are, a test of the refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.target import Target, cudnn_words

_ALL_SMS = (0, 999)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """One known bug.

    what: the wrong behaviour, and for which sites. rule: the condition that avoids it. link: its source.
    cudnn: the first bad version and the first good one (None: no good one is known); None: it is another library's bug. good: good
    versions in between. sms: the architectures, both included. remedy: for the user.
    """

    what: str
    rule: str
    link: str
    cudnn: tuple[int, int | None] | None = None
    good: tuple[int, ...] = ()
    sms: tuple[int, int] = _ALL_SMS
    remedy: str | None = "update cuDNN"

    def meets(self, target: Target) -> bool:
        """Return whether the machine has it."""
        if self.cudnn is None:
            return self.sms[0] <= target.sm <= self.sms[1]
        first, fixed = self.cudnn
        is_bad = first <= target.cudnn and (fixed is None or target.cudnn < fixed) and target.cudnn not in self.good
        return is_bad and self.sms[0] <= target.sm <= self.sms[1]


CUDNN: dict[str, Bug] = {
    "blacklisted": Bug(
        what="attention is wrong in 9.10.0 and 9.10.1",
        rule="a cuDNN other than 9.10.0 and 9.10.1",
        link="https://github.com/NVIDIA/cudnn-frontend/blob/v1.22.1/include/cudnn_frontend/node/sdpa_support_surface.h",
        cudnn=(91_000, 91_002),
    ),
    "nan_dq": Bug(
        what="the padded half of a last 128-wide tile is scored 0 instead of -inf: dQ is NaN where all real scores are far below 0",
        rule="with gradients and cuDNN before 9.26, no length is 64 modulo 128: dQ can be NaN",
        link="https://github.com/pytorch/pytorch/issues/196678",
        cudnn=(0, 92_600),
        sms=(90, 90),
        remedy="update cuDNN, or pad the keys to a multiple of 128",
    ),
    "one_query_gradient": Bug(
        what="dK and dV of a single query can be NaN; in 9.26 building the backward of one query and one key crashes",
        rule="with gradients, more than one query: its dK and dV can be NaN",
        link="https://github.com/NVIDIA/cudnn-frontend/issues/1072",
        cudnn=(0, None),
        remedy=None,
    ),
    "decode": Bug(
        what="one query on Blackwell",
        rule="a cuDNN that decodes right on this GPU: not 9.19.0 to 9.25.0 but for 9.24.1",
        link="https://github.com/pytorch/pytorch/issues/193893",
        cudnn=(91_900, 92_501),
        good=(92_401,),
        sms=(100, 119),
    ),
    "dropout": Bug(
        what="dropout in 9.11 to 9.13",
        rule="for dropout, a cuDNN outside of 9.11 to 9.13",
        link="https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
        cudnn=(91_101, 91_400),
    ),
    "keys_off_128": Bug(
        what="a number of keys off a multiple of 128 goes wrong, in the backward and under CUDA graphs",
        rule="cuDNN 9.15.1 or newer, or a multiple of 128 keys",
        link="https://github.com/pytorch/pytorch/issues/169849",
        cudnn=(0, 91_501),
    ),
    "window": Bug(
        what="9.14.0 computes a window without a diagonal wrong from 1025 keys on",
        rule="a cuDNN other than 9.14.0 for a window that is not causal",
        link="https://github.com/NVIDIA/cudnn-frontend/blob/v1.22.1/include/cudnn_frontend/node/sdpa_support_surface.h",
        cudnn=(91_400, 91_401),
    ),
    "fp8_hang": Bug(
        what="the FP8 forward hangs where a tile of queries has no valid key",
        rule="no tile of queries without a valid key in FP8",
        link="https://github.com/NVIDIA/cudnn-frontend/issues/1009",
        cudnn=(0, None),
        sms=(90, 90),
        remedy=None,
    ),
    "unaligned_strides": Bug(
        what="strides that are no multiples of 16 bytes: wrong numbers on sm90 and sm100, a fault on sm80",
        rule="strides are multiples of 16 bytes",
        link="https://github.com/NVIDIA/cudnn-frontend/issues/1571",
        cudnn=(0, None),
        remedy=None,
    ),
    "stats_strides": Bug(
        what="statistics in other strides than packed (B, H, S) are silently wrong",
        rule="lse is contiguous",
        link="https://github.com/NVIDIA/cudnn-frontend/issues/304",
        cudnn=(0, None),
        remedy=None,
    ),
}


#: bugs of every version that the family takes (fa4/limits.py)
FLASH_ATTN_4: dict[str, Bug] = {
    "padded_head_dim": Bug(
        what=(
            "head dims that are no multiples of 32 get a wrong dQ on Hopper: its kernel pads them to 16, what reads its sums to 32. On "
            "Blackwell the same was mended (https://github.com/Dao-AILab/flash-attention/pull/2698); from which beta on is not known"
        ),
        rule="with gradients, head dims are multiples of 32: dQ is wrong",
        link="https://github.com/Dao-AILab/flash-attention/pull/2896",
        sms=(90, 109),
        remedy="pad q, k and v with zeros to a multiple of 32",
    ),
}


def refusal(name: str, target: Target, observed: str) -> list[Reason]:
    """Return the refusal of an entry on a machine that has it; none elsewhere. observed: the site's own property that triggers it."""
    bug = CUDNN.get(name) or FLASH_ATTN_4[name]
    if not bug.meets(target):
        return []
    library = f"flash-attn-4 {target.flash_attn_4}" if bug.cudnn is None else f"cuDNN {cudnn_words(target.cudnn)}"
    observed = f"{library} on sm{target.sm}, {observed}"
    return refuse(Code.KNOWN_BUG, f"{bug.rule} ({bug.link})", observed, bug.remedy)
