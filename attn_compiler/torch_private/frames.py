"""Private PyTorch API of the frames that Dynamo compiles: their modules and arguments, their guards, and recompilation."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo import config, convert_frame, pgo
from torch._dynamo.cache_size import _has_same_id_matched_objs
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code  # type: ignore[attr-defined]
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import DictGetItemSource, LocalSource, NNModuleSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext, Source, TracingContext
from torch._subclasses import FakeTensor

from attn_compiler.reasons.errors import described
from attn_compiler.torch_private import known_masks, observe
from attn_compiler.torch_private.known_masks import Known


def guard_modules() -> None:
    """Guard the current compilation on the identity of its modules: the frame's module arguments, and the outermost modules it reads.

    Outside of a compilation nothing happens. Without the guard, modules of one class share code if only parameters tell them apart: layers
    that are compiled one by one, two instances of a model.
    """
    if not observe.is_in_frame():
        return
    for source in _modules():
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _modules() -> list[Source]:
    """Return the sources of the frame's module arguments, plus the outermost modules it reads."""
    context = TracingContext.get()
    guarded = [guard.originating_source for guard in context.guards_context.dynamo_guards]
    read = [found for source in guarded for found in _outermost_module(source)]
    given = [LocalSource(name) for name, value in _frame().f_locals.items() if isinstance(value, nn.Module)]
    return list(dict.fromkeys([*given, *read]))


def is_cut_into_buckets() -> bool:
    """Return True if the graph under compilation is a part of one that DistributedDataParallel's buckets cut. Each part is called with fake
    tensors once it is compiled, and its code returns fake tensors at its first call."""
    context = TracingContext.try_get()
    return context is not None and context.fakify_first_call


def was_given(*names: str) -> bool:
    """Return True if the frame under compilation has arguments of all these names in one dict that it passes on."""
    if not observe.is_in_frame():
        return False
    dicts = (value for value in _frame().f_locals.values() if isinstance(value, dict))
    return any(all(name in given for name in names) for given in dicts)


T = TypeVar("T")


def once_per_compilation(make: Callable[[], T]) -> T:
    """Return `make()`, computed once a compilation. Outside of one it is always new."""
    context = TracingContext.try_get()
    if context is None:
        return make()
    kept: dict[Callable[[], T], T] = context.__dict__.setdefault("attn_compiler", {})
    if make not in kept:
        kept[make] = make()
    return kept[make]


def given_tensor(placeholder: fx.Node) -> torch.Tensor | None:
    """Return the real tensor that the current frame was called with for an input of Dynamo's graph, if there is one."""
    argument = placeholder.meta.get("grapharg")
    if argument is None or argument.source is None or observe.is_ahead_of_time():
        return None
    try:
        found = argument.example
    except AssertionError:  # It was freed.
        return None
    return found if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) else None


def is_of_module(placeholder: fx.Node) -> bool:
    """Return True if an input of Dynamo's graph is a tensor of a module of the frame."""
    argument = placeholder.meta.get("grapharg")
    return argument is not None and next(_outermost_module(argument.source), None) is not None


def key_of(placeholder: fx.Node) -> str | None:
    """Return the key of a graph input in a dict that the frame was called with, such as **kwargs."""
    argument = placeholder.meta.get("grapharg")
    source = None if argument is None else argument.source
    key = source.index if isinstance(source, DictGetItemSource) else None
    return key if isinstance(key, str) and key.isidentifier() and not is_of_module(placeholder) else None


#: the most values of Known of one input that a function is compiled for, a compilation each; PyTorch gives up after 8
_MOST_MEANINGS = 4

#: values of Known that compilations of a function relied on, by input
_relied_on: weakref.WeakKeyDictionary[CodeType, dict[str, list[Known]]] = weakref.WeakKeyDictionary()


def may_rely_on(placeholder: fx.Node, known: Known) -> bool:
    """Return True if the current compilation may be specialised to what is known of this input.

    Not after _MOST_MEANINGS other values: code that relies on none serves all remaining calls. Without it PyTorch would reach its limit of
    compilations, and run the function uncompiled, or raise (fullgraph=True).
    """
    if not observe.is_in_frame():
        return not observe.is_ahead_of_time()
    meant = _relied_on.setdefault(_frame().f_code, {}).setdefault(placeholder.name, [])
    if known not in meant and len(meant) < _MOST_MEANINGS:
        meant.append(known)
    return known in meant


def has_room_for(placeholder: fx.Node, known: Known) -> bool:
    """Return the answer of `may_rely_on`, without relying on it."""
    if not observe.is_in_frame():
        return not observe.is_ahead_of_time()
    meant = _relied_on.get(_frame().f_code, {}).get(placeholder.name, [])
    return known in meant or len(meant) < _MOST_MEANINGS


