"""Rows of a file: its models at two sizes, the second of which PyTorch has as symbols, with PyTorch's attention and with plain ops."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from attn_compiler.torch_private import observe as torch_observe
from tests.hf.today.model import Call, Kwargs, Model
from tests.hf.today.running import Row, Watching, described, failed
from tests.hf.whole.building import Built, cover
from tests.hf.whole.feeding import FIRST
from tests.hf.whole.files import File


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
        yield failed(_model(file, cls, "meta"), Call(name="not built", inputs=dict), "unavailable", why)


def _model(file: File, cls: str, device: str) -> Model:
    make = torch.nn.Identity
    return Model(name=f"{file.name} {cls}", package="transformers", make=make, calls=(), device=device)


def _of_model(file: File, built: Built) -> Iterator[Row]:
    for impl in built.impls:
        yield from _rows(file, built, impl)


def _rows(file: File, built: Built, impl: str) -> Iterator[Row]:
    shown = _model(file, " ".join([built.cls, *(f"{k}={v}" for k, v in built.settings.items())]), built.device)
    torch._dynamo.reset()
    watching = Watching()
    try:
        model = built.build(impl)
        compiled: Any = torch.compile(model, backend=watching)
        for name, size in (("first", FIRST), ("second", built.second)):
            call = Call(name=f"{impl}, {name}", inputs=dict)
            try:
                given = built.inputs(model, size, padded=True)
                yield _row(shown, call, compiled, given, watching, built.total)
            except Exception as error:  # noqa: BLE001 - one broken model is a row of the table, not the end of it
                yield failed(shown, call, "error", f"{type(error).__name__}: {error}")
    finally:
        torch._dynamo.reset()


def _row(shown: Model, call: Call, compiled: Any, given: Kwargs, watching: Watching, total: int) -> Row:
    """total: attentions that an eager run has."""
    started = time.perf_counter()
    watching.begin()
    with torch.no_grad(), torch_observe.breaks_told(watching, watching.left):
        compiled(**given)
    row = described(shown, call, watching, time.perf_counter() - started)
    return dataclasses.replace(row, total=max(row.total, total))
