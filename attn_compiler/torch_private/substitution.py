"""Private PyTorch API of capturing a function's call as one node: its traced replacement, its guards, and the compiling backend.

`torch.compiler.substitute_in_graph` is public, and holds for every backend. So the replacement asks at each call whether its backend wants
it, and else calls a copy of the function, which Dynamo traces as usual.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import assume_constant_result, config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource, GlobalSource
from torch._guards import Source, tracing
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from attn_compiler.torch_private import observe

# ---- what a model's function reads besides its arguments -------------------------------------------------------------


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """text: the decision for a captured call; "" if it is not captured. rests_on: values that the function reads, for guards."""

    text: str = ""
    rests_on: tuple[OutsideRead, ...] = ()


#: decides on a call by its operands' fake tensors by parameter, and its numbers and flags by parameter
Decide = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Decided]
#: computes the function's result from the operands, the numbers and flags, and the decision's text
Taken = Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Any]


def substitute(
    function: types.FunctionType, operands: Sequence[str], others: Sequence[str], decide: Decide, taken: Taken
) -> None:
    """Let Dynamo trace `taken` instead of `function`, wherever `decide` gives a text. operands: the parameters that are tensors, or None.
    others: those that are numbers or flags. A call with anything else is not captured."""
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
        """Return the defaults of a call that may be captured, looked up at each trace and for every backend, since they may change."""
        copy.__code__, copy.__defaults__ = function.__code__, function.__defaults__
        copy.__kwdefaults__ = function.__kwdefaults__
        own = _named(function)
        backend, _ = compiling_for()
        if backend is None or not are_taken_for(backend) or tuple(one.name for one in own) != names:
            return None
        return tuple((one.name, one.default) for one in own if one.default is not one.empty)

    # Dynamo traces it. `note` reads its variables by their names. For other backends no argument is read: the order of reads is the
    # order of a graph's inputs.
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
    """Return the decision's text for the current call; "" if it is not captured, or anything of it is not understood. A captured call has
    no rule for transforms of torch.func. It would lose a tangent without an error."""
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
        guard(context, decided.rests_on)
    return decided.text


def compiling_for() -> tuple[Callable[..., Any] | None, Mapping[str, Any]]:
    """Return the backend of the current compilation, and options= and mode= of its torch.compile; None if there is none, or if PyTorch
    leaves out guards on objects."""
    given = observe.given_to_compilation()
    if given is None or given["export"] or getattr(config, "caching_precompile", False):
        return None, {}
    return observe.innermost(given["compiler_fn"]), observe.options_of(given["compiler_fn"])


def are_taken_for(backend: Callable[..., Any]) -> bool:
    """Return True if `take_for` was called for a backend."""
    return bool(getattr(backend, _TAKES, False))


def take_for(backend: Callable[..., Any]) -> None:
    """Capture calls of substituted functions in code compiled for this backend."""
    setattr(backend, _TAKES, True)


_TAKES = "takes_substituted_calls"


class _Kept(list[Callable[[CallbackArgs], None]]):
    """A list of callbacks of which one survives clear(): after torch._dynamo.reset() the next compilation is reported, too."""

    def __init__(self, others: Iterable[Callable[[CallbackArgs], None]], tell: Callable[[], None]) -> None:
        self.tell = tell
        super().__init__((*others, self._told))

    def clear(self) -> None:
        super().clear()
        self.append(self._told)

    def _told(self, _: CallbackArgs) -> None:
        self.tell()


def watch_starts(tell: Callable[[], None]) -> None:
    """Call `tell` when any compilation begins, from now on. For one function of a process."""
    if not isinstance(callback_handler.start_callbacks, _Kept):
        callback_handler.start_callbacks = _Kept(callback_handler.start_callbacks, tell)


# ---- running a function outside of the current compilation --------------------------------------------------------


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """Run calls in the block on real tensors with gradients, outside of any compilation; random state is restored."""
    with tracing(None), _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def traced(function: Callable[..., Any], operands: Sequence[Tensor]) -> fx.Graph:
    """Trace a function to ATen ops."""
    traced: fx.GraphModule = make_fx(function, tracing_mode="real")(*operands)
    return traced.graph


class Widened(TorchFunctionMode):
    """Replace float32 by float64 in every call of the block, to compute a function without its rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)
