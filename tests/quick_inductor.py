"""What Inductor writes in C++ of a graph is compiled as one file, in half the time: g++ begins with a large header for each file.

Each kernel keeps its source, its flags and its own call. They lie in one library, whose entry takes the kernel's number before the
kernel's arguments. Where that can't be compiled, each kernel is compiled on its own, as Inductor does. GNU's faster linker is taken where
there is one. A release of PyTorch that has other names for these functions is left as it is, only slower.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: of the entry of a library: this many arguments are looked for
_COUNT = "{arg_len}"


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
    own, library = async_compile.AsyncCompile, getattr(codecache, "CppPythonBindingsCodeCache", None)
    if library is None or not (hasattr(own, "cpp_pybinding") and _COUNT in getattr(library, "suffix_template", "")):
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
            "suffix_template": library.suffix_template.replace(_COUNT, "PyTuple_GET_SIZE(args)"),
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
        links = " -shared " in cmd_line and "g++" in cmd_line.partition(" ")[0]
        return run(f"{cmd_line} -fuse-ld=gold" if links else cmd_line, *args, **kwargs)

    cpp_builder.run_compile_cmd = run_compile_cmd
