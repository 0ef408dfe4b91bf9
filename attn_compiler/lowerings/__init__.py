"""Every way to compute an attention site. To add one: its folder, its line in homes.py, its row in choice, its tests.

base.py defines what a lowering is. shared holds code that every family uses, fp8 code of families with a forward in FP8, and choice the
order in which lowerings are asked. A family is a folder: plain, sdpa, rows, triton, decode, cudnn, fa4, hopper. The folder linear holds
the lowerings of linear attention. Passes import from here what families.py and homes.py list.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_compiler.lowerings.families import *  # noqa: F403 (it has an __all__)
    from attn_compiler.lowerings.homes import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the families at the first use of one of them: a graph without attention has none, and a kept rewrite few."""
    if name.startswith("__"):
        raise AttributeError(name)
    homes = importlib.import_module(f"{__name__}.homes")
    return getattr(homes if name in homes.__all__ else importlib.import_module(f"{__name__}.families"), name)
