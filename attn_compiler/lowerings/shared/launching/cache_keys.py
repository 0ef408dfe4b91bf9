"""Triton's cache key of a kernel, made the same in every process. Imports triton, so this module is imported late.

Triton 3.6 and 3.7 include the constants of a called function in the caller's key, but only if the called function had its key before. So a
kernel had another key, and was compiled again, in a process that had used other kernels before it. Here called functions get their keys
first.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITCallable

#: Triton sets a placeholder before it computes a key, which another thread would read as the key
_settling = threading.Lock()


def settle(kernel: Any) -> None:
    """Compute the keys of all functions that a kernel calls, and then its own. Does nothing where kernels are interpreted."""
    if isinstance(kernel, JITCallable):
        with _settling:
            _settle(kernel, set())


def _settle(function: Any, met: set[int]) -> None:
    if id(function) in met or function.hash is not None:
        return
    met.add(id(function))
    for called in _called(function):
        _settle(called, met)
    function.cache_key  # noqa: B018 (the property stores the key)


def _called(function: Any) -> Iterator[Any]:
    """Yield functions that its code names, by themselves or as attributes of modules, and methods of aggregates."""
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
    """Yield names, also those in nested functions and comprehensions."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
