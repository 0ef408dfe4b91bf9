"""Rows of a model at two sizes, the second of which PyTorch has as symbols, with PyTorch's attention and with plain ops."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attn_compiler.torch_private import observe as torch_observe
from tests.hf.today.model import Call, Kwargs, Model
from tests.hf.today.running import Row, Watching, described, failed
from tests.hf.whole.building import Built, cover
from tests.hf.whole.feeding import FIRST
from tests.hf.whole.files import File


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model in one way of attending. name: in the table. call: the way, in it. inputs: by the name of a size, in their order.

    totals: attentions that an eager run has, for each of them.
    """

    name: str
    call: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Callable[[nn.Module], Kwargs]]
    totals: tuple[int, ...]
    device: str = "meta"

    def told(self, status: str, detail: str, size: str = "") -> Row:
        return failed(self._shown, self._call(size), status, detail)

    @property
    def _shown(self) -> Model:
        return Model(name=self.name, package="", make=lambda _: nn.Identity(), calls=(), device=self.device)

    def _call(self, size: str) -> Call:
        return Call(name=f"{self.call}, {size}" if size else self.call, inputs=lambda _: {})

    def rows(self) -> Iterator[Row]:
        """A row a size. What the model or we raise is a row, too."""
        torch._dynamo.reset()
        watching = Watching()
        try:
            model = self.build()
            compiled: Any = torch.compile(model, backend=watching)
            for (size, given), total in zip(self.inputs.items(), self.totals, strict=True):
                try:
                    row = self._row(compiled, given(model), watching, size)
                    yield dataclasses.replace(row, total=max(row.total, total))
                except Exception as error:  # noqa: BLE001 - one broken model is a row of the table, not the end of it
                    yield self.told("error", f"{type(error).__name__}: {error}", size)
        finally:
            torch._dynamo.reset()

    def _row(self, compiled: Any, given: Kwargs, watching: Watching, size: str) -> Row:
        started = time.perf_counter()
        watching.begin()
        with torch.no_grad(), torch_observe.breaks_told(watching, watching.left):
            compiled(**given)
        return described(self._shown, self._call(size), watching, time.perf_counter() - started)


def not_built(name: str, why: str) -> Row:
    return Subject(name=name, call="not built", build=nn.Identity, inputs={}, totals=()).told("unavailable", why)


def rows_of_file(file: File) -> Iterator[Row]:
    """A row for each model, implementation and size, and one for each class that no model runs."""
    found, left = cover(file)
    for built in found:
        rows = list(_of_model(file, built))
        if built.device == "meta" and any(row.status == "error" for row in rows):
            # A number of a meta tensor is read, which eager could guess.
            rows = list(_of_model(file, dataclasses.replace(built, device="cpu")))
        yield from rows
    for cls, why in left.items():
        yield not_built(f"{file.name} {cls}", why)


def _of_model(file: File, built: Built) -> Iterator[Row]:
    name = " ".join([file.name, built.cls, *(f"{k}={v}" for k, v in built.settings.items())])
    inputs = {
        "first": lambda model: built.inputs(model, FIRST, padded=True),
        "second": lambda model: built.inputs(model, built.second, padded=True),
    }
    how: dict[str, Any] = {"name": name, "inputs": inputs, "totals": built.totals, "device": built.device}
    for impl in built.impls:
        yield from Subject(call=impl, build=lambda impl=impl: built.build(impl), **how).rows()  # type: ignore[misc]
