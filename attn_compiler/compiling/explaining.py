"""`explain`: the backend's decision for each attention of a model, found by running the model once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from attn_compiler.compiling import left_to_python, linear_attention
from attn_compiler.options.options import Options, check_lowering_names, split_options
from attn_compiler.reasons.errors import AttnCompilerError, CannotCompare
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.torch_private import compat as torch_compat, known_masks, observe as torch_observe

if TYPE_CHECKING:
    from attn_compiler.passes import Rewritten


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Reports:
    """Run `model(*args, **kwargs)` once and report every attention in it: the match, its replacement, and the reasons.

    The result prints as a table and has `to_json()`; there is one report for each graph, so graph breaks give several.

    model: a module or function, compiled already or not; the arguments go to it.
    options: as torch.compile takes them: explain(model, x, options={"verify": True}). A model that has a parameter of that name gets it
        instead; use `explainer` then, and for mode and dynamic. Without options, a module compiled by torch.compile for this backend is
        explained with the options of its own compilation.

    The run is real: it happens in the caller's grad mode, mutates caches that are passed in, and draws random numbers. Buffers of a module
    in training, such as the statistics of a batch norm, are restored afterwards. The rewritten graphs run eagerly, without Inductor.
    Nothing compiled is kept, and a later torch.compile of the same model starts as if explain had not been called. Only torch 2.11 compiles
    again the graphs that it had compiled before.
    """
    settings, kwargs = settings_and_inputs(model, kwargs)
    return explainer(**settings)(model, *args, **kwargs)


def settings_and_inputs(model: Callable[..., Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a call's keyword arguments into options=, mode= and dynamic=, and those that go to the model."""
    settings, kwargs = torch_observe.settings_of(model, "attn_compiler"), dict(given)
    if "options" in kwargs and not _has_options(torch_observe.original_of(model)):
        settings = {"dynamic": settings.get("dynamic"), "options": kwargs.pop("options")}
    return settings, kwargs


def checked_settings(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Return our options, and Inductor's. Raises UnknownOption or InvalidOption."""
    from attn_compiler import lowerings

    own, patches = split_options(mode, options)
    check_lowering_names(own, lambda: lowerings.names())
    return own, patches


def runnable(model: Callable[..., Any], call: str) -> Callable[..., Any]:
    """Return the model that torch.compile was given, or the model itself. Raises CannotCompare if it is not callable."""
    if not callable(model):
        raise CannotCompare(
            call=call,
            rule="the model comes first, a module or a function, and then its inputs",
            observed=f"{model!r} ({type(model).__name__})",
            remedy=f"Call attn_compiler.{call}(model, *args, **kwargs)",
        )
    return torch_observe.original_of(model)


def _has_options(model: Callable[..., Any]) -> bool:
    called = getattr(model, "forward", model)
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        # A C function without a signature.
        return False
    return "options" in parameters


def explainer(
    *, options: Mapping[str, Any] | None = None, mode: str | None = None, dynamic: bool | None = None
) -> Callable[..., Reports]:
    """`explain` for a torch.compile with these settings: explainer(options={...}, dynamic=True)(model, *args, **kwargs).

    options, mode, dynamic: as torch.compile takes them; of options, Inductor's keys are checked and have no effect.
    Raises UnknownOption or InvalidOption at once.
    """
    own, _ = checked_settings(mode, options)

    def explain_with_settings(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Reports:
        found: list[Report] = []

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            rewritten = _rewrite(gm, own)
            found.append(rewritten.report)
            return known_masks.wrap(_runnable(gm, rewritten), rewritten.known, rewritten.read)

        backend.own_options = own  # type: ignore[attr-defined]
        linear_attention.watch(backend)

        def tell(left: torch_observe.Break) -> None:
            told = left_to_python.report(left)
            if told is not None:
                found.append(told)

        original = runnable(model, "explain")
        with (
            _buffers_kept(original),
            torch_observe.nothing_left_behind(backend),
            torch_observe.uncompiled_modules(original),
            torch_observe.breaks_told(backend, tell),
        ):
            torch_observe.compile_apart(original, backend, dynamic)(*args, **kwargs)
        return Reports(found)

    return explain_with_settings


@contextlib.contextmanager
def _buffers_kept(model: Callable[..., Any]) -> Iterator[None]:
    """Undo writes to buffers of modules in training, and replacements of them."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) and model.training else []
    before = [(module._buffers, dict(module._buffers)) for module in modules]
    tensors = [x for _, given in before for x in given.values() if x is not None and not x.is_inference()]
    numbers = [(x, x.detach().clone()) for x in tensors]
    try:
        yield
    finally:
        for own, given in before:
            own.update(given)
        with torch.no_grad():
            for x, held in numbers:
                # A batch norm writes its statistics without counting the write. An unwritten buffer keeps its version.
                if not torch.equal(x, held):
                    x.copy_(held)


def _runnable(gm: fx.GraphModule, rewritten: Rewritten) -> Callable[..., Any]:
    """Return the function of the model's output: for a packed graph, which takes further inputs, the model's own graph."""
    from attn_compiler.passes.unpad.outcome import Packed

    packed = rewritten.outcome(Packed)
    if packed is None:
        return gm.forward
    packed.give_up()
    return packed.original.forward


def _rewrite(gm: fx.GraphModule, options: Options) -> Rewritten:
    from attn_compiler.passes import rewrite

    try:
        rewritten = rewrite(gm, options)
    except AttnCompilerError as error:
        raise torch_compat.unwrapped(error) from error.__cause__
    for module in torch_compat.graph_modules(gm):
        module.recompile()
    return rewritten
