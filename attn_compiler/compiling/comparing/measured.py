"""The result of a comparison as data. comparison.py makes text and JSON of it."""

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

    model: its class, or the name of a function. inputs: each by name, with dtype and shape. training: a step was forward, loss and
    backward. modes: train() or eval() of the model's modules. settings: of torch.compile, each option as Python writes it. facts: about the
    machine, as `doctor` has them. sides: "eager", "inductor", "attn_compiler". drew_random_numbers: by dropout, for example; differences
    then mean nothing. reports: one for each graph compiled by this backend. sentences: how many a step embeds, 0 for another model.
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
    sentences: int = 0

    @property
    def gain(self) -> float | None:
        """The speed-up over Inductor, the median of the rounds' own; None if one of the two failed."""
        return self.side("attn_compiler").ratio

    def side(self, name: str) -> Side:
        """Return the side named "eager", "inductor" or "attn_compiler"."""
        return next(side for side in self.sides if side.name == name)
