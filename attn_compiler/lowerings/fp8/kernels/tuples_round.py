"""Named tuples of the kernels that round, or look for the largest magnitudes, as in shared/kernels/tuples.py. Imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class Numbers(NamedTuple):
    """Numbers of one tensor that is rounded."""

    stride_xb: Any  # of the tensor itself
    stride_xh: Any
    stride_xs: Any
    stride_yb: Any  # of what it is rounded to
    stride_yh: Any
    stride_ys: Any
    stride_rb: Any  # of what that stands for
    stride_rh: Any
    stride_rs: Any
    largest_b: Any  # of its largest magnitudes, and of its descales
    largest_h: Any
    heads: Any
    length: Any
    programs: Any  # 0 where there is no such tensor
    largest: Any  # the format's largest number
    fits: Any  # what the largest magnitude becomes
    known: Any  # that magnitude, where KNOWN


class LookNumbers(NamedTuple):
    """Numbers of one tensor whose largest magnitude is looked for."""

    stride_xb: Any
    stride_xh: Any
    stride_xs: Any
    kept_b: Any  # of where they are kept
    kept_h: Any
    heads: Any
    length: Any
    programs: Any


class Each(NamedTuple):
    """Compile-time switches of one tensor."""

    HEAD_DIM: Any
    WIDTH: Any  # HEAD_DIM up to a power of two
    ROTATED: Any  # it is multiplied by H / √D first, RUN blocks to a program
    OF_KEYS: Any  # only positions that somebody may see count
    TURNED: Any = False  # to (B, H, D, S')
    WHOLE: Any = False  # to int8


class Shared(NamedTuple):
    """Numbers of all tensors that are rounded."""

    newest_b: Any  # strides of where largest magnitudes are kept
    newest_h: Any
    newest1: Any  # where those of the second tensor begin, and of the third
    newest2: Any
    seen_b: Any  # from one batch row's positions to the next one's
    group: Any  # heads with a shift that share one of the mean's


class RoundSwitches(NamedTuple):
    """Compile-time switches of rounding."""

    BLOCK: Any  # positions of a block
    PART: Any  # positions at once
    MEAN_OF: Any  # which tensor loses the mean, or -1
    SHIFT_OF: Any  # which one's products with the mean are wanted, or -1
    KNOWN: Any  # the largest magnitude is
    RUN: Any  # blocks of a program, where there is a rotation


class LookSwitches(NamedTuple):
    """Compile-time switches of looking."""

    PARTS: Any  # of a program
    PART: Any
    MEAN_OF: Any


class RoundTensors(NamedTuple):
    """Tensors of one input, or of one of its heads; None where absent."""

    X: Any
    Mean: Any
    Seen: Any
    Shift: Any
    Largest: Any
    Newest: Any
    Rounded: Any
    Descale: Any
    Restored: Any
