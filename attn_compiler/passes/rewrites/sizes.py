"""Symbolic sizes and other symbolic numbers of one graph: as plain data, with what is known of the symbols, and the passes' guards.

The key holds what is known of the symbols. It does not hold the sizes of this call. So a question has the same answer wherever the key is
found, unless PyTorch answers it by this call's sizes. Each such answer is a guard. The file keeps these guards. A rewrite is repeated
only for a call in which all of them hold, and every later call is asked for them. Afterwards as much must be known of the symbols as was
known after the passes (docs/rewrites.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.torch_private import symbols as torch_symbols


class SymbolSizes:
    """The symbols of one graph and its bodies, collected from the first size on."""

    def __init__(self) -> None:
        self._env: Any = None
        self._asked: list[sympy.Basic] = []

    def data_of(self, size: Any) -> Any:
        """Return a whole number, or a symbolic number (a size or another) as data. Raises Unkeyed."""
        if type(size) is int:
            return size
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unkeyed(f"a size is {type(size).__name__}")
        env = torch_symbols.env_of(size)
        if self._env is None:
            self._env, self._asked = env, torch_symbols.guards(env)
        if env is not self._env:
            raise Unkeyed("sizes are symbols of two compilations")
        return "size", _data(size.node.expr)

    def made(self, data: Any) -> Any:
        """Invert `data_of` for sizes."""
        if type(data) is int:
            return data
        kind, expr = data
        if kind != "size" or self._env is None:
            raise Unkeyed(f"a record has the size {data!r}")
        return torch_symbols.sized(self._env, _expr(expr, self._symbols))

    def asked(self) -> tuple[Any, ...]:
        """Return the guards before the first size was met, as text."""
        return tuple(map(str, self._asked))

    def known(self) -> str | None:
        """Return a digest of what is known of all symbols now, beside guards. Raises Unkeyed."""
        if self._env is None:
            return None
        found = torch_symbols.knowledge(self._env)
        if found is None:
            raise Unkeyed("more is known of symbolic sizes than a key tells")
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    def taken(self) -> tuple[Any, ...]:
        """Return the guards since the first size was met, as data. Raises Unkeyed."""
        now = [] if self._env is None else torch_symbols.guards(self._env)
        if now[: len(self._asked)] != self._asked:
            raise Unkeyed("guards of symbolic sizes are gone")
        return tuple(_data(guard) for guard in now[len(self._asked) :])

    def hold(self, guards: Sequence[Any]) -> bool:
        """Return whether guards hold in this call, without adding any. Raises Unkeyed for guards of other symbols."""
        return all(torch_symbols.holds(self._env, _expr(guard, self._symbols)) for guard in guards)

    def take(self, guards: Sequence[Any], known: str | None) -> None:
        """Add guards, which every later call is asked for. known: the digest after that. Raises Unkeyed where the digest differs."""
        for guard in guards:
            torch_symbols.ask(self._env, _expr(guard, self._symbols))
        if self.known() != known:
            raise Unkeyed("guards of symbolic sizes tell something else here")

    def unasked(self) -> contextlib.AbstractContextManager[None]:
        """Add no guard within the block: nodes' values have to serve each length that the guards let through."""
        return contextlib.nullcontext() if self._env is None else torch_symbols.unasked(self._env)

    @property
    def _symbols(self) -> dict[str, sympy.Symbol]:
        if self._env is None:
            raise Unkeyed("a record has symbolic sizes, and the graph none")
        return torch_symbols.symbols(self._env)


def _data(expr: sympy.Basic) -> Any:
    """Return an expression as data. Raises Unkeyed if `_expr` would not return an equal one."""
    if isinstance(expr, sympy.Symbol):
        return "symbol", str(expr)
    if isinstance(expr, sympy.Integer):
        return "number", int(expr)
    if isinstance(expr, sympy.Float):
        return "float", float(expr).hex()
    name = type(expr).__name__
    if torch_symbols.FUNCTIONS.get(name) is not type(expr):
        raise Unkeyed(f"a size or a guard has {name}")
    data = (name, *map(_data, expr.args))
    if _expr(data, {str(symbol): symbol for symbol in expr.free_symbols if isinstance(symbol, sympy.Symbol)}) != expr:
        raise Unkeyed(f"a size or a guard reads as another one: {expr}")
    return data


def _expr(data: Any, symbols: dict[str, sympy.Symbol]) -> Any:
    """Invert `_data`. Raises Unkeyed."""
    kind, *parts = data
    if kind == "number" and type(parts[0]) is int:
        return sympy.Integer(parts[0])
    if kind == "float":
        return sympy.Float(float.fromhex(parts[0]))
    if kind == "symbol" and parts[0] in symbols:
        return symbols[parts[0]]
    if kind not in torch_symbols.FUNCTIONS:
        raise Unkeyed(f"a record has the size {data!r}")
    return torch_symbols.FUNCTIONS[kind](*(_expr(part, symbols) for part in parts))
