"""Private PyTorch API of taking the call of a function as one node: what Dynamo traces in its place, what is known there, who compiles.

`torch.compiler.substitute_in_graph` is public, and holds for every backend. So what stands in the place of a function asks at each call
whether its backend wants it, and else calls a copy of the function, which Dynamo looks into as ever.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import assume_constant_result
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._guards import tracing
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from attn_compiler.torch_private import observe, outside_reads
from attn_compiler.torch_private.outside_reads import OutsideRead


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """text: what a call is taken with; "" of one that is not taken. rests_on: what the function reads, for guards."""

    text: str = ""
    rests_on: tuple[OutsideRead, ...] = ()


#: what a decision may read of a call: the operands' fake tensors by parameter, and the numbers and flags by parameter
Decide = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Decided]
#: from the operands, the numbers and flags, and the decision's text to what the function gives
Taken = Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Any]


def substitute(
    function: types.FunctionType, operands: Sequence[str], others: Sequence[str], decide: Decide, taken: Taken
) -> None:
    """From now on Dynamo traces `taken` where `function` is called, wherever `decide` gives a text, and else the function as ever.

    operands: the parameters that are tensors, or None. others: those that are numbers or flags. A call with anything else is not taken.
    """
    replacement = _replacement(function, tuple(operands), tuple(others), decide, taken)
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(replacement)


def _replacement(
    function: types.FunctionType, operands: tuple[str, ...], others: tuple[str, ...], decide: Decide, taken: Taken
) -> Callable[..., Any]:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    names = tuple(one.name for one in _named(function))
    known = frozenset((*operands, *others))
    decided: list[str] = []

    def note(context: ComptimeContext) -> None:
        decided[:] = [_decide(context, decide)]

    @assume_constant_result  # type: ignore[untyped-decorator]
    def text() -> str:
        return decided.pop() if decided else ""

    @assume_constant_result  # type: ignore[untyped-decorator]
    def defaults() -> tuple[tuple[str, Any], ...] | None:
        """The defaults of a call that may be taken. What was put into the function since is looked up, for every backend."""
        copy.__code__, copy.__defaults__ = function.__code__, function.__defaults__
        copy.__kwdefaults__ = function.__kwdefaults__
        own = _named(function)
        backend, _ = compiling_for()
        if backend is None or not are_taken_for(backend) or tuple(one.name for one in own) != names:
            return None
        return tuple((one.name, one.default) for one in own if one.default is not one.empty)

    # Dynamo traces it. `note` reads its variables by their names. For other backends nothing is looked at: the order in which a graph has
    # its inputs is that in which they are.
    def replacement(*args: Any, **kwargs: Any) -> Any:
        found = defaults()
        if found is None:
            return copy(*args, **kwargs)
        given = {**dict(found), **dict(zip(names, args)), **kwargs}  # noqa: B905 (a call may give fewer)
        tensors = {name: given[name] for name in operands if given.get(name) is not None}
        present = list(tensors)  # noqa: F841
        values = list(tensors.values())  # noqa: F841
        rest = {name: given[name] for name in others if name in given}
        unknown = [name for name in given if name not in known]  # noqa: F841
        comptime(note)
        said = text()
        if said == "":
            return copy(*args, **kwargs)
        return taken(tensors, rest, said)

    return replacement


def _named(function: types.FunctionType) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [one for one in parameters if one.kind is not one.VAR_KEYWORD]


def _decide(context: ComptimeContext, decide: Decide) -> str:
    """What is decided of the call under way; "" where it is not taken, and where anything of it is not understood.

    A call that is taken has no rule for transforms of torch.func. It would lose a tangent without an error.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return ""
    if context.get_local("unknown").as_python_constant():
        return ""
    found: Any = context.get_local("values").as_proxy()
    values = [one.node.meta.get("example_value") if isinstance(one, fx.Proxy) else None for one in found]
    rest = context.get_local("rest")
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not rest.is_python_constant() or len(tensors) < len(values):
        return ""
    present = context.get_local("present").as_python_constant()
    decided = decide(dict(zip(present, tensors, strict=True)), rest.as_python_constant())
    if decided.text:
        outside_reads.guard(context, decided.rests_on)
    return decided.text


def compiling_for() -> tuple[Callable[..., Any] | None, Mapping[str, Any]]:
    """The backend of the compilation under way, and the options= and mode= of its torch.compile; None where none is."""
    given = observe.given_to_compilation()
    if given is None or given["export"]:
        return None, {}
    return observe.innermost(given["compiler_fn"]), observe.options_of(given["compiler_fn"])


def are_taken_for(backend: Callable[..., Any]) -> bool:
    """Whether `take_for` was said of a backend."""
    return bool(getattr(backend, _TAKES, False))


def take_for(backend: Callable[..., Any]) -> None:
    """Functions that are substituted are taken in what is compiled for this backend."""
    setattr(backend, _TAKES, True)


_TAKES = "takes_substituted_calls"


class _Kept(list[Callable[[CallbackArgs], None]]):
    """Callbacks of which one stays where all are forgotten: after torch._dynamo.reset() the next compilation is told of, too."""

    def __init__(self, others: Iterable[Callable[[CallbackArgs], None]], tell: Callable[[], None]) -> None:
        self.tell = tell
        super().__init__((*others, self._told))

    def clear(self) -> None:
        super().clear()
        self.append(self._told)

    def _told(self, _: CallbackArgs) -> None:
        self.tell()


def watch_starts(tell: Callable[[], None]) -> None:
    """Tell when any compilation begins, from now on. For one function of a process."""
    if not isinstance(callback_handler.start_callbacks, _Kept):
        callback_handler.start_callbacks = _Kept(callback_handler.start_callbacks, tell)


# ---- running a function apart from what is compiled ----------------------------------------------------------------


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within the block, calls run on real tensors with gradients, whatever compilation is under way; random numbers are its own."""
    with tracing(None), _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def traced(function: Callable[..., Any], operands: Sequence[Tensor]) -> fx.Graph:
    """The ATen ops that a function is made of."""
    traced: fx.GraphModule = make_fx(function, tracing_mode="real")(*operands)
    return traced.graph


class Widened(TorchFunctionMode):
    """Within the block, float32 is float64 in every call: what a function computes, without its rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)
