"""Private PyTorch API of guards on values in loaded modules that a compiled frame depends on, though Dynamo did not read them there."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from torch._dynamo.comptime import ComptimeContext
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource, GlobalSource
from torch._guards import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideRead:
    """A value and its place.

    module: a loaded module, by its name. names: attributes, from it on. key: of the dictionary that is there. value: the value at that
    time.
    """

    module: str
    names: tuple[str, ...] = ()
    key: str | None = None
    value: object

    def holds(self) -> bool:
        """Return True if the same value is found there now."""
        try:
            found: object = sys.modules[self.module]
            for name in self.names:
                found = getattr(found, name)
            if self.key is not None:
                found = found[self.key]  # type: ignore[index]
        except (KeyError, AttributeError, TypeError):
            return False
        is_same_number = _is_number(found) and type(found) is type(self.value) and repr(found) == repr(self.value)
        return found is self.value or is_same_number


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, (int, float, str, tuple))


def guard(context: ComptimeContext, reads: Iterable[OutsideRead]) -> None:
    """Have the current frame compiled anew if any of these values changes. Each has to be in place now."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    named: dict[str, str] = {}
    for read in reads:
        if read.module not in named:
            named[read.module] = output.install_global_by_id("module", sys.modules[read.module])
        source: Source = GlobalSource(named[read.module])
        for name in read.names:
            source = AttrSource(source, name)
        if read.key is not None:
            source = DictGetItemSource(source, read.key)
        is_number = _is_number(read.value)
        install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH if is_number else GuardBuilder.ID_MATCH))
