"""`compare`: this backend, Inductor's own and the uncompiled model on the same inputs, in one process and in turns.

A model that embeds sentences by its `encode`, such as a SentenceTransformer: tokenizer, batches and pooling are timed, too.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attn_compiler.compiling.comparing import sides
from attn_compiler.compiling.comparing.comparison import Comparison
from attn_compiler.compiling.comparing.kept import HeldState, Inputs, modules_of
from attn_compiler.compiling.comparing.sides import EAGER, INDUCTOR, OURS, FirstStep, Task
from attn_compiler.compiling.explaining import checked_settings, runnable, settings_and_inputs
from attn_compiler.options.options import own_name
from attn_compiler.reporting import doctor, publishing
from attn_compiler.reporting.report import Reports
from attn_compiler.torch_private import inductor as torch_inductor, observe as torch_observe

#: imported before anything is timed, so that no side pays for it; the first is what our backend imports at its first graph
_IMPORTED = (
    "attn_compiler.compiling.backend",
    "attn_compiler.lowerings",
    "attn_compiler.passes",
    "torch._inductor.compile_fx",
)


def compare(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Comparison:
    """Time `model(*args, **kwargs)` compiled by this backend, by Inductor, and uncompiled, and measure how far the results are apart.

    The result prints as a table and has `to_json()`: attach it to a report about speed. It measures a forward without gradients;
    `comparer(training=True)(model, ...)` makes it a training step.

    model: a module or function, compiled already or not; the arguments go to it. A SentenceTransformer is given a list of sentences: its
    `encode` is timed, with further arguments of it by name.
    options: as for `explain`.

    All run in this process, step by step in turn. The first step compiles, and it finds nothing on disk. Afterwards the model is as it was,
    with its parameters, buffers, attributes and gradients. So are random number generators and Dynamo's code. Inputs are copied first. A
    copy of the parameters is held in the host's memory meanwhile.

    A side that fails is a row with the reason. Raises CannotCompare for a model that can't be run at all.
    """
    settings, kwargs = settings_and_inputs(model, kwargs)
    return comparer(**settings)(model, *args, **kwargs)


def comparer(
    *,
    training: bool = False,
    seconds: float = 10.0,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Comparison]:
    """`compare` with these settings: comparer(training=True)(model, *args, **kwargs).

    training: time forward, loss and backward, and compare gradients too. The loss is the model's own, if its output has one called `loss`,
        else the outputs' product with fixed noise. The optimizer is left out, and train() or eval() is the caller's.
    seconds: how long steps are timed, at least; compiling comes before.
    options, mode, dynamic: as torch.compile takes them. Inductor gets those options that are its own.
    Raises UnknownOption or InvalidOption at once.
    """
    _, patches = checked_settings(mode, options)
    ours = {key: value for key, value in (options or {}).items() if own_name(key) is not None} | patches

    def compare_with_settings(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Comparison:
        original = runnable(model, "compare")
        for name in _IMPORTED:
            importlib.import_module(name)
        modules = modules_of(original)
        encoding = encoding_of(original, args, kwargs)
        inputs = Inputs(args, kwargs) if encoding is None else Inputs((), {})
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            torch_observe.nothing_left_behind(),
            torch_observe.uncompiled_modules(original),
            _kept(modules) as kept,
        ):
            task = Task(
                inputs=inputs,
                kept=kept,
                names=_names(original, kept.tensors),
                training=training,
                devices=_devices([*kept.tensors, *inputs.tensors]),
            )
            _warm_up(task, folder)
            by_options = ((INDUCTOR, patches), (OURS, ours))
            if encoding is None:
                models = {EAGER: original} | {
                    name: torch_observe.compile_apart(original, name, dynamic, given) for name, given in by_options
                }
            else:
                models = {EAGER: encoding.as_called(None)} | {
                    name: encoding.compiled(name, dynamic, given) for name, given in by_options
                }
            with publishing.collected() as reports:
                firsts = _firsts(models, task, folder)
                timed = sides.in_turns(firsts, models, task, seconds=seconds)
        if all(first.side.failure is not None for first in timed):
            # The model itself raises it; no compiler is to blame.
            raise next(first.error for first in timed if first.error is not None)
        return Comparison(
            model=_name(original),
            inputs=tuple(inputs.words) if encoding is None else tuple(f"{name}={x!r}" for name, x in kwargs.items()),
            training=training,
            modes=_modes(modules),
            settings={
                "mode": mode,
                "dynamic": dynamic,
                "options": {key: repr(x) for key, x in (options or {}).items()},
            },
            facts=doctor.machine_facts(),
            sides=tuple(sides.compared(timed, inputs.padding)),
            drew_random_numbers=any(first.drew for first in timed),
            sentences=0 if encoding is None else len(encoding.sentences),
            reports=Reports(reports),
        )

    return compare_with_settings


@contextlib.contextmanager
def _kept(modules: Sequence[nn.Module]) -> Iterator[HeldState]:
    kept = HeldState(modules)
    try:
        yield kept
    finally:
        kept.give_back()
        kept.give_back_gradients()


def _firsts(models: Mapping[str, Callable[..., Any]], task: Task, folder: str) -> list[FirstStep]:
    """Run each side's first step by itself: a side does not profit from code or sizes of the one before. folder: for compiled code."""
    firsts = []
    for name, model in models.items():
        with torch_observe.sizes_forgotten(), torch_inductor.nothing_on_disk(folder):
            first = sides.first_step(name, model, task)
            firsts.append(sides.with_memory(first, model, task))
    return firsts


