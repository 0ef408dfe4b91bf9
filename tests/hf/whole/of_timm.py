"""timm's registry: of each module models that together hold its classes that attend, at two sizes of images and of batches."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.hf.packages import import_package
from tests.hf.today.running import Row
from tests.hf.whole.building import run
from tests.hf.whole.files import attending
from tests.hf.whole.running import Subject, not_built

#: models of a module that are built
_MOST_MODELS = 12
_BATCHES = {"first": 2, "second": 3}
_LARGER = 1.5


def modules() -> list[str]:
    """Modules of the registry that have models with an attention, by what their text says or what they import."""
    timm = import_package("timm")
    return [name for name in timm.list_modules() if timm.list_models(module=name)]


@functools.cache
def _attending() -> frozenset[tuple[str, str]]:
    """(module, class) of everything in timm that attends."""
    root = Path(importlib.import_module("timm").__file__ or "").parent
    paths = [*root.glob("models/*.py"), *root.glob("layers/*.py")]
    return frozenset(
        (f"timm.{path.parent.name}.{path.stem}", name)
        for path in paths
        for name in attending(path.read_text(encoding="utf-8"))
    )


def rows(module: str) -> Iterator[Row]:
    """A row a model, way of attending, size of images and size of batches; none for a module without an attention."""
    own = {(home, name) for home, name in _attending() if home == f"timm.models.{module}"}
    seen: set[tuple[str, str]] = set()
    why: dict[str, str] = {}
    for name in import_package("timm").list_models(module=module)[:_MOST_MODELS]:
        if own and own <= seen:
            break
        try:
            model = _build(name, fused=False, size=None)
            held = {(type(part).__module__, type(part).__name__) for part in model.modules()} & _attending()
            if held <= seen:
                continue
            _, total = run(model, {"x": _images(model, 2, None)}, set())
            if total:
                yield from _of_model(f"{module} {name}", name, total)
            seen |= held
        except Exception as error:  # noqa: BLE001 - one broken model is a row of the table, not the end of it
            why[name] = f"{type(error).__name__}: {error}"
    yield from (not_built(f"{module} {name}", said) for name, said in why.items())


def _of_model(shown: str, name: str, total: int) -> Iterator[Row]:
    """At its own size of images, and at a larger one where it takes that."""
    own = _side(_build(name, fused=True, size=None))
    larger = int(own * _LARGER) // 32 * 32
    for size in (None, larger):
        if size is not None and not _takes(name, size):
            yield not_built(f"{shown} {size}", "images of another size are refused")
            continue
        for fused in (True, False):
            build = functools.partial(_build, name, fused=fused, size=size)
            inputs: Any = {
                label: lambda model, batch=batch: {"x": _images(model, batch, size)}  # noqa: B023 - called in this turn
                for label, batch in _BATCHES.items()
            }
            call = f"{'sdpa' if fused else 'eager'}, {'own' if size is None else 'larger'} images"
            yield from Subject(name=shown, call=call, build=build, inputs=inputs, totals=(total, total)).rows()


def _takes(name: str, size: int) -> bool:
    with contextlib.suppress(Exception):
        model = _build(name, fused=False, size=size)
        run(model, {"x": _images(model, 2, size)}, set())
        return True
    return False


def _build(name: str, *, fused: bool, size: int | None) -> nn.Module:
    """With two blocks of those that are alike. size: of images, where it is not the model's own."""
    timm = import_package("timm")
    timm.layers.set_fused_attn(fused)
    with torch.device("meta"):
        try:
            model: nn.Module = timm.create_model(name, **({} if size is None else {"img_size": size}))
        except TypeError:
            model = timm.create_model(name)
    for part in list(model.modules()):
        if isinstance(part, (nn.Sequential, nn.ModuleList)):
            _cut(part)
    return model.to(device="meta", dtype=torch.bfloat16).eval()


def _cut(blocks: Any) -> None:
    """Two of several blocks that are one class with parameters of the same shapes."""
    shapes = [[parameter.shape for parameter in block.parameters()] for block in blocks]
    if len(blocks) > 2 and shapes[0] and all(type(block) is type(blocks[0]) for block in blocks):  # noqa: SIM102
        if all(one == shapes[0] for one in shapes):
            del blocks[2:]


def _side(model: Any) -> int:
    return int(model.default_cfg["input_size"][-1])


def _images(model: Any, batch: int, size: int | None) -> torch.Tensor:
    side = size or _side(model)
    return torch.zeros(batch, model.default_cfg["input_size"][0], side, side, dtype=torch.bfloat16, device="meta")
