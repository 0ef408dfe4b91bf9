"""Private PyTorch API of the frames that Dynamo compiles: the modules that they belong to, and whether a graph is all of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import LocalSource, NNModuleSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Source, TracingContext


def guard_modules() -> None:
    """Let the code of the compilation under way serve only the very modules that it is made for: those that its frame was given, and the
    outermost of those that it reads. Outside of a compilation nothing happens.

    Without that, modules of one class share it where nothing but parameters tells them apart: layers that are compiled one by one,
    two instances of a model.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    guarded = [guard.originating_source for guard in context.guards_context.dynamo_guards]
    read = [found for source in guarded for found in _outermost_module(source)]
    given = [LocalSource(name) for name, value in _frame().f_locals.items() if isinstance(value, nn.Module)]
    for source in dict.fromkeys([*given, *read]):
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def is_whole(gm: fx.GraphModule) -> bool:
    """Whether Dynamo's graph is all of its frame: no graph break comes before or after it. To be asked while it is compiled."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return True
    return not reason.graph_break and not _frame().f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def _frame() -> Any:
    """What translates the frame that is compiled, with the values that it was called with."""
    return InstructionTranslator.current_tx().output.root_tx


def _outermost_module(source: Source | None) -> Iterator[Source]:
    """Where a value's outermost module is from; nothing if it belongs to none."""
    found = None
    while source is not None:
        if isinstance(source, NNModuleSource):
            found = source.base
        source = getattr(source, "base", None)
    if found is not None:
        yield found
