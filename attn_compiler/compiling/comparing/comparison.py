"""The result of `compare`, as an object, as text, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attn_compiler.compiling.comparing.measured import Measured

if TYPE_CHECKING:
    from rich.console import RenderableType

JSON_VERSION = 1


class Comparison(Measured):
    """This backend beside Inductor's own and the uncompiled model: the fields of Measured. print() shows a table."""

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists. A "version" keeps all its keys, and may get more. An unknown value is null."""
        return {
            "version": JSON_VERSION,
            "model": self.model,
            "inputs": list(self.inputs),
            "training": self.training,
            "modes": self.modes,
            "settings": dict(self.settings),
            "facts": [asdict(fact) for fact in self.facts],
            "sides": [asdict(side) for side in self.sides],
            "gain": self.gain,
            "drew_random_numbers": self.drew_random_numbers,
            "sentences": self.sentences,
            "reports": self.reports.to_dict(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from attn_compiler.compiling.comparing import rendering
        from attn_compiler.reporting import render

        return render.plain(rendering.view(self))

    def __rich__(self) -> RenderableType:
        from attn_compiler.compiling.comparing import rendering

        return rendering.view(self)