def _warm_up(task: Task, folder: str) -> None:
    """Compile an attention, so that no side pays for work once a process, such as imports and finding the C++ compiler. Failures are left
    to the sides, which report them."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sin()

    x = torch.zeros(1, 1, 16, 16, device=task.timed_on, requires_grad=task.training)
    small = Task(inputs=Inputs([x], {}), kept=HeldState([]), names={}, training=task.training, devices=task.devices)
    with publishing.collected():
        _firsts({OURS: torch_observe.compile_apart(attention, OURS, False)}, small, folder)


def _names(model: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> dict[int, str]:
    """Map tensors by identity to their names in the model, else to a number."""
    named = {id(x): name for name, x in model.named_parameters()} if isinstance(model, nn.Module) else {}
    return {id(x): named.get(id(x), f"tensor {i}") for i, x in enumerate(tensors)}


def _devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return list(dict.fromkeys([*(x.device for x in tensors), torch.device("cpu")]))


def _modes(modules: Sequence[nn.Module]) -> str:
    modes = {module.training for module in modules}
    if len(modes) == 2:
        return "in train() and eval() by parts"
    return "".join("in train()" if mode else "in eval()" for mode in modes)


def _name(model: Callable[..., Any]) -> str:
    return (
        type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__qualname__", type(model).__name__)
    )


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A call `model.encode(sentences, **settings)`."""

    model: Any
    sentences: tuple[str, ...]
    settings: Mapping[str, Any]

    def as_called(self, call: Callable[..., Any] | None) -> Callable[[], Any]:
        """Return the call with `call` in place of the model's own; None: as it was written."""

        def encode() -> Any:
            with torch_observe.called_as(self.model, call):
                return self.model.encode(list(self.sentences), **self.settings)

        return encode

    def compiled(
        self, backend: str, dynamic: bool | None, options: Mapping[str, Any] | None = None
    ) -> Callable[[], Any]:
        """Return the call after `model.compile(backend=...)`."""
        return self.as_called(torch_observe.compile_calls(self.model, backend, dynamic, options))


def encoding_of(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Encoding | None:
    """Return the call of `encode` if a module that has one is given a list of sentences; else None."""
    if len(args) != 1 or not isinstance(model, nn.Module) or not callable(getattr(model, "encode", None)):
        return None
    (sentences,) = args
    if not isinstance(sentences, list | tuple) or not sentences or not all(isinstance(x, str) for x in sentences):
        return None
    settings = {"convert_to_tensor": True, "show_progress_bar": False, **kwargs}
    return Encoding(model=model, sentences=tuple(sentences), settings=settings)
