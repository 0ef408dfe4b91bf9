"""Triton kernels in the form that Inductor takes. Imports triton, so this module is imported late.

Inductor compiles a kernel to machine code, and writes a launch in C++, which runs without Python. It takes tensors and
numbers as parameters, and no tuples. So each launch gets a generated kernel, which calls our kernel. Its parameters are the tensors
that are present and each integer by itself. All else is in its text. Triton inlines the call.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.launching.launch import Arguments, as_taken

#: names in the generated text for the module of our kernel, and its constants
_MODULE, _CONSTANT = "_kernels", "_constant"


@dataclass(frozen=True, kw_only=True)
class FlatLaunch:
    """A launch for Inductor.

    kernel: takes its parameters by name.
    tensors: for each parameter that is a tensor its name in the call.
    numbers: the other parameters. They may be symbolic.
    """

    kernel: Any
    tensors: Mapping[str, str]
    numbers: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Text:
    """Text of a generated kernel; equal for launches that share one.

    module, name: of our kernel.
    parameters: tensors and numbers.
    given: the expression of each argument in the call of our kernel.
    constants: the values of tuples of constants.
    kinds: of all tuples.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    given: tuple[str, ...]
    constants: tuple[str, ...]
    kinds: tuple[type[Any], ...]
    tile: Tile | None

    @property
    def own_name(self) -> str:
        return f"packaged_{self.name}"

    @property
    def function(self) -> str:
        parameters, given = ", ".join(self.parameters), ", ".join(self.given)
        return f"def {self.own_name}({parameters}):\n    {_MODULE}.{self.name}({given})\n"

    @property
    def imports(self) -> str:
        kinds = [f"from {kind.__module__} import {kind.__name__}" for kind in self.kinds]
        return "\n".join([f"import {self.module} as {_MODULE}", *kinds]) + "\n"


def flat(kernel: Any, arguments: Arguments) -> FlatLaunch:
    """Return the launch of a kernel as Inductor takes it."""
    tensors = {name: source for name, source in arguments.tensors.items() if source is not None}
    parameters = inspect.signature(kernel.fn).parameters.values()
    # Interpreted kernels say only in annotations what they are compiled for.
    writer = _Writer({parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)})
    taken = as_taken(kernel.arg_names, arguments.numbers)
    given = [name if name in tensors else writer.written(name, taken.get(name)) for name in kernel.arg_names]
    text = _Text(
        module=kernel.fn.__module__,
        name=kernel.fn.__name__,
        parameters=(*tensors, *writer.numbers),
        given=tuple(given),
        constants=tuple(writer.constants),
        kinds=tuple(sorted(writer.kinds, key=lambda kind: kind.__name__)),
        tile=arguments.tile,
    )
    return FlatLaunch(kernel=_made(text), tensors=tensors, numbers=writer.numbers)


class _Writer:
    """Writes the arguments of the call of our kernel.

    numbers: the parameters that were found.
    constants, kinds: as `_Text` has them.
    """

    def __init__(self, are_constant: set[str]) -> None:
        self.numbers: dict[str, Any] = {}
        self.constants: list[str] = []
        self.kinds: set[type[Any]] = set()
        self._are_constant = are_constant

    def written(self, name: str, value: Any) -> str:
        if isinstance(value, tuple):
            self.kinds.add(type(value))
        if name in self._are_constant and isinstance(value, tuple):
            self.constants.append(repr(value))
            return f"{_CONSTANT}_{len(self.constants) - 1}"
        if name in self._are_constant or value is None:
            return repr(value)
        if isinstance(value, tuple):
            return f"{type(value).__name__}({', '.join(self._members(name, value))})"
        if isinstance(value, float):
            # Inductor passes a float parameter in 64 bits, which would widen every product with it.
            return f"tl.full([], {value!r}, tl.float32)"
        self.numbers[name] = value
        return name

    def _members(self, name: str, value: Any) -> Iterator[str]:
        for member, number in zip(value._fields, value, strict=True):
            yield f"{member}={self.written(f'{name}_{member}', number)}"


@functools.lru_cache(maxsize=1024)
def _made(text: _Text) -> Any:
    """Build the kernel. Equal launches get the same one: Inductor tells kernels apart by their identity."""
    is_interpreted = triton.knobs.runtime.interpret
    namespace: dict[str, Any] = {"tl": tl, "__name__": __name__}
    file = f"<{text.own_name} of attn_compiler, {hash(text):x}>"
    # Triton and Inductor read a kernel's text from Python's linecache.
    linecache.cache[file] = (len(text.function), None, text.function.splitlines(keepends=True), file)
    exec(text.imports, namespace)
    exec(compile(text.function, file, "exec"), namespace)
    for i, constant in enumerate(text.constants):
        value = eval(constant, namespace)
        # The compiler reads no globals but constexpr; the interpreter needs the plain value.
        namespace[f"{_CONSTANT}_{i}"] = value if is_interpreted else tl.constexpr(value)
    defined = namespace[text.own_name]
    kernel = triton.jit(defined) if is_interpreted else _Packaged(defined, text.imports)
    if text.tile is None:
        return kernel
    options = dict(text.tile.launch_options)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    # Inductor reads these two from a `Config`, and its arguments.
    return triton.autotune(configs=[triton.Config(options, num_warps=warps, num_stages=stages)], key=[])(kernel)


class _Packaged(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose text Inductor copies with its imports. On its own, Inductor copies functions and constants, but no modules or
    tuples."""

    def __init__(self, function: Any, imports: str) -> None:
        super().__init__(function)
        self._imports = imports

    @property
    def src(self) -> str:
        return f"{self._src}\n{self._imports}"