def forget_meanings() -> None:
    """Forget the values relied on; all compilations are forgotten, too."""
    _relied_on.clear()


def guard_known(placeholder: fx.Node, known: Known) -> None:
    """Guard the current compilation on what is known of this input (known_masks.py)."""
    if not observe.is_in_frame():
        return

    def is_known(value: object) -> bool:
        found = known_masks.recall(value)
        return found is known or found == known

    def check(builder: Any, guard: Any) -> None:
        words = [f"attn_compiler knows {guard.name} to be {known.words}"]
        manager = builder.get_guard_manager(guard)
        try:
            manager.add_lambda_guard(is_known, words, guard.user_stack)
        except TypeError:  # PyTorch before 2.12 has no last argument
            manager.add_lambda_guard(is_known, words)

    install_guard(placeholder.meta["grapharg"].source.make_guard(check))


def owner_of(stack: Mapping[str, tuple[str, Any]] | None) -> nn.Module | CodeType | None:
    """Return the module of a node of the current graph, or a function's code without a module. stack: the node's `nn_module_stack`. A node
    without one is from the frame itself. None if unknown, such as outside of a compilation."""
    if not observe.is_in_frame():
        return None
    frame = _frame()
    if not stack:
        modules = [value for value in frame.f_locals.values() if isinstance(value, nn.Module)]
        code: CodeType | None = None if _modules() else frame.f_code
        return modules[0] if len(modules) == 1 else code
    key, (path, _) = list(stack.items())[-1]
    found = _at(path, frame)
    # Dynamo's key is the module's identity, with "@2" for the second call.
    identity = key.partition("@")[0]
    is_it = isinstance(found, nn.Module) and (not identity.isdigit() or int(identity) == id(found))
    return found if is_it else None


#: one step of a path such as L['self'].layers.0 or G['models'][1].layer
_STEP = re.compile(r"\[['\"](?P<name>[^'\"]*)['\"]\]|\[(?P<index>\d+)\]|\.(?P<attribute>\w+)")


def _at(path: str, frame: Any) -> Any:
    """Return the object at a path of Dynamo's names in a frame; None if there is none."""
    found: Any = {"L": frame.f_locals, "G": frame.f_globals}.get(path[:1])
    steps = list(_STEP.finditer(path, 1))
    if "".join(step.group() for step in steps) != path[1:]:
        return None
    for step in steps:
        name, index, attribute = step.group("name", "index", "attribute")
        try:
            found = getattr(found, attribute) if attribute else found[name if index is None else int(index)]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return found


def is_whole(gm: fx.GraphModule) -> bool:
    """Return True if Dynamo's graph is all of its frame, without graph breaks. To be asked while it is compiled."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return True
    return not reason.graph_break and not _frame().f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


class NotCaptured(Exception):
    """A frame can't be traced with other inputs, with the reason. Internal."""


def captured_with(tensors: Mapping[torch.Tensor, torch.Tensor]) -> fx.GraphModule:
    """Trace the current frame with other tensors, as one graph of known sizes. Nothing of it is kept. tensors: by those that the frame was
    given. Raises NotCaptured."""
    if not observe.is_in_frame():
        raise NotCaptured("no function is compiled")
    frame = _frame()
    exchange = _Exchange({id(old): new for old, new in tensors.items()})
    try:
        given = {name: exchange.exchanged(value) for name, value in frame.f_locals.items()}
    except RecursionError as error:
        raise NotCaptured("an input is deep within objects") from error
    if exchange.found != exchange.others.keys():
        raise NotCaptured("an input is in an object that is not looked into")
    closure: Any = frame.closure or ()
    info = convert_frame.FrameInfo(frame.f_code, frame.f_globals, given, frame.f_builtins, closure, None, None)
    try:
        with (
            config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True),
            _sizes_as_seen(),
            torch.set_grad_enabled(torch.is_grad_enabled()),
            warnings.catch_warnings(action="ignore"),
        ):
            captured = convert_frame._fullgraph_capture_frame(info).backend_input
    except Exception as error:
        raise NotCaptured(" ".join(described(error).split())[:200]) from error
    if captured is None:
        raise NotCaptured("no graph")
    return captured.graph_module


@contextlib.contextmanager
def _sizes_as_seen() -> Iterator[None]:
    """Restore Dynamo's memory of seen sizes after the block: a second size would be a symbol from then on."""
    states = pgo.get_code_state()
    seen = {code: dict(state.automatic_dynamic) for code, state in states.items()}
    try:
        yield
    finally:
        for code, state in states.items():
            state.automatic_dynamic.clear()
            state.automatic_dynamic.update(seen.get(code, {}))


