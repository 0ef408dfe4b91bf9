"""What a page says of a code: data, and the kinds of example that it may have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from attn_compiler.reasons.codes import Code


class ExampleKind(Enum):
    """How an example is run.

    DECISION: an expression; `why_not(lowering, attention(...), Target.fake(...))` gives reasons, without a GPU.
    PROGRAM: Python that defines `model` and `inputs`, and `options` if it has any; `explain` is asked on a CPU.
    RAISES: Python that raises the error.
    TOLD: words; what it takes can't be had in one small program.
    """

    DECISION = "decision"
    PROGRAM = "program"
    RAISES = "raises"
    TOLD = "told"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What people read of one code.

    title: what happened, in a few words.
    cause: when it happens, and why it has to.
    remedy: what to do, or that there is nothing to do.
    kind: what `example` is.
    example: how the code is met.
    """

    code: Code
    title: str
    cause: str
    remedy: str
    kind: ExampleKind
    example: str
