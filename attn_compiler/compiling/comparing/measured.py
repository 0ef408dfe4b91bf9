"""What a comparison says, as data. comparison.py makes text and JSON of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_compiler.compiling.comparing.sides import Side
from attn_compiler.reporting.doctor import Fact
from attn_compiler.reporting.report import Reports


@dataclass(frozen=True, kw_only=True)
class Measured:
    """This backend beside Inductor's own and the uncompiled model.

    model: its class, or the name of a function. inputs: each by name, with dtype and shape. training: whether a step was forward, loss and
    backward. modes: whether the model's modules were in train() or in eval(). settings: of torch.compile, each option as Python writes it.
    facts: about the machine, as `doctor` has them. sides: "eager", "inductor", "attn_compiler". drew_random_numbers: dropout, say;
    differences then tell nothing. reports: of what was compiled by this backend.
    """

    model: str
    inputs: tuple[str, ...]
    training: bool
    modes: str
    settings: Mapping[str, Any]
    facts: tuple[Fact, ...]
    sides: tuple[Side, ...]
    drew_random_numbers: bool
    reports: Reports

    @property
    def gain(self) -> float | None:
        """How many times as fast as Inductor this backend is, the median of the rounds' own; None where one of the two failed."""
        return self.side("attn_compiler").ratio

    def side(self, name: str) -> Side:
        """Of "eager", "inductor" or "attn_compiler"."""
        return next(side for side in self.sides if side.name == name)
