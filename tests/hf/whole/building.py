"""Chooses models of a file that together run each class of it that attends."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hf.counting import AttentionCounter
from tests.hf.family import set_dropout
from tests.hf.today.model import Kwargs
from tests.hf.whole.feeding import FIRST, READ, SECONDS, NoInput, Size, choices
from tests.hf.whole.files import File
from tests.hf.whole.settings import SETTINGS
from tests.hf.whole.shrinking import shrink

#: parameters of a model on the CPU
_MOST_PARAMETERS = 1_500_000_000
#: arguments that are tried there
_MOST_ON_CPU = 4


class Without(Exception):
    """A model runs, and not the class that is looked for."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model that runs. cls: its class. short: with few layers. choice: which arguments of those that are tried.

    attending: classes of the file that ran. totals: attentions of a run, for each size.
    """

    module: str
    cls: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "meta"
    short: bool = True
    dtype: torch.dtype = torch.bfloat16
    choice: int = 0
    second: Size = SECONDS[0]
    attending: frozenset[str] = frozenset()
    totals: tuple[int, ...] = ()

    @property
    def _class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.cls)

    @property
    def impls(self) -> tuple[str, ...]:
        return ("sdpa", "eager") if self._class._supports_sdpa and self._is_built("sdpa") else ("eager",)

    def _is_built(self, impl: str) -> bool:
        """Whether every part takes this attention: a backbone may not."""
        try:
            self.on_meta().build(impl)
        except ValueError:
            return False
        return True

    def build(self, impl: str) -> nn.Module:
        config = self._class.config_class(**self.settings)
        if self.short:
            shrink(config, few_words=self.device == "cpu")
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self._class._from_config(config, attn_implementation=impl)
        model = model.to(device=self.device, dtype=self.dtype).eval()
        set_dropout(model, 0.0)
        return model  # type: ignore[no-any-return]

    def inputs(self, model: nn.Module, size: Size, *, padded: bool) -> Kwargs:
        return next(itertools.islice(choices(model, size, padded=padded), self.choice, None))

    def on_meta(self) -> Built:
        return dataclasses.replace(self, device="meta")

    def held(self, model: nn.Module, names: Sequence[str]) -> set[str]:
        """Which of these classes of the file the model has."""
        return {type(part).__name__ for part in model.modules() if type(part).__module__ == self.module} & set(names)

    def tried(self, model: nn.Module, names: set[str]) -> Built:
        """With arguments that the model runs with. Raises what it raised with the first."""
        raised: Exception | None = None
        given: Kwargs
        tried = itertools.islice(choices(model, FIRST), None if self.device == "meta" else _MOST_ON_CPU)
        for index, given in enumerate(tried):
            if self.device == "meta" and READ & given.keys():
                raise NotImplementedError("numbers of its inputs are read")
            try:
                ran, total = run(model, given, names)
            except Exception as error:  # noqa: BLE001 - the next may be right
                raised = raised or error
                continue
            raised = raised or Without("without it")
            if ran:
                return dataclasses.replace(self, choice=index, attending=frozenset(ran))._with_second(model, total)
        raise raised or Without("without it")

    def _with_second(self, model: nn.Module, total: int) -> Built:
        for size in SECONDS:
            try:
                _, second = run(model, self.inputs(model, size, padded=False), set())
            except Exception:  # noqa: BLE001 - the next may be right
                continue
            return dataclasses.replace(self, second=size, totals=(total, second))
        return dataclasses.replace(self, second=FIRST, totals=(total, total))


def cover(file: File) -> tuple[list[Built], dict[str, str]]:
    """Models of the file, and for each class that none of them runs why."""
    module = importlib.import_module(file.module)
    # A file's classes for PyTorch's attention run where those of the same name without it do.
    left = {name: "" for name in file.attending if name.replace("Sdpa", "") not in {*file.attending} - {name}}
    found: list[Built] = []
    for settings in ({}, *SETTINGS.get(file.name, ())):
        for cls in _candidates(module):
            if left:
                found += _cover(Built(module=file.module, cls=cls.__name__, settings=settings), left)
    return found, {name: why or "no model of the file has it" for name, why in left.items()}


#: what is tried next where what was raised says so: a CPU for numbers, all layers for a rest of them, float32 for a mix of dtypes
_TRIALS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("", {}),
    (r"meta|numbers of|no data|grouped_mm|strides should", {"device": "cpu"}),
    (r"IndexError|index|non-empty|not built", {"short": False}),
    (r"dtype|scalar type|BFloat16", {"device": "cpu", "dtype": torch.float32}),
)


def _cover(built: Built, left: dict[str, str]) -> Iterator[Built]:
    """The model as it first runs one of the classes that are left."""
    raised = ""
    for sign, trial in _TRIALS:
        if not re.search(sign, raised):
            continue
        placed = dataclasses.replace(built, **trial)
        try:
            model = placed.on_meta().build("eager")
        except Exception as error:  # noqa: BLE001 - one that is not built is told
            raised = f"not built {error}"
            _tell(left, left, placed, "is not built", error)
            continue
        held = placed.held(model, list(left))
        if not held:
            raised = "not built with so few layers"
            continue
        if placed.device == "cpu" and sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
            continue
        try:
            ready = placed.tried(placed.build("eager") if placed.device == "cpu" else model, held)
        except Without:
            _tell(left, held, placed, "runs", Without("without it"))
            return
        except NoInput as error:
            _tell(left, held, placed, "does not run", error)
            return
        except Exception as error:  # noqa: BLE001 - as above
            raised = f"{type(error).__name__} {error}"
            _tell(left, held, placed, "does not run", error)
            continue
        for name in ready.attending:
            left.pop(name, None)
        yield ready
        return


def _tell(left: dict[str, str], names: Any, built: Built, what: str, error: Exception) -> None:
    """Keep the reason that says most: a model that does not run, before one that is not built or runs without the class."""
    for name in names:
        if not left[name] or (what == "does not run" and what not in left[name]):
            left[name] = f"{built.cls} {what} on {built.device}: {type(error).__name__}: {error}"


def _candidates(module: Any) -> list[Any]:
    """Models of the file: those without a head first, and of these the larger ones."""
    from transformers import PreTrainedModel

    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and value.config_class is not None
        and "PreTrainedModel" not in value.__name__
    ]
    return sorted(classes, key=lambda cls: ("For" in cls.__name__, not cls.__name__.endswith("Model")))


def run(model: nn.Module, given: Kwargs, names: set[str]) -> tuple[set[str], int]:
    """Which of these classes an eager run without gradients calls, and how many attentions it has."""
    counter = AttentionCounter()
    with _told(names) as ran, counter, torch.no_grad(), Guessing():
        model(**given)
    return ran, counter.sites


class Guessing(TorchDispatchMode):
    """Says what a number of a meta tensor is, which has none: true, or zero. No model under torch.compile is told so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            dtype = args[0].dtype
            return True if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))


@contextmanager
def _told(names: set[str]) -> Iterator[set[str]]:
    """The names of classes that ran."""
    ran: set[str] = set()

    def hook(module: nn.Module, _: Any) -> None:
        if type(module).__name__ in names:
            ran.add(type(module).__name__)

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield ran
    finally:
        handle.remove()
