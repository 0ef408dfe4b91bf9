"""Imports the libraries whose models the survey builds; none of them is needed to collect the tests."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch


class Unavailable(Exception):
    """The family can't be built here: a package is missing or does not import. The message is the skip reason."""


def import_package(name: str) -> ModuleType:
    """The module `name`; raises Unavailable with the reason where it does not import."""
    # Models are built from configs alone, and a family's warnings about its config say nothing about the backend.
    for variable, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("DIFFUSERS_VERBOSITY", "error"),
    ):
        os.environ.setdefault(variable, value)
    _prepare_torchvision()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"{name} does not import: {error}") from error


@functools.cache
def _prepare_torchvision() -> Any:
    """Make a torchvision that was built for another torch importable; transformers, diffusers and timm import it if it is there.

    A torchvision wheel holds kernels for one build of torch. Next to another (a CUDA wheel with a CPU torch) they don't load,
    and its import stops at describing operators that were never declared. Declaring those two is enough: no model here calls
    them. The library is returned because its declarations end with it.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return None
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
