"""flash-linear-attention's kernels in Triton's interpreter, which they are not made for.

They are timed on a GPU before one is chosen: here the first is taken. And they take numbers of loops for tensors, which the interpreter's
are not.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from triton.runtime import autotuner, interpreter


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it, on the CPU, in float32."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(autotuner.Autotuner, "run", _first))
        for module in _modules():
            patches.enter_context(mock.patch.object(module, "range", _range, create=True))
        yield


def _first(self: Any, *given: Any, **named: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, given, strict=False))
    return self.fn.run(*given, **{**named, **self.prune_configs(named)[0].all_kwargs()})


def _range(*bounds: Any) -> Iterator[Any]:
    for i in builtins.range(*(int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in bounds)):
        yield interpreter.interpreter_semantic.to_tensor(i)


def _modules() -> list[ModuleType]:
    """Those whose kernels ask a number of a loop for its dtype."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("fla.ops.")]
    return [module for module in loaded if module.__file__ and ".to(tl.int64)" in Path(module.__file__).read_text()]
