"""Triton's key of a kernel, the same in every process. Imports triton, so it comes late.

Triton 3.6 and 3.7 take into a function's key the constants of what it calls, but only if what it calls had its key before. So a kernel
had another key, and was compiled again, in a process that had asked for other kernels before it. Here what is called has its key first.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITCallable

#: a key that another thread is about to ask for looks as if it were there
_settling = threading.Lock()


def settle(kernel: Any) -> None:
    """Ask for the keys of all that a kernel calls, and then for its own. Nothing, where kernels are interpreted."""
    if isinstance(kernel, JITCallable):
        with _settling:
            _settle(kernel, set())


def _settle(function: Any, met: set[int]) -> None:
    if id(function) in met or function.hash is not None:
        return
    met.add(id(function))
    for called in _called(function):
        _settle(called, met)
    function.cache_key  # noqa: B018 (it is kept where it is asked for)


def _called(function: Any) -> Iterator[Any]:
    """Functions that its code names, by themselves or as attributes of modules, and methods of aggregates."""
    names = dict.fromkeys(_names(function.fn.__code__))
    given = {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    for name in names:
        value = given.get(name)
        values = [value]
        if isinstance(value, types.ModuleType):
            values = [getattr(value, attribute, None) for attribute in names]
        for one in values:
            of_aggregate = getattr(one, "hash_attrs", ()) if getattr(one, "__triton_aggregate__", False) else ()
            yield from (found for found in (one, *of_aggregate) if isinstance(found, JITCallable))


def _names(code: types.CodeType) -> Iterator[str]:
    """Those of nested functions and comprehensions, too."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
