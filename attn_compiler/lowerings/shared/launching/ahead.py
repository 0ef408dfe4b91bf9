"""Compilation of a graph's Triton kernels while the inner compiler compiles the rest, instead of at their first launch.

The graph that autograd was traced through calls the leaf ops of forward and backward, on values with the layout of each tensor. The bodies
of those ops are called here with stand-ins for tensors (dry_tensors.py), and their launches are recorded (dry_run.py). So a launch is
described once, by the code that launches. Equal calls, as those of equal layers, are run once, and identical variants of a kernel are
compiled once (compiling.py). With symbolic sizes a launch is described three times: with this call's sizes, with multiples of 16 alone, and
with none. A kernel of symbolic sizes has a variant for either class (any_size.py).

A tensor with another layout at run time costs only time: its launch compiles the variant that it needs. `Built` lists each kernel that
failed to compile, with the text of its call. The site is decided again then.

The backend waits for the kernels of the forward. A launch of a backward's kernel waits for that kernel: Inductor compiles a backward at
its first call, and threads compile the kernels meanwhile. A kernel that does not compile fails at its launch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from torch import fx

from attn_compiler.lowerings.shared.launching import dry_tensors
from attn_compiler.lowerings.shared.launching.any_size import MULTIPLE
from attn_compiler.lowerings.shared.launching.dry_run import Note, noting
from attn_compiler.torch_private import inductor as torch_inductor, op_library, symbols as torch_symbols

if TYPE_CHECKING:
    from attn_compiler.lowerings.shared.launching.compiling import Compiled

log = logging.getLogger(__name__)

#: suffix of a backward's leaf op
_BACKWARD = "_backward"
#: seconds of waiting after which a terminal shows a status line
_SHOWN_AFTER = 0.5


@dataclass(frozen=True, kw_only=True)
class LaunchingCall:
    """One call of a body, with its tensors described: equal for calls with the same launches. op: the body's op."""

    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    op: str = ""

    @property
    def text(self) -> str:
        """The spec's text among the arguments (`op_library.text_of`)."""
        return op_library.text_of(self.op, self.arguments)

    @property
    def is_of_backward(self) -> bool:
        return self.op.endswith(_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class NotCompiled:
    """A kernel that does not compile, with the op and the text of its call."""

    op: str
    text: str
    error: Exception


class KernelSeconds(Sequence[tuple[str, float]]):
    """Kernels and the seconds that each took for all its variants. Only kernels that are done when it is read are listed."""

    def __init__(self, begun: Iterable[Future[Compiled]]) -> None:
        self._begun = tuple(begun)

    def _so_far(self) -> tuple[tuple[str, float], ...]:
        found: dict[str, float] = {}
        for future in self._begun:
            if future.done() and not future.cancelled() and future.exception() is None:
                one = future.result()
                found[one.kernel] = found.get(one.kernel, 0.0) + one.seconds
        return tuple(found.items())

    def __len__(self) -> int:
        return len(self._so_far())

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Iterate over a snapshot: a kernel that is done meanwhile moves the places of others."""
        return iter(self._so_far())

    @overload
    def __getitem__(self, index: int) -> tuple[str, float]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[str, float], ...]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, float] | tuple[tuple[str, float], ...]:
        return self._so_far()[index]


@dataclass(frozen=True, kw_only=True)
class Built:
    """Result of compiling ahead. failed: kernels of the forward that do not compile, and those of the backward that are known not to."""

    seconds: Sequence[tuple[str, float]] = ()
    failed: tuple[NotCompiled, ...] = ()


@dataclass(kw_only=True)
class Ahead:
    """The kernels of one graph that are compiled ahead.

    begin: starts to compile a kernel (`Workers.begin`); returns the futures.
    started: the futures, and the call of a graph for each.
    """

    begin: Callable[..., list[Future[Compiled]]]
    started: dict[Future[Compiled], LaunchingCall | None] = field(default_factory=dict)

    def note(
        self, kernel: Any, positional: tuple[Any, ...], named: dict[str, Any], call: LaunchingCall | None = None
    ) -> None:
        self.started |= dict.fromkeys(self.begin(kernel, positional, named), call)

    def read(self, graph: fx.Graph) -> None:
        """Start to compile the kernels that a graph's leaf ops launch."""
        for call in dict.fromkeys(calls(graph)):
            try:
                note_launches(call, functools.partial(self.note, call=call))
            except Exception as error:  # noqa: BLE001 (whatever a body raises for stand-ins, it may run on tensors)
                log.warning("its kernels are compiled at their first launch: %s: %r", call.body, error)

    def built(self) -> Built:
        """Wait until the kernels of the forward are done."""
        awaited = [future for future, call in self.started.items() if call is None or not call.is_of_backward]
        with _shown(awaited):
            wait(awaited)
        failed = [
            NotCompiled(op=call.op, text=call.text, error=error)
            for future, call in self.started.items()
            if call is not None and (error := _failure(future)) is not None
        ]
        seconds = KernelSeconds(self.started)
        self.started.clear()
        return Built(seconds=seconds, failed=tuple(failed))


def _failure(future: Future[Compiled]) -> Exception | None:
    """Return the exception that Triton raised, of any type."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return error if isinstance(error, Exception) else None


def here() -> Ahead | None:
    """Return a new `Ahead`; None where kernels are interpreted, and nothing is compiled ahead. Imports triton, so CUDA has to be in use.

    Where Inductor is told to compile one thing at a time, these kernels are compiled so too, and still before a call.
    """
    import triton

    from attn_compiler.lowerings.shared.launching import compiling

    if triton.knobs.runtime.interpret:
        return None
    return Ahead(begin=compiling.workers(torch_inductor.compile_threads()).begin)


def calls(graph: fx.Graph) -> Iterator[LaunchingCall]:
    """Yield the calls of bodies that launch Triton kernels on a GPU, in a graph whose nodes have values ("val")."""
    for node in graph.nodes:
        body = op_library.launching_body(node.target) if node.op == "call_function" else None
        if body is None:
            continue
        with contextlib.suppress(dry_tensors.NoExampleError):
            given, named = fx.map_arg((node.args, node.kwargs), _value)
            op = node.target.name().partition("::")[2]
            yield from dict.fromkeys(_call(op, body, tuple(given), named, example) for example in _EXAMPLES)


def _call(
    op: str, body: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any], example: dry_tensors.Example
) -> LaunchingCall:
    return LaunchingCall(
        op=op,
        body=body,
        arguments=dry_tensors.described(given, example),
        named=tuple((name, dry_tensors.described(value, example)) for name, value in named.items()),
    )


def _multiple(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


#: examples of symbolic numbers: this call's, multiples of 16, and numbers that are none
_EXAMPLES: tuple[dry_tensors.Example, ...] = (
    torch_symbols.example,
    functools.partial(torch_symbols.example_of, size_of=_multiple),
    functools.partial(torch_symbols.example_of, size_of=lambda size: _multiple(size) + 1),
)


def _value(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise dry_tensors.NoExampleError(f"{node.name} has no value")
    return node.meta["val"]


def note_launches(call: LaunchingCall, note: Note) -> None:
    """Call a body with stand-ins, and pass each launch to `note`."""
    with dry_tensors.without_memory(), noting(note):
        arguments = dry_tensors.made(call.arguments)
        call.body(*arguments, **{name: dry_tensors.made(value) for name, value in call.named})


@contextlib.contextmanager
def _shown(started: Collection[Future[Compiled]]) -> Iterator[None]:
    """Show a status line on a terminal if it takes long, and clear it at the end."""
    if started and wait(started, timeout=_SHOWN_AFTER).not_done:
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            yield
            return
        with console.status(f"attn_compiler: compiling {len(started)} kernels"):
            yield
        return
    yield