#: classes that are not searched: parts of the model, or without inputs
_CLOSED = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, str, bytes, int, float, complex)

#: slots without state
_NO_STATE = ("__dict__", "__weakref__")


class _Exchange:
    """Copy a frame's arguments with other tensors, in objects of any class; objects without such tensors stay. others: replacements by the
    id of the original. found: ids of those that were met."""

    def __init__(self, others: Mapping[int, torch.Tensor]) -> None:
        self.others = others
        self.found: set[int] = set()
        self._made: dict[int, Any] = {}
        self._under_way: set[int] = set()
        self._circles: set[int] = set()

    def exchanged(self, value: Any) -> Any:
        """Return the value with its tensors exchanged. Raises NotCaptured for an object that holds itself and one of the tensors."""
        if id(value) in self.others:
            self.found.add(id(value))
            return self.others[id(value)]
        if isinstance(value, _CLOSED):
            return value
        if id(value) in self._under_way:
            self._circles.add(id(value))
            return value
        if id(value) not in self._made:
            self._under_way.add(id(value))
            made = self._copied(value)
            self._under_way.remove(id(value))
            if made is not value and id(value) in self._circles:
                raise NotCaptured(f"a {type(value).__name__} that is given holds itself")
            self._made[id(value)] = made
        return self._made[id(value)]

    def _copied(self, value: Any) -> Any:
        items = _items(value)
        attributes = _attributes(value)
        new_items = {key: self.exchanged(item) for key, item in items.items()}
        new_attributes = {name: self.exchanged(item) for name, item in attributes.items()}
        if _are_same(items, new_items) and _are_same(attributes, new_attributes):
            return value
        made: Any = tuple.__new__(type(value), new_items.values()) if isinstance(value, tuple) else copy.copy(value)
        for key, item in new_items.items():
            if isinstance(value, dict):
                dict.__setitem__(made, key, item)
            elif isinstance(value, list):
                list.__setitem__(made, key, item)
        for name, item in new_attributes.items():
            object.__setattr__(made, name, item)
        return made


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(dict.items(value))
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in _names(cls.__dict__.get("__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if name not in _NO_STATE and hasattr(value, name)}
    return found | dict(getattr(value, "__dict__", {}))


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _are_same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    return all(after[key] is item for key, item in before.items())


#: by which Dynamo traces a checkpoint that stores something outside of it. The backward does not store it again, as an eager one does
STORING_ONCE = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def storing_once(call: Callable[..., T]) -> Callable[..., T]:
    """Set that switch while the function is called, where this PyTorch has it."""
    if not hasattr(config, STORING_ONCE):
        return call

    @functools.wraps(call)
    def storing(*args: Any, **kwargs: Any) -> T:
        # A patch of its own for each call: PyTorch 2.11 refuses one that is entered again before it was left.
        with config.patch({STORING_ONCE: True}):
            return call(*args, **kwargs)

    return storing


def recompilation_reason() -> str | None:
    """Return the guard of the frame's earlier code that failed for this call; None for its first compilation."""
    context = get_metrics_context()
    if CompileContext.current_compile_id() is None or not context.in_progress():
        return None
    found = context._metrics.get("recompile_reason")
    return None if found is None else " ".join(str(found).split())[:300]


def start_over() -> Callable[[], None] | None:
    """Return a function that has the current frame compiled anew before its next call, all of its code; None outside of one."""
    if not observe.is_in_frame():
        return None
    code = weakref.ref(_frame().f_code)

    def again() -> None:
        found = code()
        if found is not None:
            reset_code(found)

    return again


def is_last_recompilation() -> bool:
    """Return True if Dynamo would run the current frame uncompiled the next time that its guards fail. It counts the compilations for the
    same modules. False outside of a compilation."""
    if CompileContext.current_compile_id() is None:
        return False
    frame = _frame()
    if frame.one_graph or config.fail_on_recompile_limit_hit:
        return False
    entries = _debug_get_cache_entry_list(frame.f_code)
    after = sum(_has_same_id_matched_objs(frame, entry) for entry in entries) + 1
    return bool(after >= config.recompile_limit or len(entries) + 1 >= config.accumulated_recompile_limit)


def _frame() -> Any:
    """Return the translator of the frame under compilation, with the values that it was called with."""
    return InstructionTranslator.current_tx().output.root_tx


def _outermost_module(source: Source | None) -> Iterator[Source]:
    """Yield the source of a value's outermost module; nothing if it belongs to none."""
    found = None
    while source is not None:
        if isinstance(source, NNModuleSource):
            found = source.base
        source = getattr(source, "base", None)
    if found is not None:
        yield found
