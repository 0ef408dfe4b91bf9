"""What Inductor writes in C++ of a graph is compiled as one file, in half the time: g++ begins with a large header for each file.

Each kernel keeps its source, its flags and its own call. They lie in one library, whose entry takes the kernel's number before the
kernel's arguments. Where that can't be compiled, each kernel is compiled on its own, as Inductor does. GNU's faster linker is taken where
it links.

Half of Inductor's own time for a CPU is sympy's, which simplifies each index to find how far apart in memory neighbours along an axis lie.
Of sums of products, without a division or a remainder, that is found without it, and is the same.

Processes of one group compile the same graphs: `one_after_another` lets the first one do it. A release of PyTorch that has other names for
these functions is left as it is, only slower.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from benchmarks import linking

#: in the entry of a library: how many arguments came, and how many are looked for
_COUNT = re.compile(r"if\((?P<came>\S+) != \{arg_len\}\)")


_GOLD = "-fuse-ld=gold"


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What `async_compile.cpp_pybinding` is called with, and stands in its place until `async_compile.wait`."""

    types: tuple[str, ...]
    source: str


def install() -> None:
    """In this process, once Inductor is imported: that takes a second, and not every test needs it."""
    if {"torch._inductor.async_compile", "torch._inductor.cpp_builder"} <= sys.modules.keys():
        _install()


@functools.cache
def _install() -> None:
    from torch._inductor import async_compile, codecache, cpp_builder

    _link_quickly(cpp_builder)
    _find_strides_of_sums()
    own, library = async_compile.AsyncCompile, getattr(codecache, "CppPythonBindingsCodeCache", None)
    if library is None or not (
        hasattr(own, "cpp_pybinding") and _COUNT.search(getattr(library, "suffix_template", ""))
    ):
        return
    compile_one, wait = own.cpp_pybinding, own.wait

    @functools.wraps(compile_one)
    def cpp_pybinding(self: Any, argtypes: Sequence[str], source_code: str) -> Any:
        if async_compile.get_compile_threads() > 1:
            return compile_one(self, argtypes, source_code)
        return _Kernel(types=tuple(argtypes), source=source_code)

    @functools.wraps(wait)
    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: kernel for name, kernel in scope.items() if isinstance(kernel, _Kernel)}
        scope.update(zip(kernels, _compiled(list(kernels.values()), library), strict=True))
        wait(self, scope)

    own.cpp_pybinding, own.wait = cpp_pybinding, wait_for_all  # type: ignore[method-assign]


def _compiled(kernels: list[_Kernel], library: Any) -> list[Any]:
    from torch._inductor.exc import CppCompileError

    if len(kernels) > 1:
        with contextlib.suppress(CppCompileError):
            entry = _library(kernels, library).load_pybinding([], _joined(kernels))
            return [functools.partial(entry, number) for number in range(len(kernels))]
    return [library.load_pybinding(list(kernel.types), kernel.source) for kernel in kernels]


def _library(kernels: list[_Kernel], library: Any) -> type:
    """Inductor's own class, with an entry that calls the kernel of a number."""
    cases = [
        f"case {number}: {library.entry_function}_{number}({', '.join(_parsed(kernel.types))}); break;"
        for number, kernel in enumerate(kernels)
    ]
    call = f"switch (parse_arg<int64_t>(args, 0)) {{{{ {' '.join(cases)} }}}} Py_RETURN_NONE;"
    return type(
        "Library",
        (library,),
        {
            "cache": {},
            "call_entry_function": call,
            "suffix_template": _COUNT.sub(r"if(\g<came> < 1)", library.suffix_template),
        },
    )


def _parsed(types: tuple[str, ...]) -> list[str]:
    return [f"parse_arg<{each.replace('const ', '')}>(args, {place})" for place, each in enumerate(types, 1)]


def _joined(kernels: list[_Kernel]) -> str:
    """Headers first. Each kernel has the same name in its own source."""
    lines = [kernel.source.splitlines() for kernel in kernels]
    headers = dict.fromkeys(line for each in lines for line in each if line.startswith("#include"))
    parts = list(headers)
    for number, each in enumerate(lines):
        parts += [f"#define kernel kernel_{number}", *(line for line in each if line not in headers), "#undef kernel"]
    return "\n".join(parts) + "\n"


def _link_quickly(cpp_builder: Any) -> None:
    run = getattr(cpp_builder, "run_compile_cmd", None)
    if run is None or shutil.which("ld.gold") is None:
        return

    @functools.wraps(run)
    def run_compile_cmd(cmd_line: str, *args: Any, **kwargs: Any) -> Any:
        compiler = cmd_line.partition(" ")[0]
        # This linker may not find what the compiler's own one finds: the C++ library of another place.
        gold = " -shared " in cmd_line and "g++" in compiler and linking.links(compiler, _GOLD)
        return run(f"{cmd_line} {_GOLD}" if gold else cmd_line, *args, **kwargs)

    cpp_builder.run_compile_cmd = run_compile_cmd


def _find_strides_of_sums() -> None:
    from torch._inductor import sizevars

    own = getattr(sizevars, "stride_at_vec_range", None)
    if own is None:
        return

    @functools.lru_cache(1 << 14)
    @functools.wraps(own)
    def stride_at_vec_range(index: Any, var: Any, vec_length: int | None = None) -> Any:
        if not _is_sum_of_products(index):
            return own(index, var, vec_length)
        return sympy.expand(index.xreplace({var: var + 1}) - index)

    for module in ("torch._inductor.sizevars", "torch._inductor.codegen.cpp"):
        if getattr(sys.modules.get(module), "stride_at_vec_range", None) is own:
            sys.modules[module].stride_at_vec_range = stride_at_vec_range  # type: ignore[attr-defined]


def _is_sum_of_products(index: Any) -> bool:
    """Of whole numbers and symbols."""
    if isinstance(index, (sympy.Add, sympy.Mul)):
        return all(map(_is_sum_of_products, index.args))
    return isinstance(index, (sympy.Symbol, sympy.Integer))


#: seconds that a process waits for the others before it compiles beside them
_PATIENCE = 60.0


def one_after_another(lock: Path) -> None:
    """In each of several processes that compile the same graphs: one compiles, and the others find its code in Inductor's cache.

    What is compiled does not depend on who compiles it: Inductor's cache is on for users, too, and its keys hold all that matters.
    """
    from torch._inductor import compile_fx

    turn = _Turn(lock)
    for name in ("compile_fx", "_compile_fx_inner"):
        if hasattr(compile_fx, name):
            setattr(compile_fx, name, turn.taken_by(getattr(compile_fx, name)))


class _Turn:
    """To be taken by one process at a time, which may take it again inside."""

    def __init__(self, lock: Path) -> None:
        self._lock, self._depth = lock, 0

    def taken_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._taken():
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._depth == 0:
                file = stack.enter_context(self._lock.open("w"))
                deadline = time.monotonic() + _PATIENCE
                while not _is_locked(file) and time.monotonic() < deadline:
                    time.sleep(0.01)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1


def _is_locked(file: Any) -> bool:
    """By this process, as long as the file is open."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
